"""Kernels ``xpu`` and ``xpu_woq``: products of vllm-xpu-kernels, where its library is loaded.

The library is a backend for those who have it, never a dependency: importing
``vllm_xpu_kernels._xpu_C`` before compiling makes it available, and
``Target.parse("xpu-bmg+vllm_xpu")`` names it without having it.

- ``xpu``: ``_xpu_C::fp8_gemm`` (W8A8): activations per tensor or token, static or dynamic, times
  weights per tensor or channel; or groups along a row times blocks.
- ``xpu_woq``: ``_xpu_C::fp8_gemm_w8a16``: activations that are not quantised, which removes their
  quantise (see :mod:`fp8pass.lowerings.to_weight_only`: on request alone).

Rules as in ``csrc/xpu/onednn``. The library tells granularities by shapes: scales of activations
with more than one column are groups, one element is a tensor's, else there is one per token;
weights' scales are blocks beside groups (W8A8) or with more than one row (W8A16), one element is a
tensor's, else there is one per channel. So each scale is given the shape of its recorded
granularity, and what would be taken for another one is refused. Blocks must divide N and K evenly.
Where N leaves a rest, each block of the scale is repeated for blocks of gcd(N, block) columns,
which must be a multiple of 16; a rest of K would need the activations' scale changed as well and is
refused. Scales are copied into the order that the library reads, never altered.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from torch import fx

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.errors import UnsupportedError
from fp8pass.lowerings import conditions as need
from fp8pass.lowerings.emit import call
from fp8pass.lowerings.external import requirements
from fp8pass.lowerings.registry import EmitSite, Kernel, register
from fp8pass.ops.weight_form import WeightForm
from fp8pass.problem import ScaledMMProblem
from fp8pass.quant_key import GroupShape, QuantKey, dtype_name
from fp8pass.reasons import YES, Verdict, no
from fp8pass.target import Target

_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
_RESULTS = (torch.bfloat16, torch.float16)
#: Columns of a block that the library takes are a multiple of this.
_COLUMNS = 16
_LIBRARY = "the library vllm-xpu-kernels"
_PROVENANCE = "not run on hardware (shapes and layouts as in the library's source)"


def _requires(kernel: str, target: Target) -> Verdict:
    return requirements(kernel, target, ("xpu-bmg",), "vllm_xpu", _LIBRARY)


# ---- what both take -----------------------------------------------------------------------------


def _columns(n: int, block: int) -> int:
    """Columns that one scale stands for, so that they divide ``n``."""
    return gcd(n, block)


def _blocks(kernel: str, problem: ScaledMMProblem, rows: int, columns: int) -> Verdict:
    """Blocks of ``[rows, columns]`` that the library tells from other scales, and that fit."""
    n, k = problem.n, problem.k
    known = need.multiples(kernel, problem, 1)
    if not known or n is None or k is None:
        return known
    if k % rows:
        return no("FP8-L009", kernel=kernel, what="K", wants=rows, has=k)
    if k == rows:
        what = f"a single block of {rows} along K, which it takes for scales of another kind"
        return no("FP8-L017", kernel=kernel, what=what)
    width = _columns(n, columns)
    if width % _COLUMNS:
        what = f"blocks of {columns} columns over N = {n} (their gcd {width}, not of {_COLUMNS})"
        return no("FP8-L017", kernel=kernel, what=what)
    return YES


# ---- xpu ----------------------------------------------------------------------------------------


def _granularity(problem: ScaledMMProblem) -> Verdict:
    kernel = "xpu"
    act, weight = problem.activation.scale.group, problem.weight.scale.group
    if not act.name.startswith("group"):
        return need.granularity(kernel, problem, need.OUTER_PRODUCTS)
    if not weight.name.startswith("group") or act.row != 1 or act.col != weight.row:
        wants = "per-group1xG x per-groupGxH"
        return no("FP8-L003", kernel=kernel, wants=wants, has=f"per-{act.name} x per-{weight.name}")
    return _blocks(kernel, problem, weight.row, weight.col)


def _one_dtype(problem: ScaledMMProblem) -> Verdict:
    act, weight = problem.activation.dtype, problem.weight.dtype
    if act == weight:
        return YES
    pair = f"{dtype_name(act)} x {dtype_name(weight)}"
    wants = "one dtype for both"
    return no("FP8-L007", kernel="xpu", what="the pair of dtypes", has=pair, wants=wants)


def _takes(target: Target, problem: ScaledMMProblem) -> Verdict:
    name = "xpu"
    same_as_result = tuple(d for d in _RESULTS if d == problem.out_dtype)
    return need.all_of(
        lambda: need.plain_scales(name, problem),
        lambda: need.fp8_operands(name, problem, _CODES, _CODES, both_e5m2=True),
        lambda: _one_dtype(problem),
        lambda: _granularity(problem),
        lambda: need.out_dtype(name, problem, _RESULTS),
        lambda: need.bias_dtype(name, problem, same_as_result),
        lambda: need.layouts(name, problem),
    )


def _emit(graph: fx.Graph, site: EmitSite) -> fx.Node:
    keys = str(site.problem.activation), str(site.problem.weight)
    args = (site.a, site.b, site.scale_a, site.scale_b, site.bias, site.out_dtype, *keys)
    return call(graph, torch.ops.fp8pass.xpu_scaled_mm.default, args, val=site.val)


XPU = register(
    Kernel(
        name="xpu",
        summary="vllm-xpu-kernels' fp8_gemm (oneDNN)",
        kinds=frozenset({"xpu"}),
        requirements=lambda target: _requires("xpu", target),
        can_implement=_takes,
        priority=lambda target, problem: 30,
        emit=_emit,
        provenance=_PROVENANCE,
        library="vllm_xpu",
    )
)


# ---- xpu_woq ------------------------------------------------------------------------------------


def _weight_granularity(problem: ScaledMMProblem) -> Verdict:
    kernel = "xpu_woq"
    group = problem.weight.scale.group
    if group.name in ("tensor", "channel"):
        return YES
    if min(group.row, group.col) < 1 or group.row != group.col:
        wants = "one scale per tensor, channel or square block of the weight"
        return no("FP8-L003", kernel=kernel, wants=wants, has=group.name)
    known = _blocks(kernel, problem, group.row, group.col)
    if known and problem.n is not None and problem.n % group.col:
        return no("FP8-L009", kernel=kernel, what="N", wants=group.col, has=problem.n)
    return known


def _form(problem: ScaledMMProblem) -> Verdict:
    """The library scales the weight and rounds the product once, bias and all."""
    made = WeightForm.parse(problem.form)
    if made.one_rounding:
        return YES
    blocks = problem.weight.granularity.startswith("group")
    if made.at == "product" and not blocks:
        what = f"a product that is rounded to {dtype_name(made.product)} before it is scaled"
        return no("FP8-L017", kernel="xpu_woq", what=what)
    if problem.bias is not None and made.bias == "after":
        what = f"a bias added to a product that was rounded to {dtype_name(made.product)}"
        return no("FP8-L017", kernel="xpu_woq", what=what)
    return YES


def _takes_woq(target: Target, problem: ScaledMMProblem) -> Verdict:
    name = "xpu_woq"
    activation = problem.activation.dtype
    results = tuple(dtype for dtype in _RESULTS if dtype == activation)
    if not results:
        wants, has = "bfloat16, float16", dtype_name(activation)
        return no("FP8-L007", kernel=name, what="activations of dtype", has=has, wants=wants)
    if problem.weight.dtype not in _CODES:
        wants, has = "float8_e4m3fn, float8_e5m2", dtype_name(problem.weight.dtype)
        return no("FP8-L007", kernel=name, what="weights of dtype", has=has, wants=wants)
    return need.all_of(
        lambda: need.plain_scales(name, problem),
        lambda: _weight_granularity(problem),
        lambda: need.out_dtype(name, problem, results),
        lambda: need.bias_dtype(name, problem, results),
        lambda: need.layouts(name, problem),
        lambda: _form(problem),
    )


def _emit_woq(graph: fx.Graph, site: EmitSite) -> fx.Node:
    args = (
        site.a, site.b, site.scale_b, site.bias, site.out_dtype, str(site.problem.weight),
        site.problem.form,
    )  # fmt: skip
    return call(graph, torch.ops.fp8pass.xpu_w8a16_mm.default, args, val=site.val)


XPU_WOQ = register(
    Kernel(
        name="xpu_woq",
        summary="vllm-xpu-kernels' fp8_gemm_w8a16 (oneDNN): activations stay as they are",
        kinds=frozenset({"xpu"}),
        requirements=lambda target: _requires("xpu_woq", target),
        can_implement=_takes_woq,
        priority=lambda target, problem: 30,
        emit=_emit_woq,
        provenance=_PROVENANCE,
        library="vllm_xpu",
        weight_only=True,
    )
)


# ---- the calls ----------------------------------------------------------------------------------


def _operator(name: str) -> Any:
    """``torch.ops._xpu_C.<name>``, looked up only when it is called."""
    op = getattr(torch.ops._xpu_C, name, None)
    if op is None:
        raise UnsupportedError(
            "this graph was compiled with vllm-xpu-kernels: load its library "
            f"(import vllm_xpu_kernels._xpu_C) before running it; {name} is not there"
        )
    return op


def _weight_scale(scale: torch.Tensor, group: GroupShape, n: int, channel: list[int]) -> Any:
    """The weight's scale in the shape that the library takes for its granularity."""
    scale = scale.to(torch.float32)
    if group.name == "tensor":
        return scale.reshape(1)
    if group.name == "channel":
        return scale.reshape(channel).contiguous()
    width = _columns(n, group.col)
    if width != group.col:
        first = torch.arange(n // width, device=scale.device) * width
        scale = scale.index_select(1, first // group.col)
    return scale.contiguous()


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
    """The scaled product by ``fp8_gemm``; arguments as of ``fp8pass::scaled_mm``.

    Raises:
        UnsupportedError: the library is not loaded in this process.
    """
    op = _operator("fp8_gemm")
    m, n = a.shape[0], b.shape[1]
    if not m or not n:
        return a.new_empty((m, n), dtype=out_dtype)
    act, weight = (QuantKey.parse(key).scale.group for key in (act_key, weight_key))
    first = scale_a.to(torch.float32)
    if act.name == "tensor":
        first = first.reshape(1)
    else:  # rows, with one column per token or more for groups
        first = first.reshape(m, -1).contiguous()
    second = _weight_scale(scale_b, weight, n, [-1])
    # the strides of the result are made from those of the activations
    out: torch.Tensor = op(a.contiguous(), b, out_dtype, first, second, bias)
    return out


def w8a16_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    weight_key: str,
    form: str = "",
) -> torch.Tensor:
    """The weight-only product by ``fp8_gemm_w8a16``; arguments as of ``fp8pass::w8a16_mm``.

    Raises:
        UnsupportedError: the library is not loaded in this process, or the activations are codes.
    """
    if a.dtype not in _RESULTS or a.dtype != out_dtype:
        raise UnsupportedError(f"fp8_gemm_w8a16 does not take {a.dtype} for {out_dtype}")
    op = _operator("fp8_gemm_w8a16")
    m, n = a.shape[0], b.shape[1]
    if not m or not n:
        return a.new_empty((m, n), dtype=out_dtype)
    group = QuantKey.parse(weight_key).scale.group
    scale = _weight_scale(scale_b, group, n, [1, -1])
    out: torch.Tensor = op(a.contiguous(), b, scale, bias)
    return out
