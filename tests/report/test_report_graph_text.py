"""A dumped graph is Python: it parses, counts and computes like the graph it was made from."""

from __future__ import annotations

import ast
from collections import Counter
from typing import Any

import pytest
import report_samples as samples
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass.report import count_ops, graph_text
from fp8pass.report.graph_text import live_copy, live_module

LIVE = Counter({"aten.mul.Tensor": 1, "aten.add.Tensor": 1, "aten.relu.default": 1})


def state(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """All that a reader of a graph could see."""
    return [(n, n.name, n.op, n.target, n.args, n.kwargs, dict(n.meta), dict(n.users)) for n in
            graph.nodes]  # fmt: skip


def test_the_text_computes_what_the_graph_does() -> None:
    module = samples.small_graph()
    scope: dict[str, Any] = {}
    exec(compile(graph_text(module.graph, "two\nlines"), "dump", "exec"), scope)
    again = scope["GraphModule"]()
    again.constant = module.constant
    x, w = torch.randn(2, 3), torch.randn(3)
    assert torch.equal(again(x, w), module(x, w))


def test_dead_code_is_left_out_and_shapes_are_in() -> None:
    text = graph_text(samples.small_graph().graph, "hook joint, step after")
    assert text.startswith("# hook joint, step after\n")
    assert "neg" not in text
    assert "exp" not in text
    assert 'mul_tensor: "f32[2, 3][3, 1]"' in text
    assert count_ops(text) == LIVE


def test_text_and_graph_count_alike_and_the_graph_is_not_altered() -> None:
    module = samples.small_graph()
    before, code = state(module.graph), module.code
    assert count_ops(module) == count_ops(module.graph) == LIVE
    graph_text(module.graph)
    live_copy(module.graph)
    assert state(module.graph) == before
    assert module.graph.owning_module is module
    assert module.code == code
    assert "aten.neg.default" in {str(n.target) for n in module.graph.nodes}


def test_the_same_graph_gives_the_same_bytes() -> None:
    assert graph_text(samples.small_graph().graph) == graph_text(samples.small_graph().graph)


def test_names_and_meta_are_kept_in_the_copy() -> None:
    graph = samples.small_graph().graph
    copy = {n.name: n.meta for n in live_copy(graph).nodes}
    original = {n.name: n.meta for n in graph.nodes}
    assert set(original) - set(copy) == {"neg_default", "exp_default"}
    assert all(original[name]["val"] is meta["val"] for name, meta in copy.items())


def test_a_node_with_an_effect_is_not_dead() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops.aten.copy_.default, (x, x))
    graph.call_function(torch.ops.aten.neg.default, (x,))
    graph.output(x)
    assert count_ops(graph) == {"aten.copy_.default": 1}


def test_symbolic_shapes_and_size_arithmetic() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0] * x.shape[1], -1).float() * 2

    module = make_fx(f, tracing_mode="symbolic")(torch.randn(2, 3, 4, dtype=torch.bfloat16))
    text = graph_text(module.graph)
    ast.parse(text)
    assert "bf16[s" in text
    assert count_ops(text) == count_ops(module)


def test_graphs_inside_a_graph_are_written_and_counted() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos() * t, (x,))

    module = make_fx(f, tracing_mode="fake")(torch.randn(4))
    counts = count_ops(graph_text(module.graph))
    assert counts == count_ops(module)
    assert counts["aten.sin.default"] == counts["aten.cos.default"] == 1
    assert counts["higher_order.cond"] == 1


def test_a_graph_without_a_module() -> None:
    graph = live_copy(samples.small_graph().graph)
    assert graph.owning_module is None
    assert count_ops(graph_text(graph)) == LIVE
    assert count_ops(live_module(graph)) == LIVE


def test_no_op_is_counted_in_what_only_looks_like_one() -> None:
    text = "# torch.ops.aten.mul.Tensor(a)\nx = 'torch.ops.aten.mul.Tensor(a)'\ny = f(x)[0](1)\n"
    assert count_ops(text) == {}
    with pytest.raises(SyntaxError):
        count_ops("x === 1")
