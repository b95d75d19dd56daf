"""``torch_rescaled`` and a quantise of its own on a GPU: numbers, strides, CUDA graphs."""

from __future__ import annotations

import pytest
import torch

import fp8pass
from fp8pass.ops import dynamic_form, static_form
from fp8pass.ops.linear import dequantised_product

FP8, BF16, F16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
DEVICE = "cuda"


def made(
    m: int, n: int, k: int, rows: bool = True, columns: bool = True
) -> tuple[torch.Tensor, ...]:
    g = torch.Generator(DEVICE).manual_seed(m * 7919 + n * 31 + k)
    a, w = ((torch.randn(s, k, generator=g, device=DEVICE) * 16).to(FP8) for s in (m, n))
    # Small enough for half precision to hold every result, also of 14336 products.
    sa = torch.rand((m, 1) if rows else (), generator=g, device=DEVICE) / 8 + 0.01
    sb = torch.rand((1, n) if columns else (), generator=g, device=DEVICE) + 0.01
    return a, w.t(), sa, sb


def check(out: torch.Tensor, *args: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    a, b, sa, sb = args
    exact = dequantised_product(a, b, sa, sb, bias, torch.float64)
    size = a.double().abs() @ b.double().abs() * sa * sb + (0 if bias is None else bias.abs())
    allowed = torch.finfo(out.dtype).eps * exact.abs() + size * 2.0**-10
    assert out.is_contiguous() and bool(((out.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("scales", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize(
    "size", [(1, 16, 16), (17, 528, 48), (256, 4096, 4096), (300, 1040, 14336)]
)
def test_numbers(size: tuple[int, int, int], scales: tuple[bool, bool]) -> None:
    args = made(*size, *scales)
    run = torch.ops.fp8pass.torch_rescaled_mm
    for dtype, bias in ((BF16, None), (F16, torch.randn(size[1], device=DEVICE).to(F16)),
                        (F32, torch.randn(size[1], device=DEVICE))):  # fmt: skip
        check(run(*args, bias, dtype, False), *args, bias=bias)
    assert run(args[0][:0], args[1], args[2][:0] if scales[0] else args[2], args[3], None, BF16,
               False).shape == (0, size[1])  # fmt: skip


def test_in_a_cuda_graph_and_again() -> None:
    args = made(64, 512, 256)
    run = torch.ops.fp8pass.torch_rescaled_mm
    expected = run(*args, None, BF16, False)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(*args, None, BF16, False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*args, None, BF16, False)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


def linear(x: torch.Tensor, w: torch.Tensor, sb: torch.Tensor) -> torch.Tensor:
    wide = x.contiguous().float()
    scale = (wide.abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-12)
    q = (wide / scale).clamp(-448.0, 448.0).to(FP8)
    return torch._scaled_mm(q, w.t(), scale, sb, out_dtype=BF16)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_a_quantise_of_its_own_in_a_model(rows: int, mode: str) -> None:
    _, b, _, sb = made(1, 528, 512)
    x = torch.randn(rows, 768, device=DEVICE, dtype=BF16)
    options = {"fp8pass.prefer": "triton,torch_rescaled"}
    if mode == "reduce-overhead":
        options["triton.cudagraphs"] = True  # type: ignore[assignment]
    with torch.no_grad():
        torch._dynamo.reset()
        found = torch.compile(linear, backend=fp8pass.fp8pass_backend, options=options)
        for _ in range(3):
            out = found(x[:, :512], b.t().contiguous(), sb).clone()
        kinds = {s.kind: s.kernel for s in fp8pass.reports()[-1].sites}
        assert kinds == {"quantize": "triton", "scaled_mm": "torch_rescaled"}
        wide = x[:, :512].float()
        scale = (wide.abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-12)
        q = (wide / scale).clamp(-448.0, 448.0).to(FP8)
        check(out, q, b, scale, sb)


@pytest.mark.parametrize("form", [str(dynamic_form("token")), str(static_form())])
def test_codes_of_columns_equal_those_of_a_copy(form: str) -> None:
    x = torch.randn(37, 6144, device=DEVICE, dtype=BF16)[:, :4096]
    scale = None if "given" not in form else torch.tensor(0.01, device=DEVICE)
    q, s = torch.ops.fp8pass.triton_quantize(x, scale, form)
    wanted_q, wanted_s = torch.ops.fp8pass.triton_quantize(x.contiguous(), scale, form)
    assert torch.equal(q.view(torch.uint8), wanted_q.view(torch.uint8))
    assert torch.equal(s, wanted_s)
