"""Kernel ``torch_rescaled``: torch's product without scales, then one own launch for the scales.

As ``torch_channel``, but as one operator with its own Triton kernel, so that it can be part of a
plan over ranges of M. It is meant for some hundred rows, where a row-wise product is slow on
Hopper, and is chosen only where it was measured to be the fastest, or by name.
"""

from __future__ import annotations

import torch
from torch import fx

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.lowerings import conditions as need
from fp8pass.lowerings.emit import aligned, call, matrices
from fp8pass.lowerings.registry import EmitSite, Kernel, register
from fp8pass.lowerings.torch_scaled_mm import has_fp8_products, takes_unscaled
from fp8pass.problem import ScaledMMProblem
from fp8pass.reasons import Verdict
from fp8pass.target import Target

NAME = "torch_rescaled"
_ARCHITECTURES = ("sm89", "sm90", "sm100", "sm103", "sm120", "sm121")
#: One scale for each operand is what torch's own product takes.
_PAIRS = tuple(pair for pair in need.OUTER_PRODUCTS if pair != need.TENSOR_TENSOR)


def _requirements(target: Target) -> Verdict:
    return has_fp8_products(NAME, target) and need.with_triton(NAME, target, _ARCHITECTURES)


def _takes(target: Target, problem: ScaledMMProblem) -> Verdict:
    return takes_unscaled(NAME, target, problem, _PAIRS)


def _emit(graph: fx.Graph, site: EmitSite) -> fx.Node:
    a, b = matrices(graph, site)
    args = (a, b, site.scale_a, site.scale_b, site.bias, site.out_dtype, site.fast_accum)
    return call(graph, torch.ops.fp8pass.torch_rescaled_mm.default, args, val=site.val)


def _run(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    from fp8pass.kernels.triton_rescale import scaled_mm

    a, b = aligned(a), aligned(b.t()).t()
    return scaled_mm(a, b, scale_a, scale_b, bias, out_dtype, fast_accum)


TORCH_RESCALED = register(
    Kernel(
        name=NAME,
        summary="torch._scaled_mm with unit scales to float32, then one own launch for the scales",
        kinds=frozenset({"cuda"}),
        requirements=_requirements,
        can_implement=_takes,
        priority=lambda target, problem: 65,
        emit=_emit,
        provenance="tested on sm90; others not run on hardware",
        run=_run,
    )
)
