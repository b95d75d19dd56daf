"""One variant of the demo: a module, how it is compiled, and all that was measured on it."""

from __future__ import annotations

import gc
import os
import resource
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from fp8pass.report import Report

Call = Callable[[Tensor], Tensor]

#: Operators of a scaled product, under their names in the profiler.
PRODUCTS = ("fp8pass::cpu_scaled_mm", "fp8pass::scaled_mm", "aten::_scaled_mm")


@dataclass
class Variant:
    """One column of the comparison.

    Attributes:
        key: its name in the JSON.
        title: its name for people.
        module: what is compiled.
        backend: of ``torch.compile``; None runs eagerly.
        options: of ``torch.compile``.
        tokens: length of the one shape that it is compiled for.
        call: ids ``[1, tokens]`` -> logits; None before :meth:`compile` and after a failure.
        error: why there are no numbers.
        compile_seconds: first call, less one forward.
        seconds: one entry per timed forward.
        losses: window -> mean negative log-likelihood of its tokens after the first, in nats.
        continuation: greedy continuation of the prompt, as ids.
        same_as: key of a variant that was equal in every bit, and has run on the rest for both.
        report: what fp8pass did.
        executed: operator -> calls in one forward, of :data:`PRODUCTS`.
    """

    key: str
    title: str
    module: nn.Module
    backend: str | None
    tokens: int
    options: dict[str, Any] = field(default_factory=dict)
    call: Call | None = None
    error: str = ""
    first_call_seconds: float | None = None
    seconds: list[float] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    continuation: list[int] = field(default_factory=list)
    same_as: str = ""
    report: Report | None = None
    executed: dict[str, int] = field(default_factory=dict)

    @property
    def forward_seconds(self) -> float | None:
        """Median of the timed forwards."""
        return median(self.seconds) if self.seconds else None

    @property
    def compile_seconds(self) -> float | None:
        """Seconds that compiling took: the first call, less one forward."""
        if self.first_call_seconds is None or self.forward_seconds is None:
            return None
        return max(0.0, self.first_call_seconds - self.forward_seconds)

    def compile(self, ids: Tensor) -> None:
        """Compile for the shape of ``ids`` with nothing in Inductor's caches, and run once.

        What goes wrong is noted in :attr:`error`: a stock that cannot run the model is a result.
        """
        from fp8pass.backend import fp8pass_backend
        from fp8pass.report import reports

        if self.backend is None:
            self.call = self.module
            return
        known = len(reports())
        with fresh_caches(), settled_heap(), torch.no_grad():
            start = time.perf_counter()
            call = torch.compile(
                own_function(self.module),
                # The function, so that it also works from a source tree without entry points.
                backend=fp8pass_backend if self.backend == "fp8pass" else self.backend,
                options=self.options or None,
                fullgraph=True,
                dynamic=False,
            )
            try:
                call(ids)
            except Exception as error:  # whatever the backend raises
                self.error = first_line(error)
                return
            self.first_call_seconds = time.perf_counter() - start
        self.call = call
        if self.backend == "fp8pass" and len(reports()) > known:
            self.report = reports()[-1]

    def timed(self, ids: Tensor) -> Tensor:
        """Logits of one forward, whose seconds are booked; compiling again is an error."""
        assert self.call is not None
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self.backend is not None:
                stack.enter_context(no_recompile())
            start = time.perf_counter()
            logits = self.call(ids)
            self.seconds.append(time.perf_counter() - start)
        return logits

    def count_products(self, ids: Tensor) -> None:
        """Run once under the profiler and note how often each product was called."""
        from torch.profiler import ProfilerActivity, profile

        assert self.call is not None
        activities = [ProfilerActivity.CPU]
        with torch.no_grad(), _native_stderr_closed(), profile(activities=activities) as profiler:
            self.call(ids)
        counts = {event.key: int(event.count) for event in profiler.key_averages()}
        self.executed = {name: counts[name] for name in PRODUCTS if name in counts}

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the JSON; perplexity is added by who knows the windows."""
        counts = {} if self.report is None else site_counts(self.report)
        return {
            "title": self.title,
            "error": self.error or None,
            "tokens_per_forward": self.tokens,
            "seconds_per_forward": self.forward_seconds,
            "seconds": self.seconds,
            "compile_seconds": self.compile_seconds,
            "weights_bytes": weight_bytes(self.module),
            "pass_seconds": None if self.report is None else pass_seconds(self.report),
            "site_counts": counts,
            "products_executed": self.executed,
            "same_as": self.same_as or None,
        }


def own_function(module: nn.Module) -> Call:
    """``module`` as a function whose code is its own.

    Dynamo keeps what it compiled per code object, a few entries at most; two copies of one model
    share theirs and would push each other out.
    """

    def forward(ids: Tensor) -> Tensor:
        logits: Tensor = module(ids)
        return logits

    return types.FunctionType(
        forward.__code__.replace(), forward.__globals__, "forward", None, forward.__closure__
    )


def warm_up() -> None:
    """Let Inductor build what it builds once per machine, such as its precompiled header."""
    torch.compile(own_function(torch.nn.ReLU()), dynamic=False)(torch.zeros(64))


def first_line(error: BaseException) -> str:
    """Type and first line of an error, of the innermost one if Dynamo wrapped it."""
    while isinstance(inner := getattr(error, "inner_exception", None), BaseException):
        error = inner
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextmanager
def fresh_caches() -> Iterator[None]:
    """Empty compile caches in a folder of their own, so that seconds of compiling are honest."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        yield


@contextmanager
def settled_heap() -> Iterator[None]:
    """Within, the garbage collector passes over what was there before.

    A compile makes millions of objects and is collected many times; without this, each further
    compile of a process would also pay for looking through what the earlier ones have left.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def no_recompile() -> Iterator[None]:
    """Within, a compiled function that does not fit its input raises instead of compiling anew."""
    import torch._dynamo.config as config

    with config.patch(error_on_recompile=True):
        yield


@contextmanager
def _native_stderr_closed() -> Iterator[None]:
    """Within, what C++ prints to stderr is lost: some builds' profiler says when it starts."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as sink:
            os.dup2(sink.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def site_counts(report: Report) -> dict[str, int]:
    """``kind status`` -> number of sites."""
    return {f"{kind} {status}": n for (kind, status), n in report.counts().items()}


def pass_seconds(report: Report) -> float:
    """Seconds that fp8pass itself took in one compile, over all hooks."""
    return sum(sum(graph.seconds.values()) for graph in report.graphs)


def weight_bytes(module: nn.Module) -> dict[str, int]:
    """Bytes of parameters and buffers, each tensor once: fp8 codes, packed copies, the rest."""
    kinds = {"fp8": 0, "prepared": 0, "scales": 0, "other": 0}
    seen: set[int] = set()
    named = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in named:
        if tensor.data_ptr() in seen and tensor.numel():
            continue
        seen.add(tensor.data_ptr())
        if name.endswith("weight_prepared"):
            kind = "prepared"
        elif tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point:
            kind = "fp8"
        elif name.endswith("_scale"):
            kind = "scales"
        else:
            kind = "other"
        kinds[kind] += tensor.numel() * tensor.element_size()
    return {**kinds, "total": sum(kinds.values())}


def peak_memory_bytes() -> int:
    """Most memory that this process has had so far (all variants, compiling included)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)
