"""Kernels ``torch_dequant``, ``torch_int8`` and ``torch_int8_cpu``: products written out as aten.

- ``torch_dequant``: codes made float32, multiplied by their scale there if it is one per block,
  then a float32 product, scales, bias and one rounding. It takes what no other kernel takes, at
  the price of a float32 copy of the weight at each call; every other kernel comes first. A product
  of int8 codes is cut along K into products whose float32 sums are exact, which are added up in
  float64.
- ``torch_int8``: ``aten._int_mm``, then scales, bias and one rounding as pointwise work. The limits
  on CUDA (more than 16 rows, K and N multiples of 8) are those that users met and reported
  (pytorch/pytorch#178469, keras-team/keras#19207); a CPU has none.
"""

from __future__ import annotations

import torch
from torch import fx

from fp8pass.lowerings import conditions as need
from fp8pass.lowerings.emit import aten, call, epilogue, matrix_like, value
from fp8pass.lowerings.registry import EmitSite, Kernel, register
from fp8pass.problem import MRange, ScaledMMProblem
from fp8pass.quant_key import GroupShape
from fp8pass.reasons import Verdict
from fp8pass.target import Target

#: Summands of a product of int8 codes (and of these less an int8 zero point) whose sum is below
#: 2^24, so that float32 holds it and every sum on the way, in whatever order it is added up.
_EXACT_SUMMANDS, _EXACT_LESS_ZERO = 2**24 // 128**2, 2**24 // (255 * 128)
#: An int8 zero point leaves int32 sums and float32 differences exact, however it is taken off.
_SMALL_ZEROS = tuple(f"{how} int8" for how in ("int32", "int64", "float32", "codes"))
#: Wider ones are taken off a product of integers as the source does.
_WHOLE_ZEROS = (
    "int32 int32",
    "int64 int32",
    "int64 int64",
    "float32 int32",
    "float32 int64",
    "float32 float32",
    "codes int32",
)
#: The source subtracts them from float32 codes, and so does ``torch_dequant``.
_LESS_ZEROS = ("codes int32", "codes int64", "codes float32")
_CONVERT = torch.ops.prims.convert_element_type.default


# ---- torch_dequant -------------------------------------------------------------------------------


def _takes_dequant(target: Target, problem: ScaledMMProblem) -> Verdict:
    name = "torch_dequant"
    return need.all_of(
        lambda: need.scales_along(name, problem),
        lambda: need.plain_scales(name, problem, zero_point=True),
        lambda: need.exact_zero_point(name, problem, _zeros(problem)),
        lambda: need.converts(name, target, problem),
        lambda: need.out_dtype(name, problem, need.MODEL_DTYPES),
        lambda: need.bias_dtype(name, problem, need.MODEL_DTYPES),
    )


def _of_integers(problem: ScaledMMProblem) -> bool:
    """Whether it is a product of int8 codes, none of which is scaled before it."""
    keys = (problem.activation, problem.weight)
    return all(k.dtype == torch.int8 and not k.granularity.startswith("group") for k in keys)


def _zeros(problem: ScaledMMProblem) -> tuple[str, ...]:
    """How a zero point may be taken off: of scaled codes only before they are."""
    if _of_integers(problem):
        return (*_SMALL_ZEROS, *_WHOLE_ZEROS, *_LESS_ZEROS)
    return ("codes int8", *_LESS_ZEROS)


def _emit_dequant(graph: fx.Graph, site: EmitSite) -> fx.Node:
    operands = []
    left: list[fx.Node | None] = []
    less = site.zero is not None and site.problem.zero == "codes"
    for codes, scale, key in (
        (site.a, site.scale_a, site.problem.activation),
        (site.b, site.scale_b, site.problem.weight),
    ):
        wide = call(graph, _CONVERT, (codes, torch.float32), val=_like(value(codes), torch.float32))
        if codes is site.a and less:
            assert site.zero is not None
            zero = converted(graph, zero_column(graph, site.zero), torch.float32)
            wide = call(graph, aten.sub.Tensor, (wide, zero))
        blocks = key.granularity.startswith("group")
        if blocks:
            spread = spread_scale(graph, scale, key.scale.group, value(codes))
            wide = call(graph, aten.mul.Tensor, (wide, spread))
        operands.append(wide)
        left.append(None if blocks else scale)
    if not _of_integers(site.problem):
        wanted = matrix_like(site.val, torch.float32)
        out = call(graph, aten.mm.default, tuple(operands), val=wanted)
        return epilogue(graph, site, out, *left)
    a, b = operands
    out = _exact_product(graph, site, a, b, _EXACT_LESS_ZERO if less else _EXACT_SUMMANDS)
    how = "none" if site.zero is None or less else site.problem.zero
    if how in ("int32", "int64"):
        total = matrix_like(site.val, torch.int32)
        out = call(graph, _CONVERT, (out, torch.int32), val=total)
    return _scaled(graph, site, out, how)


def _exact_product(
    graph: fx.Graph, site: EmitSite, a: fx.Node, b: fx.Node, summands: int
) -> fx.Node:
    """``a @ b`` of whole numbers in float32, the sum over K exact.

    In float32 if that many ``summands`` are all, else in float64; of a K that is not known the
    whole product is in float64.
    """
    depth = site.problem.k
    narrow, wide = matrix_like(site.val, torch.float32), matrix_like(site.val, torch.float64)
    if depth is None:
        a, b = (converted(graph, node, torch.float64) for node in (a, b))
        return call(graph, aten.mm.default, (a, b), val=wide)
    if depth <= summands:
        return call(graph, aten.mm.default, (a, b), val=narrow)
    out: fx.Node | None = None
    for start in range(0, depth, summands):
        end = min(start + summands, depth)
        left = call(graph, aten.slice.Tensor, (a, 1, start, end))
        right = call(graph, aten.slice.Tensor, (b, 0, start, end))
        narrow, wide = matrix_like(site.val, torch.float32), matrix_like(site.val, torch.float64)
        part = call(graph, aten.mm.default, (left, right), val=narrow)
        part = call(graph, _CONVERT, (part, torch.float64), val=wide)
        if out is not None:
            sums = matrix_like(site.val, torch.float64)
            part = call(graph, aten.add.Tensor, (out, part), val=sums)
        out = part
    assert out is not None
    return out


def _like(val: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A fake tensor with the shape and the strides of ``val``."""
    return torch.empty_like(val, dtype=dtype)


def spread_scale(graph: fx.Graph, scale: fx.Node, group: GroupShape, like: torch.Tensor) -> fx.Node:
    """A scale per block as one per element of the matrix ``like``, without asking its rows."""
    for dim, block in enumerate((group.row, group.col)):
        if block <= 1:
            continue
        other = value(scale).shape[1]
        count = value(scale).shape[dim]
        scale = call(graph, aten.unsqueeze.default, (scale, dim + 1))
        sizes = [-1, block, -1] if dim == 0 else [-1, -1, block]
        scale = call(graph, aten.expand.default, (scale, sizes))
        merged = [count * block, other] if dim == 0 else [-1, count * block]
        scale = call(graph, aten.reshape.default, (scale, merged))
        if count * block != like.shape[dim]:
            scale = call(graph, aten.slice.Tensor, (scale, dim, 0, like.shape[dim]))
    return scale


TORCH_DEQUANT = register(
    Kernel(
        name="torch_dequant",
        summary="codes made float32, product, scales and bias in float32: the last resort",
        kinds=frozenset({"cpu", "cuda", "rocm"}),
        requirements=need.always,
        can_implement=_takes_dequant,
        priority=lambda target, problem: 200,
        emit=_emit_dequant,
        provenance="tested on x86-avx2 and sm90; others not run on hardware",
    )
)


# ---- torch_int8 ----------------------------------------------------------------------------------


def _takes_int8(name: str, target: Target, problem: ScaledMMProblem) -> Verdict:
    only = (torch.int8,)
    return need.all_of(
        lambda: need.granularity(name, problem, need.OUTER_PRODUCTS),
        lambda: need.plain_scales(name, problem, zero_point=True),
        lambda: need.exact_zero_point(name, problem, (*_SMALL_ZEROS, *_WHOLE_ZEROS)),
        lambda: need.fp8_operands(name, problem, only, only),
        lambda: need.int32_sum(name, problem),
        lambda: need.out_dtype(name, problem, need.MODEL_DTYPES),
        lambda: need.bias_dtype(name, problem, need.MODEL_DTYPES),
    )


def _takes_int8_cuda(target: Target, problem: ScaledMMProblem) -> Verdict:
    name = "torch_int8"
    return need.all_of(
        lambda: _takes_int8(name, target, problem),
        lambda: need.layouts(name, problem),
        lambda: need.multiples(name, problem, 8),
    )


def converted(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """``node`` in ``dtype``."""
    return node if value(node).dtype == dtype else call(graph, _CONVERT, (node, dtype))


def zero_column(graph: fx.Graph, zero: fx.Node) -> fx.Node:
    """A zero point of one number as 0-d, or one per row as ``[M, 1]``."""
    held = value(zero)
    if all(type(size) is int and size == 1 for size in held.shape):
        return zero if held.dim() == 0 else call(graph, aten.reshape.default, (zero, []))
    return zero if held.dim() == 2 else call(graph, aten.reshape.default, (zero, [-1, 1]))


def take_off(graph: fx.Graph, site: EmitSite, out: fx.Node, dtype: torch.dtype) -> fx.Node:
    """``out - zero * sum(b)`` in ``dtype``; the sums themselves are whole numbers."""
    assert site.zero is not None
    whole = torch.int64 if dtype == torch.int64 else torch.int32
    sums = call(graph, aten.sum.dim_IntList, (site.b, [0], True), {"dtype": whole})
    zero = converted(graph, zero_column(graph, site.zero), dtype)
    off = call(graph, aten.mul.Tensor, (zero, converted(graph, sums, dtype)))
    out = converted(graph, out, dtype)
    return call(graph, aten.sub.Tensor, (out, off), val=matrix_like(site.val, dtype))


def _scaled(graph: fx.Graph, site: EmitSite, out: fx.Node, how: str) -> fx.Node:
    """The exact ``out`` of products of codes, less a zero point (``how``), in float32, scaled."""
    if how in ("int32", "int64"):
        out = take_off(graph, site, out, torch.int32 if how == "int32" else torch.int64)
    if value(out).dtype != torch.float32:
        wide = matrix_like(site.val, torch.float32)
        out = call(graph, _CONVERT, (out, torch.float32), val=wide)
    if how == "float32":
        out = take_off(graph, site, out, torch.float32)
    return epilogue(graph, site, out, site.scale_a, site.scale_b)


def _emit_int8(graph: fx.Graph, site: EmitSite) -> fx.Node:
    total = matrix_like(site.val, torch.int32)
    out = call(graph, aten._int_mm.default, (site.a, site.b), val=total)
    how = site.problem.zero
    if how == "codes":  # the same whole number, in as many bits as it may take
        how = "int32" if site.problem.zero_dtype == torch.int8 else "int64"
    return _scaled(graph, site, out, how)


TORCH_INT8 = register(
    Kernel(
        name="torch_int8",
        summary="torch._int_mm, then scales and bias pointwise",
        kinds=frozenset({"cuda"}),
        requirements=need.always,
        can_implement=_takes_int8_cuda,
        priority=lambda target, problem: 40,
        emit=_emit_int8,
        provenance="tested on sm90 (limits as users reported them)",
        rows=MRange(17),
    )
)

TORCH_INT8_CPU = register(
    Kernel(
        name="torch_int8_cpu",
        summary="torch._int_mm, then scales and bias pointwise",
        kinds=frozenset({"cpu"}),
        requirements=need.always,
        can_implement=lambda target, problem: _takes_int8("torch_int8_cpu", target, problem),
        priority=lambda target, problem: 40,
        emit=_emit_int8,
        provenance="tested on x86-avx2",
    )
)
