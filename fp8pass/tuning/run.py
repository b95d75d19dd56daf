"""``fp8pass tune``: measuring the products of a whole model, or of a list of sizes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8pass.errors import OptionError, UnsupportedError
from fp8pass.lowerings import choose
from fp8pass.lowerings.choice import narrowed
from fp8pass.options import Options
from fp8pass.outside import first_line, shortened
from fp8pass.problem import ScaledMMProblem
from fp8pass.problem_spec import parse_problem, parse_rows, parse_sizes, problem_text
from fp8pass.progress import track
from fp8pass.survey import columns
from fp8pass.target import Target
from fp8pass.tuning import session, shipping, store
from fp8pass.tuning.live import identity_of, live_device
from fp8pass.tuning.measure import METHOD, ROWS, ROWS_HOST, measure, ranges
from fp8pass.tuning.measured import Record, key_of
from fp8pass.tuning.operands import why_not_measured


@dataclass(frozen=True)
class Tuned:
    """What a run measured.

    Attributes:
        target: the device.
        identity: everything that the measurements hold for.
        file: where they are kept.
        products: (product, its record or None, the plan that follows, why it was not measured).
    """

    target: Target
    identity: dict[str, Any]
    file: Path
    products: tuple[tuple[ScaledMMProblem, Record | None, str, str], ...]

    @property
    def kept(self) -> bool:
        """Whether something was measured, now or before, that lies in the file."""
        if all(record is None for _, record, _, _ in self.products):
            return False
        return os.path.isfile(self.file)  # the folder may not be one that can be written

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "schema": store.SCHEMA,
            "target": self.target.spec,
            "measured_on": self.identity,
            "method": METHOD,
            "file": str(self.file) if self.kept else None,
            "products": [
                {"product": problem_text(problem), "plan": plan, "not_measured": why}
                | ({} if record is None else record.to_dict())
                for problem, record, plan, why in self.products
            ],
        }

    def table(self) -> dict[str, Any]:
        """A table that can be shipped (:mod:`fp8pass.tuning.shipping`)."""
        records = {key_of(p): r for p, r, _, _ in self.products if r is not None}
        return shipping.table(records, self.identity)

    def text(self) -> str:
        """For people: a line for each range of M, and what was refused."""
        kept = f"kept in {self.file}" if self.kept else "nothing is kept"
        blocks = [f"{self.identity['device']} ({self.target.spec}), {kept}"]
        for problem, record, plan, why in self.products:
            lines = [problem_text(problem), f"  {plan or 'no kernel'}"]
            if why:
                lines.append(f"  not measured: {why}")
            if record is not None and record.points:
                names = sorted({name for point in record.points for name in point.us})
                cells = [
                    [str(p.m), *(f"{p.us[n]:.1f}" if n in p.us else "-" for n in names)]
                    for p in record.points
                    if problem.m.overlaps(p.m)
                ]
                table = columns(["M, microseconds", *names], cells)
                lines += ["  " + line for line in table.splitlines()]
            for name, reason in sorted(record.refused.items()) if record is not None else ():
                lines.append(f"  {name} is refused: {reason}")
            blocks.append("\n".join(lines))
        return "\n\n".join(blocks) + "\n"


def products_of_shapes(
    shapes: Sequence[str], scales: Sequence[str], rows: Sequence[str], more: str = ""
) -> list[ScaledMMProblem]:
    """A product for each size ``N,K``, each kind of scales and each range of rows.

    Raises:
        OptionError: a part of one that is not understood.
    """
    target = Target.detect()
    spans = [parse_rows(m, "rows ") for m in rows or ("0-",)]
    found = []
    for shape in shapes:
        sizes = parse_sizes(shape)
        if sizes is None:
            raise OptionError(f"shape {shortened(shape)} is not N,K, two numbers > 0")
        for kind in scales:
            for m in spans:
                text = f"{kind}, m={m}, n={sizes[0]}, k={sizes[1]}"
                found.append(parse_problem(f"{text}, {more}" if more else text, target))
    return found


def products_of(name: str, rows: Sequence[str] = ()) -> list[ScaledMMProblem]:
    """Every product of a model that is compiled for the device that is here, each once.

    Args:
        name: ``MODULE:NAME``, as :func:`fp8pass.loading.load` takes it.
        rows: numbers or ranges of rows; default: those of the model with symbolic sizes.

    Raises:
        OptionError: the model cannot be had.
        UnsupportedError: no product was found in it.
    """
    from fp8pass.crossing import graphs_for
    from fp8pass.loading import load

    spans = [parse_rows(m, "rows ") for m in rows]
    program = load(name)
    target = Target.detect()
    with session.listening() as heard:
        graphs_for(
            program.model, *program.inputs, target=target.spec, dynamic=True, kwargs=program.kwargs
        )
    if not heard:
        raise UnsupportedError(f"no scaled product was found in {name!r}")
    if not rows:
        return list(dict.fromkeys(heard))
    return list(dict.fromkeys(replace(p, m=m) for p in heard for m in spans))


def tune(
    problems: Iterable[ScaledMMProblem],
    options: Options,
    *,
    again: bool = False,
    progress: bool | None = None,
) -> Tuned:
    """Measure products on the device that is here, and keep what was found.

    Args:
        problems: what to measure; a range of M is measured at several numbers of rows in it.
        options: ``tune_cache``, ``disable`` and ``numerics`` count.
        again: also what was measured before.
        progress: show a bar: True, False, or None for "when stderr is a terminal".

    Raises:
        UnsupportedError: the options name a target: only the device that is here can be measured.
    """
    if options.target is not None:
        raise UnsupportedError("only the device that is here can be measured; name no target")
    target = Target.detect()
    device = live_device(target)
    if device is None:
        raise UnsupportedError(f"no device of {target.spec} is here")
    identity = identity_of(target)
    path = store.file_for(session.folder(options), identity)
    asked = list(dict.fromkeys(problems))
    whys = {problem: why_not_measured(problem) for problem in asked}
    grid = ROWS_HOST if target.host else ROWS
    steps = sum(len(ranges(p.m, grid)) for p in asked if not whys[p])

    def work() -> Iterator[tuple[ScaledMMProblem, Record]]:
        for problem in asked:
            if whys[problem]:
                continue
            known = session.measured_for(target, options).record(problem)
            wanted = {str(m) for m, _ in ranges(problem.m, grid)}
            if not again and known and wanted <= {str(p.m) for p in known.points}:
                for _ in wanted:
                    yield problem, Record()
                continue
            try:
                for part in measure(
                    target,
                    problem,
                    device,
                    numerics=options.numerics,
                    disabled=narrowed(options, problem, "").disable,
                ):
                    yield problem, part
            except (RuntimeError, MemoryError) as error:  # a kernel's own are in its record
                whys[problem] = f"{type(error).__name__}: {first_line(error)}"

    made: dict[ScaledMMProblem, Record] = {}
    for problem, part in track(work(), "measuring", total=steps, progress=progress):
        made[problem] = made.get(problem, Record()).merged(part)
        if part.points or part.refused:  # at once: a run that is stopped keeps what it has
            session.keep(path, identity, {key_of(problem): part}, METHOD)
    reading = replace(options, tune="cached")
    measured = session.measured_for(target, reading)
    products = tuple(
        (p, measured.record(p), choose(target, p, reading).text, whys[p]) for p in asked
    )
    return Tuned(target, identity, path, products)
