"""Kernels ``aiter_row`` and ``aiter_int8``: AITER's ``gemm_a8w8``, fp8 or int8 codes.

Rules read in AITER's ``aiter/ops/gemm_op_a8w8.py`` and ``csrc/ck_gemm_a8w8`` (revisions of 2025 and
2026): both matrices packed, ``[M, K]`` and ``[N, K]``; float32 scales, one for each row and each
column, of which the kernel always reads M and N; a bias of the result's dtype; bf16 or fp16
results. Scales and bias are applied to the float32 (int8: int32) sum, and there is one rounding, as
long as K is not split: parts are summed in the result's dtype. So K is split only under
``numerics="fast"``, where AITER takes what its own tables say.

It is faster than torch's row-wise product where AITER was tuned for the size, which is not known
here, so ``aiter_row`` comes behind that one.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import fx

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.lowerings import aiter
from fp8pass.lowerings import conditions as need
from fp8pass.lowerings.emit import call
from fp8pass.lowerings.registry import EmitSite, Kernel, register
from fp8pass.problem import ScaledMMProblem
from fp8pass.reasons import YES, Verdict
from fp8pass.target import Target

_MODULE = "aiter.ops.gemm_op_a8w8"


def _takes(
    name: str, target: Target, problem: ScaledMMProblem, dtypes: tuple[torch.dtype, ...]
) -> Verdict:
    same_as_result = tuple(d for d in aiter.RESULTS if d == problem.out_dtype)
    return need.all_of(
        lambda: need.granularity(name, problem, need.OUTER_PRODUCTS),
        lambda: need.plain_scales(name, problem),
        lambda: need.native_fp8(name, target, problem) if name == "aiter_row" else YES,
        lambda: need.fp8_operands(name, problem, dtypes, dtypes),
        lambda: need.int32_sum(name, problem) if name == "aiter_int8" else YES,
        lambda: need.out_dtype(name, problem, aiter.RESULTS),
        lambda: need.bias_dtype(name, problem, same_as_result),
        lambda: need.layouts(name, problem),
        lambda: need.multiples(name, problem, 16),
    )


def _takes_fp8(target: Target, problem: ScaledMMProblem) -> Verdict:
    return _takes("aiter_row", target, problem, aiter.native(target))


def _takes_int8(target: Target, problem: ScaledMMProblem) -> Verdict:
    return _takes("aiter_int8", target, problem, (torch.int8,))


def _emit(graph: fx.Graph, site: EmitSite) -> fx.Node:
    args = (
        site.a, site.b, site.scale_a, site.scale_b, site.bias, site.out_dtype, site.fast_accum,
    )  # fmt: skip
    return call(graph, torch.ops.fp8pass.aiter_scaled_mm.default, args, val=site.val)


def run_operator(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    split_k: bool,
) -> torch.Tensor:
    """The product by AITER: ``[M, N]`` of ``out_dtype``; a per-tensor scale is spread.

    Raises:
        UnsupportedError: AITER is not installed.
    """
    m, n = a.shape[0], b.shape[1]
    if not m * n:
        return a.new_empty((m, n), dtype=out_dtype)
    gemm = aiter.find("gemm_a8w8_CK", _MODULE, "aiter")
    scales = aiter.full_scale(scale_a, (m, 1)), aiter.full_scale(scale_b, (1, n))
    out: torch.Tensor = gemm(
        a.contiguous(), b.t().contiguous(), *scales, bias, out_dtype, None if split_k else 0
    )
    return out


AITER_ROW = register(
    Kernel(
        name="aiter_row",
        summary="AITER's gemm_a8w8 of fp8 codes, a scale per row and column",
        kinds=frozenset({"rocm"}),
        requirements=partial(aiter.requirements, "aiter_row"),
        can_implement=_takes_fp8,
        priority=lambda target, problem: 45,
        emit=_emit,
        provenance=aiter.PROVENANCE,
        run=run_operator,
    )
)

AITER_INT8 = register(
    Kernel(
        name="aiter_int8",
        summary="AITER's gemm_a8w8 of int8 codes, a scale per row and column",
        kinds=frozenset({"rocm"}),
        requirements=partial(aiter.requirements, "aiter_int8"),
        can_implement=_takes_int8,
        priority=lambda target, problem: 40,
        emit=_emit,
        provenance=aiter.PROVENANCE,
        run=run_operator,
    )
)
