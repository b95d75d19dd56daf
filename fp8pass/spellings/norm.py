"""Reads RMSNorm as decomposed torch writes it.

    x ─ f32 ─┬─ pow 2 ─ mean ─ + eps ─ rsqrt ─┐
             └───────────────────────────── mul ─ [cast] ─ [mul weight] ─ [cast]

The anchor is the product (or quotient) of x with the inverse root of its own mean square; the rest
is climbed from there, upwards to x and downwards to the weight, through nodes that nothing else
reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.ops.forms import MODEL_DTYPES, NormForm
from fp8pass.spellings.registry import Producer, Spelling
from fp8pass.spellings.walk import (
    ADD,
    DIV,
    MUL,
    argument,
    aten,
    cast_to,
    commuted,
    contiguous,
    dtype_of,
    is_call,
    is_last_dim,
    only_user,
    peel_widening,
    same,
    same_shape,
    scalar,
    tensor,
)

_ops = torch.ops.fp8pass
_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class NormMatch:
    """One RMSNorm: ``root`` is the node whose value it is, ``add`` the residual sum or None."""

    root: fx.Node
    x: fx.Node
    weight: fx.Node | None
    eps: float
    form: NormForm
    add: fx.Node | None


def _square_of(node: Any) -> fx.Node | None:
    """x for ``x ** 2``, ``x * x``."""
    power = is_call(node, aten.pow.Tensor_Scalar) and scalar(node.args[1]) == 2
    product = is_call(node, aten.mul.Tensor) and node.args[0] is node.args[1]
    source = node.args[0] if power or product else None
    return source if isinstance(source, fx.Node) else None


def _mean_square(node: Any) -> tuple[fx.Node, str] | None:
    """``(x, mean form)`` for the mean of ``x ** 2`` over the last dim, dim kept."""
    if is_call(node, aten.mean.dim):
        keep = argument(node, 2, "keepdim", False)
        plain = argument(node, 3, "dtype") is None
        if keep is True and plain and is_last_dim(node.args[0], node.args[1]):
            source = _square_of(node.args[0])
            return None if source is None else (source, "mean")
    if is_call(node, *DIV) and is_call(node.args[0], aten.sum.dim_IntList) and not node.kwargs:
        total, width = node.args[0], scalar(node.args[1])
        keep = argument(total, 2, "keepdim", False)
        plain = argument(total, 3, "dtype") is None
        if keep is True and plain and is_last_dim(total.args[0], total.args[1]):
            source = _square_of(total.args[0])
            value = tensor(source)
            if value is not None and width is not None and same(value.shape[-1], int(width)):
                return (source, "sum_div") if source is not None else None
    return None


def _shifted(node: Any) -> tuple[fx.Node, str, float] | None:
    """``(x, mean form, eps)`` for ``mean square + eps``."""
    found = commuted(node, ADD, scalar)
    if found is None:
        return None
    mean = _mean_square(found[1])
    return None if mean is None else (*mean, found[0])


def _inverse_root(node: Any) -> tuple[fx.Node, str, float, str] | None:
    """``(x, mean form, eps, root form)`` for ``1 / sqrt(mean square + eps)``."""
    if is_call(node, aten.rsqrt.default):
        found, root = _shifted(node.args[0]), "rsqrt"
    elif is_call(node, aten.reciprocal.default) and is_call(node.args[0], aten.sqrt.default):
        found, root = _shifted(node.args[0].args[0]), "recip_sqrt"
    else:
        # 1.0 / t is written reciprocal(t) * 1, and the product stays in the graph
        one = commuted(node, MUL, lambda a: scalar(a) == 1.0)
        return _inverse_root(one[1]) if one is not None else None
    return None if found is None else (*found, root)


def _core(node: fx.Node) -> tuple[fx.Node, str, float, str] | None:
    """``(x in float32, mean form, eps, root form)`` if ``node`` is ``x / rms(x)``."""
    found = commuted(node, (aten.mul.Tensor,), _inverse_root)
    if found is not None:
        (source, mean, eps, root), other = found
        return (source, mean, eps, root) if source is other else None
    if is_call(node, aten.div.Tensor) and is_call(node.args[1], aten.sqrt.default):
        shifted = _shifted(node.args[1].args[0])
        if shifted is not None and shifted[0] is node.args[0]:
            return (*shifted, "div_sqrt")
    return None


def _weight_of(node: fx.Node | None, value: fx.Node, width: Any) -> fx.Node | None:
    """The 1-D weight of ``value * weight`` with ``width`` elements, or None."""
    if node is None or not is_call(node, aten.mul.Tensor) or node.args[0] is node.args[1]:
        return None
    other = node.args[1] if node.args[0] is value else node.args[0]
    weight = tensor(other)
    if weight is None or weight.dim() != 1 or not same(weight.shape[0], width):
        return None
    return other if isinstance(other, fx.Node) and weight.dtype in MODEL_DTYPES else None


def _narrowing(node: fx.Node | None) -> torch.dtype | None:
    dtype = cast_to(node)
    return dtype if dtype in _NARROW else None


def match_norm(node: fx.Node) -> NormMatch | None:
    """Read the RMSNorm whose ``x * inverse root`` is ``node``; None if it is not one.

    Conditions beyond the drawing: computed in float32 from a bf16, fp16 or fp32 input; the result
    contiguous and of the input's shape; every node between the product and the result read by
    nothing else.
    """
    core = _core(node)
    if core is None or dtype_of(core[0]) != torch.float32 or dtype_of(node) != torch.float32:
        return None
    wide, mean, eps, root_form = core
    x = peel_widening(wide)
    value = tensor(x)
    if value is None or value.dtype not in MODEL_DTYPES or value.dim() < 1:
        return None
    width = value.shape[-1]
    root, weight, order, mid = node, None, "none", torch.float32
    user = only_user(node)
    narrow = _narrowing(user)
    if narrow is not None and user is not None:
        root, mid = user, narrow
        after = only_user(user)
        weight = _weight_of(after, user, width)
        if weight is not None and after is not None:
            root, order = after, "after_cast"
    else:
        weight = _weight_of(user, node, width)
        if weight is not None and user is not None:
            root, order = user, "before_cast"
            last = only_user(user)
            narrow = _narrowing(last)
            if narrow is not None and last is not None:
                root, mid = last, narrow
    result = tensor(root)
    if result is None or not same_shape(result, value) or not contiguous(result):
        return None
    expected = mid
    if weight is not None:
        if order == "before_cast":
            weight = peel_widening(weight)
        weight_dtype = dtype_of(weight)
        if weight_dtype not in MODEL_DTYPES:
            return None
        assert weight_dtype is not None
        if order == "after_cast":
            expected = torch.promote_types(mid, weight_dtype)
    if result.dtype != expected:
        return None
    form = NormForm(mean, root_form, order, mid)
    return NormMatch(root, x, weight, eps, form, _residual_add(x))


def _residual_add(x: fx.Node) -> fx.Node | None:
    """x if it is a plain sum of two tensors of its own shape and dtype, else None."""
    if not is_call(x, aten.add.Tensor) or len(x.args) != 2 or x.kwargs:
        return None
    total = tensor(x)
    if total is None or not contiguous(total):
        return None
    for operand in x.args:
        value = tensor(operand)
        if value is None or value.dtype != total.dtype or not same_shape(value, total):
            return None
    return x


def _spelled(node: fx.Node) -> Producer | None:
    found = match_norm(node)
    if found is None:
        return None
    form = str(found.form)
    tail = (found.weight, found.eps, form)
    plain = Producer(_ops.rms_norm.default, (found.x, *tail), form, {"y": found.root})
    add = found.add
    if add is None:
        return plain
    results = {"y": found.root, "total": add}
    return Producer(_ops.add_rms_norm.default, (*add.args, *tail), form, results, plain)


SPELLINGS = (Spelling("rms_norm", (aten.mul.Tensor, aten.div.Tensor), _spelled, order=10),)
