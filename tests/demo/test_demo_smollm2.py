"""The real model: what the pass finds in thirty layers, counted by the test itself.

The heaviest test of the suite. The model is captured and compiled up to code generation, and the
graph that the pass left is then run once; generating code for it would take minutes and show
nothing more. `fp8pass demo` does that, and counts with the profiler.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8pass
from fp8pass.demo import text
from fp8pass.demo.model import DemoModel, load
from fp8pass.kernels import cpu
from fp8pass.report import Report

LAYERS = 30
TOKENS = 32
FP8 = "torch.float8_e4m3fn"


@pytest.fixture(scope="module")
def model() -> DemoModel:
    return load("smollm2")


@pytest.fixture(scope="module")
def ids(model: DemoModel) -> torch.Tensor:
    return torch.tensor([model.tokenizer.encode(text.measured_text())[:TOKENS]])


@contextmanager
def counted_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The shapes of the products that really run on the CPU kernel."""
    shapes: list[tuple[int, ...]] = []
    real = cpu.scaled_mm

    def scaled_mm(a: torch.Tensor, b: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        shapes.append((*a.shape, b.shape[1]))
        return real(a, b, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(cpu, "scaled_mm", scaled_mm)
        yield shapes


def calls(text: str) -> Counter[str]:
    """Calls of operators in a dumped graph, by name; a cast to fp8 counts as ``to fp8``.

    On purpose not the counting of the package: that is under test here.
    """
    found: Counter[str] = Counter()
    for line in text.splitlines():
        code = line.partition("#")[0]
        for name, arguments in re.findall(r"= torch\.ops\.([\w.]+)\((.*?)\);?", code):
            found[name] += 1
            if name.startswith("prims.convert_element_type") and FP8 in arguments:
                found["to fp8"] += 1
    return found


def graph(folder: Path, name: str) -> Counter[str]:
    (path,) = folder.glob(f"*-{name}.py")
    return calls(path.read_text())


def explained(
    module: nn.Module, ids: torch.Tensor, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Report, list[tuple[int, ...]]]:
    with counted_products(monkeypatch) as shapes:
        report = fp8pass.explain(module, ids, dump=str(folder), strict=True)
    return report, shapes


def test_epsilon_is_the_one_of_the_file(model: DemoModel) -> None:
    assert model.module.model.config.rms_norm_eps == 9.999999747378752e-06


@pytest.mark.parametrize("recipe", ["dynamic", "static"])
def test_sites_are_those_of_the_graph(
    recipe: str,
    model: DemoModel,
    ids: torch.Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = model.quantised(recipe, 256)
    report, products = explained(module, ids, tmp_path, monkeypatch)
    counts = report.counts()
    assert counts == {
        ("norm", "fused"): 2 * LAYERS,
        ("norm", "left"): 1,
        ("activation", "fused"): LAYERS,
        ("quantize", "left"): LAYERS,
        ("scaled_mm", "lowered"): 7 * LAYERS,
    }
    assert {f"{kind} {status}": n for (kind, status), n in counts.items()} == model.expected_sites()

    # Each norm and activation is quantised once for all who read it.
    readers = Counter((s.kind, s.readers) for s in report.sites if s.status == "fused")
    assert readers == {("norm", 3): LAYERS, ("norm", 2): LAYERS, ("activation", 1): LAYERS}

    # Nothing is left without a reason.
    left = [site for site in report.sites if site.status == "left"]
    assert {site.kind: site.code for site in left} == {"norm": "FP8-F001", "quantize": "FP8-F002"}
    assert all(site.message and site.where for site in left)
    assert all("o_proj" in site.where for site in left if site.kind == "quantize")

    # The report against the dumped graphs.
    received, fused = graph(tmp_path, "joint-received"), graph(tmp_path, "joint-fused")
    after = graph(tmp_path, "post_grad-after")
    assert received["aten._scaled_mm.default"] == 7 * LAYERS
    assert received["to fp8"] == 7 * LAYERS
    fusions = {name: n for name, n in fused.items() if name.endswith("_quant.default")}
    assert sum(n for name, n in fusions.items() if "norm" in name) == counts["norm", "fused"]
    assert fusions["fp8pass.silu_mul_quant.default"] == counts["activation", "fused"]
    assert fused["fp8pass.quantize.default"] == counts["quantize", "left"]
    assert after["fp8pass.cpu_scaled_mm.default"] == counts["scaled_mm", "lowered"]
    assert after["aten._scaled_mm.default"] == 0
    assert after["to fp8"] == 4 * LAYERS
    assert after["aten.rsqrt.default"] == 2 * LAYERS + 1
    own = {name for name in after if name.startswith("fp8pass.")}
    assert own == {"fp8pass.cpu_scaled_mm.default"}  # all else was given back or written as aten

    # The graph was run once: each product, on all tokens, and no other.
    assert len(products) == 7 * LAYERS
    assert {shape[0] for shape in products} == {TOKENS}


def test_an_emptied_pass_finds_nothing(
    model: DemoModel, ids: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: without the rules, the same counting says so. On two layers, to be quick."""
    from fp8pass import engine

    small = load("tiny")
    module = small.quantised("dynamic", 0)
    tokens = ids % 256
    monkeypatch.setattr(engine, "RULES", ())
    report, _ = explained(module, tokens, tmp_path, monkeypatch)
    found = {f"{kind} {status}": n for (kind, status), n in report.counts().items()}
    assert found != small.expected_sites()
    assert "norm fused" not in found and "activation fused" not in found
    assert graph(tmp_path, "joint-fused")["fp8pass.rms_norm_quant.default"] == 0
