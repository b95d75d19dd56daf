"""Kernel ``vllm_cutlass_block``: vLLM's ``cutlass_scaled_mm`` with scales per 1x128 and 128x128.

Where vLLM's compiled library is loaded, as for ``vllm_cutlass``. The operator tells blocks from
other scales by counting them, which is only sure with a K of more than one block. Rules as in vLLM
0.21 (``csrc/.../w8a8/cutlass/c3x``): e4m3fn codes, bf16 or fp16 results, no bias, N and K multiples
of 128, scales of ``a`` with the rows innermost, of ``b`` with K innermost; on Hopper the number of
rows is a multiple of 4, which is padded for inside. Each block's sum is added up in float32.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import fx

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.lowerings import conditions as need
from fp8pass.lowerings.emit import aligned, call, matrices, padded_rows, rows_innermost
from fp8pass.lowerings.external import requirements, vllm_operator
from fp8pass.lowerings.registry import EmitSite, Kernel, register
from fp8pass.problem import ScaledMMProblem
from fp8pass.reasons import YES, Verdict, no
from fp8pass.target import Target

NAME = "vllm_cutlass_block"
_ARCHITECTURES = ("sm90", "sm100", "sm120")
_E4M3 = (torch.float8_e4m3fn,)
_RESULTS = (torch.bfloat16, torch.float16)
_BLOCKS = (("group1x128", "group128x128"),)


def _requirements(target: Target) -> Verdict:
    return requirements(NAME, target, _ARCHITECTURES, "vllm", "vLLM's compiled library")


def _takes(target: Target, problem: ScaledMMProblem) -> Verdict:
    return need.all_of(
        lambda: need.granularity(NAME, problem, _BLOCKS),
        lambda: need.plain_scales(NAME, problem),
        lambda: need.fp8_operands(NAME, problem, _E4M3, _E4M3),
        lambda: need.out_dtype(NAME, problem, _RESULTS),
        lambda: need.bias_dtype(NAME, problem, ()),
        lambda: need.layouts(NAME, problem),
        lambda: need.multiples(NAME, problem, 128),
        lambda: _more_than_one_block(problem),
    )


def _more_than_one_block(problem: ScaledMMProblem) -> Verdict:
    if problem.k == 128:
        return no("FP8-L017", kernel=NAME, what="K = 128: one scale per row reads as per-token")
    return YES


def _emit(graph: fx.Graph, site: EmitSite) -> fx.Node:
    a, b = matrices(graph, site)
    args = (a, b, site.scale_a, site.scale_b, site.bias, site.out_dtype)
    return call(graph, torch.ops.fp8pass.vllm_cutlass_block_mm.default, args, val=site.val)


@cache
def on_hopper(device: torch.device) -> bool:
    """Whether the kernels for Hopper will run, which ask for a multiple of 4 rows."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def run_operator(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The product by vLLM's operator: ``[M, N]`` of ``out_dtype``.

    Raises:
        UnsupportedError: its library is not loaded in this process.
    """
    op = vllm_operator("cutlass_scaled_mm")
    rows = a.shape[0]
    if rows and on_hopper(a.device):
        a, scale_a = padded_rows(a, 4), padded_rows(scale_a, 4, 1.0)
    out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
    if out.numel():
        op(out, a, b, rows_innermost(scale_a), rows_innermost(scale_b), bias)
    # a view of a larger result is no contiguous tensor of its own
    return out if rows == out.shape[0] else out[:rows].clone()


def _run(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    return run_operator(aligned(a), aligned(b.t()).t(), scale_a, scale_b, bias, out_dtype)


VLLM_CUTLASS_BLOCK = register(
    Kernel(
        name=NAME,
        summary="vLLM's CUTLASS product with scales per 1x128 and 128x128",
        kinds=frozenset({"cuda"}),
        requirements=_requirements,
        can_implement=_takes,
        priority=lambda target, problem: 60,
        emit=_emit,
        provenance="not run on hardware (rules of vLLM 0.21)",
        run=_run,
        library="vllm",
    )
)
