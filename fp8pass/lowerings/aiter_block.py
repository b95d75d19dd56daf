"""Kernel ``aiter_block``: AITER's ``gemm_a8w8_blockscale``, 1x128 groups with 128x128 blocks.

Rules read in AITER's ``aiter/ops/gemm_op_a8w8.py`` and ``csrc/ck_gemm_a8w8_blockscale``: packed
matrices ``[M, K]`` and ``[N, K]`` in the device's own e4m3, float32 scales ``[M, K / 128]`` and
``[N / 128, K / 128]``, both row-major; bf16 or fp16 results, no bias, K a multiple of 256. Each
block's sum is scaled in float32 and there is one rounding, as long as K is not split (see
:mod:`aiter_row`): so the compiled kernel itself is called, and AITER's choice of one only under
``numerics="fast"``.
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
from fp8pass.reasons import YES, Verdict, no
from fp8pass.target import Target

NAME = "aiter_block"
_MODULES = ("aiter.ops.gemm_op_a8w8", "aiter")
_BLOCKS = (("group1x128", "group128x128"),)
#: K of a tile of the kernel that is called where none was tuned; it may not be cut short.
_DEPTH = 256


def _takes(target: Target, problem: ScaledMMProblem) -> Verdict:
    native = aiter.native(target)
    return need.all_of(
        lambda: need.granularity(NAME, problem, _BLOCKS),
        lambda: need.plain_scales(NAME, problem),
        lambda: need.native_fp8(NAME, target, problem),
        lambda: need.fp8_operands(NAME, problem, native, native),
        lambda: need.out_dtype(NAME, problem, aiter.RESULTS),
        lambda: need.bias_dtype(NAME, problem, ()),
        lambda: need.layouts(NAME, problem),
        lambda: need.multiples(NAME, problem, 128),
        lambda: _depth(problem),
    )


def _depth(problem: ScaledMMProblem) -> Verdict:
    assert problem.k is not None
    if problem.k % _DEPTH:
        return no("FP8-L009", kernel=NAME, what="K", wants=_DEPTH, has=problem.k)
    return YES


def _emit(graph: fx.Graph, site: EmitSite) -> fx.Node:
    args = (site.a, site.b, site.scale_a, site.scale_b, site.out_dtype, site.fast_accum)
    return call(graph, torch.ops.fp8pass.aiter_block_scaled_mm.default, args, val=site.val)


def run_operator(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    split_k: bool,
) -> torch.Tensor:
    """The product by AITER: ``[M, N]`` of ``out_dtype``; ``scale_b`` is oriented as ``b`` is.

    Raises:
        UnsupportedError: AITER is not installed.
    """
    m, n = a.shape[0], b.shape[1]
    out = a.new_empty((m, n), dtype=out_dtype)
    if not out.numel():
        return out
    operands = (
        a.contiguous(), b.t().contiguous(), scale_a.contiguous(), scale_b.t().contiguous()
    )  # fmt: skip
    if split_k:
        chosen: torch.Tensor = aiter.find("gemm_a8w8_blockscale", *_MODULES)(*operands, out_dtype)
        return chosen
    aiter.find("gemm_a8w8_blockscale_ck", *_MODULES)(*operands, out)
    return out


AITER_BLOCK = register(
    Kernel(
        name=NAME,
        summary="AITER's gemm_a8w8_blockscale, 1x128 groups with 128x128 blocks",
        kinds=frozenset({"rocm"}),
        requirements=partial(aiter.requirements, NAME),
        can_implement=_takes,
        priority=lambda target, problem: 40,
        emit=_emit,
        provenance=aiter.PROVENANCE,
    )
)
