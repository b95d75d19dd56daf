"""One cell of the table: a family, quantised by a recipe, through Dynamo, AOTAutograd and fp8pass.

No code is generated. While the model runs, every captured graph is interpreted twice on the same
inputs, as it was received and as it was fused, with the references of fp8pass's operators; their
results are to be the same bits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from torch import fx, nn

from fp8pass.coverage.count import Counted, Pair, count
from fp8pass.coverage.families import family, inputs, require_transformers
from fp8pass.coverage.recipes import recipe
from fp8pass.report import Report

#: Version of the JSON form.
SCHEMA = 1
#: Smallest share of the fusible pairs that are to be fused, and of the products to be lowered.
PAIRS, GEMMS = 0.95, 1.0


@dataclass
class Cell:
    """What was found for one family and recipe.

    Attributes:
        family, recipe: names.
        pairs: ``expected`` (counted by hooks) and ``fused`` (sites of the report).
        gemms: ``expected`` and ``lowered``.
        missing: fusible pairs that were not fused, with the reason of their quantise.
        not_fusible: pairs that no kernel could make one, and why.
        refusals: sites that were left, without numbers of layers, each with how often.
        differing: elements of the results that are not the same bits in the fused graph.
        graphs: number of captured graphs.
        error: why there is no result, or "".
        required: whether the command fails when this cell falls short.
    """

    family: str
    recipe: str
    pairs: dict[str, int] = field(default_factory=lambda: {"expected": 0, "fused": 0})
    gemms: dict[str, int] = field(default_factory=lambda: {"expected": 0, "lowered": 0})
    missing: list[dict[str, Any]] = field(default_factory=list)
    not_fusible: list[dict[str, Any]] = field(default_factory=list)
    refusals: list[dict[str, Any]] = field(default_factory=list)
    differing: int = 0
    graphs: int = 0
    error: str = ""
    required: bool = True

    @property
    def shortfall(self) -> str:
        """What keeps the cell from passing, or ""."""
        if self.error:
            return self.error
        if self.differing:
            return f"{self.differing} elements differ between the graph before and after"
        pairs, gemms = self.pairs, self.gemms
        if pairs["fused"] > pairs["expected"]:
            return f"{pairs['fused']} pairs fused, but only {pairs['expected']} were counted"
        if pairs["fused"] < PAIRS * pairs["expected"]:
            return f"{pairs['fused']} of {pairs['expected']} pairs fused"
        if gemms["lowered"] < GEMMS * gemms["expected"]:
            return f"{gemms['lowered']} of {gemms['expected']} products lowered"
        return ""


def cover(
    families: Iterable[str],
    recipes: Iterable[str],
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The whole table as plain data.

    Raises:
        OptionError: an unknown family or recipe, named.
        UnsupportedError: ``transformers`` is missing or too old.
    """
    rows = [family(name) for name in families]
    columns = [recipe(name) for name in recipes]
    transformers = require_transformers()
    cells = []
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # it warns of sizes too small for a real model
    try:
        for row in rows:
            for column in columns:
                progress(f"{row.name} {column.name}")
                cells.append(cell(row.name, column.name))
    finally:
        transformers.logging.set_verbosity(verbosity)
    return {
        "schema": SCHEMA,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "limits": {"pairs": PAIRS, "gemms": GEMMS},
        "cells": [{**asdict(one), "shortfall": one.shortfall} for one in cells],
    }


def cell(family_name: str, recipe_name: str) -> Cell:
    """Build, quantise, count, compile and compare one model. An error becomes part of the cell."""
    chosen = recipe(recipe_name)
    result = Cell(family_name, recipe_name, required=chosen.required)
    try:
        model, batch = family(family_name).build(), inputs()
        chosen.apply(model, batch)
        counted = count(model, batch, chosen.granularity)
        compared = _Compared()
        compared.run(model, batch)
    except Exception as error:  # one family that cannot be built must not hide the others
        lines = str(error).strip().splitlines() or [""]
        result.error = f"{type(error).__name__}: {lines[0]}"
        return result
    _fill(result, counted, compared)
    return result


def _fill(result: Cell, counted: Counted, compared: _Compared) -> None:
    report = compared.report
    fused = [s for s in report.select(status="fused") if s.kind in ("norm", "activation")]
    result.pairs = {"expected": len(counted.pairs), "fused": len(fused)}
    lowered = len(report.select("scaled_mm", "lowered"))
    result.gemms = {"expected": len(counted.gemms), "lowered": lowered}
    result.missing = _missing(counted.pairs, report)
    result.not_fusible = [asdict(pair) for pair in counted.not_fusible]
    result.refusals = refusals(report)
    result.differing, result.graphs = compared.differing, compared.graphs
    for graph in report.graphs:
        verdict = graph.verdict
        if verdict is not None and verdict.code == "FP8-P003":  # a step of the pass failed
            result.error = verdict.message


def _missing(pairs: list[Pair], report: Report) -> list[dict[str, Any]]:
    """The pairs whose quantise was left, by the path of the linear that it belongs to."""
    left: dict[str, Any] = {}
    for site in report.select("quantize", "left"):
        left.setdefault(_path(site.where), site)
    done = {_path(s.where) for s in report.select(status="fused")}
    found = []
    for pair in pairs:
        refused = next((left[name] for name in pair.consumers if name in left), None)
        places = {pair.producer, *pair.consumers}
        if pair.kind == "activation":  # its product with the other half belongs to their parent
            places |= {name.rpartition(".")[0] for name in pair.consumers}
        if refused is not None:
            why = {"code": refused.code, "message": _steady(refused.message)}
        elif not places & done:
            why = {"code": "", "message": "no site in the report"}
        else:
            continue
        found.append({"kind": pair.kind, "producer": pair.producer,
                      "consumers": pair.consumers, **why})  # fmt: skip
    return found


def refusals(report: Report) -> list[dict[str, Any]]:
    """The sites that were left: kind, place, code, message, and how many there are of each."""
    sites: Counter[tuple[str, str, str, str]] = Counter()
    for site in report.select(status="left"):
        place = re.sub(r"\.\d+(?=\.|$)", ".*", _path(site.where))
        sites[site.kind, place, site.code, _steady(site.message)] += 1
    return [
        {"kind": kind, "site": place, "code": code, "message": message, "count": number}
        for (kind, place, code, message), number in sorted(sites.items())
    ]


def _path(where: str) -> str:
    """The module path of a site's place, without file and line."""
    return where.split(" ")[0]


def _steady(message: str) -> str:
    """A message without the numbers that torch gives to nodes of one name."""
    return re.sub(r"\b([a-z][a-z_]*?)(_\d+)+\b", r"\1", message)


# ---- compiling -----------------------------------------------------------------------------------


class _Reference(fx.Interpreter):
    """Runs a graph node by node; operators of fp8pass by their reference."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from fp8pass.ops import SPECS

        if isinstance(target, torch._ops.OpOverload) and target.namespace == "fp8pass":
            spec = SPECS.get(target._schema.name.split("::")[1])
            if spec is not None:
                return spec.reference(*args, **kwargs)
        return super().call_function(target, args, kwargs)


class _Compared:
    """Compiles a model with fp8pass's two hooks up to code generation, and compares as it runs."""

    def __init__(self) -> None:
        from fp8pass.options import Options

        self.options = Options.resolve({})
        self.reports: list[Report] = []
        self.differing = 0

    @property
    def report(self) -> Report:
        """All graphs of the model."""
        from fp8pass.report import merge

        return merge(self.reports)

    @property
    def graphs(self) -> int:
        """Number of captured graphs."""
        return len(self.reports)

    def run(self, model: nn.Module, batch: tuple[Any, ...]) -> None:
        """Compile and call ``model`` once."""
        import warnings

        import torch._dynamo
        import torch._functorch.config as functorch
        import torch._inductor.config as inductor

        torch._dynamo.reset()
        try:
            with (
                torch.no_grad(),
                inductor.patch(force_disable_caches=True),
                functorch.patch(enable_autograd_cache=False),
                warnings.catch_warnings(),
            ):
                warnings.filterwarnings("ignore", message=".*dynamo_pgo.*")
                torch.compile(model, backend=self._backend, dynamic=False)(*batch)
        finally:
            torch._dynamo.reset()

    def _backend(self, gm: fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        import torch._inductor.compile_fx as inductor
        import torch._inductor.config as config

        from fp8pass.backend import numerics_patches, two_hooks
        from fp8pass.report.collector import collecting
        from fp8pass.report.graph_text import live_module

        received: list[fx.GraphModule] = []
        patches = numerics_patches(gm, example, self.options)
        joint, post = two_hooks(self.options, patches)

        def first(graph: fx.Graph) -> None:
            received.append(live_module(graph))
            joint(graph)

        def inner(graph: fx.GraphModule, example: Sequence[Any], **how: Any) -> Callable[..., Any]:
            from torch._functorch.aot_autograd import make_boxed_func
            from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
            from torch._inductor.virtualized import V

            with V.set_fake_mode(torch._guards.detect_fake_mode(example)):
                view_to_reshape(graph)
                post_grad_passes(graph, is_inference=True)
            before = received[-1]
            after = fused(before)

            def call(*values: Any) -> Any:
                results = _Reference(before).run(*values)
                self.differing += _differing(results, _Reference(after).run(*values))
                return results

            return cast(Callable[..., Any], make_boxed_func(call))

        patches |= {"joint_custom_pre_pass": first, "post_grad_custom_post_pass": post}
        with collecting(None, uuid=post.identity_text()) as report, config.patch(patches):
            result: Any = inductor.compile_fx(gm, example, inner_compile=inner)  # type: ignore[arg-type]
        self.reports.append(report)
        return cast(Callable[..., Any], result)


def fused(received: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph after norms, activations and quantises were read and fused.

    Scaled products stay as they came: their sums may be added in another order, which would hide
    whether a code or a scale has changed.
    """
    from fp8pass import engine
    from fp8pass.options import Options
    from fp8pass.report import GraphRecord
    from fp8pass.report.graph_text import live_module

    work, kept = live_module(received.graph), [received]

    def observe(step: str, graph: fx.Graph) -> None:
        if step == "fuse":
            kept.append(live_module(graph))

    record = GraphRecord(name="coverage", hook="joint", options={}, source="pristine")
    error = engine.run(work.graph, Options.resolve({}), "joint", record, observe)
    if error is not None:
        raise error
    return kept[-1]


def _differing(got: Any, wanted: Any) -> int:
    """Number of elements whose bits differ; NaN equals NaN."""
    number = 0
    for a, b in zip(got, wanted, strict=True):
        if isinstance(a, torch.Tensor):
            same = (a == b) | ((a != a) & (b != b))
            number += int((~same).sum())
    return number
