"""Reads a quantise to int8 with a zero point, as decomposed torch writes it.

    x ─ [f32] ─┬─ div ─ [round] ─ + zero ─ [round] ─ clamp ─ cast int8            codes
               ├─ amax - amin ─ / 255 ─ [floor] ─ [cast f32]                      dequant scale
               └─ lo - round(amin / scale) ─ [clamp] ─ [cast]                     zero point

Scale and zero point are both computed from x in a way that is known, or both are given as one
number. The rest is refused: the reader of symmetric quantises would take such a number for another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8pass.ops.forms import MODEL_DTYPES, QuantForm
from fp8pass.reasons import Verdict, no
from fp8pass.spellings.quantize import (
    ROUND,
    QuantMatch,
    applied,
    clamped,
    depends,
    is_int8_cast,
    rows_of,
)
from fp8pass.spellings.scale import (
    MAXIMA,
    MINIMA,
    arithmetic_of,
    clamp_in,
    clamps_on,
    is_zero,
    peel,
    plus_number,
    reduced,
    scaled_by,
)
from fp8pass.spellings.walk import (
    DIV,
    MUL,
    aten,
    cast_to,
    commuted,
    contiguous,
    dtype_of,
    is_call,
    one_element,
    peel_views,
    peel_widening,
    same_shape,
    scalar,
    tensor,
)

#: Ranges of codes: all of int8, symmetric, and torchao's reduced one (``reduce_range``).
_RANGES = ((-128.0, 127.0), (-127.0, 127.0), (-64.0, 63.0))
_GIVEN = (torch.int8, torch.int32, *MODEL_DTYPES)


@dataclass(frozen=True, slots=True)
class Span:
    """A scale computed from the smallest and the largest value of ``source``.

    ``raw`` is the node of the scale before it is made float32, ``low`` that of the smallest value;
    the other fields are those of :class:`fp8pass.ops.forms.QuantForm`.
    """

    source: fx.Node
    over: fx.Node
    granularity: str
    raw: fx.Node
    low: fx.Node
    scale: str
    qmax: float
    floor: str
    floor_value: float
    scale_dtype: torch.dtype
    span: str


def _extreme(node: Any, ops: Any, bound: Any, dtype: torch.dtype) -> Any:
    """``(input, granularity)`` of a smallest or largest value and how it is bounded by zero, else
    None: ``values`` (it is not), ``zero``, ``clamped``, or ``other`` (zeros first)."""
    how = "values"
    while True:
        node = peel_views(node)
        bounded = _bounded_by_zero(node, bound)
        if bounded is not None and how == "values":
            node, how = bounded
        elif cast_to(node) == dtype and isinstance(node.args[0], fx.Node):
            node = node.args[0]
        else:
            break
    known = reduced(node, ops)
    return None if known is None else (known, how)


def _bounded_by_zero(node: Any, op: Any) -> tuple[Any, str] | None:
    """The value that ``node`` bounds by zero, ``op`` the operator of two tensors that does it."""
    found = commuted(node, (op,), is_zero)
    if found is not None:
        return found[1], "zero" if node.args[0] is found[1] else "other"
    dtype = dtype_of(node)
    limited = None if dtype is None else clamp_in(node, dtype)
    wanted = (-math.inf, 0.0) if op is aten.minimum.default else (0.0, math.inf)
    return (limited[0], "clamped") if limited is not None and limited[1:] == wanted else None


def _span(low: str, high: str, floor: tuple[str, float], dtype: torch.dtype) -> str | None:
    """The ``span`` of a form from how both ends are bounded by zero, None if that is not one.

    Ways differ in the sign of a zero, which a scale loses only in a floor above zero.
    """
    if "values" in (low, high):
        return "values" if low == high else None
    if floor[1] >= torch.finfo(dtype).tiny:
        return "zero"
    return low if low == high != "other" else None


def read_span(node: Any) -> Span | None:
    """The recipe of the scale ``node``, None if it is not ``(max - min) / number``."""
    found = arithmetic_of(peel_views(node))
    if found is None:
        return None
    raw, dtype = found
    limited = clamps_on(raw, dtype)
    if limited is None or limited[2] < math.inf:
        return None
    inner, floor = limited[0], ("none", 0.0)
    if limited[1] > -math.inf:
        floor = ("scale", limited[1])
    else:
        more = plus_number(inner, dtype)
        if more is not None:
            inner, floor = peel_views(more[0]), ("scale_add", more[1])
    number, how = scaled_by(inner, DIV, dtype), "div"
    if number is None:
        number, how = scaled_by(inner, MUL, dtype), "mul"
    if number is None:
        return None
    width = number[1]
    if not is_call(width, aten.sub.Tensor) or len(width.args) != 2 or width.kwargs:
        return None
    high_node, low_node = width.args
    if any(dtype_of(n) != dtype for n in (width, high_node, low_node)):
        return None
    high = _extreme(high_node, MAXIMA, aten.maximum.default, dtype)
    low = _extreme(low_node, MINIMA, aten.minimum.default, dtype)
    if high is None or low is None or high[0] != low[0]:
        return None
    (over, granularity), span = high[0], _span(low[1], high[1], floor, dtype)
    source = peel(over)
    if not isinstance(source, fx.Node) or span is None:
        return None
    low_node = peel_views(low_node)
    return Span(
        source, over, granularity, raw, low_node, how, number[0], *floor, dtype, span
    )  # fmt: skip


def _limited(node: Any, dtype: torch.dtype) -> tuple[Any, float, float] | None:
    """``(inner, lo, hi)`` of the clamps on ``node``; those of a narrow dtype are written wide."""
    node = peel_views(node)
    if dtype != torch.float32 and cast_to(node) == dtype:
        both = clamped(node.args[0])
        if both is not None:
            inner = peel_widening(both[0])
            return (inner, both[1], both[2]) if dtype_of(inner) == dtype else None
    return clamps_on(node, dtype)


def _zero_of(node: Any, span: Span, lo: float, hi: float) -> dict[str, Any] | None:
    """The fields of a form that say how the zero point ``node`` is made from ``span``."""
    dtype = span.scale_dtype
    node = peel_views(node)
    made = dtype_of(node)
    if made not in (torch.int8, torch.int32, torch.float32, dtype):
        return None
    if cast_to(node) == made and made != dtype:
        node = peel_views(node.args[0])
    limited = _limited(node, dtype)
    if limited is None:
        return None
    node, bounds = peel_views(limited[0]), limited[1:]
    outer = is_call(node, *ROUND) and dtype_of(node) == dtype
    if outer:
        limited = _limited(node.args[0], dtype)
        if limited is None:
            return None
        node = peel_views(limited[0])
        if limited[1:] != (-math.inf, math.inf):
            if bounds != (-math.inf, math.inf):
                return None
            bounds = limited[1:]
    if bounds == (-math.inf, math.inf):
        clamp = "none"
    elif bounds == (lo, hi):
        clamp = "codes"
    else:
        return None
    if not is_call(node, aten.sub.Tensor) or len(node.args) != 2 or node.kwargs:
        return None
    if scalar(node.args[0]) != lo or dtype_of(node) != dtype:
        return None
    ratio = peel_views(node.args[1])
    inner = is_call(ratio, *ROUND) and dtype_of(ratio) == dtype
    if inner == outer:
        return None
    if inner:
        ratio = peel_views(ratio.args[0])
    if not is_call(ratio, aten.div.Tensor) or len(ratio.args) != 2 or ratio.kwargs:
        return None
    if peel_views(ratio.args[0]) is not span.low or peel_views(ratio.args[1]) is not span.raw:
        return None
    if dtype_of(ratio) != dtype or (made == torch.int8 and clamp != "codes"):
        return None
    how = "lo_round" if inner else "round_lo"
    return {"zero": how, "zero_clamp": clamp, "zero_dtype": made, "span": span.span}


def _summands(root: fx.Node) -> tuple[Any, Any, str, float, float] | None:
    """``(quotient, zero point, place, lo, hi)`` of a rounded, shifted and clamped quotient."""
    inner, rounded = peel_views(root.args[0]), False
    if is_call(inner, *ROUND):
        inner, rounded = peel_views(inner.args[0]), True
    found = clamped(inner)
    if found is None:
        return None
    body, lo, hi = peel_views(found[0]), found[1], found[2]
    if not rounded and is_call(body, *ROUND):
        body, rounded = peel_views(body.args[0]), True
    if rounded and (lo % 1 or hi % 1):
        return None
    if rounded:
        quotient_of = commuted(body, (aten.add.Tensor,), lambda a: applied(peel_views(a)) and a)
        if quotient_of is None or applied(peel_views(quotient_of[1])) is not None:
            return None
        return peel_views(quotient_of[0]), quotient_of[1], "before", lo, hi
    round_of = commuted(
        body, (aten.add.Tensor,), lambda a: a if is_call(peel_views(a), *ROUND) else None
    )
    if round_of is None:
        return None
    quotient, zero = round_of
    if applied(peel_views(peel_views(quotient).args[0])) is None:
        quotient, zero = zero, quotient  # the zero point was rounded as well
        if not is_call(peel_views(quotient), *ROUND):
            return None
    return peel_views(peel_views(quotient).args[0]), zero, "after", lo, hi


def _read(root: fx.Node) -> QuantMatch | str | None:
    parts = _summands(root)
    if parts is None or is_zero(parts[1]) or not isinstance(parts[1], fx.Node):
        return None
    quotient, zero, place, lo, hi = parts
    found = applied(quotient)
    if found is None or found[2] == "mul_inverse":
        return "the number below its zero point is neither x / scale nor x * (1 / scale)"
    scaled, shaped, how = found
    scale = getattr(shaped, "scale", shaped)
    shaped = getattr(shaped, "view", shaped)
    x = peel_widening(scaled)
    value, divided, result = tensor(x), tensor(quotient), tensor(root)
    scale_value, zero_value = tensor(shaped), tensor(zero)
    if value is None or divided is None or result is None or value.dtype not in MODEL_DTYPES:
        return f"it quantises {dtype_of(x)} values"
    if scale_value is None or zero_value is None or dtype_of(scale) != torch.float32:
        return f"its scale is {dtype_of(scale)}, not float32"
    if divided.dtype != torch.float32 or dtype_of(peel_views(root.args[0])) != torch.float32:
        return f"it divides in {divided.dtype} with a zero point of {zero_value.dtype}"
    if not same_shape(divided, value) or not same_shape(result, value) or not contiguous(result):
        return "its result is broadcast or not contiguous"
    if (lo, hi) not in _RANGES:
        return f"it clamps to [{lo}, {hi}]"
    if zero_value.dtype not in _GIVEN:
        return f"its zero point {zero.name} is {zero_value.dtype}"
    source, span = peel(x), read_span(scale)
    if span is not None and span.source is source:
        more = _zero_of(zero, span, lo, hi)
        if more is None:
            return f"its zero point {zero.name} is not the one of its scale, {lo} - min / scale"
        if span.granularity == "token":
            over = tensor(span.over)
            if over is None or not same_shape(over, value):
                return "its per-token scale is reshaped before it is used"
            if not rows_of(scale_value, value) or not rows_of(zero_value, value):
                return "its per-token scale or zero point is reshaped before it is used"
        elif not one_element(scale_value) or not one_element(zero_value):
            return "its scale or its zero point is not one number"
        form = QuantForm(
            torch.int8, span.granularity, torch.float32, span.scale, span.qmax, span.floor,
            span.floor_value, how, lo, hi, scale_dtype=span.scale_dtype, zero_at=place, **more,
        )  # fmt: skip
        return QuantMatch(root, x, peel_views(scale), form, zero=peel_views(zero))
    if not one_element(scale_value) or not one_element(zero_value):
        return (
            f"its scale {scale.name} and zero point {zero.name} of shapes"
            f" {tuple(scale_value.shape)} and {tuple(zero_value.shape)} are not computed in a"
            " known way"
        )
    if depends(scale, source) or depends(zero, source):
        return f"its scale {scale.name} or zero point {zero.name} is not computed in a known way"
    form = QuantForm(
        torch.int8, "tensor", torch.float32, "given", hi - lo, "none", 0.0, how, lo, hi,
        zero="given", zero_at=place,
    )  # fmt: skip
    return QuantMatch(root, x, scale, form, zero=zero)


def match_zero_point(root: fx.Node) -> QuantMatch | Verdict | None:
    """The quantise with a zero point whose codes are ``root``; None if it adds no zero point.

    A refusal is FP8-R001, as of other quantises.
    """
    if not is_int8_cast(root):
        return None
    found = _read(root)
    if isinstance(found, str):
        return no("FP8-R001", dtype=cast_to(root), node=root.name, why=found)
    return found
