"""``fp8pass::rms_norm`` and ``fp8pass::add_rms_norm``, alone and followed by a quantise."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from fp8pass.ops.forms import NormForm, QuantForm
from fp8pass.ops.library import OpSpec, contiguous_like, nothing, register
from fp8pass.ops.quantize import (
    QUANT_FORMS,
    fake_quantize_with,
    quantize_with,
    random_activation,
    random_scale,
)

_REDUCTION = "only the order of the sum of squares may differ; one step in 0.1 % of codes"


def _root_of(wide: torch.Tensor, eps: float, form: NormForm) -> torch.Tensor:
    """``1 / rms`` of float32 rows, or the rms itself if the form divides by it."""
    square = wide.pow(2)
    if form.mean == "mean":
        mean = square.mean(-1, keepdim=True)
    else:
        total = square.sum(-1, keepdim=True)
        if form.mean == "norm_div":
            total = total.sqrt().pow(2)
        width = wide.shape[-1]
        mean = total * (1.0 / width) if form.mean == "sum_mul" else total / width
    if form.eps == "inside":
        mean = mean + eps
    elif form.eps == "max":
        mean = mean.clamp_min(eps)
    if form.root == "rsqrt":
        return mean.rsqrt()
    root = mean.sqrt()
    if form.eps == "outside":
        root = root + eps
    elif form.eps == "outside_max":
        root = root.clamp_min(eps)
    return root.reciprocal() if form.root == "recip_sqrt" else root


def _normalise(
    wide: torch.Tensor, weight: torch.Tensor | None, eps: float, form: NormForm
) -> torch.Tensor:
    """``wide [..., H]`` float32 -> the normalised value, every rounding where the form says."""
    root = _root_of(wide, eps, form)
    divides = form.root == "div_sqrt"
    if weight is not None and form.weight == "x_first":
        value = wide * weight
        return (value / root if divides else value * root).to(form.mid)
    if weight is not None and form.weight == "root_first":
        return (wide * (weight / root if divides else root * weight)).to(form.mid)
    value = wide / root if divides else wide * root
    if weight is None:
        return value.to(form.mid)
    if form.weight == "after_cast":
        return (value.to(form.mid) * weight).to(_out_dtype(weight, form))
    return (value * weight).to(form.mid)


def _out_dtype(weight: torch.Tensor | None, form: NormForm) -> torch.dtype:
    if weight is not None and form.weight == "after_cast":
        return form.out or torch.promote_types(form.mid, weight.dtype)
    return form.mid


def _check(weight: torch.Tensor | None, form: NormForm) -> None:
    if (weight is None) != (form.weight == "none"):
        raise ValueError(f"norm form {form} and the weight disagree")


def _sum(
    x: torch.Tensor, residual: torch.Tensor, form: NormForm
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(what the norm reads, the sum that is returned)``."""
    if form.sum == "float32":
        wide = x.to(torch.float32) + residual.to(torch.float32)
        total = wide.to(torch.promote_types(x.dtype, residual.dtype)).contiguous()
        return wide, total.clone() if total is wide else total
    total = (x + residual).contiguous()
    return total, total


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, form: str) -> torch.Tensor:
    """RMSNorm over the last dim: ``x / sqrt(mean(x^2) + eps) * weight`` (Zhang & Sennrich, 2019).

    Args:
        x: ``[..., H]`` bf16, fp16 or fp32; computed in float32.
        weight: ``[H]`` of any of these dtypes, or None.
        eps: any value; the form says where it goes.
        form: ``str`` of a :class:`fp8pass.ops.forms.NormForm`.

    Returns:
        contiguous ``[..., H]`` of the form's dtype (promoted with the weight's if it is multiplied
        after the cast).
    """
    parsed = NormForm.parse(form)
    _check(weight, parsed)
    return _normalise(x.to(torch.float32), weight, eps, parsed).contiguous()


def fake_rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, form: str
) -> torch.Tensor:
    """Shapes of :func:`rms_norm`."""
    return contiguous_like(x, _out_dtype(weight, NormForm.parse(form)))


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    form: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``total = x + residual`` rounded to its dtype, and :func:`rms_norm` of it.

    With ``sum=float32`` in the form the norm is of the sum before that rounding.

    Returns:
        ``(y, total)``; nothing is changed in place.
    """
    source, total = _sum(x, residual, NormForm.parse(form))
    return rms_norm(source, weight, eps, form), total


def fake_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    form: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes of :func:`add_rms_norm`."""
    total = contiguous_like(x, torch.promote_types(x.dtype, residual.dtype))
    return fake_rms_norm(total, weight, eps, form), total


def rms_norm_quant(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    scale: torch.Tensor | None,
    eps: float,
    form: str,
    quant_form: str,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`rms_norm` and the quantise of its result.

    Args:
        scale: the given dequant scale of a static quantise, else None.
        quant_form: ``str`` of a :class:`fp8pass.ops.forms.QuantForm`.
        keep: return the normalised value too, for its other readers.

    Returns:
        ``(q, scale_out, y)``; ``y`` is an empty tensor unless ``keep``; ``scale_out`` is empty if
        the scale was given.
    """
    y = rms_norm(x, weight, eps, form)
    q, scale_out = quantize_with(y, scale, QuantForm.parse(quant_form))
    return q, scale_out, y if keep else nothing(y, y.dtype)


def fake_rms_norm_quant(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    scale: torch.Tensor | None,
    eps: float,
    form: str,
    quant_form: str,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes of :func:`rms_norm_quant`."""
    y = fake_rms_norm(x, weight, eps, form)
    q, scale_out = fake_quantize_with(y, scale, QuantForm.parse(quant_form))
    return q, scale_out, y if keep else nothing(y, y.dtype)


def add_rms_norm_quant(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    scale: torch.Tensor | None,
    eps: float,
    form: str,
    quant_form: str,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`add_rms_norm` and the quantise of ``y``; returns ``(q, scale_out, y, total)``."""
    source, total = _sum(x, residual, NormForm.parse(form))
    q, scale_out, y = rms_norm_quant(source, weight, scale, eps, form, quant_form, keep)
    return q, scale_out, y, total


def fake_add_rms_norm_quant(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    scale: torch.Tensor | None,
    eps: float,
    form: str,
    quant_form: str,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes of :func:`add_rms_norm_quant`."""
    total = contiguous_like(x, torch.promote_types(x.dtype, residual.dtype))
    q, scale_out, y = fake_rms_norm_quant(total, weight, scale, eps, form, quant_form, keep)
    return q, scale_out, y, total


# ---- inputs -------------------------------------------------------------------------------------

_CASES = (
    # x dtype, weight dtype (None = no weight), form
    (torch.bfloat16, torch.bfloat16, "mean,rsqrt,after_cast,bfloat16"),
    (torch.bfloat16, torch.float32, "mean,rsqrt,before_cast,bfloat16"),
    (torch.float16, torch.float16, "sum_div,recip_sqrt,after_cast,float16"),
    (torch.float32, torch.float32, "mean,div_sqrt,before_cast,float32"),
    (torch.bfloat16, None, "mean,rsqrt,none,bfloat16"),
)
#: Forms whose parts the cases above leave at their usual values.
_OTHER_FORMS = (
    (torch.bfloat16, torch.bfloat16, "sum_mul,rsqrt,x_first,bfloat16,eps=max"),
    (torch.float16, torch.bfloat16, "norm_div,recip_sqrt,root_first,float16,eps=outside"),
    (torch.bfloat16, torch.float32, "mean,div_sqrt,root_first,float32,eps=outside_max"),
    (torch.bfloat16, torch.float32, "mean,rsqrt,after_cast,bfloat16,out=bfloat16"),
)
_WIDE_SUMS = (
    (torch.bfloat16, torch.bfloat16, "mean,rsqrt,after_cast,bfloat16,sum=float32"),
    (torch.float16, torch.float16, "mean,rsqrt,before_cast,float16,sum=float32"),
)


def _norm_inputs(
    generator: torch.Generator, others: tuple[Any, ...] = _OTHER_FORMS
) -> Iterator[tuple[Any, ...]]:
    cases = (*product(_CASES, ((3, 64), (1, 47), (2, 3, 32))), *product(others, ((3, 24),)))
    for (dtype, weight_dtype, form), shape in cases:
        x = random_activation(generator, *shape, dtype=dtype)
        weight = None
        if weight_dtype is not None:
            weight = (torch.randn(shape[-1], generator=generator) + 1).to(weight_dtype)
        yield x, weight, 1e-6, form


def _add(args: tuple[Any, ...], generator: torch.Generator) -> tuple[Any, ...]:
    x = args[0]
    return x, random_activation(generator, *x.shape, dtype=x.dtype), *args[1:]


def _add_norm_inputs(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for args in _norm_inputs(generator, (*_OTHER_FORMS, *_WIDE_SUMS)):
        yield _add(args, generator)


def _norm_quant_inputs(
    generator: torch.Generator, others: tuple[Any, ...] = _OTHER_FORMS
) -> Iterator[tuple[Any, ...]]:
    keep = False
    for x, weight, eps, form in _norm_inputs(generator, others):
        for quant_form in QUANT_FORMS:
            keep = not keep
            yield x, weight, random_scale(generator, quant_form), eps, form, quant_form, keep


def _add_norm_quant_inputs(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for args in _norm_quant_inputs(generator, (*_OTHER_FORMS, *_WIDE_SUMS)):
        yield _add(args, generator)


RMS_NORM = register(
    OpSpec(
        "rms_norm",
        "(Tensor x, Tensor? weight, float eps, str form) -> Tensor",
        rms_norm,
        fake_rms_norm,
        _norm_inputs,
        1e-3,
        _REDUCTION,
        kind="norm",
        what="norm",
    )
)
ADD_RMS_NORM = register(
    OpSpec(
        "add_rms_norm",
        "(Tensor x, Tensor residual, Tensor? weight, float eps, str form)"
        " -> (Tensor y, Tensor total)",
        add_rms_norm,
        fake_add_rms_norm,
        _add_norm_inputs,
        1e-3,
        _REDUCTION,
        kind="norm",
        what="norm",
    )
)
RMS_NORM_QUANT = register(
    OpSpec(
        "rms_norm_quant",
        "(Tensor x, Tensor? weight, Tensor? scale, float eps, str form, str quant_form, bool keep)"
        " -> (Tensor q, Tensor scale_out, Tensor y)",
        rms_norm_quant,
        fake_rms_norm_quant,
        _norm_quant_inputs,
        1e-3,
        _REDUCTION,
    )
)
ADD_RMS_NORM_QUANT = register(
    OpSpec(
        "add_rms_norm_quant",
        "(Tensor x, Tensor residual, Tensor? weight, Tensor? scale, float eps, str form,"
        " str quant_form, bool keep) -> (Tensor q, Tensor scale_out, Tensor y, Tensor total)",
        add_rms_norm_quant,
        fake_add_rms_norm_quant,
        _add_norm_quant_inputs,
        1e-3,
        _REDUCTION,
    )
)
