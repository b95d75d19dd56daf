"""What the Triton products compile to, for every architecture they are registered for.

No GPU is needed to see that the code is accepted and that nothing is spilled.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

FP8, I8 = torch.float8_e4m3fn, torch.int8
BF16, F32 = torch.bfloat16, torch.float32
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.int32: "*i32",
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Compiled:
    """One launch, compiled for an architecture; what its code consists of."""

    def __init__(self, launcher: Any, args: tuple[Any, ...], architecture: int) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        kernel, constants = launcher._kernel, launcher._constants
        given = dict(zip((p.name for p in kernel.params), args, strict=False)) | constants
        signature, values, aligned = {}, {}, {}
        for i, p in enumerate(kernel.params):
            value = given[p.name]
            if p.is_constexpr or value is None:
                signature[p.name], values[(i,)] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[p.name] = TYPES[value.dtype]
                aligned[(i,)] = [["tt.divisibility", 16]]
            else:
                signature[p.name] = "i32"
                if not p.do_not_specialize and value % 16 == 0:
                    aligned[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(kernel, signature, values, aligned)
        names = {"num_warps", "num_stages", "launch_pdl"}
        options = {name: value for name, value in constants.items() if name in names}
        self.name: str = kernel.__name__
        compiled = triton.compile(
            source, target=GPUTarget("cuda", architecture, 32), options=options
        )
        self.asm, self.shared = compiled.asm, int(compiled.metadata.shared)

    def instructions(self, folder: Path) -> Counter[str]:
        """How often each instruction stands in the code for the hardware."""
        path = folder / "kernel.cubin"
        path.write_bytes(self.asm["cubin"])
        text = subprocess.run(
            [TOOLS / "nvdisasm", path], capture_output=True, text=True, check=True
        ).stdout
        found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]+)", text)
        return Counter(name for name in found if name != "NOP")


Launches = Callable[..., list[Compiled]]


@pytest.fixture
def launches(compilable: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> Launches:
    """``launches("block", tile or None, *args)``: what that call would launch on a GPU."""
    if not (TOOLS / "ptxas").exists():
        pytest.skip("this build of Triton has no ptxas")

    def call(module: str, tile: Any, *args: Any, architecture: int = 90) -> list[Compiled]:
        kernels = compilable(module)
        gemm = compilable("gemm")
        shared = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}[architecture] * 1024
        answer = shared - 1024, architecture == 90
        found: list[Compiled] = []

        def launch(self: Any, programs: int, *operands: Any) -> None:
            found.append(Compiled(self, operands, architecture))

        monkeypatch.setattr(compilable("dispatch").Launcher, "__call__", launch)
        for owner in (kernels, gemm):
            monkeypatch.setattr(owner, "machine", lambda device: answer)
        kernels._checked.cache_clear()
        if tile is not None:
            kernels.launch(*args, tile)
        elif module == "block":
            kernels.block_mm(*args)
        else:
            kernels.scaled_mm(*args)
        kernels._checked.cache_clear()
        for kernel in found:
            assert kernel.shared <= shared - 1024, (kernel.name, kernel.shared)
        return found

    return call


def blocks(m: int, n: int, k: int) -> tuple[Any, ...]:
    a, w = torch.empty(m, k, dtype=FP8), torch.empty(n, k, dtype=FP8)
    sa, sb = torch.empty(m, k // 128), torch.empty(n // 128, k // 128)
    return a, w.t(), sa, sb.t(), None, BF16


def tokens(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Any, ...]:
    a, w = torch.empty(m, k, dtype=dtype), torch.empty(n, k, dtype=dtype)
    return a, w.t(), torch.empty(m, 1), torch.empty(1, n), None, BF16


def unspilled(kernel: Compiled, folder: Path) -> Counter[str]:
    found = kernel.instructions(folder)
    spills = {name: n for name, n in found.items() if name.startswith(("LDL", "STL"))}
    assert not spills, (kernel.name, spills)
    return found


@pytest.mark.parametrize("m", [1, 64, 200, 4096])
@pytest.mark.parametrize("architecture", [89, 90, 100, 120])
def test_blocks(launches: Launches, tmp_path: Path, m: int, architecture: int) -> None:
    made = launches("block", None, *blocks(m, 4096, 4096), architecture=architecture)
    for kernel in made:
        found = unspilled(kernel, tmp_path)
        if architecture == 90:
            assert found["ACQBULK"] == 1 and found["PREEXIT"] == 1
    if architecture == 90:
        assert "wgmma.mma_async" in made[0].asm["ptx"]


@pytest.mark.parametrize("m", [1, 64, 200, 4096])
@pytest.mark.parametrize("architecture", [80, 86, 89, 90, 100, 120])
def test_int8(launches: Launches, tmp_path: Path, m: int, architecture: int) -> None:
    args = *tokens(m, 4096, 4096, I8), False, "int8"
    made = launches("gemm", None, *args, architecture=architecture)
    for kernel in made:
        unspilled(kernel, tmp_path)
    if architecture == 90:
        assert re.search(r"wgmma.mma_async\S*\.s32\.s8\.s8", made[0].asm["ptx"])
