"""Kernels ``flashinfer_tensor`` and ``flashinfer_block``: FlashInfer's FP8 products.

- ``flashinfer_tensor``: ``bmm_fp8`` of one matrix, per-tensor scales, by its cuBLASLt backend,
  which always accumulates in reduced precision and reads rows without padding. bf16 or fp16
  results, no bias. Of its backends this one is fixed: ``auto`` measures while it runs, and may
  answer with another one each time. Not for sm120, where users met crashes
  (vllm-project/vllm#45912).
- ``flashinfer_block``: ``fp8_blockscale_gemm_sm90``, TensorRT-LLM's fork of DeepGEMM, which swaps
  the operands for fewer than 32 rows. FlashInfer's own test of codes on both sides allows a cosine
  distance of 3 % to a dequantised reference (tests/gemm/test_fp8_blockscale_gemm.py), far from the
  contract, so that it is only taken when forced; ``self_check`` then tells what it does.

``mm_fp8`` wants the weight shuffled ahead of time and is not here.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import fx

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.errors import UnsupportedError
from fp8pass.lowerings import conditions as need
from fp8pass.lowerings.emit import call, packed_rows
from fp8pass.lowerings.external import function, requirements
from fp8pass.lowerings.registry import EmitSite, Kernel, register
from fp8pass.problem import MRange, ScaledMMProblem
from fp8pass.reasons import Verdict, no
from fp8pass.target import Target

_E4M3 = (torch.float8_e4m3fn,)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_RESULTS = (torch.bfloat16, torch.float16)
_BLOCKS = (("group1x128", "group128x128"),)
#: Rows for which its block product swaps the operands.
_SWAPPED = 31


def _takes_tensor(target: Target, problem: ScaledMMProblem) -> Verdict:
    name = "flashinfer_tensor"
    return need.all_of(
        lambda: need.granularity(name, problem, (need.TENSOR_TENSOR,)),
        lambda: need.plain_scales(name, problem),
        lambda: need.fp8_operands(name, problem, _FP8, _FP8),
        lambda: need.out_dtype(name, problem, _RESULTS),
        lambda: need.bias_dtype(name, problem, ()),
        lambda: need.layouts(name, problem),
        lambda: need.multiples(name, problem, 16),
    )


def _takes_block(target: Target, problem: ScaledMMProblem) -> Verdict:
    name = "flashinfer_block"
    why = "its own tests allow a cosine distance of 3 % to a dequantised reference"
    return need.all_of(
        lambda: need.granularity(name, problem, _BLOCKS),
        lambda: need.plain_scales(name, problem),
        lambda: need.fp8_operands(name, problem, _E4M3, _E4M3),
        lambda: need.out_dtype(name, problem, (torch.bfloat16,)),
        lambda: need.bias_dtype(name, problem, ()),
        lambda: need.layouts(name, problem),
        lambda: need.multiples(name, problem, 128),
        lambda: no("FP8-L080", kernel=name, why=why),
    )


def _emit(graph: fx.Graph, site: EmitSite, *, op: str) -> fx.Node:
    a, b = site.a, site.b
    if not site.problem.packed:
        a, b = packed_rows(graph, a), packed_rows(graph, b, transposed=True)
    args = (a, b, site.scale_a, site.scale_b, site.bias, site.out_dtype)
    operator = getattr(torch.ops.fp8pass, op).default
    return call(graph, operator, args, val=site.val)


def run_tensor(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The product with per-tensor scales by ``bmm_fp8``: ``[M, N]`` of ``out_dtype``.

    Raises:
        UnsupportedError: the library is absent, broken or another version, or a bias is given.
    """
    _no_bias(bias)
    out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
    if out.numel():
        one = torch.Size((1,))
        scales = scale_a.reshape(one), scale_b.reshape(one)
        bmm = function("flashinfer", "bmm_fp8")
        bmm(a[None], b[None], *scales, out_dtype, out[None], backend="cublas")
    return out


def run_block(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The product with scales per block by ``fp8_blockscale_gemm_sm90``: ``[M, N]``.

    Raises:
        UnsupportedError: the library is absent, broken or another version, or a bias is given.
    """
    _no_bias(bias)
    out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
    if out.numel():
        gemm = function("flashinfer.gemm", "fp8_blockscale_gemm_sm90")
        gemm(a, b.t(), scale_a.contiguous(), scale_b.t().contiguous(), out)
    return out


def _no_bias(bias: torch.Tensor | None) -> None:
    if bias is not None:
        raise UnsupportedError("FlashInfer's products take no bias")


def _run(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    *,
    block: bool,
) -> torch.Tensor:
    run = run_block if block else run_tensor
    return run(a.contiguous(), b.t().contiguous().t(), scale_a, scale_b, bias, out_dtype)


FLASHINFER_TENSOR = register(
    Kernel(
        name="flashinfer_tensor",
        summary="FlashInfer's bmm_fp8 by cuBLASLt, one scale each (reduced accumulation)",
        kinds=frozenset({"cuda"}),
        requirements=lambda target: requirements(
            "flashinfer_tensor",
            target,
            ("sm89", "sm90", "sm100"),
            "flashinfer",
            "the library flashinfer",
        ),  # fmt: skip
        can_implement=_takes_tensor,
        priority=lambda target, problem: 62,
        emit=partial(_emit, op="flashinfer_scaled_mm"),
        provenance="not run on hardware (rules read in FlashInfer's documentation and source)",
        run=partial(_run, block=False),
        reduced_accumulation=True,
        library="flashinfer",
    )
)

FLASHINFER_BLOCK = register(
    Kernel(
        name="flashinfer_block",
        summary="FlashInfer's block product with swapped operands, for few rows",
        kinds=frozenset({"cuda"}),
        requirements=lambda target: requirements(
            "flashinfer_block", target, ("sm90",), "flashinfer", "the library flashinfer"
        ),
        can_implement=_takes_block,
        priority=lambda target, problem: 63,
        emit=partial(_emit, op="flashinfer_block_mm"),
        provenance="not run on hardware (rules read in FlashInfer's documentation and source)",
        rows=MRange(0, _SWAPPED),
        run=partial(_run, block=True),
        library="flashinfer",
    )
)
