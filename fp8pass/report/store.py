"""Reports on disk, beside Inductor's own cache, where a cache hit can find them.

On a cache hit Inductor does not call the pass, so the report of that compile must come from the
run that made the cache entry. Files lie in ``<Inductor's cache folder>/fp8pass/reports``: deleting
the cache deletes the reports. Nothing here ever raises: a read-only or full disk costs the report
of a later cache hit, never a compile.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fp8pass.report.files import safe_name
from fp8pass.report.record import Report

log = logging.getLogger("fp8pass")

#: Reports kept per pass by :func:`save_set`; the oldest are dropped.
SET_LIMIT = 64

T = TypeVar("T")


def folder() -> Path:
    """The folder of reports; follows ``TORCHINDUCTOR_CACHE_DIR``.

    Raises:
        OSError: Inductor's cache folder cannot be made.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "fp8pass" / "reports"


def save(key: str, report: Report) -> bool:
    """Store ``report`` under ``key``, atomically; False if it could not be written."""

    def write() -> bool:
        _storable(report).save(folder() / f"{safe_name(key)}.json")
        return True

    return _quietly("save a report", write, False)


def load(key: str) -> Report | None:
    """The report stored under ``key``, marked as restored; None if there is none or it is bad."""
    return _quietly("load a report", lambda: _restored(folder() / f"{safe_name(key)}.json"), None)


def save_set(uuid: str, report: Report) -> bool:
    """Add ``report`` to the set of one pass.

    For hooks that do not know which compile they serve (the Inductor option): a cache hit can then
    still say what this pass did, though not in which of its compiles. Equal reports are one file.
    """

    def write() -> bool:
        stored = _storable(report)
        place = folder() / f"{safe_name(uuid)}.set"
        stored.save(place / f"{_digest(stored)}.json")
        for old in _newest_first(place)[SET_LIMIT:]:
            old.unlink(missing_ok=True)
        return True

    return _quietly("save a report", write, False)


def load_set(uuid: str) -> list[Report]:
    """The reports that :func:`save_set` stored for one pass, oldest first; bad files are left out.

    Each says in its note that it is one of a set: which compile hit the cache is not known.
    """

    def read() -> list[Report]:
        found = []
        for path in reversed(_newest_first(folder() / f"{safe_name(uuid)}.set")):
            report = _quietly("load a report", lambda path=path: _restored(path), None)  # type: ignore[misc]
            if report is not None:
                found.append(report)
        for report in found:
            report.note = (
                f"one of {len(found)} stored for this pass; which of them a cache hit used is not "
                "known"
            )
        return found

    return _quietly("load reports", read, [])


def _restored(path: Path) -> Report | None:
    if not path.is_file():
        return None
    report = Report.load(path)
    report.from_cache = True
    for graph in report.graphs:
        graph.from_cache = True
    return report


def _storable(report: Report) -> Report:
    """A copy without what belongs to this run only: the names of its dump files."""
    graphs = [dataclasses.replace(g, files={}, number=None) for g in report.graphs]
    return dataclasses.replace(report, graphs=graphs)


def _digest(report: Report) -> str:
    data = report.to_dict()
    for graph in data["graphs"]:
        graph.pop("seconds")
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:32]


def _newest_first(place: Path) -> list[Path]:
    stamped = []
    for path in place.glob("*.json"):
        try:
            stamped.append((path.stat().st_mtime_ns, path.name, path))
        except FileNotFoundError:  # another process just dropped it
            continue
    return [path for _, _, path in sorted(stamped, reverse=True)]


def _quietly(what: str, action: Callable[[], T], otherwise: T) -> T:
    try:
        return action()
    except Exception as error:
        log.debug("could not %s: %s: %s", what, type(error).__name__, error)
        return otherwise
