"""Calls of operators that write to their arguments, in the functional form that torch gives them.

    empty ─┐
    x ─────┴ auto_functionalized(op, result=empty, input=x) ─ getitem 1 ─ what op wrote

``auto_functionalized`` calls the operator on copies of what it writes to, and returns what it
returns (None for nothing), then those copies in the order of the schema. ``auto_functionalized_v2``
is given the tensors that the written ones are views of (``_all_bases``), and returns these. A
written argument that is a proper view of its base is not followed here.

What an operator writes over counts as memory of its own (:func:`not_fresh`) if it was allocated
for this call: an ``empty`` that nothing else reads. Then nothing can depend on what was there
before, nor on when it is written.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8pass.spellings.walk import aten, is_call

_FIRST, _SECOND = "auto_functionalized", "auto_functionalized_v2"
_EMPTY = (
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
#: Views under which memory is handed over.
_TURNS = (aten.permute.default, aten.t.default, aten.transpose.int)
#: How the second form says that an argument is a part of its base.
_PARTS = ("_size", "_stride", "_storage_offset", "_slice_dim", "_slice_start", "_slice_end")


@dataclass(frozen=True, slots=True)
class Functional:
    """One such call.

    Attributes:
        node: the call of the higher-order operator.
        op: the operator that it calls.
        given: its arguments by name, defaults filled in; of a written one what it was before.
        places: name of a written argument -> index of its copy among the results.
        unknown: names of written arguments that are parts of their bases.
    """

    node: fx.Node
    op: torch._ops.OpOverload
    given: dict[str, Any]
    places: dict[str, int]
    unknown: tuple[str, ...]

    def results(self, name: str) -> tuple[fx.Node, ...]:
        """The nodes that read what was written to an argument, first to last."""
        place = self.places.get(name)
        return tuple(u for u in self.node.users if getitem_of(u) == place and place is not None)


def getitem_of(node: fx.Node) -> int | None:
    """The index that a ``getitem`` takes, None for another node."""
    index = node.args[1] if is_call(node, operator.getitem) else None
    return index if isinstance(index, int) else None


def inner_operator(node: Any) -> torch._ops.OpOverload | None:
    """The operator that a call in functional form calls, None for any other node."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    target = node.target
    if not isinstance(target, torch._ops.HigherOrderOperator):
        return None
    if target.name() not in (_FIRST, _SECOND) or not node.args:
        return None
    inner = node.args[0]
    return inner if isinstance(inner, torch._ops.OpOverload) else None


def functional(node: Any) -> Functional | None:
    """What a call in functional form calls, with what; None for any other node."""
    op = inner_operator(node)
    if op is None or len(node.args) != 1:
        return None
    schema = op._schema
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    first = max(1, len(schema.returns))
    places: dict[str, int] = {}
    given: dict[str, Any] = {}
    unknown: list[str] = []
    bases = node.kwargs.get("_all_bases") or ()
    second = node.target.name() == _SECOND
    for argument in schema.arguments:
        name = argument.name
        default = argument.default_value if argument.has_default_value() else None
        if name not in written or not second:
            given[name] = node.kwargs.get(name, default)
            if name in written:
                places[name] = first + written.index(name)
            continue
        index = node.kwargs.get(f"_{name}_base_index")
        given[name] = None if index is None else bases[index]
        if index is not None:
            places[name] = first + index
        if any(node.kwargs.get(f"_{name}{part}") is not None for part in _PARTS):
            unknown.append(name)
    shared = [name for name, place in places.items() if list(places.values()).count(place) > 1]
    return Functional(node, op, given, places, tuple(dict.fromkeys((*unknown, *shared))))


def not_fresh(call: Functional, name: str) -> str | None:
    """Why a written argument is not memory of the call's own, None if it is."""
    if name in call.unknown:
        return f"its argument {name} is a part of another tensor"
    node = call.given.get(name)
    user = call.node
    while isinstance(node, fx.Node):
        if list(node.users) != [user]:
            return f"what it writes to as {name} ({node.name}) is read elsewhere too"
        if is_call(node, *_EMPTY):
            return None
        if not is_call(node, *_TURNS):
            return f"what it writes to as {name} ({node.name}) was not allocated for it"
        user, node = node, node.args[0]
    return f"its argument {name} is not given"
