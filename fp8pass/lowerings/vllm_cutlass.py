"""Kernel ``vllm_cutlass``: vLLM's ``cutlass_scaled_mm``, where its compiled library is loaded.

The library is a backend for those who have vLLM, never a dependency: importing vLLM (or
``torch.ops.load_library`` of its ``_C`` libraries) before compiling makes it available, and
``Target.parse("sm90+vllm")`` names it without having it. Its operator writes into an output that
the caller allocates; that happens inside ours, which is functional. Rules as in vLLM 0.21
(``csrc/quantization/w8a8/cutlass``): N and K multiples of 16, bf16 or fp16 results, a bias of the
result's dtype, scales float32 with one element or ``[M, 1]`` and ``[1, N]``. On Hopper it always
accumulates in the tensor core's reduced precision; of Ada and of consumer Blackwell nothing else is
known, so that the same is assumed there.
"""

from __future__ import annotations

import torch
from torch import fx

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.lowerings import conditions as need
from fp8pass.lowerings.emit import aligned, call, matrices
from fp8pass.lowerings.external import requirements, vllm_operator
from fp8pass.lowerings.registry import EmitSite, Kernel, register
from fp8pass.problem import ScaledMMProblem
from fp8pass.reasons import Verdict
from fp8pass.target import Target

NAME = "vllm_cutlass"
_ARCHITECTURES = ("sm89", "sm90", "sm100", "sm120")
_REDUCED = frozenset({"sm89", "sm90", "sm120"})
_RESULTS = (torch.bfloat16, torch.float16)
_E4M3 = (torch.float8_e4m3fn,)


def _requirements(target: Target) -> Verdict:
    return requirements(NAME, target, _ARCHITECTURES, "vllm", "vLLM's compiled library")


def _takes(target: Target, problem: ScaledMMProblem) -> Verdict:
    same_as_result = tuple(d for d in _RESULTS if d == problem.out_dtype)
    return need.all_of(
        lambda: need.granularity(NAME, problem, need.OUTER_PRODUCTS),
        lambda: need.plain_scales(NAME, problem),
        lambda: need.fp8_operands(NAME, problem, _E4M3, _E4M3),
        lambda: need.out_dtype(NAME, problem, _RESULTS),
        lambda: need.bias_dtype(NAME, problem, same_as_result),
        lambda: need.layouts(NAME, problem),
        lambda: need.multiples(NAME, problem, 16),
    )


def emit(graph: fx.Graph, site: EmitSite) -> fx.Node:
    a, b = matrices(graph, site)
    args = (a, b, site.scale_a, site.scale_b, site.bias, site.out_dtype)
    return call(graph, torch.ops.fp8pass.vllm_cutlass_scaled_mm.default, args, val=site.val)


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
        UnsupportedError: its library is not loaded in this process (a graph from a cache that was
            made in one where it was).
    """
    op = vllm_operator("cutlass_scaled_mm")
    out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
    if out.numel():
        op(out, a, b, scale_a, scale_b, bias)
    return out


def run(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    a = aligned(a)
    return run_operator(a, aligned(b.t()).t(), scale_a, scale_b, bias, out_dtype)


VLLM_CUTLASS = register(
    Kernel(
        name=NAME,
        summary="vLLM's CUTLASS product (reduced accumulation but on sm100)",
        kinds=frozenset({"cuda"}),
        requirements=_requirements,
        can_implement=_takes,
        # behind torch's where it was not run
        priority=lambda target, problem: 38 if target.arch == "sm90" else 60,
        emit=emit,
        provenance="tested on sm90 with vLLM 0.21's library; others not run on hardware",
        run=run,
        reduced_accumulation=_REDUCED,
        library="vllm",
    )
)
