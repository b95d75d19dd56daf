"""Says of a norm that was not read which of its conditions failed (FP8-R003).

A quantise whose value comes from a product with the root of a mean of squares (or of a variance) is
most likely behind a norm; that it was not read must not be silent. The walk here is tolerant, since
nothing is rewritten on what it finds: it only words a reason.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8pass.spellings.norm import inverse_root, is_power, plain_root, root_of, square_of
from fp8pass.spellings.walk import (
    ADD,
    CAST,
    DIV,
    MUL,
    VIEWS,
    argument,
    aten,
    cast_to,
    contiguous,
    dtype_of,
    is_call,
    is_last_dim,
    peel_widening,
    scalar,
    tensor,
)

_SUB = (aten.sub.Tensor, aten.sub.Scalar)
_SHAPES = (*VIEWS, aten.expand.default, aten.alias.default, aten.clone.default)
#: What may lie between a norm's anchor and the quantise, or between its factors.
_BETWEEN = (*CAST, *_SHAPES, *MUL, *DIV, *ADD, *_SUB)
_BOUNDS = (
    aten.clamp_min.default,
    aten.clamp_max.default,
    aten.minimum.default,
    aten.clamp.default,
    aten.maximum.default,
)
_ROOTS = (aten.rsqrt.default, aten.sqrt.default)
_MEANS = (aten.mean.dim, aten.mean.default, aten.sum.dim_IntList, aten.sum.default)
_VARIANCES = (aten.var_mean.correction, aten.var.correction)
_FAR = 24


@dataclass(frozen=True, slots=True)
class _Found:
    """A product with the root of a statistic: the nodes from the factor up to the reduction."""

    anchor: fx.Node
    factor: fx.Node
    value: Any
    chain: tuple[fx.Node, ...]
    reduction: fx.Node


def _up(node: Any, through: tuple[Any, ...]) -> Iterator[fx.Node]:
    """``node`` and what it is computed from, nearest first, through some operators."""
    queue, seen = [node], {node}
    while queue and len(seen) < _FAR:
        current = queue.pop(0)
        if not isinstance(current, fx.Node):
            continue
        yield current
        if is_call(current, *through):
            for source in current.all_input_nodes:
                if source not in seen:
                    seen.add(source)
                    queue.append(source)


def _is_root(node: Any) -> bool:
    return is_call(node, *_ROOTS) or is_power(node, 0.5) or is_power(node, -0.5)


def _statistic(factor: Any) -> tuple[tuple[fx.Node, ...], fx.Node] | None:
    """``(nodes, reduction)`` if ``factor`` is computed from the root of a mean or a variance."""
    through = (
        *_BETWEEN,
        *_BOUNDS,
        *_ROOTS,
        aten.reciprocal.default,
        aten.pow.Tensor_Scalar,
        operator.getitem,
    )
    nodes: list[fx.Node] = []
    rooted = False
    for node in _up(factor, through):
        if is_call(node, *_MEANS, *_VARIANCES):
            return (tuple(nodes), node) if rooted else None
        rooted = rooted or _is_root(node)
        nodes.append(node)
    return None


def _find(value: Any) -> _Found | None:
    """The product with a root that is broadcast, else the innermost product with one."""
    innermost = None
    for node in _up(value, _BETWEEN):
        if is_call(node, *MUL):
            factors = [(node.args[0], node.args[1]), (node.args[1], node.args[0])]
        elif is_call(node, *DIV):
            factors = [(node.args[1], node.args[0])]
        else:
            continue
        for factor, other in factors:
            small, whole = tensor(factor), tensor(node)
            if small is None or whole is None or tensor(other) is None:
                continue
            found = _statistic(factor)
            if found is not None:
                innermost = _Found(node, factor, other, *found)
                if tuple(map(str, small.shape)) != tuple(map(str, whole.shape)):
                    return innermost
    return innermost


def _dims_of(reduction: fx.Node) -> Any:
    return argument(reduction, 1, "dim")


def _names(nodes: tuple[fx.Node, ...]) -> str:
    return " of ".join(str(node.target).split(".")[1] for node in nodes if node.op != "placeholder")


def _why_not_statistic(found: _Found) -> str | None:
    """What is wrong with what is reduced, and over what."""
    reduction, operand = found.reduction, found.reduction.args[0]
    dtype, value = dtype_of(operand), tensor(operand)
    variance = is_call(reduction, *_VARIANCES)
    what = "variance" if variance else "mean of squares"
    if dtype != torch.float32:
        return f"its {what} is computed in {dtype}, not in float32"
    given = argument(reduction, 3, "dtype") if is_call(reduction, *_MEANS) else None
    if given is not None:
        return f"its mean is asked for in {given}"
    dims = _dims_of(reduction)
    if value is not None and not (dims is not None and is_last_dim(operand, dims)):
        over = "all dims" if dims is None else f"dims {dims}"
        return f"its {what} is over {over} of a tensor of rank {value.dim()}, not over the last one"
    if variance:
        correction = argument(reduction, 2, "correction", 1)
        return None if correction == 0 else f"its variance has the correction {correction}, not 0"
    if square_of(operand) is None:
        made = operand.target if isinstance(operand, fx.Node) else operand
        return f"what it takes the mean of ({made}) is not the square of one tensor"
    return None


def _why_not_chain(found: _Found) -> str | None:
    """What is wrong between the reduction and the product."""
    for node in reversed(found.chain):
        cast = cast_to(node)
        if cast is not None and cast != dtype_of(node.args[0]):
            return f"its root is cast to {cast} on the way"
        shift = is_call(node, *ADD, *_SUB, *_BOUNDS)
        numbers = [a for a in node.args if scalar(a) is not None]
        if shift and not numbers and len(node.args) == 2:
            return f"its epsilon is a tensor ({node.name}), not a number known when compiling"
        if is_call(node, *_SUB):
            return f"a number is subtracted from its mean of squares ({node.name})"
    scaled = any(is_call(node, *MUL, *DIV) and _has_number(node) for node in found.chain)
    if is_call(found.reduction, aten.sum.dim_IntList):
        if not scaled:
            return "its sum of squares is not divided by the width: it is an L2 normalisation"
        square_inside = any(is_power(node, 2) for node in found.chain)
        if any(root_of(node) is not None for node in found.chain) and not square_inside:
            return "its root is that of a sum, and is scaled afterwards"
    return None


def _has_number(node: fx.Node) -> bool:
    return any(scalar(a) is not None and scalar(a) != 1.0 for a in node.args)


def _why(found: _Found) -> str:
    """The first condition of a norm that failed."""
    why = _why_not_statistic(found) or _why_not_chain(found)
    if why is not None:
        return why
    if is_call(found.reduction, *_VARIANCES):
        return "what it scales is not x - mean(x) of the tensor whose variance it takes"
    divides = is_call(found.anchor, *DIV)
    root = plain_root(found.factor) if divides else inverse_root(found.factor)
    names = _names(found.chain)
    if root is None:
        if any(is_call(node, *DIV) and _has_number(node) for node in found.chain):
            return f"its sum of squares is divided by another number than the width ({names})"
        return f"its root is written in an unknown order ({names})"
    source, held, factor = peel_widening(root.of.source), None, tensor(found.factor)
    held = tensor(source)
    if source is not peel_widening(found.value):
        return "what it scales is not the tensor that it takes the mean of squares of"
    if held is not None and factor is not None:
        rows = (*held.shape[:-1], 1)
        if tuple(map(str, factor.shape)) != tuple(map(str, rows)):
            return f"its inverse root has the shape {tuple(factor.shape)}, not {rows}"
    if dtype_of(found.anchor) != torch.float32:
        return f"it multiplies in {dtype_of(found.anchor)}, not in float32"
    result = tensor(found.anchor)
    if result is not None and not contiguous(result):
        return f"its result has the strides {result.stride()}: it is not contiguous"
    return "its dtypes or shapes are not those of a known form"


def unread_norm(value: Any) -> tuple[str, str] | None:
    """``(name, why)`` of the norm that was not read among what made ``value``, or None."""
    found = _find(value)
    return None if found is None else (found.anchor.name, _why(found))
