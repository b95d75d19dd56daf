"""Values with several readers: what merging, watching and finishing must leave as it was."""

from __future__ import annotations

import torch
from graphs import Passed, Reading, assert_same_bits, run, sorted_copy, trace, values, vector
from spell import E4, llama, static, token

from fp8pass import engine
from fp8pass.options import Options
from fp8pass.report import GraphRecord
from fp8pass.report.graph_text import live_module
from fp8pass.spellings.reader import Reader
from fp8pass.workbench import Workbench

Tensor = torch.Tensor
X, R, W, S = values(5, 64), values(5, 64, seed=4), vector(64), torch.tensor(0.02)


def returned_twice(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    y = llama(x, w, 1e-6)
    return *static(y, s), *static(y, s)


def viewed_and_returned(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    y = llama(x, w, 1e-6)
    return static(y, s)[0].view(64, 5), static(y, s)[0].view(-1)


def residual_read_early(x: Tensor, r: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    """The sum is read by a node that stands before the end of the norm."""
    total = x + r
    early = total * 2
    return *static(llama(total, w, 1e-6), s), early, total


def test_two_results_stay_two_tensors() -> None:
    """A caller may write to one of two equal results; the other must not change."""
    for fn in (returned_twice, viewed_and_returned):
        passed = Passed(trace(fn, X, W, S))
        assert passed.fusions == 1
        for module in (passed.after, passed.fused):
            first, second = run(module, X, W, S)
            assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def test_zeros_of_either_sign_are_not_merged() -> None:
    def fn(x: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        quotient = x / s
        return tuple((quotient + z).clamp(-448, 448).to(E4) for z in (0.0, -0.0))

    x = torch.tensor([-0.0, 1.0])
    traced = trace(fn, x, S)
    assert_same_bits(run(Reading(traced).before, x, S), run(traced, x, S))


def test_watching_does_not_change_the_result() -> None:
    """A copy of the graph after each step, as a dump makes it."""
    traced = trace(residual_read_early, X, R, W, S)
    record = GraphRecord(name="test", hook="joint", options={}, source="pristine")
    steps: list[str] = []

    def watch(step: str, graph: torch.fx.Graph) -> None:
        live_module(graph)
        steps.append(step)

    before = live_module(traced.graph)
    error = engine.run(traced.graph, Options(), "all", record, watch)
    assert error is None and steps == ["read", "fuse"], error
    assert [site.rule for site in record.sites if site.status == "fused"] == ["add_rms_norm_quant"]
    traced.recompile()
    assert_same_bits(run(traced, X, R, W, S), run(before, X, R, W, S))


def test_finishing_a_graph_whose_operators_were_kept() -> None:
    """Where a kernel takes the generic operator, nothing is given back before the end."""
    traced = trace(residual_read_early, X, R, W, S)
    before = live_module(traced.graph)
    bench = Workbench(traced.graph)
    reader = Reader(bench)
    reader.read_producers()
    reader.read_quantises()
    bench.finish()
    assert_same_bits(run(sorted_copy(traced.graph), X, R, W, S), run(before, X, R, W, S))


def test_fp8_without_a_quantise_or_product_is_nothing_to_do() -> None:
    """FP8 values that are only dequantised: no site, and no word of several devices."""
    traced = trace(lambda w, x: x + w.float(), values(4, 4).to(E4), values(4, 4).float())
    passed = Passed(traced)
    assert passed.record.verdict is not None and passed.record.verdict.code == "FP8-P004"


def test_a_returned_scale_is_still_shared() -> None:
    """Only results are kept apart: one that is returned and one that is not are merged."""

    def fn(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        y = llama(x, w, 1e-6)
        return *token(y, s), token(y, s)[0].float() + 1

    passed = Passed(trace(fn, X, W, S))
    assert passed.fusions == 1 and not passed.sites("quantize", "left")
