"""One line per engine of what was done, and the report in its folders - after a warm start too.

In mode 2 the pass is called once for the whole model, and the line follows at once. In mode 3 it is
called for each piece, or not at all if vLLM loads its artifact; in both cases vLLM then logs how
long that took, and this module listens to that logger: no line of vLLM's, no line of ours.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8pass.reasons import Verdict
from fp8pass.report import Dump, Report, Site, store
from fp8pass.report.collector import expect as expect_stored
from fp8pass.report.record import merge
from fp8pass.vllm.versions import log

if TYPE_CHECKING:
    from fp8pass.vllm.vllm_pass import VllmPass

#: vLLM's logger of "torch.compile took ... s in total".
_MONITOR = "vllm.compilation.monitor"

_lock = threading.RLock()
#: Passes whose identity was asked for, or that ran, since the last line: by identity.
_waiting: dict[str, VllmPass] = {}
_ran: dict[str, list[Report]] = {}
_listening: logging.Handler | None = None


def expect(item: VllmPass) -> None:
    """Note that a compile, or the loading of an artifact, may follow."""
    _listen()
    identity = item.identity_text()
    expect_stored(identity)
    with _lock:
        _waiting[identity] = item


def ran(item: VllmPass, report: Report, whole: bool) -> None:
    """Note what a call of the pass did; ``whole``: the graph was that of the whole model."""
    _listen()
    with _lock:
        _waiting[report.uuid] = item
        _ran.setdefault(report.uuid, []).append(report)
    if whole:
        announce()


def announce() -> list[str]:
    """Write the line of every pass that waits for it; returns the lines."""
    with _lock:
        waiting, calls = dict(_waiting), dict(_ran)
        _waiting.clear()
        _ran.clear()
    lines = []
    for identity, item in waiting.items():
        fresh = calls.get(identity, [])
        found = fresh or store.load_set(identity)
        if not found:
            continue
        report = merge(found)
        folders = _write(item, report, restored=not fresh)
        line = line_of(item.mode, report, restored=not fresh)
        if folders:
            line += f" Report: {', '.join(folders)}"
        (log.info if _speaks() else log.debug)("%s", line)
        lines.append(line)
    return lines


def line_of(mode: str, report: Report, restored: bool = False) -> str:
    """The line: sites, what was done with them, what was left and why, state of the cache.

    ``fp8pass (complement), 3 graphs compiled: 17 sites; 4 norm fused, 8 scaled_mm lowered; left
    2 quantize (FP8-F002).``
    """
    head = f"fp8pass ({mode})" if mode else "fp8pass"
    number = len(report.graphs)
    graphs = f"{number} graph" if number == 1 else f"{number} graphs"
    state = "restored from the compile cache" if restored else "compiled"
    sites = report.sites
    parts = [f"{len(sites)} sites" if len(sites) != 1 else "1 site"]
    done = [
        f"{count} {kind} {status}"
        for (kind, status), count in report.counts().items()
        if status != "left"
    ]
    if done:
        parts.append(", ".join(done))
    left = _left(sites)
    if left:
        parts.append(f"left {left}")
    verdicts = [graph.verdict for graph in report.graphs if graph.verdict is not None]
    failed = sorted({verdict.code for verdict in verdicts if _failed(verdict)})
    if failed:
        parts.append(f"not rewritten: {', '.join(failed)}")
    return f"{head}, {graphs} {state}: {'; '.join(parts)}."


def _left(sites: list[Site]) -> str:
    counts = Counter((site.kind, site.code) for site in sites if site.status == "left")
    return ", ".join(f"{n} {kind} ({code})" for (kind, code), n in counts.items())


def _failed(verdict: Verdict) -> bool:
    """Whether a graph was given back for another reason than that it has no FP8 in it."""
    return not verdict.ok and verdict.code != "FP8-P004"


def name_of(tokens: Any) -> str:
    """What a graph is called in the report."""
    if tokens is None:
        return "model"
    first, last = getattr(tokens, "start", None), getattr(tokens, "end", None)
    return f"piece for {tokens}" if first is None else f"piece for {first} to {last} tokens"


def debug_folder() -> str | None:
    """vLLM's folder of debug dumps for this process, with a folder of ours in it; None if unset."""
    try:
        from vllm.config import get_current_vllm_config_or_none

        config = get_current_vllm_config_or_none()
        folder = None if config is None else config.compile_debug_dump_path()
    except Exception:  # another version's configuration: the dump is lost, nothing else
        return None
    return None if folder is None else str(Path(folder) / "fp8pass")


def _write(item: VllmPass, report: Report, restored: bool) -> list[str]:
    """Write the report where the user looks for it; the folders that have it."""
    first, other = item.options.dump, item.debug or debug_folder()
    if first is None:
        first, other = other, None
    written = []
    if first is not None:  # the pass itself wrote there, unless it did not run
        if restored:
            Dump(first).write_report(_copy(report))
        written.append(first)
    if other not in (None, first):
        Dump(other).write_report(_copy(report))
        written.append(str(other))
    return written


def _copy(report: Report) -> Report:
    """A copy that belongs to no folder yet."""
    copy = Report.from_dict(report.to_dict())
    for graph in copy.graphs:
        graph.files, graph.number = {}, None
    return copy


def _speaks() -> bool:
    """Whether this process is the one of its tensor-parallel group that logs."""
    try:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        return bool(get_tensor_model_parallel_rank() == 0)
    except Exception:  # no group, or another version: one line too many does no harm
        return True


class _Listener(logging.Handler):
    """Announces when vLLM says that a compile, or the loading of an artifact, is over."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if "took" in str(record.msg):
                announce()
        except Exception as error:  # a log line must never break an engine
            log.debug("fp8pass could not announce: %s: %s", type(error).__name__, error)


def _listen() -> None:
    global _listening
    with _lock:
        if _listening is None:
            _listening = _Listener()
            logging.getLogger(_MONITOR).addHandler(_listening)
