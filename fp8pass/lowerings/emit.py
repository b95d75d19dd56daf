"""Helpers that insert nodes with ``meta["val"]``, and give operands the form that torch's op wants.

A value is taken from the site where it is known already: running an operator on fake tensors costs
about a millisecond, and a model has hundreds of sites. Each node gets a tensor of its own, since
Inductor takes nodes whose values share a storage for views of one another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8pass.errors import PassError
from fp8pass.lowerings.registry import EmitSite

aten = torch.ops.aten

#: Byte alignment of a row, in fp8 elements, that cuBLASLt, hipBLASLt and CUTLASS ask for.
_ROW_ALIGNMENT = 16
_UNIT_SCALE = "fp8pass_unit_scale"


def value(node: fx.Node) -> torch.Tensor:
    """The fake tensor of a node. Raises :class:`PassError` if it has none."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        raise PassError(f"node {node.name} has no tensor in meta['val'], but {val!r}")
    return val


def call(
    graph: fx.Graph,
    target: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    val: torch.Tensor | None = None,
) -> fx.Node:
    """Insert ``target(*args, **kwargs)``; ``val``, if not given, by running it on fake tensors."""
    node = graph.call_function(target, args, kwargs or {})
    if val is None:
        fake = fx.node.map_arg((args, kwargs or {}), value)
        val = target(*fake[0], **fake[1])
    node.meta["val"] = val
    return node


def matrix_like(val: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor of the shape of ``val`` with storage of its own."""
    return val.new_empty(val.shape, dtype=dtype)


def unit_scale(graph: fx.Graph, like: fx.Node) -> fx.Node:
    """A float32 one on the device of ``like``: one per graph and device, at the graph's top."""
    val = value(like)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    node = first
    while _UNIT_SCALE in node.meta:
        if node.meta[_UNIT_SCALE] == val.device:
            return node
        node = node.next
    with graph.inserting_before(first):
        kwargs = {"dtype": torch.float32, "device": val.device}
        one = call(
            graph, aten.full.default, ([], 1.0), kwargs, val=val.new_empty((), dtype=torch.float32)
        )
    one.meta[_UNIT_SCALE] = val.device
    return one


def scalar_scales(graph: fx.Graph, scale_a: fx.Node, scale_b: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Two per-tensor scales of the same rank (Inductor refuses ``[]`` beside ``[1]``)."""
    if value(scale_a).dim() == value(scale_b).dim():
        return scale_a, scale_b
    return _scalar(graph, scale_a), _scalar(graph, scale_b)


def _scalar(graph: fx.Graph, scale: fx.Node) -> fx.Node:
    if value(scale).dim() == 0:
        return scale
    return call(graph, aten.reshape.default, (scale, []))


def column(graph: fx.Graph, scale: fx.Node) -> fx.Node:
    """A per-token scale as ``[M, 1]``."""
    if value(scale).dim() == 2:
        return scale
    return call(graph, aten.reshape.default, (scale, [-1, 1]))


def row(graph: fx.Graph, scale: fx.Node) -> fx.Node:
    """A per-channel scale as ``[1, N]``."""
    if value(scale).dim() == 2:
        return scale
    return call(graph, aten.reshape.default, (scale, [1, -1]))


def dense_scale(graph: fx.Graph, scale: fx.Node) -> fx.Node:
    """A 2-D scale with unit strides: torch checks them even on dimensions of size one."""
    val = value(scale)
    outer, inner = val.stride()
    if _is(inner, 1) and (_is(outer, 1) or _is(val.shape[0], 1)):
        return scale
    return _contiguous(graph, scale)


def aligned_rows(graph: fx.Graph, matrix: fx.Node, *, transposed: bool = False) -> fx.Node:
    """``matrix`` with rows (columns if ``transposed``) that start at multiples of 16 elements.

    Padding between rows is fine (Inductor itself pads), an odd pitch is copied away.
    """
    val = value(matrix)
    width, pitch = (val.shape[0], val.stride(1)) if transposed else (val.shape[1], val.stride(0))
    offset = val.storage_offset()
    known = all(isinstance(number, int) for number in (width, pitch, offset))
    if known and pitch >= width and not pitch % _ROW_ALIGNMENT and not offset % _ROW_ALIGNMENT:
        return matrix
    if not transposed:
        return _contiguous(graph, matrix)
    weight = call(graph, aten.permute.default, (matrix, [1, 0]))
    return call(graph, aten.permute.default, (_contiguous(graph, weight), [1, 0]))


def packed_rows(graph: fx.Graph, matrix: fx.Node, *, transposed: bool = False) -> fx.Node:
    """``matrix`` with rows (columns if ``transposed``) that follow each other without padding."""
    if not transposed:
        return _contiguous(graph, matrix)
    weight = call(graph, aten.permute.default, (matrix, [1, 0]))
    return call(graph, aten.permute.default, (_contiguous(graph, weight), [1, 0]))


def aligned(matrix: torch.Tensor) -> torch.Tensor:
    """``matrix`` with rows that start at multiples of 16 bytes; a copy only where they do not."""
    if matrix.stride(1) == 1 and not matrix.stride(0) % 16 and not matrix.data_ptr() % 16:
        return matrix
    return matrix.contiguous()


def matrices(graph: fx.Graph, site: EmitSite) -> tuple[fx.Node, fx.Node]:
    """Both matrices, copied only where the distance of rows is one that the libraries refuse."""
    if site.problem.packed or site.target.kind == "cpu":
        return site.a, site.b
    return aligned_rows(graph, site.a), aligned_rows(graph, site.b, transposed=True)


def padded_rows(matrix: torch.Tensor, multiple: int, value: float = 0.0) -> torch.Tensor:
    """``matrix`` with rows of ``value`` (fp8: of zeros) added up to a multiple; or itself."""
    missing = -matrix.shape[0] % multiple
    if not missing:
        return matrix
    if matrix.dtype.itemsize == 1:  # as bytes: not every operation of torch takes fp8
        raw = torch.nn.functional.pad(matrix.view(torch.uint8), (0, 0, 0, missing))
        return raw.view(matrix.dtype)
    return torch.nn.functional.pad(matrix, (0, 0, 0, missing), value=value)


def rows_innermost(matrix: torch.Tensor) -> torch.Tensor:
    """The same matrix stored by columns: strides ``(1, rows)``, also where a dim has size one; a
    copy only where it is not."""
    turned = matrix.t()
    strides = (turned.shape[1], 1)
    dense = torch.contiguous_format
    return matrix if turned.stride() == strides else turned.clone(memory_format=dense).t()


def side_by_side(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``[rows, 2 * width]``: the tensor that both are halves of, or a copy that joins them."""
    width = gate.shape[-1]
    strides = gate.stride()
    halves = (
        gate.dim() == 2
        and strides == up.stride()
        and strides[1] == 1
        and strides[0] >= 2 * width
        and gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
        and up.storage_offset() == gate.storage_offset() + width
    )
    if halves:
        return gate.as_strided((gate.shape[0], 2 * width), strides)
    return torch.cat((gate, up), -1).view(-1, 2 * width)


def _contiguous(graph: fx.Graph, node: fx.Node) -> fx.Node:
    memory = {"memory_format": torch.contiguous_format}
    return call(graph, aten.clone.default, (node,), memory)


def _is(size: Any, number: int) -> bool:
    """Known statically to be ``number``: a symbolic size is not asked, which would add a guard."""
    return isinstance(size, int) and size == number


def epilogue(
    graph: fx.Graph, site: EmitSite, out: fx.Node, scale_a: fx.Node | None, scale_b: fx.Node | None
) -> fx.Node:
    """Scales (those given), bias and the one rounding behind a float32 product, pointwise."""

    def wide(target: torch._ops.OpOverload, other: fx.Node) -> fx.Node:
        return call(graph, target, (out, other), val=matrix_like(site.val, torch.float32))

    if scale_a is not None:
        if site.problem.activation.granularity == "token":
            scale_a = column(graph, scale_a)
        out = wide(aten.mul.Tensor, scale_a)
    if scale_b is not None:
        if site.problem.weight.granularity == "channel":
            scale_b = row(graph, scale_b)
        out = wide(aten.mul.Tensor, scale_b)
    if site.bias is not None:  # float32 + a narrower dtype is computed in float32
        out = wide(aten.add.Tensor, site.bias)
    if site.out_dtype == torch.float32:
        return out
    # not aten._to_copy: Inductor has no lowering for it after decomposition
    cast = torch.ops.prims.convert_element_type.default
    return call(graph, cast, (out, site.out_dtype), val=site.val)
