"""torch's product without scales and the launch that scales it, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from fp8pass.errors import UnsupportedError
from fp8pass.ops.linear import dequantised_product

FP8, BF16, F16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
triton_rescale: ModuleType


@pytest.fixture(scope="module", autouse=True)
def _interpreted_kernels(interpreted: Callable[[str], ModuleType]) -> None:
    global triton_rescale
    triton_rescale = interpreted("rescale")


def made(m: int, n: int, k: int, rows: bool, columns: bool) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(m * 7919 + n * 31 + k)
    a, w = ((torch.randn(size, k, generator=g) * 16).to(FP8) for size in (m, n))
    sa = torch.rand((m, 1) if rows else (), generator=g) + 0.01
    sb = torch.rand((1, n) if columns else (), generator=g) + 0.01
    return a, w.t(), sa, sb


@pytest.mark.parametrize("scales", [(True, True), (False, True), (True, False), (False, False)])
@pytest.mark.parametrize("size", [(1, 16, 32), (3, 528, 64), (17, 1040, 48), (0, 16, 16)])
def test_one_rounding_of_the_exact_product(
    size: tuple[int, int, int], scales: tuple[bool, bool]
) -> None:
    m, n, k = size
    a, b, sa, sb = made(*size, *scales)
    for dtype, bias in ((BF16, None), (F16, torch.randn(n).to(F16)), (F32, torch.randn(n))):
        out = triton_rescale.scaled_mm(a, b, sa, sb, bias, dtype, False)
        assert out.shape == (m, n) and out.dtype == dtype and out.is_contiguous()
        exact = dequantised_product(a, b, sa, sb, bias, torch.float64)
        size_of = a.double().abs() @ b.double().abs() * sa * sb + 1
        allowed = torch.finfo(dtype).eps * exact.abs() / 2 + size_of * 2.0**-19
        assert bool(((out.double() - exact).abs() <= allowed).all())


def test_what_does_not_fit_is_refused() -> None:
    a, b, sa, sb = made(4, 32, 32, True, True)
    run = triton_rescale.scaled_mm
    assert run(a, b, sa, sb, None, BF16, False).shape == (4, 32)
    for bad in (
        (a, b, sa[:3], sb, None), (a, b, sa, sb[:, :5], None), (a, b, sa.double(), sb, None),
        (a, b, sa, sb, torch.zeros(7)),
    ):  # fmt: skip
        with pytest.raises(UnsupportedError, match="does not take"):
            run(*bad, BF16, False)
