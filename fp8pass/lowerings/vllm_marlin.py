"""Kernel ``vllm_marlin``: vLLM's Marlin product of fp8 weights (W8A16), for GPUs without fp8 too.

Where vLLM's compiled library for CUDA is loaded, and only for those who name it.
Rules as in vLLM 0.21 to 0.33 (``csrc/.../marlin``, ``quantization/utils/marlin_utils_fp8.py``):

- activations and result bf16 or fp16 (Turing: fp16, since 0.32), weights e4m3fn; N a multiple of 64
  and K of 128, or N of 128 and K of 64;
- scales in the dtype of the activations, times the difference of the exponents' biases, their
  columns in the order in which the kernel's threads read them: per channel (one per tensor is
  repeated), where they are applied to the float32 sum, or per 128 rows of ``b``, where they are
  applied to the weight, which is rounded. A scale that is rounded to bf16 moves a whole column by
  2^-9 at most; scales per block do so each by itself, so that they are taken where the source
  rounds them in the same way. A scale of 256 or more becomes infinite, as it does in vLLM;
- a bias is added by the kernel where it has been rounded already. Here it is added behind the
  product, where the source does that, and refused otherwise.

The weight is packed for the kernel in each call: ``fp8pass.prepare`` makes no copy for it, and
``fp8pass::w8a16_mm`` has no operand that could hold one. So it is for comparisons, not for speed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import fx

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.errors import UnsupportedError
from fp8pass.lowerings import conditions as need
from fp8pass.lowerings.emit import call
from fp8pass.lowerings.external import requirements, vllm_operator
from fp8pass.lowerings.registry import EmitSite, Kernel, register
from fp8pass.ops.weight_form import WeightForm
from fp8pass.problem import ScaledMMProblem
from fp8pass.quant_key import QuantKey, dtype_name
from fp8pass.reasons import YES, Verdict, no
from fp8pass.target import NO_MARLIN, Target

NAME = "vllm_marlin"
_BF16, _F16, _F32 = torch.bfloat16, torch.float16, torch.float32
_E4M3 = torch.float8_e4m3fn
_ARCHITECTURES = (
    "sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121",
)  # fmt: skip
_TURING_SINCE = (0, 32)
_DEPTH = 128
#: (multiple of N, multiple of K): the tiles of a block of threads.
_TILES = ((64, 128), (128, 64))
#: Codes become numbers of the activations' dtype by a shift, which leaves the difference of the
#: biases of both exponents, 2^(bits - 1) - 2^3, to the scale.
_BIAS = {_BF16: 2.0**120, _F16: 2.0**8}
#: vLLM's number for e4m3fn: bits of exponent, bits of mantissa, sign, finite values, kind of NaN.
_TYPE = 4 | 3 << 8 | 1 << 16 | 1 << 49 | 2 << 50


def _requirements(target: Target) -> Verdict:
    if NO_MARLIN in target.features:
        has = f"{target.spec} with another part of it"
        return no("FP8-L011", kernel=NAME, wants="vLLM's library with Marlin", target=has)
    found = requirements(NAME, target, _ARCHITECTURES, "vllm", "vLLM's compiled library")
    if found and target.arch == "sm75":
        return need.library_at_least(NAME, target, "vllm", _TURING_SINCE, "Turing")
    return found


def _takes(target: Target, problem: ScaledMMProblem) -> Verdict:
    activation = problem.activation.dtype
    allowed = (_F16,) if target.arch == "sm75" else (_BF16, _F16)
    if activation not in allowed:
        wants, has = ", ".join(map(dtype_name, allowed)), dtype_name(activation)
        return no("FP8-L007", kernel=NAME, what="activations of dtype", has=has, wants=wants)
    if problem.weight.dtype != _E4M3:
        wants, has = dtype_name(_E4M3), dtype_name(problem.weight.dtype)
        return no("FP8-L007", kernel=NAME, what="weights of dtype", has=has, wants=wants)
    return need.all_of(
        lambda: need.plain_scales(NAME, problem),
        lambda: _groups(problem),
        lambda: need.out_dtype(NAME, problem, (activation,)),
        lambda: need.layouts(NAME, problem),
        lambda: _sizes(problem),
        lambda: _form(problem),
        lambda: _bias(problem),
    )


def _groups(problem: ScaledMMProblem) -> Verdict:
    group = problem.weight.scale.group
    if group.name in ("tensor", "channel") or (group.row == _DEPTH and group.col > 0):
        return YES
    wants = f"per-tensor, per-channel or per-group{_DEPTH}xH weight"
    return no("FP8-L003", kernel=NAME, wants=wants, has=f"per-{group.name}")


def _sizes(problem: ScaledMMProblem) -> Verdict:
    known = need.multiples(NAME, problem, 64)
    n, k = problem.n, problem.k
    if not known or n is None or k is None:
        return known
    blocks = problem.weight.granularity.startswith("group")
    if any(not (n % of_n or k % of_k) for of_n, of_k in _TILES) and not (blocks and k % _DEPTH):
        return YES
    return no("FP8-L009", kernel=NAME, what="K", wants=_DEPTH, has=k)


def _form(problem: ScaledMMProblem) -> Verdict:
    made, activation = WeightForm.parse(problem.form), problem.activation.dtype
    blocks = problem.weight.granularity.startswith("group")
    allowed = (activation,) if blocks else (activation, _F32)
    for what, dtype in (("scaling", made.scaled), ("product", made.product)):
        if dtype not in allowed:
            said = f"a {what} in {dtype_name(dtype)} of activations of {dtype_name(activation)}"
            where = " with scales per block" if blocks else ""
            return no("FP8-L017", kernel=NAME, what=said + where)
    return YES


def _bias(problem: ScaledMMProblem) -> Verdict:
    made = WeightForm.parse(problem.form)
    behind = made.bias == "after" and made.product == problem.activation.dtype
    if problem.bias is None or behind:
        return YES
    what = "a bias that is added before the product is rounded"
    return no("FP8-L017", kernel=NAME, what=what)


def _emit(graph: fx.Graph, site: EmitSite) -> fx.Node:
    args = (
        site.a, site.b, site.scale_b, site.bias, site.out_dtype, str(site.problem.weight),
        site.problem.form,
    )  # fmt: skip
    return call(graph, torch.ops.fp8pass.vllm_marlin_w8a16_mm.default, args, val=site.val)


VLLM_MARLIN = register(
    Kernel(
        name=NAME,
        summary="vLLM's Marlin product: fp8 weights made wide in registers, packed in each call",
        kinds=frozenset({"cuda"}),
        requirements=_requirements,
        can_implement=_takes,
        # behind the own kernel and Inductor's code, which pack nothing
        priority=lambda target, problem: 80,
        emit=_emit,
        provenance="tested on sm90 with vLLM 0.21's library; others not run on hardware",
        library="vllm",
        weight_only=True,
        inexact="scales are rounded to the dtype of the activations",
    )
)


# ---- the calls -----------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def _locks(device: torch.device) -> int:
    """How many blocks of threads may wait for one another: four on each multiprocessor."""
    return 4 * int(torch.cuda.get_device_properties(device).multi_processor_count)


def _by_name(op: Any, given: dict[str, Any]) -> Any:
    """Call an operator whose arguments differ from version to version.

    Raises:
        UnsupportedError: it has one that is not known here.
    """
    names = [argument.name for argument in op.default._schema.arguments]
    unknown = [name for name in names if name not in given]
    if unknown:
        raise UnsupportedError(f"{op} of this version of vLLM has the argument {unknown[0]!r}")
    return op(*(given[name] for name in names))


def packed(b: torch.Tensor) -> torch.Tensor:
    """The codes ``b [K, N]`` in the order in which the kernel reads them."""
    k, n = b.shape
    four = b.t().contiguous().view(torch.int32)  # neighbours along K
    given = {
        "b_q_weight": four.t().contiguous(),
        "perm": four.new_empty(0),
        "size_k": k,
        "size_n": n,
        "num_bits": 8,
        "is_a_8bit": False,
    }
    result: torch.Tensor = _by_name(vllm_operator("gptq_marlin_repack"), given)
    return result


def ordered_scale(scale_b: torch.Tensor, key: str, n: int, dtype: torch.dtype) -> torch.Tensor:
    """The scale of ``b`` as ``[1, N]`` or ``[K / 128, N]``, columns as the threads read them."""
    group = QuantKey.parse(key).scale.group
    wide = scale_b.to(_F32)
    if group.name == "tensor":
        wide = wide.reshape(1, 1).expand(1, n)
    elif group.name == "channel":
        wide = wide.reshape(1, n)
    else:
        wide = wide.repeat_interleave(group.col, 1)[:, :n]
    scale = (wide * _BIAS[dtype]).to(dtype)
    rows = scale.shape[0]
    if rows > 1:
        return scale.reshape(rows, -1, 8, 8).transpose(2, 3).reshape(rows, n)
    return scale.reshape(rows, -1, 4, 4, 2).transpose(2, 3).reshape(rows, n)


def w8a16_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    weight_key: str,
    form: str = "",
) -> torch.Tensor:
    """The weight-only product by ``marlin_gemm``; arguments as of ``fp8pass::w8a16_mm``.

    Raises:
        UnsupportedError: the library is not loaded in this process, or another version of it.
    """
    if a.dtype not in _BIAS or a.dtype != out_dtype or b.dtype != _E4M3:
        raise UnsupportedError(f"marlin_gemm does not take {a.dtype} x {b.dtype} for {out_dtype}")
    (m, k), n = a.shape, b.shape[1]
    if not m or not n:
        return a.new_empty((m, n))
    workspace = torch.zeros(_locks(a.device), dtype=torch.int32, device=a.device)
    given: dict[str, Any] = {
        "a": a.contiguous(),
        "b_q_weight": packed(b),
        "b_scales": ordered_scale(scale_b, weight_key, n, a.dtype),
        "workspace": workspace,
        "b_type_id": _TYPE,
        "size_m": m,
        "size_n": n,
        "size_k": k,
        "is_k_full": True,
        "use_atomic_add": False,
        "use_fp32_reduce": True,
        "is_zp_float": False,
    }
    absent = (
        "c_or_none", "b_bias_or_none", "a_scales", "global_scale", "b_zeros_or_none",
        "g_idx_or_none", "perm_or_none",
    )  # fmt: skip
    op = vllm_operator("marlin_gemm")
    out: torch.Tensor = _by_name(op, given | dict.fromkeys(absent))
    return out if bias is None else (out + bias).to(out_dtype)
