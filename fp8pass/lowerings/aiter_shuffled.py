"""Kernel ``aiter_shuffled``: AITER's ``gemm_a8w8_bpreshuffle``, on a weight laid out in tiles.

The copy of the weight is made by ``fp8pass.prepare(model, target, shuffle=True)``. Rules read in
AITER's ``aiter/ops/gemm_op_a8w8.py`` and ``aiter/ops/shuffle.py``: fp8 codes of the device's own
dtype, per-token x per-channel scales, bf16 or fp16 results, no bias, N a multiple of 16 and K of
32. How K is split is up to AITER's tables, and parts are summed in the result's dtype: taken only
where the source, or ``numerics="fast"``, allows that.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import fx

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.errors import PassError
from fp8pass.lowerings import aiter
from fp8pass.lowerings import conditions as need
from fp8pass.lowerings.emit import call, value
from fp8pass.lowerings.registry import EmitSite, Kernel, register
from fp8pass.problem import ScaledMMProblem
from fp8pass.reasons import YES, Verdict, no
from fp8pass.target import Target

NAME = "aiter_shuffled"


def _takes(target: Target, problem: ScaledMMProblem) -> Verdict:
    native = aiter.native(target)
    return need.all_of(
        lambda: need.granularity(NAME, problem, (need.TOKEN_CHANNEL,)),
        lambda: need.plain_scales(NAME, problem),
        lambda: need.native_fp8(NAME, target, problem),
        lambda: need.fp8_operands(NAME, problem, native, native),
        lambda: need.out_dtype(NAME, problem, aiter.RESULTS),
        lambda: need.bias_dtype(NAME, problem, ()),
        lambda: need.layouts(NAME, problem),
        lambda: need.multiples(NAME, problem, 16),
        lambda: _tiles(target, problem),
    )


def _tiles(target: Target, problem: ScaledMMProblem) -> Verdict:
    assert problem.k is not None
    if problem.k % 32:
        return no("FP8-L009", kernel=NAME, what="K", wants=32, has=problem.k)
    if not problem.prepared or problem.prepared_dtype not in aiter.native(target):
        return no("FP8-L064", kernel=NAME, target=target.spec)
    return YES


def _emit(graph: fx.Graph, site: EmitSite) -> fx.Node:
    if site.prepared is None or value(site.prepared).shape != value(site.b).t().shape:
        raise PassError(f"kernel {NAME} was chosen for a site without a weight in tiles")
    args = (site.a, site.prepared, site.scale_a, site.scale_b, site.out_dtype)
    return call(graph, torch.ops.fp8pass.aiter_shuffled_scaled_mm.default, args, val=site.val)


def run_operator(
    a: torch.Tensor,
    tiles: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The product by AITER: ``[M, N]`` of ``out_dtype``.

    Raises:
        UnsupportedError: AITER is not installed.
    """
    m, n = a.shape[0], tiles.shape[0]
    if not m * n:
        return a.new_empty((m, n), dtype=out_dtype)
    gemm = aiter.find("gemm_a8w8_bpreshuffle", "aiter.ops.gemm_op_a8w8", "aiter")
    scales = aiter.full_scale(scale_a, (m, 1)), aiter.full_scale(scale_b, (1, n))
    out: torch.Tensor = gemm(a.contiguous(), tiles, *scales, None, out_dtype)
    return out


AITER_SHUFFLED = register(
    Kernel(
        name=NAME,
        summary="AITER's gemm_a8w8_bpreshuffle on a weight prepared in tiles",
        kinds=frozenset({"rocm"}),
        requirements=partial(aiter.requirements, NAME),
        can_implement=_takes,
        priority=lambda target, problem: 38,
        emit=_emit,
        provenance=aiter.PROVENANCE,
        reduced_accumulation=True,
    )
)
