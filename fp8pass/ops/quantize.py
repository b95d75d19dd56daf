"""``fp8pass::quantize``: static per-tensor, dynamic per-tensor and dynamic per-token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fp8pass.ops.forms import QuantForm, dynamic_form, static_form
from fp8pass.ops.library import OpSpec, contiguous_like, nothing, register

SCHEMA = "(Tensor x, Tensor? scale, str form) -> (Tensor q, Tensor scale_out)"


def dynamic_scale(x: torch.Tensor, form: QuantForm) -> torch.Tensor:
    """Dequant scale of ``x [..., K]``: float32, ``[..., 1]`` per token or 0-d per tensor.

    ``amax(|x|) / qmax`` (or times the recorded factor), with the recorded floor. The maximum of
    absolute values is exact in every dtype, so where the source upcasts makes no difference.
    """
    magnitude = x.to(torch.float32).abs()
    amax = magnitude.amax(-1, keepdim=True) if form.granularity == "token" else magnitude.amax()
    if form.floor == "amax":
        amax = amax.clamp(min=form.floor_value)
    scale = amax / form.qmax if form.scale == "div" else amax * form.qmax
    if form.floor == "scale":
        scale = scale.clamp(min=form.floor_value)
    return scale


def apply_scale(x: torch.Tensor, scale: torch.Tensor, form: QuantForm) -> torch.Tensor:
    """Codes of ``x`` for a given dequant scale; saturating, NaN stays NaN."""
    value = x.to(form.compute)
    value = value / scale if form.apply == "div" else value * scale.reciprocal()
    return value.clamp(form.lo, form.hi).to(form.dtype)


def quantize_with(
    x: torch.Tensor, scale: torch.Tensor | None, form: QuantForm
) -> tuple[torch.Tensor, torch.Tensor]:
    """The quantise of one value by a parsed form: contiguous codes, and the scale if dynamic."""
    if form.static != (scale is not None):
        raise ValueError(f"form {form} and scale {None if scale is None else 'given'} disagree")
    used = dynamic_scale(x, form) if scale is None else scale
    q = apply_scale(x, used, form).contiguous()
    return q, (used if scale is None else nothing(x, torch.float32))


def fake_quantize_with(
    x: torch.Tensor, scale: torch.Tensor | None, form: QuantForm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes of :func:`quantize_with`."""
    q = contiguous_like(x, form.dtype)
    if scale is not None:
        return q, nothing(x, torch.float32)
    shape = (*x.shape[:-1], 1) if form.granularity == "token" else ()
    return q, x.new_empty(shape, dtype=torch.float32)


def reference(
    x: torch.Tensor, scale: torch.Tensor | None, form: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``x [..., K]`` to fp8 codes.

    Args:
        x: bf16, fp16 or fp32.
        scale: float32 dequant scale with one element if ``form`` is static, else None.
        form: ``str`` of a :class:`fp8pass.ops.forms.QuantForm`.

    Returns:
        ``(q, scale_out)``: contiguous codes of the shape of ``x``; the computed float32 scale,
        ``[..., 1]`` per token or 0-d per tensor, or an empty tensor if the scale was given.

    Raises:
        OptionError: ``form`` is not in the closed list.
        ValueError: the form is static and no scale is given, or the reverse.
    """
    return quantize_with(x, scale, QuantForm.parse(form))


def fake(
    x: torch.Tensor, scale: torch.Tensor | None, form: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes of :func:`reference`."""
    return fake_quantize_with(x, scale, QuantForm.parse(form))


def random_activation(
    generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Random values over several binades, with one zero row: what a quantise has to stand."""
    x = torch.randn(shape, generator=generator) * torch.rand(shape[-1:], generator=generator) * 8
    if x.dim() > 1 and x.shape[0] > 1:
        x[0] = 0
    return x.to(dtype)


QUANT_FORMS = (str(static_form()), str(dynamic_form("token")), str(dynamic_form("tensor")))


def random_scale(generator: torch.Generator, form: str) -> torch.Tensor | None:
    """A random scale for a static form, None for a dynamic one."""
    if not QuantForm.parse(form).static:
        return None
    return torch.rand((), generator=generator) + 0.01


def inputs(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    """Argument tuples: every recipe, model dtype and rank, with 1 and 3 rows."""
    for form in QUANT_FORMS:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for shape in ((3, 64), (1, 47), (2, 3, 32)):
                x = random_activation(generator, *shape, dtype=dtype)
                yield x, random_scale(generator, form), form


SPEC = register(
    OpSpec(
        name="quantize",
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        inputs=inputs,
        tolerance=0.0,
        tolerance_reason="a maximum has no rounding, so the result does not depend on its order",
    )
)
