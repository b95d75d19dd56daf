"""Reads what stands between ``aten._int_mm`` and the scales: an offset of codes, a zero point.

    q ─┬────────── _int_mm ─ [- 128 * sum(w)] ─ [- zero * sum(w)] ─ cast f32 ─ [- zero * sum(w)]
       └ + 128, u8 ┘

Codes that were shifted to uint8 (torchao does on CPUs) and shifted back afterwards are the product
of the codes themselves. The sums have to be those of the very weight that is multiplied, along K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8pass.spellings.walk import (
    VIEWS,
    argument,
    aten,
    cast_to,
    commuted,
    dtype_of,
    is_call,
    one_element,
    only_user,
    same,
    scalar,
    tensor,
)

_TRANSPOSES = (aten.permute.default, aten.t.default, aten.transpose.int)
_WHOLE = (torch.int32, torch.int64)
#: Dtypes in which a sum over K of int8 codes is exact, for every K that is read.
_SUMS = (*_WHOLE, torch.float32)
ZEROS = (torch.int8, *_SUMS)
#: From here on a sum of products of codes less a zero point, or of uint8 codes, may leave int32.
_SHIFTED_SUMMANDS = 2**31 // (255 * 128)
_ONLY = "its int32 sum is not converted to float32 alone"
_NOT_ZERO = (
    "is not a zero point's correction, the zero point times the sums of the columns of this weight"
)


@dataclass(frozen=True, slots=True)
class IntegerProduct:
    """``a`` are the int8 codes, ``start`` the float32 value that scales multiply.

    ``zero`` is the node of the zero point that is taken off, ``how`` the ``zero`` of a
    :class:`fp8pass.ops.product_form.ProductForm`.
    """

    a: fx.Node
    start: fx.Node
    zero: fx.Node | None = None
    how: str = "none"


def _shifted_codes(node: Any) -> fx.Node | None:
    """The int8 codes q of ``(q.to(int32) + 128).to(uint8)``."""
    if cast_to(node) != torch.uint8:
        return None
    found = commuted(node.args[0], (aten.add.Tensor, aten.add.Scalar), lambda a: scalar(a) == 128.0)
    if found is None or cast_to(found[1]) not in _WHOLE:
        return None
    codes = found[1].args[0]
    return codes if dtype_of(codes) == torch.int8 else None


def _matrix(node: Any) -> tuple[Any, bool]:
    """``(base, transposed)`` below transposes and exact casts of a matrix of codes."""
    turned = False
    while True:
        held = tensor(node)
        if held is None or held.dim() != 2:
            return node, turned
        if is_call(node, *_TRANSPOSES):
            order = list(node.args[1]) if is_call(node, aten.permute.default) else node.args[1:]
            if order and sorted(dim % 2 for dim in order) != [0, 1]:
                return node, turned
            kept = is_call(node, aten.permute.default) and [d % 2 for d in order] == [0, 1]
            node, turned = node.args[0], turned if kept else not turned
        elif cast_to(node) in _SUMS and dtype_of(node.args[0]) == torch.int8:
            node = node.args[0]
        else:
            return node, turned


def is_sum_of_columns(node: Any, b: Any) -> bool:
    """Whether ``node`` is the sum of ``b [K, N]`` over K, as ``[N]`` or ``[1, N]``, exact."""
    width, weight = tensor(node), tensor(b)
    if width is None or weight is None or width.dim() not in (1, 2):
        return False
    if not same(width.shape[-1], weight.shape[1]):
        return False
    if width.dim() == 2 and not same(width.shape[0], 1):
        return False
    while is_call(node, *VIEWS) or (cast_to(node) in _SUMS):
        node = node.args[0]
    if not is_call(node, aten.sum.dim_IntList) or dtype_of(node) not in _SUMS:
        return False
    dims = argument(node, 1, "dim")
    base, turned = _matrix(node.args[0])
    wanted, wanted_turned = _matrix(b)
    if base is not wanted or dtype_of(base) != torch.int8 or not isinstance(dims, (list, tuple)):
        return False
    along_k = 0 if turned == wanted_turned else 1
    return len(dims) == 1 and dims[0] % 2 == along_k


def zero_of_rows(node: Any, value: torch.Tensor) -> bool:
    """Whether ``node`` can be a zero point of the rows of ``value``: one, or ``[..., 1]``."""
    held = tensor(node)
    if held is None or held.dtype not in ZEROS or held.dim() > value.dim():
        return False
    if one_element(held):
        return True
    if held.dim() != value.dim() or not same(held.shape[-1], 1):
        return False
    return all(same(x, y) for x, y in zip(held.shape[:-1], value.shape[:-1], strict=True))


def _correction(node: Any, b: Any, value: torch.Tensor, dtypes: Any) -> fx.Node | None:
    """The zero point of ``zero * sum(b)``."""
    if not is_call(node, aten.mul.Tensor) or len(node.args) != 2 or node.kwargs:
        return None
    if dtype_of(node) not in dtypes:
        return None
    for zero, sums in (node.args, node.args[::-1]):
        if is_sum_of_columns(sums, b) and isinstance(zero, fx.Node) and zero_of_rows(zero, value):
            # as it was made: a cast that loses nothing is done again, in the dtype of the form
            inner: Any = zero.args[0] if cast_to(zero) in _SUMS else zero
            return inner if dtype_of(inner) in (torch.int8, torch.int32) else zero
    return None


def _depth(a: Any) -> int:
    value = tensor(a)
    depth: Any = None if value is None else value.shape[1]
    return depth if type(depth) is int else 2**31


def _taken_off(at: fx.Node) -> tuple[fx.Node, Any] | None:
    """``(sub, what is taken off)`` if the only reader of ``at`` takes something off it."""
    user = only_user(at)
    if not is_call(user, aten.sub.Tensor) or len(user.args) != 2 or user.kwargs:
        return None
    return (user, user.args[1]) if user.args[0] is at and user.args[1] is not at else None


def read_integers(product: fx.Node) -> IntegerProduct | str:
    """The int8 product behind the ``_int_mm`` at ``product``, or why it is not one."""
    a: Any = product.args[0]
    b = product.args[1]
    value = tensor(product)
    assert value is not None
    at = product
    if dtype_of(a) == torch.uint8:
        codes, taken = _shifted_codes(a), _taken_off(product)
        if codes is None:
            return "its operands are not int8"
        if taken is None or not _is_shift(taken[1], b) or dtype_of(taken[0]) != torch.int32:
            return "its codes were shifted to uint8, and 128 times the sum of its weight stays"
        if _depth(codes) >= _SHIFTED_SUMMANDS:
            return f"its int32 sum of shifted codes over K = {_depth(codes)} may overflow"
        a, at = codes, taken[0]
    zero, how = None, "none"
    taken = _taken_off(at)
    if taken is not None:
        made = dtype_of(taken[0])
        if made not in _WHOLE:
            return f"{_ONLY}: what is taken off it at {taken[0].name} is {dtype_of(taken[1])}"
        zero = _correction(taken[1], b, value, (torch.int32, torch.int64))
        whole = (torch.int8, *_WHOLE)
        if zero is None or dtype_of(taken[1]) != made or dtype_of(zero) not in whole:
            return f"{_ONLY}: what is taken off it at {taken[0].name} {_NOT_ZERO}"
        at, how = taken[0], "int32" if made == torch.int32 else "int64"
    after = only_user(at)
    if after is None or cast_to(after) != torch.float32:
        return f"{_ONLY}: a zero point's correction, or a rounding before the scales"
    start = after
    if zero is None:
        taken = _taken_off(start)
        if taken is not None and dtype_of(taken[0]) == torch.float32:
            zero = _correction(taken[1], b, value, (torch.float32,))
            if zero is None:
                return f"what is taken off it at {taken[0].name} {_NOT_ZERO}"
            start, how = taken[0], "float32"
    if zero is not None and _depth(a) >= _SHIFTED_SUMMANDS:
        return f"its int32 sum over K = {_depth(a)} less a zero point may overflow"
    return IntegerProduct(a, start, zero, how)


def _is_shift(node: Any, b: Any) -> bool:
    """Whether ``node`` is ``128 * sum(b)`` in int32."""
    found = commuted(node, (aten.mul.Tensor, aten.mul.Scalar), lambda a: scalar(a) == 128.0)
    return found is not None and dtype_of(node) == torch.int32 and is_sum_of_columns(found[1], b)
