"""Readers that see the memory of a value and not its elements alone: ``as_strided`` and its kind.

    scale ─ pad ─ permute ─ clone ─ permute ─ slice ─ as_strided        reads the padding too

A value that takes the place of another has its elements, not always its strides, and never what
stands behind them. So nothing is put in the place of one whose memory is read, or written, unless
both are the whole of their memory, in order.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import fx

from fp8pass.spellings.walk import aten, contiguous, same, tensor

#: Named, since an operator of another version of torch need not be there.
_BY_PLACE = frozenset(
    {
        "aten::as_strided",
        "aten::as_strided_copy",
        "aten::as_strided_scatter",
        "aten::set",
        "aten::resize",
        "aten::resize_as",
        "aten::resize_as_sparse",
        "aten::storage_offset",
        "aten::sym_storage_offset",
        "aten::stride",
        "aten::sym_stride",
        "aten::is_contiguous",
        "aten::sym_is_contiguous",
        "prims::as_strided",
        "prims::as_strided_scatter",
        "inductor::resize_storage_bytes_",
    }
)
#: May share their input's memory without saying so in their schema.
_SHARING = (aten._unsafe_view.default, aten.reshape.default, operator.getitem)


@cache
def _kind(target: torch._ops.OpOverload, names: tuple[str, ...]) -> str:
    """What ``target`` does with its arguments ``names``: ``place``, ``write``, ``share`` or ``""``.

    ``share``: a result may be a view of one of them.
    """
    schema = target._schema
    if schema.name in _BY_PLACE:
        return "place"
    infos = [arg.alias_info for arg in schema.arguments if arg.name in names]
    if any(info is not None and info.is_write for info in infos):
        return "write"
    shares = target in _SHARING or any(info is not None for info in infos)
    return "share" if shares else ""


def _kind_of(user: fx.Node, node: fx.Node) -> str:
    target = user.target
    if target in _SHARING:
        return "share"
    if user.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return ""
    taken = [*zip((arg.name for arg in target._schema.arguments), user.args, strict=False)]
    names = [name for name, value in (*taken, *user.kwargs.items()) if _holds(value, node)]
    return _kind(target, tuple(names))


def _holds(value: Any, node: fx.Node) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_holds(part, node) for part in value)
    return value is node


def _whole(node: fx.Node) -> bool:
    """Whether the elements of ``node``, in order, are all that its memory holds."""
    value = tensor(node)
    if value is None or not contiguous(value) or not same(value.storage_offset(), 0):
        return False
    return same(value.untyped_storage().nbytes(), value.numel() * value.element_size())


def read_by_place(nodes: Iterable[fx.Node | None], *, whole: bool = True) -> str:
    """Why none of ``nodes`` may be given another value with the same elements; ``""`` if it may.

    Views of a node are followed, and what they share its memory with. ``whole``: the other value
    is the whole of its memory, in order.
    """
    for node in nodes:
        if node is None:
            continue
        stack, seen = [node], {node}
        while stack:
            at = stack.pop()
            for user in at.users:
                kind = _kind_of(user, at)
                if kind == "write" or kind == "place" and not (whole and _whole(node)):
                    does = "is written to by" if kind == "write" else "is read by its place by"
                    return f"the memory of {node.name} {does} {user.target} at {user.name}"
                if kind and user not in seen:
                    seen.add(user)
                    stack.append(user)
    return ""
