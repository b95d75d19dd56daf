"""Kernel ``vllm_cutlass_int8``: vLLM's ``cutlass_scaled_mm`` of int8 codes.

Where vLLM's compiled library is loaded. Rules as in vLLM 0.21 (``csrc/.../w8a8/cutlass``): sm80 to
sm90 (CUTLASS has no int8 kernels there for sm100 and later), N and K multiples of 16, bf16 or fp16
results, a bias of the result's dtype, float32 scales of one element or ``[M, 1]`` and ``[1, N]``.
The sum is exact; scales and bias are applied in float32. A zero point would be
``cutlass_scaled_mm_azp``'s, which needs the sums of the weight's columns beside the weight: a site
with one is refused here for not being symmetric.
"""

from __future__ import annotations

import torch

from fp8pass.lowerings import conditions as need
from fp8pass.lowerings.external import requirements
from fp8pass.lowerings.registry import Kernel, register
from fp8pass.lowerings.vllm_cutlass import emit, run
from fp8pass.problem import ScaledMMProblem
from fp8pass.reasons import Verdict
from fp8pass.target import Target

NAME = "vllm_cutlass_int8"
_ARCHITECTURES = ("sm80", "sm86", "sm89", "sm90")
_RESULTS = (torch.bfloat16, torch.float16)


def _takes(target: Target, problem: ScaledMMProblem) -> Verdict:
    same_as_result = tuple(d for d in _RESULTS if d == problem.out_dtype)
    only = (torch.int8,)
    return need.all_of(
        lambda: need.granularity(NAME, problem, need.OUTER_PRODUCTS),
        lambda: need.plain_scales(NAME, problem),
        lambda: need.fp8_operands(NAME, problem, only, only),
        lambda: need.int32_sum(NAME, problem),
        lambda: need.out_dtype(NAME, problem, _RESULTS),
        lambda: need.bias_dtype(NAME, problem, same_as_result),
        lambda: need.layouts(NAME, problem),
        lambda: need.multiples(NAME, problem, 16),
    )


VLLM_CUTLASS_INT8 = register(
    Kernel(
        name=NAME,
        summary="vLLM's CUTLASS product of int8 codes",
        kinds=frozenset({"cuda"}),
        requirements=lambda target: requirements(
            NAME, target, _ARCHITECTURES, "vllm", "vLLM's compiled library"
        ),
        can_implement=_takes,
        priority=lambda target, problem: 60,
        emit=emit,
        provenance="not run on hardware (rules of vLLM 0.21)",
        run=run,
        library="vllm",
    )
)
