"""vLLM's fused norms, SiLU·mul and quantises on a GPU, where its libraries are there, against
float64 and against the references.

The compiled libraries are loaded from the folder that FP8PASS_TEST_VLLM_LIBS names (``_C.abi3.so``
if there is one, and ``_C_stable_libtorch.abi3.so``, as they lie in vLLM's wheel).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from producer_cases import BF16, F16, HALF_LEAST, HALF_STEP, arguments, exact
from producer_checks import STEP, assert_layouts, code_steps

import fp8pass
from fp8pass.lowerings import vllm_producers as vllm
from fp8pass.ops import SPECS, QuantForm, dynamic_form, static_form
from fp8pass.report import reports

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="no GPU with FP8",
)

ROWS = (0, 1, 3, 16, 17, 255, 300, 2048)
WIDTHS = (128, 576, 1536, 4096, 5120, 8192, 14336)
STATIC = replace(static_form(), apply="mul_recip")
TOKEN = replace(dynamic_form("token"), floor_value=vllm.FLOOR)
TENSOR = replace(dynamic_form("tensor"), floor="none", floor_value=0.0)
GROUP = replace(dynamic_form("group128"), floor_value=vllm.FLOOR)
GROUP_ALONE = replace(dynamic_form("group128"), floor="amax", floor_value=1e-10)
CASES = [
    *((op, form) for op in ("rms_norm_quant", "add_rms_norm_quant")
      for form in (STATIC, TOKEN, GROUP, replace(GROUP, granularity="group64"))),
    ("silu_mul_quant", STATIC),
    ("silu_mul_quant", GROUP),
    *(("quantize", form) for form in (STATIC, TENSOR, TOKEN, GROUP_ALONE)),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _libraries() -> None:
    folder = os.environ.get("FP8PASS_TEST_VLLM_LIBS")
    if folder and not hasattr(torch.ops._C, "rms_norm_static_fp8_quant"):
        for name in ("_C.abi3.so", "_C_stable_libtorch.abi3.so"):
            if (Path(folder) / name).exists():
                torch.ops.load_library(str(Path(folder) / name))
    if not hasattr(torch.ops._C, "rms_norm_static_fp8_quant"):
        pytest.skip("set FP8PASS_TEST_VLLM_LIBS to the folder of vLLM's compiled libraries")


def close_to_float64(op: str, args: tuple[Any, ...], got: Any, quant: QuantForm) -> None:
    """Codes times scale: half a step of fp8, and some roundings of the model dtype."""
    if not got[0].numel():
        return
    given = args[{"quantize": 1, "silu_mul_quant": 2}.get(op, -5)]
    scale = (got[1] if given is None else given).double()
    if quant.group is not None:
        scale = scale.repeat_interleave(quant.group, -1)
    want = exact(op, args)
    error = (got[0].double() * scale - want).abs()
    bound = want.abs() * (HALF_STEP + 4 * STEP[args[0].dtype]) + scale * HALF_LEAST * 1.01
    inside = (want.abs() < 448 * scale).expand_as(error)
    assert bool((error <= bound)[inside].all()), float((error / bound)[inside].max())
    clipped = ~inside & (want.abs() > 0)
    assert bool((got[0].double().abs()[clipped] >= 416).all())


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("op", "quant"), CASES, ids=str)
def test_grid(op: str, quant: QuantForm, width: int, dtype: torch.dtype) -> None:
    if quant.group is not None and width % quant.group:
        pytest.skip("no whole groups")
    for rows in ROWS:
        args = arguments(op, rows, width, dtype, quant)
        kept = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        got = getattr(vllm, op)(*args)
        if rows or quant is not TENSOR:
            want = SPECS[op].reference(*args)
            assert_layouts(got, want)
        for one, other in zip(args, kept, strict=True):
            assert not isinstance(one, torch.Tensor) or torch.equal(one, other)
        if not rows:
            continue
        close_to_float64(op, args, got, quant)
        steps = code_steps(got[0], want[0])
        if quant is not TENSOR:  # of a row of zeros: its scale has no floor
            assert int(steps.max()) <= (1 if quant.static else 2)
        # Values are checked above; so many codes may be another (6.6 % seen on an H200).
        assert float((steps > 0).float().mean()) < 0.1
        torch.testing.assert_close(got[1], want[1], rtol=2**-6, atol=1e-6)
        if op == "add_rms_norm_quant":
            assert torch.equal(got[3], args[0] + args[1])


def test_a_bound_of_the_scale() -> None:
    args = arguments("quantize", 17, 4096, BF16, replace(TOKEN, upper="amax"))
    bound = torch.tensor(2.0, device="cuda")
    got, want = vllm.quantize(*args, bound), SPECS["quantize"].reference(*args, bound)
    torch.testing.assert_close(got[1], want[1])
    assert int(code_steps(got[0], want[0]).max()) <= 1


def test_odd_views() -> None:
    """Strided rows, and halves that are not of one tensor."""
    x = torch.randn(33, 1024, device="cuda").to(BF16)
    for part in (x[:, 1:513], x[::2, :512], x.t()[:512].t()):
        got = vllm.quantize(part, None, str(TOKEN))
        want = SPECS["quantize"].reference(part, None, str(TOKEN))
        assert int(code_steps(got[0], want[0]).max()) <= 1
    act = ("div,bfloat16,bfloat16", str(GROUP), False)
    for gate, up in (x.chunk(2, -1), reversed(x.chunk(2, -1)), (x[:, 1:513], x[:, 512:])):
        args = (gate, up, None, *act)
        close_to_float64("silu_mul_quant", args, vllm.silu_mul_quant(*args), GROUP)


@pytest.mark.parametrize(("op", "quant"), CASES, ids=str)
def test_cuda_graph(op: str, quant: QuantForm) -> None:
    """Captured once, replayed with other data: nothing read on the host, nothing kept."""
    args = arguments(op, 17, 4096, BF16, quant)
    call = getattr(torch.ops.fp8pass, f"vllm_{op}")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call(*args)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(*args)
    other = arguments(op, 17, 4096, BF16, quant, seed=9)
    for one, new in zip(args, other, strict=True):
        if isinstance(one, torch.Tensor):
            one.copy_(new)
    graph.replay()
    for one, new in zip(out, call(*other), strict=True):
        assert torch.equal(one, new)


def test_in_a_compiled_model() -> None:
    def fn(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = x.float()
        h = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        y = h.to(x.dtype) * weight
        scale = (y.float().abs().amax(-1, keepdim=True) / 448.0).clamp(min=vllm.FLOOR)
        return (y.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale

    x, weight = (torch.randn(*shape, device="cuda").to(BF16) for shape in ((17, 4096), (4096,)))
    with torch.no_grad():
        compiled = torch.compile(
            fn, backend=fp8pass.fp8pass_backend, options={"fp8pass.prefer": "vllm"}
        )
        q, scale = compiled(x, weight)
        wanted = fn(x, weight)
    (site,) = reports()[-1].select(status="fused")
    assert site.kernel == "vllm"
    torch.testing.assert_close(scale, wanted[1], rtol=2**-7, atol=0)
    assert float((code_steps(q, wanted[0]) > 0).float().mean()) < 0.02
