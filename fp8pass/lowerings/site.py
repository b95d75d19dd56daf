"""From a generic scaled product in a graph to the problem it poses and what ``emit`` needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx

from fp8pass.lowerings.emit import aten, call
from fp8pass.lowerings.registry import EmitSite
from fp8pass.ops.product_form import ProductForm
from fp8pass.problem import MRange, ScaledMMProblem, unquantised
from fp8pass.quant_key import QuantKey
from fp8pass.site_draft import Draft
from fp8pass.spellings.walk import is_call, same, tensor, val
from fp8pass.target import Target


def _static(size: Any) -> int | None:
    return size if type(size) is int else None


#: (symbol, its range) of the compile that is running; see :func:`known_range`.
_known: ContextVar[tuple[Any, MRange] | None] = ContextVar("fp8pass_known_range", default=None)


@contextmanager
def known_range(symbol: Any, values: MRange) -> Iterator[None]:
    """Within, a size that is ``symbol`` has the range ``values``, which the caller answers for.

    For a caller that runs the compiled graph for these numbers alone, and for all of them, whatever
    the shape environment assumes: torch excludes 0 and 1 from a symbolic size, and a program that
    drops its guards runs them all the same.

    Args:
        symbol: the sympy symbol of a size, as in ``size.node.expr``.
    """
    token = _known.set((symbol, values))
    try:
        yield
    finally:
        _known.reset(token)


def m_range(size: Any) -> MRange:
    """The range of a size: one number if static, else what is known of it.

    What that is: :func:`known_range`, else the shape environment's bounds.
    """
    if type(size) is int:
        return MRange(size, size)
    known = _known.get()
    if known is not None and known[0] == getattr(getattr(size, "node", None), "expr", None):
        return known[1]
    try:
        bounds = size.node.shape_env.bound_sympy(size.node.expr)
        lo = int(bounds.lower)
        hi = int(bounds.upper) if bounds.upper.is_Integer and bounds.upper < 2**31 else None
    except (AttributeError, TypeError, ValueError, OverflowError):
        return MRange()
    return MRange(max(lo, 0), hi)


def _layout(value: torch.Tensor) -> str:
    """``row``, ``col`` or ``strided``; a dim of size one has no stride that could be wrong."""
    rows, cols = value.shape
    row_stride, col_stride = value.stride()
    if same(col_stride, 1) or same(cols, 1):
        return "row"
    if same(row_stride, 1) or same(rows, 1):
        return "col"
    return "strided"


def _b_layout(value: torch.Tensor) -> str:
    """As :func:`_layout`, but a weight that is both (one row or column) is called ``col``."""
    rows, cols = value.shape
    row_stride, col_stride = value.stride()
    if same(row_stride, 1) or same(rows, 1):
        return "col"
    return "row" if same(col_stride, 1) or same(cols, 1) else "strided"


def _packed(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (same(a.stride(0), a.shape[1]) or same(a.shape[0], 1)) and (
        same(b.stride(1), b.shape[0]) or same(b.shape[1], 1)
    )


def problem_of(draft: Draft, target: Target) -> ScaledMMProblem:
    """The problem of a ``fp8pass::scaled_mm`` or ``fp8pass::w8a16_mm`` node."""
    if is_call(draft.node, torch.ops.fp8pass.w8a16_mm.default):
        return _weight_only_problem(draft.node)
    a, b, _, _, bias, out_dtype, act_key, weight_key, fast, prepared, form, zero = _arguments(
        draft.node
    )
    va, vb = val(a), val(b)
    vbias, copy = tensor(bias), tensor(prepared)
    return ScaledMMProblem(
        activation=QuantKey.parse(act_key),
        weight=QuantKey.parse(weight_key),
        m=m_range(va.shape[0]),
        n=_static(vb.shape[1]),
        k=_static(va.shape[1]),
        out_dtype=out_dtype,
        bias=None if vbias is None else vbias.dtype,
        use_fast_accum=bool(fast),
        a_layout=_layout(va),
        b_layout=_b_layout(vb),
        packed=_packed(va, vb),
        prepared=prepared is not None,
        device_type=va.device.type,
        zero=ProductForm.parse(form).zero,
        zero_dtype=None if zero is None else val(zero).dtype,
        prepared_dtype=None if copy is None else copy.dtype,
    )


def _weight_only_problem(node: fx.Node) -> ScaledMMProblem:
    a, b, _, bias, out_dtype, weight_key, *rest = node.args
    return weight_only_problem(
        val(a), val(b), tensor(bias), out_dtype, str(weight_key), str((*rest, "")[0])
    )


def weight_only_problem(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: Any,
    weight_key: str,
    form: str = "",
) -> ScaledMMProblem:
    """The problem of a product of activations ``a`` that are not quantised."""
    return ScaledMMProblem(
        activation=unquantised(a.dtype),
        weight=QuantKey.parse(weight_key),
        m=m_range(a.shape[0]),
        n=_static(b.shape[1]),
        k=_static(a.shape[1]),
        out_dtype=out_dtype,
        bias=None if bias is None else bias.dtype,
        a_layout=_layout(a),
        b_layout=_b_layout(b),
        packed=_packed(a, b),
        device_type=a.device.type,
        form=form,
    )


def emit_site(draft: Draft, problem: ScaledMMProblem, target: Target, numerics: str) -> EmitSite:
    """The operands of such a node for a kernel's ``emit``."""
    if problem.weight_only:
        operands: tuple[Any, ...] = tuple(draft.node.args[:5])
        left, weight, scale, bias, out_dtype = operands
        value = val(draft.node)
        return EmitSite(
            left, weight, scale, scale, bias, None, out_dtype, problem, target, numerics, value
        )
    a, b, scale_a, scale_b, bias, out_dtype, _, _, _, prepared, _, zero = _arguments(draft.node)
    with draft.node.graph.inserting_before(draft.node):
        scale_a = _scale(draft.node.graph, scale_a, problem.activation.granularity)
        scale_b = _scale(draft.node.graph, scale_b, problem.weight.granularity)
    # the generic node dies with this lowering, so its fake value can move to the new one
    value = val(draft.node)
    return EmitSite(
        a, b, scale_a, scale_b, bias, prepared, out_dtype, problem, target, numerics, value,
        zero,
    )  # fmt: skip


def _scale(graph: fx.Graph, scale: fx.Node, granularity: str) -> fx.Node:
    """A scale as kernels expect it: float32, ``[M, 1]`` or ``[1, N]``, with memory of its own.

    Only an operator that the model emitted itself may come with another.
    """
    value = val(scale)
    if value.dtype != torch.float32:
        cast = torch.ops.prims.convert_element_type.default
        scale = call(graph, cast, (scale, torch.float32))
    if granularity in ("token", "channel"):
        lonely = 1 if granularity == "token" else 0
        if value.dim() != 2 or not same(value.shape[lonely], 1):
            sizes = [-1, 1] if granularity == "token" else [1, -1]
            scale = call(graph, aten.reshape.default, (scale, sizes))
        if any(type(s) is int and s == 0 for s in val(scale).stride()):  # expanded
            memory = {"memory_format": torch.contiguous_format}
            scale = call(graph, aten.clone.default, (scale,), memory)
    return scale


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    assert len(node.args) in (10, 11, 12), node.format_node()
    return (*node.args, *("", None)[len(node.args) - 10 :])
