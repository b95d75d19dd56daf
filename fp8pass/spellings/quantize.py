"""Reads a quantise to fp8 as decomposed torch writes it.

    x ─ [f32] ─┬───────────────────────────── div ─ clamp ─ cast fp8      codes
               └─ abs ─ amax ─ / 448 ─ clamp ─┴──────────────────────     dequant scale

The anchor is the cast to fp8; the reader climbs from it. If the scale is not an amax of the same x
it is *given* (static): any one-element float32 tensor, wherever it comes from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8pass.ops.forms import MODEL_DTYPES, QuantForm
from fp8pass.quant_key import FP8_DTYPES
from fp8pass.reasons import Verdict, no
from fp8pass.spellings.walk import (
    DIV,
    MUL,
    argument,
    aten,
    cast_to,
    commuted,
    contiguous,
    dtype_of,
    is_call,
    is_last_dim,
    item,
    one_element,
    peel_views,
    peel_widening,
    same_shape,
    scalar,
    tensor,
)


@dataclass(frozen=True, slots=True)
class QuantMatch:
    """One quantise: ``root`` is the node of the codes, ``scale`` the node of the dequant scale."""

    root: fx.Node
    x: fx.Node
    scale: fx.Node
    form: QuantForm


@dataclass(frozen=True, slots=True)
class _Scale:
    """A dequant scale computed from ``source``."""

    source: fx.Node
    granularity: str
    scale: str
    qmax: float
    floor: str
    floor_value: float


def is_fp8_cast(node: Any) -> bool:
    """Whether ``node`` casts a wider tensor to fp8: the anchor of a quantise."""
    return cast_to(node) in FP8_DTYPES and dtype_of(node.args[0]) not in FP8_DTYPES


def _bound(node: Any, op: Any) -> float | None:
    return scalar(node.args[1]) if is_call(node, op) and len(node.args) == 2 else None


def _clamped(node: Any) -> tuple[Any, float, float] | None:
    """``(inner, lo, hi)`` of a clamp in any order; inner None if there is no full clamp."""
    if is_call(node, aten.clamp.default):
        lo, hi = (scalar(argument(node, i, name)) for i, name in ((1, "min"), (2, "max")))
        return None if lo is None or hi is None else (node.args[0], lo, hi)
    hi = _bound(node, aten.clamp_max.default)
    if hi is not None:
        lo = _bound(node.args[0], aten.clamp_min.default)
        return None if lo is None else (node.args[0].args[0], lo, hi)
    lo = _bound(node, aten.clamp_min.default)
    if lo is not None:
        hi = _bound(node.args[0], aten.clamp_max.default)
        return None if hi is None else (node.args[0].args[0], lo, hi)
    return None


def _unclamped(cast: fx.Node) -> tuple[Any, float, float] | None:
    """The value that a saturating cast quantises, with its bounds."""
    inner: Any = cast.args[0]
    found = _clamped(inner)
    if found is None and cast_to(inner) in (torch.bfloat16, torch.float16):
        # a clamp on a narrow dtype is written up-cast, clamp, down-cast; the down-cast is exact
        # because the clamp's input and its bounds have the narrow dtype's precision
        found = _clamped(inner.args[0])
        if found is not None:
            value = peel_widening(found[0])
            if dtype_of(value) != cast_to(inner):
                return None
            found = (value, found[1], found[2])
    return found


def _amax(node: Any) -> tuple[fx.Node, str] | None:
    """``(x, granularity)`` for ``amax(|x|)`` over everything, or over the last dim."""
    maximum = item(node, 0)
    if is_call(maximum, aten.max.dim):
        reduced, dims, keep = maximum, maximum.args[1], argument(maximum, 2, "keepdim", False)
    elif is_call(node, aten.amax.default):
        reduced, dims = node, argument(node, 1, "dim", [])
        keep = argument(node, 2, "keepdim", False)
    elif is_call(node, aten.max.default) and len(node.args) == 1:
        reduced, dims, keep = node, [], False
    else:
        return None
    magnitude = peel_widening(reduced.args[0])
    if not is_call(magnitude, aten.abs.default):
        return None
    source, value = magnitude.args[0], tensor(reduced.args[0])
    if not isinstance(source, fx.Node) or value is None:
        return None
    rank, dims = value.dim(), _list(dims)
    everything = not dims or rank == 0 or len({d % rank for d in dims}) == rank
    if everything and (rank != 1 or not keep):
        return source, "tensor"
    if is_last_dim(reduced.args[0], dims) and keep is True:
        return source, "token"
    return None


def _list(dims: Any) -> list[int]:
    return list(dims) if isinstance(dims, (list, tuple)) else [dims]


def _dynamic_scale(node: Any) -> _Scale | None:
    """A dequant scale ``max(amax(|x|) / qmax, floor)`` in one of the recorded forms."""
    node = peel_widening(node)
    floor, floor_value = "none", 0.0
    lower = _bound(node, aten.clamp_min.default)
    if lower is not None:
        floor, floor_value, node = "scale", lower, node.args[0]
    if is_call(node, *DIV) and len(node.args) == 2 and not node.kwargs:
        constant, how, inner = scalar(node.args[1]), "div", node.args[0]
    else:
        found = commuted(node, MUL, scalar)
        if found is None:
            return None
        constant, how, inner = found[0], "mul", found[1]
    if constant is None or constant <= 0 or dtype_of(node) != torch.float32:
        return None
    inner = peel_widening(inner)
    lower = _bound(inner, aten.clamp_min.default)
    if lower is not None:
        if floor != "none" or dtype_of(inner) != torch.float32:
            return None  # two floors, or one rounded to a narrow dtype, are not a known form
        floor, floor_value, inner = "amax", lower, peel_widening(inner.args[0])
    found_amax = _amax(inner)
    if found_amax is None:
        return None
    return _Scale(found_amax[0], found_amax[1], how, constant, floor, floor_value)


def _reciprocal_of(node: Any) -> fx.Node | None:
    """s for ``1 / s`` in any spelling."""
    one = commuted(node, MUL, lambda a: scalar(a) == 1.0)
    if one is not None:
        return _reciprocal_of(one[1])
    if is_call(node, aten.reciprocal.default) and isinstance(node.args[0], fx.Node):
        return node.args[0]
    return None


def _applied(node: Any) -> tuple[fx.Node, fx.Node, str] | None:
    """``(x, scale, apply form)`` for ``x / scale`` or ``x * (1 / scale)``."""
    if is_call(node, aten.div.Tensor) and len(node.args) == 2 and not node.kwargs:
        x, scale = node.args
        if isinstance(x, fx.Node) and isinstance(scale, fx.Node):
            return x, scale, "div"
        return None
    found = commuted(node, (aten.mul.Tensor,), _reciprocal_of)
    if found is not None and isinstance(found[1], fx.Node):
        return found[1], found[0], "mul_recip"
    return None


def _read(root: fx.Node) -> QuantMatch | str:
    """The quantise that ends in the cast ``root``, or why it is not one."""
    dtype = cast_to(root)
    assert dtype is not None
    clamp = _unclamped(root)
    if clamp is None:
        return "there is no clamp before it, so an overflow differs between versions of torch"
    quotient, lo, hi = clamp
    applied = _applied(quotient)
    if applied is None:
        return "the clamped value is neither x / scale nor x * (1 / scale)"
    scaled, scale, how = applied
    compute = dtype_of(quotient)
    x = peel_widening(scaled)
    value = tensor(x)
    if value is None or value.dtype not in MODEL_DTYPES or compute not in MODEL_DTYPES:
        return f"it quantises {dtype_of(x)} values, computed in {compute}"
    assert compute is not None
    scale_value, result = tensor(scale), tensor(root)
    if scale_value is None or scale_value.dtype != torch.float32:
        return f"its scale is {dtype_of(scale)}, not float32"
    if compute != torch.float32 and (scale_value.dim() != 0 or compute != value.dtype):
        return f"it divides in {compute}"
    if result is None or not same_shape(result, value) or not contiguous(result):
        return "its result is broadcast or not contiguous"
    if lo != -hi or hi > float(torch.finfo(dtype).max):
        return f"it clamps to [{lo}, {hi}]"
    known = _dynamic_scale(peel_views(scale))
    if known is not None and peel_widening(known.source) is x:
        if compute != torch.float32:
            return f"a dynamic quantise that divides in {compute}"
        if known.granularity == "token":
            known_value = tensor(peel_views(scale))
            if known_value is None or not same_shape(known_value, scale_value):
                return "its per-token scale is reshaped before it is used"
        form = QuantForm(
            dtype,
            known.granularity,
            compute,
            known.scale,
            known.qmax,
            known.floor,
            known.floor_value,
            how,
            lo,
            hi,
        )
        return QuantMatch(root, x, _scale_root(scale), form)
    if not one_element(scale_value):
        return f"its scale of shape {tuple(scale_value.shape)} is not computed in a known way"
    form = QuantForm(dtype, "tensor", compute, "given", hi, "none", 0.0, how, lo, hi)
    return QuantMatch(root, x, scale, form)


def _scale_root(scale: fx.Node) -> fx.Node:
    """The node whose value is the scale: below the views that only add dims to it."""
    root = peel_views(scale)
    assert isinstance(root, fx.Node)
    return root


def unclamped(cast: fx.Node) -> tuple[Any, float, float] | None:
    """``(value, lo, hi)``: what a saturating cast quantises, with its bounds (for dialects)."""
    return _unclamped(cast)


def divided(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """``(x, scale)`` for ``x / scale``."""
    found = _applied(node)
    return found[:2] if found is not None and found[2] == "div" else None


def match_quantize(root: fx.Node) -> QuantMatch | Verdict:
    """Read the quantise whose codes are ``root`` (:func:`is_fp8_cast`), or say why not (FP8-R001).

    Not read, because their numbers are not those of a known form: no clamp before the cast (an
    overflow differs between versions of torch), a scale that is not float32, a scale with several
    elements that is not the amax of the rows, a clamp that is not symmetric or reaches past the
    largest code.
    """
    found = _read(root)
    if isinstance(found, str):
        return no("FP8-R001", dtype=cast_to(root), node=root.name, why=found)
    return found
