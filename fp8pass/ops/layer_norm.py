"""``fp8pass::layer_norm``, alone and followed by a quantise."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from fp8pass.ops.forms import LayerNormForm, QuantForm
from fp8pass.ops.library import OpSpec, contiguous_like, nothing, register
from fp8pass.ops.quantize import (
    QUANT_FORMS,
    fake_quantize_with,
    quantize_with,
    random_activation,
    random_scale,
)

_REDUCTION = "only the order of the sums may differ; one step in 0.1 % of codes"


def _standardised(x: torch.Tensor, eps: float, form: LayerNormForm) -> torch.Tensor:
    """``(x - mean) / sqrt(variance + eps)`` over the last dim, in float32."""
    wide = x.to(torch.float32)
    if form.variance == "var_mean":
        variance, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
    else:
        mean = wide.mean(-1, keepdim=True)
    difference = wide - mean
    if form.variance == "var":
        variance = wide.var(-1, correction=0, keepdim=True)
    elif form.variance == "mean_square":
        variance = difference.pow(2).mean(-1, keepdim=True)
    shifted = variance + eps
    if form.root == "rsqrt":
        return difference * shifted.rsqrt()
    if form.root == "recip_sqrt":
        return difference * shifted.sqrt().reciprocal()
    return difference / shifted.sqrt()


def _out_dtype(
    weight: torch.Tensor | None, bias: torch.Tensor | None, form: LayerNormForm
) -> torch.dtype:
    dtype = form.mid
    if form.affine == "after_cast":
        for operand in (weight, bias):
            if operand is not None:
                dtype = torch.promote_types(dtype, operand.dtype)
    return dtype


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    form: str,
) -> torch.Tensor:
    """LayerNorm over the last dim: ``(x - mean) / sqrt(var + eps) * weight + bias`` (Ba, 2016).

    Args:
        x: ``[..., H]`` bf16, fp16 or fp32; computed in float32.
        weight, bias: ``[H]`` of any of these dtypes, or None.
        eps: any value, added to the (biased) variance.
        form: ``str`` of a :class:`fp8pass.ops.forms.LayerNormForm`.

    Returns:
        contiguous ``[..., H]`` of the form's dtype (promoted with those of weight and bias if they
        come after the cast).

    Raises:
        ValueError: the form says that there is a weight or a bias and there is none, or the
            reverse.
    """
    parsed = LayerNormForm.parse(form)
    if (weight is None and bias is None) != (parsed.affine == "none"):
        raise ValueError(f"layer norm form {form} and its weight and bias disagree")
    value = _standardised(x, eps, parsed)
    if parsed.affine == "after_cast":
        value = value.to(parsed.mid)
    if weight is not None:
        value = value * weight
    if bias is not None:
        value = value + bias
    if parsed.affine != "after_cast":
        value = value.to(parsed.mid)
    return value.contiguous()


def fake_layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    form: str,
) -> torch.Tensor:
    """Shapes of :func:`layer_norm`."""
    return contiguous_like(x, _out_dtype(weight, bias, LayerNormForm.parse(form)))


def layer_norm_quant(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    eps: float,
    form: str,
    quant_form: str,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`layer_norm` and the quantise of its result.

    Args:
        scale: the given dequant scale of a static quantise, else None.
        quant_form: ``str`` of a :class:`fp8pass.ops.forms.QuantForm`.
        keep: return the normalised value too, for its other readers.

    Returns:
        ``(q, scale_out, y)``; ``y`` is an empty tensor unless ``keep``; ``scale_out`` is empty if
        the scale was given.
    """
    y = layer_norm(x, weight, bias, eps, form)
    q, scale_out = quantize_with(y, scale, QuantForm.parse(quant_form))
    return q, scale_out, y if keep else nothing(y, y.dtype)


def fake_layer_norm_quant(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    eps: float,
    form: str,
    quant_form: str,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes of :func:`layer_norm_quant`."""
    y = fake_layer_norm(x, weight, bias, eps, form)
    q, scale_out = fake_quantize_with(y, scale, QuantForm.parse(quant_form))
    return q, scale_out, y if keep else nothing(y, y.dtype)


# ---- inputs -------------------------------------------------------------------------------------

_CASES = (
    # x dtype, weight dtype, bias dtype (None = there is none), form
    (torch.bfloat16, torch.bfloat16, torch.bfloat16, "var_mean,rsqrt,before_cast,bfloat16"),
    (torch.float16, torch.float16, None, "var,recip_sqrt,after_cast,float16"),
    (torch.float32, None, torch.float32, "mean_square,div_sqrt,before_cast,float32"),
    (torch.bfloat16, torch.bfloat16, torch.float32, "mean_square,rsqrt,after_cast,bfloat16"),
    (torch.bfloat16, None, None, "var_mean,rsqrt,none,bfloat16"),
)


def _layer_norm_inputs(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for (dtype, *dtypes, form), shape in product(_CASES, ((3, 64), (1, 47), (2, 3, 32))):
        x = random_activation(generator, *shape, dtype=dtype)
        weight, bias = (
            None if given is None else (torch.randn(shape[-1], generator=generator) + 1).to(given)
            for given in dtypes
        )
        yield x, weight, bias, 1e-5, form


def _layer_norm_quant_inputs(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    keep = False
    for x, weight, bias, eps, form in _layer_norm_inputs(generator):
        for quant_form in QUANT_FORMS:
            keep = not keep
            yield x, weight, bias, random_scale(generator, quant_form), eps, form, quant_form, keep


LAYER_NORM = register(
    OpSpec(
        "layer_norm",
        "(Tensor x, Tensor? weight, Tensor? bias, float eps, str form) -> Tensor",
        layer_norm,
        fake_layer_norm,
        _layer_norm_inputs,
        1e-3,
        _REDUCTION,
        kind="norm",
        what="norm",
    )
)
LAYER_NORM_QUANT = register(
    OpSpec(
        "layer_norm_quant",
        "(Tensor x, Tensor? weight, Tensor? bias, Tensor? scale, float eps, str form,"
        " str quant_form, bool keep) -> (Tensor q, Tensor scale_out, Tensor y)",
        layer_norm_quant,
        fake_layer_norm_quant,
        _layer_norm_quant_inputs,
        1e-3,
        _REDUCTION,
    )
)
