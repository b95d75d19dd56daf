"""The report as aligned plain text: totals, what was done, what was left and why, the kernels.

Sites that differ only in the number of their layer become one row with a count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence

from fp8pass.report.record import GraphRecord, Report
from fp8pass.report.site import Site

# "layers.12." -> "layers.*.": a number that is a whole component of a path, not the line in
# "model.py:66".
_LAYER = re.compile(r"(?<=\.)\d+\b|(?<=\[)\d+(?=\])")
#: A kernel for another kind of device than the target: nothing that is asked about site by site.
_OTHER_DEVICE = "FP8-L001"
# Node names end in a number that says nothing to the reader: "mul_12" -> "mul".
_NODE = re.compile(r"\b([A-Za-z_]\w*?)(?:_\d+)+\b")


def render(report: Report) -> str:
    """The whole table. Contains no time stamp: the same report gives the same text."""
    blocks = [_header(report)]
    done = [site for site in report.sites if site.status != "left"]
    left = [site for site in report.sites if site.status == "left"]
    if done:
        blocks.append("\n".join(["fused and lowered", *_done(done)]))
    if left:
        blocks.append("\n".join([f"not fused or lowered ({len(left)})", *_left(left)]))
    products = [site for site in report.sites if site.kind == "scaled_mm"]
    if any(site.kernel or site.rejected for site in products):
        blocks.append("\n".join(["GEMM kernels", *_kernels(products)]))
    return "\n\n".join(blocks) + "\n"


def _header(report: Report) -> str:
    lines = []
    graphs = len(report.graphs)
    title = f"fp8pass: {_many(len(report.sites), 'site')} in {_many(graphs, 'graph')}"
    if report.from_cache:
        title = "fp8pass: restored from cache" + (
            f", {_many(len(report.sites), 'site')} in {_many(graphs, 'graph')} when it was compiled"
            if graphs
            else "; there is no report of that compile for this graph, fp8pass.explain makes one"
        )
    elif not graphs:
        title = "fp8pass: no graph came through"
    lines.append(title)
    if report.note:
        lines.append(f"  {report.note}")
    lines += [f"  option {item} matched no site of the graphs below" for item in report.unmatched]
    targets = _unique(graph.target for graph in report.graphs)
    numerics = _unique(str(graph.options.get("numerics", "")) for graph in report.graphs)
    facts = [f"target {target}" for target in targets if target]
    facts += [f"numerics {name}" for name in numerics if name]
    facts += [f"{name} {version}" for name, version in report.versions.items()]
    if facts:
        lines.append("  " + ", ".join(facts))
    for graph in report.graphs:
        lines += _graph(graph, report)
    counts = report.counts()
    if counts and graphs > 1:
        total = ", ".join(f"{n} {kind} {status}" for (kind, status), n in counts.items())
        lines.append(f"  total: {total}")
    return "\n".join(lines)


def _graph(graph: GraphRecord, report: Report) -> list[str]:
    facts = []
    if graph.nodes_before or graph.nodes_after:
        facts.append(f"{graph.nodes_before} -> {graph.nodes_after} nodes")
    if graph.seconds:
        facts.append(f"{sum(graph.seconds.values()):.2f} s")
    if graph.source != "pristine":
        facts.append(f"source {graph.source}")
    if graph.from_cache and not report.from_cache:
        facts.append("restored from cache")
    label = f"{graph.name}, hook {graph.hook}" + (f" ({', '.join(facts)})" if facts else "")
    lines = [f"  {label}: {graph.summary()}"]
    if graph.verdict is not None and graph.verdict.hint:
        lines.append(f"    hint: {graph.verdict.hint}")
    return lines


def _done(sites: list[Site]) -> list[str]:
    rows = [["count", "kind", "status", "rule", "kernel", "key", "shape", "readers", "where"]]
    groups = _grouped(
        sites,
        lambda s: (
            s.kind, s.status, s.rule, s.kernel, s.plan, s.key, s.shape, s.readers, s.source,
            _pattern(s.where), s.code,
        ),
    )  # fmt: skip
    for group in groups:
        s = group[0]
        kernel = f"{s.kernel} ({s.plan})" if ";" in s.plan else s.kernel
        row = [str(len(group)), s.kind, s.status, s.rule, kernel, _short(s.key), s.shape]
        rows.append([*row, str(s.readers or ""), _where(group)])
    return _aligned(rows, right=(0, 7))


def _left(sites: list[Site]) -> list[str]:
    rows = [["count", "kind", "code", "key", "shape", "where"]]
    details: list[list[str]] = [[]]
    groups = _grouped(
        sites,
        lambda s: (s.kind, s.code, s.key, s.shape, _pattern(s.where), _nodeless(s), s.hint),
    )
    for group in groups:
        s = group[0]
        rows.append([str(len(group)), s.kind, s.code, _short(s.key), s.shape, _where(group)])
        detail = [f"why:  {s.message}" + (f" (rule {s.rule})" if s.rule else "")]
        if s.hint:
            detail.append(f"hint: {s.hint}")
        details.append(detail)
    return _aligned(rows, right=(0,), details=details)


def _kernels(sites: list[Site]) -> list[str]:
    rows = [["count", "kernel", "M ranges", "key"]]
    details: list[list[str]] = [[]]
    groups = _grouped(
        sites,
        lambda s: (
            s.kernel, s.plan, s.key, tuple((r.kernel, r.code, r.message) for r in s.rejected)
        ),
    )  # fmt: skip
    for group in groups:
        s = group[0]
        rows.append([str(len(group)), s.kernel or "(kept as it was)", s.plan, _short(s.key)])
        details.append(_rejected(s))
    return _aligned(rows, right=(0,), details=details)


def _rejected(site: Site) -> list[str]:
    """A line for each kernel that was not chosen; those for other kinds of devices in one."""
    lines = [
        f"not {r.kernel}: {r.code} {r.message}" for r in site.rejected if r.code != _OTHER_DEVICE
    ]
    others = [r.kernel for r in site.rejected if r.code == _OTHER_DEVICE]
    if others:
        lines.append(f"{_OTHER_DEVICE} for other kinds of devices: {', '.join(others)}")
    return lines


def _grouped(sites: Iterable[Site], key: Callable[[Site], Hashable]) -> list[list[Site]]:
    groups: dict[Hashable, list[Site]] = {}
    for site in sites:
        groups.setdefault(key(site), []).append(site)
    return list(groups.values())


def _where(group: Sequence[Site]) -> str:
    """The place of one site, the common pattern of several."""
    places = _unique(site.where for site in group)
    return places[0] if len(places) == 1 else _pattern(group[0].where)


def _pattern(where: str) -> str:
    return _LAYER.sub("*", where)


def _nodeless(site: Site) -> str:
    """The message without node names, so that thirty layers make one row, not thirty."""
    return _NODE.sub(r"\1", site.message.replace(site.node or "\0", "*"))


def _short(key: str) -> str:
    return key.replace("float8_", "")


def _unique(items: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(items))


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _aligned(
    rows: list[list[str]],
    right: tuple[int, ...] = (),
    details: list[list[str]] | None = None,
) -> list[str]:
    """Rows of cells as lines; columns without any value are dropped; details follow their row."""
    used = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    widths = {i: max(len(row[i]) for row in rows) for i in used}
    lines = []
    for number, row in enumerate(rows):
        cells = [row[i].rjust(widths[i]) if i in right else row[i].ljust(widths[i]) for i in used]
        lines.append(("  " + "  ".join(cells)).rstrip())
        indent = " " * (2 + widths[0] + 2)
        lines += [indent + text for text in (details[number] if details else [])]
    return lines
