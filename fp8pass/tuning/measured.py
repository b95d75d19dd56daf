"""What was measured of one product, and the orders of kernels that follow: plain data."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fp8pass.outside import amount_of, count_of
from fp8pass.problem import MRange, ScaledMMProblem
from fp8pass.problem_spec import problem_text

#: Two kernels are equally fast within this share or these microseconds: the neighbouring range
#: then decides, which keeps plans short.
NOISE, NOISE_US = 0.01, 0.1


@dataclass(frozen=True, slots=True)
class Point:
    """Times for one range of M.

    Attributes:
        m: the range that the times stand for.
        rows: the number of rows that was measured, inside ``m``.
        us: microseconds of one call by kernel; only kernels whose numbers were right.
    """

    m: MRange
    rows: int
    us: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        us = {name: round(value, 3) for name, value in sorted(self.us.items())}
        return {"m": str(self.m), "rows": self.rows, "us": us}

    @staticmethod
    def from_dict(data: Any) -> Point:
        """Raises ValueError, TypeError or KeyError for what :meth:`to_dict` never gives."""
        us = {
            str(name): amount_of(value, f"a time of {name}") for name, value in data["us"].items()
        }
        m, rows = MRange.parse(data["m"]), count_of(data["rows"], "rows")
        if not m.covers(MRange(rows, rows)):
            raise ValueError(f"{rows} rows are outside {m}")
        return Point(m, rows, us)


@dataclass(frozen=True, slots=True)
class Record:
    """Everything that was measured of one product, its number of rows apart.

    Attributes:
        points: by range of M.
        refused: kernel -> why it must not be used: wrong numbers, or it failed.
        when: the day, as text.
    """

    points: tuple[Point, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    when: str = ""

    def merged(self, newer: Record) -> Record:
        """Both; for the same range of M the newer counts."""
        points = {str(p.m): p for p in (*self.points, *newer.points)}
        ordered = sorted(points.values(), key=lambda p: (p.m.lo, p.rows))
        when = max(self.when, newer.when)
        return Record(tuple(ordered), {**self.refused, **newer.refused}, when)

    def to_dict(self) -> dict[str, Any]:
        return {
            "when": self.when,
            "points": [point.to_dict() for point in self.points],
            "refused": dict(sorted(self.refused.items())),
        }

    @staticmethod
    def from_dict(data: Any) -> Record:
        """Raises ValueError, TypeError or KeyError for what :meth:`to_dict` never gives."""
        points = tuple(Point.from_dict(item) for item in data["points"])
        refused = {str(name): str(why) for name, why in data["refused"].items()}
        return Record(points, refused, str(data["when"]))

    def known(self) -> set[str]:
        """The kernels that were tried."""
        return set(self.refused).union(*(point.us for point in self.points))

    def orders(self) -> list[tuple[MRange, tuple[str, ...]]]:
        """(range of M, kernels from the fastest on), and one for all of them together."""
        found: list[tuple[MRange, tuple[str, ...]]] = []
        before = ""
        for point in self.points:
            order = fastest(point.us, before)
            found.append((point.m, order))
            before = order[0] if order else before
        if len(self.points) > 1:
            hi = [point.m.hi for point in self.points]
            known = [h for h in hi if h is not None]
            top = None if len(known) < len(hi) else max(known)
            whole = MRange(min(point.m.lo for point in self.points), top)
            found.append((whole, overall([point.us for point in self.points])))
        return found


def fastest(us: dict[str, float], before: str = "") -> tuple[str, ...]:
    """Kernels from the fastest on; ``before`` comes first where it is as fast as the first."""
    order = sorted(us, key=lambda name: (us[name], name))
    if before in us and us[before] - us[order[0]] <= max(NOISE_US, NOISE * us[order[0]]):
        order.remove(before)
        order.insert(0, before)
    return tuple(order)


def overall(times: Iterable[dict[str, float]]) -> tuple[str, ...]:
    """An order for all of several measurements, of the kernels that are in each: by the geometric
    mean of how much slower than the fastest a kernel is."""
    times = [us for us in times if us]
    common = set.intersection(*(set(us) for us in times)) if times else set()
    loss = {
        name: sum(math.log(max(us[name], 1e-3) / max(min(us.values()), 1e-3)) for us in times)
        for name in common
    }
    return tuple(sorted(loss, key=lambda name: (loss[name], name)))


def key_of(problem: ScaledMMProblem) -> str:
    """The text under which a product is kept: everything about it but its number of rows."""
    return problem_text(replace(problem, m=MRange()))


class Measured:
    """The records of one device; what a choice asks. Compared by identity, never changed."""

    def __init__(self, records: dict[str, Record] | None = None) -> None:
        self.records = dict(records or {})
        self._orders: dict[str, list[tuple[MRange, tuple[str, ...]]]] = {}

    def record(self, problem: ScaledMMProblem) -> Record | None:
        """What was measured of this product."""
        return self.records.get(key_of(problem)) if self.records else None

    def refused(self, problem: ScaledMMProblem) -> dict[str, str]:
        """Kernels that must not be used for this product, and why."""
        record = self.record(problem)
        return {} if record is None else record.refused

    def _of(self, problem: ScaledMMProblem) -> list[tuple[MRange, tuple[str, ...]]]:
        if not self.records:
            return []
        key = key_of(problem)
        if key not in self._orders:
            record = self.records.get(key)
            self._orders[key] = [] if record is None else record.orders()
        return self._orders[key]

    def starts(self, problem: ScaledMMProblem) -> tuple[int, ...]:
        """The numbers of rows at which an answer may change."""
        found = []
        for m, _ in self._of(problem):
            found.append(m.lo)
            if m.hi is not None:
                found.append(m.hi + 1)
        return tuple(found)

    def order(self, problem: ScaledMMProblem) -> tuple[str, ...]:
        """Kernels from the fastest on, of the narrowest range that covers the problem's."""
        covering = [(m, order) for m, order in self._of(problem) if m.covers(problem.m)]
        if not covering:
            return ()
        return min(covering, key=lambda pair: _width(pair[0]))[1]

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything that a choice may depend on."""
        data = {key: record.to_dict() for key, record in self.records.items()}
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _width(m: MRange) -> float:
    return math.inf if m.hi is None else m.hi - m.lo


NOTHING = Measured()
