"""Dialect of compressed-tensors that is run compressed: ``CompressedTensorsFP8Linear``.

    x ─ [f32] ─┬──────────────────────────────────────────── div ─ clamp ─ cast fp8    codes
               └─ abs ─ amax ─ where(> 0, ., 1) ─ / 448 ─ s ─┴─ unsqueeze              scale

The maximum is taken without keeping its dim, and a row of zeros (or with a NaN) is given the
maximum 1. Read in transformers 5.24; its product is ``torch.nn.functional.scaled_mm``
(:mod:`fp8pass.spellings.scaled_mm_v2`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8pass.ops.forms import MODEL_DTYPES, QuantForm
from fp8pass.spellings.quantize import QuantMatch, divided, unclamped
from fp8pass.spellings.walk import (
    argument,
    aten,
    contiguous,
    dtype_of,
    is_call,
    is_last_dim,
    peel_widening,
    same_shape,
    scalar,
    tensor,
)


def _constant(node: Any) -> float | None:
    """The number that a tensor of any shape is filled with."""
    if is_call(node, aten.full.default) and isinstance(node.args[1], (int, float)):
        return float(node.args[1]) if dtype_of(node) == torch.float32 else None
    return scalar(node)


def _positive(node: Any) -> tuple[fx.Node, float] | None:
    """``(amax, other)`` of ``where(amax > 0, amax, other)``."""
    if not is_call(node, aten.where.self):
        return None
    condition, amax, other = node.args
    if not is_call(condition, aten.gt.Scalar) or condition.args[0] is not amax:
        return None
    number = _constant(other)
    return (amax, number) if condition.args[1] == 0 and number is not None else None


def match_row_without_zeros(root: fx.Node) -> QuantMatch | None:
    """The quantise whose codes are ``root``, if it is that of the library, else None."""
    clamp = unclamped(root)
    applied = divided(clamp[0]) if clamp is not None else None
    if clamp is None or applied is None or dtype_of(clamp[0]) != torch.float32:
        return None
    x, column = peel_widening(applied[0]), applied[1]
    value, codes = tensor(x), tensor(root)
    if value is None or codes is None or value.dtype not in MODEL_DTYPES or value.dim() == 0:
        return None
    if not is_call(column, aten.unsqueeze.default):
        return None
    scale, dim = column.args
    scale_value, wide = tensor(scale), tensor(column)
    if scale_value is None or wide is None or scale_value.dtype != torch.float32:
        return None
    if dim % wide.dim() != wide.dim() - 1 or wide.dim() != value.dim():
        return None
    if not is_call(scale, aten.div.Tensor, aten.div.Scalar) or scale.kwargs:
        return None
    qmax, found = scalar(scale.args[1]), _positive(scale.args[0])
    if qmax is None or qmax <= 0 or found is None or dtype_of(found[0]) != torch.float32:
        return None
    amax = found[0]
    if not is_call(amax, aten.amax.default) or argument(amax, 2, "keepdim", False):
        return None
    magnitude = peel_widening(amax.args[0])
    if not is_call(magnitude, aten.abs.default) or peel_widening(magnitude.args[0]) is not x:
        return None
    if not is_last_dim(amax.args[0], argument(amax, 1, "dim", [])):
        return None
    if clamp[1] != -clamp[2] or clamp[2] > float(torch.finfo(codes.dtype).max):
        return None
    if not same_shape(codes, value) or not contiguous(codes):
        return None
    form = QuantForm(
        codes.dtype,
        "token",
        torch.float32,
        "div",
        qmax,
        "amax_zero",
        found[1],
        "div",
        clamp[1],
        clamp[2],
    )
    return QuantMatch(root, x, scale, form)
