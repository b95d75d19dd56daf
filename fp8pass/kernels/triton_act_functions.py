"""The activations of :class:`fp8pass.ops.forms.ActForm` for Triton kernels, step by step.

Each step is rounded where the form rounds it. On a GPU erf and tanh are those of libdevice, which
torch's eager kernels and Inductor call too; Triton's interpreter has no libdevice, so that tanh is
computed in float64 there.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: SIM300  (names in capitals are compile-time arguments here, not constants)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from fp8pass.kernels.triton_rounding import rounded, silu
from fp8pass.ops import act_form

_SQRT_HALF = tl.constexpr(act_form.SQRT_HALF)
_SQRT_TWO = tl.constexpr(act_form.SQRT_TWO)
#: 1 over float32's square root of 2 (1.41421354), rounded to float32 when it is used.
_INVERSE = tl.constexpr(1.0 / 1.41421353816986083984375)
_SQRT_2_OVER_PI = tl.constexpr(act_form.SQRT_2_OVER_PI)
_CUBIC = tl.constexpr(act_form.CUBIC)
_QUICK = tl.constexpr(act_form.QUICK)
_LIMIT = tl.constexpr(act_form.GPT_OSS_LIMIT)


@triton.jit
def tanh(x, NATIVE: tl.constexpr):
    """tanh in float32."""
    if NATIVE:
        value = libdevice.tanh(x)
    else:
        # of the magnitude, so that the exponential does not overflow
        wide = x.to(tl.float64)
        small = tl.exp(tl.abs(wide) * -2.0)
        value = (1.0 - small) / (1.0 + small)
        value = tl.where(wide < 0.0, value * -1.0, value).to(tl.float32)
    return value


@triton.jit
def times(x, y, NATIVE: tl.constexpr):
    """A rounded product: the compiler cannot make one operation of it and the sum that follows."""
    if NATIVE:
        value = tl.fma(x, y, tl.full(x.shape, 0.0, tl.float32))
    else:
        value = x * y
    return value


@triton.jit
def over_sqrt_two(x, NATIVE: tl.constexpr):
    """The IEEE quotient of ``x`` and float32's square root of 2.

    A product with the rounded reciprocal, corrected by its remainder, as
    :func:`fp8pass.kernels.triton_rounding.divided` does.
    """
    root = tl.full(x.shape, _SQRT_TWO, tl.float32)
    if NATIVE:
        inverse = tl.full(x.shape, _INVERSE, tl.float32)
        guess = x * inverse
        excess = tl.fma(guess, root, x * -1.0)
        corrected = tl.fma(excess * -1.0, inverse, guess)
        # inf - inf where x is infinite: the guess is exact there
        value = tl.where(corrected == corrected, corrected, guess)
    else:
        value = tl.div_rn(x, root)
    return value


@triton.jit
def _silu_steps(g, ACT: tl.constexpr, COMPUTE: tl.constexpr, NATIVE: tl.constexpr):
    if ACT == "div":
        grown = rounded(tl.exp(g * -1.0), COMPUTE, NATIVE)
        value = tl.div_rn(g, rounded(grown + 1.0, COMPUTE, NATIVE))
    else:
        value = g * rounded(silu(g, "logistic", NATIVE), COMPUTE, NATIVE)
    return value


@triton.jit
def _gelu(g, ACT: tl.constexpr, COMPUTE: tl.constexpr, NATIVE: tl.constexpr):
    if ACT == "gelu_erf":
        step = tl.math.erf(rounded(g * _SQRT_HALF, COMPUTE, NATIVE))
    elif ACT == "gelu_erf_div":
        step = tl.math.erf(rounded(over_sqrt_two(g, NATIVE), COMPUTE, NATIVE))
    else:  # pow(g, 3) is the same product in torch
        cube = rounded(rounded(g * g, COMPUTE, NATIVE) * g, COMPUTE, NATIVE)
        weight = tl.full(g.shape, _CUBIC, tl.float32)
        cubic = rounded(times(cube, weight, NATIVE), COMPUTE, NATIVE)
        inner = rounded(g + cubic, COMPUTE, NATIVE)
        step = tanh(rounded(inner * _SQRT_2_OVER_PI, COMPUTE, NATIVE), NATIVE)
    raised = rounded(rounded(step, COMPUTE, NATIVE) + 1.0, COMPUTE, NATIVE)
    return rounded(g * 0.5, COMPUTE, NATIVE) * raised


@triton.jit
def activated(g, ACT: tl.constexpr, COMPUTE: tl.constexpr, NATIVE: tl.constexpr):
    """The activation of ``g`` (float32 values) with every step rounded to ``COMPUTE``."""
    g = rounded(g, COMPUTE, NATIVE)
    if ACT == "gpt_oss":
        g = tl.where(g > _LIMIT, _LIMIT, g)  # NaN stays
    if ACT == "div" or ACT == "sigmoid":
        if COMPUTE == tl.float32:
            value = silu(g, ACT, NATIVE)
        else:
            value = _silu_steps(g, ACT, COMPUTE, NATIVE)
    elif ACT == "gelu_quick" or ACT == "gpt_oss":
        inner = silu(rounded(g * _QUICK, COMPUTE, NATIVE), "logistic", NATIVE)
        value = g * rounded(inner, COMPUTE, NATIVE)
    elif ACT == "relu" or ACT == "relu2":
        value = tl.where(g < 0.0, 0.0, g)  # NaN stays
        if ACT == "relu2":
            value = value * value
    else:
        value = _gelu(g, ACT, COMPUTE, NATIVE)
    return rounded(value, COMPUTE, NATIVE)


@triton.jit
def factor(up, ACT: tl.constexpr, COMPUTE: tl.constexpr, NATIVE: tl.constexpr):
    """What the activation is multiplied by: ``up``, or what GPT-OSS makes of it."""
    if ACT == "gpt_oss":
        up = rounded(up, COMPUTE, NATIVE)
        up = tl.where(up > _LIMIT, _LIMIT, up)
        up = tl.where(up < _LIMIT * -1.0, _LIMIT * -1.0, up)
        up = rounded(up + 1.0, COMPUTE, NATIVE)
    return up
