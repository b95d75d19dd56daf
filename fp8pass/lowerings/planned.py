"""A plan over several ranges of M: one operator that branches on the number of rows.

``fp8pass::scaled_mm_planned(…, "0-64=triton_skinny;65-=torch_row")``. The plan is an argument in
the graph, so it survives a hit in Inductor's cache; it is parsed once per process, and the branch
is taken on the host by ``a.shape[0]``: no guard, no graph break, and under CUDA graphs each
captured size freezes its branch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import fx

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.errors import OptionError
from fp8pass.lowerings.choice import Choice
from fp8pass.lowerings.emit import call
from fp8pass.lowerings.registry import EmitSite, Run, find
from fp8pass.lowerings.self_check import OR, REFERENCE, Checked
from fp8pass.problem import MRange


def emit_planned(graph: fx.Graph, site: EmitSite, choice: Choice, checked: str = "") -> fx.Node:
    """Insert the operator for a choice with more than one range.

    ``checked`` is its plan with alternatives, of :func:`fp8pass.lowerings.self_check.checked_plan`.
    """
    args: tuple[Any, ...] = (
        site.a, site.b, site.scale_a, site.scale_b, site.bias, site.out_dtype, site.fast_accum,
        checked or choice.text,
    )  # fmt: skip
    keys = site.problem.activation, site.problem.weight
    if checked or any(key.granularity.startswith("group") for key in keys):
        args = (*args, ";".join(map(str, keys)))  # the shapes of the scales do not say it
    return call(graph, torch.ops.fp8pass.scaled_mm_planned.default, args, val=site.val)


@lru_cache(maxsize=1024)
def parse_plan(plan: str, keys: str = "") -> tuple[tuple[MRange, str, Run], ...]:
    """The parts of a plan with the kernels as callables; ``keys`` as in the operator.

    Raises:
        OptionError: a part that is not ``range=kernel``, an unknown kernel, one that cannot be part
            of a plan, or ranges that leave a gap.
    """
    parts: list[tuple[MRange, str, Run]] = []
    for text in plan.split(";"):
        span, equals, name = text.partition("=")
        try:
            m = MRange.parse(span)
        except ValueError:
            m = None
        if m is None or not equals:
            raise OptionError(f"plan {plan!r} has a part {text!r} that is not range=kernel")
        names = name.split(OR)
        for each in names[: -1 if names[-1] == REFERENCE else None]:
            if find(each).run is None:
                raise OptionError(f"kernel {each!r} of plan {plan!r} is not one call")
        run: Run | None = Checked(tuple(names), keys) if names[1:] else find(name).run
        assert run is not None
        if parts and parts[-1][0].hi != m.lo - 1:
            raise OptionError(f"plan {plan!r} leaves a gap before {m}")
        parts.append((m, name, run))
    return tuple(parts)


@lru_cache(maxsize=1024)
def plan_is_for(plan: str, kind: str) -> bool:
    """Whether every kernel of a plan runs on devices of ``kind``."""
    names = [name for _, text, _ in parse_plan(plan) for name in text.split(OR)]
    return all(name == REFERENCE or kind in find(name).kinds for name in names)


def run_planned(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    plan: str,
    keys: str = "",
) -> torch.Tensor:
    """Run the part of ``plan`` that ``a`` has rows for; the last part for more rows than planned,
    the first for fewer (0 and 1, which a symbolic size excludes, may still come)."""
    rows = a.shape[0]
    parts = parse_plan(plan, keys)
    run = parts[-1][2]
    for m, _, candidate in parts:
        if m.hi is not None and rows <= m.hi:
            run = candidate
            break
    return run(a, b, scale_a, scale_b, bias, out_dtype, fast_accum)
