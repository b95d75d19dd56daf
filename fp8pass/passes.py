"""Fp8Pass: the pass object that Inductor calls, with its identity and its place in a chain."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

import fp8pass.ops  # noqa: F401  (a graph restored from a cache calls these operators)
from fp8pass.engine import Stage, plain_options, run
from fp8pass.errors import NoKernelError, PassError, UnsupportedError
from fp8pass.identity import identity
from fp8pass.options import Options
from fp8pass.report import Dump, GraphRecord, add, emit_record, show_graph
from fp8pass.report.collector import active
from fp8pass.tuning.session import digest

log = logging.getLogger("fp8pass")

_HOOKS: dict[Stage, str] = {"joint": "joint", "post": "post_grad", "all": "post_grad"}

GraphPass = Callable[[fx.Graph], Any]


class Fp8Pass(CustomGraphPass):
    """Reads, fuses and lowers FP8 in one graph; see :mod:`fp8pass.engine`.

    Holds plain data only: on a hit in Inductor's cache it never runs, so nothing that is needed at
    run time may live in it.

    Args:
        options: resolved options.
        stage: ``joint`` or ``post`` (the two halves of ``backend="fp8pass"``) or ``all``.
        before: passes that were set for this hook already; they run first, as they would have.
        name: what reports call the graph; default: what torch calls this compile.
    """

    def __init__(
        self,
        options: Options,
        stage: Stage = "all",
        before: Sequence[GraphPass] = (),
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.options = options
        self.name = name
        self.stage = stage
        self.before = tuple(before)

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite ``graph`` in place.

        Raises:
            NoKernelError: a forced kernel cannot take a site.
            PassError: a step failed and ``strict`` is set; otherwise the graph is restored.
            UnsupportedError: the graph is for AOTInductor and ``strict`` is set.
        """
        for earlier in self.before:
            earlier(graph)
        hook = _HOOKS[self.stage]
        record = GraphRecord(
            name=self.name or _graph_name(graph),
            hook=hook,
            options=plain_options(self.options),
            source="pristine" if self.stage == "joint" else "post_joint",
        )
        dump = Dump(self.options.dump) if self.options.dump else None
        tools = _Watchers(dump, hook, record)
        tools.show("received", graph)
        try:
            error = run(graph, self.options, self.stage, record, tools.observe, _spent())
        except NoKernelError:
            add(record, uuid=self.identity_text())
            raise
        if error is None and record.sites:
            tools.show("after", graph)
        report = add(record, uuid=self.identity_text(), persist=active() is None)
        if dump is not None:
            dump.write_report(report)
        emit_record(record)
        if record.verdict is not None and record.verdict.code == "FP8-P002":
            log.warning("fp8pass: %s", record.verdict.message)
            if self.options.strict:
                raise UnsupportedError(record.verdict.message)
        if record.verdict is not None and record.verdict.code == "FP8-P005":
            _warn_once(f"{record.verdict.message}; {record.verdict.hint}")
        if error is not None and record.verdict is not None:
            if self.options.strict:
                raise PassError(record.verdict.message) from error
            _warn_once(record.verdict.message, error)

    def uuid(self) -> Any:
        """Identity for Inductor's caches; None (no caching) if an earlier pass has none."""
        parts: list[Any] = [identity(self.options.key(), self.stage, None, digest(self.options))]
        for earlier in self.before:
            other = earlier.uuid() if isinstance(earlier, CustomGraphPass) else None
            if other is None:
                return None
            parts.append(other)
        return tuple(parts)

    def identity_text(self) -> str:
        """:meth:`uuid` as a short text, for reports."""
        import hashlib

        return hashlib.sha256(repr(self.uuid()).encode()).hexdigest()[:32]

    def __deepcopy__(self, memo: dict[int, Any]) -> Fp8Pass:
        return self  # Inductor deep-copies its configuration; this is plain, immutable data

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fp8Pass):
            return NotImplemented
        return (self.options, self.stage, self.before) == (other.options, other.stage, other.before)

    def __hash__(self) -> int:
        return hash((self.options, self.stage))


class _Watchers:
    """Shows the graph of each step to the dump folder and to the tools that watch a compile."""

    def __init__(self, dump: Dump | None, hook: str, record: GraphRecord) -> None:
        self.dump, self.hook, self.record = dump, hook, record

    def show(self, step: str, graph: fx.Graph) -> None:
        show_graph(step, graph, self.hook, self.dump, self.record)

    def observe(self, step: str, graph: fx.Graph) -> None:
        self.show({"read": "read", "fuse": "fused"}[step], graph)


def _spent() -> int:
    """Rewrites that the earlier hook of this compile made: both live on the same fuel."""
    report = active()
    return 0 if report is None else sum(record.fuel for record in report.graphs)


def _graph_name(graph: fx.Graph) -> str:
    context = torch._guards.CompileContext.try_get()
    if context is not None and context.compile_id is not None:
        return f"graph {context.compile_id}"
    module = graph.owning_module
    return type(module).__name__ if module is not None else "graph"


_warned: set[str] = set()


def _warn_once(message: str, error: BaseException | None = None) -> None:
    if message not in _warned:
        _warned.add(message)
        log.warning("fp8pass: %s", message, exc_info=error)


def chain(existing: Any) -> tuple[GraphPass, ...]:
    """The passes that are set for a hook already: none, one, or (torch >= 2.13) a list."""
    if existing is None:
        return ()
    if isinstance(existing, (list, tuple)):
        return tuple(existing)
    return (existing,)


def without_ours(passes: Sequence[GraphPass]) -> tuple[GraphPass, ...]:
    """The passes that are not fp8pass's, so that asking twice does not run it twice."""
    kept: list[GraphPass] = []
    for item in passes:
        if isinstance(item, Fp8Pass):
            kept += without_ours(item.before)
        else:
            kept.append(item)
    return tuple(kept)
