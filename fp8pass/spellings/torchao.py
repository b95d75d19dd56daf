"""Dialect of torchao: the quantise of ``Float8Tensor`` as aten, and its own operators.

    x ─┬─ [f32] ───────────────────────────────────── div ─ clamp ─ cast fp8      codes
       └─ view ─ abs ─ amax ─ [clamp] ─ / 448 ─ view ─┴─ [f32]                    dequant scale

Two things are its own. The scale is computed in the dtype of ``x`` and converted to float32 last
(``scale_dtype`` of the form), bounds included, which that dtype rounds. And tensors are viewed in
the shape that they have. Read in torchao 0.18 (``quant_primitives.py``).

Its operators are not read, but named, so that the report says why a site was left. Where the
package mslk is installed, torchao calls the operators of :mod:`fp8pass.spellings.fbgemm` instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8pass.ops.forms import MODEL_DTYPES, QuantForm
from fp8pass.spellings.library_ops import Arguments, LibraryOp
from fp8pass.spellings.quantize import QuantMatch, divided, unclamped
from fp8pass.spellings.walk import (
    VIEWS,
    argument,
    aten,
    cast_to,
    contiguous,
    dtype_of,
    is_call,
    is_last_dim,
    one_element,
    peel_widening,
    same_shape,
    scalar,
    tensor,
)
from fp8pass.target import HOST

_TORCHAO = "torchao 0.18"


def _blockwise(node: fx.Node, given: Arguments) -> str:
    size = given.get("block_size", 128)
    return (
        f"it multiplies with one scale for each 1x{size} block of its activation in an operator of "
        "torchao's, which is not read"
    )


def _integers(node: fx.Node, given: Arguments) -> str:
    return (
        "it multiplies int8 in an operator of torchao's, whose scales and zero points are not read"
    )


def _opaque(node: fx.Node, given: Arguments) -> str:
    return "its scale comes in from elsewhere, in blocks that its arguments do not tell"


OPS = (
    LibraryOp("ao::blockwise_fp8_gemm", "scaled_mm", None, _blockwise, _TORCHAO),
    LibraryOp("torchao::int(_scaled)?_matmul", "scaled_mm", None, _integers, _TORCHAO),
    LibraryOp(
        "torchao::quantize_affine_float8_non_decomposed", "quantize", None, _opaque, _TORCHAO
    ),
)


# ---- the quantise, as aten ---------------------------------------------------------------------


def _in_its_own_shape(node: Any) -> Any:
    """``node`` without views to the shape that it has."""
    while is_call(node, *VIEWS):
        before, after = tensor(node.args[0]), tensor(node)
        if before is None or after is None or not same_shape(before, after):
            return node
        node = node.args[0]
    return node


def _bounds(node: Any, narrow: torch.dtype) -> tuple[Any, float | None, float | None]:
    """``(amax, lower, upper)`` of ``clamp(amax)``; a clamp of a narrow dtype is written wide."""
    inner = node
    if narrow != torch.float32:
        if cast_to(node) != narrow:
            return node, None, None
        inner = node.args[0]
    upper = _constant(inner, aten.clamp_max.default)
    inner = inner.args[0] if upper is not None else inner
    lower = _constant(inner, aten.clamp_min.default)
    inner = inner.args[0] if lower is not None else inner
    if lower is None and upper is None:
        return node, None, None
    amax = peel_widening(inner)
    return (amax, lower, upper) if dtype_of(amax) == narrow else (node, None, None)


def _amax(node: Any) -> tuple[Any, str] | None:
    """``(x, granularity)`` of ``amax(|x|)`` that keeps its dims: the last one, or all of them."""
    if not is_call(node, aten.amax.default) or argument(node, 2, "keepdim", False) is not True:
        return None
    magnitude, dims = peel_widening(node.args[0]), argument(node, 1, "dim", [])
    value = tensor(node.args[0])
    if value is None or value.dim() == 0 or not is_call(magnitude, aten.abs.default):
        return None
    if is_last_dim(node.args[0], dims):
        return magnitude.args[0], "token"
    every = isinstance(dims, (list, tuple)) and len({d % value.dim() for d in dims}) == value.dim()
    return (magnitude.args[0], "tensor") if every else None


def _constant(node: Any, op: Any) -> float | None:
    return scalar(node.args[1]) if is_call(node, op) and len(node.args) == 2 else None


def _rounded(value: float, dtype: torch.dtype) -> float:
    """A bound as a clamp of ``dtype`` values has it; in float32 it is compared as it is written."""
    if dtype == torch.float32:
        return value
    return float(torch.tensor(value, dtype=dtype, device=HOST).item())


def match_float8_tensor(root: fx.Node) -> QuantMatch | None:
    """The quantise whose codes are ``root``, if it is that of ``Float8Tensor``, else None."""
    clamp = unclamped(root)
    applied = divided(clamp[0]) if clamp is not None else None
    if clamp is None or applied is None or dtype_of(clamp[0]) != torch.float32:
        return None
    x, scale = peel_widening(applied[0]), applied[1]
    value, scale_value, codes = tensor(x), tensor(scale), tensor(root)
    if value is None or scale_value is None or codes is None or value.dtype not in MODEL_DTYPES:
        return None
    narrow = value.dtype
    inner: Any = scale
    if narrow != torch.float32:
        if cast_to(scale) != torch.float32:
            return None
        inner = scale.args[0]
    inner = _in_its_own_shape(inner)
    if dtype_of(inner) != narrow or not is_call(inner, aten.div.Tensor, aten.div.Scalar):
        return None
    qmax = scalar(inner.args[1])
    amax, lower, upper = _bounds(inner.args[0], narrow)
    found = _amax(amax)
    if qmax is None or qmax <= 0 or inner.kwargs or found is None or dtype_of(amax) != narrow:
        return None
    if _in_its_own_shape(peel_widening(found[0])) is not x or clamp[1] != -clamp[2]:
        return None
    if clamp[2] > float(torch.finfo(codes.dtype).max):
        return None
    if not same_shape(codes, value) or not contiguous(codes):
        return None
    granularity = found[1]
    whole = granularity == "tensor"
    if scale_value.dim() != value.dim() or (whole and not one_element(scale_value)):
        return None
    floor, ceiling = ("none", 0.0), float("inf")
    if lower is not None:
        floor = ("amax", _rounded(lower, narrow))
    if upper is not None:
        ceiling = _rounded(upper, narrow)
    if ceiling <= 0 or (lower is not None and floor[1] > ceiling):
        return None
    form = QuantForm(
        codes.dtype,
        granularity,
        torch.float32,
        "div",
        qmax,
        *floor,
        "div",
        clamp[1],
        clamp[2],
        scale_dtype=narrow,
        ceiling=ceiling,
    )
    return QuantMatch(root, x, scale, form)
