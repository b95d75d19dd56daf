"""Spans that contain zero, however that is written, and quantises to int8 that no form has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import Passed, Reading, post_grad, read, trace, values
from spell_zero_point import I8, I32

Tensor = torch.Tensor
Fn = Callable[[Tensor], tuple[Tensor, ...]]
Ends = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _zeros(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    zeros = torch.zeros_like(low)
    return torch.minimum(low, zeros), torch.maximum(high, zeros)


def _zeros_first(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    zeros = torch.zeros_like(low)
    return torch.minimum(zeros, low), torch.maximum(zeros, high)


ENDS: dict[str, tuple[Ends, str]] = {
    "zeros": (_zeros, "zero"),
    "zeros_first": (_zeros_first, "other"),
    "clamp": (lambda low, high: (low.clamp(max=0), high.clamp(min=0)), "clamped"),
    "clamp_one_side": (lambda low, high: (low.clamp_max(0.0), high.clamp_min(0.0)), "clamped"),
    "aten_forms": (
        lambda low, high: (
            torch.ops.aten.clamp_max.default(low, 0),
            torch.ops.aten.clamp_min.default(high, 0),
        ),
        "clamped",
    ),
    "mixed": (lambda low, high: (_zeros(low, high)[0], high.clamp(min=0)), "other"),
}


def quantise(
    ends: Ends = lambda low, high: (low, high),
    floor: float = 0.0,
    dims: Any = -1,
    add: float = 0.0,
    zero: Callable[[Tensor], Tensor] = lambda z: z,
    narrow: bool = False,
    first: bool = False,
) -> Fn:
    """Per token or per tensor; the zero point in float, and clamped only where ``zero`` does."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        wide = x if narrow else x.float()
        low, high = ends(wide.amin(dims, keepdim=True), wide.amax(dims, keepdim=True))
        scale = (high - low) / 255
        scale = scale.clamp(min=floor) if floor else scale
        scale = scale + add if add else scale
        z = zero(torch.round(-128 - low / scale))
        scale, rounded = scale.float(), torch.round(x.float() / scale.float())
        q = z + rounded if first else rounded + z
        return q.clamp(-128, 127).to(I8), scale, z

    return fn


def corners(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows of zeros of both signs, of one number, with NaN and infinity."""
    x = values(70, 64, dtype=torch.float32)
    x[1], x[2], x[3, :32], x[4], x[7] = -0.0, 0.0, -0.0, 3.0, -3.0
    x[5, 3], x[6, 3] = float("nan"), float("inf")
    return x.to(dtype)


@pytest.mark.parametrize("dims", [-1, (0, 1)], ids=str)
@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("least", [{}, {"floor": 1e-8}, {"add": 1e-6}], ids=str)
@pytest.mark.parametrize("narrow", [False, True])
def test_a_span_that_contains_zero(name: str, dims: Any, least: Any, narrow: bool) -> None:
    """Without a floor the sign of a scale of zero is that of the very operator."""
    ends, span = ENDS[name]
    if narrow and least:
        least = {key: 2.0**-20 for key in least}
    fn = quantise(ends, dims=dims, narrow=narrow, **least)
    reading = read(fn, corners())
    if span == "other" and not least:
        assert [code for _, code, _ in reading.unread] == ["FP8-R001"]
        return
    (form,) = reading.forms("quantize")
    assert f"span={'zero' if least else span}" in form and not reading.unread


@pytest.mark.parametrize(
    "ends",
    [
        lambda low, high: (low.clamp(max=0), high),
        lambda low, high: (low, high.clamp(min=0)),
        lambda low, high: (low.clamp(max=1), high.clamp(min=1)),
        lambda low, high: (low.clamp(min=0), high.clamp(max=0)),
        lambda low, high: (low.clamp(-5, 0), high.clamp(0, 5)),
        lambda low, high: (low.clamp(max=0).clamp(max=0), high.clamp(min=0).clamp(min=0)),
    ],
)
def test_other_bounds_of_a_span_are_not_read(ends: Ends) -> None:
    reading = Reading(trace(quantise(ends, floor=1e-8), corners()))
    reading.check(corners())
    assert reading.forms("quantize") == []
    assert [code for _, code, _ in reading.unread] == ["FP8-R001"]
    assert read(quantise(ENDS["clamp"][0], floor=1e-8), corners()).forms("quantize")


@pytest.mark.parametrize("name", ["zeros", "clamp", "clamp_one_side"])
def test_a_span_after_inductors_passes(name: str) -> None:
    after = post_grad(trace(quantise(ENDS[name][0], floor=1e-8), corners()))
    reading = Reading(after)
    reading.check(corners())
    (form,) = reading.forms("quantize")
    assert "span=zero" in form


# ---- every quantise has a line in the report -----------------------------------------------------

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "float": lambda z: z,
    "int32": lambda z: z.to(I32),
    "clamped": lambda z: z.clamp(-128, 127),
    "clamped_int8": lambda z: z.clamp(-128, 127).to(I8),
}


@pytest.mark.parametrize("dims", [-1, (0, 1)], ids=str)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_a_zero_point_clamped_or_not_is_read(name: str, dims: Any, first: bool) -> None:
    fn = quantise(zero=KINDS[name], dims=dims, first=first)
    reading = read(fn, corners())
    (form,) = reading.forms("quantize")
    assert ("zero_clamp=codes" in form) == name.startswith("clamped") and not reading.unread
    (site,) = Passed(trace(fn, corners())).sites("quantize")
    assert site.code


def _number(x: Tensor) -> Tensor:
    return (x.float() / 0.5).add(3).clamp(-128, 127)


def _quotient(x: Tensor) -> tuple[Tensor, Tensor]:
    low, high = x.float().amin(-1, keepdim=True), x.float().amax(-1, keepdim=True)
    scale = (high - low) / 255
    return x.float() / scale, -128 - low / scale


#: quantises that no form has
ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "zero_not_rounded": lambda x: (torch.round(_quotient(x)[0]) + _quotient(x)[1]).clamp(-128, 127),
    "zero_cut_off": lambda x: (torch.round(_quotient(x)[0]) + torch.trunc(_quotient(x)[1])).clamp(
        -128, 127
    ),
    "zero_to_the_floor": lambda x: (
        torch.floor(_quotient(x)[1]) + torch.round(_quotient(x)[0])
    ).clamp(-128, 127),
    "zero_of_a_sum": lambda x: (
        torch.round(_quotient(x)[0]) + torch.round(_quotient(x)[1] + 1)
    ).clamp(-128, 127),
    "zero_taken_off": lambda x: (torch.round(_quotient(x)[0]) - torch.round(_quotient(x)[1])).clamp(
        -128, 127
    ),
    "limits_that_are_tensors": lambda x: torch.minimum(
        torch.maximum(torch.round(_quotient(x)[0]), _quotient(x)[1]), x.float()
    ),
    "cut_off_by_the_cast": lambda x: (_quotient(x)[0]).clamp(-128, 127),
    "cut_off": lambda x: torch.trunc(_quotient(x)[0]).clamp(-128, 127),
    "to_the_floor": lambda x: torch.floor(_quotient(x)[0] + 0.5).clamp(-128, 127),
}


@pytest.mark.parametrize("name", ODD)
def test_a_quantise_that_no_form_has_is_refused_with_a_reason(name: str) -> None:
    fn = lambda x: ODD[name](x).to(I8)  # noqa: E731
    reading = Reading(trace(fn, corners()))
    assert reading.forms("quantize") == []
    assert [code for _, code, _ in reading.unread] == ["FP8-R001"]
    (site,) = Passed(trace(fn, corners())).sites("quantize")
    assert (site.status, site.code) == ("left", "FP8-R001") and site.message


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x > 0).to(I8),
        lambda x: x.argmax(-1).to(I8),
        lambda x: torch.floor(x.float()).to(I8),
        lambda x: x.clamp(0, 5).to(I8),
        # a zero point by itself
        lambda x: torch.round(_quotient(x)[1]).clamp(-128, 127).to(I8),
        lambda x: (-128 - torch.round(_quotient(x)[0].amin(-1, keepdim=True))).to(I8),
    ],
)
def test_other_casts_to_int8_are_no_quantises(fn: Callable[[Tensor], Tensor]) -> None:
    reading = Reading(trace(fn, corners()))
    assert not reading.drafts and not reading.unread
