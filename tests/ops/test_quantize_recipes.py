"""Quantises beyond the usual ones, against float64: scales, strides, saturation, no rows."""

from __future__ import annotations

import pytest
import torch

from fp8pass.ops.forms import QuantForm
from fp8pass.ops.quantize import MORE_QUANT_FORMS, quantize_with, random_activation, random_scale

SHAPES = [(1, 64), (6, 64), (2, 3, 64)]


def _per_value(scale: torch.Tensor, form: QuantForm, width: int) -> torch.Tensor:
    return scale if form.group is None else scale.repeat_interleave(form.group, -1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("text", MORE_QUANT_FORMS)
def test_codes_times_scale_is_near_the_value(text: str, shape: tuple[int, ...]) -> None:
    """Within half a step of the codes, where the value is in their range."""
    form = QuantForm.parse(text)
    generator = torch.Generator().manual_seed(5)
    x = random_activation(generator, *shape)
    given = random_scale(generator, text, shape)
    q, made = quantize_with(x, given, form)
    scale = given if given is not None else made
    zero = torch.zeros(())
    if form.asymmetric:
        scale, zero = scale[..., :1], scale[..., 1:]
        assert torch.equal(zero, zero.round()) and (zero.abs() <= 128).all()
    wide = _per_value(scale.double(), form, shape[-1])
    wanted = (x.double() / wide + zero).clamp(form.lo, form.hi)
    if form.dtype == torch.int8:
        assert ((q.double() - wanted).abs() <= 0.5001).all()
    else:
        step = (wanted.abs() * 2.0**-4).clamp(min=2.0**-10) * 1.0001
        assert ((q.double() - wanted).abs() <= step).all()


@pytest.mark.parametrize("rows", [0, 1, 5, 6])
@pytest.mark.parametrize("layout", ["row", "col", "tma"])
def test_strides_of_group_scales_are_truthful(layout: str, rows: int) -> None:
    """R30: shape, strides and values, at one row and at several; R15: no rows at all."""
    text = f"float8_e4m3fn,group16,float32,div,448.0,scale,1e-12,div,-448.0,448.0,layout={layout}"
    if layout == "row":
        text = text.rpartition(",")[0]
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))
    q, scale = quantize_with(x, None, QuantForm.parse(text))
    assert q.shape == (rows, 64) and scale.shape == (rows, 4)
    apart = {"row": (4, 1), "col": (1, rows), "tma": (1, (rows + 3) // 4 * 4)}[layout]
    if rows > 1:
        assert scale.stride() == apart
    wanted = x.double().unflatten(-1, (4, 16)).abs().amax(-1) / 448
    torch.testing.assert_close(scale.double(), wanted.clamp(min=1e-12), rtol=1e-6, atol=0)
    if rows:
        flat = torch.as_strided(scale, (rows, 4), scale.stride(), scale.storage_offset())
        assert torch.equal(flat, scale)


@pytest.mark.parametrize("top", [240.0, 224.0])
def test_fnuz_saturates_at_its_own_bound(top: float) -> None:
    """R8, R10: without the clamp e4m3fnuz would give NaN."""
    text = f"float8_e4m3fnuz,tensor,float32,given,{top},none,0.0,div,-{top},{top}"
    x = torch.tensor([448.0, 500.0, 1e6, torch.inf, -torch.inf, torch.nan, -0.0])
    q, _ = quantize_with(x, torch.tensor(1.0), QuantForm.parse(text))
    values = q.float()
    assert values[:5].tolist() == [top] * 4 + [-top]
    assert values[5].isnan() and values[6] == 0


def test_power_of_two_scale() -> None:
    """R11: relative L2 error 0.0265 if codes and scale belong together, 0.376 if they do not."""
    text = "float8_e4m3fn,group128,float32,div,448.0,scale,1e-12,div,-448.0,448.0"
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))

    def error(q: torch.Tensor, scale: torch.Tensor) -> float:
        back = q.float() * scale.repeat_interleave(128, -1)
        return float((back - x).norm() / x.norm())

    plain, _ = quantize_with(x, None, QuantForm.parse(text))
    q, scale = quantize_with(x, None, QuantForm.parse(text + ",power=ceil"))
    assert error(q, scale) == pytest.approx(0.0265, abs=0.001)
    assert error(plain, scale) > 0.2
