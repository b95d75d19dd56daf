"""Graphs as lines for reading."""

from __future__ import annotations

import operator

import graphs
import torch
from torch import Tensor, fx

from fp8pass.report.listing import call_names, listing


def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    values, _ = torch.max(x, 1)
    unused = values + 1  # noqa: F841
    return x.view(-1, 2).t() + 1, torch.mm(x, w.t()) * 2.5


WANTED = """\
inputs on cpu
  x   float32[3, 4]
  w1  float32[5, 4]
calls
  %0: float32[6, 2] = aten.view.default(x, [-1, 2])
  %1: float32[2, 6] strides [1, 2] = aten.permute.default(%0, [1, 0])
  %2: float32[2, 6] strides [1, 2] = aten.add.Tensor(%1, 1)
  %3: float32[4, 5] strides [1, 4] = aten.permute.default(w1, [1, 0])
  %4: float32[3, 5] = aten.mm.default(x, %3)
  %5: float32[3, 5] = aten.mul.Tensor(%4, 2.5)
return (%2, %5)"""


def test_text() -> None:
    traced = graphs.trace(function, torch.randn(3, 4), torch.randn(5, 4))
    first, second = (node.name for node in traced.graph.find_nodes(op="placeholder"))
    names = {first: "x", second: "w1"}
    assert listing(traced.graph, names) == WANTED
    assert [name.split(".")[1] for name in call_names(traced.graph)] == [
        "view", "permute", "add", "permute", "mm", "mul",
    ]  # fmt: skip


def test_names_of_nodes_and_symbols_do_not_matter() -> None:
    """A node more before it changes the names of both; the text is the same but for that node."""

    def symbolic(x: Tensor) -> Tensor:
        return x.view(-1, 2).sum(0) + x.shape[0]

    inputs = torch.randn(6, 4)
    traced = graphs.trace(symbolic, inputs, dynamic=[0])
    text = listing(traced.graph)
    assert "float32[s0, 4]" in text and "s0]" not in text.replace("[s0]", "")
    again = graphs.trace(symbolic, inputs, dynamic=[0])
    for node in again.graph.nodes:
        if node.op == "call_function":
            node.name = f"other_{node.name}"
    assert listing(again.graph) == text


def test_what_is_out_of_the_ordinary() -> None:
    """Several results, another device, an offset, nested arguments, no value at all."""
    mode = graphs.fake_mode()
    graph = fx.Graph()
    x = graph.placeholder("x")
    with mode:
        x.meta["val"] = torch.empty(8, 8, dtype=torch.bfloat16)[2:, 1:]
        pair = (torch.empty(2, 0), torch.empty(2, device="meta"))
    call = graph.call_function(torch.ops.aten.split.Tensor, (x, 4), {"dim": 0})
    call.meta["val"] = pair
    item = graph.call_function(operator.getitem, (call, 1))
    bare = graph.call_function(
        torch.ops.aten.index.Tensor, (item, [None, x]), {"device": torch.device("meta", 0)}
    )
    graph.output((bare, slice(None, 2), "text"))
    assert listing(graph).splitlines() == [
        "inputs on cpu",
        "  x  bfloat16[6, 7] strides [8, 1] offset 17",
        "calls",
        "  %0: (float32[2, 0], float32[2] on meta) = aten.split.Tensor(x, 4, dim=0)",
        "  %1 = %0[1]",
        "  %2 = aten.index.Tensor(%1, [None, x], device=meta:0)",
        "return (%2, slice(None, 2, None), 'text')",
    ]
    assert call_names(graph) == ["aten.split.Tensor", "aten.index.Tensor"]
