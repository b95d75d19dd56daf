"""Reads an operand of a dequantised product: its codes, and a scale it is multiplied by first.

Codes are made float32 (losslessly), reshaped or transposed, and may be multiplied by a scale of
one element, one per row or column, or one per block (repeated, expanded, or in split dims).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8pass.quant_key import FP8_DTYPES
from fp8pass.spellings.integer_product import zero_of_rows
from fp8pass.spellings.walk import (
    MUL,
    VIEWS,
    aten,
    cast_to,
    dtype_of,
    is_call,
    one_element,
    same,
    same_shape,
    tensor,
)

CODES = frozenset({*FP8_DTYPES, torch.int8})
_TRANSPOSES = (aten.permute.default, aten.t.default, aten.transpose.int)
_COPIES = (aten.clone.default, aten.alias.default)
#: Operators that move elements and change none: they can be done to the codes instead.
MOVES = (*VIEWS, *_TRANSPOSES, *_COPIES)
#: Model dtypes that hold every code of a dtype; float32 holds those of all.
_HALVES = {
    torch.float8_e4m3fn: (torch.bfloat16, torch.float16),
    torch.float8_e5m2: (torch.bfloat16, torch.float16),
    torch.int8: (torch.bfloat16, torch.float16),
}


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand of a product.

    Attributes:
        codes: what was converted to float32.
        moves: what moves its elements into the product's operand, innermost first.
        scale: what it is multiplied by before the product, or None.
        group: for a scale: ``tensor``, ``vector`` (one per row of ``a`` or column of ``b``) or
            ``(rows, columns)`` of a block of the operand.
        transposed: the scale's two dims are those of the transposed operand.
        zero: what is subtracted from int8 codes first (of ``a`` alone), or None.
    """

    codes: fx.Node
    moves: tuple[fx.Node, ...] = ()
    scale: fx.Node | None = None
    group: str | tuple[int, int] = ""
    transposed: bool = False
    zero: fx.Node | None = None


def codes_behind(node: Any) -> fx.Node | None:
    """The codes that a value may be computed from by casts, moves and multiplications."""
    for _ in range(16):
        if not isinstance(node, fx.Node):
            return None
        if dtype_of(node) in CODES:
            return node
        if cast_to(node) is not None or is_call(node, *MOVES, aten.expand.default):
            node = node.args[0]
        elif is_call(node, aten.sub.Tensor) and len(node.args) == 2 and not node.kwargs:
            node = node.args[0]  # codes less a zero point
            if dtype_of(codes_behind(node)) != torch.int8:
                return None
        elif is_call(node, *MUL):
            found = [codes_behind(arg) for arg in node.args[:2]]
            known = [codes for codes in found if codes is not None]
            return known[0] if len(known) == 1 else None
        else:
            return None
    return None


def _codes_of(node: Any) -> fx.Node | None:
    """The codes that ``node`` converts to float32, perhaps by way of a dtype that holds them."""
    if cast_to(node) != torch.float32:
        return None
    inner = node.args[0]
    if dtype_of(inner) in CODES:
        return inner if isinstance(inner, fx.Node) else None
    half = cast_to(inner)
    if half is None:
        return None
    codes = inner.args[0]
    holds = half in _HALVES.get(dtype_of(codes), ())  # type: ignore[arg-type]
    return codes if holds and isinstance(codes, fx.Node) else None


def read_operand(node: Any, side: str) -> Operand | None:
    """The float32 operand ``a`` or ``b`` (``side``) of a product; None for anything else."""
    moves: list[fx.Node] = []  # outermost first
    scale: fx.Node | None = None
    multiplied: fx.Node | None = None
    outer = 0
    zero: fx.Node | None = None
    while True:
        codes = _codes_of(node)
        if codes is not None:
            break
        less = _less_zero(node) if side == "a" else None
        if less is not None:
            codes, zero = less
            break
        if is_call(node, *MOVES):
            moves.append(node)
            node = node.args[0]
        elif scale is None and is_call(node, aten.mul.Tensor) and dtype_of(node) == torch.float32:
            sides = [codes_behind(arg) is not None for arg in node.args]
            if sum(sides) != 1:
                return None
            multiplied, outer = node, len(moves)
            scale = node.args[1 - sides.index(True)]
            node = node.args[sides.index(True)]
            before, after = tensor(node), tensor(multiplied)
            if before is None or after is None or not same_shape(before, after):
                return None
        else:
            return None
    inner_first = tuple(reversed(moves))
    if zero is not None and not _keeps_rows(zero, moves):
        return None
    if multiplied is None or scale is None:
        return Operand(codes, inner_first, zero=zero)
    found = scale_of(scale, multiplied, moves[:outer], side)
    if found is None:
        return None
    return Operand(codes, inner_first, *found, zero=zero)


def _keeps_rows(zero: fx.Node, moves: list[fx.Node]) -> bool:
    """Whether the rows of a zero point are still those of the matrix after ``moves``."""
    held = tensor(zero)
    if held is None or one_element(held):
        return held is not None
    for move in moves:
        before, after = tensor(move.args[0]), tensor(move)
        if is_call(move, *_COPIES):
            continue
        if not is_call(move, *VIEWS) or before is None or after is None or after.dim() < 2:
            return False
        if not same(before.shape[-1], after.shape[-1]):
            return False
    return True


def _less_zero(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """``(codes, zero point)`` of ``codes.float() - zero`` with a zero point of its rows."""
    if not is_call(node, aten.sub.Tensor) or len(node.args) != 2 or node.kwargs:
        return None
    codes, zero, value = _codes_of(node.args[0]), node.args[1], tensor(node)
    if codes is None or dtype_of(codes) != torch.int8 or dtype_of(node) != torch.float32:
        return None
    if value is None or not isinstance(zero, fx.Node) or not zero_of_rows(zero, value):
        return None
    return codes, zero


def scale_of(
    scale: Any,
    multiplied: fx.Node,
    outer: list[fx.Node],
    side: str,
    dtypes: Collection[torch.dtype] = (torch.float32,),
) -> tuple[fx.Node, str | tuple[int, int], bool] | None:
    """``(scale, group, transposed)`` of an :class:`Operand` that is ``multiplied``, then moved.

    ``outer`` are these moves, outermost first; ``dtypes`` those that the scale may have.
    """
    held, value = tensor(scale), tensor(multiplied)
    if held is None or value is None or held.dtype not in dtypes:
        return None
    if one_element(held):
        return scale, "tensor", False
    outer = [move for move in outer if not is_call(move, *_COPIES)]
    turned = [move for move in outer if is_call(move, *_TRANSPOSES)]
    views = [move for move in outer if is_call(move, *VIEWS)]
    if any(_rank(move) != 2 for move in turned) or len(turned) > 1:
        return None
    if turned and outer[0] is not turned[0]:
        return None
    final = tensor(views[0]) if views else value
    transposed = bool(turned)
    if final is None:
        return None
    if views and not same(final.shape[-1], value.shape[-1]):
        return _split_blocks(scale, held, value, final, transposed)
    # one per element, repeated in blocks: asked first, for a matrix of one row looks like a vector
    if value.dim() == 2 and not views and same_shape(held, value):
        spread = read_spread(scale, dtypes)
        if spread is not None and _fits(*spread, value):
            return *spread, transposed
    # one per row of what is multiplied, or one per column
    if held.dim() == value.dim() and same(held.shape[-1], 1):
        rows = all(same(x, y) for x, y in zip(held.shape[:-1], value.shape[:-1], strict=True))
        if rows and transposed == (side == "b"):
            return scale, "vector", transposed
        return None
    alone = all(same(size, 1) for size in held.shape[:-1])
    if alone and held.dim() <= value.dim() and same(held.shape[-1], value.shape[-1]):
        return (scale, "vector", transposed) if transposed == (side == "a") else None
    return None


def _rank(node: fx.Node) -> int:
    value = tensor(node)
    return -1 if value is None else value.dim()


def _split_blocks(
    scale: fx.Node,
    held: torch.Tensor,
    value: torch.Tensor,
    final: torch.Tensor,
    transposed: bool,
) -> tuple[fx.Node, str | tuple[int, int], bool] | None:
    """``[..., G, g] * [..., G, 1]`` or ``[R, r, C, c] * [R, 1, C, 1]``, viewed as a matrix."""
    if value.dim() != held.dim() or value.dim() < 3 or final.dim() != 2:
        return None
    groups, size = value.shape[-2:]
    if not same(held.shape[-1], 1) or not same(held.shape[-2], groups):
        return None
    if not same(final.shape[-1], groups * size):
        return None
    rows: Any = 1
    if value.dim() == 4 and same(held.shape[1], 1) and not same(value.shape[1], 1):
        rows = value.shape[1]
        fits = same(held.shape[0], value.shape[0]) and same(final.shape[0], value.shape[0] * rows)
    else:
        fits = all(same(x, y) for x, y in zip(held.shape[:-1], value.shape[:-1], strict=True))
    if not fits or not all(type(block) is int and block > 0 for block in (rows, size, groups)):
        return None
    return scale, (int(rows), int(size)), transposed


def read_spread(
    node: Any, dtypes: Collection[torch.dtype] = (torch.float32,)
) -> tuple[fx.Node, tuple[int, int]] | None:
    """``(base, (rows, columns))`` of a matrix that repeats each element of ``base`` in blocks."""
    blocks = [1, 1]
    while True:
        inner = node
        if is_call(inner, aten.slice.Tensor):  # the last block cut short: checked by sizes
            if len(inner.args) > 4 or (len(inner.args) > 2 and inner.args[2] != 0):
                return None
            inner = inner.args[0]
        step = _repeated(inner)
        if step is None:
            break
        node, dim, times = step
        if blocks[dim] != 1:
            return None
        blocks[dim] = times
    value = tensor(node)
    if blocks == [1, 1] or value is None or value.dim() != 2 or value.dtype not in dtypes:
        return None
    return node, (blocks[0], blocks[1])


def _repeated(node: Any) -> tuple[fx.Node, int, int] | None:
    """``repeat_interleave`` along one dim of a matrix, as aten spells it: (matrix, dim, times)."""
    if not is_call(node, *VIEWS):
        return None
    wide = node.args[0]
    while is_call(wide, *_COPIES):
        wide = wide.args[0]
    if not is_call(wide, aten.expand.default) or not is_call(wide.args[0], aten.unsqueeze.default):
        return None
    base, dim = wide.args[0].args[:2]
    held, spread, merged = tensor(base), tensor(wide), tensor(node)
    if held is None or spread is None or merged is None or held.dim() != 2 or merged.dim() != 2:
        return None
    if not isinstance(dim, int):
        return None
    dim = dim % 3 - 1
    times: Any = spread.shape[dim + 1] if dim >= 0 else None
    if type(times) is not int or times < 2:
        return None
    for i in (0, 1):
        wanted: Any = held.shape[i] * times if i == dim else held.shape[i]
        if not same(merged.shape[i], wanted):
            return None
    return base, dim, times


def _fits(base: fx.Node, group: tuple[int, int], value: torch.Tensor) -> bool:
    """Whether the blocks cover the matrix and no block is left over."""
    held = tensor(base)
    assert held is not None
    for size, count, block in zip(value.shape, held.shape, group, strict=True):
        if block == 1:
            if not same(size, count):
                return False
        elif type(size) is not int or not same(count, -(-size // block)):
            return False
    return True
