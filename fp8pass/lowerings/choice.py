"""Choosing the kernel of one scaled product, and saying why no other was chosen.

Order: forced by the user, preferred by the user, static priority. (Measured choices come between
the last two once there is something to measure with.) A pure function of the target, the problem
and the options: the choice for any device can be made on any other, and equal sites share one
answer from a cache, because a model asks the same question hundreds of times.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fp8pass.errors import NoKernelError
from fp8pass.lowerings.registry import Kernel, find, kernels
from fp8pass.options import Options
from fp8pass.problem import MRange, ScaledMMProblem
from fp8pass.reasons import YES, Verdict, no
from fp8pass.target import Target

FORCED = "forced"
PREFERRED = "preferred"
STATIC_PRIORITY = "static priority"

#: Refusals that are advice, not inability: a user who forces the kernel by name overrules them.
_OVERRULED_BY_FORCE = frozenset({"FP8-L006"})


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
        why: ``"forced"``, ``"preferred"``, ``"static priority"``, or ``""`` without a plan.
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


def consider(kernel: Kernel, target: Target, problem: ScaledMMProblem) -> Verdict:
    """Whether ``kernel`` can take the site, apart from what the user asked for."""
    if target.kind not in kernel.kinds:
        wants = "/".join(sorted(kernel.kinds))
        return no("FP8-L001", kernel=kernel.name, wants=wants, target=target.spec)
    if problem.device_type != target.device_type:
        return no("FP8-L015", kernel=kernel.name, wants=target.device_type, has=problem.device_type)
    return kernel.requirements(target) and kernel.can_implement(target, problem)


def choose(target: Target, problem: ScaledMMProblem, options: Options) -> Choice:
    """The kernel for one scaled product on ``target``.

    Never raises for a site that nothing takes: that is a :class:`Choice` without a plan.

    Raises:
        NoKernelError: ``options.force`` names a kernel that cannot take the site; the message has
            its failing condition, and the kernels that could take it.
        OptionError: ``options`` names a kernel that is not registered.
    """
    for name in (*options.prefer, *options.disable):
        find(name)
    forced = None if options.force is None else find(options.force).name
    return _choose(target, problem, forced, options.prefer, options.disable, kernels())


@lru_cache(maxsize=4096)
def _choose(
    target: Target,
    problem: ScaledMMProblem,
    forced: str | None,
    prefer: tuple[str, ...],
    disable: tuple[str, ...],
    registered: tuple[Kernel, ...],
) -> Choice:
    verdicts = {
        kernel.name: (
            no("FP8-L002", kernel=kernel.name)
            if kernel.name in disable
            else consider(kernel, target, problem)
        )
        for kernel in registered
    }
    able = [kernel for kernel in registered if verdicts[kernel.name]]
    if forced is not None:
        if not verdicts[forced] and verdicts[forced].code not in _OVERRULED_BY_FORCE:
            raise NoKernelError(_cannot_force(forced, verdicts, target))
        winner, why = next(k for k in registered if k.name == forced), FORCED
    elif able:
        preferred = [kernel for name in prefer for kernel in able if kernel.name == name]
        ranked = sorted(able, key=lambda kernel: kernel.priority(target, problem))
        winner, why = (preferred or ranked)[0], PREFERRED if preferred else STATIC_PRIORITY
    else:
        rejected = tuple(Rejection(name, verdict) for name, verdict in verdicts.items())
        verdict = no("FP8-L012", target=target.spec)
        return Choice((), rejected, "", verdict, _unmet(prefer, None, verdicts))
    for kernel in able:
        if kernel is not winner:
            verdicts[kernel.name] = no("FP8-L013", kernel=kernel.name, chosen=winner.name, why=why)
    rejected = tuple(
        Rejection(name, verdict) for name, verdict in verdicts.items() if name != winner.name
    )
    note = "" if why == FORCED else _unmet(prefer, winner.name, verdicts)
    return Choice(((problem.m, winner),), rejected, why, YES, note)


def _cannot_force(forced: str, verdicts: dict[str, Verdict], target: Target) -> str:
    verdict = verdicts[forced]
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


def _unmet(prefer: tuple[str, ...], winner: str | None, verdicts: dict[str, Verdict]) -> str:
    """The preferences that come before the winner and could not be followed."""
    parts = []
    for name in prefer:
        if name == winner:
            break
        parts.append(f"preferred {name} was not used ({verdicts[name].code})")
    return "; ".join(parts)
