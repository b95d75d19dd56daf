"""The scale that follows from a largest value, in every form of :class:`QuantForm`.

The constants are those of :func:`fp8pass.kernels.triton_launch.quant_constants`. ``WIDE`` is the
dtype of the scale's arithmetic: each step is rounded to it, as the source does. A multiplication by
itself is never contracted with an addition that follows.
"""
# mypy: disable-error-code="no-untyped-def, assignment"
# ruff: noqa: SIM300  (names in capitals are compile-time arguments here, not constants)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from fp8pass.kernels.triton_rounding import NATIVE, larger, rounded, times


@triton.jit
def held(x, WIDE: tl.constexpr):
    """A result as ``WIDE`` holds it: float64 as it is, other dtypes in float32, rounded."""
    if WIDE == tl.float64:
        value = x
    else:
        value = rounded(x, WIDE, NATIVE)
    return value


@triton.jit
def _product(a, b, WIDE: tl.constexpr):
    """``a * b`` rounded by itself; ``b`` is a constant."""
    other = tl.full(a.shape, b, a.dtype)
    if WIDE == tl.float64 and NATIVE:
        value = tl.inline_asm_elementwise(
            "mul.rn.f64 $0, $1, $2;", "=d,d,d", [a, other], dtype=tl.float64, is_pure=True, pack=1
        )
    else:
        value = times(a, other, NATIVE)
    return held(value, WIDE)


@triton.jit
def _quotient(a, b, WIDE: tl.constexpr):
    """The IEEE quotient, rounded to ``WIDE``."""
    if WIDE == tl.float64:
        value = a / b
    else:
        value = tl.div_rn(a, b)
    return held(value, WIDE)


@triton.jit
def _at_least(x, bound, WIDE: tl.constexpr):
    """``clamp(min=bound)``: NaN stays. (Not every GPU has such a maximum of float64.)"""
    if WIDE == tl.float64:
        least = tl.full(x.shape, bound, tl.float64)
        value = tl.where(x < least, least, x)
    else:
        value = held(larger(x, bound), WIDE)
    return value


@triton.jit
def _log2(x):
    """The logarithm that eager computes: on a GPU that of libdevice."""
    if NATIVE:
        value = libdevice.log2(x)
    elif x.dtype == tl.float64:
        value = tl.log2(x)
    else:
        value = tl.log2(x.to(tl.float64)).to(tl.float32)
    return value


@triton.jit
def exp2_of_integer(power):
    """``2 ** power`` for a whole number in float32 or float64, exactly: float32.

    Half of the power at a time, each a float32 with that exponent, so that infinities, subnormal
    numbers and zero come from their product. NaN stays NaN.
    """
    bounded = tl.where(power > 250.0, 250.0, tl.where(power < -250.0, -250.0, power))
    whole = tl.where(power == power, bounded, 0.0).to(tl.int32)
    half = whole >> 1
    first = ((half + 127) << 23).to(tl.float32, bitcast=True)
    second = ((whole - half + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(power == power, first * second, power.to(tl.float32))


@triton.jit
def _to_power(x, POWER: tl.constexpr, WIDE: tl.constexpr):
    """``exp2(ceil(log2(x)))``, or with ``floor``; the logarithm rounded as eager rounds it."""
    power = held(_log2(x), WIDE)
    if POWER == "ceil":
        power = tl.ceil(power)
    else:
        power = tl.floor(power)
    value = exp2_of_integer(power)
    if WIDE != tl.float64:
        value = held(value, WIDE)
    return value


@triton.jit
def _bounded(
    amax, FLOOR: tl.constexpr, FLOOR_VALUE: tl.constexpr, CEILING: tl.constexpr, WIDE: tl.constexpr
):
    """The largest value within its bounds, in the arithmetic of ``WIDE``."""
    if WIDE == tl.float64:
        amax = amax.to(tl.float64)
    else:
        amax = held(amax, WIDE)
    if CEILING != 0.0:
        most = tl.full(amax.shape, CEILING, amax.dtype)
        amax = held(tl.where(amax > most, most, amax), WIDE)
    if FLOOR == "amax":
        amax = _at_least(amax, FLOOR_VALUE, WIDE)
    elif FLOOR == "amax_add":
        amax = held(amax + FLOOR_VALUE, WIDE)
    elif FLOOR == "amax_zero":  # NaN is not above zero either
        amax = held(tl.where(amax > 0.0, amax, tl.full(amax.shape, FLOOR_VALUE, amax.dtype)), WIDE)
    return amax


@triton.jit
def scale_of(
    amax,
    SCALE: tl.constexpr,
    FACTOR: tl.constexpr,
    FLOOR: tl.constexpr,
    FLOOR_VALUE: tl.constexpr,
    CEILING: tl.constexpr,
    POWER: tl.constexpr,
    WIDE: tl.constexpr,
):
    """``(dequant scale, what values are scaled by)`` of a largest value, both float32.

    The second is the scale itself, the scale with the floor of a divisor, or the inverse scale that
    values are multiplied by. NaN stays NaN, but for ``FLOOR`` "amax_zero".
    """
    amax = _bounded(amax, FLOOR, FLOOR_VALUE, CEILING, WIDE)
    if SCALE == "inverse":
        one = tl.full(amax.shape, 1.0, amax.dtype)
        used = _product(_quotient(one, amax, WIDE), FACTOR, WIDE).to(tl.float32)
        if POWER == "floor":
            used = _to_power(used, POWER, tl.float32)
        scale = tl.div_rn(tl.full(used.shape, 1.0, tl.float32), used)
    else:
        if SCALE == "div" and not NATIVE:
            scale = _quotient(amax, tl.full(amax.shape, FACTOR, amax.dtype), WIDE)
        elif FLOOR == "scale_add":
            scale = _product(amax, FACTOR, WIDE)
        else:
            scale = held(amax * FACTOR, WIDE)
        if FLOOR == "scale":
            scale = _at_least(scale, FLOOR_VALUE, WIDE)
        elif FLOOR == "scale_add":
            scale = held(scale + FLOOR_VALUE, WIDE)
        if POWER == "ceil":
            scale = _to_power(scale, POWER, WIDE)
        scale = scale.to(tl.float32)
        used = scale
        if FLOOR == "divisor":
            used = larger(scale, FLOOR_VALUE)
    return scale, used
