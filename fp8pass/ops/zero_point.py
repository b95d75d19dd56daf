"""The quantise with a zero point: the reference of the asymmetric forms of :class:`QuantForm`."""

from __future__ import annotations

import torch

from fp8pass.ops.quant_form import QuantForm


def affine_scale(x: torch.Tensor, form: QuantForm) -> tuple[torch.Tensor, torch.Tensor]:
    """``(scale, zero point)`` of ``x [..., K]`` by a dynamic form, float32; 0-d or ``[..., 1]``."""
    wide, made = x.to(torch.float32), form.scale_dtype
    if form.granularity == "tensor":
        low, high = wide.amin(), wide.amax()
    else:
        low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    low, high = low.to(made), high.to(made)
    if form.span == "zero":
        low = torch.minimum(low, torch.zeros_like(low))
        high = torch.maximum(high, torch.zeros_like(high))
    elif form.span == "clamped":
        low, high = low.clamp(max=0), high.clamp(min=0)
    scale = (high - low) / form.qmax if form.scale == "div" else (high - low) * form.qmax
    if form.floor == "scale":
        scale = scale.clamp(min=form.floor_value)
    elif form.floor == "scale_add":
        scale = scale + form.floor_value
    zero = low / scale
    zero = form.lo - zero.round() if form.zero == "lo_round" else (form.lo - zero).round()
    if form.zero_clamp == "codes":
        zero = zero.clamp(form.lo, form.hi)
    return scale.to(torch.float32), zero.to(form.zero_dtype).to(torch.float32)


def apply_affine(
    x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, form: QuantForm
) -> torch.Tensor:
    """Codes of ``x`` for a scale and a zero point, float32, one element or ``[..., 1]`` each."""
    value = x.to(torch.float32)
    value = value / scale if form.apply == "div" else value * scale.reciprocal()
    value = (value + zero).round() if form.zero_at == "before" else value.round() + zero
    return value.clamp(form.lo, form.hi).to(form.dtype)


def quantize_affine(
    x: torch.Tensor, pair: torch.Tensor | None, form: QuantForm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous codes, and ``[2]`` or ``[..., 2]``: the scale and the zero point, in float32."""
    if pair is not None:
        scale, zero = pair[..., 0:1], pair[..., 1:2]
        return apply_affine(x, scale, zero, form).contiguous(), pair
    scale, zero = affine_scale(x, form)
    q = apply_affine(x, scale, zero, form).contiguous()
    if form.granularity == "tensor":
        return q, torch.stack((scale, zero))
    return q, torch.cat((scale, zero), -1)
