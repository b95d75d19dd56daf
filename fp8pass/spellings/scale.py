"""Reads how a quantise computes its scale: the largest ``|x|``, its bounds, the expression.

    x ─ abs ─ amax ─ [cast] ─ [bounds] ─ / 448 ─ [floor] ─ [2^ceil(log2)] ─ [cast f32]   scale
                                       └ 448 / ─ [cast f32] ─ [2^floor(log2)]            r = 1/scale

A bound is a constant, or from above a tensor of one element (``scale_ub``), of amax or the scale.
A scale that is stored as ``float8_e8m0fnu`` and read back is rounded by that: it is a power of two.
All arithmetic between the first and the last cast has one dtype, ``scale_dtype``: a scale computed
in bf16 or float64 is another form than one computed in float32. Anything else gives None.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8pass.spellings.walk import (
    ADD,
    CAST,
    DIV,
    MUL,
    VIEWS,
    argument,
    aten,
    cast_to,
    commuted,
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

_NARROW = (torch.bfloat16, torch.float16)
_SCALE_DTYPES = (torch.float32, torch.float64, *_NARROW)


@dataclass(frozen=True, slots=True)
class Scale:
    """A scale computed from ``source``, below views and lossless casts.

    ``over`` is the reshaped ``source`` that is reduced, ``granularity`` that of the reduction:
    ``tensor``, or ``token`` over the last dim. The other fields are those of
    :class:`fp8pass.ops.forms.QuantForm`; ``scale_ub`` is the node of the bound ``upper``.
    """

    source: fx.Node
    over: fx.Node
    granularity: str
    scale: str
    qmax: float
    floor: str
    floor_value: float
    scale_dtype: torch.dtype
    ceiling: float
    power: str
    upper: str = "none"
    scale_ub: fx.Node | None = None


def bound(node: Any, op: Any) -> float | None:
    """The constant of a one-sided clamp ``op``, None if ``node`` is another call."""
    return scalar(node.args[1]) if is_call(node, op) and len(node.args) == 2 else None


def _bounds(node: Any) -> tuple[Any, float, float] | None:
    """``(inner, lo, hi)`` of one clamp by constants, -inf and inf where there is no bound."""
    if is_call(node, aten.clamp.default):
        lo, hi = argument(node, 1, "min"), argument(node, 2, "max")
        low = -math.inf if lo is None else scalar(lo)
        high = math.inf if hi is None else scalar(hi)
        return None if low is None or high is None else (node.args[0], low, high)
    for op, other, lower in (
        (aten.clamp_min.default, aten.maximum.default, True),
        (aten.clamp_max.default, aten.minimum.default, False),
    ):
        value = bound(node, op)
        inner = node.args[0] if value is not None else None
        if value is None:
            found = commuted(node, (other,), scalar)
            if found is None or not isinstance(found[1], fx.Node):
                continue
            value, inner = found
        return (inner, value, math.inf) if lower else (inner, -math.inf, value)
    return None


def clamp_in(node: Any, dtype: torch.dtype) -> tuple[Any, float, float] | None:
    """:func:`_bounds` of a clamp of ``dtype`` values, which is written wide for a narrow dtype."""
    found = _bounds(node) if dtype_of(node) == dtype else None
    if found is None and dtype in _NARROW and cast_to(node) == dtype:
        found = _bounds(node.args[0])
        if found is not None:
            found = (peel_widening(found[0]), found[1], found[2])
    if found is None or dtype_of(found[0]) != dtype:
        return None
    return found


def clamps_on(node: Any, dtype: torch.dtype) -> tuple[Any, float, float] | None:
    """``(inner, lo, hi)`` of all clamps on top of ``node``; None if their order would matter."""
    lo, hi = -math.inf, math.inf
    while True:
        node = peel_views(node)
        found = clamp_in(node, dtype)
        if found is None:
            return node, lo, hi
        if (found[1] > -math.inf and lo > -math.inf) or (found[2] < math.inf and hi < math.inf):
            return None
        node, lo, hi = found[0], max(lo, found[1]), min(hi, found[2])
        if not lo <= hi:
            return None


def _least(node: Any) -> tuple[Any, Any] | None:
    """``(value, other)`` of ``min(value, other)`` of two tensors, the value made from a maximum."""
    if is_call(node, aten.clamp_max.Tensor) and len(node.args) == 2:
        return node.args[0], node.args[1]
    if is_call(node, aten.clamp.Tensor) and argument(node, 1, "min") is None:
        return node.args[0], argument(node, 2, "max")
    if not is_call(node, aten.minimum.default):
        return None
    made = [_of_maximum(arg) for arg in node.args]
    if made[0] == made[1]:
        return None
    value, other = node.args if made[0] else node.args[::-1]
    return value, other


def _of_maximum(node: Any) -> bool:
    """Whether ``node`` is made from a reduction by what a scale is made by."""
    for _ in range(16):
        if is_call(node, *MAXIMA):
            return True
        if item(node, 0) is None and not is_call(node, *_STEPS):
            return False
        first, *rest = node.args
        # of two tensors the one with more than a number in it; a constant may stand first
        node = rest[0] if rest and scalar(first) is not None else first
    return False


def _tensor_bound(node: Any, dtype: torch.dtype) -> tuple[Any, fx.Node | None]:
    """``(inner, bound)`` of an upper bound that is a tensor of one element; ``(node, None)`` else.

    The bound has the dtype of the scale's arithmetic; a narrow dtype is written wide, as in
    :func:`clamp_in`.
    """
    node = peel_views(node)
    found = _least(node) if dtype_of(node) == dtype else None
    if found is None and dtype in _NARROW and cast_to(node) == dtype:
        found = _least(node.args[0])
        if found is not None:
            found = peel_widening(found[0]), peel_widening(found[1])
    if found is None:
        return node, None
    inner, upper = found
    held, before, after = tensor(upper), tensor(inner), tensor(node)
    if held is None or before is None or after is None or scalar(upper) is not None:
        return node, None
    if held.dtype != dtype or before.dtype != dtype or not one_element(held):
        return node, None
    return (inner, upper) if same_shape(before, after) else (node, None)


def plus_number(node: Any, dtype: torch.dtype) -> tuple[Any, float] | None:
    """``(inner, number)`` of ``inner + number`` with a positive number."""
    found = commuted(node, ADD, scalar)
    if found is None or found[0] <= 0 or dtype_of(node) != dtype or dtype_of(found[1]) != dtype:
        return None
    return found[1], found[0]


def _power(node: Any, rounding: Any) -> Any:
    """s of ``exp2(rounding(log2(s)))`` or ``pow(2, rounding(log2(s)))`` in float32, else None."""
    if is_call(node, aten.exp2.default):
        exponent = node.args[0]
    elif is_call(node, aten.pow.Scalar) and scalar(node.args[0]) == 2.0:
        exponent = node.args[1]
    else:
        return None
    exponent = peel_views(exponent)
    if not is_call(exponent, rounding):
        return None
    log = peel_views(exponent.args[0])
    if not is_call(log, aten.log2.default) or dtype_of(log.args[0]) != torch.float32:
        return None
    return peel_views(log.args[0])


def peel(node: Any) -> Any:
    """Strip views and casts that lose nothing, to float64 too; the order of elements stays."""
    while True:
        inner = peel_views(peel_widening(node))
        target = cast_to(inner)
        if target == torch.float64 and dtype_of(inner.args[0]) in _SCALE_DTYPES:
            inner = inner.args[0]
        if inner is node:
            return node
        node = inner


def reduced(node: Any, ops: tuple[Any, Any, Any]) -> tuple[fx.Node, str] | None:
    """``(input, granularity)`` of a maximum (or minimum) over everything or the last dim."""
    reduction = item(node, 0)
    if is_call(reduction, ops[0]):
        dims, keep = reduction.args[1], argument(reduction, 2, "keepdim", False)
    elif is_call(node, ops[1]):
        reduction, dims = node, argument(node, 1, "dim", [])
        keep = argument(node, 2, "keepdim", False)
    elif is_call(node, ops[2]) and len(node.args) == 1:
        reduction, dims, keep = node, [], False
    else:
        return None
    value = tensor(reduction.args[0])
    if value is None:
        return None
    dims = list(dims) if isinstance(dims, (list, tuple)) else [dims]
    rank = value.dim()
    everything = not dims or rank == 0 or len({d % rank for d in dims}) == rank
    if everything and (rank != 1 or not keep):
        return reduction.args[0], "tensor"
    return (reduction.args[0], "token") if is_last_dim(reduction.args[0], dims) else None


MAXIMA = (aten.max.dim, aten.amax.default, aten.max.default)
#: What stands between a maximum and the scale.
_STEPS = (
    *ADD,
    *MUL,
    *DIV,
    *CAST,
    *VIEWS,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
    aten.maximum.default,
)
MINIMA = (aten.min.dim, aten.amin.default, aten.min.default)


def _amax(node: Any) -> tuple[Any, fx.Node, str, bool] | None:
    """``(x, reduced, granularity, signed zero)`` for the largest ``|x|``.

    ``max(max(x), -min(x))`` may be -0.0 where the maximum of absolute values is 0.0.
    """
    found = reduced(node, MAXIMA)
    if found is not None:
        magnitude = peel(found[0])
        if not is_call(magnitude, aten.abs.default):
            return None
        return peel(magnitude.args[0]), found[0], found[1], False
    if not is_call(node, aten.maximum.default):
        return None
    for a, b in (node.args, node.args[::-1]):
        if is_call(a, aten.abs.default) and is_call(b, aten.abs.default):
            a, b = a.args[0], b.args[0]
        elif is_call(b, aten.neg.default):
            b = b.args[0]
        else:
            continue
        # bounded by zero, as torchao has them: the largest |x| all the same
        a = _bounded_by_zero(a, aten.maximum.default)
        b = _bounded_by_zero(b, aten.minimum.default)
        high, low = reduced(a, MAXIMA), reduced(b, MINIMA)
        if high is not None and high == low:
            return peel(high[0]), high[0], high[1], True
    return None


def _bounded_by_zero(node: Any, op: Any) -> Any:
    """x of ``op(x, 0)`` or of a clamp that does the same; ``node`` itself if it is something else.

    They differ in the sign of a zero, which is lost: see ``signed`` above.
    """
    found = commuted(node, (op,), is_zero)
    if found is not None:
        return found[1]
    dtype = dtype_of(node)
    limited = None if dtype is None else clamp_in(node, dtype)
    wanted = (-math.inf, 0.0) if op is aten.minimum.default else (0.0, math.inf)
    return limited[0] if limited is not None and limited[1:] == wanted else node


def is_zero(node: Any) -> bool:
    """Whether ``node`` holds zeros alone, whatever its shape and dtype."""
    while is_call(node, *VIEWS) or cast_to(node) is not None:
        node = node.args[0]
    if is_call(node, aten.full.default):
        return isinstance(node.args[1], (int, float)) and float(node.args[1]) == 0.0
    return scalar(node) == 0.0


def _to_scale_dtype(node: Any, dtype: torch.dtype) -> Any:
    """The amax below its one conversion to the dtype of the scale."""
    if dtype_of(node) != dtype:
        return None
    if cast_to(node) == dtype and dtype in _NARROW:
        node = node.args[0]  # may round: the reference converts there too
    return peel(node)


def _from_amax(
    node: Any,
    how: str,
    qmax: float,
    dtype: torch.dtype,
    floor: tuple[str, float],
    power: str,
    upper: tuple[str, fx.Node | None] = ("none", None),
) -> Scale | None:
    """The part below the division: bounds of amax, its conversion, and the maximum."""
    node, last = _tensor_bound(node, dtype)
    found = clamps_on(node, dtype)
    if found is None:
        return None
    node, lo, hi = found
    if lo > -math.inf:
        if floor[0] != "none":
            return None  # two floors are not a known form
        floor = ("amax", lo)
    else:
        added = plus_number(node, dtype)
        if added is not None:
            if floor[0] != "none" or hi < math.inf:
                return None  # the form bounds first and adds then
            floor, node = ("amax_add", added[1]), peel_views(added[0])
            found = clamps_on(node, dtype)
            if found is None or found[1] > -math.inf:
                return None
            node, _, hi = found
    node, first = _tensor_bound(node, dtype)
    bounds = [bound for bound in (upper[1], last, first) if bound is not None]
    if bounds:
        if len(bounds) > 1 or hi < math.inf:
            return None  # the order of two upper bounds is not part of a form
        if first is not None or (last is not None and not floor[0].startswith("amax")):
            upper = ("amax", bounds[0])
        elif last is not None:
            upper = ("amax_last", last)
    found_amax = _amax(_to_scale_dtype(node, dtype))
    if found_amax is None or not hi > 0:
        return None
    source, over, granularity, signed = found_amax
    if signed and not floor[1] > 0:
        return None
    if not isinstance(source, fx.Node):
        return None
    return Scale(source, over, granularity, how, qmax, *floor, dtype, hi, power, *upper)


def arithmetic_of(node: Any) -> tuple[Any, torch.dtype] | None:
    """What is converted to the float32 ``node``, and the dtype it was computed in."""
    if dtype_of(node) != torch.float32:
        return None
    if cast_to(node) == torch.float32:
        node = peel_views(node.args[0])
    dtype = dtype_of(node)
    return (node, dtype) if dtype in _SCALE_DTYPES else None


def dequant_scale(node: Any) -> Scale | None:
    """The recipe of the dequant scale ``node`` (forms ``div`` and ``mul``), None if not known."""
    node = peel_views(node)
    stored = stored_e8m0(node)
    if stored is not None:
        node = peel_views(stored.args[0])
    found = arithmetic_of(node)
    if found is None:
        return None
    node, dtype = found
    power = "e8m0" if stored is not None else "none"
    inner = _power(node, aten.ceil.default) if dtype == torch.float32 else None
    unsigned = False
    if inner is not None:
        node, power = inner, "ceil" if stored is None else "ceil_e8m0"
        unsigned = is_call(node, aten.abs.default)
        node = peel_views(node.args[0]) if unsigned else node
        found = arithmetic_of(node)
        if found is None or found[1] != torch.float32:
            return None
    floor = ("none", 0.0)
    node, last = _tensor_bound(node, dtype)
    clamps = clamps_on(node, dtype)
    if clamps is None or clamps[2] < math.inf:
        return None
    if clamps[1] > -math.inf:
        node, floor = clamps[0], ("scale", clamps[1])
    else:
        node = clamps[0]
        added = plus_number(node, dtype)
        if added is not None:
            node, floor = peel_views(added[0]), ("scale_add", added[1])
    node, first = _tensor_bound(node, dtype)
    if last is not None and first is not None:
        return None
    upper: tuple[str, fx.Node | None] = ("scale", first or last)
    if last is first:  # None
        upper = ("none", None)
    if last is not None and floor[0] != "none":
        upper = ("scale_last", last)
    constant = scaled_by(node, DIV, dtype)
    how = "div"
    if constant is None:
        constant, how = scaled_by(node, MUL, dtype), "mul"
    if constant is None:
        return None
    made = _from_amax(constant[1], how, constant[0], dtype, floor, power, upper)
    # an absolute value of a scale changes nothing: only a bound that is a tensor may be negative
    return None if unsigned and made is not None and made.scale_ub is not None else made


def stored_e8m0(node: Any) -> Any:
    """The cast of a float32 scale to ``float8_e8m0fnu`` that ``node`` makes float32 again, or None.

    The way back loses nothing: every value of e8m0 is a float32, and is rounded to itself.
    """
    if cast_to(node) != torch.float32:
        return None
    stored = peel_views(node.args[0])
    if cast_to(stored) != torch.float8_e8m0fnu or dtype_of(stored.args[0]) != torch.float32:
        return None
    return stored


def scaled_by(node: Any, ops: tuple[Any, ...], dtype: torch.dtype) -> tuple[float, Any] | None:
    """``(number, inner)`` of ``inner / number`` or ``inner * number`` computed in ``dtype``."""
    if dtype_of(node) != dtype:
        return None
    if ops is DIV:
        if not is_call(node, *DIV) or len(node.args) != 2 or node.kwargs:
            return None
        number, inner = scalar(node.args[1]), node.args[0]
    else:
        found = commuted(node, MUL, scalar)
        if found is None:
            return None
        number, inner = found
    if number is None or number <= 0 or dtype_of(inner) != dtype:
        return None
    return number, peel_views(inner)


def inverse_scale(node: Any) -> Scale | None:
    """The recipe of ``r``, that values are multiplied by (form ``inverse``), None if not known."""
    node, power = peel_views(node), "none"
    inner = _power(node, aten.floor.default)
    if inner is not None:
        node, power = inner, "floor"
    found = arithmetic_of(node)
    if found is None:
        return None
    node, dtype = found
    constant = scaled_by(node, MUL, dtype)
    if constant is None or not is_call(constant[1], aten.reciprocal.default):
        return None  # a true division of a constant tensor rounds once less
    return _from_amax(constant[1].args[0], "inverse", constant[0], dtype, ("none", 0.0), power)


def reciprocal_of(node: Any) -> fx.Node | None:
    """s for ``1 / s`` in any spelling."""
    is_one: Callable[[Any], bool] = lambda a: scalar(a) == 1.0  # noqa: E731
    one = commuted(node, MUL, is_one)
    if one is not None:
        return reciprocal_of(one[1])
    if is_call(node, aten.reciprocal.default) and isinstance(node.args[0], fx.Node):
        return node.args[0]
    return None
