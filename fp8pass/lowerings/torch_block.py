"""Kernel ``torch_block``: ``aten._scaled_mm`` with a scale per block (1x128 beside 128x128).

Of ``a`` one scale for 128 elements of a row, stored with the rows innermost; of the weight one for
128 x 128 elements, row-major beside the row-major weight. Revisions of torch differ in how the
weight's scales are padded; with K a multiple of 512 they agree, so only that is taken. The rules
were read in pytorch's ``aten/src/ATen/native/cuda/ScaledBlas.cpp``.
"""

from __future__ import annotations

import torch
from torch import fx

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.lowerings import conditions as need
from fp8pass.lowerings.emit import aligned, call, padded_rows, rows_innermost
from fp8pass.lowerings.registry import EmitSite, Kernel, register
from fp8pass.problem import ScaledMMProblem
from fp8pass.reasons import YES, Verdict, no
from fp8pass.target import Target

NAME = "torch_block"
_BLOCKS = (("group1x128", "group128x128"),)
_E4M3 = (torch.float8_e4m3fn,)
_ROW_MULTIPLE = 4


def _requirements(target: Target) -> Verdict:
    return need.architecture(NAME, target, ("sm90",)) and need.torch_at_least(NAME, target, (2, 9))


def _takes(target: Target, problem: ScaledMMProblem) -> Verdict:
    return need.all_of(
        lambda: need.granularity(NAME, problem, _BLOCKS),
        lambda: need.plain_scales(NAME, problem),
        lambda: need.fp8_operands(NAME, problem, _E4M3, _E4M3),
        lambda: need.out_dtype(NAME, problem, (torch.bfloat16,)),
        lambda: need.bias_dtype(NAME, problem, ()),
        lambda: need.layouts(NAME, problem),
        lambda: need.multiples(NAME, problem, 128),
        lambda: _sizes(problem),
    )


def _sizes(problem: ScaledMMProblem) -> Verdict:
    assert problem.k is not None
    if problem.k % 512:
        return no("FP8-L009", kernel=NAME, what="K", wants=512, has=problem.k)
    return YES


def run_operator(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    """The product by torch: ``[M, N]`` of ``out_dtype``, for any number of rows.

    cuBLASLt has no such product for a number of rows that is no multiple of 4 (the columns of
    ``scale_a`` must start at multiples of 16 bytes): the rest is filled up here and cut off again.

    Args:
        a: ``[M, K]`` codes, row-major.
        b: ``[K, N]`` codes, the ``.t()`` view of a row-major weight.
        scale_a: float32 ``[M, K / 128]``, in any layout.
        scale_b: float32 ``[K / 128, N / 128]``, in any layout.
        bias: None.
        out_dtype: bf16.
        fast_accum: whether less than float32 may be used for the sum.
    """
    assert bias is None
    rows = a.shape[0]
    if rows == 0:
        return a.new_empty((0, b.shape[1]), dtype=out_dtype)
    weight = aligned(b.t())
    out = torch._scaled_mm(
        padded_rows(aligned(a), _ROW_MULTIPLE),
        weight.t(),
        rows_innermost(padded_rows(scale_a, _ROW_MULTIPLE)),
        rows_innermost(scale_b),
        out_dtype=out_dtype,
        use_fast_accum=fast_accum,
    )
    return out if out.shape[0] == rows else out[:rows].clone()


def _emit(graph: fx.Graph, site: EmitSite) -> fx.Node:
    args = (
        site.a, site.b, site.scale_a, site.scale_b, None, site.out_dtype, site.fast_accum,
    )  # fmt: skip
    return call(graph, torch.ops.fp8pass.torch_block_scaled_mm.default, args, val=site.val)


TORCH_BLOCK = register(
    Kernel(
        name=NAME,
        summary="torch._scaled_mm, 1x128 blocks of activations with 128x128 blocks of weights",
        kinds=frozenset({"cuda"}),
        requirements=_requirements,
        can_implement=_takes,
        priority=lambda target, problem: 40,
        emit=_emit,
        provenance="tested on sm90 with torch 2.11",
        run=run_operator,
    )
)
