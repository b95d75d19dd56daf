"""Spellings of norms and activations: what a file of this folder offers to the reader.

A spelling is a structural walker that starts at a node of one of its anchors and either gives a
:class:`Producer` or None. It changes nothing; the reader puts the operator in. A file of this
folder lists its own in ``SPELLINGS``; they are found by that name: a new one is a new file.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True, slots=True)
class Part:
    """The columns ``[start, stop)`` of ``node [..., H]``, which the reader cuts out."""

    node: fx.Node
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Producer:
    """A norm or an activation that a spelling found.

    Attributes:
        op: the generic operator that stands for it.
        args: its arguments; a :class:`Part` stands for a node that is yet to be made.
        form: text of its form.
        results: name of a result of ``op`` -> the node whose value it is, or a tuple of all such
            nodes, which may be empty, in the operator's order; the first one has a node.
        otherwise: what to put instead if an argument turns out to be computed from one of the
            results, which would be a cycle.
    """

    op: Any
    args: tuple[Any, ...]
    form: str
    results: dict[str, fx.Node | tuple[fx.Node, ...]]
    otherwise: Producer | None = None

    def nodes(self) -> dict[str, tuple[fx.Node, ...]]:
        """The nodes of each result."""
        return {k: v if isinstance(v, tuple) else (v,) for k, v in self.results.items()}

    def all_nodes(self) -> list[fx.Node]:
        """The nodes of all results."""
        return [node for nodes in self.nodes().values() for node in nodes]


@dataclass(frozen=True, slots=True)
class Spelling:
    """One way to write a norm or an activation.

    Attributes:
        name: for messages.
        anchors: overloads of the nodes at which ``match`` is tried; an operator of a library that
            may not be there by its name, such as ``"acme::rms_norm"``.
        match: the reader; None if the node is not one.
        order: spellings of one anchor are tried in this order, then by name.
        quantised: instead of at anchors, it is tried at the value that a quantise reads.
    """

    name: str
    anchors: tuple[Any, ...]
    match: Callable[[fx.Node], Producer | None]
    order: int = 100
    quantised: bool = False


def spellings_at(node: fx.Node) -> tuple[Spelling, ...]:
    """The spellings to try at a call."""
    known, target = spellings(), node.target
    name = target._schema.name if isinstance(target, torch._ops.OpOverload) else ""
    return known.get(target) or known.get(name, ())


@cache
def quantised_spellings() -> tuple[Spelling, ...]:
    """The spellings to try at the value that a quantise reads."""
    return tuple(spelling for spelling in _all() if spelling.quantised)


@cache
def spellings() -> dict[Any, tuple[Spelling, ...]]:
    """Anchor -> the spellings to try there."""
    table: dict[Any, list[Spelling]] = {}
    for spelling in _all():
        for anchor in spelling.anchors:
            table.setdefault(anchor, []).append(spelling)
    return {anchor: tuple(tried) for anchor, tried in table.items()}


@cache
def _all() -> tuple[Spelling, ...]:
    """The spellings of every file of this folder, in their order."""
    package = importlib.import_module(__package__)
    found: list[Spelling] = []
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{__package__}.{info.name}")
        found += getattr(module, "SPELLINGS", ())
    names = [spelling.name for spelling in found]
    if len(set(names)) != len(names):
        raise ValueError(f"two spellings of one name among {', '.join(sorted(names))}")
    return tuple(sorted(found, key=lambda s: (s.order, s.name)))
