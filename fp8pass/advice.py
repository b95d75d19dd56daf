"""Which recipe suits a device, a model and a workload: measured, or from stated facts, and why.

A workload is a number of sequences, the tokens of their prompts and the tokens that they generate:
``decode:32x256+512`` runs its linears once on 32 x 256 rows and 512 times on 32. A recipe's time is
that of its products over the whole workload; where every product of two recipes was measured on the
device that is here, the faster one is advised. Elsewhere it is what the kernels that would be
chosen are known to do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fp8pass.errors import OptionError, choices
from fp8pass.lowerings import choose, consider, find
from fp8pass.lowerings.recipe_facts import cost_class, preferred_recipe
from fp8pass.options import Options
from fp8pass.outside import shortened
from fp8pass.problem import MRange, ScaledMMProblem
from fp8pass.problem_spec import parse_problem, parse_sizes
from fp8pass.survey import columns
from fp8pass.target import UNKNOWN, Target
from fp8pass.tuning import session

#: Recipe of :data:`fp8pass.nn.RECIPES` -> scales, as :mod:`fp8pass.problem_spec` names them.
SCALES = {"static": "static", "dynamic": "row", "dynamic_tensor": "tensor"}
#: Linears of models by name, as (N, K); q/k/v and gate/up as one, since they read one tensor.
MODELS: dict[str, tuple[tuple[int, int], ...]] = {
    "llama-3-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "llama-3-70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    "smollm2-135m": ((960, 576), (576, 576), (3072, 576), (576, 1536)),
}
#: Workloads by name.
WORKLOADS = {"decode": "32x256+512", "prefill": "4x2048+128", "mixed": "16x1024+256"}
#: Two recipes whose products take as long within this share are equal.
EQUAL = 0.02


@dataclass(frozen=True)
class Workload:
    """Sequences side by side, tokens of each prompt, tokens generated for each."""

    name: str
    batch: int
    prompt: int
    generated: int

    @property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """(rows of every linear, how often)."""
        found = ((self.batch * self.prompt, 1), (self.batch, self.generated))
        return tuple((rows, times) for rows, times in found if rows and times)

    @staticmethod
    def parse(text: str) -> Workload:
        """``decode``, ``decode:32x256+512`` or ``32x256+512``.

        Raises:
            OptionError: none of these.
        """
        name, colon, numbers = text.strip().rpartition(":")
        if not colon and numbers in WORKLOADS:
            name, numbers = numbers, WORKLOADS[numbers]
        found = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})\+([0-9]{1,9})", numbers)
        batch, prompt, generated = map(int, found.groups()) if found else (0, 0, 0)
        if not batch or not prompt + generated:
            raise OptionError(
                f"workload {shortened(text)} is not known; allowed: {choices(WORKLOADS)}, or "
                "sequences x prompt + generated, such as 'decode:32x256+512', of which the "
                "sequences and one of the others are greater than 0"
            )
        return Workload(name or "workload", batch, prompt, generated)


@dataclass(frozen=True)
class Ranked:
    """One recipe.

    Attributes:
        recipe: its name.
        milliseconds: of all products over the workload, or None where not all were measured.
        cost: worst class of its kernels over the workload (0 = scales inside the product).
        facts: for each number of rows what its products do.
    """

    recipe: str
    milliseconds: float | None
    cost: int
    facts: tuple[str, ...]


@dataclass(frozen=True)
class Advice:
    """What is advised.

    Attributes:
        recipe: the name for :func:`fp8pass.nn.quantize_`.
        why: a sentence.
        basis: ``"measured"`` or ``"stated"``; ``"unknown"`` for a target of that kind, of which
            nothing is known and for which no kernel is chosen: a recipe, but no advice.
        ranking: every recipe, the best first.
        target, workload: what it is for.
        shapes: the linears, as (N, K).
    """

    recipe: str
    why: str
    basis: str
    ranking: tuple[Ranked, ...]
    target: str
    workload: Workload
    shapes: tuple[tuple[int, int], ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    def text(self) -> str:
        """For people."""
        w = self.workload
        rows = [
            (r.recipe, "-" if r.milliseconds is None else f"{r.milliseconds:.2f}",
             "; ".join(r.facts))
            for r in self.ranking
        ]  # fmt: skip
        head = f"{w.name}: {w.batch} x {w.prompt} + {w.generated} on {self.target}"
        return (
            f"{head}\n  {self.recipe} ({self.basis}): {self.why}\n"
            + "\n".join(
                "  " + line
                for line in columns(("recipe", "ms of products", "why"), rows).split("\n")
            )
            + "\n"
        )


def shapes_of(text: str) -> tuple[tuple[int, int], ...]:
    """The linears of a model's name, or of ``N,K`` pairs with ``;`` between them.

    Raises:
        OptionError: neither.
    """
    if text.lower() in MODELS:
        return MODELS[text.lower()]
    found = []
    for pair in text.split(";"):
        sizes = parse_sizes(pair)
        if sizes is None:
            raise OptionError(
                f"model shapes {shortened(text)} are not known; allowed: {choices(MODELS)}, or "
                "pairs of numbers > 0 as 'N,K;N,K'"
            )
        found.append(sizes)
    return tuple(found)


def advise(
    target: Target,
    shapes: Sequence[tuple[int, int]],
    workload: Workload,
    options: Options | None = None,
    *,
    calibrated: bool = True,
) -> Advice:
    """The recipe that suits ``shapes`` under ``workload`` on ``target``.

    Args:
        target: the device; measurements count where it is the one that is here and ``options`` name
            no other.
        shapes: (N, K) of the linears, each as often as it stands in a layer.
        workload: the numbers of rows.
        options: which measurements and kernels count.
        calibrated: whether ``static``, which needs a calibration, may be advised.
    """
    options = Options() if options is None else options
    names = [name for name in SCALES if calibrated or name != "static"]
    ranked = [_rank(name, target, shapes, workload, options) for name in names]
    fact = preferred_recipe(target)
    # per-token scales come from the kernel that makes the row; one scale for all needs all rows
    order = ["static", "dynamic", "dynamic_tensor"]
    if fact is not None:
        order.remove(fact[0])
        order.insert(order.index("static") + 1, fact[0])
    if target.kind == UNKNOWN:
        order = ["dynamic", "static", "dynamic_tensor"]  # the one that asks for no calibration
        ranked.sort(key=lambda r: order.index(r.recipe))
        why = (
            f"nothing is known of {target.arch}: no kernel is chosen for it, and no recipe can be "
            "said to suit it; dynamic needs no calibration"
        )
        return Advice(order[0], why, UNKNOWN, tuple(ranked), target.spec, workload, tuple(shapes))
    timed = [r for r in ranked if r.milliseconds is not None and r.recipe != "dynamic_tensor"]
    if len(timed) > 1:
        ranked.sort(key=lambda r: _by_time(r, timed, order))
        best, other = ranked[0], ranked[1]
        assert best.milliseconds is not None and other.milliseconds is not None
        gain = 100 * (other.milliseconds / max(best.milliseconds, 1e-9) - 1)
        faster = f"{gain:.1f} % faster than with {other.recipe}" if gain > 100 * EQUAL else (
            f"as fast as with {other.recipe} within {100 * EQUAL:.0f} %, and its producers do less"
        )  # fmt: skip
        why = f"its products take {best.milliseconds:.2f} ms over the workload, {faster}"
        basis = "measured"
    else:
        ranked.sort(key=lambda r: (r.cost, order.index(r.recipe)))
        best = ranked[0]
        why = _stated(best, ranked, target, fact)
        basis = "stated"
    if best.recipe == "static":
        second = next((r.recipe for r in ranked if r.recipe != "static"), "")
        why += f"; it needs a calibration, without one take {second}"
    return Advice(best.recipe, why, basis, tuple(ranked), target.spec, workload, tuple(shapes))


def _rank(
    name: str,
    target: Target,
    shapes: Sequence[tuple[int, int]],
    workload: Workload,
    options: Options,
) -> Ranked:
    cost, facts, total = 0, [], 0.0
    complete = True
    for rows, times in workload.steps:
        words: dict[str, None] = {}
        for n, k in shapes:
            problem = parse_problem(f"{SCALES[name]}, m={rows}, n={n}, k={k}", target)
            kernel = choose(target, problem, options).kernel
            level, said = cost_class(None if kernel is None else kernel.name)
            cost = max(cost, level)
            words[said] = None
            us = _measured(target, problem, options)
            complete = complete and us is not None
            total += (us or 0.0) * times
        facts.append(f"{rows} rows: {', '.join(words)}")
    return Ranked(name, total / 1e3 if complete else None, cost, tuple(facts))


def _measured(target: Target, problem: ScaledMMProblem, options: Options) -> float | None:
    """Microseconds of the fastest kernel that can take it, as measured at about so many rows."""
    record = session.measured_for(target, options).record(problem)
    if record is None:
        return None
    points = [p for p in record.points if p.m.covers(problem.m) and _near(p.rows, problem.m)]
    us = [
        us for point in points[:1] for name, us in point.us.items() if _can(name, target, problem)
    ]
    return min(us, default=None)


def _near(rows: int, m: MRange) -> bool:
    """Whether a time at ``rows`` says how long ``m`` rows take: not further than four times off."""
    return m.lo <= 4 * rows and rows <= 4 * max(m.lo, 1)


def _can(name: str, target: Target, problem: ScaledMMProblem) -> bool:
    try:
        return bool(consider(find(name), target, problem))
    except OptionError:
        return False


def _by_time(r: Ranked, timed: Sequence[Ranked], order: Sequence[str]) -> tuple[float, ...]:
    """Those that were measured first; equal times by what their producers do."""
    if r not in timed or r.milliseconds is None:
        return (1, 0, order.index(r.recipe))
    fastest = min(t.milliseconds for t in timed if t.milliseconds is not None)
    equal = r.milliseconds <= fastest * (1 + EQUAL)
    return (0, 0 if equal else r.milliseconds, order.index(r.recipe))


def _stated(
    best: Ranked, ranked: Sequence[Ranked], target: Target, fact: tuple[str, str] | None
) -> str:
    if all(r.cost == 3 for r in ranked):
        why = f"no kernel multiplies fp8 on {target.spec}, so that no recipe is faster than another"
        return f"{why}; {fact[1]}" if fact is not None and best.recipe == fact[0] else why
    parts = [f"at {' and at '.join(best.facts)}"]
    worse = [r for r in ranked if r.cost > best.cost]
    if worse:
        parts.append("with " + " or ".join(r.recipe for r in worse) + " less is done in one kernel")
    if fact is not None and best.recipe == fact[0]:
        parts.append(fact[1])
    elif best.recipe == "static":
        parts.append("a scale that is known needs no pass over the values before the first code")
    elif best.recipe == "dynamic":
        parts.append(
            "a scale per token is made by the kernel that makes the row, one for the whole tensor "
            "only after all rows"
        )
    return "; ".join(parts)
