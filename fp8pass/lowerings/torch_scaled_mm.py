"""Kernels ``torch_tensor``, ``torch_row`` and ``torch_channel``: torch's own ``_scaled_mm``.

- ``torch_tensor``: per-tensor x per-tensor; scales and bias inside the product.
- ``torch_row``: per-token x per-channel, likewise (cuBLASLt or CUTLASS, hipBLASLt).
- ``torch_channel``: the product alone, in float32, then scales, bias and one rounding as pointwise
  work that Inductor generates. For every mix of scales, and where the row-wise product is missing.
  Where Inductor fuses that with a reader, it hands the value on in float32: the rounding to the
  result's dtype is then not performed in between, as with any pointwise work of Inductor.

The rules for GPUs were read in pytorch's ``aten/src/ATen/native/cuda/ScaledBlas.cpp``,
``RowwiseScaledMM.cu`` and ``cmake/Codegen.cmake`` (revisions near 2.11, not every release); what
those do not show is refused.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import fx

from fp8pass.lowerings import conditions as need
from fp8pass.lowerings.emit import (
    aligned,
    aten,
    call,
    column,
    dense_scale,
    epilogue,
    matrices,
    matrix_like,
    row,
    scalar_scales,
    unit_scale,
    value,
)
from fp8pass.lowerings.registry import EmitSite, Kernel, register
from fp8pass.problem import ScaledMMProblem
from fp8pass.reasons import YES, Verdict, no
from fp8pass.target import Target

_CUDA_FP8 = ("sm89", "sm90", "sm100", "sm103", "sm120", "sm121")
_ROCM_FP8 = ("gfx942", "gfx950", "gfx1200", "gfx1201")
#: First version of ROCm with which torch takes FP8 products there.
_ROCM_SINCE = {"gfx1200": (6, 3), "gfx1201": (6, 3), "gfx950": (6, 5)}
#: Row-wise: sm103 and sm121 get code of their own only from some CUDA versions on, and a target
#: does not always know its CUDA version: not here.
_ROW_ARCHITECTURES = ("sm89", "sm90", "sm100", "sm120", *_ROCM_FP8)
#: On RDNA4 the row-wise product is slower than the unfused form.
_SLOW_ROW = frozenset({"gfx1200", "gfx1201"})

_KINDS = frozenset({"cpu", "cuda", "rocm"})
_NOT_RUN = "not run on hardware (rules read in pytorch's source)"
#: sizes of N and K: cuBLASLt, hipBLASLt and the checks in front of them
_MULTIPLE = 16


#: Seen with torch 2.11 and 2.13; what torch does on a CPU depends on its instruction set.
_CPU_SPEED = "0.02 GMAC/s seen with AVX-512 or AMX, 0.4 at 4 rows to 23 at 256 rows with AVX2"


def has_fp8_products(kernel: str, target: Target) -> Verdict:
    """Whether torch multiplies FP8 on the target at all."""
    if target.kind == "cpu":
        return YES
    if target.kind == "rocm":
        return need.architecture(kernel, target, _ROCM_FP8) and _rocm_version(kernel, target)
    return need.architecture(kernel, target, _CUDA_FP8)


def _rocm_version(kernel: str, target: Target) -> Verdict:
    """torch refuses an architecture's FP8 before a version of ROCm; one that is not known passes,
    since a device that runs has one that supports it."""
    wants, has = _ROCM_SINCE.get(target.arch), dict(target.runtime).get("hip", "")
    numbers = has.split(".")[:2]
    if wants is None or len(numbers) < 2 or not all(number.isdigit() for number in numbers):
        return YES
    if (int(numbers[0]), int(numbers[1])) >= wants:
        return YES
    text = ".".join(map(str, wants))
    return no(
        "FP8-L062", kernel=kernel, library="ROCm", wants=text, what="FP8", target=target.spec,
        has=".".join(numbers),
    )  # fmt: skip


def _dtypes(target: Target, *, mixed: bool) -> tuple[torch.dtype, ...]:
    """fp8 dtypes of an operand. ROCm: its native e4m3 only (fnuz on gfx942, OCP elsewhere)."""
    if target.kind == "rocm":
        return () if target.fp8_dtype is None else (target.fp8_dtype,)
    return (torch.float8_e4m3fn, torch.float8_e5m2) if mixed else (torch.float8_e4m3fn,)


def _operands(
    kernel: str, target: Target, problem: ScaledMMProblem, *, mixed_weight: bool
) -> Verdict:
    """What all three ask of the two matrices; a CPU has no limits on sizes or e5m2 pairs."""
    on_cpu = target.kind == "cpu"
    activation = _dtypes(target, mixed=True)
    weight = _dtypes(target, mixed=mixed_weight or on_cpu)
    return need.all_of(
        lambda: need.plain_scales(kernel, problem),
        lambda: need.native_fp8(kernel, target, problem),
        lambda: need.fp8_operands(kernel, problem, activation, weight, both_e5m2=on_cpu),
        lambda: need.layouts(kernel, problem),
        lambda: YES if on_cpu else need.multiples(kernel, problem, _MULTIPLE),
    )


def _fused_bias(kernel: str, target: Target, problem: ScaledMMProblem) -> Verdict:
    """A bias inside the product has the dtype of the result, which is not float32."""
    if target.kind == "cpu":
        return need.bias_dtype(kernel, problem, need.MODEL_DTYPES)
    half = (torch.bfloat16, torch.float16)
    return need.bias_dtype(kernel, problem, tuple(d for d in half if d == problem.out_dtype))


def _emulated(kernel: str, target: Target) -> Verdict:
    """Last condition: without it the kernel works, and the user may force it."""
    if target.kind != "cpu":
        return YES
    return no("FP8-L006", kernel=kernel, target=target.spec, why=_CPU_SPEED)


# ---- torch_tensor ----------------------------------------------------------------------------


def _takes_tensor(target: Target, problem: ScaledMMProblem) -> Verdict:
    name = "torch_tensor"
    return need.all_of(
        lambda: need.granularity(name, problem, (need.TENSOR_TENSOR,)),
        lambda: _operands(name, target, problem, mixed_weight=True),
        lambda: need.out_dtype(name, problem, need.MODEL_DTYPES),
        lambda: _fused_bias(name, target, problem),
        lambda: _emulated(name, target),
    )


def _emit_tensor(graph: fx.Graph, site: EmitSite) -> fx.Node:
    a, b = matrices(graph, site)
    scale_a, scale_b = scalar_scales(graph, site.scale_a, site.scale_b)
    return _product(graph, site, a, b, scale_a, scale_b)


# ---- torch_row -------------------------------------------------------------------------------


def _row_requirements(target: Target) -> Verdict:
    name = "torch_row"
    if target.kind == "cpu":  # an internal assert before
        return need.torch_at_least(name, target, (2, 12))
    if target.arch == "sm89":  # before, its launch ignores the current stream and can hang
        return need.torch_at_least(name, target, (2, 12))
    return need.architecture(name, target, _ROW_ARCHITECTURES) and has_fp8_products(name, target)


def _takes_row(target: Target, problem: ScaledMMProblem) -> Verdict:
    name = "torch_row"
    # CUDA: CUTLASS takes bf16 alone in some versions; a later one lets float16 through its checks
    # but has no such kernel without a bias. Only cuBLASLt on sm90 writes float32.
    results = need.MODEL_DTYPES if target.kind == "cpu" else (torch.bfloat16,)
    return need.all_of(
        lambda: need.granularity(name, problem, (need.TOKEN_CHANNEL,)),
        lambda: _operands(name, target, problem, mixed_weight=False),
        lambda: need.out_dtype(name, problem, results),
        lambda: _fused_bias(name, target, problem),
    )


def _row_priority(target: Target, problem: ScaledMMProblem) -> int:
    return 60 if target.arch in _SLOW_ROW else 90 if target.kind == "cpu" else 40


def _emit_row(graph: fx.Graph, site: EmitSite) -> fx.Node:
    a, b = matrices(graph, site)
    scale_a = dense_scale(graph, column(graph, site.scale_a))
    scale_b = dense_scale(graph, row(graph, site.scale_b))
    return _product(graph, site, a, b, scale_a, scale_b)


# ---- torch_channel ---------------------------------------------------------------------------


def takes_unscaled(
    name: str,
    target: Target,
    problem: ScaledMMProblem,
    pairs: tuple[need.Granularity, ...] = need.OUTER_PRODUCTS,
) -> Verdict:
    """Whether the kernel ``name`` can have torch's product without scales for this problem, whose
    scales are one of ``pairs``."""
    return need.all_of(
        lambda: need.granularity(name, problem, pairs),
        lambda: _operands(name, target, problem, mixed_weight=True),
        lambda: need.out_dtype(name, problem, need.MODEL_DTYPES),
        lambda: need.bias_dtype(name, problem, need.MODEL_DTYPES),
        lambda: _emulated(name, target),
    )


def _emit_channel(graph: fx.Graph, site: EmitSite) -> fx.Node:
    a, b = matrices(graph, site)
    one = unit_scale(graph, site.a)
    args = (a, b, one, one, None, None, torch.float32, site.fast_accum)
    val = matrix_like(site.val, torch.float32)
    out = call(graph, aten._scaled_mm.default, args, val=val)
    return epilogue(graph, site, out, site.scale_a, site.scale_b)


# ---- shared ----------------------------------------------------------------------------------


def _product(
    graph: fx.Graph, site: EmitSite, a: fx.Node, b: fx.Node, scale_a: fx.Node, scale_b: fx.Node
) -> fx.Node:
    args = (a, b, scale_a, scale_b, site.bias, None, site.out_dtype, site.fast_accum)
    node = call(graph, aten._scaled_mm.default, args, val=site.val)
    # By these Inductor keeps the strides of the operands. Without them it may lay out a scale of
    # [M, 1] as (1, M), which torch refuses. They are made from this node's own operands.
    node.meta["eager_input_vals"] = (fx.node.map_arg(args, value), {})
    return node


def _run(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    *,
    rows: bool,
) -> torch.Tensor:
    """The product on real tensors, as part of a plan over several ranges of M."""
    if a.shape[0] == 0:
        return a.new_empty((0, b.shape[1]), dtype=out_dtype)
    if rows:
        scale_a, scale_b = scale_a.reshape(-1, 1), scale_b.reshape(1, -1)
        scale_a, scale_b = scale_a.contiguous(), scale_b.contiguous()
    else:
        scale_a, scale_b = scale_a.reshape(()), scale_b.reshape(())
    a, weight = aligned(a), aligned(b.t())
    return torch._scaled_mm(
        a, weight.t(), scale_a, scale_b, bias=bias, out_dtype=out_dtype, use_fast_accum=fast_accum
    )


TORCH_TENSOR = register(
    Kernel(
        name="torch_tensor",
        summary="torch._scaled_mm, per-tensor scales",
        kinds=_KINDS,
        requirements=lambda target: has_fp8_products("torch_tensor", target),
        can_implement=_takes_tensor,
        priority=lambda target, problem: 30,
        emit=_emit_tensor,
        provenance=f"tested on sm90; other GPUs {_NOT_RUN}",
        run=partial(_run, rows=False),
    )
)

TORCH_ROW = register(
    Kernel(
        name="torch_row",
        summary="torch._scaled_mm, per-token x per-channel scales",
        kinds=_KINDS,
        requirements=_row_requirements,
        can_implement=_takes_row,
        priority=_row_priority,
        emit=_emit_row,
        provenance=f"tested on x86-avx2 and sm90; other GPUs {_NOT_RUN}",
        run=partial(_run, rows=True),
    )
)

TORCH_CHANNEL = register(
    Kernel(
        name="torch_channel",
        summary="torch._scaled_mm with unit scales to float32, then scales and bias pointwise",
        kinds=_KINDS,
        requirements=lambda target: has_fp8_products("torch_channel", target),
        can_implement=partial(takes_unscaled, "torch_channel"),
        priority=lambda target, problem: 50,
        emit=_emit_channel,
        provenance=_NOT_RUN,
    )
)
