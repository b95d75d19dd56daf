"""Kernel ``vllm_skinny``: vLLM's ``wvSplitKQ`` for up to four rows on ROCm, per-tensor scales.

It is there where vLLM's compiled library for ROCm is loaded (``import vllm._custom_ops``), and
``Target.parse("gfx942+vllm")`` names it without having it. Rules read in vLLM's
``csrc/rocm/skinny_gemms.cu``, ``csrc/rocm/torch_bindings.cpp`` and
``vllm/model_executor/kernels/linear/scaled_mm/rocm.py`` (revisions of 2025 and 2026):

- one to four rows; N and K multiples of 16; bf16 or fp16 results; both operands in the device's own
  e4m3; float32 sums, scales and bias applied in float32, one rounding;
- a bias has the dtype of the result. The first versions have no argument for one, and it was lost
  in silence there: a version that is not known is taken for one of those (vllm#24895);
- gfx942 and gfx950 in every version. On RDNA4 (wave32) it came later, and a sibling of it was wrong
  for more than 4096 columns there (vllm#40827): known versions and K up to 4096 only. A build for
  another architecture has an empty kernel, which leaves its output as it was;
- more activations than fit in the local memory (64 KiB, 160 KiB on gfx950) take a slower path of
  the same kernel, which is no limit.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import fx

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.lowerings import conditions as need
from fp8pass.lowerings.emit import aligned, call, matrices
from fp8pass.lowerings.registry import EmitSite, Kernel, register
from fp8pass.problem import MRange, ScaledMMProblem
from fp8pass.reasons import YES, Verdict, no
from fp8pass.target import Target

NAME = "vllm_skinny"
_RESULTS = (torch.bfloat16, torch.float16)
_WAVE64 = ("gfx942", "gfx950")
_WAVE32 = ("gfx1200", "gfx1201")
#: Versions that are known to have an argument for a bias, and the kernel for RDNA4.
_BIAS_SINCE = (0, 12)
_RDNA4_SINCE = (0, 21)
_RDNA4_WIDEST = 4096


def _requirements(target: Target) -> Verdict:
    return need.all_of(
        lambda: need.architecture(NAME, target, (*_WAVE64, *_WAVE32)),
        lambda: need.library(NAME, target, "vllm"),
        lambda: YES if target.arch in _WAVE64 else need.library_at_least(
            NAME, target, "vllm", _RDNA4_SINCE, "RDNA4"
        ),
    )  # fmt: skip


def _takes(target: Target, problem: ScaledMMProblem) -> Verdict:
    native = () if target.fp8_dtype is None else (target.fp8_dtype,)
    same_as_result = tuple(d for d in _RESULTS if d == problem.out_dtype)
    return need.all_of(
        lambda: need.granularity(NAME, problem, (need.TENSOR_TENSOR,)),
        lambda: need.plain_scales(NAME, problem),
        lambda: need.native_fp8(NAME, target, problem),
        lambda: need.fp8_operands(NAME, problem, native, native),
        lambda: need.out_dtype(NAME, problem, _RESULTS),
        lambda: need.bias_dtype(NAME, problem, same_as_result),
        lambda: YES if problem.bias is None else need.library_at_least(
            NAME, target, "vllm", _BIAS_SINCE, "a bias"
        ),
        lambda: need.layouts(NAME, problem),
        lambda: need.multiples(NAME, problem, 16),
        lambda: _width(target, problem),
    )  # fmt: skip


def _width(target: Target, problem: ScaledMMProblem) -> Verdict:
    assert problem.k is not None
    if target.arch in _WAVE32 and problem.k > _RDNA4_WIDEST:
        what = f"K = {problem.k} on {target.arch}, where it is at most {_RDNA4_WIDEST}"
        return no("FP8-L017", kernel=NAME, what=what)
    return YES


def _emit(graph: fx.Graph, site: EmitSite) -> fx.Node:
    a, b = matrices(graph, site)
    args = (a, b, site.scale_a, site.scale_b, site.bias, site.out_dtype)
    return call(graph, torch.ops.fp8pass.vllm_skinny_scaled_mm.default, args, val=site.val)


@lru_cache(maxsize=16)
def compute_units(device: torch.device) -> int:
    """The number of compute units, which the kernel's grid is made for."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def run_operator(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The product by vLLM's operator: ``[M, N]`` of ``out_dtype``.

    The operator takes the row-major weight ``[N, K]`` first, then the activations ``[M, K]``, and
    writes into an output that the caller allocates.

    Raises:
        UnsupportedError: its library is not loaded in this process, or has no argument for a bias.
    """
    from fp8pass.errors import UnsupportedError

    op = getattr(torch.ops._rocm_C, "wvSplitKQ", None)
    if op is None:
        raise UnsupportedError(
            "this graph was compiled with vLLM's kernels for ROCm: load its library "
            "(import vllm._custom_ops) before running it"
        )
    out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
    if not out.numel():
        return out
    biased = any(argument.name == "in_bias" for argument in op.default._schema.arguments)
    if bias is not None and not biased:
        raise UnsupportedError("vLLM's wvSplitKQ takes no bias in this version of vLLM")
    weight, rows = aligned(b.t()), aligned(a)
    scales = scale_a.reshape(1), scale_b.reshape(1)
    units = compute_units(a.device)
    if biased:
        op(weight, rows, bias, out, *scales, units)
    else:
        op(weight, rows, out, *scales, units)
    return out


def _run(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    return run_operator(a, b, scale_a, scale_b, bias, out_dtype)


VLLM_SKINNY = register(
    Kernel(
        name=NAME,
        summary="vLLM's wvSplitKQ: up to 4 rows, per-tensor scales",
        kinds=frozenset({"rocm"}),
        requirements=_requirements,
        can_implement=_takes,
        priority=lambda target, problem: 25,
        emit=_emit,
        provenance="not run on hardware (rules read in vLLM's source)",
        rows=MRange(0, 4),
        run=_run,
    )
)
