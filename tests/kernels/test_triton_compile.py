"""What the Triton producers compile to for sm90: no GPU is needed to see that the code is right.

Each kernel as the launcher would call it, through Triton's own compiler and ptxas. The numbers of a
GPU are in tests/gpu.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from graphs import vector

from fp8pass.ops import ActForm, QuantForm, dynamic_form, static_form

triton = pytest.importorskip("triton")

E4 = torch.float8_e4m3fn
BF16, F16 = torch.bfloat16, torch.float16
STATIC, TOKEN, TENSOR = (
    str(f) for f in (static_form(), dynamic_form("token"), dynamic_form("tensor"))
)
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Compiled:
    """One kernel for sm90, and what its code consists of."""

    def __init__(self, kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

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
                signature[p.name] = "fp32" if isinstance(value, float) else "i32"
                if p.name.endswith("pitch") and value % 16 == 0:
                    aligned[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(kernel, signature, values, aligned)
        options = {"num_warps": constants["num_warps"]}
        self.name: str = kernel.__name__
        self.asm = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm

    def instructions(self, folder: Path) -> Counter[str]:
        """How often each instruction stands in the code for the hardware."""
        path = folder / "kernel.cubin"
        path.write_bytes(self.asm["cubin"])
        text = subprocess.run(
            [TOOLS / "nvdisasm", path], capture_output=True, text=True, check=True
        ).stdout
        found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]+)", text)
        return Counter(name for name in found if name != "NOP")


@pytest.fixture
def compiled(
    compilable: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[Compiled]]:
    """``compiled("norm", "rms_norm_quant", *args)``: what that call would launch on an H200."""
    if not (TOOLS / "ptxas").exists():
        pytest.skip("this build of Triton has no ptxas")

    def call(module: str, function: str, *args: Any) -> list[Compiled]:
        kernels = compilable(module)
        launched: list[Compiled] = []

        def launch(
            kernel: Any, programs: int, device: Any, *operands: Any, **constants: Any
        ) -> None:
            launched.append(Compiled(kernel, operands, {**constants, "OVERLAP": True}))

        monkeypatch.setattr(kernels.host, "launch", launch)
        getattr(kernels, function)(*args)
        return launched

    return call


def rows(count: int, width: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(count, width, dtype=dtype)


def good(kernel: Compiled, folder: Path, loads: int, stores: int) -> Counter[str]:
    """Full-width access, one layout, nothing spilled; returns the instructions."""
    found = kernel.instructions(folder)
    assert kernel.asm["ttgir"].count("ttg.convert_layout") == 0, kernel.name
    assert sum(n for name, n in found.items() if name.startswith(("LDL", "STL"))) == 0, kernel.name
    wide = [n for name, n in found.items() if re.match(r"LDG\.E\.128", name)]
    assert sum(wide) == loads, (kernel.name, found)
    codes = found["STG.E.64"] + found["STG.E.128"]
    assert codes == stores, (kernel.name, found)
    # value by value conversions to 16 bits, a quarter of the speed of packed ones
    assert found["F2F.BF16.F32"] + found["F2F.F16.F32"] == 0, kernel.name
    assert found["ACQBULK"] == 1 and found["PREEXIT"] == 1
    return found


FORMS = ("mean,rsqrt,after_cast,bfloat16", "mean,rsqrt,before_cast,bfloat16")


@pytest.mark.parametrize("form", FORMS)
def test_norm(compiled: Callable[..., list[Compiled]], form: str, tmp_path: Path) -> None:
    x, w = rows(2048, 4096), vector(4096)
    (kernel,) = compiled("norm", "rms_norm_quant", x, w, None, 1e-6, form, TOKEN, False)
    found = good(kernel, tmp_path, loads=8, stores=4)
    assert found["F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C"] == 16
    # 32 values a thread; of 8 divisions to a vector each would take dozens of instructions
    assert sum(found.values()) < 32 * 22


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_residual_norm(
    compiled: Callable[..., list[Compiled]], dtype: torch.dtype, tmp_path: Path
) -> None:
    x, w = rows(2048, 8192, dtype), vector(8192, dtype)
    form = f"mean,rsqrt,after_cast,{str(dtype).removeprefix('torch.')}"
    args = (x, x, w, torch.ones(()), 1e-6, form, STATIC, False)
    (kernel,) = compiled("norm", "add_rms_norm_quant", *args)
    good(kernel, tmp_path, loads=12, stores=8)


def test_norm_in_two_passes(compiled: Callable[..., list[Compiled]], tmp_path: Path) -> None:
    x, w = rows(2048, 5120), vector(5120)
    first, second = compiled("norm", "rms_norm_quant", x, w, None, 1e-6, FORMS[0], TENSOR, False)
    good(first, tmp_path, loads=10, stores=0)
    good(second, tmp_path, loads=4, stores=2)


def test_activation(compiled: Callable[..., list[Compiled]], tmp_path: Path) -> None:
    gate, up = rows(2048, 2 * 14336).chunk(2, -1)
    form = "div,bfloat16,bfloat16"
    (kernel,) = compiled("activation", "silu_mul_quant", gate, up, None, form, TOKEN, False)
    found = good(kernel, tmp_path, loads=14, stores=7)
    assert found["MUFU.EX2"] == 56 and found["MUFU.RCP"] <= 58
    assert sum(found.values()) < 56 * 25
    args = (gate, up, torch.ones(()), form, STATIC, False)
    (kernel,) = compiled("activation", "silu_mul_quant", *args)
    good(kernel, tmp_path, loads=4, stores=2)


@pytest.mark.parametrize("act", ActForm.ACTS)
def test_every_activation(
    compiled: Callable[..., list[Compiled]], tmp_path: Path, act: str
) -> None:
    """With an up and without, each step rounded and not; nothing is spilled."""
    gate, up = rows(2048, 2 * 4096).chunk(2, -1)
    for form in (f"{act},bfloat16,bfloat16", f"{act},bfloat16,bfloat16,bfloat16"):
        for other in (up, None) if act != "gpt_oss" else (up,):
            for quant, scale in ((TOKEN, None), (STATIC, torch.ones(()))):
                args = (gate, other, scale, form, quant, False)
                (kernel,) = compiled("activation", "act_mul_quant", *args)
                found = kernel.instructions(tmp_path)
                assert not {n for n in found if n.startswith(("STL", "LDL"))}, found
                # general divisions: the row's scale, and SiLU in steps of bf16
                steps = act == "div" and form.count("bfloat16") == 3
                assert steps or found["CALL.REL.NOINC"] <= 2, found


def test_activation_of_few_rows_loads_first(
    compiled: Callable[..., list[Compiled]], tmp_path: Path
) -> None:
    gate, up = rows(1, 2 * 14336).chunk(2, -1)
    args = (gate, up, torch.ones(()), "div,bfloat16,bfloat16", STATIC, False)
    (kernel,) = compiled("activation", "silu_mul_quant", *args)
    good(kernel, tmp_path, loads=2, stores=1)
    code = kernel.asm["ptx"]
    assert code.rindex("ld.volatile.global.v4") < code.index("ex2.approx")


def test_quantize(compiled: Callable[..., list[Compiled]], tmp_path: Path) -> None:
    x = rows(2048, 4096)
    (kernel,) = compiled("quantize", "quantize", x, torch.ones(()), STATIC)
    good(kernel, tmp_path, loads=2, stores=2)
    (kernel,) = compiled("quantize", "quantize", x, None, TOKEN)
    good(kernel, tmp_path, loads=4, stores=4)
    first, second = compiled("quantize", "quantize", x, None, TENSOR)
    good(first, tmp_path, loads=2, stores=0)
    good(second, tmp_path, loads=2, stores=2)


def test_the_number_of_rows_compiles_nothing_new(compilable: Callable[[str], ModuleType]) -> None:
    """Beyond the two launch shapes of a width; nor does epsilon."""
    kernels = compilable("norm")
    fixed = {p.name for p in kernels._norm_rows.params if p.do_not_specialize}
    assert fixed == {"rows", "scale_pitch", "group_stride"}
    shapes = {kernels.host.row_shape(4096, n) for n in range(1, 5000)}
    assert len(shapes) <= 2
    constants = [
        kernels.host.quant_constants(form, False) is kernels.host.quant_constants(form, False)
        for form in (STATIC, TOKEN, TENSOR)
    ]
    assert all(constants)


def test_forms_are_parsed_once(compilable: Callable[[str], ModuleType]) -> None:
    host = compilable("launch")
    token = QuantForm.parse(TOKEN)
    assert host.quant_constants(TOKEN, False)["FACTOR"] == host.reciprocal(token.qmax)
    assert host.reciprocal(448.0) == float((1 / torch.tensor(448.0)).item())


#: Each value of a norm's form that the tests above do not have, at least once.
OTHER_FORMS = (
    "sum_mul,rsqrt,x_first,bfloat16,eps=max",
    "norm_div,recip_sqrt,root_first,bfloat16,eps=outside",
    "mean,div_sqrt,root_first,bfloat16,eps=outside_max",
    "mean,div_sqrt,x_first,bfloat16",
)


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_other_forms_of_a_norm(
    compiled: Callable[..., list[Compiled]], tmp_path: Path, form: str
) -> None:
    rest = (vector(2048, BF16), None, 1e-6, form)
    for quant, kernels in ((TOKEN, 1), (TENSOR, 2)):
        made = compiled("norm", "rms_norm_quant", rows(512, 2048), *rest, quant, False)
        assert len(made) == kernels
        for kernel in made:
            found = kernel.instructions(tmp_path)
            spilled = sum(n for name, n in found.items() if name.startswith(("LDL", "STL")))
            assert spilled == 0, (form, kernel.name)


def test_sum_that_is_rounded_for_its_readers_only(
    compiled: Callable[..., list[Compiled]], tmp_path: Path
) -> None:
    form = "mean,rsqrt,after_cast,bfloat16,sum=float32"
    x, residual, w = rows(512, 2048), rows(512, 2048), vector(2048, BF16)
    (kernel,) = compiled(
        "norm", "add_rms_norm_quant", x, residual, w, None, 1e-6, form, TOKEN, False
    )
    found = kernel.instructions(tmp_path)
    assert sum(n for name, n in found.items() if name.startswith(("LDL", "STL"))) == 0
    # with a scale per tensor the sum is made beforehand, in float32
    assert (
        len(compiled("norm", "add_rms_norm_quant", x, residual, w, None, 1e-6, form, TENSOR, 0))
        == 2
    )


@pytest.mark.parametrize("width", [4096, 8192])
@pytest.mark.parametrize(
    ("group", "layout"), [(16, "col"), (64, "tma"), (128, "row"), (256, "row")]
)
def test_groups(
    compiled: Callable[..., list[Compiled]], tmp_path: Path, width: int, group: int, layout: str
) -> None:
    """Nothing spilled, full-width access, one kernel for all layouts of the scale."""
    x, w = rows(2048, width), vector(width, BF16)
    gate, up = rows(2048, 2 * width).chunk(2, -1)
    for apply in ("div", "mul_recip"):
        quant = str(replace(dynamic_form(f"group{group}"), layout=layout, apply=apply))
        for module, op, args, loads in (
            ("quantize", "quantize", (x, None, quant), 2),
            ("norm", "rms_norm_quant", (x, w, None, 1e-6, FORMS[0], quant, True), 8),
            ("norm", "add_rms_norm_quant", (x, x, w, None, 1e-6, FORMS[0], quant, True), 12),
            ("activation", "silu_mul_quant",
             (gate, up, None, "div,bfloat16,bfloat16", quant, True), 4),
        ):  # fmt: skip
            (kernel,) = compiled(module, op, *args)
            found = kernel.instructions(tmp_path)
            assert not {n for n in found if n.startswith(("STL", "LDL"))}, (kernel.name, found)
            assert found["LDG.E.128"] == loads, (kernel.name, found)
            assert found["STG.E.64"] == (4 if module == "norm" else 2), (kernel.name, found)
