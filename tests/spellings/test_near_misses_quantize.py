"""Near-misses of quantises, each beside its control: none is taken for its neighbour."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import Passed, Reading, assert_same_bits, read, run, trace, values, vector
from spell import I8, MORE_QUANTS, G, llama, saturated

Tensor = torch.Tensor
X, S = values(6, 64), torch.tensor(0.02)
Fn = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


def token(scale: Callable[[Tensor], Tensor]) -> Fn:
    def fn(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        made = scale(y.float().abs().amax(-1, keepdim=True))
        return saturated(y.float() / made), made

    return fn


def inverse(factor: Callable[[Tensor], Tensor], dequant: bool = True) -> Fn:
    def fn(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        r = factor(y.float().abs().amax(-1, keepdim=True))
        return saturated(y.float() * r), r.reciprocal() if dequant else r

    return fn


def mantissa(a: Tensor) -> Tensor:
    bits = (a / 448).clamp(min=1e-12).view(torch.int32)
    return ((bits + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)


def over_rows(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    parts = y.float().view(6, 4, G)
    scale = (parts.abs().amax(-2, keepdim=True) / 448).clamp(min=1e-10)
    return (saturated(parts / scale).view(6, 64),)


def overlapping(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    """The maxima are over other groups than those that are divided."""
    scale = (y.float().view(4, 6, G).abs().amax(-1) / 448).clamp(min=1e-10)
    return (saturated(y.float().view(6, 4, G) / scale.view(6, 4)[..., None]).view(6, 64),)


def turned(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    parts = y.float().view(6, 4, G)
    scale = (parts.abs().amax(-1) / 448).clamp(min=1e-10)
    return (saturated(parts / scale.view(4, 6).t()[..., None]).view(6, 64),)


def int8(
    lo: float = -128,
    hi: float = 127,
    rounding: Callable[[Tensor], Tensor] = torch.round,
    shift: float | None = None,
) -> Fn:
    def fn(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        value = rounding(y.float() / s)
        if shift is not None:
            value = value + shift
        return (value.clamp(lo, hi).to(I8),)

    return fn


def half_bound(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    return (torch.round((y.float() / s).clamp(-127.5, 127.5)).to(I8),)


GOOD_POWER = MORE_QUANTS["power"][0]
GOOD_INVERSE, GOOD_GROUP = MORE_QUANTS["token_inverse"][0], MORE_QUANTS["group"][0]

#: name -> (near-miss, which is refused by name, control)
CASES: dict[str, tuple[Fn, Any]] = {
    "power_by_rounding": (
        token(lambda a: torch.exp2(torch.round(torch.log2((a / 448).clamp(min=1e-12))))),
        GOOD_POWER,
    ),
    "power_by_floor": (
        token(lambda a: torch.exp2(torch.floor(torch.log2((a / 448).clamp(min=1e-12))))),
        GOOD_POWER,
    ),
    "power_of_three": (
        token(lambda a: torch.pow(3.0, torch.ceil(torch.log2((a / 448).clamp(min=1e-12))))),
        GOOD_POWER,
    ),
    "power_then_floor": (
        token(lambda a: torch.exp2(torch.ceil(torch.log2(a / 448))).clamp(min=1e-12)),
        GOOD_POWER,
    ),
    "power_by_bits": (token(mantissa), GOOD_POWER),
    "negative_eps_added": (
        token(lambda a: a / 448 + -1e-12),
        MORE_QUANTS["eps_added"][0],
    ),
    "bound_of_each_row": (
        token(lambda a: torch.minimum(a, a.mean(-1, keepdim=True)) / 448),
        MORE_QUANTS["upper_bound"][0],
    ),
    "bound_on_the_scale": (
        token(lambda a: (a / 448).clamp(max=0.1)),
        MORE_QUANTS["upper_bound"][0],
    ),
    "inverse_without_its_reciprocal": (
        inverse(lambda a: 448 / a.clamp(min=1e-12), dequant=False),
        GOOD_INVERSE,
    ),
    "inverse_that_is_given": (lambda y, s: (saturated(y.float() * s),), GOOD_INVERSE),
    "inverse_rounded_up": (
        inverse(lambda a: torch.exp2(torch.ceil(torch.log2(448 / a.clamp(min=1e-12))))),
        GOOD_INVERSE,
    ),
    "inverse_by_true_division": (
        inverse(lambda a: torch.full((), 448.0) / a.clamp(min=1e-12)),
        GOOD_INVERSE,
    ),
    "groups_over_rows": (over_rows, GOOD_GROUP),
    "groups_of_others": (overlapping, GOOD_GROUP),
    "group_scales_turned": (turned, GOOD_GROUP),
    "int8_truncated": (int8(rounding=torch.trunc), int8()),
    "int8_not_rounded": (int8(rounding=lambda v: v), int8()),
    "int8_with_a_zero_point": (int8(shift=3.0), int8()),
    "int8_clamped_low": (int8(lo=-100), int8()),
    "int8_beyond": (int8(hi=200), int8()),
    "int8_bounds_between_codes": (half_bound, int8()),
}


@pytest.mark.parametrize("name", CASES)
def test_near_miss_and_its_control(name: str) -> None:
    near, control = CASES[name]
    reading = Reading(trace(near, X, S))
    reading.check(X, S)
    assert reading.forms("quantize") == []
    assert [code for _, code, _ in reading.unread] == ["FP8-R001"]
    assert len(read(control, X, S).forms("quantize")) == 1


def test_signed_zero_of_a_maximum_without_floor() -> None:
    """``max(max(x), -min(x))`` of zeros may be -0.0; a floor makes it the maximum of ``|x|``."""

    def fn(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        low, high = y.float().aminmax(dim=-1, keepdim=True)
        scale = torch.maximum(high, -low) / 448
        return saturated(y.float() / scale), scale

    assert read(fn, X, S).forms("quantize") == []
    assert len(read(MORE_QUANTS["token_aminmax"][0], X, S).forms("quantize")) == 1


def test_a_given_scale_per_column_is_not_one_per_row() -> None:
    """With as many rows as columns the dims tell them apart, not the number of scales."""
    square, scales = values(64, 64), torch.rand(64) + 0.01

    def fn(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        return (saturated(y.float() / s),)

    assert read(fn, square, scales).forms("quantize") == []
    assert len(read(fn, square, scales[:, None].contiguous()).forms("quantize")) == 1


@pytest.mark.parametrize("name", ["power_by_bits", "groups_over_rows", "bound_on_the_scale"])
def test_behind_a_norm_nothing_is_fused(name: str) -> None:
    inputs = values(6, 64), vector(64), S
    near = CASES[name][0]
    passed = Passed(trace(lambda x, w, s: near(llama(x, w, 1e-6), s), *inputs), strict=True)
    assert passed.fusions == 0
    assert_same_bits(run(passed.after, *inputs), run(passed.before, *inputs))
