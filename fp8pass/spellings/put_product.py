"""Puts a generic product in the place of one that was spelled without scales inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8pass.ops.product_form import ProductForm
from fp8pass.spellings.dequantised import DequantisedMatch, keys_of
from fp8pass.spellings.library_ops import ProductMatch
from fp8pass.spellings.operands import Operand
from fp8pass.spellings.put_zero_point import clamped_zero
from fp8pass.spellings.walk import VIEWS, aten, is_call, one_element, same, val
from fp8pass.spellings.weight_only import WeightOnlyMatch
from fp8pass.workbench import Workbench

_CONVERT = torch.ops.prims.convert_element_type.default
_SAME_MEMORY = (aten.clone.default, aten.alias.default)


def put_dequantised(bench: Workbench, found: DequantisedMatch) -> tuple[fx.Node, fx.Node]:
    """The generic product behind the root, and its result in the shape of the root."""
    root = found.root
    act_key, weight_key = keys_of(found)
    with bench.graph.inserting_before(root.next):
        a = _codes(bench, found.a, root, found.batch)
        b = _codes(bench, found.b, root, found.batch)
        scales = []
        for given, kind in ((found.scale_a, act_key), (found.scale_b, weight_key)):
            if given is None:
                scales.append(_one(bench, root))
            else:
                scales.append(_scale(bench, *given, kind.split("/")[2], root))
        form = "" if found.form == ProductForm() else str(found.form)
        args: tuple[Any, ...] = (
            a, b, *scales, found.bias, found.out_dtype, act_key, weight_key,
            found.use_fast_accum, None,
        )  # fmt: skip
        if form:
            args = (*args, form)
        if found.a.zero is not None:
            args = (*args, _zero(bench, found.a.zero, root))
        sizes = (val(a).shape[0], val(b).shape[1])
        value = bench.fresh(val(root), sizes, found.out_dtype)
        node = bench.call(torch.ops.fp8pass.scaled_mm.default, args, root, value)
        result = node
        if found.batch:
            result = bench.call(aten.unsqueeze.default, (result, 0), root)
        for view in found.views:
            target = aten.reshape.default if _reshapes(view) else view.target
            result = bench.call(target, (result, *view.args[1:]), root)
    return node, result


def library_operands(bench: Workbench, found: ProductMatch) -> tuple[fx.Node, fx.Node, fx.Node]:
    """``(b, scale_a, scale_b)`` of a library's product as the generic operator takes them.

    The library's weight may be ``[N, K]``, and its scales 1-D or oriented as that is.
    """
    root, kind = found.root, found.weight_key.split("/")[2]
    b, scale_a, scale_b = found.weight, found.scale_a, found.scale_b
    with bench.graph.inserting_before(root):
        if not found.turned:
            b = bench.call(aten.permute.default, (b, [1, 0]), root)
        if found.act_key.endswith("token") and val(scale_a).dim() == 1:
            scale_a = bench.call(aten.unsqueeze.default, (scale_a, -1), root)
        if kind == "channel" and val(scale_b).dim() == 1:
            scale_b = bench.call(aten.unsqueeze.default, (scale_b, 0), root)
        elif (kind == "channel" and not same(val(scale_b).shape[0], 1)) or (
            kind.startswith("group") and not found.turned
        ):
            scale_b = bench.call(aten.permute.default, (scale_b, [1, 0]), root)
    return b, scale_a, scale_b


def put_weight_only(bench: Workbench, found: WeightOnlyMatch) -> tuple[fx.Node, fx.Node]:
    """``fp8pass::w8a16_mm`` behind the root, and its result in the shape of the root."""
    root = found.root
    scale, kind, transposed = found.scale
    with bench.graph.inserting_before(root.next):
        a = found.a
        for view in reversed(found.a_views):
            target = aten.reshape.default if _reshapes(view) else view.target
            a = bench.call(target, (a, *view.args[1:]), root)
        b = _codes(bench, found.b, root, batch=False)
        if kind != "tensor":
            scale = _scale(bench, scale, kind, transposed, kind, root)
        elif val(scale).dim() > 2:
            scale = _reshape(bench, scale, [1], root)
        args = (a, b, scale, found.bias, found.out_dtype, found.weight_key, str(found.form), "")
        sizes = (val(a).shape[0], val(b).shape[1])
        value = bench.fresh(val(root), sizes, found.out_dtype)
        node = bench.call(torch.ops.fp8pass.w8a16_mm.default, args, root, value)
        result = node
        for view in found.views:
            target = aten.reshape.default if _reshapes(view) else view.target
            result = bench.call(target, (result, *view.args[1:]), root)
    return node, result


def _reshapes(node: fx.Node) -> bool:
    return is_call(node, *VIEWS) and node.target not in (
        aten.unsqueeze.default,
        aten.squeeze.dim,
    )


def _codes(bench: Workbench, operand: Operand, like: fx.Node, batch: bool) -> fx.Node:
    """The codes, moved as the values made of them were."""
    node = operand.codes
    for move in operand.moves:
        if move.target in _SAME_MEMORY:
            continue
        target = aten.reshape.default if _reshapes(move) else move.target
        node = bench.call(target, (node, *move.args[1:]), like)
    return bench.call(aten.squeeze.dim, (node, 0), like) if batch else node


def _scale(
    bench: Workbench,
    scale: fx.Node,
    kind: str,
    transposed: bool,
    granularity: str,
    like: fx.Node,
) -> fx.Node:
    """A scale in the shape that the generic operator documents."""
    value = val(scale)
    if granularity == "tensor":
        return scale if value.dim() <= 2 else _reshape(bench, scale, [], like)
    if granularity == "token":
        fits = value.dim() == 2 and same(value.shape[1], 1)
        return scale if fits else _reshape(bench, scale, [-1, 1], like)
    if granularity == "channel":
        fits = value.dim() == 2 and same(value.shape[0], 1)
        return scale if fits else _reshape(bench, scale, [1, -1], like)
    if value.dim() > 2:  # one per block, with dims of size one beside those of the blocks
        scale = _reshape(bench, scale, [-1, value.shape[-2]], like)
    return bench.call(aten.permute.default, (scale, [1, 0]), like) if transposed else scale


def _zero(bench: Workbench, zero: fx.Node, like: fx.Node) -> fx.Node:
    """A zero point of one element, or as ``[M, 1]``."""
    value = val(zero)
    if value.dtype != torch.int8 and clamped_zero(zero):  # fits, and more kernels take it
        zero = bench.call(_CONVERT, (zero, torch.int8), like)
    if one_element(value) or (value.dim() == 2 and same(value.shape[1], 1)):
        return zero
    return _reshape(bench, zero, [-1, 1], like)


def _reshape(bench: Workbench, node: fx.Node, sizes: list[int], like: fx.Node) -> fx.Node:
    return bench.call(aten.reshape.default, (node, sizes), like)


def _one(bench: Workbench, like: fx.Node) -> fx.Node:
    """A scale of one, for an operand that has none."""
    node = bench.graph.call_function(
        aten.full.default, ([], 1.0), {"dtype": torch.float32, "device": val(like).device}
    )
    node.meta["val"] = bench.fresh(val(like), (), torch.float32)
    return node
