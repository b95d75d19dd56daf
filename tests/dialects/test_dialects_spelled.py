"""The libraries' linears as plain aten: fused and lowered as our own, numbers against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import Passed, Reading, assert_same_bits, run, trace, values, vector
from spell import functional
from spelled import LINEARS, dequantised, operands

pytestmark = pytest.mark.skipif(
    not hasattr(F, "scaled_mm"), reason="torch.nn.functional.scaled_mm came with torch 2.10"
)

NAMES = list(LINEARS)


def block(name: str) -> Any:
    """Norm, gate and up, SiLU and multiply, down; a second linear on the norm; a bias."""
    linear = LINEARS[name][0]

    def fn(x: torch.Tensor, w: torch.Tensor, *p: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = functional(x, w, 1e-6)
        gate, up = linear(y, p[0], p[1]).chunk(2, -1)
        down = linear(F.silu(gate) * up, p[2], p[3], p[6])
        return x + down, linear(y, p[4], p[5])

    return fn


def inputs(name: str, *shape: int) -> tuple[torch.Tensor, ...]:
    k = shape[-1]
    first, second, third = (
        operands(name, n, width, seed) for n, width, seed in ((128, k, 1), (k, 64, 2), (48, k, 3))
    )
    return values(*shape), vector(k), *first, *second, *third, vector(k, seed=4)


def exact(given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The block in float64 without any quantisation of activations."""
    x, w = given[0].double(), given[1].double()
    y = functional(x, w, 1e-6)
    gate, up = (y @ dequantised(given[2], given[3]).t()).chunk(2, -1)
    down = (F.silu(gate) * up) @ dequantised(given[4], given[5]).t() + given[8].double()
    return x + down, y @ dequantised(given[6], given[7]).t()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64), (1, 64)], ids=str)
def test_fused(name: str, shape: tuple[int, ...]) -> None:
    """Two producers with one quantise each, three products, nothing left."""
    given = inputs(name, *shape)
    passed = Passed(trace(block(name), *given))
    assert passed.fusions == 2, [(s.kind, s.code, s.message) for s in passed.record.sites]
    assert {site.status for site in passed.record.sites} == {"fused", "lowered"}
    wanted = f"float8_e4m3fn/{LINEARS[name][3]}"
    assert {site.key for site in passed.record.sites if site.status == "fused"} == {wanted}
    # products apart, whose sums have another order; NaN included: torchao divides zeros by zero
    joint = Passed(trace(block(name), *given), stage="joint")
    assert_same_bits(run(joint.fused, *given), run(joint.before, *given))


@pytest.mark.parametrize("name", LINEARS)
@pytest.mark.parametrize("rows", [1, 5])
def test_every_product_is_lowered(name: str, rows: int) -> None:
    """Whether its quantise is read or not; granularity does not follow the number of rows."""
    passed = Passed(trace(block(name), *inputs(name, rows, 64)))
    sites = passed.sites("scaled_mm")
    assert [site.status for site in sites] == ["lowered"] * 3
    granularities = {tuple(part.rsplit("/", 1)[1] for part in s.key.split(" x ")) for s in sites}
    act, weight = (LINEARS[name][i].rsplit("/", 1)[1] for i in (3, 4))
    assert granularities == {(act, weight)}


@pytest.mark.parametrize("name", LINEARS)
def test_never_taken_for_a_neighbour(name: str) -> None:
    """Each quantise is read as its own form or, with a reason, not at all - never as another."""
    given = inputs(name, 5, 64)
    linear, _, form, *_ = LINEARS[name]
    reading = Reading(trace(lambda x, w, s: linear(x, w, s), given[0], *given[2:4]))
    reading.check(given[0], *given[2:4])
    dynamic = [f for f in reading.forms("quantize") if ",given," not in f]
    assert dynamic in ([], [form]), dynamic
    static = [f for f in reading.forms("quantize") if ",given," in f]
    assert len(dynamic) + len(static) + len(reading.unread) == 1


@pytest.mark.parametrize("name", LINEARS)
def test_against_float64(name: str) -> None:
    """The error of the rewritten graph is that of the quantisation, not of the rewriting."""
    given = inputs(name, 2, 3, 64)
    given[0][0] = given[0][1]  # no row of zeros, which torchao cannot take
    passed = Passed(trace(block(name), *given))
    before, fused = run(passed.before, *given), run(passed.fused, *given)
    for a, b, wanted in zip(before, fused, exact(given), strict=True):
        error, source = ((t.double() - wanted).norm() / wanted.norm() for t in (b, a))
        assert source < 0.06
        assert error <= 1.1 * source + 2**-8


@pytest.mark.parametrize("name", LINEARS)
def test_symbolic_rows(name: str) -> None:
    """No guard, no error, whatever is read."""
    given = inputs(name, 6, 64)
    passed = Passed(trace(block(name), *given, dynamic=(0,)))
    assert [site.status for site in passed.sites("scaled_mm")] == ["lowered"] * 3
    joint = Passed(trace(block(name), *given, dynamic=(0,)), stage="joint")
    assert joint.fusions == passed.fusions == 2
    for rows in (2, 5):
        again = values(rows, 64, seed=rows), *given[1:]
        assert_same_bits(run(joint.fused, *again), run(joint.before, *again))
