"""CUDA graphs of whole forwards: captured, replayed in turns, and taken apart into kernels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from gpu_timing import Captured
from torch import Tensor

#: Clock cycles that the GPU is kept busy while the host enqueues what is timed (about 0.1 ms), so
#: that the launch of a graph is not part of its time.
HEAD_START = 200_000
#: The kernel of ``torch.cuda._sleep``.
SPIN = "spin_kernel"


class Replay:
    """One forward in a CUDA graph.

    Args:
        forward: from a residual to ``(hidden, residual)``; may write into the residual.
        residual: its initial value, which every replay starts from.
    """

    def __init__(
        self, forward: Callable[[Tensor], tuple[Tensor, Tensor]], residual: Tensor
    ) -> None:
        self._start = residual
        self._residual = residual.clone()
        self._captured = Captured(lambda i: forward(self._residual), 1)

    def reset(self) -> None:
        """Put the residual back."""
        self._residual.copy_(self._start)

    def replay(self) -> None:
        """Replay without a wait."""
        self._captured.graph.replay()

    def run(self) -> tuple[Tensor, Tensor]:
        """The results of a replay: the graph's own tensors, which the next replay overwrites."""
        for value in self._captured.kept[0]:
            value.fill_(float("nan"))
        self.reset()
        self.replay()
        torch.cuda.synchronize()
        found: tuple[Tensor, Tensor] = self._captured.kept[0]
        return found

    def microseconds(self) -> float:
        """Time of one replay on the GPU."""
        self.reset()
        torch.cuda._sleep(HEAD_START)
        return self._captured.microseconds()


def interleaved(replays: Mapping[str, Any], seconds: float) -> dict[str, dict[str, float]]:
    """Times in turns, with a rotating order, for about ``seconds`` (at least 15 rounds).

    Returns:
        variant -> ``us`` (median), ``low`` and ``high`` (10th and 90th percentile), microseconds.
    """
    names = list(replays)
    if not names:
        return {}
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        replays[name].microseconds()
    started, turn = time.monotonic(), 0
    while turn < 15 or (time.monotonic() - started < seconds and turn < 400):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(replays[name].microseconds())
        turn += 1
    found = {}
    for name, values in times.items():
        deciles = statistics.quantiles(values, n=10)
        found[name] = {"us": statistics.median(values), "low": deciles[0], "high": deciles[-1]}
    return found


def kernels_of(replays: Mapping[str, Replay]) -> dict[str, list[tuple[str, float]]]:
    """The kernels (copies and fills included) of one replay of each: names and microseconds.

    One session of the profiler; each replay stands between two sleeps, by whose kernels they are
    told apart. Empty if the profiler did not see those.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for replay in replays.values():
            replay.reset()
            torch.cuda._sleep(HEAD_START)
            replay.replay()
            torch.cuda._sleep(1000)
        torch.cuda.synchronize()
    events = [e for e in profiler.events() or [] if e.device_type == DeviceType.CUDA]
    return split([(str(e.name), e.time_range.start, e.time_range.elapsed_us()) for e in events],
                 list(replays))  # fmt: skip


def split(
    events: list[tuple[str, float, float]], names: list[str]
) -> dict[str, list[tuple[str, float]]]:
    """Events (name, start, microseconds) between pairs of sleeps, given to ``names`` in order."""
    found: list[list[tuple[str, float]]] = []
    inside = False
    for name, _, microseconds in sorted(events, key=lambda event: event[1]):
        if SPIN in name:
            inside = not inside
            if inside:
                found.append([])
        elif inside:
            found[-1].append((name, microseconds))
    if len(found) != len(names) or inside:
        return {}
    return dict(zip(names, found, strict=True))
