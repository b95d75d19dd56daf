"""Kernels ``cpu`` and ``cpu_prepared``: fp8pass's own product for CPUs.

Both emit ``fp8pass::cpu_scaled_mm``. Stock per-tensor ``_scaled_mm`` on a CPU is slow, down to
0.02 GMAC/s, and the row-wise one does not exist before torch 2.12. Weights stay fp8 and are
converted inside the operator, or (prepared) come with a packed bf16 copy that the user asked for.
The operator falls back to vectorised torch without a C++ compiler, so nothing is required.
"""

from __future__ import annotations

import torch
from torch import fx

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.errors import PassError
from fp8pass.lowerings import conditions as need
from fp8pass.lowerings.emit import call
from fp8pass.lowerings.registry import EmitSite, Kernel, register
from fp8pass.problem import ScaledMMProblem
from fp8pass.reasons import YES, Verdict, no
from fp8pass.target import Target

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _takes(kernel: str, problem: ScaledMMProblem) -> Verdict:
    return need.all_of(
        lambda: need.granularity(kernel, problem, need.OUTER_PRODUCTS),
        lambda: need.plain_scales(kernel, problem),
        lambda: need.fp8_operands(kernel, problem, _FP8, _FP8, both_e5m2=True),
        lambda: need.out_dtype(kernel, problem, need.MODEL_DTYPES),
        lambda: need.bias_dtype(kernel, problem, need.MODEL_DTYPES),
    )


def _takes_prepared(target: Target, problem: ScaledMMProblem) -> Verdict:
    packed = problem.prepared and problem.prepared_dtype in (None, torch.bfloat16)
    prepared = YES if packed else no("FP8-L004", kernel="cpu_prepared")
    return _takes("cpu_prepared", problem) and prepared


def _takes_plain(target: Target, problem: ScaledMMProblem) -> Verdict:
    return _takes("cpu", problem)


def _emit(graph: fx.Graph, site: EmitSite, prepared: fx.Node | None) -> fx.Node:
    args = (site.a, site.b, site.scale_a, site.scale_b, site.bias, site.out_dtype, prepared)
    return call(graph, torch.ops.fp8pass.cpu_scaled_mm.default, args, val=site.val)


def _emit_prepared(graph: fx.Graph, site: EmitSite) -> fx.Node:
    if site.prepared is None:
        raise PassError("kernel cpu_prepared was chosen for a site without a prepared weight")
    return _emit(graph, site, site.prepared)


def _emit_plain(graph: fx.Graph, site: EmitSite) -> fx.Node:
    return _emit(graph, site, None)


CPU_PREPARED = register(
    Kernel(
        name="cpu_prepared",
        summary="own CPU product on a packed bf16 copy of the weight (2 more bytes per weight)",
        kinds=frozenset({"cpu"}),
        requirements=need.always,
        can_implement=_takes_prepared,
        priority=lambda target, problem: 10,
        emit=_emit_prepared,
        provenance="tested on x86-avx2",
    )
)

CPU = register(
    Kernel(
        name="cpu",
        summary="own CPU product, weights stay fp8 and are converted inside the operator",
        kinds=frozenset({"cpu"}),
        requirements=need.always,
        can_implement=_takes_plain,
        priority=lambda target, problem: 20,
        emit=_emit_plain,
        provenance="tested on x86-avx2",
    )
)
