"""A graph for reading: one line per call, with the dtype, shape and (unusual) strides it gives.

``graph_text`` is the graph as Python, complete and long; this is what one compares by eye. Values
are numbered in order and symbolic sizes renamed ``s0``, ``s1``, ... in the order in which they
appear, so that equal graphs give equal texts whatever their nodes are called.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fp8pass.report.graph_text import live_copy
from fp8pass.strides import contiguous_strides

_SYMBOL = re.compile(r"\b[su]\d+\b")


def listing(graph: fx.Graph, names: Mapping[str, str] | None = None) -> str:
    """The live part of ``graph`` as lines: inputs, calls, results.

    Args:
        graph: any FX graph with ``meta["val"]``; values without it are listed without a type.
        names: name of a placeholder -> what to call it.
    """
    return _Listing(live_copy(graph), names or {}).text()


def call_names(graph: fx.Graph) -> list[str]:
    """The operators that the live part of a graph calls, in order.

    Python's operators on sizes and ``getitem`` do not count: they run no kernel.
    """
    found = []
    for node in live_copy(graph).nodes:
        if node.op == "call_function" and not _is_python(node.target):
            found.append(str(node.target))
    return found


def _is_python(target: Any) -> bool:
    return not isinstance(
        target,
        (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator),
    )


class _Listing:
    def __init__(self, graph: fx.Graph, names: Mapping[str, str]) -> None:
        self.graph = graph
        self.symbols: dict[str, str] = {}
        self.device = _device(graph)
        self.labels: dict[fx.Node, str] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                self.labels[node] = names.get(node.name, node.name)
            elif node.op == "get_attr":
                self.labels[node] = f"self.{node.target}"
            else:
                self.labels[node] = f"%{len(self.labels)}"
        # numbers count the calls, not what stands before them
        numbered = [n for n in graph.nodes if self.labels[n].startswith("%")]
        self.labels |= {node: f"%{i}" for i, node in enumerate(numbered)}

    def text(self) -> str:
        inputs, calls, result = [], [], ""
        for node in self.graph.nodes:
            if node.op == "placeholder":
                inputs.append((self.labels[node], self.type(node)))
            elif node.op == "output":
                result = f"return {self.value(node.args[0])}"
            elif node.op != "get_attr":
                kind = self.type(node)
                label = f"{self.labels[node]}: {kind}" if kind else self.labels[node]
                calls.append(f"  {label} = {self.call(node)}")
        width = max((len(label) for label, _ in inputs), default=0)
        lines = [f"inputs on {self.device}" if self.device is not None else "inputs"]
        lines += [f"  {label.ljust(width)}  {kind}".rstrip() for label, kind in inputs]
        return "\n".join([*lines, "calls", *calls, result])

    def call(self, node: fx.Node) -> str:
        if node.target is operator.getitem:
            return f"{self.value(node.args[0])}[{self.value(node.args[1])}]"
        target = node.target
        name = target if isinstance(target, str) else str(target)
        if callable(target) and _is_python(target):
            name = f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', name)}"
            name = name.removeprefix("_")  # the module of operator.add is _operator
        words = [self.value(arg) for arg in node.args]
        words += [f"{key}={self.value(value)}" for key, value in node.kwargs.items()]
        return f"{name}({', '.join(words)})"

    def value(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.labels[value]
        if isinstance(value, (list, tuple)):
            inner = ", ".join(self.value(item) for item in value)
            comma = "," if len(value) == 1 else ""
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{comma})"
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return f"slice({', '.join(self.value(part) for part in parts)})"
        if isinstance(value, torch.device):
            return str(value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self.symbolic(value)
        return repr(value)

    def type(self, node: fx.Node) -> str:
        return self.kind(node.meta.get("val"))

    def kind(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            shape = ", ".join(self.symbolic(size) for size in value.shape)
            text = f"{str(value.dtype).removeprefix('torch.')}[{shape}]"
            strides = [self.symbolic(stride) for stride in value.stride()]
            if strides != [self.symbolic(stride) for stride in contiguous_strides(value.shape)]:
                text += f" strides [{', '.join(strides)}]"
            if value.storage_offset():
                text += f" offset {self.symbolic(value.storage_offset())}"
            return text if value.device == self.device else f"{text} on {value.device}"
        if isinstance(value, (list, tuple)):
            return f"({', '.join(self.kind(item) for item in value)})"
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self.symbolic(value)
        return "" if value is None else repr(value)

    def symbolic(self, value: Any) -> str:
        """A size, its symbols renamed; asks nothing of it, since that would add a guard."""
        return _SYMBOL.sub(
            lambda m: self.symbols.setdefault(m[0], f"{m[0][0]}{len(self.symbols)}"), str(value)
        )


def _device(graph: fx.Graph) -> torch.device | None:
    """The device of the first tensor: that of all others, as a rule."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            return value.device
    return None
