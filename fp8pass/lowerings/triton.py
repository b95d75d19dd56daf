"""fp8pass's own Triton kernels: ``triton`` for producers, and for products ``triton_skinny``,
``triton_general``, ``triton_block`` (scales per 1x128 and 128x128) and ``triton_int8``.

Triton comes with torch's builds for GPUs, so naming an architecture implies it; a machine where it
is missing is detected as such. The limits of each kernel are read from pure predicates beside the
kernels, without importing Triton.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import fx

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.kernels.triton_gemm_limits import (
    CODES,
    INT8,
    SKINNY_ROWS,
    why_not_block,
    why_not_gemm,
)
from fp8pass.kernels.triton_limits import (
    why_not_activation,
    why_not_layer_norm,
    why_not_norm,
    why_not_quantize,
)
from fp8pass.lowerings import conditions as need
from fp8pass.lowerings.emit import call
from fp8pass.lowerings.producers import ProducerKernel, ProducerProblem, register_producer
from fp8pass.lowerings.registry import EmitSite, Kernel, register
from fp8pass.problem import MRange, ScaledMMProblem
from fp8pass.reasons import YES, Verdict, no
from fp8pass.target import Target

#: fp8 casts in Triton exist from sm89 on; plain element-wise and row-wise code, nothing more.
_PRODUCER_ARCHITECTURES = ("sm89", "sm90", "sm100", "sm103", "sm120", "sm121")
#: The products' tile shapes are for the tensor cores and the shared memory of Hopper.
_GEMM_ARCHITECTURES = ("sm90",)
#: Those of blocks and of int8 are made smaller where there is less shared memory.
_BLOCK_ARCHITECTURES = _PRODUCER_ARCHITECTURES
_INT8_ARCHITECTURES = ("sm80", "sm86", *_PRODUCER_ARCHITECTURES)


# ---- producers ----------------------------------------------------------------------------------


def _takes_producer(target: Target, problem: ProducerProblem) -> Verdict:
    dtypes = problem.dtypes
    if problem.op == "rms_norm_quant":
        x, weight = dtypes
        why = why_not_norm(problem.form, problem.quant_form, problem.width, x, None, weight)
    elif problem.op == "add_rms_norm_quant":
        x, residual, weight = dtypes
        why = why_not_norm(problem.form, problem.quant_form, problem.width, x, residual, weight)
    elif problem.op == "layer_norm_quant":
        why = why_not_layer_norm(problem.form, problem.quant_form, problem.width, *dtypes)
    elif problem.op in ("silu_mul_quant", "act_mul_quant"):
        why = why_not_activation(problem.form, problem.quant_form, problem.width, *dtypes)
    elif problem.op == "quantize":
        why = why_not_quantize(problem.quant_form, problem.width, *dtypes)
    else:
        why = f"the operator {problem.op}"
    return YES if why is None else no("FP8-L017", kernel="triton", what=why)


def _operator(op: str) -> torch._ops.OpOverload:
    overload: torch._ops.OpOverload = getattr(torch.ops.fp8pass, f"triton_{op}").default
    return overload


TRITON = register_producer(
    ProducerKernel(
        name="triton",
        summary="own Triton kernel: producer and quantise in one launch",
        kinds=frozenset({"cuda"}),
        requirements=lambda target: need.with_triton("triton", target, _PRODUCER_ARCHITECTURES),
        can_implement=_takes_producer,
        replaces=_operator,
        provenance="tested on sm90; other architectures not run on hardware",
    )
)


# ---- products -----------------------------------------------------------------------------------


def _takes(kind: str, target: Target, problem: ScaledMMProblem) -> Verdict:
    kernel = f"triton_{kind}"
    return need.all_of(
        lambda: need.granularity(kernel, problem, need.OUTER_PRODUCTS),
        lambda: need.plain_scales(kernel, problem),
        lambda: need.fp8_operands(kernel, problem, CODES, CODES, both_e5m2=True),
        lambda: need.out_dtype(kernel, problem, need.MODEL_DTYPES),
        lambda: need.bias_dtype(kernel, problem, need.MODEL_DTYPES),
        lambda: need.layouts(kernel, problem),
        lambda: _limits(kind, problem),
    )


def _limits(kind: str, problem: ScaledMMProblem) -> Verdict:
    # how many rows it takes is the kernel's range, of which a site may use a part
    rows = SKINNY_ROWS if kind == "skinny" else None
    why = why_not_gemm(
        kind, rows, problem.n, problem.k, problem.activation.dtype, problem.weight.dtype,
        problem.out_dtype, problem.bias,
    )  # fmt: skip
    return YES if why is None else no("FP8-L017", kernel=f"triton_{kind}", what=why)


def _emit(graph: fx.Graph, site: EmitSite, *, kind: str) -> fx.Node:
    args = (
        site.a, site.b, site.scale_a, site.scale_b, site.bias, site.out_dtype, site.fast_accum,
        kind,
    )  # fmt: skip
    return call(graph, torch.ops.fp8pass.triton_scaled_mm.default, args, val=site.val)


def _run(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    *,
    kind: str,
) -> torch.Tensor:
    from fp8pass.kernels.triton_gemm import scaled_mm

    return scaled_mm(a, b, scale_a, scale_b, bias, out_dtype, fast_accum, kind)


def _gemm(kind: str, rows: MRange, summary: str, priority: int) -> Kernel:
    name = f"triton_{kind}"
    return register(
        Kernel(
            name=name,
            summary=summary,
            kinds=frozenset({"cuda"}),
            requirements=lambda target: need.with_triton(name, target, _GEMM_ARCHITECTURES),
            can_implement=partial(_takes, kind),
            priority=lambda target, problem: priority,
            emit=partial(_emit, kind=kind),
            provenance="tested on sm90",
            rows=rows,
            run=partial(_run, kind=kind),
        )
    )


#: Before torch's row-wise product (at few rows 1.3 to 2.3 times slower on an H200), behind its
#: per-tensor one; ``triton_general`` behind all of torch's, which are faster at many rows. What was
#: measured size by size is in tables/sm90.json.
TRITON_SKINNY = _gemm(
    "skinny",
    MRange(0, SKINNY_ROWS),
    "own Triton product for few rows: weight tiles on the wide side of the tensor cores",
    35,
)
TRITON_GENERAL = _gemm("general", MRange(), "own Triton product for any number of rows", 55)


# ---- blocks and int8 ----------------------------------------------------------------------------

_BLOCKS = (("group1x128", "group128x128"),)


def _takes_block(target: Target, problem: ScaledMMProblem) -> Verdict:
    name = "triton_block"

    def limits() -> Verdict:
        why = why_not_block(
            problem.n, problem.k, problem.activation.dtype, problem.weight.dtype,
            problem.out_dtype, problem.bias,
        )  # fmt: skip
        return YES if why is None else no("FP8-L017", kernel=name, what=why)

    return need.all_of(
        lambda: need.granularity(name, problem, _BLOCKS),
        lambda: need.plain_scales(name, problem),
        lambda: need.fp8_operands(name, problem, CODES, CODES, both_e5m2=True),
        lambda: need.out_dtype(name, problem, need.MODEL_DTYPES),
        lambda: need.bias_dtype(name, problem, need.MODEL_DTYPES),
        lambda: need.layouts(name, problem),
        limits,
    )


def _emit_block(graph: fx.Graph, site: EmitSite) -> fx.Node:
    args = (site.a, site.b, site.scale_a, site.scale_b, site.bias, site.out_dtype)
    return call(graph, torch.ops.fp8pass.triton_block_mm.default, args, val=site.val)


def _run_block(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    from fp8pass.kernels.triton_block import block_mm

    return block_mm(a, b, scale_a, scale_b, bias, out_dtype)


TRITON_BLOCK = register(
    Kernel(
        name="triton_block",
        summary="own Triton product with scales per 1x128 and 128x128, any sizes",
        kinds=frozenset({"cuda"}),
        requirements=lambda target: need.with_triton("triton_block", target, _BLOCK_ARCHITECTURES),
        can_implement=_takes_block,
        priority=lambda target, problem: 45,
        emit=_emit_block,
        provenance="tested on sm90; others compiled (sm89, sm100, sm120), not run on hardware",
        run=_run_block,
    )
)


def _takes_int8(target: Target, problem: ScaledMMProblem) -> Verdict:
    name, only = "triton_int8", (torch.int8,)
    return need.all_of(
        lambda: need.granularity(name, problem, need.OUTER_PRODUCTS),
        lambda: need.plain_scales(name, problem),
        lambda: need.fp8_operands(name, problem, only, only),
        lambda: need.int32_sum(name, problem),
        lambda: need.out_dtype(name, problem, need.MODEL_DTYPES),
        lambda: need.bias_dtype(name, problem, need.MODEL_DTYPES),
        lambda: need.layouts(name, problem),
        lambda: _limits(INT8, problem),
    )


TRITON_INT8 = register(
    Kernel(
        name="triton_int8",
        summary="own Triton product of int8 codes: exact int32 sum, scales and bias in one launch",
        kinds=frozenset({"cuda"}),
        requirements=lambda target: need.with_triton("triton_int8", target, _INT8_ARCHITECTURES),
        can_implement=_takes_int8,
        priority=lambda target, problem: 45,
        emit=partial(_emit, kind=INT8),
        provenance="tested on sm90; others compiled (sm80, sm86, sm89, ...), not run on hardware",
        run=partial(_run, kind=INT8),
    )
)
