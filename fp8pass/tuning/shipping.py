"""Tables that can be shipped (fp8pass/lowerings/tables/<arch>.json), made from measurements.

An entry for each size that was measured comes first; then one for all other sizes, in the order of
the smallest loss over those measured. Neighbouring ranges of M with one winner are joined.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from fp8pass.lowerings.tables import SCHEMA
from fp8pass.problem import MRange, ScaledMMProblem
from fp8pass.problem_spec import parse_problem
from fp8pass.quant_key import dtype_name
from fp8pass.tuning.measured import Point, Record, fastest, overall

#: (scales of activation and weight, dtype of the codes, reduced accumulation)
_Kind = tuple[str, str, str, bool]


def table(records: dict[str, Record], identity: dict[str, Any]) -> dict[str, Any]:
    """The table of one device as plain data; sizes in the order of the records' names."""
    kinds: dict[_Kind, dict[tuple[int, int], Record]] = {}
    day = ""
    for key, record in sorted(records.items()):
        problem = parse_problem(key)
        if problem.n is None or problem.k is None or not record.points:
            continue
        day = max(day, record.when)
        sizes = kinds.setdefault(_kind(problem), {})
        # bias and dtype of the result change little; the plainest record of a size stands for it
        known = sizes.get((problem.n, problem.k))
        if known is None or problem.bias is None:
            sizes[problem.n, problem.k] = record
    entries: list[dict[str, Any]] = []
    for kind, sizes in sorted(kinds.items()):
        for (n, k), record in sorted(sizes.items()):
            entries += [
                _entry(kind, m, order) | {"n": str(n), "k": str(k)}
                for m, order in _joined(_winners(record.points))
            ]
        entries += [_entry(kind, m, order) for m, order in _joined(_common(sizes.values()))]
    versions = [f"{name} {identity[name]}" for name in ("torch", "cuda", "hip", "triton") if
                identity.get(name)]  # fmt: skip
    versions += [f"{name} {version}".strip() for name, version in identity["libraries"].items()]
    sizes_text = sorted({f"{n}x{k}" for sizes in kinds.values() for n, k in sizes})
    provenance = (
        f"{identity['device']}, {', '.join(versions)}, {day}; fp8pass tune, medians of each "
        f"product behind the kernel that writes its activations; N x K {', '.join(sizes_text)}"
    )
    return {"schema": SCHEMA, "provenance": provenance, "entries": entries}


def render(data: dict[str, Any]) -> str:
    """The text of a table, an entry in a line."""
    lines = ["{", f' "schema": {data["schema"]},']
    lines.append(f' "provenance": {json.dumps(data["provenance"], ensure_ascii=False)},')
    lines.append(' "entries": [')
    lines.append(",\n".join(f"  {json.dumps(entry)}" for entry in data["entries"]))
    return "\n".join([*lines, " ]", "}"]) + "\n"


def _kind(problem: ScaledMMProblem) -> _Kind:
    return (
        problem.activation.granularity, problem.weight.granularity,
        dtype_name(problem.activation.dtype), problem.use_fast_accum,
    )  # fmt: skip


def _entry(kind: _Kind, m: MRange, order: Sequence[str]) -> dict[str, Any]:
    activation, weight, dtype, fast = kind
    return {
        "activation": activation, "weight": weight, "dtype": dtype, "fast_accum": fast,
        "m": str(m), "order": list(order),
    }  # fmt: skip


_Times = list[tuple[MRange, list[dict[str, float]]]]


def _winners(points: Iterable[Point]) -> _Times:
    return [(point.m, [point.us]) for point in points]


def _common(records: Iterable[Record]) -> _Times:
    """The ranges that the points of all records cut, each with the times of every record."""
    records = list(records)
    starts = {point.m.lo for record in records for point in record.points}
    ends = {p.m.hi + 1 for r in records for p in r.points if p.m.hi is not None}
    found: _Times = []
    for part in MRange().split(starts | ends):
        inside = [[p.us for p in r.points if p.m.covers(part)][:1] for r in records]
        times = [us for each in inside for us in each]
        if times:
            found.append((part, times))
    return found


def _joined(parts: _Times) -> list[tuple[MRange, tuple[str, ...]]]:
    """Neighbours with one winner made one, in the order that suits all of them."""
    groups: list[tuple[MRange, str, list[dict[str, float]]]] = []
    for m, times in parts:
        before = groups[-1][1] if groups else ""
        order = fastest(times[0], before) if len(times) == 1 else overall(times)
        if not order:
            continue
        if groups and before == order[0] and groups[-1][0].hi == m.lo - 1:
            last, _, sofar = groups.pop()
            groups.append((MRange(last.lo, m.hi), before, sofar + times))
        else:
            groups.append((m, order[0], list(times)))
    found = []
    for m, first, times in groups:
        rest = [name for name in overall(times) if name != first]
        found.append((m, (first, *rest)))
    return found
