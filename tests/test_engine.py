"""The engine on captured graphs: fuel, repeatability, and every step that may fail."""

from __future__ import annotations

import gc
import pkgutil
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import graphs
import models
import pytest
import torch
from torch import Tensor, fx

from fp8pass import engine
from fp8pass.errors import NoKernelError, OptionError
from fp8pass.options import Options
from fp8pass.report import GraphRecord
from fp8pass.report.graph_text import live_module
from fp8pass.target import Target

E4 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def block() -> tuple[Any, ...]:
    """A block's graph and its inputs."""
    return traced(models.Block, "static")


def traced(kind: Any, recipe: str, **arguments: Any) -> tuple[Any, ...]:
    function, *inputs = models.functional(models.build(kind, recipe), models.rows(3))
    return (graphs.trace(function, *inputs, **arguments), inputs)


def run(
    source: fx.GraphModule, stage: Any = "all", **options: Any
) -> tuple[fx.GraphModule, GraphRecord, Exception | None]:
    """A copy of ``source`` after the engine."""
    module = live_module(source.graph)
    record = GraphRecord("test", "joint")
    error = engine.run(module.graph, Options.resolve({}, **options), stage, record)
    module.graph.lint()
    module.recompile()
    return module, record, error


def rewrites(record: GraphRecord) -> int:
    return sum(site.status != "left" for site in record.sites)


def ours(module: fx.GraphModule) -> int:
    """Products of ours in a graph."""
    return sum("fp8pass" in str(node.target) for node in module.graph.nodes)


# ---- what it does --------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", models.RECIPES)
def test_the_graph_means_the_same_afterwards(recipe: str) -> None:
    source, inputs = traced(models.Block, recipe)
    module, record, error = run(source)
    assert error is None
    assert record.verdict
    assert rewrites(record) == 10
    assert ours(module) == 7
    assert (record.nodes_before, record.nodes_after) == (
        len(source.graph.nodes),
        len(module.graph.nodes),
    )
    assert record.target == Target.detect("cpu").spec
    assert set(record.seconds) >= {"snapshot", "merge", "read", "fuse", "lower", "check"}
    before, after = graphs.run(source, *inputs), graphs.run(module, *inputs)
    # the products are summed in another order, and then a code may be another
    assert models.distance(after[0], before[0]) < 5e-3
    for node in module.graph.nodes:
        assert node.op == "output" or "val" in node.meta


def test_the_two_stages_do_together_what_one_does(block: Any) -> None:
    one, record, _ = run(block[0])
    half, joint, _ = run(block[0], "joint")
    both, post, _ = run(half, "post")
    assert ours(half) == 0  # nothing crosses from one hook to the other
    assert models.text_of(both.graph) == models.text_of(one.graph)
    assert [s.kind for s in joint.sites if s.status != "left"] == ["norm", "norm", "activation"]
    assert {s.kind for s in post.sites} == {"scaled_mm"}
    assert rewrites(joint) + rewrites(post) == rewrites(record) == 10


def test_the_same_every_time(block: Any) -> None:
    texts = {models.text_of(run(block[0])[0].graph) for _ in range(3)}
    assert len(texts) == 1
    records = [run(block[0])[1].to_dict() for _ in range(2)]
    for record in records:
        record.pop("seconds")
    assert records[0] == records[1]


def test_a_second_run_finds_nothing_more_to_rewrite(block: Any) -> None:
    once, _, _ = run(block[0])
    twice, record, error = run(once)
    assert error is None
    assert ours(twice) == 7
    graphs.assert_same_bits(graphs.run(twice, *block[1]), graphs.run(once, *block[1]))
    assert not [site for site in record.sites if site.kind == "scaled_mm"]


def test_symbolic_batches() -> None:
    source, inputs = traced(models.Block, "dynamic", dynamic=[0])
    environment = source.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode.shape_env
    before = len(environment.guards), dict(environment.replacements)
    module, record, error = run(source)
    assert error is None
    assert rewrites(record) == 10
    assert (len(environment.guards), dict(environment.replacements)) == before
    for size in (1, 2, 9):
        x = models.rows(size, seed=size)
        got, wanted = (graphs.run(m, x, *inputs[1:])[0] for m in (module, source))
        assert models.distance(got, wanted) < 5e-3


# ---- fuel ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fuel", [0, 1, 2, 3, 4, 9, 10, 99])
def test_fuel_gives_exactly_so_many_rewrites(fuel: int, block: Any) -> None:
    source, inputs = block
    module, record, error = run(source, fuel=fuel)
    assert error is None
    assert rewrites(record) == min(fuel, 10)
    assert ours(module) == max(0, min(fuel, 10) - 3)
    stopped = [site for site in record.sites if site.code == "FP8-F007"]
    assert all(f"limit of {fuel} rewrites" in site.message for site in stopped)
    assert bool(stopped) == (fuel < 10)
    if fuel == 0:
        assert models.text_of(module.graph) == models.text_of(source.graph)
    got, wanted = graphs.run(module, *inputs)[0], graphs.run(source, *inputs)[0]
    assert models.distance(got, wanted) < 5e-3


def test_the_two_hooks_live_on_the_same_fuel() -> None:
    import fp8pass

    model, x = models.build(), models.rows(3)
    for fuel in (2, 5):
        report = fp8pass.explain(model, x, fuel=fuel)
        assert sum(site.status != "left" for site in report.sites) == fuel


# ---- the door ------------------------------------------------------------------------------------


def test_a_target_for_another_device_leaves_the_graph(block: Any) -> None:
    module, record, error = run(block[0], target="sm90")
    assert error is None
    assert record.verdict is not None
    assert record.verdict.code == "FP8-P005"
    assert "cpu" in record.verdict.message and "sm90" in record.verdict.message
    assert models.text_of(module.graph) == models.text_of(block[0].graph)
    assert record.sites == []


def test_a_graph_for_training_or_ahead_of_time(block: Any) -> None:
    from torch._inductor.virtualized import V

    for name in ("primals_1", "tangents_1"):
        module = live_module(block[0].graph)
        first = module.graph.find_nodes(op="placeholder")[0]
        first.target = first.name = name
        module.recompile()
        assert engine.door(module.graph).code == "FP8-P001"
        assert name in engine.door(module.graph).message
    with V.set_aot_compilation(True):
        module, record, _ = run(block[0])
    assert record.verdict is not None
    assert record.verdict.code == "FP8-P002"
    assert models.text_of(module.graph) == models.text_of(block[0].graph)


def test_a_device_without_a_target_costs_nothing_but_the_rewrites(
    block: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def detect(device: Any = None) -> Target:
        raise OptionError(f"fp8pass has no target for device type {device!r}")

    monkeypatch.setattr(Target, "detect", detect)
    module, record, error = run(block[0])
    assert isinstance(error, OptionError)
    assert record.verdict is not None
    assert record.verdict.code == "FP8-P003"
    assert "step door failed" in record.verdict.message
    assert models.text_of(module.graph) == models.text_of(block[0].graph)


def test_an_unsorted_graph_is_put_in_order_first(
    block: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    received = live_module(block[0].graph)
    first = next(n for n in received.graph.nodes if n.op == "call_function")
    received.graph.output_node().prepend(first)  # as a pass may that runs before ours
    record = GraphRecord("test", "post_grad")
    assert engine.run(received.graph, Options(), "all", record) is None
    assert rewrites(record) == 10
    received.recompile()
    got, wanted = graphs.run(received, *block[1])[0], graphs.run(block[0], *block[1])[0]
    assert models.distance(got, wanted) < 5e-3
    received = live_module(block[0].graph)
    first = next(n for n in received.graph.nodes if n.op == "call_function")
    received.graph.output_node().prepend(first)
    monkeypatch.setattr(engine.Workbench, "finish", fail)
    assert isinstance(engine.run(received.graph, Options(), "all", record), Accident)
    received.graph.lint()


def test_nothing_to_do() -> None:
    source = graphs.trace(lambda x: torch.relu(x) + 1, models.rows(2))
    module, record, error = run(source)
    assert error is None
    assert record.verdict is not None
    assert record.verdict.code == "FP8-P004"
    assert record.sites == []
    assert models.text_of(module.graph) == models.text_of(source.graph)


def test_a_quantise_alone_is_unchanged_to_the_node() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        results: list[Tensor] = []
        for _ in range(2):
            scale = ((x + 1).float().abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-12)
            codes = ((x + 1).float() / scale).clamp(-448.0, 448.0).to(E4)
            results.append(codes.float() * scale)
        return tuple(results)

    source = graphs.trace(function, models.rows(2))
    for stage in ("all", "joint", "post"):
        module, record, error = run(source, stage)
        assert error is None
        assert models.text_of(module.graph) == models.text_of(source.graph)
        assert record.nodes_after == len(source.graph.nodes)
        if stage != "post":
            assert [(s.kind, s.status, s.code) for s in record.sites] == [
                ("quantize", "left", "FP8-F002")
            ]


def test_an_unusable_forced_kernel_raises_and_restores(block: Any) -> None:
    module = live_module(block[0].graph)
    options = Options.resolve({}, force="cpu_prepared")
    with pytest.raises(NoKernelError, match="'cpu_prepared' is forced.*FP8-L004"):
        engine.run(module.graph, options, "all", GraphRecord("test", "joint"))
    assert models.text_of(module.graph) == models.text_of(block[0].graph)
    with pytest.raises(OptionError, match="both forced and disabled"):
        Options.resolve({}, force="cpu", disable="cpu")


def test_every_kernel_disabled() -> None:
    from fp8pass.lowerings import kernel_names

    source, inputs = traced(models.Pair, "static")
    module, record, _ = run(source, disable=kernel_names())
    (product,) = [site for site in record.sites if site.kind == "scaled_mm"]
    assert (product.status, product.code) == ("left", "FP8-L012")
    assert [r.kernel for r in product.rejected] == list(kernel_names())
    assert {r.code for r in product.rejected} == {"FP8-L002"}
    assert ours(module) == 0
    graphs.assert_same_bits(graphs.run(module, *inputs), graphs.run(source, *inputs))


# ---- failures ------------------------------------------------------------------------------------


class Accident(Exception):
    pass


def fail(*_: Any, **__: Any) -> Any:
    raise Accident("on purpose\nwith a second line")


def broken(real: Callable[..., Any], after: int | None) -> Callable[..., Any]:
    """``real`` that fails at once, or after it has worked ``after`` times."""
    calls = 0

    def function(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if after is None:
            fail()
        result = real(*args, **kwargs)
        calls += 1
        if calls >= after:
            fail()
        return result

    return function


#: function that fails, the step that is named, and the stages in which it is called
PLACES = [
    ("fp8pass.engine.door", "door", ("joint", "post", "all")),
    ("fp8pass.engine.graph_target", "door", ("joint", "post", "all")),
    ("fp8pass.engine.merge_common", "merge", ("joint", "all")),
    ("fp8pass.spellings.reader.Reader.read_producers", "read", ("joint", "all")),
    ("fp8pass.spellings.reader.Reader.read_quantises", "read", ("joint", "all")),
    ("fp8pass.spellings.reader.Reader.read_products", "read", ("post", "all")),
    ("fp8pass.spellings.reader.match_quantize", "read", ("joint", "all")),
    ("fp8pass.workbench.Workbench.call", "read", ("joint", "post", "all")),
    ("fp8pass.workbench.Workbench.swap", "read", ("joint", "post", "all")),
    ("fp8pass.patterns.rule.RuleEngine.run", "fuse", ("joint", "all")),
    ("fp8pass.patterns.rule.RuleEngine._apply", "fuse", ("joint", "all")),
    ("fp8pass.engine.lower_producer", "lower", ("joint", "all")),
    ("fp8pass.engine.problem_of", "lower", ("post", "all")),
    ("fp8pass.engine.choose", "lower", ("post", "all")),
    ("fp8pass.engine.emit_site", "lower", ("post", "all")),
    ("fp8pass.engine.not_fused", "lower", ("joint", "all")),
    ("fp8pass.workbench.Workbench.finish", "check", ("joint", "post", "all")),
    ("fp8pass.engine._sites", "report", ("joint", "post", "all")),
    ("fp8pass.workbench.Snapshot.check_outputs", "report", ("joint", "post", "all")),
]


@pytest.mark.parametrize("after", [None, 1, 3])
@pytest.mark.parametrize(("place", "step", "stages"), PLACES, ids=[p[0] for p in PLACES])
def test_a_failing_step_is_named_and_taken_back(
    place: str,
    step: str,
    stages: tuple[str, ...],
    after: int | None,
    block: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, inputs = block
    real = pkgutil.resolve_name(place)
    often = {"match_quantize", "call", "swap", "problem_of", "choose", "emit_site"}
    if after == 3 and place.rsplit(".", 1)[1] not in often:
        return  # it is called once or twice, there is no third time
    for stage in stages:
        monkeypatch.setattr(place, broken(real, after))
        received = live_module(source.graph)
        metas = {n.name: dict(n.meta) for n in received.graph.nodes}
        text = models.text_of(received.graph)
        record = GraphRecord("test", "joint")
        error = engine.run(received.graph, Options(), stage, record)
        monkeypatch.setattr(place, real)
        assert isinstance(error, Accident)
        assert record.verdict is not None
        assert record.verdict.code == "FP8-P003"
        assert f"step {step} failed" in record.verdict.message
        assert "Accident: on purpose;" in record.verdict.message
        assert record.sites == []
        assert record.nodes_before == record.nodes_after == len(received.graph.nodes)
        assert models.text_of(received.graph) == text
        assert {n.name: dict(n.meta) for n in received.graph.nodes} == metas
        received.graph.lint()
        received.recompile()
        graphs.assert_same_bits(graphs.run(received, *inputs), graphs.run(source, *inputs))
        # and the engine can work on it as if nothing had been
        again = GraphRecord("test", "joint")
        assert engine.run(received.graph, Options(), stage, again) is None
        assert rewrites(again) == {"joint": 3, "post": 7, "all": 10}[stage]


@pytest.mark.parametrize("change", ["shape", "dtype", "stride", "count", "gone"])
def test_changed_outputs_are_noticed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = traced(models.Pair, "static")
    real = engine.Workbench.finish

    def finish(bench: Any) -> None:
        real(bench)
        graph = bench.graph
        output = graph.output_node()
        (result,) = output.args[0]
        value = result.meta["val"]
        if change == "count":
            output.args = ((result, result),)
        elif change == "gone":
            output.args = ((None,),)
        elif change == "stride":
            result.meta["val"] = value.t().contiguous().t()
        elif change == "dtype":
            result.meta["val"] = value.float()
        else:
            result.meta["val"] = value[:, 1:]

    monkeypatch.setattr(engine.Workbench, "finish", finish)
    for stage in ("joint", "post", "all"):
        received = live_module(source.graph)
        record = GraphRecord("test", "joint")
        error = engine.run(received.graph, Options(), stage, record)
        assert isinstance(error, RuntimeError)
        assert record.verdict is not None
        assert record.verdict.code == "FP8-P003"
        assert ("1 outputs became 2" if change == "count" else "output 0 changed from") in str(
            error
        )
        assert models.text_of(received.graph) == models.text_of(source.graph)


@pytest.mark.parametrize("was_on", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_rests_during_the_steps_and_is_put_back(
    block: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, was_on: bool, fails: bool
) -> None:
    seen = []

    def steps(*arguments: Any) -> None:
        seen.append(gc.isenabled())
        if fails:
            raise NoKernelError("made to fail")

    monkeypatch.setattr(engine, "_run_steps", steps)
    before = gc.isenabled()
    (gc.enable if was_on else gc.disable)()
    try:
        with pytest.raises(NoKernelError) if fails else nullcontext():
            run(block[0])
        assert seen == [False]
        assert gc.isenabled() is was_on
        if not fails:
            run(block[0], tune="measure")
            assert seen == [False, was_on]  # device tensors must be collected while measuring
    finally:
        (gc.enable if before else gc.disable)()
