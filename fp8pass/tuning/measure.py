"""Measuring one product: every kernel that can take it, at several numbers of rows.

Numbers come before speed: a kernel whose result differs from float64 by more than docs/numerics.md
allows, or that fails, is refused for this product with that as its reason. The others are timed in
turns on inputs that rotate through more memory than the caches hold. On a GPU each product is
captured behind a small kernel that writes its activations, as in a model, and the time of that
kernel alone is taken off: launches that overlap their neighbour are measured with one.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from fp8pass.lowerings import Kernel, consider, kernels
from fp8pass.problem import MRange, ScaledMMProblem
from fp8pass.target import Target
from fp8pass.tuning.measured import Point, Record
from fp8pass.tuning.operands import Operands, caller, operands, why_not_measured, why_wrong
from fp8pass.tuning.timing import (
    COLD_BYTES,
    COLD_BYTES_HOST,
    Timed,
    interleaved,
    sets_for,
    timed,
)

log = logging.getLogger("fp8pass")

#: Numbers of rows that stand for the range up to them, where M is symbolic; the last for all more.
ROWS = (1, 4, 16, 17, 32, 64, 128, 256, 512, 1024, 4096, 16384)
#: On a host, where a product of more rows takes seconds.
ROWS_HOST = (1, 4, 16, 64, 256, 1024)
#: How it is done, in words and numbers, kept beside the results.
METHOD = {
    "clock": "CUDA graphs and events; on a host the clock",
    "inputs": "random codes and scales, rotating through more than the caches hold",
    "order": "in turns, rotating; medians",
    "numbers": "compared with float64 first",
}
#: A candidate that is so many times slower at first sight is not timed again.
HOPELESS = 3.0
#: Candidates that are so near to the fastest are timed once more, among themselves and for longer:
#: medians of 15 rounds have differed by 3 % from one process to the next at 16384 rows.
RUNOFF = 1.05
_WRITER = ""  # the name under which the kernel before each product is timed alone


def ranges(m: MRange, rows: Sequence[int]) -> list[tuple[MRange, int]]:
    """(range, rows to measure in it), together covering ``m``: one for a known number of rows."""
    if m.static:
        return [(m, m.lo)] if m.lo else []
    found = []
    for part in m.split([1, *(r + 1 for r in rows[:-1])]):
        inside = [r for r in rows if part.covers(MRange(r, r))]
        at = inside[-1] if inside else (part.hi if part.hi is not None else part.lo)
        if at:
            found.append((part, at))
    if found and m.lo == 0:  # no rows are as good as one
        first, at = found[0]
        found[0] = (MRange(0, first.hi), at)
    return found


def candidates(target: Target, problem: ScaledMMProblem, disabled: tuple[str, ...]) -> list[Kernel]:
    """The registered kernels that can take the product or a part of its range of M."""
    return [
        kernel
        for kernel in kernels()
        if kernel.name not in disabled and consider(kernel, target, problem)
    ]


def measure(
    target: Target,
    problem: ScaledMMProblem,
    device: torch.device,
    *,
    numerics: str = "exact",
    disabled: tuple[str, ...] = (),
    rows: Sequence[int] | None = None,
    rounds: int = 15,
    seed: int = 0,
) -> Iterator[Record]:
    """Measure a product; a record for each number of rows, to be merged.

    Args:
        target: what ``device`` is.
        problem: with a range of M; a static one is measured at that number of rows alone.
        numerics: as the option.
        disabled: kernels that are left out.
        rows: what to measure of a range; default :data:`ROWS`, on a host :data:`ROWS_HOST`.
        rounds: how often each candidate is timed.
        seed: of the operands.
    """
    if why_not_measured(problem):
        return
    able = candidates(target, problem, disabled)
    refused: dict[str, str] = {}
    grid = rows if rows is not None else ROWS_HOST if target.host else ROWS
    for m, at in ranges(problem.m, grid):
        here = [k for k in able if k.rows.covers(m) and k.name not in refused]
        part = replace(problem, m=m)
        us = _times(here, target, part, at, device, numerics, rounds, refused, seed)
        day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        yield Record((Point(m, at, us),) if us else (), dict(refused), day)


def _times(
    able: Sequence[Kernel],
    target: Target,
    problem: ScaledMMProblem,
    m: int,
    device: torch.device,
    numerics: str,
    rounds: int,
    refused: dict[str, str],
    seed: int,
) -> dict[str, float]:
    """Microseconds by kernel; what is wrong or fails is added to ``refused`` instead."""
    if not able:
        return {}
    first = operands(problem, m, device, seed)
    cold, most = (COLD_BYTES_HOST, 8) if target.host else (COLD_BYTES, 64)
    count = sets_for(first.bytes, 2 if first.bytes > cold // 4 else 4, most, cold)
    sets = [first, *(operands(problem, m, device, seed + i) for i in range(1, count))]
    ready: dict[str, Timed] = {}
    if not target.host:
        ready[_WRITER] = timed(lambda i: _write(sets[i]), count, device)
    for kernel in able:
        try:
            call = caller(kernel, target, problem, first, numerics)
            wrong = why_wrong(call(first), first, problem)
            if wrong:
                refused[kernel.name] = f"wrong numbers: {wrong}"
                continue
            ready[kernel.name] = timed(_behind(call, sets, target.host), count, device)
        except torch.OutOfMemoryError as error:  # says nothing about the kernel
            log.warning("fp8pass: %s was not measured: %s", kernel.name, _line(error))
        except Exception as error:
            refused[kernel.name] = f"it failed: {_line(error)}"
    if len(ready) <= (0 if target.host else 1):
        return {}
    found = _contest(ready, count, rounds, runoff=not target.host)
    writer = found.pop(_WRITER, 0.0)
    return {name: max(us - writer, 0.0) for name, us in found.items()}


def _contest(ready: dict[str, Timed], count: int, rounds: int, *, runoff: bool) -> dict[str, float]:
    """Microseconds of every candidate, the nearer to the fastest the more often timed."""
    found = {n: min(each.microseconds() for _ in range(3)) for n, each in ready.items()}

    def within(factor: float) -> dict[str, Timed]:
        best = min(us for name, us in found.items() if name != _WRITER)
        return {n: t for n, t in ready.items() if n == _WRITER or found[n] <= factor * best}

    close = within(HOPELESS)
    if sum(found[name] for name in close) * count > 2e5:
        rounds = 5
    found.update(interleaved(close, rounds))
    final = within(RUNOFF)
    final.pop(_WRITER, None)
    if runoff and len(final) > 1:
        found.update(interleaved(final, 3 * rounds))
    return found


def _behind(
    call: Callable[[Operands], Any], sets: Sequence[Operands], alone: bool
) -> Callable[[int], Any]:
    """The product of the i-th operands, behind the kernel that writes its activations."""
    if alone:
        return lambda i: call(sets[i])

    def both(i: int) -> Any:
        _write(sets[i])
        return call(sets[i])

    return both


def _write(s: Operands) -> None:
    """Write the activations, with the values that they have."""
    s.a.view(torch.uint8).bitwise_xor_(0)


def _line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
