"""Kernel ``vllm_cutlass_int8``: vLLM's ``cutlass_scaled_mm`` of int8 codes, and ``.._azp``.

Where vLLM's compiled library is loaded. Rules as in vLLM 0.21 (``csrc/.../w8a8/cutlass``): sm80 to
sm90 (CUTLASS has no int8 kernels there for sm100 and later), N and K multiples of 16, bf16 or fp16
results, a bias of the result's dtype, float32 scales of one element or ``[M, 1]`` and ``[1, N]``.
The sum is exact; scales and bias are applied in float32.

A zero point of the activations is ``cutlass_scaled_mm_azp``'s: it takes ``zero * sum(b)`` off the
int32 sum, the sums of the weight's columns (int32) given beside the weight; those of one zero point
for all rows come multiplied by it. The weight is an input of the graph, so that its columns are
added up there at each call.
"""

from __future__ import annotations

import torch
from torch import fx

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.lowerings import conditions as need
from fp8pass.lowerings import vllm_cutlass
from fp8pass.lowerings.emit import aten, call, matrices, value
from fp8pass.lowerings.external import requirements, vllm_operator
from fp8pass.lowerings.registry import EmitSite, Kernel, register
from fp8pass.problem import ScaledMMProblem
from fp8pass.reasons import Verdict
from fp8pass.target import Target

NAME = "vllm_cutlass_int8"
_ARCHITECTURES = ("sm80", "sm86", "sm89", "sm90")
_RESULTS = (torch.bfloat16, torch.float16)
#: Zero points that int32 arithmetic takes off as the source does: an int8 one leaves every sum
#: exact, however it is taken off there.
_ZEROS = ("int32 int32", *(f"{how} int8" for how in ("int32", "int64", "float32", "codes")))
_CONVERT = torch.ops.prims.convert_element_type.default


def _takes(target: Target, problem: ScaledMMProblem) -> Verdict:
    same_as_result = tuple(d for d in _RESULTS if d == problem.out_dtype)
    only = (torch.int8,)
    return need.all_of(
        lambda: need.granularity(NAME, problem, need.OUTER_PRODUCTS),
        lambda: need.plain_scales(NAME, problem, zero_point=True),
        lambda: need.exact_zero_point(NAME, problem, _ZEROS),
        lambda: need.fp8_operands(NAME, problem, only, only),
        lambda: need.int32_sum(NAME, problem),
        lambda: need.out_dtype(NAME, problem, _RESULTS),
        lambda: need.bias_dtype(NAME, problem, same_as_result),
        lambda: need.layouts(NAME, problem),
        lambda: need.multiples(NAME, problem, 16),
    )


def _emit(graph: fx.Graph, site: EmitSite) -> fx.Node:
    if site.zero is None:
        return vllm_cutlass.emit(graph, site)
    a, b = matrices(graph, site)
    sums = call(graph, aten.sum.dim_IntList, (b, [0], True), {"dtype": torch.int32})
    zero = site.zero
    if value(zero).dtype != torch.int32:
        zero = call(graph, _CONVERT, (zero, torch.int32))
    args = (a, b, site.scale_a, site.scale_b, site.bias, site.out_dtype, zero, sums)
    return call(graph, torch.ops.fp8pass.vllm_cutlass_scaled_mm_azp.default, args, val=site.val)


def run_operator(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    zero: torch.Tensor,
    sums: torch.Tensor,
) -> torch.Tensor:
    """``(a - zero) @ b``, scaled, by vLLM's operator: ``[M, N]`` of ``out_dtype``.

    Args:
        zero: int32, one element or one for each row.
        sums: int32 ``[1, N]``, those of the columns of ``b``.

    Raises:
        UnsupportedError: its library is not loaded in this process.
    """
    op = vllm_operator("cutlass_scaled_mm_azp")
    out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
    if not out.numel():
        return out
    sums = sums.reshape(-1)
    if zero.numel() == 1:
        op(out, a, b, scale_a, scale_b, sums * zero.reshape(()), None, bias)
    else:
        op(out, a, b, scale_a, scale_b, sums, zero.reshape(-1).contiguous(), bias)
    return out


VLLM_CUTLASS_INT8 = register(
    Kernel(
        name=NAME,
        summary="vLLM's CUTLASS product of int8 codes, with a zero point too",
        kinds=frozenset({"cuda"}),
        requirements=lambda target: requirements(
            NAME, target, _ARCHITECTURES, "vllm", "vLLM's compiled library"
        ),
        can_implement=_takes,
        priority=lambda target, problem: 60,
        emit=_emit,
        provenance="not run on hardware (rules of vLLM 0.21)",
        run=vllm_cutlass.run,
        library="vllm",
    )
)
