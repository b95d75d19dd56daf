"""Where the records of a compile go while it runs, and the reports of this process.

The backend opens :func:`collecting` around ``compile_fx``; every hook inside calls :func:`add`.
Without an open collection (the pass is an Inductor option, or vLLM's) each record is a report of
its own. Inductor calls the hooks in the thread that compiles, so a context variable finds the
innermost collection, and two threads that compile at the same time do not see each other's.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from fp8pass.report import store
from fp8pass.report.record import GraphRecord, Report

log = logging.getLogger("fp8pass")

#: Reports that :func:`reports` keeps; the oldest are dropped.
LIMIT = 256

_active: ContextVar[Report | None] = ContextVar("fp8pass_report", default=None)
_reports: deque[Report] = deque(maxlen=LIMIT)
_expected: deque[str] = deque(maxlen=LIMIT)
_lock = threading.Lock()


@contextmanager
def collecting(
    key: str | None = None, *, uuid: str = "", versions: Mapping[str, str] | None = None
) -> Iterator[Report]:
    """Collect the records of one compile into the report that is yielded.

    On leaving, the report joins :func:`reports`. With a ``key`` (what identifies this compile: the
    graph, its inputs, the uuid) records are also stored under it, and hooks that did not run
    because Inductor's caches answered are filled in from what was stored, marked as restored. Pass
    None where caches are off. If the compile raises, what was recorded is kept and not stored.
    """
    report = Report(uuid=uuid, versions=dict(versions) if versions else current_versions())
    token = _active.set(report)
    try:
        yield report
    except BaseException:
        if report.graphs:
            _keep(report)
        raise
    else:
        if key is not None:
            _restore_or_store(key, report)
        _keep(report)
    finally:
        _active.reset(token)


def add(record: GraphRecord, *, uuid: str = "", persist: bool = False) -> Report:
    """Add a record to the innermost :func:`collecting`, else to a new report; log one line.

    Args:
        uuid: identity of the pass, for a new report.
        persist: store a new report in the set of this uuid, for hooks without a key.
    """
    log.info("%s (%s hook): %s", record.name, record.hook, record.summary())
    report = _active.get()
    if report is not None:
        report.graphs.append(record)
        return report
    report = Report([record], uuid=uuid, versions=current_versions())
    if persist:
        store.save_set(uuid, report)
    _keep(report)
    return report


def active() -> Report | None:
    """The report that :func:`add` would append to, None outside :func:`collecting`."""
    return _active.get()


def expect(uuid: str) -> None:
    """Note a pass without a key (the Inductor option): a cache hit may answer in its place.

    Inductor does not call the pass then, and nothing tells which stored report belongs to the graph
    that was restored; :func:`reports` therefore shows all that this pass has stored, marked so.
    """
    with _lock:
        if uuid not in _expected:
            _expected.append(uuid)


def reports() -> list[Report]:
    """The reports of this process's compiles, newest last; at most :data:`LIMIT`.

    For a pass given to Inductor as an option that has not run in this process, the reports that it
    stored earlier come first, marked as restored from the cache.
    """
    with _lock:
        fresh = list(_reports)
        waiting = [uuid for uuid in _expected if all(r.uuid != uuid for r in fresh)]
    return [r for uuid in waiting for r in store.load_set(uuid)] + fresh


def clear() -> None:
    """Forget the reports of this process; what is on disk stays."""
    with _lock:
        _reports.clear()
        _expected.clear()


def current_versions() -> dict[str, str]:
    """Versions of fp8pass and torch, without importing either."""
    found = {}
    for name in ("fp8pass", "torch"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found


def _keep(report: Report) -> None:
    with _lock:
        _reports.append(report)


def _restore_or_store(key: str, report: Report) -> None:
    fresh = bool(report.graphs)
    stored = store.load(key)
    if stored is not None:
        # AOTAutograd's and Inductor's caches answer one by one: the joint hook may have run while
        # the post-grad hook did not.
        hooks = {graph.hook for graph in report.graphs}
        report.graphs += [graph for graph in stored.graphs if graph.hook not in hooks]
    if fresh:
        store.save(key, report)
    else:
        report.from_cache = True
        if stored is not None:
            report.versions = stored.versions
