"""Reads LayerNorm as decomposed torch writes it.

    x ─ f32 ─┬─ var_mean ─┬─ variance ─ + eps ─ rsqrt ─┐
             │            └─ mean ─┐                   │
             └──────────────────── sub ─────────────── mul ─ [mul weight] ─ [add bias] ─ [cast]

The anchor is the product (or quotient) of ``x - mean(x)`` with the inverse root of the variance of
x; weight and bias may stand after the cast as well. Mean and variance that come from one reduction,
from two, or from the mean of squares of the difference are different numbers and forms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.ops.forms import MODEL_DTYPES, LayerNormForm
from fp8pass.spellings.norm import one_per_row, reduced, root_of, square_of, weight_vector
from fp8pass.spellings.registry import Producer, Spelling
from fp8pass.spellings.walk import (
    ADD,
    MUL,
    argument,
    aten,
    cast_to,
    commuted,
    contiguous,
    dtype_of,
    is_call,
    is_last_dim,
    item,
    only_user,
    peel_views,
    peel_widening,
    same_shape,
    scalar,
    tensor,
)

_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class LayerNormMatch:
    """One LayerNorm: ``root`` is the node whose value it is."""

    root: fx.Node
    x: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    eps: float
    form: LayerNormForm


def _inverse(node: Any) -> tuple[Any, str] | None:
    """``(what the root is of, root form)`` for ``1 / sqrt(v)``."""
    node = peel_views(node)
    if is_call(node, aten.rsqrt.default):
        return node.args[0], "rsqrt"
    if is_call(node, aten.reciprocal.default):
        inner = root_of(peel_views(node.args[0]))
        return None if inner is None else (inner, "recip_sqrt")
    one = commuted(node, MUL, lambda a: scalar(a) == 1.0)
    return _inverse(one[1]) if one is not None else None


def _factors(node: fx.Node) -> list[tuple[Any, Any, Any, str]]:
    """``(difference, factor, what the root is of, root form)``, as the anchor may be read."""
    if len(node.args) != 2 or node.kwargs:
        return []
    first, second = node.args
    if is_call(node, aten.div.Tensor):
        inner = root_of(peel_views(second))
        return [] if inner is None else [(first, second, inner, "div_sqrt")]
    found = []
    for difference, factor in ((first, second), (second, first)):
        inverse = _inverse(factor)
        if inverse is not None:
            found.append((difference, factor, *inverse))
    return found


def _biased_variance(node: Any) -> fx.Node | None:
    """x of ``var(x)`` or ``var_mean(x)`` over the last dim, divided by the width itself."""
    if not is_call(node, aten.var.correction, aten.var_mean.correction):
        return None
    source = node.args[0]
    if argument(node, 2, "correction") != 0 or not is_last_dim(source, argument(node, 1, "dim")):
        return None
    return source if isinstance(source, fx.Node) else None


def _variance(node: Any, difference: fx.Node) -> tuple[fx.Node, str] | None:
    """``(x, variance form)`` of a variance that belongs to ``difference = x - mean(x)``."""
    node, (minuend, mean) = peel_views(node), difference.args
    mean = peel_views(mean)
    both = item(node, 0)
    if both is not None and item(mean, 1) is both:
        source = _biased_variance(both)
        return None if source is None else (source, "var_mean")
    if peel_widening(reduced(mean, aten.mean.dim)) is not peel_widening(minuend):
        return None
    if dtype_of(mean) != torch.float32:
        return None
    if is_call(node, aten.var.correction):
        source = _biased_variance(node)
        return None if source is None else (source, "var")
    if square_of(reduced(node, aten.mean.dim)) is difference and isinstance(minuend, fx.Node):
        return minuend, "mean_square"
    return None


def _core(node: fx.Node) -> tuple[fx.Node, str, float, str] | None:
    """``(x in float32, variance form, eps, root form)`` if ``node`` is ``(x - mean) / std``."""
    for difference, factor, inside, root in _factors(node):
        if not is_call(difference, aten.sub.Tensor) or len(difference.args) != 2:
            continue
        if difference.kwargs or dtype_of(difference) != torch.float32:
            continue
        shifted = commuted(peel_views(inside), ADD, scalar)
        # adding zero to a variance changes nothing
        eps, variance = (0.0, inside) if shifted is None else shifted
        found = _variance(variance, difference)
        if found is None:
            continue
        source, form = found
        x, value = difference.args[0], tensor(difference)
        if peel_widening(source) is not peel_widening(x) or dtype_of(source) != torch.float32:
            continue
        if value is None or not one_per_row(factor, value):
            continue
        if not one_per_row(difference.args[1], value):
            continue
        return source, form, eps, root
    return None


def _vector(node: fx.Node | None, value: fx.Node, op: Any, width: Any) -> fx.Node | None:
    """The vector of ``value * vector`` or ``value + vector``."""
    if node is None or not is_call(node, op) or len(node.args) != 2 or node.kwargs:
        return None
    if node.args[0] is node.args[1]:
        return None
    return weight_vector(node.args[1] if node.args[0] is value else node.args[0], width)


def _affine(node: fx.Node, width: Any) -> tuple[fx.Node, fx.Node | None, fx.Node | None]:
    """``(last node, weight, bias)`` of what follows ``node``."""
    user = only_user(node)
    weight = _vector(user, node, aten.mul.Tensor, width)
    if weight is not None and user is not None:
        node, user = user, only_user(user)
    bias = _vector(user, node, aten.add.Tensor, width)
    return (user, weight, bias) if bias is not None and user is not None else (node, weight, None)


def match_layer_norm(node: fx.Node) -> LayerNormMatch | None:
    """Read the LayerNorm whose ``(x - mean) * inverse root`` is ``node``; None if it is not one.

    Conditions beyond the drawing: computed in float32 from a bf16, fp16 or fp32 input; the result
    contiguous and of the input's shape; every node between the product and the result read by
    nothing else.
    """
    core = _core(node)
    if core is None or dtype_of(node) != torch.float32:
        return None
    wide, variance, eps, root_form = core
    x = peel_widening(wide)
    value = tensor(x)
    if value is None or value.dtype not in MODEL_DTYPES or value.dim() < 1:
        return None
    width = value.shape[-1]
    user = only_user(node)
    mid, affine = cast_to(user), "after_cast"
    if mid in _NARROW and user is not None:
        root, weight, bias = _affine(user, width)
    else:
        root, weight, bias = _affine(node, width)
        mid, affine, last = torch.float32, "before_cast", only_user(root)
        narrow = cast_to(last)
        if narrow in _NARROW and last is not None and narrow is not None:
            root, mid = last, narrow
    if weight is None and bias is None:
        affine = "none"
    assert mid is not None
    expected = mid
    if affine == "before_cast":
        weight, bias = peel_widening(weight), peel_widening(bias)
    for vector in (weight, bias):
        dtype = dtype_of(vector)
        if vector is None:
            continue
        if dtype is None or dtype not in MODEL_DTYPES:
            return None
        if affine == "after_cast":
            expected = torch.promote_types(expected, dtype)
    result = tensor(root)
    if result is None or not same_shape(result, value) or not contiguous(result):
        return None
    if result.dtype != expected:
        return None
    form = LayerNormForm(variance, root_form, affine, mid)
    return LayerNormMatch(root, x, weight, bias, eps, form)


def _spelled(node: fx.Node) -> Producer | None:
    found = match_layer_norm(node)
    if found is None:
        return None
    form = str(found.form)
    args = (found.x, found.weight, found.bias, found.eps, form)
    return Producer(torch.ops.fp8pass.layer_norm.default, args, form, {"y": found.root})


SPELLINGS = (Spelling("layer_norm", (aten.mul.Tensor, aten.div.Tensor), _spelled, order=5),)
