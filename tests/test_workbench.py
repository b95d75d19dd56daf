"""Workbench: edits that can be taken back, snapshots, and merging of common subexpressions."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import graphs
import models
import pytest
import torch
from torch import Tensor, fx, nn

from fp8pass.report.graph_text import live_module
from fp8pass.spellings.reader import anchors
from fp8pass.workbench import Snapshot, Workbench, merge_common

aten = torch.ops.aten
E4 = torch.float8_e4m3fn


# ---- snapshots -----------------------------------------------------------------------------------


class Rich(nn.Module):
    """Holds a buffer that the graph of :func:`rich` reads with get_attr."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(6.0).reshape(2, 3))


def rich() -> fx.GraphModule:
    """A graph with get_attr, nested arguments, kwargs, slices, dtypes and a nested output."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.placeholder("input_1", type_expr=Tensor)
    table = graph.get_attr("table")
    cat = graph.call_function(aten.cat.default, ([x, y, table],), {"dim": 0})
    total = graph.call_function(aten.sum.dim_IntList, (cat, [0]), {"keepdim": True})
    index = graph.call_function(aten.arange.default, (2,))
    nested = graph.call_function(aten.index.Tensor, (cat, [None, index]))
    item = graph.call_function(operator.getitem, (cat, (slice(None, 2, None), 1)))
    wide = graph.call_function(aten._to_copy.default, (total,), {"dtype": torch.float64})
    split = graph.call_function(aten.split.Tensor, (cat, 2))
    first = graph.call_function(operator.getitem, (split, 0))
    dead = graph.call_function(aten.neg.default, (first,))
    graph.output(({"wide": wide, "rest": [item, None, nested]}, (first, 3)))
    for i, node in enumerate(graph.nodes):
        node.meta = {"val": torch.empty(i + 1, device="meta"), "tag": object(), "list": [i]}
    dead.meta.clear()
    return fx.GraphModule(Rich(), graph)


def state(graph: fx.Graph) -> list[Any]:
    """Everything about a graph that a snapshot promises."""
    return [
        (n.op, n.name, n.target, str(n.args), str(n.kwargs), n.type, dict(n.meta), len(n.users))
        for n in graph.nodes
    ]


def wreck_order(graph: fx.Graph) -> None:
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    graph.output_node().prepend(nodes[0])
    nodes[0].name = "renamed"


def wreck_edges(graph: fx.Graph) -> None:
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    nodes[0].args = (nodes[-1],)
    nodes[-1].args = (nodes[0],)  # a cycle
    nodes[1].kwargs = {"keepdim": nodes[2]}
    graph.output_node().args = (nodes[3],)


def wreck_nodes(graph: fx.Graph) -> None:
    first = next(n for n in graph.nodes if n.op == "call_function")
    with graph.inserting_after(first):
        for _ in range(3):
            new = graph.call_function(aten.relu.default, (first,))
    first.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    for node in [n for n in graph.nodes if n.op == "call_function" and not n.users]:
        graph.erase_node(node)
    for node in graph.nodes:
        node.meta["val"] = None
        node.meta["more"] = 1
        node.meta.pop("tag", None)
        node.type = int


def wreck_all(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        node.args, node.kwargs = (), {}
    for node in list(graph.nodes):
        graph.erase_node(node)


def wreck_nothing(graph: fx.Graph) -> None:
    pass


WRECKS = [wreck_nothing, wreck_order, wreck_edges, wreck_nodes, wreck_all]


@pytest.mark.parametrize("wreck", WRECKS)
def test_restore_makes_the_graph_what_it_was(wreck: Callable[[fx.Graph], None]) -> None:
    module = rich()
    graph = module.graph
    before, text, code = state(graph), str(graph), module.code
    metas = [n.meta for n in graph.nodes]
    lists = [meta.get("list") for meta in metas]
    snapshot = Snapshot(graph)
    wreck(graph)
    snapshot.restore(graph)
    assert state(graph) == before
    assert str(graph) == text
    # the metas hold the same objects; copying tensors would be wrong and slow
    assert all(n.meta.get("list") is old for n, old in zip(graph.nodes, lists, strict=True))
    graph.lint()
    module.recompile()
    assert module.code == code
    x, y = torch.ones(1, 3), torch.zeros(1, 3)
    got = module(x, y)
    wanted = rich()(x, y)
    assert got[0].keys() == wanted[0].keys()
    assert torch.equal(got[0]["wide"], wanted[0]["wide"])
    assert got[1][1] == 3
    assert graph.owning_module is module
    # look-ups and new names work
    assert len(graph.find_nodes(op="placeholder")) == 2
    assert len(graph.find_nodes(op="call_function", target=aten.cat.default)) == 1
    with graph.inserting_before(graph.output_node()):
        added = graph.call_function(aten.cat.default, ([graph.find_nodes(op="placeholder")[0]],))
    assert len({n.name for n in graph.nodes}) == len(graph.nodes)
    graph.erase_node(added)


def test_restore_works_twice_and_on_a_real_graph() -> None:
    function, *inputs = models.functional(models.build(), models.rows(3))
    module = graphs.trace(function, *inputs)
    graph = module.graph
    text = models.text_of(graph)
    snapshot = Snapshot(graph)
    for wreck in WRECKS[1:]:
        wreck(graph)
        snapshot.restore(graph)
        assert models.text_of(graph) == text
    # what is made from the metas of a restored graph is what would have been made before
    again = Snapshot(graph)
    assert again.check_outputs(graph) is None
    again.restore(graph)
    assert models.text_of(graph) == text


def test_names_survive_however_odd_they_are() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x_1")  # there is no x
    for name in (
        "sum_1",
        "add_7",
        "mul",
        "mul_3",
        "_to_copy",
        "max_1",
        "relu_",
        "a__1",
        "L__self_1",
    ):
        x = graph.create_node("call_function", aten.relu.default, (x,), {}, name)
    graph.output(x)
    names = [n.name for n in graph.nodes]
    snapshot = Snapshot(graph)
    wreck_all(graph)
    snapshot.restore(graph)
    assert [n.name for n in graph.nodes] == names


def _fake(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_check_outputs_names_what_changed() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = _fake(2, 3)
    y = graph.call_function(aten.relu.default, (x,))
    y.meta["val"] = _fake(2, 3)
    output = graph.output((x, [y, 1, None]))
    snapshot = Snapshot(graph)
    assert snapshot.check_outputs(graph) is None
    for value, word in (
        (_fake(3, 2), "'3', '2'"),
        (_fake(3, 2).t(), "'1', '2'"),
        (_fake(2, 3, dtype=torch.float16), "torch.float16"),
        (torch.empty(2, 3), "type='cpu'"),
        (None, "None"),
    ):
        y.meta["val"] = value
        said = snapshot.check_outputs(graph)
        assert said is not None
        assert said.startswith("output 1 changed from") and word in said
    y.meta["val"] = _fake(2, 3)
    output.args = ((x, [y, 1]),)
    assert snapshot.check_outputs(graph) == "4 outputs became 3"


# ---- the workbench -------------------------------------------------------------------------------


def chain_of(*targets: Any) -> tuple[fx.Graph, list[fx.Node]]:
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for target in targets:
        nodes.append(graph.call_function(target, (nodes[-1],)))
    graph.output(nodes[-1])
    for node in nodes:
        node.meta["val"] = _fake(4)
    return graph, nodes


def test_swaps_are_undone_in_reverse() -> None:
    graph, (x, a, b) = chain_of(aten.relu.default, aten.neg.default)
    text = str(graph)
    bench = Workbench(graph)
    with graph.inserting_after(a):
        one = bench.call(aten.abs.default, (a,), a)
    first = bench.swap(a, one)  # `one` itself goes on reading `a`
    assert (one.args, b.args) == ((a,), (one,))
    with graph.inserting_after(one):
        two = bench.call(aten.exp.default, (one,), a)
    second = bench.swap(one, two)
    assert (two.args, b.args) == ((one,), (two,))
    assert one.meta["val"].shape == (4,)
    assert bench.live() == {x, a, one, two, b, graph.output_node()}
    bench.undo([first, second])
    assert b.args == (a,)
    assert bench.live() == {x, a, b, graph.output_node()}
    bench.finish()
    assert str(graph) == text


def test_depends_on() -> None:
    graph, (x, a, b) = chain_of(aten.relu.default, aten.neg.default)
    bench = Workbench(graph)
    assert bench.depends_on(b, a) and bench.depends_on(b, x) and bench.depends_on(a, a)
    assert not bench.depends_on(a, b)
    assert not bench.depends_on(None, a) and not bench.depends_on(1.0, a)
    with graph.inserting_before(a):
        new = graph.call_function(aten.abs.default, (b,))  # made later, stands earlier
    assert bench.depends_on(new, a)


def test_finish_sorts_drops_dead_code_and_keeps_writes() -> None:
    graph, (x, a, b) = chain_of(aten.relu.default, aten.neg.default)
    with graph.inserting_before(graph.output_node()):
        graph.call_function(aten.exp.default, (b,))
        write = graph.call_function(aten.copy_.default, (x, a))
    graph.output_node().prepend(a)  # behind its readers
    Workbench(graph).finish()
    graph.lint()
    assert {n.target for n in graph.nodes if n.op == "call_function"} == {
        aten.relu.default,
        aten.neg.default,
        aten.copy_.default,
    }
    assert write in graph.nodes


def test_fresh_values_are_as_from_new_empty() -> None:
    mode = graphs.fake_mode()
    like = graphs.fake(mode, torch.zeros(5, 3), dynamic=True)
    bench = Workbench(fx.Graph())
    for shape in ((2, 3), (0, 3), (3, 0, 2), (), (like.shape[0], 4)):
        value = bench.fresh(like, shape, E4)
        with mode:
            wanted = like.new_empty(shape, dtype=E4)
        assert (value.dtype, value.shape) == (wanted.dtype, wanted.shape)
        assert value.stride() == wanted.stride()
        assert value.device == wanted.device
        assert value.fake_mode is mode


# ---- merging -------------------------------------------------------------------------------------


def merged(build: Callable[[fx.Graph, fx.Node], list[fx.Node]]) -> int:
    """How many nodes are merged in a graph whose anchors are casts of what ``build`` makes."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    casts = [
        graph.call_function(torch.ops.prims.convert_element_type.default, (node, E4))
        for node in build(graph, x)
    ]
    # as in a model, what is returned is not the cast itself
    graph.output([graph.call_function(aten.sum.default, (cast,)) for cast in casts])
    count = merge_common(graph, casts)
    graph.lint()
    return count


@pytest.mark.parametrize(
    ("args", "same"),
    [
        (((2.0,), (2.0,)), True),
        (((1,), (1.0,)), False),
        (((True,), (1,)), False),
        (((1.0,), (True,)), False),
        (((0.0,), (-0.0,)), False),
        (((float("nan"),), (float("nan"),)), None),
        (((2.0,), (3.0,)), False),
    ],
)
def test_scalars_are_the_same_only_with_their_type(args: Any, same: bool | None) -> None:
    def build(graph: fx.Graph, x: fx.Node) -> list[fx.Node]:
        return [graph.call_function(aten.mul.Tensor, (x, *arg)) for arg in args]

    if same is None:  # harmless either way
        assert merged(build) in (0, 2)
    else:
        assert merged(build) == (2 if same else 0)


def test_dims_dtypes_and_kwargs_count() -> None:
    def pair(target: Any, one: tuple[Any, ...], two: tuple[Any, ...], **kwargs: Any) -> int:
        def build(graph: fx.Graph, x: fx.Node) -> list[fx.Node]:
            second = {k: v[1] for k, v in kwargs.items()}
            first = {k: v[0] for k, v in kwargs.items()}
            return [
                graph.call_function(target, (x, *one), first),
                graph.call_function(target, (x, *two), second),
            ]

        return merged(build)

    convert = torch.ops.prims.convert_element_type.default
    assert pair(aten.amax.default, ([-1], True), ([-1], True)) == 2
    assert pair(aten.amax.default, ([-1], True), ([0], True)) == 0
    assert pair(aten.amax.default, ([-1], True), ([-1], False)) == 0
    assert pair(convert, (torch.float32,), (torch.float32,)) == 2
    assert pair(convert, (torch.float32,), (torch.float16,)) == 0
    same = (torch.float32, torch.float32)
    other = (torch.float32, torch.float16)
    assert pair(aten._to_copy.default, (), (), dtype=same) == 2
    assert pair(aten._to_copy.default, (), (), dtype=other) == 0
    assert pair(aten.add.Tensor, (1.0,), (1.0,), alpha=(1, 2)) == 0


def test_never_what_is_random_unlisted_or_outside_the_cone() -> None:
    def two(target: Any) -> Callable[[fx.Graph, fx.Node], list[fx.Node]]:
        return lambda graph, x: [graph.call_function(target, (x,)) for _ in range(2)]

    assert merged(two(aten.abs.default)) == 2
    for target in (aten.rand_like.default, aten.bernoulli.default, aten.cos.default):
        assert merged(two(target)) == 0

    graph = fx.Graph()
    x = graph.placeholder("x")
    cast = graph.call_function(torch.ops.prims.convert_element_type.default, (x, E4))
    twins = [graph.call_function(aten.abs.default, (x,)) for _ in range(2)]
    graph.output([graph.call_function(aten.cos.default, (n,)) for n in (*twins, cast)])
    assert merge_common(graph, [cast]) == 0  # the rest of the graph is not ours


def test_results_of_the_graph_stay_apart() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    convert = torch.ops.prims.convert_element_type.default
    casts = [graph.call_function(convert, (x, E4)) for _ in range(3)]
    graph.output((casts[0], casts[1], graph.call_function(aten.sum.default, (casts[2],))))
    assert merge_common(graph, casts) == 1  # only the one that is not returned
    returned = graph.output_node().args[0]
    assert returned[0] is not returned[1]


def test_writes_forbid_merging_except_at_the_very_end() -> None:
    def graph_with(write_at: str) -> tuple[fx.Graph, list[fx.Node]]:
        graph = fx.Graph()
        x, buffer = graph.placeholder("x"), graph.placeholder("buffer")
        if write_at == "inside":
            graph.call_function(aten.copy_.default, (buffer, x))
        scaled = [graph.call_function(aten.mul.Tensor, (x, 2.0)) for _ in range(2)]
        if write_at == "between":
            graph.call_function(aten.add_.Tensor, (buffer, x))
        convert = torch.ops.prims.convert_element_type.default
        casts = [graph.call_function(convert, (node, E4)) for node in scaled]
        sums = [graph.call_function(aten.sum.default, (node,)) for node in casts]
        if write_at == "end":
            graph.call_function(aten.copy_.default, (buffer, x))
        if write_at == "other at the end":
            graph.call_function(aten.add_.Tensor, (buffer, x))
        graph.output(sums)
        return graph, casts

    for write_at, count in (
        ("", 2),
        ("end", 2),
        ("inside", 0),
        ("between", 0),
        ("other at the end", 0),
    ):
        assert merge_common(*graph_with(write_at)) == count, write_at


def test_merging_a_real_graph_changes_no_bit() -> None:
    function, *inputs = models.functional(models.build(models.Twin), models.rows(3))
    source = graphs.trace(function, *inputs)
    module = live_module(source.graph)
    count = merge_common(module.graph, anchors(module.graph))
    module.graph.lint()
    module.recompile()
    assert count >= 7  # the whole second quantise
    assert len(module.graph.nodes) == len(source.graph.nodes) - count
    graphs.assert_same_bits(graphs.run(module, *inputs), graphs.run(source, *inputs))
