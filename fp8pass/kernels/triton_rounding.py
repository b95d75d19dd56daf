"""Roundings and exact arithmetic for Triton kernels: what a producer needs beyond ``tl``.

Every function takes ``NATIVE``. True, on a GPU: casts of the hardware, which round to nearest even
and saturate. False, in Triton's interpreter on a CPU, whose own casts truncate: rounding on the
bits. (Its ``tl.fma`` rounds twice, too, so whatever relies on a fused multiply-add has a plain form
here.)

Kernels of this package call nothing of ``tl`` that is itself written in Triton (``tl.sum``,
``tl.max``, ``tl.cdiv``): then they can be interpreted in a process that has imported Triton for
compiling.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: SIM300  (names in capitals are compile-time arguments here, not constants)

from __future__ import annotations

import triton
import triton.language as tl

#: Whether kernels decorated in this process are compiled; constant, since Triton decides when it
#: decorates a function.
NATIVE = tl.constexpr(not triton.knobs.runtime.interpret)

# Scales in [2^-60, 2^60] are divided by as they are, others after a shift by 2^100, which is exact:
# the remainder of every quotient that is not a zero code is then exact in float32.
_SMALL = tl.constexpr(2.0**-60)
_LARGE = tl.constexpr(2.0**60)
_UP = tl.constexpr(2.0**100)
_DOWN = tl.constexpr(2.0**-100)
_LOG2E = tl.constexpr(1.4426950408889634)
_INF = tl.constexpr(float("inf"))


# ---- casts --------------------------------------------------------------------------------------


@triton.jit
def widen(x, NATIVE: tl.constexpr):
    """A model dtype to float32, exactly; subnormals and NaN too."""
    if NATIVE or x.dtype != tl.bfloat16:
        wide = x.to(tl.float32)
    else:
        wide = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return wide


@triton.jit
def narrow(x, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """float32 to ``DTYPE`` (float32, bfloat16 or float16), to nearest even."""
    if NATIVE or DTYPE != tl.bfloat16:
        short = x.to(DTYPE)
    else:
        bits = x.to(tl.int32, bitcast=True)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(x != x, 0x7FC00000, bits)  # the carry would turn some NaN into zero
        short = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return short


@triton.jit
def rounded(x, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """float32 rounded to ``DTYPE`` and back: what a cast in the source does to a value.

    Where both operands of a product or a sum come from here (or from memory) and its result goes
    here, LLVM makes one packed 16-bit operation of it: same value, a sixth of the instructions.
    """
    if DTYPE == tl.float32:
        value = x
    else:
        value = widen(narrow(x, DTYPE, NATIVE), NATIVE)
    return value


@triton.jit
def rounded_pairs(x, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """As :func:`rounded`, for a block of float32 arithmetic that LLVM has nothing to pack with.

    It would convert value by value, which runs at a quarter of the speed of a packed conversion.
    """
    if NATIVE and DTYPE == tl.bfloat16:
        value = tl.inline_asm_elementwise(
            """{ .reg .b32 both;
                 cvt.rn.bf16x2.f32 both, $3, $2;
                 shl.b32 $0, both, 16;
                 and.b32 $1, both, 0xffff0000; }""",
            "=r,=r,r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    elif NATIVE and DTYPE == tl.float16:
        value = tl.inline_asm_elementwise(
            """{ .reg .b32 both;
                 .reg .b16 low, high;
                 cvt.rn.f16x2.f32 both, $3, $2;
                 mov.b32 {low, high}, both;
                 cvt.f32.f16 $0, low;
                 cvt.f32.f16 $1, high; }""",
            "=f,=f,f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        value = rounded(x, DTYPE, NATIVE)
    return value


@triton.jit
def to_fp8(x, FP8: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr, NATIVE: tl.constexpr):
    """float32 to codes of ``FP8`` (``tl.float8e4nv`` or ``tl.float8e5``), clamped to [LO, HI].

    The bounds lie in the range of ``FP8``; NaN stays NaN. Without ``NATIVE`` the codes are uint8.
    """
    x = tl.clamp(x, LO, HI, propagate_nan=tl.PropagateNan.ALL)
    if NATIVE:
        code = x.to(FP8)
    else:
        bits = x.to(tl.int32, bitcast=True)
        sign = (bits >> 24) & 0x80
        size = bits & 0x7FFFFFFF
        # Normal codes: add half a step of the shorter mantissa and cut, then move the exponent's
        # bias. Subnormal codes: an addition whose last place is one step of them does the rounding.
        if FP8 == tl.float8e4nv:
            normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
            low = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
            magnitude = tl.where(size < 0x3C800000, low, normal)
        else:
            normal = ((size + 0xFFFFF + ((size >> 21) & 1)) >> 21) - ((127 - 15) << 2)
            low = (tl.abs(x) + 128.0).to(tl.int32, bitcast=True) - 0x43000000
            magnitude = tl.where(size < 0x38800000, low, normal)
        code = tl.where(x != x, sign | 0x7F, sign | magnitude).to(tl.uint8)
    return code


@triton.jit
def to_int8(x, LO: tl.constexpr, HI: tl.constexpr):
    """float32 to the nearest integers, ties to even, within [LO, HI]; NaN becomes 0.

    The bounds are integers of int8, so that rounding after the clamp is rounding before it. Adding
    1.5 * 2^23 rounds to an integer, and leaves it in the lowest byte.
    """
    x = tl.where(x == x, x, 0.0)
    x = tl.clamp(x, LO, HI)
    return ((x + 12582912.0).to(tl.int32, bitcast=True) & 0xFF).to(tl.int8)


# ---- reductions ---------------------------------------------------------------------------------


@triton.jit
def plus(a, b):
    """For ``tl.reduce``: the sum."""
    return a + b


@triton.jit
def larger(a, b):
    """For ``tl.reduce``: the larger value, NaN if either is, as ``torch.amax``."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


# ---- arithmetic ---------------------------------------------------------------------------------


@triton.jit
def times(a, b, NATIVE: tl.constexpr):
    """``a * b`` rounded by itself: never contracted with an addition that follows."""
    if NATIVE:
        product = tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        product = a * b
    return product


@triton.jit
def inverse_root(x):
    """``1 / sqrt(x)`` as the hardware's ``rsqrt`` without flushing subnormal numbers to zero."""
    tiny = x < _DOWN
    return tl.rsqrt(tl.where(tiny, x * _UP, x)) * tl.where(tiny, 1125899906842624.0, 1.0)


@triton.jit
def divisor(scale, ORDINARY: tl.constexpr, NATIVE: tl.constexpr):
    """What :func:`divided` needs of a scale: ``(shift, shifted scale, 1 / shifted scale)``.

    ``scale`` is a float32 scalar, not negative. ``ORDINARY``: where it is finite it lies in
    [2^-80, 2^120], and is the quotient of the largest value and a constant, or more.
    """
    shift = 1.0
    if not ORDINARY:
        shift = tl.where(scale < _SMALL, _UP, tl.where(scale > _LARGE, _DOWN, 1.0))
        scale = scale * shift
    reciprocal = tl.div_rn(1.0, scale)
    # x / inf is 0, or NaN for an infinite x: x * reciprocal is that already, and a remainder taken
    # with the factor 0 instead of inf keeps it.
    if NATIVE:
        scale = tl.where(scale == _INF, 0.0, scale)
    return shift, scale, reciprocal


@triton.jit
def divided(
    x,
    shift,
    scale,
    reciprocal,
    ORDINARY: tl.constexpr,
    LO: tl.constexpr,
    HI: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The IEEE quotient of ``x`` and the scale of :func:`divisor`, where it lies in [LO, HI].

    A multiplication by the correctly rounded reciprocal and one correction by the exact remainder
    give the correctly rounded quotient (Brisebarre, Muller, Raina: "Accelerating correctly rounded
    floating-point division when the divisor is known in advance", 2004), in 3 instructions for the
    12 and a branch of a division. A scale out of the ordinary takes 2 more: the shift keeps the
    remainder exact, the clamp keeps infinities out of it (what that cuts off, the correction puts
    back beyond the bound). Quotients below 2^-18, of which every cast makes a zero code, may be off
    in the last place.
    """
    if not ORDINARY:
        x = x * shift
    if NATIVE:
        guess = x * reciprocal
        if not ORDINARY:
            guess = tl.clamp(guess, LO, HI, propagate_nan=tl.PropagateNan.ALL)
        # Minus the remainder, so that a quotient of zero keeps its sign. Negations by a factor: of
        # -x Triton makes 0 - x, which is an instruction and has no negative zero.
        excess = tl.fma(guess, scale, x * -1.0)
        quotient = tl.fma(excess * -1.0, reciprocal, guess)
    else:
        quotient = tl.div_rn(x, scale)
    return quotient


@triton.jit
def silu(gate, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """SiLU in float32: ``g / (1 + exp(-g))`` (``KIND`` "div") or ``g * sigmoid(g)`` ("sigmoid").

    ``KIND`` "logistic" is ``sigmoid(g)`` alone.

    On a GPU the exponential is ``exp2`` of one rounded product: relative to its own value it is off
    by about ``|g| * 2^-24``, the result by ``0.3 * 2^-24`` for positive gates and by as much as the
    exponential for negative ones. The quotient is exact up to its last bit: the denominator is a
    quarter of the true one, so that its approximate reciprocal is never subnormal, and is corrected
    once.
    """
    if NATIVE:
        grown = tl.exp2(gate * -_LOG2E)
        quarter = tl.fma(grown, 0.25, 0.25)
        reciprocal = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [quarter], dtype=tl.float32, is_pure=True, pack=1
        )
        if KIND == "div":
            part = gate * 0.25
        else:
            part = tl.full(gate.shape, 0.25, tl.float32)
        guess = part * reciprocal
        excess = tl.fma(guess, quarter, part * -1.0)
        corrected = tl.fma(excess * -1.0, reciprocal, guess)
        # inf - inf where the gate or the exponential is infinite: the guess is exact there
        value = tl.where(corrected == corrected, corrected, guess)
        if KIND == "sigmoid":
            value = gate * value
    else:
        grown = tl.exp(gate * -1.0)
        if KIND == "div":
            value = tl.div_rn(gate, grown + 1.0)
        else:
            value = tl.div_rn(1.0, grown + 1.0)
            if KIND == "sigmoid":
                value = gate * value
    return value
