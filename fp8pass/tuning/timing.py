"""Timing of calls on the live device: in turns, with inputs that rotate so that caches stay cold.

On a GPU the calls of one candidate, one for each set of inputs, are captured into a CUDA graph and
timed by events; elsewhere by the clock. Candidates take turns, in an order that is shuffled each
time, and the median counts, so that neither a slow drift, nor a single disturbance, nor the clocks
that a hungry neighbour leaves behind favour one of them.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from fp8pass.target import HOST

#: More than this is touched between two uses of the same data: an H200 has 60 MB of L2.
COLD_BYTES = 200 << 20
#: On a host, whose caches are smaller and whose products take longer.
COLD_BYTES_HOST = 64 << 20


class Timed(Protocol):
    """Calls that can be timed again and again."""

    def microseconds(self) -> float:
        """Time of one call, over all sets of inputs."""
        ...


class Captured:
    """Calls captured into one CUDA graph: ``call(i)`` for each of ``count`` sets of inputs.

    Without ``keep`` the results share their memory, which matters where there are many candidates.
    """

    def __init__(self, call: Callable[[int], Any], count: int, *, keep: bool = True) -> None:
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
            results = (call(i) for i in range(count))
            self.kept = list(results) if keep else [None for _ in results]
        self.graph.replay()
        torch.cuda.synchronize()

    def microseconds(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / self.count


class Called:
    """Calls timed by the clock, one by one: a host has no graph to capture them into, and other
    work, which now and then takes one call's time many times over."""

    def __init__(self, call: Callable[[int], Any], count: int) -> None:
        self.call, self.count = call, count
        for i in range(min(2, count)):
            call(i)

    def microseconds(self) -> float:
        times = []
        for i in range(self.count):
            start = time.perf_counter()
            self.call(i)
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e6


def timed(call: Callable[[int], Any], count: int, device: torch.device) -> Timed:
    """``call`` made ready for timing on ``device``."""
    if device.type == HOST:
        return Called(call, count)
    return Captured(call, count, keep=False)


def interleaved(variants: Mapping[str, Timed], rounds: int) -> dict[str, float]:
    """Median microseconds of a call for each variant, taken in turns in a changing order."""
    names = list(variants)
    times: dict[str, list[float]] = {name: [] for name in names}
    shuffled = random.Random(0)
    for _ in range(rounds):
        shuffled.shuffle(names)
        for name in names:
            times[name].append(variants[name].microseconds())
    return {name: statistics.median(values) for name, values in times.items()}


def sets_for(size: int, least: int = 4, most: int = 64, cold: int = COLD_BYTES) -> int:
    """How many sets of inputs of ``size`` bytes are more than ``cold`` bytes."""
    return max(least, min(most, -(-cold // max(size, 1))))
