"""Timing of GPU work by CUDA graphs, interleaved, with inputs that rotate so that L2 stays cold."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

#: More than this is touched between two uses of the same data: an H200 has 60 MB of L2.
COLD_BYTES = 200 << 20


class Captured:
    """Calls captured into one CUDA graph: ``make(i)`` for each of ``count`` sets of inputs."""

    def __init__(self, call: Callable[[int], Any], count: int) -> None:
        self.count = count
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                call(0)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.kept = [call(i) for i in range(count)]
        self.graph.replay()
        torch.cuda.synchronize()

    def microseconds(self) -> float:
        """One replay, by events, for each call."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / self.count


def interleaved(variants: dict[str, Captured], rounds: int) -> dict[str, float]:
    """Median microseconds of a call for each variant, taken in turns with a rotating order."""
    names = list(variants)
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(variants[name].microseconds())
    return {name: statistics.median(values) for name, values in times.items()}


def sets_for(size: int, least: int = 4, most: int = 64) -> int:
    """How many sets of inputs of ``size`` bytes are more than :data:`COLD_BYTES`."""
    return max(least, min(most, -(-COLD_BYTES // max(size, 1))))


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Text with columns; numbers with one decimal."""
    cells = [[f"{c:.1f}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    widths = [max(len(str(h)), *(len(r[i]) for r in cells), 1) for i, h in enumerate(head)]
    lines = ["  ".join(str(h).rjust(w) for h, w in zip(head, widths, strict=True))]
    lines += ["  ".join(c.rjust(w) for c, w in zip(r, widths, strict=True)) for r in cells]
    return "\n".join(lines)
