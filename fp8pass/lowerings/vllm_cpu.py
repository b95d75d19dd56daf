"""vLLM's products for x86 CPUs, where its compiled library for CPUs is loaded.

Importing ``vllm._custom_ops`` on a CPU loads it, and ``Target.parse("x86-amx+vllm")`` names it
without having it. Rules as in vLLM 0.32 (``csrc/cpu``, ``kernels/linear/scaled_mm/cpu.py``), and as
its operators were seen to behave:

- ``vllm_cpu_tensor``, ``vllm_cpu_block``: ``fp8_scaled_mm_cpu``, activations that are not quantised
  times fp8 weights (W8A16). bf16 alone: with another dtype the process ends. N is a multiple of 32,
  K of 128, and a scale stands for 128 rows and a multiple of 32 columns of ``b``; one per tensor is
  repeated. Up to four rows the float32 sums are scaled, with more the weight, rounded to bf16. vLLM
  asks for AMX; the operator runs with AVX-512 BF16 as well. It reads the exponent 0 of a code as
  that of a normal number: a zero becomes 2^-7, and of subnormal numbers m 2^-9 becomes
  (8 + m) 2^-10. So these are only for those who name them.
- ``vllm_cpu_w8a8``, ``vllm_cpu_w8a8_block``: ``fp8_scaled_mm_with_quant`` (W8A8), which quantises
  its activations itself. Given codes and the scale 1 it finds the same codes again; the real scale
  and the bias are applied to its float32 result. For CPUs with AMX-FP8 alone: elsewhere its numbers
  are right, and it takes a hundred times as long as the own product.
- ``vllm_cpu_int8``: ``onednn_scaled_mm``, of int8 codes. It wants a handle that owns a packed copy
  of the weight, and hides it from the graph: here it is made and released in each call.

Weights are packed in each call, since a pass can keep no copy of them: with few rows that takes
longer than the product itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.errors import UnsupportedError
from fp8pass.lowerings import conditions as need
from fp8pass.lowerings.emit import call
from fp8pass.lowerings.external import vllm_operator
from fp8pass.lowerings.registry import EmitSite, Kernel, register
from fp8pass.ops.weight_form import WeightForm
from fp8pass.problem import ScaledMMProblem
from fp8pass.quant_key import QuantKey, dtype_name
from fp8pass.reasons import YES, Verdict, no
from fp8pass.target import AMX_FP8, AVX512_BF16, Target

_BF16, _F32 = torch.bfloat16, torch.float32
_E4M3 = torch.float8_e4m3fn
#: Columns of a tile of a packed weight; the depth of a block.
_COLUMNS, _DEPTH = 32, 128
_X86 = ("x86-avx2", "x86-avx512", "x86-amx", "x86-amx-fp8")
_AMX = ("x86-amx", "x86-amx-fp8")


def _library(kernel: str, target: Target) -> Verdict:
    if target.has_library("vllm"):
        return YES
    what = "vLLM's compiled library for CPUs"
    return no("FP8-L011", kernel=kernel, wants=what, target=target.spec)


# ---- weight-only ---------------------------------------------------------------------------------


def _requires_bf16(kernel: str, target: Target) -> Verdict:
    if target.arch not in _AMX and AVX512_BF16 not in target.features:
        return no("FP8-L011", kernel=kernel, wants="AMX or AVX-512 BF16", target=target.spec)
    return _library(kernel, target)


def _takes_weight_only(kernel: str, problem: ScaledMMProblem) -> Verdict:
    has = dtype_name(problem.activation.dtype)
    if problem.activation.dtype != _BF16:
        what, wants = "activations of dtype", "bfloat16"
        return no("FP8-L007", kernel=kernel, what=what, has=has, wants=wants)
    if problem.weight.dtype != _E4M3:
        has, wants = dtype_name(problem.weight.dtype), "float8_e4m3fn"
        return no("FP8-L007", kernel=kernel, what="weights of dtype", has=has, wants=wants)
    return need.all_of(
        lambda: need.plain_scales(kernel, problem),
        lambda: _weight_groups(kernel, problem),
        lambda: need.out_dtype(kernel, problem, (_BF16,)),
        lambda: need.bias_dtype(kernel, problem, need.MODEL_DTYPES),
        lambda: need.layouts(kernel, problem),
        lambda: _sizes(kernel, problem, _DEPTH),
        lambda: _form(kernel, problem),
    )


def _weight_groups(kernel: str, problem: ScaledMMProblem) -> Verdict:
    name = problem.weight.granularity
    if kernel == "vllm_cpu_tensor":
        fits, wants = name in ("tensor", "channel"), "per-tensor or per-channel weight"
    else:
        fits, wants = _in_blocks(problem), f"{_BLOCKS} weight"
    return YES if fits else no("FP8-L003", kernel=kernel, wants=wants, has=f"per-{name}")


#: A block of a weight, in words: its columns are a multiple of those of a tile.
_BLOCKS = f"per-group{_DEPTH}xH (H a multiple of {_COLUMNS})"


def _in_blocks(problem: ScaledMMProblem) -> bool:
    group = problem.weight.scale.group
    return group.row == _DEPTH and group.col > 0 and not group.col % _COLUMNS


def _sizes(kernel: str, problem: ScaledMMProblem, depth: int) -> Verdict:
    """N and K are known, N a multiple of a tile's columns and K one of ``depth``."""
    known = need.multiples(kernel, problem, 1)
    if not known:
        return known
    for what, size, of in (("N", problem.n, _COLUMNS), ("K", problem.k, depth)):
        assert size is not None
        if size % of:
            return no("FP8-L009", kernel=kernel, what=what, wants=of, has=size)
    return YES


def _at_weight(form: WeightForm, granularity: str) -> bool:
    return granularity.startswith("group") or form.at == "weight"


def _form(kernel: str, problem: ScaledMMProblem) -> Verdict:
    """The source rounds the scaled weight to bf16, or the product before a scale, or nothing."""
    made, granularity = WeightForm.parse(problem.form), problem.weight.granularity
    channel = granularity == "channel"
    if made.one_rounding and not channel:
        return YES
    if made.product == _BF16 and made.scaled in (_BF16, _F32):
        if not (channel and _at_weight(made, granularity)):
            return YES
        return no("FP8-L017", kernel=kernel, what="a weight that is scaled per channel")
    what = f"a product in {dtype_name(made.product)} that is scaled in {dtype_name(made.scaled)}"
    if channel:
        what += " per channel"
    return no("FP8-L017", kernel=kernel, what=what)


def _emit_weight_only(graph: fx.Graph, site: EmitSite) -> fx.Node:
    args = (
        site.a, site.b, site.scale_b, site.bias, site.out_dtype, str(site.problem.weight),
        site.problem.form,
    )  # fmt: skip
    return call(graph, torch.ops.fp8pass.vllm_cpu_w8a16_mm.default, args, val=site.val)


def _weight_only_kernel(name: str, summary: str) -> Kernel:
    return register(
        Kernel(
            name=name,
            summary=summary,
            kinds=frozenset({"cpu"}),
            requirements=lambda target: _requires_bf16(name, target),
            can_implement=lambda target, problem: _takes_weight_only(name, problem),
            priority=lambda target, problem: 65,
            emit=_emit_weight_only,
            provenance="tested on x86-avx512 with BF16 (vLLM 0.32); with AMX not run on hardware",
            library="vllm",
            weight_only=True,
            inexact="weights that are zero or subnormal are read as other numbers, a zero as 2^-7",
        )
    )


VLLM_CPU_TENSOR = _weight_only_kernel(
    "vllm_cpu_tensor", "vLLM's fp8_scaled_mm_cpu: bf16 activations, one scale of the weight"
)
VLLM_CPU_BLOCK = _weight_only_kernel(
    "vllm_cpu_block", "vLLM's fp8_scaled_mm_cpu: bf16 activations, weight scales per block"
)


def w8a16_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    weight_key: str,
    form: str = "",
) -> torch.Tensor:
    """The weight-only product by ``fp8_scaled_mm_cpu``; arguments as of ``fp8pass::w8a16_mm``.

    Raises:
        UnsupportedError: the library is not loaded in this process, or an operand has a dtype with
            which its operator would end the process.
    """
    dtypes = (a.dtype, b.dtype, out_dtype)
    if dtypes != (_BF16, _E4M3, _BF16):
        raise UnsupportedError(f"fp8_scaled_mm_cpu does not take {a.dtype} x {b.dtype}")
    m, (k, n) = a.shape[0], b.shape
    made, group = WeightForm.parse(form), QuantKey.parse(weight_key).scale.group
    at_weight = made.one_rounding or _at_weight(made, group.name)
    if not at_weight:  # the operator's own result is the product that is then scaled
        scale, columns = scale_b.new_ones((1, 1), dtype=_F32), n
    elif group.name == "tensor":
        scale, columns = scale_b.reshape(1, 1), n
    else:
        scale, columns = scale_b.t(), group.col
    scale = scale.to(made.scaled).to(_F32).expand(scale.shape[0], k // _DEPTH).contiguous()
    inside = made.one_rounding or made.bias == "inside"
    added = bias.to(_F32) if bias is not None and inside else None
    if not m or not n:
        return a.new_empty((m, n))
    op = vllm_operator("fp8_scaled_mm_cpu")
    weight = b.t().contiguous()
    out: torch.Tensor = op(a.contiguous(), weight, scale, [columns, _DEPTH], added, _BF16, False)
    if not at_weight:
        factor = scale_b.reshape(1, -1) if group.name == "channel" else scale_b
        out = out.to(made.scaled) * (factor.to(made.scaled) if factor.dim() else factor)
    if bias is not None and not inside:
        out = out + bias
    return out.to(out_dtype)


# ---- W8A8 with AMX-FP8 ---------------------------------------------------------------------------


def _requires_amx_fp8(kernel: str, target: Target) -> Verdict:
    found = need.architecture(kernel, target, (AMX_FP8,))
    return found and _library(kernel, target)


def _takes_w8a8(kernel: str, problem: ScaledMMProblem) -> Verdict:
    blocks = kernel == "vllm_cpu_w8a8_block"
    return need.all_of(
        lambda: _both_groups(kernel, problem) if blocks else need.granularity(
            kernel, problem, need.OUTER_PRODUCTS
        ),
        lambda: need.plain_scales(kernel, problem),
        lambda: need.fp8_operands(kernel, problem, (_E4M3,), (_E4M3,)),
        lambda: need.out_dtype(kernel, problem, need.MODEL_DTYPES),
        lambda: need.bias_dtype(kernel, problem, need.MODEL_DTYPES),
        lambda: need.layouts(kernel, problem),
        lambda: _sizes(kernel, problem, _DEPTH if blocks else _COLUMNS),
    )  # fmt: skip


def _both_groups(kernel: str, problem: ScaledMMProblem) -> Verdict:
    act, weight = problem.activation.granularity, problem.weight.granularity
    if act in ("tensor", "token") and _in_blocks(problem):
        return YES
    wants, has = f"per-tensor or per-token x {_BLOCKS}", f"per-{act} x per-{weight}"
    return no("FP8-L003", kernel=kernel, wants=wants, has=has)


def _emit_codes(graph: fx.Graph, site: EmitSite) -> fx.Node:
    keys = str(site.problem.activation), str(site.problem.weight)
    args = (site.a, site.b, site.scale_a, site.scale_b, site.bias, site.out_dtype, *keys)
    return call(graph, torch.ops.fp8pass.vllm_cpu_scaled_mm.default, args, val=site.val)


def _w8a8_kernel(name: str, summary: str) -> Kernel:
    return register(
        Kernel(
            name=name,
            summary=summary,
            kinds=frozenset({"cpu"}),
            requirements=lambda target: _requires_amx_fp8(name, target),
            can_implement=lambda target, problem: _takes_w8a8(name, problem),
            # behind the own product, which needs no packing in each call
            priority=lambda target, problem: 30,
            emit=_emit_codes,
            provenance="numbers tested on x86-avx512 (vLLM 0.32); AMX-FP8 not run on hardware",
            # a block's size is in its key alone
            run=None if name == "vllm_cpu_w8a8_block" else _run,
            library="vllm",
        )
    )


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    act_key: str,
    weight_key: str,
) -> torch.Tensor:
    """The scaled product of fp8 codes, or of int8 ones; arguments as of ``fp8pass::scaled_mm``.

    Raises:
        UnsupportedError: the library is not loaded in this process.
    """
    group = QuantKey.parse(weight_key).scale.group
    if group.name.startswith("group"):
        scale_b = scale_b.repeat_interleave(group.col, 1)[:, : b.shape[1]]
    return _run(a, b, scale_a, scale_b, bias, out_dtype, False)


def _run(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    """``scale_a`` has one element or one per row, ``scale_b`` one, or ``[groups of K, N]``."""
    m, n = a.shape[0], b.shape[1]
    if not m or not n:
        return a.new_empty((m, n), dtype=out_dtype)
    rows = scale_a.to(_F32).reshape(-1, 1)
    if a.dtype == torch.int8:
        return _int8(a, b, rows, scale_b, bias, out_dtype)
    columns = scale_b.to(_F32).reshape(1, 1).expand(1, n) if scale_b.numel() == 1 else scale_b
    weight, scale = vllm_operator("float8_linear_prepack_cpu")(
        b.t().contiguous(), columns.to(_F32).reshape(-1, n).t().contiguous()
    )
    op = vllm_operator("fp8_scaled_mm_with_quant")
    # bf16 holds every code, and one times it is quantised to itself; but for NaN, which is lost
    codes, one = a.to(_BF16), rows.new_ones(1)
    out: torch.Tensor = op(codes, one, False, weight, scale, None, _F32)
    out = (out * rows).masked_fill_(codes.isnan().any(-1, keepdim=True), float("nan"))
    return _finished(out, bias, out_dtype)


def _finished(out: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    return (out if bias is None else out + bias.to(_F32)).to(out_dtype)


VLLM_CPU_W8A8 = _w8a8_kernel(
    "vllm_cpu_w8a8", "vLLM's fp8_scaled_mm_with_quant for CPUs with AMX-FP8"
)
VLLM_CPU_W8A8_BLOCK = _w8a8_kernel(
    "vllm_cpu_w8a8_block", "vLLM's fp8_scaled_mm_with_quant, weight scales per block"
)


# ---- int8 ----------------------------------------------------------------------------------------


def _requires_x86(kernel: str, target: Target) -> Verdict:
    found = need.architecture(kernel, target, _X86)
    return found and _library(kernel, target)


def _takes_int8(target: Target, problem: ScaledMMProblem) -> Verdict:
    name, only = "vllm_cpu_int8", (torch.int8,)
    return need.all_of(
        lambda: need.granularity(name, problem, need.OUTER_PRODUCTS),
        lambda: need.plain_scales(name, problem),
        lambda: need.fp8_operands(name, problem, only, only),
        lambda: need.int32_sum(name, problem),
        lambda: need.out_dtype(name, problem, need.MODEL_DTYPES),
        lambda: need.bias_dtype(name, problem, need.MODEL_DTYPES),
        lambda: need.layouts(name, problem),
        lambda: need.multiples(name, problem, 1),
    )


def _int8(
    a: torch.Tensor,
    b: torch.Tensor,
    rows: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """By a handle that lives as long as the call; a bias is added here, since the dtype that the
    operator wants for it is another one from version to version."""
    create, run, release = map(
        vllm_operator,
        ("create_onednn_scaled_mm_handler", "onednn_scaled_mm", "release_dnnl_matmul_handler"),
    )
    weight = b.t().contiguous().t()
    scale = scale_b.to(_F32).reshape(-1).contiguous()
    made = _F32 if bias is not None else out_dtype
    out = a.new_empty((a.shape[0], b.shape[1]), dtype=made)
    # as for dynamic scales: one per row, applied to float32 sums
    each = rows.expand(a.shape[0], 1).contiguous()
    handle: Any = create(weight, scale, made, True, False, 1)
    try:
        held = torch.tensor(handle, dtype=torch.int64)
        run(out, a.contiguous(), each, None, None, None, held)
    finally:
        release(handle)
    return _finished(out, bias, out_dtype) if bias is not None else out


VLLM_CPU_INT8 = register(
    Kernel(
        name="vllm_cpu_int8",
        summary="vLLM's onednn_scaled_mm of int8 codes, the weight packed in each call",
        kinds=frozenset({"cpu"}),
        requirements=lambda target: _requires_x86("vllm_cpu_int8", target),
        can_implement=_takes_int8,
        # behind torch_int8_cpu (40), which packs nothing
        priority=lambda target, problem: 90,
        emit=_emit_codes,
        provenance="tested on x86-avx512 (vLLM 0.32)",
        run=_run,
        library="vllm",
    )
)
