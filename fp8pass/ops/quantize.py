"""``fp8pass::quantize``: static and dynamic; per tensor, per token and per group; fp8 and int8."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from fp8pass.ops.forms import QuantForm, dynamic_form, static_form
from fp8pass.ops.library import OpSpec, contiguous_like, nothing, register
from fp8pass.ops.zero_point import quantize_affine

SCHEMA = (
    "(Tensor x, Tensor? scale, str form, Tensor? scale_ub=None) -> (Tensor q, Tensor scale_out)"
)


def dynamic_scale(
    x: torch.Tensor, form: QuantForm, scale_ub: torch.Tensor | None = None
) -> torch.Tensor:
    """Dequant scale of ``x [..., K]``: float32; 0-d, ``[..., 1]`` or ``[..., K / n]``.

    See :class:`QuantForm` for the expression. The maximum of absolute values is exact in every
    dtype, so where the source upcasts makes no difference.
    """
    inverse = inverse_scale(x, form, scale_ub) if form.scale == "inverse" else None
    return _dequant_scale(x, form, scale_ub) if inverse is None else inverse.reciprocal()


def inverse_scale(
    x: torch.Tensor, form: QuantForm, scale_ub: torch.Tensor | None = None
) -> torch.Tensor:
    """``r = qmax / amax`` of the form ``inverse``: what values are multiplied by, float32."""
    value = (form.qmax / _bounded_amax(x, form, scale_ub)).to(torch.float32)
    if form.power == "floor":
        value = torch.exp2(torch.floor(torch.log2(value)))
    return value


def _at_most(
    value: torch.Tensor, form: QuantForm, where: str, scale_ub: torch.Tensor | None
) -> torch.Tensor:
    """``min(value, scale_ub)`` if that is ``where`` the form has its upper bound; NaN stays."""
    if scale_ub is None or form.upper != where:
        return value
    return torch.minimum(value, scale_ub.reshape(()))


def _bounded_amax(
    x: torch.Tensor, form: QuantForm, scale_ub: torch.Tensor | None = None
) -> torch.Tensor:
    """The largest ``|x|`` of each group in the dtype of the scale, within its bounds."""
    magnitude = x.to(torch.float32).abs()
    group = form.group
    if group is not None:
        amax = magnitude.unflatten(-1, (x.shape[-1] // group, group)).amax(-1)
    else:
        amax = (
            magnitude.amax() if form.granularity == "tensor" else magnitude.amax(-1, keepdim=True)
        )
    amax = amax.to(form.scale_dtype)
    if form.ceiling != math.inf:
        amax = amax.clamp(max=form.ceiling)
    amax = _at_most(amax, form, "amax", scale_ub)
    if form.floor == "amax":
        amax = amax.clamp(min=form.floor_value)
    elif form.floor == "amax_add":
        amax = amax + form.floor_value
    elif form.floor == "amax_zero":
        amax = torch.where(amax > 0, amax, form.floor_value)
    return _at_most(amax, form, "amax_last", scale_ub)


def _dequant_scale(
    x: torch.Tensor, form: QuantForm, scale_ub: torch.Tensor | None = None
) -> torch.Tensor:
    amax = _bounded_amax(x, form, scale_ub)
    scale = amax / form.qmax if form.scale == "div" else amax * form.qmax
    scale = _at_most(scale, form, "scale", scale_ub)
    if form.floor == "scale":
        scale = scale.clamp(min=form.floor_value)
    elif form.floor == "scale_add":
        scale = scale + form.floor_value
    scale = _at_most(scale, form, "scale_last", scale_ub)
    if form.power in ("ceil", "ceil_e8m0"):
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    scale = scale.to(torch.float32)
    if form.power.endswith("e8m0"):
        scale = scale.to(torch.float8_e8m0fnu).to(torch.float32)
    return scale


def apply_scale(x: torch.Tensor, scale: torch.Tensor, form: QuantForm) -> torch.Tensor:
    """Codes of ``x`` for a given dequant scale (for ``mul_inverse``: for ``r``); NaN stays NaN.

    ``scale``: one element, ``[..., 1]``, or ``[..., K / n]`` for groups.
    """
    group = form.group
    value = x.to(form.compute)
    if group is not None:
        value, scale = value.unflatten(-1, (x.shape[-1] // group, group)), scale.unsqueeze(-1)
    if form.apply == "div":
        value = value / scale
    elif form.apply == "mul_recip":
        value = value * scale.reciprocal()
    else:
        value = value * scale
    if form.dtype == torch.int8:
        value = value.round()
    value = value.clamp(form.lo, form.hi).to(form.dtype)
    return value if group is None else value.flatten(-2)


def quantize_with(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    form: QuantForm,
    scale_ub: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The quantise of one value by a parsed form: contiguous codes, and the scale if dynamic."""
    if (form.upper == "none") != (scale_ub is None):
        raise ValueError(
            f"form {form} and scale_ub {None if scale_ub is None else 'given'} disagree"
        )
    if form.static != (scale is not None):
        raise ValueError(f"form {form} and scale {None if scale is None else 'given'} disagree")
    if form.asymmetric:
        q, pair = quantize_affine(x, scale, form)
        return q, pair if scale is None else nothing(x, torch.float32)
    if scale is not None:
        return apply_scale(x, scale, form).contiguous(), nothing(x, torch.float32)
    if form.scale == "inverse":
        factor = inverse_scale(x, form, scale_ub)
        q, scale = apply_scale(x, factor, form), factor.reciprocal()
    else:
        scale = dynamic_scale(x, form, scale_ub)
        floored = form.floor == "divisor"
        q = apply_scale(x, scale.clamp(min=form.floor_value) if floored else scale, form)
    if form.layout == "row" and scale.numel():
        return q.contiguous(), scale
    # also without rows, where the strides of a quotient are not those of its operand
    return q.contiguous(), empty_scale(x, form).copy_(scale)


def empty_scale(x: torch.Tensor, form: QuantForm) -> torch.Tensor:
    """A scale of a dynamic quantise of ``x`` without data, with the strides of the form's layout.

    Column-major: the rows of a value of any rank count as one dim ``M``, ``M`` next to each other;
    with ``tma`` columns are ``M`` rounded up to 4 apart (16 bytes, what TMA asks for).
    """
    shape = form.scale_shape(tuple(x.shape))
    if form.layout == "row":
        return x.new_empty(shape, dtype=torch.float32)
    rows = math.prod(shape[:-1])
    apart = rows if form.layout == "col" else (rows + 3) // 4 * 4
    strides: list[int] = []
    step = 1
    for size in reversed(shape[:-1]):
        strides.insert(0, step)
        step = step * size
    return x.new_empty_strided(shape, (*strides, apart), dtype=torch.float32)


def fake_quantize_with(
    x: torch.Tensor, scale: torch.Tensor | None, form: QuantForm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes of :func:`quantize_with`."""
    q = contiguous_like(x, form.dtype)
    if scale is not None:
        return q, nothing(x, torch.float32)
    return q, empty_scale(x, form)


def reference(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    form: str,
    scale_ub: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``x [..., K]`` to fp8 or int8 codes.

    Args:
        x: bf16, fp16 or fp32.
        scale: float32 dequant scale if ``form`` is static, else None: one element per tensor,
            ``[..., 1]`` per token, ``[..., K / n]`` per group. With a zero point ``[2]`` or
            ``[..., 2]``: the scale and the zero point as float32.
        form: ``str`` of a :class:`fp8pass.ops.forms.QuantForm`.
        scale_ub: the upper bound of a form that has one in ``upper``: one element, in the dtype of
            the scale's arithmetic.

    Returns:
        ``(q, scale_out)``: contiguous codes of the shape of ``x``; the computed float32 scale,
        0-d per tensor, ``[..., 1]`` per token or ``[..., K / n]`` per group with the strides of the
        form's layout, or an empty tensor if the scale was given. With a zero point ``[2]`` or
        ``[..., 2]``, as it is given.

    Raises:
        OptionError: ``form`` is not in the closed list.
        ValueError: the form is static and no scale is given, or the reverse; the same of
            ``scale_ub``.
    """
    return quantize_with(x, scale, QuantForm.parse(form), scale_ub)


def fake(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    form: str,
    scale_ub: torch.Tensor | None = None,
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
_AFFINE = replace(
    dynamic_form("tensor"), dtype=torch.int8, qmax=255.0, lo=-128.0, hi=127.0, floor="scale",
    floor_value=1e-5, zero="lo_round",
)  # fmt: skip
#: Forms beyond the usual ones, for widths that are a multiple of 32.
MORE_QUANT_FORMS = tuple(
    str(form)
    for form in (
        dynamic_form("group32"),
        replace(dynamic_form("group32"), layout="col", power="ceil"),
        replace(dynamic_form("group32"), power="e8m0"),
        replace(dynamic_form("token"), power="ceil_e8m0"),
        replace(dynamic_form("group16"), layout="tma", ceiling=3.0, floor="amax_add"),
        replace(dynamic_form("token"), scale="inverse", apply="mul_inverse", floor="amax",
                scale_dtype=torch.float64),
        replace(dynamic_form("tensor"), scale="inverse", apply="mul_inverse", floor="amax",
                power="floor"),
        replace(dynamic_form("token"), scale_dtype=torch.bfloat16, floor="scale_add",
                apply="mul_recip"),
        replace(dynamic_form("token"), dtype=torch.int8, qmax=127.0, lo=-128.0, hi=127.0),
        replace(static_form(), dtype=torch.int8, qmax=127.0, lo=-128.0, hi=127.0),
        replace(static_form(), granularity="token"),
        replace(static_form(), granularity="group16"),
        replace(_AFFINE, scale="given", zero="given", floor="none", floor_value=0.0),
        _AFFINE,
        replace(_AFFINE, granularity="token", zero="round_lo", zero_clamp="codes", zero_at="before",
                zero_dtype=torch.int8, span="zero", apply="mul_recip"),
        replace(_AFFINE, granularity="token", scale_dtype=torch.bfloat16, span="zero",
                zero_clamp="codes", zero_dtype=torch.int32, floor="scale_add"),
        replace(_AFFINE, granularity="token", span="clamped"),
    )
)  # fmt: skip

#: Forms with an upper bound that is a tensor.
UPPER_QUANT_FORMS = (
    replace(dynamic_form("token"), upper="amax"),
    replace(dynamic_form("tensor"), upper="scale", scale_dtype=torch.bfloat16),
    replace(dynamic_form("group16"), upper="scale_last", layout="col", power="ceil"),
    replace(dynamic_form("token"), scale="inverse", apply="mul_inverse", floor="amax",
            upper="amax_last"),
)  # fmt: skip


def random_scale(
    generator: torch.Generator, form: str, shape: tuple[int, ...] = ()
) -> torch.Tensor | None:
    """A random scale for a static form of a value of ``shape``, None for a dynamic one."""
    parsed = QuantForm.parse(form)
    if not parsed.static:
        return None
    scale = torch.rand(parsed.scale_shape(shape), generator=generator) + 0.01
    if parsed.asymmetric:
        scale[..., 1] = (scale[..., 1] * 200 - 100).round()
    return scale


def inputs(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    """Argument tuples: every recipe, model dtype and rank, with 1 and 3 rows."""
    for form in QUANT_FORMS:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for shape in ((3, 64), (1, 47), (2, 3, 32)):
                x = random_activation(generator, *shape, dtype=dtype)
                yield x, random_scale(generator, form), form
    for form in MORE_QUANT_FORMS:
        for dtype in (torch.bfloat16, torch.float32):
            for shape in ((3, 64), (1, 32), (2, 3, 32)):
                x = random_activation(generator, *shape, dtype=dtype)
                yield x, random_scale(generator, form, shape), form
    for parsed in UPPER_QUANT_FORMS:
        for shape in ((3, 64), (1, 32), (2, 3, 32)):
            x = random_activation(generator, *shape)
            bound = torch.rand((), generator=generator) * (0.02 if "scale" in parsed.upper else 8)
            yield x, None, str(parsed), bound.to(parsed.scale_dtype)


SPEC = register(
    OpSpec(
        name="quantize",
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        inputs=inputs,
        tolerance=0.0,
        tolerance_reason="a maximum has no rounding, so the result does not depend on its order",
        kind="quantize",
        what="quantise",
    )
)
