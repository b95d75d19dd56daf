"""A graph as a Python file, and the operators in such a file.

The pass keeps the nodes that it replaced as dead code until its end, so the text is made from a
copy without dead code; the graph that is given is never altered.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from inspect import signature
from typing import Any

import torch
from torch import fx

_HEADER = "from __future__ import annotations\n\nimport torch\nfrom torch import device, inf, nan\n"


def live_copy(graph: fx.Graph) -> fx.Graph:
    """A copy of ``graph`` without dead code; node names and meta are those of the original."""
    stack = [node for node in graph.nodes if _has_effect(node)]
    live = set(stack)
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in live:
                live.add(source)
                stack.append(source)
    copy = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for wanted in graph.nodes:
        # while the pass runs, a node may stand before what it reads
        stack = [wanted] if wanted in live else []
        while stack:
            node = stack[-1]
            missing = [n for n in node.all_input_nodes if n not in values]
            stack += missing
            if not missing:
                stack.pop()
                if node not in values:
                    values[node] = copy.node_copy(node, lambda n: values[n])
    return copy


def live_module(graph: fx.Graph) -> fx.GraphModule:
    """:func:`live_copy` as a module that shares the attributes of the graph's own module."""
    root: torch.nn.Module | None = graph.owning_module
    if root is None:
        root = torch.nn.Module()
        for node in graph.find_nodes(op="get_attr"):
            setattr(root, str(node.target), None)
    return fx.GraphModule(root, live_copy(graph))


def graph_text(graph: fx.Graph, title: str = "") -> str:
    """Python source of the live part of ``graph``, with dtypes, shapes and strides as comments.

    The text is a module with a class ``GraphModule``; graphs that it calls are classes inside it.
    """
    comments = "".join(f"# {line}\n" for line in title.splitlines())
    return f"{comments}{_HEADER}\n\n{_class_text(graph, 'GraphModule')}\n"


def count_ops(source: str | fx.Graph | fx.GraphModule) -> Counter[str]:
    """How often each operator is called, such as ``{"aten.mul.Tensor": 3}``.

    Args:
        source: text of a dumped graph (parsed with ``ast``, never executed), or a graph, of which
            the live part counts. Python operators on sizes and tuples are not operators.

    Raises:
        SyntaxError: the text is not Python.
    """
    names = _names_in_text(source) if isinstance(source, str) else _names_in_graph(source)
    return Counter(names)


def _names_in_text(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = _dotted(node.func)
            if name.startswith("torch.ops."):
                yield name.removeprefix("torch.ops.")


def _dotted(node: ast.expr) -> str:
    """``a.b.c`` of nested attributes; a tenth of the time of ``ast.unparse``."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _names_in_graph(source: fx.Graph | fx.GraphModule) -> Iterator[str]:
    graph = source.graph if isinstance(source, fx.GraphModule) else source
    for node in live_copy(graph).nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            yield f"higher_order.{node.target}"
        elif isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            yield str(node.target)
    for _, module in _subgraphs(graph):
        yield from _names_in_graph(module)


def _class_text(graph: fx.Graph, name: str) -> str:
    copy = live_copy(graph)
    options: dict[str, Any] = {"verbose": True, "include_stride": True}
    if "expanded_def" in signature(copy.python_code).parameters:  # one argument per line
        options["expanded_def"] = True
    code = copy.python_code(root_module="self", **options)
    body = [f"class {name}(torch.nn.Module):"]
    body += [f"    {line}".rstrip() for line in code.src.strip("\n").split("\n")]
    for target, module in _subgraphs(graph):
        nested = _class_text(module.graph, target.replace(".", "_"))
        body += ["", *(f"    {line}".rstrip() for line in nested.split("\n"))]
    return "\n".join(body)


def _subgraphs(graph: fx.Graph) -> Iterator[tuple[str, fx.GraphModule]]:
    """The graphs that higher-order operators of ``graph`` call, each once."""
    if graph.owning_module is None:
        return
    for target in dict.fromkeys(str(node.target) for node in graph.find_nodes(op="get_attr")):
        value: object = graph.owning_module
        for part in target.split("."):
            value = getattr(value, part, None)
        if isinstance(value, fx.GraphModule):
            yield target, value


def _has_effect(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output", "call_module"):
        return True
    return bool(node.is_impure())
