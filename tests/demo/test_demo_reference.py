"""The reference product against torch's own, and its place in an eager model."""

from __future__ import annotations

import pytest
import torch

from fp8pass.demo import reference
from fp8pass.nn import quantize_

FP8 = torch.float8_e4m3fn


def test_is_bit_identical_to_torch_per_tensor() -> None:
    found = reference.compare(per_channel=False)
    assert [item.shape for item in found] == list(reference.SHAPES)
    assert all(item.error == "" for item in found)
    assert [item.differing for item in found] == [0, 0, 0]


def test_is_bit_identical_to_torch_row_wise_where_torch_has_it() -> None:
    for item in reference.compare(per_channel=True):
        if torch.__version__ < "2.12":
            assert item.differing is None and item.error  # an error is reported, not hidden
        else:
            assert item.differing == 0


def test_scales_bias_and_one_rounding() -> None:
    a = torch.tensor([[1.0, 2.0], [0.5, -1.0]]).to(FP8)
    b = torch.tensor([[3.0, 1.0], [0.25, 4.0]]).to(FP8)
    out = reference.scaled_mm(
        a,
        b,
        torch.tensor([[2.0], [4.0]]),
        torch.tensor([[1.0, 0.5]]),
        bias=torch.tensor([0.5, 0.25]),
        out_dtype=torch.float32,
    )
    assert torch.equal(out, torch.tensor([[7.5, 9.25], [5.5, -6.75]]))
    with pytest.raises(NotImplementedError):
        reference.scaled_mm(a, b, torch.ones(()), torch.ones(()), out_dtype=FP8)


@pytest.mark.parametrize("recipe", ["dynamic", "dynamic_tensor"])
def test_replaces_every_product_of_an_eager_model(recipe: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.Linear(48, 16))
    exact = model.double()(x := torch.randn(4, 32, dtype=torch.float64))
    model.to(torch.bfloat16)
    quantize_(model, recipe)
    with torch.no_grad(), reference.reference_products() as mode:
        out = model(x.bfloat16()).double()
    assert mode.calls == 2
    assert (out - exact).norm() < 0.1 * exact.norm()


def test_products_in_the_models_dtype_are_rounded_once() -> None:
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(5, 64, generator=generator).bfloat16() for _ in range(2))
    with reference.reference_products():
        found = torch.nn.functional.linear(x, w)
    exact = x.double() @ w.double().t()
    step = torch.finfo(torch.bfloat16).eps
    assert found.dtype is torch.bfloat16
    assert ((found.double() - exact).abs() <= step / 2 * exact.abs() * 1.01 + 1e-5).all()
