"""Choosing the kernels of one scaled product, and saying why no other was chosen.

Order: forced by the user, preferred by the user, what was measured on this very device, the shipped
table of the architecture, static priority. Decode and prefill want different kernels, so the site's
range of M is cut where a kernel or a table says that something changes, each part is decided by
itself, and neighbours with one answer are joined again. A function of the target, the problem, the
options and, unless they are off or a target was named, the measurements of the device that is here:
the choice for any device can be made on any other, and equal sites share one answer from a cache,
because a model asks the same question hundreds of times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from fp8pass.errors import NoKernelError
from fp8pass.lowerings.producers import producer_kernel_names
from fp8pass.lowerings.registry import (
    WEIGHT_ONLY,
    Kernel,
    find,
    kernels,
    weight_only_names,
)
from fp8pass.lowerings.tables import Table, table_for
from fp8pass.lowerings.vllm_names import backend_kernels
from fp8pass.options import Options
from fp8pass.problem import MRange, ScaledMMProblem
from fp8pass.quant_key import dtype_name
from fp8pass.reasons import YES, Verdict, no
from fp8pass.selectors import first_at, names_at, schemes_of
from fp8pass.target import UNKNOWN, Target
from fp8pass.tuning.measured import Measured
from fp8pass.tuning.session import measured_for

FORCED = "forced"
PREFERRED = "preferred"
BACKEND = "linear_backend"
MEASURED_HERE = "measured on this device"
MEASURED = "measured table"
STATIC_PRIORITY = "static priority"
#: Which word a plan of several parts is described by: the first that holds for any of them.
_STRENGTH = (FORCED, PREFERRED, BACKEND, MEASURED_HERE, MEASURED, STATIC_PRIORITY)

#: Refusals that are advice, not inability: a user who forces the kernel by name overrules them.
_OVERRULED_BY_FORCE = frozenset({"FP8-L006", "FP8-L080"})


@dataclass(frozen=True, slots=True)
class Rejection:
    """A kernel that was not chosen, and the first condition that spoke against it."""

    kernel: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Choice:
    """The answer for one site.

    Attributes:
        plan: (range of M, kernel), together covering the problem's range; empty if no kernel takes
            the site, which then keeps the operator it came with.
        rejected: every other registered kernel with its reason, in order of registration.
        why: ``"forced"``, ``"preferred"``, ``"linear_backend"``, ``"measured on this device"``,
            ``"measured table"``, ``"static priority"``, or ``""`` without a plan.
        verdict: :data:`YES`, or FP8-L012.
        note: a preference that could not be followed, in words; else ``""``.
    """

    plan: tuple[tuple[MRange, Kernel], ...]
    rejected: tuple[Rejection, ...]
    why: str
    verdict: Verdict
    note: str = ""

    @property
    def kernel(self) -> Kernel | None:
        """The one kernel of the plan; None if there is none."""
        return self.plan[0][1] if len(self.plan) == 1 else None

    @property
    def text(self) -> str:
        """The plan as text, such as ``"2-64=triton_skinny;65-=torch_row"``."""
        return ";".join(f"{m}={kernel.name}" for m, kernel in self.plan)


def consider(kernel: Kernel, target: Target, problem: ScaledMMProblem) -> Verdict:
    """Whether ``kernel`` can take the site, or a part of its range of M; what the user asked for is
    not looked at."""
    if target.kind == UNKNOWN and UNKNOWN not in kernel.kinds:
        return no("FP8-L061", kernel=kernel.name, target=target.spec)
    if target.kind not in kernel.kinds:
        wants = "/".join(sorted(kernel.kinds))
        return no("FP8-L001", kernel=kernel.name, wants=wants, target=target.spec)
    if problem.device_type != target.device_type:
        return no("FP8-L015", kernel=kernel.name, wants=target.device_type, has=problem.device_type)
    if kernel.weight_only != problem.weight_only:
        has = dtype_name(problem.activation.dtype)
        code = "FP8-L040" if kernel.weight_only else "FP8-L041"
        return no(code, kernel=kernel.name, has=has)
    verdict = kernel.requirements(target) and kernel.can_implement(target, problem)
    if verdict and kernel.reduces(target) and not problem.use_fast_accum:
        return no("FP8-L016", kernel=kernel.name)
    if verdict and not kernel.rows.overlaps(problem.m):
        return no("FP8-L014", kernel=kernel.name, wants=kernel.rows, has=problem.m)
    return verdict


def choose(target: Target, problem: ScaledMMProblem, options: Options, path: str = "") -> Choice:
    """The kernels for one scaled product on ``target``, in the module of ``path``.

    Never raises for a site that nothing takes: that is a :class:`Choice` without a plan.

    Raises:
        NoKernelError: ``options.force`` names a kernel that cannot take the site; the message has
            its failing condition, and the kernels that could take it.
        OptionError: ``options`` names a kernel that is not registered.
    """
    options = narrowed(options, problem, path)
    prefer = _named(options.prefer, target, problem)
    disable = _named(options.disable, target, problem)
    any_weight_only = options.force == WEIGHT_ONLY and problem.weight_only
    forced = None
    if options.force is not None and not any_weight_only:
        (forced, *_) = _named((options.force,), target, problem)
        if problem.weight_only and not find(forced).weight_only:
            forced = None  # says how quantised activations are multiplied, not these
    backend = options.linear_backend
    if options.numerics == "fast" and not problem.use_fast_accum:
        problem = replace(problem, use_fast_accum=True)
    of_backend = () if backend is None else backend_kernels(backend)
    by_name = frozenset((*options.prefer, *of_backend, forced or ""))
    wanted = _Wanted(forced, prefer, disable, of_backend, backend or "", by_name)
    measured = measured_for(target, options)
    choice = _choose(target, problem, wanted, kernels(), measured, table_for(target))
    if any_weight_only:
        if not choice.plan:
            verdicts = {r.kernel: r.verdict for r in choice.rejected}
            raise NoKernelError(_cannot_force(WEIGHT_ONLY, verdicts, target))
        choice = replace(choice, why=FORCED)
    if WEIGHT_ONLY in options.prefer and not problem.weight_only and choice.why != FORCED:
        # one name, which stands for kernels that take no codes
        refused = no("FP8-L040", kernel=WEIGHT_ONLY, has=dtype_name(problem.activation.dtype))
        verdicts = {r.kernel: r.verdict for r in choice.rejected} | {WEIGHT_ONLY: refused}
        winners = tuple(kernel.name for _, kernel in choice.plan)
        wanted = replace(wanted, prefer=options.prefer)
        choice = replace(choice, note=_unmet(wanted, winners, verdicts))
    elif WEIGHT_ONLY in options.prefer and choice.note:
        # of the kernels that this name stands for, any will do
        named = tuple(name for name in options.prefer if name != WEIGHT_ONLY)
        winners = tuple(kernel.name for _, kernel in choice.plan)
        verdicts = {r.kernel: r.verdict for r in choice.rejected}
        met = choice.why == PREFERRED and not set(winners) & set(named)
        before = named[: options.prefer.index(WEIGHT_ONLY)] if met else named
        wanted = replace(wanted, prefer=before)
        choice = replace(choice, note=_unmet(wanted, winners, verdicts))
    return choice


def narrowed(options: Options, problem: ScaledMMProblem, path: str, act_key: str = "") -> Options:
    """The options as they are for one site: names without the sites that they are for.

    ``force`` and ``linear_backend`` are the first item that is about the site, ``prefer`` and
    ``disable`` all of them.

    ``act_key``: of a weight-only product that took the place of one of codes, the key of those
    codes. What names the scheme before or after is about it; a forced kernel for codes says nothing
    of how it is computed, so that of ``force`` the first weight-only kernel counts.
    """
    if not (options.force or options.prefer or options.disable or options.linear_backend):
        return options
    schemes = schemes_of(problem, act_key)
    forced = names_at(options.forced, schemes, path)
    if act_key:
        forced = tuple(filter(is_weight_only, forced)) or forced
    return replace(
        options,
        force=next(iter(forced), None),
        prefer=names_at(options.prefer, schemes, path),
        disable=names_at(options.disable, schemes, path),
        linear_backend=first_at(options.backends, schemes, path),
    )


def is_weight_only(name: str | None) -> bool:
    """Whether a name asks for a weight-only product."""
    return name == WEIGHT_ONLY or name in weight_only_names()


def _named(names: tuple[str, ...], target: Target, problem: ScaledMMProblem) -> tuple[str, ...]:
    """``names`` with each weight-only kernel, the best first, in the place of :data:`WEIGHT_ONLY`.

    Raises:
        OptionError: a name that is not registered.
    """
    found: list[str] = []
    for name in names:
        if name == WEIGHT_ONLY:
            among = [find(weight_only) for weight_only in weight_only_names()]
            if problem.weight_only:
                among.sort(key=lambda kernel: kernel.priority(target, problem))
            found += [kernel.name for kernel in among]
        else:
            if name not in producer_kernel_names():
                find(name)
            found.append(name)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the user asked for at one site, as names of kernels."""

    forced: str | None
    prefer: tuple[str, ...]
    disable: tuple[str, ...]
    backend: tuple[str, ...]
    backend_name: str
    #: Kernels by their own names, not by one that stands for several.
    named: frozenset[str] = frozenset()


@lru_cache(maxsize=4096)
def _choose(
    target: Target,
    problem: ScaledMMProblem,
    wanted: _Wanted,
    registered: tuple[Kernel, ...],
    measured: Measured,
    table: Table,
) -> Choice:
    forced = wanted.forced
    verdicts = {
        kernel.name: (
            no("FP8-L002", kernel=kernel.name)
            if kernel.name in wanted.disable
            else consider(kernel, target, problem)
        )
        for kernel in registered
    }
    for kernel in registered:
        if kernel.inexact and kernel.name not in wanted.named and verdicts[kernel.name]:
            verdicts[kernel.name] = no("FP8-L069", kernel=kernel.name, why=kernel.inexact)
    for name, why in measured.refused(problem).items():
        if verdicts.get(name):
            verdicts[name] = no("FP8-L070", kernel=name, why=why)
    if forced is not None:
        kernel = next(k for k in registered if k.name == forced)
        can = bool(verdicts[forced]) or verdicts[forced].code in _OVERRULED_BY_FORCE
        if can and not kernel.rows.covers(problem.m):
            verdicts[forced] = no("FP8-L014", kernel=forced, wants=kernel.rows, has=problem.m)
        if not verdicts[forced] and verdicts[forced].code not in _OVERRULED_BY_FORCE:
            raise NoKernelError(_cannot_force(forced, verdicts, target))
        plan: _Plan = ((problem.m, kernel, FORCED),)
    else:
        able = [kernel for kernel in registered if verdicts[kernel.name]]
        plan = _plan(able, wanted, measured, table, target, problem)
    if not plan:
        for kernel in registered:
            if verdicts[kernel.name]:  # each takes a part of the range, but not all of it
                verdicts[kernel.name] = no(
                    "FP8-L014", kernel=kernel.name, wants=kernel.rows, has=problem.m
                )
        rejected = tuple(Rejection(name, verdict) for name, verdict in verdicts.items())
        verdict = no("FP8-L012", target=target.spec)
        return Choice((), rejected, "", verdict, _unmet(wanted, (), verdicts))
    winners = tuple(dict.fromkeys(kernel.name for _, kernel, _ in plan))
    why = min((why for *_, why in plan), key=_STRENGTH.index)
    for kernel in registered:
        if kernel.name not in winners and verdicts[kernel.name]:
            verdicts[kernel.name] = no(
                "FP8-L013", kernel=kernel.name, chosen=" and ".join(winners), why=why
            )
    rejected = tuple(
        Rejection(name, verdict) for name, verdict in verdicts.items() if name not in winners
    )
    note = "" if why == FORCED else _unmet(wanted, winners, verdicts)
    return Choice(tuple((m, kernel) for m, kernel, _ in plan), rejected, why, YES, note)


#: (range of M, kernel, why it)
_Plan = tuple[tuple[MRange, Kernel, str], ...]


def _plan(
    able: Sequence[Kernel],
    wanted: _Wanted,
    measured: Measured,
    table: Table,
    target: Target,
    problem: ScaledMMProblem,
) -> _Plan:
    """The best kernel for each part of the range of M; empty if a part has none."""
    prefer, backend = wanted.prefer, wanted.backend
    starts = {*table.starts(problem), *measured.starts(problem)}
    for kernel in able:
        starts.add(kernel.rows.lo)
        if kernel.rows.hi is not None:
            starts.add(kernel.rows.hi + 1)
    parts = problem.m.split(starts)

    def best(part: MRange, among: Callable[[Kernel], bool]) -> tuple[MRange, Kernel, str] | None:
        candidates = [k for k in able if k.rows.covers(part) and among(k)]
        if not candidates:
            return None
        # each says which of the names that it holds comes first; the words are reasons
        orders = (
            (PREFERRED, prefer),
            (BACKEND, backend),
            (MEASURED_HERE, measured.order(replace(problem, m=part))),
            (MEASURED, table.order(replace(problem, m=part))),
        )

        def rank(kernel: Kernel) -> tuple[int, ...]:
            name = kernel.name
            # a backend is a set of kernels: which of them is for what comes after it to say
            places = [
                int(name not in order)
                if why == BACKEND
                else order.index(name)
                if name in order
                else len(order)
                for why, order in orders
            ]
            return (*places, kernel.priority(target, problem))

        winner = min(candidates, key=rank)
        why = next((why for why, order in orders if winner.name in order), STATIC_PRIORITY)
        return part, winner, why

    plan = _joined([best(part, lambda kernel: True) for part in parts])
    if len(plan) > 1 and problem.zero != "none":
        plan = ()  # a plan has no operand for it
    if len(plan) > 1 and any(kernel.run is None for _, kernel, _ in plan):
        plan = _joined([best(part, lambda kernel: kernel.run is not None) for part in parts])
    if not plan:  # no kernel for some part by itself: one that takes them all
        whole = best(problem.m, lambda kernel: True)
        plan = () if whole is None else (whole,)
    return plan


def _joined(parts: Sequence[tuple[MRange, Kernel, str] | None]) -> _Plan:
    """Neighbours with the same kernel made one; nothing if a part has none."""
    plan: list[tuple[MRange, Kernel, str]] = []
    for part in parts:
        if part is None:
            return ()
        m, kernel, why = part
        if plan and plan[-1][1] is kernel:
            before, _, earlier = plan.pop()
            m, why = MRange(before.lo, m.hi), min(earlier, why, key=_STRENGTH.index)
        plan.append((m, kernel, why))
    return tuple(plan)


def _cannot_force(forced: str, verdicts: dict[str, Verdict], target: Target) -> str:
    verdict = verdicts[forced] if forced in verdicts else no("FP8-L012", target=target.spec)
    could = [name for name, other in verdicts.items() if other]
    others = [
        f"  {name}: {other.code}: {other.message}"
        for name, other in verdicts.items()
        if not other and name != forced
    ]
    lines = [
        f"kernel {forced!r} is forced but cannot take this site on {target.spec}: "
        f"{verdict.code}: {verdict.message}",
        f"kernels that could take it: {', '.join(could) or 'none'}",
    ]
    if others:
        lines += ["those that could not:", *others]
    return "\n".join(lines)


def _unmet(wanted: _Wanted, winners: tuple[str, ...], verdicts: dict[str, Verdict]) -> str:
    """The preferences that come before the winner and could not be followed."""
    parts: list[str] = []
    for name in wanted.prefer:
        if name in winners:
            return "; ".join(parts)
        if name in verdicts:  # not a kernel for producers
            parts.append(f"preferred {name} was not used ({verdicts[name].code})")
    if wanted.backend and not set(winners) & set(wanted.backend):
        told = ", ".join(f"{name} {verdicts[name].code}" for name in wanted.backend)
        parts.append(f"linear_backend {wanted.backend_name} has no kernel for this site ({told})")
    return "; ".join(parts)
