"""Report: everything that one compile did, as plain records that are saved and read as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8pass.outside import amount_of, json_of
from fp8pass.reasons import Verdict
from fp8pass.report.files import write_atomic
from fp8pass.report.site import KINDS, STATUSES, Site

#: Version of the JSON form. Raised when a reader of the old form would misread the new one.
SCHEMA = 1


@dataclass
class GraphRecord:
    """What one call of the pass did to one graph: one hook of one compile.

    Attributes:
        name: name of the graph, unique enough for a reader of the report.
        hook: ``joint``, ``post_grad``, ...
        target: the target's spec.
        options: the resolved options as plain data (tuples become lists).
        nodes_before, nodes_after: number of nodes.
        seconds: step of the pass -> seconds.
        sites: one record per site.
        verdict: why nothing was done, or what failed; None when all went well.
        source: ``pristine`` (as captured) or ``post_joint`` (after Inductor's joint passes, so that
            the numerics contract is against the graph as the hook received it).
        files: step -> file name in the dump folder.
        number: number of the graph in the dump folder.
        from_cache: the record was written by an earlier compile, whose result was reused.
        fuel: rewrites that count against the option ``fuel``.
        selectors: item of an option that is for some sites only -> whether it is about a site of
            this graph; see :attr:`Report.unmatched`.
    """

    name: str
    hook: str
    target: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    nodes_before: int = 0
    nodes_after: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    sites: list[Site] = field(default_factory=list)
    verdict: Verdict | None = None
    source: str = "pristine"
    files: dict[str, str] = field(default_factory=dict)
    number: int | None = None
    from_cache: bool = False
    fuel: int = 0
    selectors: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.options = _plain(self.options)

    def counts(self) -> dict[tuple[str, str], int]:
        """(kind, status) -> number of sites, in the order of :data:`KINDS`."""
        return count_sites(self.sites)

    def summary(self) -> str:
        """One line for a log: what was done, or why nothing was."""
        counts = self.counts()
        done = ", ".join(f"{n} {kind} {status}" for (kind, status), n in counts.items())
        parts = [done] if done else []
        if self.verdict is not None and not self.verdict.ok:
            parts.insert(0, f"{self.verdict.code} {self.verdict.message}")
        return "; ".join(parts) or "no site"

    def to_dict(self) -> dict[str, Any]:
        """Plain data; :meth:`from_dict` is the inverse."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data["sites"] = [site.to_dict() for site in self.sites]
        if self.verdict is not None:
            data["verdict"] = dataclasses.asdict(self.verdict)
        return {name: _plain(value) for name, value in data.items()}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> GraphRecord:
        """Rebuild from :meth:`to_dict`; raises KeyError, TypeError or ValueError on bad data."""
        known = {f.name for f in dataclasses.fields(GraphRecord)}
        values = {name: value for name, value in data.items() if name in known}
        for name, kind in _TYPES.items():
            if name in values and not isinstance(values[name], kind):
                raise TypeError(f"graph field {name!r} has a bad value {values[name]!r}")
        for name, seconds in values.get("seconds", {}).items():
            amount_of(seconds, f"seconds of {name}")
        if not all(isinstance(file, str) for file in values.get("files", {}).values()):
            raise TypeError("graph field 'files' has a bad value")
        values["sites"] = [Site.from_dict(site) for site in values.get("sites", ())]
        if values.get("verdict") is not None:
            values["verdict"] = _verdict(values["verdict"])
        return GraphRecord(**values)


def _verdict(data: Any) -> Verdict:
    for name, value in data.items():
        if not isinstance(value, bool if name == "ok" else str):
            raise TypeError(f"verdict field {name!r} has a bad value {value!r}")
    return Verdict(**data)


_TYPES: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "hook": str,
    "target": str,
    "options": dict,
    "nodes_before": int,
    "nodes_after": int,
    "seconds": dict,
    "sites": list,
    "source": str,
    "files": dict,
    "number": (int, type(None)),
    "from_cache": bool,
    "fuel": int,
    "selectors": dict,
}


@dataclass
class Report:
    """What fp8pass did in one compile (one call of the backend), site by site.

    Attributes:
        graphs: one record per hook that ran, oldest first.
        from_cache: the compile was a cache hit; the records were written when it was made.
        uuid: identity of the pass.
        versions: name -> version of what took part.
        note: a sentence for the reader, printed at the top.
    """

    graphs: list[GraphRecord] = field(default_factory=list)
    from_cache: bool = False
    uuid: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def sites(self) -> list[Site]:
        """The sites of all graphs, in order."""
        return [site for graph in self.graphs for site in graph.sites]

    @property
    def unmatched(self) -> list[str]:
        """Items of options, such as ``force="down_proj=torch_row"``, that are about no site of
        any of these graphs."""
        found: dict[str, bool] = {}
        for graph in self.graphs:
            for item, matched in graph.selectors.items():
                found[item] = found.get(item, False) or matched
        return [item for item, matched in found.items() if not matched]

    def counts(self) -> dict[tuple[str, str], int]:
        """(kind, status) -> number of sites, such as ``{("norm", "fused"): 60}``."""
        return count_sites(self.sites)

    def select(self, kind: str | None = None, status: str | None = None) -> list[Site]:
        """The sites of a kind and/or status."""
        return [s for s in self.sites if kind in (None, s.kind) and status in (None, s.status)]

    def table(self) -> str:
        """The report as plain text: totals, what was done, what was left and why, kernels."""
        from fp8pass.report.table import render

        return render(self)

    def __str__(self) -> str:
        return self.table()

    def to_dict(self) -> dict[str, Any]:
        """Plain data: ``schema``, ``graphs`` without their sites, ``sites`` with their graph.

        The sites are one flat list because that is what readers look for; each names the index of
        its graph, and nothing is stored twice.
        """
        graphs, sites = [], []
        for index, graph in enumerate(self.graphs):
            data = graph.to_dict()
            sites += [{"graph": index, **site} for site in data.pop("sites")]
            graphs.append(data)
        counts: dict[str, dict[str, int]] = {}
        for (kind, status), number in self.counts().items():
            counts.setdefault(kind, {})[status] = number
        return {
            "schema": SCHEMA,
            "from_cache": self.from_cache,
            "uuid": self.uuid,
            "versions": dict(self.versions),
            "note": self.note,
            "counts": counts,
            "graphs": graphs,
            "sites": sites,
        }

    def to_json(self, indent: int | None = 1) -> str:
        """:meth:`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False) + "\n"

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Report:
        """Rebuild from :meth:`to_dict`. Only data is read; nothing is imported or executed.

        Raises:
            ValueError: another schema version, or data that is no report.
        """
        try:
            if data["schema"] != SCHEMA:
                raise ValueError(f"report has schema {data['schema']!r}; this is {SCHEMA}")
            graphs = [GraphRecord.from_dict({**graph, "sites": []}) for graph in data["graphs"]]
            for site in data["sites"]:
                index = site["graph"]
                if not isinstance(index, int) or not 0 <= index < len(graphs):
                    raise ValueError(f"site of graph {index!r}, but there are {len(graphs)}")
                graphs[index].sites.append(Site.from_dict(site))
            return Report(
                graphs=graphs,
                from_cache=bool(data["from_cache"]),
                uuid=str(data["uuid"]),
                versions={str(name): str(v) for name, v in data["versions"].items()},
                note=str(data.get("note", "")),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not an fp8pass report: {error!r}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON, atomically: a reader sees the old file or the new one.

        Raises:
            OSError: the file cannot be written; an older one is left as it was.
        """
        write_atomic(path, self.to_json())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Report:
        """Read what :meth:`save` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not an fp8pass report of this schema version.
        """
        data = json_of(Path(path).read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError(f"not an fp8pass report: {path}")
        return Report.from_dict(data)


def count_sites(sites: Iterable[Site]) -> dict[tuple[str, str], int]:
    """(kind, status) -> number of sites, in the order of :data:`KINDS` and :data:`STATUSES`."""
    counter = Counter((site.kind, site.status) for site in sites)
    order = ((kind, status) for kind in KINDS for status in STATUSES)
    return {key: counter[key] for key in order if counter[key]}


def merge(reports: Iterable[Report]) -> Report:
    """One report with the graphs of all; restored from cache only if every one is."""
    reports = list(reports)
    uuids = {report.uuid for report in reports}
    merged = Report(
        graphs=[graph for report in reports for graph in report.graphs],
        from_cache=bool(reports) and all(report.from_cache for report in reports),
        uuid=uuids.pop() if len(uuids) == 1 else "",
    )
    for report in reports:
        merged.versions.update(report.versions)
    return merged


def _plain(value: Any) -> Any:
    """Only what JSON has: records become dicts, tuples and sets lists, the rest text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return [_plain(item) for item in sorted(value, key=str)]
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value)
