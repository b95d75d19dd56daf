"""Reads RMSNorm as decomposed torch writes it.

    x ─ f32 ─┬─ pow 2 ─ mean ─ + eps ─ rsqrt ─┐
             └───────────────────────────── mul ─ [cast] ─ [mul weight] ─ [cast]

The anchor is the product (or quotient) of x with the inverse root of its own mean square; the rest
is climbed from there, upwards to x and downwards to the weight, through nodes that nothing else
reads. Epsilon may stand in four places and the weight may be folded into either factor of the
anchor first: these are other functions, and have forms of their own. What is not read is explained
in :mod:`fp8pass.spellings.norm_reasons`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    peel_views,
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
    """One RMSNorm.

    Attributes:
        root: the node whose value it is.
        x: what is normalised: the residual sum itself if there is one.
        add: the residual sum that goes with it, or None.
        totals: the nodes whose value is that sum, rounded to its dtype; ``add`` itself unless the
            norm reads the sum before it is rounded.
    """

    root: fx.Node
    x: fx.Node
    weight: fx.Node | None
    eps: float
    form: NormForm
    add: fx.Node | None
    operands: tuple[fx.Node, ...] = ()
    totals: tuple[fx.Node, ...] = ()


@dataclass(frozen=True, slots=True)
class MeanSquare:
    """The mean of squares of ``source`` over its last dim, with or without that dim."""

    source: fx.Node
    square: fx.Node
    mean: str


@dataclass(frozen=True, slots=True)
class Root:
    """``sqrt`` of a mean square with epsilon, or the inverse of it."""

    of: MeanSquare
    eps: float
    where: str
    root: str


@dataclass(frozen=True, slots=True)
class _Core:
    """``x / rms(x)``, with a weight that was multiplied into one of the two first."""

    x: fx.Node
    root: Root
    weight: fx.Node | None
    order: str
    inner: tuple[fx.Node, ...]


# ---- the mean square and its root ----------------------------------------------------------------
#
# Views are looked through on the way up: all of them keep the order of the elements, so that it is
# enough that the factor at the anchor has one value for each row of x (`one_per_row`).


def is_power(node: Any, exponent: float) -> bool:
    """Whether ``node`` is ``a ** exponent``."""
    return is_call(node, aten.pow.Tensor_Scalar) and scalar(node.args[1]) == exponent


def square_of(node: Any) -> fx.Node | None:
    """x for ``x ** 2``, ``x * x``."""
    product = is_call(node, aten.mul.Tensor) and node.args[0] is node.args[1]
    source = node.args[0] if product or is_power(node, 2) else None
    return source if isinstance(source, fx.Node) else None


def root_of(node: Any) -> Any:
    """v for ``sqrt(v)``, ``v ** 0.5``: the same kernel of torch."""
    return node.args[0] if is_call(node, aten.sqrt.default) or is_power(node, 0.5) else None


def reduced(node: Any, op: Any) -> Any:
    """The operand of a reduction over its last dim alone, in the dtype of that operand."""
    if not is_call(node, op) or argument(node, 3, "dtype") is not None:
        return None
    return node.args[0] if is_last_dim(node.args[0], argument(node, 1, "dim")) else None


def _of_squares(squares: Any, mean: str) -> MeanSquare | None:
    source = square_of(squares)
    return None if source is None else MeanSquare(source, squares, mean)


def mean_square(node: Any) -> MeanSquare | None:
    """The mean of ``x ** 2`` over the last dim."""
    node = peel_views(node)
    averaged = reduced(node, aten.mean.dim)
    if averaged is not None:
        return _of_squares(averaged, "mean")
    if is_call(node, *DIV) and len(node.args) == 2 and not node.kwargs:
        total, factor, mean = node.args[0], scalar(node.args[1]), "sum_div"
    else:
        found = commuted(node, MUL, scalar)
        if found is None:
            return None
        factor, total, mean = *found, "sum_mul"
    total = peel_views(total)
    norm = peel_views(total.args[0]) if is_power(total, 2) and mean == "sum_div" else None
    if norm is not None and root_of(norm) is not None:
        total, mean = peel_views(root_of(norm)), "norm_div"
    summed = reduced(total, aten.sum.dim_IntList)
    value = tensor(summed)
    if value is None or factor is None:
        return None
    width = value.shape[-1]
    if mean == "sum_mul":
        right = type(width) is int and width > 0 and factor == 1.0 / width
    else:
        right = factor.is_integer() and same(width, int(factor))
    return _of_squares(summed, mean) if right else None


def _at_least(node: Any) -> tuple[float, Any] | None:
    """``(bound, inner)`` for ``max(inner, bound)``."""
    if is_call(node, aten.clamp_min.default) and len(node.args) == 2:
        bound = scalar(node.args[1])
    elif is_call(node, aten.clamp.default) and argument(node, 2, "max") is None:
        bound = scalar(argument(node, 1, "min"))
    else:
        return commuted(node, (aten.maximum.default,), scalar)
    return None if bound is None else (bound, node.args[0])


def _shifted(node: Any) -> tuple[MeanSquare, float, str] | None:
    """A mean square with epsilon: ``(mean square, eps, "inside" or "max")``."""
    node = peel_views(node)
    where = "inside"
    found = commuted(node, ADD, scalar)
    if found is None:
        where, found = "max", _at_least(node)
    # without epsilon: adding zero to a mean of squares changes nothing
    eps, inner = (0.0, node) if found is None else found
    mean = mean_square(inner)
    if mean is None:
        return None
    return mean, eps, "inside" if found is None else where


def plain_root(node: Any) -> Root | None:
    """``sqrt(mean square + eps)``, ``sqrt(mean square) + eps``, or ``max`` in place of ``+``."""
    node = peel_views(node)
    inner = root_of(node)
    if inner is not None:
        found = _shifted(inner)
        return None if found is None else Root(*found, "div_sqrt")
    where, shifted = "outside", commuted(node, ADD, scalar)
    if shifted is None:
        where, shifted = "outside_max", _at_least(node)
    inner = None if shifted is None else root_of(peel_views(shifted[1]))
    if shifted is None or inner is None:
        return None
    mean = mean_square(inner)
    return None if mean is None else Root(mean, shifted[0], where, "div_sqrt")


def inverse_root(node: Any) -> Root | None:
    """``1 / sqrt(mean square + eps)`` in any spelling."""
    node = peel_views(node)
    if is_call(node, aten.rsqrt.default) or is_power(node, -0.5):  # the same kernel of torch
        found = _shifted(node.args[0])
        return None if found is None else Root(*found, "rsqrt")
    if is_call(node, aten.reciprocal.default):
        root = plain_root(node.args[0])
        return None if root is None else replace(root, root="recip_sqrt")
    # 1.0 / t is written reciprocal(t) * 1, and the product stays in the graph
    one = commuted(node, MUL, lambda a: scalar(a) == 1.0)
    return inverse_root(one[1]) if one is not None else None


# ---- the anchor ----------------------------------------------------------------------------------


def one_per_row(factor: Any, x: torch.Tensor) -> bool:
    """Whether ``factor`` has one value for each row of x, and is broadcast along the row."""
    value = tensor(factor)
    if value is None or value.dim() != x.dim() or not same(value.shape[-1], 1):
        return False
    return all(same(a, b) for a, b in zip(value.shape[:-1], x.shape[:-1], strict=True))


def _with_weight(node: Any, wanted: Any, width: Any) -> tuple[Any, fx.Node] | None:
    """``(found, weight)`` for ``a * weight`` with ``found = wanted(a)``, in float32."""
    found = commuted(node, (aten.mul.Tensor,), wanted)
    if found is None or dtype_of(node) != torch.float32:
        return None
    weight = weight_vector(found[1], width)
    return None if weight is None else (found[0], weight)


def _core_of(value: Any, factor: Any, divides: bool) -> _Core | None:
    """``value * factor`` or ``value / factor`` if it is ``x / rms(x)``."""
    inverse = plain_root if divides else inverse_root

    def is_source(root: Root, node: Any) -> bool:
        return peel_widening(node) is peel_widening(root.of.source)

    def width(root: Root) -> Any:
        held = tensor(root.of.source)
        return None if held is None or held.dim() == 0 else held.shape[-1]

    root, per_row, weight, order = inverse(factor), factor, None, "none"
    inner: tuple[fx.Node, ...] = ()
    if root is None:  # x * (inverse root * weight), x * (weight / root)
        roots = (
            [(plain_root(arg), arg) for arg in factor.args[1:2]]
            if (not divides and is_call(factor, aten.div.Tensor))
            else [(inverse_root(arg), arg) for arg in factor.args]
            if (not divides and is_call(factor, aten.mul.Tensor))
            else []
        )
        found = next(((r, arg) for r, arg in roots if r is not None), None)
        if found is None or dtype_of(factor) != torch.float32 or factor.kwargs:
            return None
        root, per_row = found
        other = factor.args[1 - list(factor.args).index(per_row)]
        weight, order = weight_vector(other, width(root)), "root_first"
        if weight is None:
            return None
    x = tensor(root.of.source)
    if x is None or x.dim() == 0 or not one_per_row(per_row, x):
        return None
    if not is_source(root, value):
        if weight is not None:
            return None
        found_x = _with_weight(value, lambda a: is_source(root, a) and a, width(root))
        if found_x is None:
            return None
        weight, order, inner = found_x[1], "x_first", (value,)
    return _Core(root.of.source, root, weight, order, inner)


def _core(node: fx.Node) -> _Core | None:
    """What ``node`` is if it is ``x / rms(x)``."""
    if len(node.args) != 2 or node.kwargs or not all(isinstance(a, fx.Node) for a in node.args):
        return None
    first, second = node.args
    if is_call(node, aten.div.Tensor):
        return _core_of(first, second, divides=True)
    if not is_call(node, aten.mul.Tensor):
        return None
    return _core_of(first, second, divides=False) or _core_of(second, first, divides=False)


# ---- the weight and the casts --------------------------------------------------------------------


def weight_vector(node: Any, width: Any) -> fx.Node | None:
    """The vector of ``width`` elements that ``node`` is, maybe with dims of one before it."""
    base = peel_views(node)
    value, held = tensor(node), tensor(base)
    if not isinstance(base, fx.Node) or value is None or held is None or value.dim() == 0:
        return None
    if held.dim() != 1 or not same(held.shape[0], width) or not same(value.shape[-1], width):
        return None
    return base if held.dtype in MODEL_DTYPES else None


def _weight_of(node: fx.Node | None, value: fx.Node, width: Any) -> fx.Node | None:
    """The weight of ``value * weight`` with ``width`` elements, or None."""
    if node is None or not is_call(node, aten.mul.Tensor) or node.args[0] is node.args[1]:
        return None
    return weight_vector(node.args[1] if node.args[0] is value else node.args[0], width)


def _narrowing(node: fx.Node | None) -> torch.dtype | None:
    dtype = cast_to(node)
    return dtype if dtype in _NARROW else None


@dataclass(frozen=True, slots=True)
class _End:
    """Where a norm ends: its last node, and what the nodes after the anchor say of its form."""

    root: fx.Node
    weight: fx.Node | None
    order: str
    mid: torch.dtype
    out: torch.dtype | None = None


def _end(node: fx.Node, weight: fx.Node | None, order: str, width: Any) -> _End:
    """Climb down from the anchor through casts and the weight."""
    if weight is None:
        user = only_user(node)
        narrow = _narrowing(user)
        if narrow is not None and user is not None:
            after = only_user(user)
            weight = _weight_of(after, user, width)
            if weight is None or after is None:
                return _End(user, None, "none", narrow)
            last = only_user(after)
            out = _narrowing(last) if dtype_of(after) == torch.float32 else None
            if out is not None and last is not None:
                return _End(last, weight, "after_cast", narrow, out)
            return _End(after, weight, "after_cast", narrow)
        weight, order = _weight_of(user, node, width), "before_cast"
        if weight is None or user is None:
            return _End(node, None, "none", torch.float32)
        node = user
    last = only_user(node)
    narrow = _narrowing(last)
    if narrow is not None and last is not None:
        return _End(last, weight, order, narrow)
    return _End(node, weight, order, torch.float32)


def match_norm(node: fx.Node) -> NormMatch | None:
    """Read the RMSNorm whose ``x * inverse root`` is ``node``; None if it is not one.

    Conditions beyond the drawing: computed in float32 from a bf16, fp16 or fp32 input; the result
    contiguous and of the input's shape; every node between the product and the result read by
    nothing else.
    """
    core = _core(node)
    if core is None or dtype_of(core.x) != torch.float32 or dtype_of(node) != torch.float32:
        return None
    x = peel_widening(core.x)
    value = tensor(x)
    if value is None or value.dtype not in MODEL_DTYPES or value.dim() < 1:
        return None
    end = _end(node, core.weight, core.order, value.shape[-1])
    weight, result = end.weight, tensor(end.root)
    if result is None or not same_shape(result, value) or not contiguous(result):
        return None
    expected = end.out or end.mid
    if weight is not None:
        if end.order != "after_cast":
            weight = peel_widening(weight)
        weight_dtype = dtype_of(weight)
        if weight_dtype not in MODEL_DTYPES:
            return None
        assert weight_dtype is not None
        if end.order == "after_cast" and end.out is None:
            expected = torch.promote_types(end.mid, weight_dtype)
    if result.dtype != expected:
        return None
    root = core.root
    form = NormForm(root.of.mean, root.root, end.order, end.mid, root.where, out=end.out)
    found = NormMatch(end.root, x, weight, root.eps, form, None)
    return _with_residual(found, {node, root.of.square, *core.inner})


# ---- the residual --------------------------------------------------------------------------------


def _with_residual(found: NormMatch, inside: set[fx.Node]) -> NormMatch:
    """``found`` with the residual sum that it normalises, if there is one.

    ``inside``: the nodes of the norm that read x.
    """
    add = found.x
    if not is_call(add, aten.add.Tensor) or len(add.args) != 2 or add.kwargs:
        return found
    total = tensor(add)
    if total is None or not contiguous(total):
        return found
    wide = _wide_operands(add, total)
    if wide is not None:
        dtype = dtype_of(wide[0])
        others = [user for user in add.users if user not in inside]
        # two casts that are both results of the graph must stay two tensors
        if len(others) < 2 and all(cast_to(user) == dtype for user in others):
            form = replace(found.form, sum="float32")
            return replace(found, form=form, add=add, operands=wide, totals=tuple(others))
    dtypes = []
    for operand in add.args:
        value = tensor(operand)
        if value is None or value.dtype not in MODEL_DTYPES or not same_shape(value, total):
            return found
        dtypes.append(value.dtype)
    if torch.promote_types(*dtypes) != total.dtype:
        return found
    return replace(found, add=add, operands=add.args, totals=(add,))


def _wide_operands(add: fx.Node, total: torch.Tensor) -> tuple[fx.Node, fx.Node] | None:
    """The narrow operands of a sum in float32, of one dtype and of the shape of the sum."""
    operands = [peel_widening(operand) for operand in add.args]
    dtypes = {dtype_of(operand) for operand in operands}
    if total.dtype != torch.float32 or len(dtypes) != 1 or not dtypes <= set(_NARROW):
        return None
    for operand in operands:
        value = tensor(operand)
        if value is None or not same_shape(value, total):
            return None
    return operands[0], operands[1]


def _spelled(node: fx.Node) -> Producer | None:
    found = match_norm(node)
    if found is None:
        return None
    tail = (found.weight, found.eps)
    text = str(replace(found.form, sum="rounded"))
    plain = Producer(_ops.rms_norm.default, (found.x, *tail, text), text, {"y": found.root})
    if found.add is None:
        return plain
    form = str(found.form)
    return Producer(
        _ops.add_rms_norm.default,
        (*found.operands, *tail, form),
        form,
        {"y": found.root, "total": found.totals},
        plain,
    )


SPELLINGS = (Spelling("rms_norm", (aten.mul.Tensor, aten.div.Tensor), _spelled, order=10),)
