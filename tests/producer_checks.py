"""Fused producers against their references: the ``exact`` contract, on any device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

#: One step of the model dtypes, relative; of float32 as much as the order of a sum makes.
STEP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-20}
#: The smallest number that still has all its bits: below it, steps have a fixed size.
NORMAL = {torch.bfloat16: 2.0**-126, torch.float16: 2.0**-14, torch.float32: 2.0**-126}


def code_steps(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """How many codes lie between ``got`` and ``want``: 0 for two NaN, 255 for one.

    Minus zero is one with zero. The sign of NaN is free: torch on a CPU keeps it, a GPU drops it.
    """

    def ordered(codes: torch.Tensor) -> torch.Tensor:
        byte = codes.view(torch.uint8).to(torch.int32)
        return torch.where(byte >= 128, 128 - byte, byte)

    nan, nan_wanted = got.float().isnan(), want.float().isnan()
    steps = (ordered(got) - ordered(want)).abs()
    return torch.where(nan | nan_wanted, torch.where(nan & nan_wanted, 0, 255), steps)


def differing(got: torch.Tensor, want: torch.Tensor, relative: float, least: float) -> torch.Tensor:
    """Where two values are further apart than ``relative`` of ``want``; NaN equals NaN."""
    a, b = got.double(), want.double()
    far = (a - b).abs() > relative * b.abs().clamp_min(least)
    return (far & (a != b)) | (a.isnan() != b.isnan())


def assert_layouts(got: Iterable[torch.Tensor], want: Iterable[torch.Tensor]) -> None:
    """The same shapes, strides and dtypes."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()), f"result {i}"


def assert_exact(got: Iterable[torch.Tensor], want: Iterable[torch.Tensor], **say: Any) -> None:
    """The results ``(q, scale_out, y?, total?)`` of a producer keep the ``exact`` contract.

    Codes: one in a thousand (but one at least) may be one step off. Scales: 1e-6 relative; of
    scales per group, of which a row has many, one in a thousand (but one at least) may follow the
    group's largest value, see below. The
    normalised value or product may round to its neighbour in as many places as codes may; if that
    place is the largest of its row, its scale follows, and so does the row: at most one row in a
    thousand, by one step of the model dtype. The residual sum has the very same bits.
    """
    got, want = list(got), list(want)
    assert_layouts(got, want)
    q, scale, *rest = zip(got, want, strict=True)
    model = rest[0][1].dtype if rest else torch.bfloat16
    # two roundings in a row (of SiLU or the norm, then of the product) may both go elsewhere, and
    # the first may be to a narrower dtype than the result's
    named = [dtype for dtype in STEP if str(dtype).removeprefix("torch.") in str(say.get("form"))]
    step = 2.02 * max(STEP[dtype] for dtype in (model, *named))
    few = max(1, q[0].numel() // 1000)

    moved = differing(*scale, 1e-6, 0.0)
    grouped = scale[1].dim() == q[1].dim() and scale[1].shape[-1] not in (0, 1)
    at_most = max(scale[1].numel() // 1000, int(grouped))
    assert int(moved.sum()) <= at_most, (say, scale[0][moved], scale[1][moved])
    assert not differing(*scale, step, 0.0).any(), say

    steps = code_steps(*q)
    assert int(steps.max() if steps.numel() else 0) <= 1, (say, int((steps > 1).sum()))
    if moved.any():  # what remains of the rows whose scale is the same
        if grouped:
            moved = moved.repeat_interleave(q[1].shape[-1] // moved.shape[-1], -1)
        steps = steps[~moved.expand(steps.shape)]
    assert int((steps > 0).sum()) <= few, (say, int((steps > 0).sum()), q[0].numel())

    if rest and rest[0][0].numel():
        y, y_wanted = rest[0]
        off = differing(y, y_wanted, 2.0**-22, NORMAL[model])
        narrow = bool(named) and torch.float32 not in named
        if model != torch.float32:
            assert int(off.sum()) <= few, (say, int(off.sum()))
        elif narrow:  # float32 on top of a narrower rounding: off where that one went elsewhere
            off = differing(y, y_wanted, STEP[model], NORMAL[model])
            assert int(off.sum()) <= few, (say, int(off.sum()))
        assert not differing(y, y_wanted, step, NORMAL[model]).any(), say
    if len(rest) > 1:
        total, total_wanted = rest[1]
        assert torch.equal(total.isnan(), total_wanted.isnan()), say
        assert torch.equal(total.nan_to_num(), total_wanted.nan_to_num()), say
