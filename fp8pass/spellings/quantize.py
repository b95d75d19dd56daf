"""Reads a quantise to fp8 or int8 as decomposed torch writes it.

    x ─ [f32] ─┬───────────────────── div ─ [round] ─ clamp ─ cast        codes
               └─ abs ─ amax ─ ... ───┴─────────────────────────────     dequant scale

The anchor is the cast to fp8, or the cast of a rounded number to int8; the reader climbs from it.
How the scale is computed is read in :mod:`fp8pass.spellings.scale`. A scale that is not computed
from the same x is *given* (static): one element, one for each row, or one for each group. Groups
are spelled by splitting the last dim, ``[..., H]`` to ``[..., H / n, n]``; the split is part of the
quantise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8pass.ops.forms import MODEL_DTYPES, QuantForm
from fp8pass.quant_key import FP8_DTYPES
from fp8pass.reasons import Verdict, no
from fp8pass.spellings.scale import (
    Scale,
    bound,
    dequant_scale,
    inverse_scale,
    is_zero,
    peel,
    reciprocal_of,
)
from fp8pass.spellings.walk import (
    ADD,
    VIEWS,
    argument,
    aten,
    cast_to,
    commuted,
    contiguous,
    dtype_of,
    is_call,
    one_element,
    peel_views,
    peel_widening,
    same,
    same_shape,
    scalar,
    tensor,
)

#: How far the climb goes that looks for x among the ancestors of a scale.
_FAR = 200
ROUND = (aten.round.default,)


@dataclass(frozen=True, slots=True)
class QuantMatch:
    """One quantise: ``root`` is the node of the codes, ``scale`` the node of the dequant scale.

    ``split`` is the view of ``x`` that splits its last dim into groups, None without groups;
    ``codes_split`` whether the codes have the shape of the split. ``zero`` is the node of the zero
    point, None without one. ``scale_ub`` is the tensor of one element that the scale is bounded by,
    of a form with an ``upper``.
    """

    root: fx.Node
    x: fx.Node
    scale: fx.Node
    form: QuantForm
    split: fx.Node | None = None
    codes_split: bool = False
    zero: fx.Node | None = None
    scale_ub: fx.Node | None = None


def is_fp8_cast(node: Any) -> bool:
    """Whether ``node`` casts a wider tensor to fp8: the anchor of a quantise."""
    return cast_to(node) in FP8_DTYPES and dtype_of(node.args[0]) not in FP8_DTYPES


def is_int8_cast(node: Any) -> bool:
    """Whether ``node`` casts a rounded number to int8: the anchor of a quantise to int8.

    Rounded in any way, or clamped to codes and cut off by the cast: what no form has is refused,
    not passed over.
    """
    if cast_to(node) != torch.int8:
        return False
    inner = peel_views(node.args[0])
    limits = _tensor_clamped(inner)
    if limits is not None and applied(peel_views(limits)) is not None:
        return True
    return _is_rounded(inner, 8)  # a clamp of two sides, a zero point, a cast of each kind


def _is_rounded(node: Any, far: int) -> bool:
    """Whether ``node`` is a rounded number below clamps, casts and a zero point."""
    node = peel_views(node)
    if far == 0 or not isinstance(node, fx.Node):
        return False
    if is_call(node, *ROUND):
        # lo - x / scale is a zero point
        return dtype_of(node) in MODEL_DTYPES and not _from_a_number(node.args[0])
    if is_call(node, *_CUTS):  # of a quotient: others are indices of buckets
        return _of_quotient(node.args[0])
    if _from_a_number(node):
        return False
    if is_call(node, *ADD) or is_call(node, *_LIMITS):
        return any(_is_rounded(arg, far - 1) for arg in node.args[:2])
    if is_call(node, aten.sub.Tensor, *_CLAMPS) or cast_to(node) is not None:
        return _is_rounded(node.args[0], far - 1)
    return False


def _of_quotient(node: Any) -> bool:
    """Whether ``node`` is x / scale or x * (1 / scale), with or without a number added."""
    node = peel_views(node)
    found = commuted(node, ADD, lambda a: scalar(a) is not None)
    return applied(node if found is None else peel_views(found[1])) is not None


def _tensor_clamped(node: Any) -> Any:
    """What is clamped to codes of int8, None if ``node`` is something else."""
    found = clamped(node)
    return None if found is None or not _limits(torch.int8, *found[1:]) else found[0]


def _from_a_number(node: Any) -> bool:
    """Whether ``node``, below clamps, is a number less something."""
    node = peel_views(node)
    while is_call(node, *_CLAMPS):
        node = peel_views(node.args[0])
    return is_call(node, aten.sub.Tensor) and scalar(node.args[0]) is not None


def is_quantise_cast(node: Any) -> bool:
    """The anchor of :func:`match_quantize`."""
    return is_fp8_cast(node) or is_int8_cast(node)


_CLAMPS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.clamp.Tensor,
           aten.clamp_min.Tensor, aten.clamp_max.Tensor)  # fmt: skip
_LIMITS = (aten.minimum.default, aten.maximum.default)
_CUTS = (aten.floor.default, aten.ceil.default, aten.trunc.default)


def clamped(node: Any) -> tuple[Any, float, float] | None:
    """``(inner, lo, hi)`` of a clamp in any order; inner None if there is no full clamp."""
    if is_call(node, aten.clamp.default):
        lo, hi = (scalar(argument(node, i, name)) for i, name in ((1, "min"), (2, "max")))
        return None if lo is None or hi is None else (node.args[0], lo, hi)
    hi = bound(node, aten.clamp_max.default)
    if hi is not None:
        lo = bound(node.args[0], aten.clamp_min.default)
        return None if lo is None else (node.args[0].args[0], lo, hi)
    lo = bound(node, aten.clamp_min.default)
    if lo is not None:
        hi = bound(node.args[0], aten.clamp_max.default)
        return None if hi is None else (node.args[0].args[0], lo, hi)
    return None


def unclamped(cast: fx.Node) -> tuple[Any, float, float] | None:
    """The value that a saturating cast quantises, with its bounds."""
    inner: Any = peel_views(cast.args[0])
    if dtype_of(cast) == torch.int8:
        return _unrounded(inner)
    found = clamped(inner)
    if found is None and cast_to(inner) in (torch.bfloat16, torch.float16):
        # a clamp on a narrow dtype is written up-cast, clamp, down-cast; the down-cast is exact
        # because the clamp's input and its bounds have the narrow dtype's precision
        found = clamped(inner.args[0])
        if found is not None:
            value = peel_widening(found[0])
            if dtype_of(value) != cast_to(inner):
                return None
            found = (value, found[1], found[2])
    return found


def _unrounded(node: Any) -> tuple[Any, float, float] | None:
    """:func:`unclamped` for int8: rounded and clamped, in either order.

    With whole bounds the order makes no difference, since rounding is monotone.
    """
    if is_call(node, *ROUND):
        found = clamped(peel_views(node.args[0]))
        if found is None or found[1] % 1 or found[2] % 1:
            return None
        return found
    found = clamped(node)
    inner = None if found is None else _without_zeros(peel_views(found[0]))
    if found is None or not is_call(inner, *ROUND):
        return None
    return inner.args[0], found[1], found[2]


def _without_zeros(node: Any) -> Any:
    """x of ``x + 0``: the zero point of a symmetric quantise, where it is written."""
    found = commuted(node, (aten.add.Tensor,), is_zero)
    return node if found is None else peel_views(found[1])


def applied(node: Any) -> tuple[fx.Node, fx.Node, str] | None:
    """``(x, scale, apply form)`` for ``x / scale``, ``x * (1 / scale)`` or ``x * r``."""
    if is_call(node, aten.div.Tensor) and len(node.args) == 2 and not node.kwargs:
        x, scale = node.args
        if isinstance(x, fx.Node) and isinstance(scale, fx.Node):
            return x, scale, "div"
        return None
    found = commuted(node, (aten.mul.Tensor,), lambda a: _through_views(a, reciprocal_of))
    if found is not None and isinstance(found[1], fx.Node):
        return found[1], found[0], "mul_recip"
    found = commuted(node, (aten.mul.Tensor,), lambda a: a if inverse_scale(a) else None)
    if found is not None and isinstance(found[1], fx.Node):
        return found[1], found[0], "mul_inverse"
    return None


def _through_views(node: Any, wanted: Any) -> Any:
    """``wanted`` of a node below views: ``(1 / s)[..., None]``; only if no view changes a shape."""
    found = wanted(node)
    if found is not None or not is_call(node, *VIEWS):
        return found
    return None if wanted(peel_views(node)) is None else _Viewed(node, wanted(peel_views(node)))


@dataclass(frozen=True, slots=True)
class _Viewed:
    """A scale whose reciprocal is reshaped: ``view`` has the shape in which it is applied."""

    view: fx.Node
    scale: fx.Node


def _split_of(x: Any) -> tuple[fx.Node, int] | None:
    """``(base, n)`` if ``x`` is a view of ``base [..., H]`` as ``[..., H / n, n]``."""
    if not is_call(x, aten.view.default, aten.reshape.default, aten._unsafe_view.default):
        return None
    base = peel_widening(x.args[0])
    before, after = tensor(base), tensor(x)
    if before is None or after is None or before.dim() == 0 or after.dim() < 2:
        return None
    if after.dim() < 3 and before.dim() > 1:
        return None  # rows of n values: a quantise per token of another matrix
    width, count, size = before.shape[-1], after.shape[-2], after.shape[-1]
    if not (type(width) is int and type(count) is int and type(size) is int):
        return None
    if count < 2 or size < 1 or count * size != width or not isinstance(x.args[1], (list, tuple)):
        return None
    return base, size


def depends(scale: fx.Node, x: fx.Node) -> bool:
    """Whether ``scale`` is (or may be) computed from ``x``."""
    seen, stack = {scale}, [scale]
    while stack:
        node = stack.pop()
        if node is x:
            return True
        if len(seen) > _FAR:
            return True
        for source in node.all_input_nodes:
            if source not in seen and source.op == "call_function":
                seen.add(source)
                stack.append(source)
        if x in node.all_input_nodes:
            return True
    return False


def rows_of(scale: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether ``scale [..., 1]`` has one number for each row of ``value``."""
    return (
        scale.dim() == value.dim()
        and value.dim() > 0
        and same(scale.shape[-1], 1)
        and all(same(a, b) for a, b in zip(scale.shape[:-1], value.shape[:-1], strict=True))
    )


def _limits(dtype: torch.dtype, lo: float, hi: float) -> bool:
    """Whether a clamp to [lo, hi] is one of codes of ``dtype``."""
    if dtype == torch.int8:
        return (lo, hi) in ((-128.0, 127.0), (-127.0, 127.0), (-64.0, 63.0))
    return lo == -hi and hi <= float(torch.finfo(dtype).max)


def _read(root: fx.Node) -> QuantMatch | str:
    """The quantise that ends in the cast ``root``, or why it is not one."""
    dtype = cast_to(root)
    assert dtype is not None
    clamp = unclamped(root)
    if clamp is None and dtype == torch.int8:
        return (
            "the number is not x / scale, rounded and clamped, with or without a zero point added"
        )
    if clamp is None:
        return "there is no clamp before it, so an overflow differs between versions of torch"
    quotient, lo, hi = clamp
    quotient = peel_views(quotient)
    division = applied(quotient)
    if division is None:
        return (
            "the clamped value is neither x / scale nor x * (1 / scale), nor x times the inverse "
            "of a scale that is computed from x"
        )
    scaled, used, how = division
    shaped = used.view if isinstance(used, _Viewed) else used
    scale = used.scale if isinstance(used, _Viewed) else used
    compute = dtype_of(quotient)
    x = peel_widening(scaled)
    value, divided = tensor(x), tensor(quotient)
    if value is None or value.dtype not in MODEL_DTYPES or compute not in MODEL_DTYPES:
        return f"it quantises {dtype_of(x)} values, computed in {compute}"
    assert compute is not None
    scale_value, result = tensor(scale), tensor(root)
    shape_value = tensor(shaped)
    if scale_value is None or shape_value is None or scale_value.dtype != torch.float32:
        return f"its scale is {dtype_of(scale)}, not float32"
    if compute != torch.float32 and (shape_value.dim() != 0 or compute != value.dtype):
        return f"it divides in {compute}"
    if result is None or divided is None or not same_shape(divided, value):
        return "its result is broadcast or not contiguous"
    if not contiguous(result):
        return "its result is broadcast or not contiguous"
    if not _limits(dtype, lo, hi):
        return f"it clamps to [{lo}, {hi}]"
    split, codes_split = None, False
    grouped = _split_of(x)
    if grouped is not None and not one_element(shape_value):
        split, x = x, grouped[0]
        codes_split = same_shape(result, value)
        base_value = tensor(x)
        if not codes_split and (base_value is None or not same_shape(result, base_value)):
            return "its codes are reshaped before the cast"
    elif not same_shape(result, value):
        return "its result is broadcast or not contiguous"
    granularity = "token" if split is None or grouped is None else f"group{grouped[1]}"
    known = inverse_scale(scale) if how == "mul_inverse" else dequant_scale(scale)
    if known is not None and known.source is peel(x):
        if compute != torch.float32:
            return f"a dynamic quantise that divides in {compute}"
        if known.granularity == "token":
            over = tensor(known.over)
            if over is None or not same_shape(over, value) or not rows_of(shape_value, value):
                return "its per-token scale is reshaped before it is used"
        elif not one_element(shape_value):
            return "its scale is not one number"
        if known.granularity == "token":
            form = _form(dtype, granularity, compute, known, how, lo, hi)
        else:
            form = _form(dtype, "tensor", compute, known, how, lo, hi)
        made = peel_views(scale)
        if how == "mul_inverse":
            made = _dequant_of(made)
            if made is None:
                return "its scale is an inverse one whose reciprocal nothing computes"
        return QuantMatch(root, x, made, form, split, codes_split, scale_ub=known.scale_ub)
    if how == "mul_inverse":
        return "it is multiplied by an inverse scale of another tensor"
    if one_element(shape_value):
        form = QuantForm(dtype, "tensor", compute, "given", hi, "none", 0.0, how, lo, hi)
        return QuantMatch(root, x, shaped if how == "div" else scale, form, split, codes_split)
    if not rows_of(shape_value, value) or compute != torch.float32:
        return f"its scale of shape {tuple(shape_value.shape)} is not computed in a known way"
    if depends(scale, peel(x)):
        return f"its scale of shape {tuple(shape_value.shape)} is not computed in a known way"
    wanted = tensor(x) if split is not None else value
    form = QuantForm(dtype, granularity, compute, "given", hi, "none", 0.0, how, lo, hi)
    given = _given(scale, form, wanted)
    if given is None:
        return f"its given scale is not {form.granularity} scales of the shape that they have"
    return QuantMatch(root, x, given, form, split, codes_split)


def _form(
    dtype: torch.dtype,
    granularity: str,
    compute: torch.dtype,
    known: Scale,
    how: str,
    lo: float,
    hi: float,
) -> QuantForm:
    return QuantForm(
        dtype,
        granularity,
        compute,
        known.scale,
        known.qmax,
        known.floor,
        known.floor_value,
        how,
        lo,
        hi,
        scale_dtype=known.scale_dtype,
        ceiling=known.ceiling,
        power=known.power,
        upper=known.upper,
    )


def _given(scale: fx.Node, form: QuantForm, value: torch.Tensor | None) -> fx.Node | None:
    """The node below views that has the shape of a given scale of ``form``, else None."""
    if value is None:
        return None
    wanted = form.scale_shape(tuple(value.shape))
    node: Any = scale
    while True:
        held = tensor(node)
        if (
            held is not None
            and held.dim() == len(wanted)
            and all(same(a, b) for a, b in zip(held.shape, wanted, strict=True))
        ):
            return node
        if not is_call(node, *VIEWS):
            return None
        node = node.args[0]


def _dequant_of(factor: Any) -> fx.Node | None:
    """The node of ``1 / r``, None if the graph does not compute it."""
    for user in factor.users:
        if is_call(user, aten.reciprocal.default):
            for other in user.users:
                if reciprocal_of(other) is factor:  # 1.0 * (1 / r)
                    return other
            return user
    return None


def divided(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """``(x, scale)`` for ``x / scale``."""
    found = applied(node)
    return found[:2] if found is not None and found[2] == "div" else None


def match_quantize(root: fx.Node) -> QuantMatch | Verdict:
    """Read the quantise that ends in ``root`` (:func:`is_quantise_cast`), or why not (FP8-R001).

    Not read, because their numbers are not those of a known form: no clamp before the cast (an
    overflow differs between versions of torch), a scale that is not float32, a scale with several
    elements that is computed from x in an unknown way, a clamp that is not symmetric or reaches
    past the largest code. Zero points are read in :mod:`fp8pass.spellings.zero_point`.
    """
    found = _read(root)
    if isinstance(found, str):
        return no("FP8-R001", dtype=cast_to(root), node=root.name, why=found)
    return found
