"""The dump folder: graphs before and after, one report, an index; and the tools that watch.

Layout of the folder (option ``dump``, ``FP8PASS_DUMP=dir``)::

    000-joint-received.py   graph 0 as the joint hook got it
    000-joint-after.py      ... and as it gave it back (steps in between where they were dumped)
    000.json                what happened to graph 0, as a report of its own
    001-post_grad-...       the next graph
    report.json             the reports of all graphs in this folder as one
    index.json  index.txt   files, hooks and counts of every graph

Several processes may write into one folder: a number belongs to the process that created its
``NNN.json`` exclusively, and what sums the folder up is made anew from all of these files. Nothing
here breaks a compile: after the first ``OSError`` there is one warning and no dump any more.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import fx

from fp8pass.errors import OptionError
from fp8pass.outside import json_of
from fp8pass.report.files import slug, write_atomic
from fp8pass.report.graph_text import graph_text, live_module
from fp8pass.report.record import SCHEMA, GraphRecord, Report, merge

log = logging.getLogger("fp8pass")

_NUMBERED = re.compile(r"(\d{3,})\.json")
_GRAPH_FILE = re.compile(r"(\d{3,})-(.+)-([^-]+)\.py")
_broken: set[str] = set()
_lock = threading.RLock()


class Dump:
    """Writes one compile's graphs and report into a folder; does nothing when ``folder`` is None.

    Make one per compile (or per call of the pass): the hooks of one object are numbered apart, and
    a step that comes a second time for the same hook starts a new number.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self.folder = None if folder is None else Path(folder).absolute()
        self._numbers: dict[str, int] = {}
        self._steps: dict[str, set[str]] = {}

    @property
    def enabled(self) -> bool:
        """Whether a folder was given and could be written so far."""
        return self.folder is not None and str(self.folder) not in _broken

    def write_graph(self, step: str, graph: fx.Graph, hook: str) -> str | None:
        """Write the live part of ``graph`` as ``NNN-hook-step.py``; the file's name, or None."""
        hook, step = slug(hook), slug(step)

        def write(folder: Path) -> str:
            if hook not in self._numbers or step in self._steps[hook]:
                self._numbers[hook] = _reserve(folder, hook)
                self._steps[hook] = set()
            self._steps[hook].add(step)
            name = f"{self._numbers[hook]:03d}-{hook}-{step}.py"
            text = graph_text(graph, f"fp8pass: hook {hook}, step {step}")
            write_atomic(folder / name, text)
            return name

        return self._guarded(write)

    def write_report(self, report: Report) -> str | None:
        """Write or update the records of ``report`` and everything that sums the folder up.

        A record that has dumped no graph (one restored from a cache) gets a number of its own; its
        ``number`` is set. Call it as often as records come. Returns the path of ``report.json``.
        """

        def write(folder: Path) -> str:
            for graph in report.graphs:
                graph.number = _number_of(graph, folder)
                single = Report(
                    [graph], report.from_cache or graph.from_cache, report.uuid, report.versions
                )
                _write_record(folder, graph.number, single.to_dict())
            _summarise(folder)
            return str(folder / "report.json")

        return self._guarded(write)

    def _guarded(self, write: Callable[[Path], str]) -> str | None:
        with _lock:
            if self.folder is None or not self.enabled:
                return None
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                return write(self.folder)
            except OSError as error:
                _broken.add(str(self.folder))
                log.warning("fp8pass cannot dump to %s, and stops trying: %s", self.folder, error)
            except Exception as error:  # a graph that torch cannot print: lose its file, no more
                log.warning("fp8pass could not dump a graph: %s: %s", type(error).__name__, error)
            return None


def emit_to_tools(step: str, graph: fx.Graph, hook: str) -> None:
    """Show a graph to who watches the compile: depyf, tlparse (TORCH_TRACE), ``+fp8pass`` logs.

    Costs nothing when nobody does: text is made only for a tool that is there. Never raises.
    """
    name = f"fp8pass {hook} {step}"
    try:
        from torch._dynamo import utils

        # Inside depyf.prepare_debug this function has the code of depyf's own, which writes the
        # graph to a file at once; torch's own code only makes a lazy string.
        show = utils.lazy_format_graph_code
        if show.__code__.co_name != show.__name__ or log.isEnabledFor(logging.DEBUG):
            log.debug("%s", show(name, live_module(graph)))
        _trace(name, "string", lambda: graph_text(graph, name))
    except Exception as error:
        log.debug("could not show %s: %s: %s", name, type(error).__name__, error)


def emit_record(record: GraphRecord) -> None:
    """Put a record beside the graphs in the trace that tlparse reads. Never raises."""
    try:
        _trace(f"fp8pass {record.hook} sites", "json", lambda: Report([record]).to_json())
    except Exception as error:
        log.debug("could not trace a record: %s: %s", type(error).__name__, error)


def show_graph(
    step: str, graph: fx.Graph, hook: str, dump: Dump | None, record: GraphRecord | None = None
) -> None:
    """Dump a graph (noting the file in ``record``) and show it to the tools that watch."""
    if dump is not None:
        name = dump.write_graph(step, graph, hook)
        if name is not None and record is not None:
            record.files[step] = name
    emit_to_tools(step, graph, hook)


def load_dump(folder: str | os.PathLike[str]) -> Report:
    """The reports of all graphs in a dump folder as one; also takes the path of a report file.

    Raises:
        OptionError: there is no such folder or file, or no fp8pass report in it.
    """
    path = Path(folder)
    try:
        if path.is_dir():
            records = [report for _, _, report in _read_records(path) if report is not None]
            if records:
                return merge(records)
            path = path / "report.json"
        return Report.load(path)
    except OSError as error:
        raise OptionError(
            f"no fp8pass dump in {os.fspath(folder)!r} ({_missing(path, error)}); make one by "
            "running the program with FP8PASS_DUMP=<folder>"
        ) from error
    except ValueError as error:
        raise OptionError(f"{os.fspath(path)!r} is not an fp8pass report: {error}") from error


def _missing(path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError) and path.parent.is_dir():
        return (
            f"there is no file {path.name} in it" if path.name == "report.json" else "no such file"
        )
    return error.strerror or str(error)


def describe_dump(folder: str | os.PathLike[str]) -> str:
    """What ``fp8pass explain DIR`` prints: the report's table, then the files of each graph.

    Raises:
        OptionError: as :func:`load_dump`.
    """
    table = load_dump(folder).table()
    path = Path(folder)
    if not path.is_dir():
        return table
    return f"{table}\n{_index_text(_entries(path))}"


def _trace(name: str, encoding: str, text: Callable[[], str]) -> None:
    from torch._logging import trace_structured

    # payload_fn is only called when tracing is on
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name.replace(" ", "_"), "encoding": encoding},
        payload_fn=text,
        expect_trace_id=False,
    )


def _process() -> str:
    return f"pid {os.getpid()}"


def _reserve(folder: Path, hook: str) -> int:
    """Take the next free number of the folder by creating its file, which only one process can."""
    taken = [int(m[1]) for name in os.listdir(folder) if (m := _NUMBERED.fullmatch(name))]
    number = max(taken, default=-1) + 1
    while True:
        try:
            with open(folder / f"{number:03d}.json", "x", encoding="utf-8") as f:
                json.dump({"schema": SCHEMA, "hook": hook, "process": _process()}, f)
            return number
        except FileExistsError:
            number += 1


def _number_of(graph: GraphRecord, folder: Path) -> int:
    if graph.number is not None:
        return graph.number
    for name in graph.files.values():
        if match := _GRAPH_FILE.fullmatch(name):
            return int(match[1])
    return _reserve(folder, slug(graph.hook))


def _write_record(folder: Path, number: int, data: dict[str, Any]) -> None:
    data["process"] = _process()
    text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    write_atomic(folder / f"{number:03d}.json", text)


def _read_records(folder: Path) -> list[tuple[int, dict[str, Any], Report | None]]:
    """(number, raw data, report or None) of every numbered file; a graph whose compile ended
    before its report, or whose file is damaged, has none."""
    found = []
    for name in os.listdir(folder):
        match = _NUMBERED.fullmatch(name)
        if match is None:
            continue
        data: dict[str, Any] = {}
        report = None
        try:
            loaded = json_of((folder / name).read_text(encoding="utf-8"))
            data = loaded if isinstance(loaded, dict) else {}
            report = Report.from_dict(data) if "graphs" in data else None
        except (OSError, ValueError):
            pass
        found.append((int(match[1]), data, report))
    return sorted(found, key=lambda item: item[0])


def _entries(folder: Path) -> list[dict[str, Any]]:
    """One light entry per graph of the folder."""
    files: dict[int, dict[str, str]] = {}
    stamps: dict[str, int] = {}
    for path in folder.glob("*.py"):
        if match := _GRAPH_FILE.fullmatch(path.name):
            files.setdefault(int(match[1]), {})[match[3]] = path.name
            stamps[path.name] = path.stat().st_mtime_ns
    entries = []
    for number, data, report in _read_records(folder):
        steps = files.get(number, {})
        graph = report.graphs[0] if report is not None and report.graphs else None
        entry: dict[str, Any] = {
            "number": number,
            "name": graph.name if graph else "",
            "hook": graph.hook if graph else str(data.get("hook", "")),
            "process": str(data.get("process", "")),
            "files": dict(sorted(steps.items(), key=lambda item: (stamps[item[1]], item[1]))),
            "report": f"{number:03d}.json",
            "summary": graph.summary() if graph else "no report: the compile ended before it",
            "from_cache": bool(report and report.from_cache),
        }
        if graph:
            entry["nodes_before"], entry["nodes_after"] = graph.nodes_before, graph.nodes_after
            entry["counts"] = report.to_dict()["counts"] if report else {}
            entry["verdict"] = graph.verdict.code if graph.verdict else ""
        entries.append(entry)
    return entries


def _index_text(entries: list[dict[str, Any]]) -> str:
    lines = ["files of each graph"]
    for entry in entries:
        name = f"{entry['name']}, " if entry["name"] else ""
        cached = " (restored from cache)" if entry["from_cache"] else ""
        lines.append(
            f"  {entry['number']:03d}  {name}hook {entry['hook']}, {entry['process']}{cached}: "
            f"{entry['summary']}"
        )
        lines += [f"         {file}" for file in [*entry["files"].values(), entry["report"]]]
    return "\n".join(lines) + "\n"


def _summarise(folder: Path) -> None:
    """Write report.json and the index from the numbered files.

    Another process may add a record between our reading and our writing, and read before we wrote.
    So whoever writes looks again afterwards, and writes again if there was something new: the last
    writer has seen everything.
    """
    seen: list[tuple[int, dict[str, Any], Report | None]] | None = None
    for _ in range(100):  # bounded: a record with a NaN in it never equals itself
        records = _read_records(folder)
        if records == seen:
            break
        seen = records
        merge(report for _, _, report in records if report is not None).save(folder / "report.json")
        entries = _entries(folder)
        index = {"schema": SCHEMA, "graphs": entries}
        write_atomic(folder / "index.json", json.dumps(index, indent=1, ensure_ascii=False) + "\n")
        write_atomic(folder / "index.txt", _index_text(entries))
