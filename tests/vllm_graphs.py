"""Graphs that vLLM 0.32 hands to a pass, rebuilt from their printed text (tests/data/vllm_graphs).

``cpu_real``: what a real engine on a CPU gave (``m2``: the whole model; ``m3``: pieces split at
attention). ``h200_sim``: what it compiles for an H200: ``pre`` and ``post`` vLLM's own fusions, by
its default flags and with its fusions forced on. Models are two layers of a Llama (``q3``: of a
Qwen3), ``i`` quantised online, ``ii`` static, ``iii`` dynamic per token, ``iv`` in blocks of 128.
``SAME`` names the graphs that are equal to another one, which alone is kept.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import vllm_standins  # noqa: F401  (the operators)
from graphs import fake_mode
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

DATA = Path(__file__).parent / "data" / "vllm_graphs"
ROWS = 6
LAYER = "model.layers.0.self_attn.attn"

_DTYPES = {
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f8e4m3fn": torch.float8_e4m3fn,
    "i32": torch.int32,
    "i64": torch.int64,
}
_OPERATORS = {ast.Sub: operator.sub, ast.FloorDiv: operator.floordiv, ast.Add: operator.add}
_TENSOR = re.compile(r"(\w+)\[([^\]]*)\]\[([^\]]*)\](\w*)")


def names(folder: str) -> list[str]:
    """The distinct graphs of a folder."""
    return sorted(path.stem for path in (DATA / folder).glob("*.txt"))


def rebuild(name: str, device: str = "cpu") -> fx.GraphModule:
    """The graph ``folder/name`` on fake tensors of ``device``; its rows are a symbol.

    ``device`` need not exist, inside of :func:`fp8pass.absent_device.absent_device`.
    """
    return parse((DATA / f"{name}.txt").read_text(), device)


def parse(text: str, device: str = "cpu") -> fx.GraphModule:
    """The graph that ``text`` is, as ``GraphModule.print_readable`` writes it."""
    builder = _Builder(device)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    builder.placeholders(lines[0])
    for line in lines[1:]:
        builder.line(line)
    builder.finish()
    return fx.GraphModule(torch.nn.Module(), builder.graph)


class _Builder:
    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.graph = fx.Graph()
        self.mode = fake_mode()
        self.rows = symbol(self.mode)
        self.nodes: dict[str, fx.Node] = {}
        #: lines that call for a node of a later one: vLLM's own passes leave such graphs
        self.waiting: list[str] = []
        self.places: dict[str, fx.Node] = {}

    # ---- values ----------------------------------------------------------------------------------

    def value(self, note: str | None) -> Any:
        """The fake value of a placeholder with this annotation."""
        if note is None:
            return LAYER
        found = _TENSOR.fullmatch(note)
        if found is None:
            return self.rows
        dtype, shape, strides, _ = found.groups()
        meta = torch.empty_strided(
            self.sizes(shape), self.sizes(strides), dtype=_DTYPES[dtype], device="meta"
        )
        return FakeTensor(self.mode, meta, self.device)

    def sizes(self, text: str) -> list[Any]:
        return [self.rows if s == "s72" else int(s) for s in text.split(", ") if s]

    # ---- lines -----------------------------------------------------------------------------------

    def placeholders(self, line: str) -> None:
        for name, note in re.findall(r"(arg\d+_1)(?:: \"([^\"]*)\")?", line):
            node = self.graph.placeholder(name)
            node.meta["val"] = self.value(note or None)
            self.nodes[name] = node

    def line(self, text: str) -> None:
        if text.startswith("return "):
            self.results = text.removeprefix("return ")
            return
        name, note, source = re.fullmatch(r"(\w+)(?:: \"([^\"]*)\")? = (.*)", text).groups()  # type: ignore[union-attr]
        tree = ast.parse(source, mode="eval").body
        missing = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        missing -= {*self.nodes, "torch", "device", "inf"}
        if missing:
            self.waiting.append(text)
            return
        node = self.call(name, tree)
        self.nodes[name] = node
        if note:
            check(node, note)
        waiting, self.waiting = self.waiting, []
        for other in waiting:
            self.line(other)

    def call(self, name: str, tree: Any) -> fx.Node:
        kwargs = {}
        if isinstance(tree, ast.Subscript):
            target: Any = operator.getitem
            args = [self.argument(tree.value), self.argument(tree.slice)]
        elif isinstance(tree, ast.BinOp):
            target = _OPERATORS[type(tree.op)]
            args = [self.argument(tree.left), self.argument(tree.right)]
        else:
            target = self.argument(tree.func)
            args = [self.argument(arg) for arg in tree.args]
            kwargs = {k.arg: self.argument(k.value) for k in tree.keywords}
        node = self.graph.create_node("call_function", target, tuple(args), kwargs, name)
        given = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with self.mode, enable_python_dispatcher():
            node.meta["val"] = target(*given[0], **given[1])
        return node

    def argument(self, tree: Any) -> Any:
        if isinstance(tree, ast.Name):
            return torch if tree.id == "torch" else self.nodes[tree.id]
        if isinstance(tree, ast.Attribute):
            return getattr(self.argument(tree.value), tree.attr)
        if isinstance(tree, ast.Call):  # device(type='cpu')
            return self.device
        if isinstance(tree, (ast.List, ast.Tuple)):
            made = [self.argument(item) for item in tree.elts]
            return made if isinstance(tree, ast.List) else tuple(made)
        return ast.literal_eval(tree)

    def finish(self) -> None:
        assert not self.waiting, self.waiting
        self.graph.output(self.argument(ast.parse(self.results, mode="eval").body))
        self.graph.lint()


def symbol(mode: FakeTensorMode) -> Any:
    """A symbolic number of rows, of which :data:`ROWS` is an example."""
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    return mode.from_tensor(torch.empty(ROWS), symbolic_context=context).shape[0]


def check(node: fx.Node, note: str) -> None:
    """A node that was rebuilt has the dtype, the sizes and the strides that the text says."""
    value, found = node.meta["val"], _TENSOR.fullmatch(note)
    if found is None or not isinstance(value, torch.Tensor):
        return
    dtype, shape, strides, _ = found.groups()
    assert value.dtype == _DTYPES[dtype], node
    for text, given in ((shape, value.shape), (strides, value.stride())):
        assert [hint(size) for size in given] == list(_numbers(text)), (node, note, given)


def _numbers(text: str) -> Iterator[int]:
    tree = ast.parse(f"[{text}]", mode="eval")
    yield from eval(compile(tree, "sizes", "eval"), {"s72": ROWS, "Max": max})


def hint(size: Any) -> int:
    """The example of a size."""
    return size if isinstance(size, int) else int(size.node.hint)


def moved(traced: fx.GraphModule, device: str) -> fx.GraphModule:
    """``traced`` on fake tensors of another device, which need not exist (see :func:`rebuild`)."""
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    target = torch.device(device)
    for node in traced.graph.nodes:
        copy = nodes[node] = graph.node_copy(node, lambda n: nodes[n])
        copy.kwargs = {
            k: target if isinstance(v, torch.device) else v for k, v in copy.kwargs.items()
        }
        if node.op == "output":
            continue
        value = node.meta["val"]
        if node.op == "placeholder":
            if isinstance(value, FakeTensor):
                meta = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device="meta"
                )
                copy.meta["val"] = FakeTensor(value.fake_mode, meta, target)
            continue
        args, kwargs = fx.node.map_arg((copy.args, copy.kwargs), lambda n: n.meta["val"])
        with mode_of(traced), enable_python_dispatcher():
            copy.meta["val"] = copy.target(*args, **kwargs)
    return fx.GraphModule(torch.nn.Module(), graph)


def mode_of(traced: fx.GraphModule) -> FakeTensorMode:
    """The fake mode of a graph's inputs."""
    values = (node.meta["val"] for node in traced.graph.find_nodes(op="placeholder"))
    return next(value.fake_mode for value in values if isinstance(value, FakeTensor))
