"""Reads how the scale of a quantise is laid out afterwards: column-major, or aligned for TMA.

    scale [M, G] ─ permute ─ clone ─ permute                           (1, M)       ``col``
                 ─ copy into empty [G, M] permuted                     (1, M)       ``col``
                 ─ pad M to a multiple of 4 ─ permute ─ clone ─ permute ─ slice     ``tma``
                 ─ copy into empty_strided of strides (1, 4 * ceil(M / 4))          ``tma``
                 ─ unsqueeze ─ copy into a slice of empty [1, G, 4 * ceil(M / 4)]   ``tma``

Each is a copy that changes strides and no number. A quantise that writes its scale in that layout
makes the copy needless, so the layout becomes part of the form, if nothing else reads the scale as
it was: where readers want different layouts, the scale stays row-major and the copies stay.

Strides are compared as the graph knows them, which may be in symbolic ``M``; nothing is assumed of
``M``. A copy of one row that is known to be one has nothing to change, and torch makes none.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8pass.spellings.walk import (
    VIEWS,
    argument,
    aten,
    contiguous,
    is_call,
    same,
    same_shape,
    tensor,
)

#: How many calls a layout may be spelled with, on one path.
_FAR = 24
_TURNS = (aten.permute.default, aten.t.default, aten.transpose.int)
_EMPTY = (aten.empty.memory_format, aten.empty_strided.default)


@dataclass(frozen=True, slots=True)
class Laid:
    """``node`` holds the scale ``[M, G]`` (or it ``turned``, ``[G, M]``) in ``layout``.

    Where ``layout`` is empty, ``node`` is the scale as it was, and only its sizes are read.
    """

    node: fx.Node
    layout: str
    turned: bool


@dataclass(frozen=True, slots=True)
class _State:
    """What a node on the way is, relative to the scale ``[M, G]``.

    ``padded``: rows were added after the last; ``front``: a dim of size 1 stands before the others;
    ``copied``: its memory is its own.
    """

    turned: bool = False
    padded: bool = False
    front: bool = False
    copied: bool = False


@dataclass(frozen=True, slots=True)
class _Matrix:
    """The scale as a matrix ``[rows, groups]``; its dtype and device."""

    rows: Any
    groups: int
    dtype: torch.dtype
    device: torch.device


def read_layouts(scale: fx.Node, live: Container[fx.Node]) -> list[Laid]:
    """Where ``scale [..., G]`` ends up laid out in one layout, if nothing reads it but by these.

    Args:
        scale: the dequant scale of a quantise per group, contiguous float32.
        live: nodes of the graph that an output needs; the others do not count as readers.

    Returns:
        The nodes to be given another value, all of one layout; empty if there are none, if they
        differ, or if anything reads the scale (or what is made of it on the way) otherwise.
    """
    value = tensor(scale)
    if value is None or value.dim() < 2 or value.dtype != torch.float32 or not contiguous(value):
        return []
    groups: Any = value.shape[-1]
    found: list[Laid] = []
    if type(groups) is not int or groups < 2:
        return []
    if not _follow_views(scale, groups, live, found, _FAR):
        return []
    return found if len({laid.layout for laid in found} - {""}) == 1 else []


def _follow_views(
    node: fx.Node, groups: int, live: Container[fx.Node], found: list[Laid], far: int
) -> bool:
    """:func:`_follow` from a contiguous ``[..., G]``, which views keep as it is in memory."""
    value = tensor(node)
    if value is None or not contiguous(value) or far == 0:
        return False
    for user in node.users:
        if user not in live:
            continue
        if is_call(user, aten.sym_size.int):
            if value.dim() != 2 or not same(value.shape[-1], groups):
                return False
            found.append(Laid(node, "", False))
        elif is_call(user, *VIEWS):
            if not _follow_views(user, groups, live, found, far - 1):
                return False
        elif not _copied(node, user, value, groups, live, found, far):
            return False
    return True


def _copied(
    node: fx.Node,
    user: fx.Node,
    value: torch.Tensor,
    groups: int,
    live: Container[fx.Node],
    found: list[Laid],
    far: int,
) -> bool:
    """:func:`_follow` of one reader of ``node [M, G]`` or ``[1, M, G]``, which is no view."""
    front = value.dim() == 3
    if value.dim() not in (2, 3) or not same(value.shape[-1], groups):
        return False
    if front and not same(value.shape[0], 1):
        return False
    scale = _Matrix(value.shape[-2], groups, value.dtype, value.device)
    return _follow(node, _State(front=front), scale, [user], found, far - 1, live)


def _follow(
    node: fx.Node,
    state: _State,
    scale: _Matrix,
    users: Iterable[fx.Node],
    found: list[Laid],
    far: int,
    live: Container[fx.Node],
) -> bool:
    """Whether every live one of ``users`` of ``node`` leads to a layout, added to ``found``."""
    for user in users:
        if user not in live:
            continue
        after = _step(node, user, state, scale)
        if after is None or far == 0:
            return False
        layout = _layout(user, after, scale)
        if layout is not None:
            found.append(Laid(user, layout, after.turned))
        elif not _follow(user, after, scale, user.users, found, far - 1, live):
            return False
    return True


def _step(node: fx.Node, user: fx.Node, state: _State, scale: _Matrix) -> _State | None:
    """The state of ``user``, which reads ``node``; None if it does anything else with it."""
    turned, padded, front, copied = state.turned, state.padded, state.front, state.copied
    value = tensor(user)
    if value is None or value.dtype != scale.dtype or value.device != scale.device:
        return None
    if is_call(user, *_TURNS):
        order = _order(user, value.dim())
        plain, swapped = ([0, 1, 2], [0, 2, 1]) if front else ([0, 1], [1, 0])
        if order not in (plain, swapped):
            return None
        return _State(turned ^ (order == swapped), padded, front, copied)
    if is_call(user, aten.clone.default):
        return _State(turned, padded, front, True)
    if is_call(user, aten.unsqueeze.default) and user.args[1] in (0, -3) and not front:
        return _State(turned, padded, True, copied)
    if is_call(user, aten.squeeze.dim) and user.args[1] in (0, -3) and front:
        return _State(turned, padded, False, copied)
    rows = int(front) + int(turned)
    if is_call(user, aten.constant_pad_nd.default):
        # no copy as far as strides go: one that adds no rows keeps those it reads
        return _State(turned, True, front, copied) if _pads(user, rows) and not padded else None
    if is_call(user, aten.slice.Tensor):
        return _State(turned, False, front, copied) if _cuts(user, rows, scale) else None
    if is_call(user, aten.copy.default) and user.args[1] is node and not padded:
        target, held = tensor(user.args[0]), tensor(node)
        if target is None or held is None or not _is_empty(user.args[0]):
            return None
        return _State(turned, padded, front, True) if same_shape(target, held) else None
    if is_call(user, aten.slice_scatter.default) and user.args[1] is node and not padded:
        # what lies outside of the slice was never written: it holds no number that anyone may read
        if not _is_empty(user.args[0]) or not _cuts(user, rows, scale, first=2):
            return None
        return _State(turned, True, front, True)
    return None


def _layout(node: fx.Node, state: _State, scale: _Matrix) -> str | None:
    """``col`` or ``tma`` if ``node`` is the scale in that layout, in memory of its own."""
    value = tensor(node)
    if value is None or state.padded or state.front or not state.copied or value.dim() != 2:
        return None
    rows: Any = scale.rows
    strides = value.stride() if not state.turned else value.stride()[::-1]
    if not same(strides[0], 1) or value.storage_offset() != 0:
        return None
    if same(strides[1], rows):
        return "col"
    aligned = (rows + 3) // 4 * 4
    if same(strides[1], aligned) or same(strides[1], torch.sym_max(1, aligned)):
        return "tma"
    return None


def _order(node: fx.Node, rank: int) -> list[int] | None:
    """The dims of a permutation."""
    if is_call(node, aten.t.default):
        return [1, 0] if rank == 2 else None
    if is_call(node, aten.transpose.int):
        order = list(range(rank))
        a, b = (int(dim) % rank for dim in node.args[1:3])
        order[a], order[b] = order[b], order[a]
        return order
    dims = node.args[1]
    return [int(dim) % rank for dim in dims] if isinstance(dims, (list, tuple)) else None  # type: ignore[arg-type]


def _pads(node: fx.Node, rows: int) -> bool:
    """Whether a padding adds rows after the last and nothing else; ``rows`` is their dim."""
    pads, value = node.args[1], tensor(node)
    if not isinstance(pads, (list, tuple)) or value is None or len(pads) % 2:
        return False
    where = 2 * (value.dim() - 1 - rows)  # pairs (before, after), the last dim first
    for i, size in enumerate(pads):
        if i == where + 1:
            # negative: rows are taken away, which only a slice may do here
            if isinstance(size, int) and size < 0:
                return False
        elif not (isinstance(size, int) and size == 0):
            return False
    return len(pads) > where + 1


def _cuts(node: fx.Node, rows: int, scale: _Matrix, first: int = 1) -> bool:
    """Whether a slice (its arguments from ``first`` on) takes all rows of the scale."""
    held = tensor(node.args[1] if first == 2 else node)
    if held is None:
        return False
    dim = argument(node, first, "dim", 0)
    start = argument(node, first + 1, "start", 0)
    step = argument(node, first + 3, "step", 1)
    if dim % held.dim() != rows or start not in (0, None) or step != 1:
        return False
    return same(held.shape[rows], scale.rows)


def _is_empty(node: Any) -> bool:
    """Whether ``node`` is memory that nothing was written to, or a view of it."""
    for _ in range(4):
        if is_call(node, *_EMPTY):
            return True
        if not is_call(node, *_TURNS, aten.slice.Tensor, aten.unsqueeze.default):
            return False
        node = node.args[0]
    return False
