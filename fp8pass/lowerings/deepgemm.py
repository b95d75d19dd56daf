"""Kernel ``deepgemm_block``: DeepGEMM's ``fp8_gemm_nt`` with scales per 1x128 and 128x128.

A library of Hopper and Blackwell kernels that are compiled when first run (``deep_gemm``, or the
copy in vLLM's wheel). On sm90 its scales are float32, which it lays out itself as its TMA loads
want them. On sm100 it reads UE8M0 scales only and would round float32 ones to powers of two behind
the codes: not taken. Rules: e4m3fn codes with K innermost, bf16 results, no bias, K a multiple of
128, N of 64 (as vLLM 0.21 asks for it); ``fp8_gemm_nt`` exists from version 2 on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.errors import UnsupportedError
from fp8pass.lowerings import conditions as need
from fp8pass.lowerings.emit import aligned, call, matrices
from fp8pass.lowerings.external import function, not_older, requirements
from fp8pass.lowerings.registry import EmitSite, Kernel, register
from fp8pass.problem import ScaledMMProblem
from fp8pass.reasons import YES, Verdict, no
from fp8pass.target import Target

NAME = "deepgemm_block"
_E4M3 = (torch.float8_e4m3fn,)
_BLOCKS = (("group1x128", "group128x128"),)
_MODULES = ("deep_gemm", "vllm.third_party.deep_gemm")


def _requirements(target: Target) -> Verdict:
    found = requirements(NAME, target, ("sm90",), "deepgemm", "the library deepgemm")
    return found and not_older(NAME, target, "deepgemm", 2)


def _takes(target: Target, problem: ScaledMMProblem) -> Verdict:
    return need.all_of(
        lambda: need.granularity(NAME, problem, _BLOCKS),
        lambda: need.plain_scales(NAME, problem),
        lambda: need.fp8_operands(NAME, problem, _E4M3, _E4M3),
        lambda: need.out_dtype(NAME, problem, (torch.bfloat16,)),
        lambda: need.bias_dtype(NAME, problem, ()),
        lambda: need.layouts(NAME, problem),
        lambda: need.multiples(NAME, problem, 64),
        lambda: _depth(problem),
    )


def _depth(problem: ScaledMMProblem) -> Verdict:
    assert problem.k is not None
    if problem.k % 128:
        return no("FP8-L009", kernel=NAME, what="K", wants=128, has=problem.k)
    return YES


def _emit(graph: fx.Graph, site: EmitSite) -> fx.Node:
    a, b = matrices(graph, site)
    args = (a, b, site.scale_a, site.scale_b, site.bias, site.out_dtype)
    return call(graph, torch.ops.fp8pass.deepgemm_block_mm.default, args, val=site.val)


def run_library(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The product by DeepGEMM: ``[M, N]`` of ``out_dtype``.

    Raises:
        UnsupportedError: the library is absent, broken or too old, or a bias is given.
    """
    if bias is not None:
        raise UnsupportedError("DeepGEMM's product takes no bias")
    out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
    if out.numel():
        weight = b.t(), scale_b.t().contiguous()
        _gemm()((a, scale_a), weight, out, disable_ue8m0_cast=True)
    return out


def _gemm() -> Any:
    """``fp8_gemm_nt`` of the library by itself, else of the copy in vLLM's wheel."""
    own, copied = _MODULES
    try:
        return function(own, "fp8_gemm_nt")
    except UnsupportedError:
        try:
            return function(copied, "fp8_gemm_nt")
        except UnsupportedError:
            pass
        raise


def _run(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    return run_library(aligned(a), aligned(b.t()).t(), scale_a, scale_b, bias, out_dtype)


DEEPGEMM_BLOCK = register(
    Kernel(
        name=NAME,
        summary="DeepGEMM's product with scales per 1x128 and 128x128",
        kinds=frozenset({"cuda"}),
        requirements=_requirements,
        can_implement=_takes,
        priority=lambda target, problem: 61,
        emit=_emit,
        provenance="not run on hardware (rules read in DeepGEMM's and vLLM 0.21's source)",
        run=_run,
        library="deepgemm",
    )
)
