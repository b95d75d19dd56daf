"""The real model: what the report says of SmolLM2-135M is what stands in the graph, and exact.

One capture per recipe (no code generation) gives all: the report, the dumped graphs, the graphs of
each step as objects, the operators that a forward runs, and the real inputs to interpret them on.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import fp8pass
from fp8pass import passes
from fp8pass.demo import model as demo_model
from fp8pass.demo import text
from fp8pass.demo.reference import reference_products, scaled_mm
from fp8pass.kernels import cpu
from fp8pass.reasons import CATALOGUE
from fp8pass.report import Report, count_ops, load_dump
from fp8pass.report.graph_text import live_module

LAYERS = 30
TOKENS = 48
FP8 = torch.float8_e4m3fn


@dataclass
class Capture:
    """What one compile of the model showed."""

    report: Report
    folder: Path
    graphs: dict[tuple[str, str], fx.GraphModule] = field(default_factory=dict)
    inputs: list[Any] = field(default_factory=list)
    executed: Counter[str] = field(default_factory=Counter)

    def dumped(self, hook: str, step: str) -> Counter[str]:
        """Operators of one dumped graph file, counted in its text."""
        (record,) = (g for g in self.report.graphs if g.hook == hook)
        return count_ops((self.folder / record.files[step]).read_text())


@functools.cache
def the_model() -> demo_model.DemoModel:
    return demo_model.load("smollm2")


def capture(recipe: str, folder: Path, patch: pytest.MonkeyPatch) -> Capture:
    module = the_model().quantised(recipe, 128)
    ids = torch.tensor([the_model().tokenizer.encode(text.measured_text())[:TOKENS]])
    found = Capture(Report(), folder)
    show = passes.show_graph

    def keep(step: str, graph: fx.Graph, hook: str, *rest: Any) -> None:
        found.graphs[hook, step] = live_module(graph)
        show(step, graph, hook, *rest)

    patch.setattr(passes, "show_graph", keep)
    product = cpu.scaled_mm

    def count(*args: Any, **kwargs: Any) -> torch.Tensor:
        found.executed["cpu_scaled_mm"] += 1
        return product(*args, **kwargs)

    patch.setattr(cpu, "scaled_mm", count)
    from torch._functorch import aot_autograd

    box = aot_autograd.make_boxed_func

    def boxed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            found.inputs = list(args)
            return function(*args)

        return box(run)

    patch.setattr(aot_autograd, "make_boxed_func", boxed)
    found.report = fp8pass.explain(module, ids, dump=str(folder), strict=True)
    return found


@pytest.fixture(scope="module", params=["dynamic", "static"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Capture:
    with pytest.MonkeyPatch.context() as patch:
        return capture(request.param, tmp_path_factory.mktemp(request.param), patch)


def test_epsilon_is_the_one_of_the_file() -> None:
    # not 1e-5: a pass that compares epsilons finds nothing here
    config = the_model().module.get_submodule("model").config
    assert config.rms_norm_eps == 9.999999747378752e-06


def counted(report: Report) -> dict[str, int]:
    return {f"{kind} {status}": n for (kind, status), n in report.counts().items()}


EXPECTED = {
    "norm fused": 2 * LAYERS,
    "norm left": 1,
    "activation fused": LAYERS,
    "quantize left": LAYERS,
    "scaled_mm lowered": 7 * LAYERS,
}


def test_every_site_is_accounted_for(seen: Capture) -> None:
    assert counted(seen.report) == EXPECTED
    sites = seen.report.sites
    for site in sites:
        assert site.where and (site.status != "left" or (site.code in CATALOGUE and site.message))
    norms = [s for s in sites if s.kind == "norm" and s.status == "fused"]
    assert Counter(s.readers for s in norms) == {3: LAYERS, 2: LAYERS}  # q, k, v; gate, up
    assert Counter(s.rule for s in norms) == {"rms_norm_quant": 1, "add_rms_norm_quant": 59}
    left = [s for s in sites if s.status == "left"]
    assert {s.code for s in left if s.kind == "quantize"} == {"FP8-F002"}
    assert [s.code for s in left if s.kind == "norm"] == ["FP8-F001"]
    assert all("o_proj" in s.where for s in left if s.kind == "quantize")
    assert {s.kernel for s in sites if s.status == "lowered"} == {"cpu"}
    assert all(s.rejected for s in sites if s.kind == "scaled_mm")


def test_counts_are_those_of_the_dumped_graphs(seen: Capture) -> None:
    fused = seen.dumped("joint", "fused")
    assert fused["fp8pass.rms_norm_quant.default"] == 1
    assert fused["fp8pass.add_rms_norm_quant.default"] == 2 * LAYERS - 1
    assert fused["fp8pass.silu_mul_quant.default"] == LAYERS
    assert fused["fp8pass.quantize.default"] == LAYERS
    assert fused["fp8pass.add_rms_norm.default"] == 1
    after = seen.dumped("post_grad", "after")
    assert after["fp8pass.cpu_scaled_mm.default"] == 7 * LAYERS
    assert after["aten._scaled_mm.default"] == 0
    assert sum(n for name, n in after.items() if name.startswith("fp8pass.")) == 7 * LAYERS


def fp8_casts(module: fx.GraphModule) -> int:
    return sum(
        node.target is torch.ops.prims.convert_element_type.default and node.args[1] is FP8
        for node in module.graph.nodes
    )


def test_each_tensor_is_quantised_once(seen: Capture) -> None:
    assert fp8_casts(seen.graphs["joint", "received"]) == 7 * LAYERS
    # two norms, one activation and the input of o_proj in each layer
    assert fp8_casts(seen.graphs["joint", "after"]) == 4 * LAYERS
    assert fp8_casts(seen.graphs["post_grad", "after"]) == 4 * LAYERS


def test_each_product_runs_once_per_forward(seen: Capture) -> None:
    assert seen.executed == {"cpu_scaled_mm": 7 * LAYERS}


def test_the_dump_holds_the_report(seen: Capture) -> None:
    assert counted(load_dump(seen.folder)) == EXPECTED


class Products(fx.Interpreter):
    """Runs a graph with reference products, and keeps what each product was given."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.given: list[tuple[torch.Tensor, torch.Tensor]] = []

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.aten._scaled_mm.default:
            self.given.append((args[0], args[2]))
            return scaled_mm(*args, **kwargs)
        return super().call_function(target, args, kwargs)


def steps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Distance of fp8 codes in steps, in the order of their values."""

    def ordered(codes: torch.Tensor) -> torch.Tensor:
        bits = codes.view(torch.uint8).to(torch.int16)
        return torch.where(bits >= 128, 128 - bits, bits)

    return (ordered(a) - ordered(b)).abs()


def test_exact_contract_on_real_activations(seen: Capture, record_property: Any) -> None:
    with torch.no_grad():
        before = Products(seen.graphs["joint", "received"])
        logits = before.run(*seen.inputs)
        for step in ("fused", "after"):
            now = Products(seen.graphs["joint", step])
            result = now.run(*seen.inputs)
            assert len(now.given) == len(before.given) == 7 * LAYERS
            different = total = 0
            for (q, scale), (q0, scale0) in zip(now.given, before.given, strict=True):
                off = steps(q, q0)
                assert int(off.max()) <= 1
                different += int((off != 0).sum())
                total += off.numel()
                torch.testing.assert_close(scale, scale0, rtol=1e-6, atol=0)
            record_property(f"codes that differ, {step}", f"{different} of {total}")
            assert different <= 1e-3 * total
            if different == 0:
                assert torch.equal(result[0], logits[0])


def test_an_empty_pass_does_not_pass_for_one_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fp8pass import engine

    monkeypatch.setattr(engine, "rules", tuple)
    monkeypatch.setattr(engine.Run, "_lower_product", lambda *args: None)
    tiny = demo_model.load("tiny")
    ids = torch.arange(16)[None]
    module = tiny.quantised("dynamic_tensor", 16)
    report = fp8pass.explain(module, ids, dump=str(tmp_path))
    assert counted(report) != tiny.expected_sites()
    assert not any(site.status == "fused" for site in report.sites)


def test_the_reference_is_the_eager_model_with_exact_products() -> None:
    module = demo_model.load("tiny").quantised("static", 16)
    ids = torch.arange(8)[None]
    with torch.no_grad(), reference_products() as mode:
        assert torch.isfinite(module(ids)).all()
    assert mode.calls == operator.mul(7, 2)
