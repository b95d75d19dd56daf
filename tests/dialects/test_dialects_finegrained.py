"""Fine-grained FP8: one operator for quantise and product, taken apart where a kernel takes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import Passed, assert_same_bits, codes, run, trace, values, vector
from spell import llama
from stand_ins import finegrained

import fp8pass

OPS = finegrained()
FORM = "float8_e4m3fn,token,float32,div,448.0,divisor,1e-12,div,-448.0,448.0"


def linear(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return OPS.w8a8_tensor_dynamic_fp8_matmul(x, w, s, x.dtype)


def block(x: torch.Tensor, w: torch.Tensor, *p: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Two linears on a norm, one on SiLU and multiply."""
    y = llama(x, w, 1e-6)
    gate, up = linear(y, p[0], p[3]).chunk(2, -1)
    return x + linear(F.silu(gate) * up, p[1], p[3]), linear(y, p[2], p[3])


def operands(k: int = 64) -> tuple[torch.Tensor, ...]:
    scale = torch.tensor([0.01])
    return vector(k), codes(128, k), codes(k, 64, seed=4), codes(48, k, seed=5), scale


@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64), (1, 64)], ids=str)
def test_fused_and_lowered(shape: tuple[int, ...]) -> None:
    inputs = values(*shape), *operands()
    passed = Passed(trace(block, *inputs))
    assert passed.fusions == 2
    assert {site.status for site in passed.record.sites} == {"fused", "lowered"}
    keys = {site.key for site in passed.sites("scaled_mm")}
    assert keys == {"float8_e4m3fn/dynamic/token x float8_e4m3fn/static/tensor"}
    assert not [n for n in passed.after.graph.nodes if "finegrained" in str(n.target)]


@pytest.mark.parametrize("stage", ["joint", "all"])
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64)], ids=str)
def test_same_numbers(shape: tuple[int, ...], stage: str) -> None:
    inputs = values(*shape), *operands()
    inputs[0][-1] *= 1e-12  # a row whose scale lies below the floor of its divisor
    passed = Passed(trace(linear, inputs[0], inputs[2], inputs[5]), stage=stage)
    given = inputs[0], inputs[2], inputs[5]
    assert_same_bits(run(passed.fused, *given), run(passed.before, *given))


def test_against_float64() -> None:
    inputs = values(2, 3, 64), *operands()
    passed = Passed(trace(block, *inputs))
    before, fused = run(passed.before, *inputs), run(passed.fused, *inputs)
    x, w, a, b, c, s = (t.double() for t in inputs)
    y = llama(x, w, 1e-6)
    gate, up = (y @ a.t() * s).chunk(2, -1)
    exact = x + (F.silu(gate) * up) @ b.t() * s, y @ c.t() * s
    for got, source, wanted in zip(fused, before, exact, strict=True):
        error, theirs = ((t.double() - wanted).norm() / wanted.norm() for t in (got, source))
        assert theirs < 0.06 and error <= 1.1 * theirs + 2**-8


def test_the_floor_of_the_divisor_is_not_that_of_the_scale() -> None:
    """What makes it a form of its own: the stored scale may lie below the floor."""
    from fp8pass.ops.forms import QuantForm
    from fp8pass.ops.quantize import quantize_with

    x = torch.full((1, 8), 1e-13)
    q, scale = quantize_with(x, None, QuantForm.parse(FORM))
    assert 0 < float(scale) < 1e-12 and float(q.float()[0, 0]) < 1.0
    other = quantize_with(x, None, QuantForm.parse(FORM.replace("divisor", "scale")))
    assert torch.equal(other[0].float(), q.float()) and float(other[1]) == pytest.approx(1e-12)


def test_symbolic_rows() -> None:
    inputs = values(6, 3, 64), *operands()
    passed = Passed(trace(block, *inputs, dynamic=(0,)), stage="joint")
    assert passed.fusions == 2
    for rows in (1, 4):
        again = values(rows, 3, 64, seed=rows), *inputs[1:]
        for a, b in zip(run(passed.fused, *again), run(passed.before, *again), strict=True):
            torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6)


def refused(fn: Any, *inputs: torch.Tensor) -> str:
    passed = Passed(trace(fn, *inputs))
    assert str(passed.after.graph) == str(passed.before.graph)
    ((code, message),) = {(s.code, s.message) for s in passed.sites("scaled_mm", "left")}
    assert code == "FP8-R010"
    return message


def test_refused() -> None:
    """Beside each, the call that is read is that of test_same_numbers."""
    x, w, s = values(5, 64), codes(48, 64), torch.tensor([0.01])
    assert "several scales" in refused(linear, x, w, torch.rand(48))
    assert "its weight is torch.float8_e5m2" in refused(linear, x, w.to(torch.float8_e5m2), s)

    def transposed(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return linear(x.t(), w, s)

    assert "contiguous" in refused(transposed, values(64, 5), w, s)


def test_blocks() -> None:
    """Taken apart if a kernel takes such blocks, else left with that reason."""

    def fn(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return OPS.w8a8_block_dynamic_fp8_matmul(x, w, s, [128, 128], x.dtype)

    given = values(5, 256), codes(128, 256), torch.rand(1, 2) + 0.1
    passed = Passed(trace(fn, *given))
    (site,) = passed.sites("scaled_mm")
    if site.status == "left":
        assert "no kernel takes this site" in refused(fn, *given)
    else:
        assert site.key == "float8_e4m3fn/dynamic/group1x128 x float8_e4m3fn/static/group128x128"
        for a, b in zip(run(passed.fused, *given), run(passed.before, *given), strict=True):
            torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-4)
    message = refused(fn, values(5, 256), codes(128, 256), torch.rand(2, 1))
    assert "its scales have the shape" in message


def two(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, s: torch.Tensor) -> tuple[Any, ...]:
    return linear(x, w, s), linear(x, v, s)


@pytest.mark.parametrize("options", [{}, {"force": "w8a16"}, {"prefer": "w8a16"}], ids=str)
@pytest.mark.parametrize("fuel", [0, 1, 2, 3])
def test_a_linear_taken_apart_and_lowered_is_one_rewrite(fuel: int, options: Any) -> None:
    inputs = values(5, 64), codes(48, 64), codes(32, 64, seed=3), torch.tensor([0.01])
    for sites in (
        Passed(trace(two, *inputs), fuel=fuel, **options).record.sites,
        fp8pass.explain(two, *inputs, fuel=fuel, **options).sites,
    ):
        products = [site for site in sites if site.kind == "scaled_mm"]
        made = [site for site in products if site.status == "lowered"]
        assert (len(products), len(made)) == (2, min(fuel, 2))
        assert all(("w8a16" in site.kernel) == bool(options) for site in made)
        left = [site for site in products if site.status == "left"]
        assert all("fuel limit" in site.message for site in left)
