"""Measured orders of kernels, one JSON file for each architecture that was measured.

A file says where and how it was measured and lists entries: for scales of this granularity, N, K
and M in these ranges, the kernels from the fastest on. An entry names only kernels that were
measured; others come after them by static priority. Reading a table executes nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from fp8pass.outside import first_line, json_of, shortened
from fp8pass.problem import MRange, ScaledMMProblem
from fp8pass.quant_key import dtype_name
from fp8pass.target import Target

log = logging.getLogger("fp8pass")

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a table.

    Attributes:
        activation, weight: granularities, as in the quantisation keys.
        m, n, k: ranges, both ends included, in which the order was seen.
        order: kernel names, the fastest first.
        fast_accum: whether the source must allow reduced accumulation, must not, or None = either.
        dtype: of the activations' codes, as in the keys; None = any.
    """

    activation: str
    weight: str
    m: MRange
    n: MRange
    k: MRange
    order: tuple[str, ...]
    fast_accum: bool | None = None
    dtype: str | None = None

    def matches(self, problem: ScaledMMProblem) -> bool:
        """Whether the entry is about this product, its number of rows apart."""
        if (self.activation, self.weight) != (
            problem.activation.granularity,
            problem.weight.granularity,
        ):
            return False
        if self.dtype is not None and self.dtype != dtype_name(problem.activation.dtype):
            return False
        if self.fast_accum is not None and self.fast_accum != problem.use_fast_accum:
            return False
        if problem.n is None or problem.k is None:
            return False
        return self.n.covers(MRange(problem.n, problem.n)) and self.k.covers(
            MRange(problem.k, problem.k)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The entries for one architecture; the first that matches counts. Compared by identity."""

    entries: tuple[Entry, ...] = ()
    provenance: str = ""

    def starts(self, problem: ScaledMMProblem) -> tuple[int, ...]:
        """The numbers of rows at which an answer for this product may change."""
        found = []
        for entry in self.entries:
            if entry.matches(problem):
                found.append(entry.m.lo)
                if entry.m.hi is not None:
                    found.append(entry.m.hi + 1)
        return tuple(found)

    def order(self, problem: ScaledMMProblem) -> tuple[str, ...]:
        """Kernel names for a part of the range that :meth:`starts` has cut."""
        for entry in self.entries:
            if entry.matches(problem) and entry.m.covers(problem.m):
                return entry.order
        return ()


EMPTY = Table()


def table_for(target: Target) -> Table:
    """The table of the target's architecture; an empty one where nothing was measured."""
    return _load(target.arch)


def files() -> list[Path]:
    """The shipped tables."""
    return sorted(Path(__file__).parent.glob("*.json"))


@lru_cache(maxsize=64)
def _load(arch: str) -> Table:
    for file in files():
        if file.stem == arch:
            try:
                return parse(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                log.warning("fp8pass: the table %s is not used: %s", file, first_line(error))
    return EMPTY


def parse(text: str) -> Table:
    """A table from its JSON.

    Raises:
        ValueError: no table, another schema version, an unknown field or a bad range.
    """
    data = json_of(text)
    try:
        return _table(data)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"it is no table: {error!r}") from error


def _table(data: Any) -> Table:
    if data.get("schema") != SCHEMA:
        raise ValueError(f"table has schema {data.get('schema')!r}, this version reads {SCHEMA}")
    entries = []
    for item in data["entries"]:
        unknown = set(item) - {field.name for field in fields(Entry)}
        if unknown:
            raise ValueError(f"table entry has an unknown field {sorted(unknown)[0]!r}")
        if type(item["order"]) is not list or not all(type(name) is str for name in item["order"]):
            raise ValueError(f"table entry has a bad order {shortened(item['order'])}")
        m, n, k = (MRange.parse(item.get(name, "0-")) for name in ("m", "n", "k"))
        entries.append(
            Entry(
                item["activation"], item["weight"], m, n, k, tuple(item["order"]),
                item.get("fast_accum"), item.get("dtype"),
            )
        )  # fmt: skip
    return Table(tuple(entries), str(data.get("provenance", "")))
