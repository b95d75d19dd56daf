"""What the weight-only Triton product compiles to, without a GPU: sm80, sm90 and ROCm."""

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
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ROUNDED = "weight,bfloat16,bfloat16,inside"
#: Shared memory of a program on sm86, sm89 and sm120, and local memory on ROCm.
SMALLEST = {"cuda": 99 * 1024, "hip": 64 * 1024}


def compile_for(kernels: Any, arch: Any, m: int, form: str, kind: str, hardware: bool) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend = "hip" if isinstance(arch, str) else "cuda"
    tile = kernels.tile_for(m, backend == "hip")
    key = f"float8_e4m3fn/static/{kind}"
    bf16 = torch.bfloat16
    constants = dict(kernels._constants(form, key, bf16, bf16, 4096, 4096, tile, hardware))
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    pointers = {"a": "*bf16", "weight": "*u8", "scale": "*fp32", "bias": "*bf16", "out": "*bf16"}
    signature: dict[str, str] = {}
    values, aligned = {}, {}
    for i, p in enumerate(kernels._product_kernel.params):
        if p.is_constexpr:
            signature[p.name], values[(i,)] = "constexpr", constants[p.name]
        else:
            signature[p.name] = pointers.get(p.name, "i32")
            if p.name in pointers or p.name in ("n", "k", "a_pitch", "pitch"):
                aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernels._product_kernel, signature, values, aligned)
    target = GPUTarget(backend, arch, 32 if backend == "cuda" or "gfx11" in arch else 64)
    made = triton.compile(source, target=target, options=options)
    assert made.metadata.shared <= SMALLEST[backend]
    return made


@pytest.mark.parametrize("kind", ["channel", "group128x128"])
@pytest.mark.parametrize("form", ["", ROUNDED])
@pytest.mark.parametrize(("arch", "hardware"), [(90, True), (80, False)])
@pytest.mark.parametrize("m", [1, 64, 1024])
def test_cuda(
    compilable: Callable[[str], ModuleType], tmp_path: Path, m: int, arch: int, hardware: bool,
    form: str, kind: str,
) -> None:  # fmt: skip
    """Tensor cores, tiles of codes in the pipeline, and nothing spilled."""
    if not (TOOLS / "ptxas").exists():
        pytest.skip("this build of Triton has no ptxas")
    made = compile_for(compilable("w8a16"), arch, m, form, kind, hardware)
    path = tmp_path / "kernel.cubin"
    path.write_bytes(made.asm["cubin"])
    text = subprocess.run(
        [TOOLS / "nvdisasm", path], capture_output=True, text=True, check=True
    ).stdout
    found = Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_]+)", text))
    assert found["LDL"] + found["STL"] == 0
    assert found["HMMA"] + found["HGMMA"] > 0 and found["LDGSTS"] > 0


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx1100"])
def test_rocm(compilable: Callable[[str], ModuleType], arch: str) -> None:
    if "amd" not in triton.backends.backends:
        pytest.skip("this build of Triton has no compiler for ROCm")
    for m, form in ((1, ""), (128, ROUNDED)):
        compile_for(compilable("w8a16"), arch, m, form, "channel", False)
