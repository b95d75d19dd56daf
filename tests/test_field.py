"""What users of systems like this one reported, as tests: the behaviour that is right here.

Each stands for a kind of fault (a fusion that silently does not fire, a scale taken for another
one, an epsilon mixed up) that was seen in public issue trackers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from graphs import (
    Passed,
    Reference,
    assert_same_bits,
    assert_within_contract,
    bits,
    run,
    trace,
    values,
    vector,
)
from torch._dynamo.testing import CompileCounterWithBackend

import fp8pass
from fp8pass.patterns.rule import rules

E4 = torch.float8_e4m3fn
Tensor = torch.Tensor
K = 64


def q(y: Tensor, s: Tensor | float) -> Tensor:
    return (y.float() / s).clamp(-448, 448).to(E4)


def rms(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    h = x.float()
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def passed(fn: Callable[..., Any], *inputs: Tensor, **options: Any) -> Passed:
    """``fn`` through the pass; the graph at the end gives bit for bit what it gave before."""
    made = Passed(trace(fn, *inputs, **options))
    before = run(made.before, *inputs)
    assert_within_contract(run(made.fused, *inputs), before)
    assert_same_bits(run(made.after, *inputs), before)
    return made


@pytest.fixture
def x() -> Tensor:
    return values(2, 4, K)


@pytest.fixture
def w() -> Tensor:
    return vector(K)


S = torch.tensor(0.02)


# ---- a fusion that does not fire -----------------------------------------------------------------


@pytest.mark.parametrize(
    "between",
    [
        lambda y: y,
        lambda y: y.view(-1, K),
        lambda y: y.reshape(-1, K),
        lambda y: y.flatten(0, 1),
        lambda y: y.unsqueeze(0),
    ],
    ids=["none", "view", "reshape", "flatten", "unsqueeze"],
)
def test_a_view_between_norm_and_quantise(
    between: Callable[[Tensor], Tensor], x: Tensor, w: Tensor
) -> None:
    made = passed(lambda x, w, s: q(between(rms(x, w)), s), x, w, S)
    assert made.fusions == 1
    assert run(made.after, x, w, S)[0].shape == between(x).shape


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-8, 3e-5, 0.0])
def test_any_epsilon(eps: float) -> None:
    x, w = values(8, 512) * 1e-3, vector(512)
    assert passed(lambda x, w, s: q(rms(x, w, eps), s), x, w, S).fusions == 1


def _one_over(x: Tensor, w: Tensor) -> Tensor:
    h = x.float()
    return w * (h * (1 / torch.sqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))).to(x.dtype)


def _weight_before_cast(x: Tensor, w: Tensor) -> Tensor:
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * w).to(x.dtype)


def _normalised(x: Tensor) -> Tensor:
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _product(x: Tensor, w: Tensor) -> Tensor:
    h = x.float()
    return (h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


SPELLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "pow": rms,
    "product": _product,
    "weight_right": lambda x, w: _normalised(x) * w,
    "before_cast": _weight_before_cast,
    "functional": lambda x, w: torch.nn.functional.rms_norm(x, (K,), w, 1e-6),
    "one_plus": lambda x, w: rms(x, 1 + w),
    "one_over_sqrt": _one_over,
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_norm_spellings(name: str, x: Tensor, w: Tensor) -> None:
    assert passed(lambda x, w, s: q(SPELLINGS[name](x, w), s), x, w, S).fusions == 1


def test_the_order_of_cast_and_weight_stays(x: Tensor, w: Tensor) -> None:
    first = passed(lambda x, w, s: q(rms(x, w), s), x, w, S)
    second = passed(lambda x, w, s: q(_weight_before_cast(x, w), s), x, w, S)
    assert bool((bits(run(first.fused, x, w, S)[0]) != bits(run(second.fused, x, w, S)[0])).any())


@pytest.mark.parametrize(
    ("fan_out", "fused", "left"),
    [
        (lambda y, s: (q(y, s), y), 1, 0),
        (lambda y, s: (q(y, s), q(y, 2 * s)), 1, 1),
        # two results must stay two tensors
        (lambda y, s: (q(y, s), q(y, s)), 1, 1),
        (lambda y, s: (q(y, s).float(), q(y, s).float().neg()), 1, 0),
        (lambda y, s: (q(y, s), y.flatten(0, 1) @ y.flatten(0, 1).t()), 1, 0),
    ],
    ids=["value", "two_scales", "returned_twice", "read_twice", "product"],
)
def test_several_readers(
    fan_out: Callable[[Tensor, Tensor], Any], fused: int, left: int, x: Tensor, w: Tensor
) -> None:
    made = passed(lambda x, w, s: fan_out(rms(x, w), s), x, w, S)
    assert made.fusions == fused
    assert len(made.sites("quantize", "left")) == left
    for site in made.sites("quantize", "left"):
        assert site.code == "FP8-F004"
    made.after.graph.lint()


def test_a_residual_sum_is_rounded_first_and_kept() -> None:
    def fn(a: Tensor, r: Tensor, w: Tensor, s: Tensor) -> Any:
        total = a + r
        return q(rms(total, w), s), total

    a, r, w = values(64, 1024), values(64, 1024, seed=5), vector(1024)
    made = passed(fn, a, r, w, S)
    assert [site.rule for site in made.sites("norm", "fused")] == ["add_rms_norm_quant"]
    codes, total = run(made.fused, a, r, w, S)
    assert_same_bits([total], [a + r])
    # the norm of the sum that was not rounded is another function, by this much
    other = q(rms(a.float() + r.float(), w.float()).to(torch.bfloat16), S)
    assert 0.002 < float((bits(codes) != bits(other)).float().mean()) < 0.05


MIXED = [
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),
]


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("dtype", "weight"), MIXED, ids=str)
def test_mixed_dtypes(dtype: torch.dtype, weight: torch.dtype, residual: bool) -> None:
    def fn(x: Tensor, r: Tensor, w: Tensor, s: Tensor) -> Any:
        total = x + r if residual else x
        return q(rms(total, w), s), total * 2

    x, r, w = values(6, K, dtype=dtype), values(6, K, dtype=dtype, seed=3), vector(K, weight)
    made = passed(fn, x, r, w, S)
    assert made.fusions == 1
    (y,) = [n for n in made.fused.graph.nodes if "rms_norm_quant" in str(n.target)]
    assert y.meta["val"][2].dtype == torch.promote_types(dtype, weight)


# ---- wrong numbers -------------------------------------------------------------------------------

EXTREME = torch.tensor([448.0, 465.0, 500.0, 1e6, torch.inf, -torch.inf, torch.nan, -0.0])


@pytest.mark.parametrize(
    ("dtype", "top"),
    [
        (torch.float8_e4m3fn, 448.0),
        (torch.float8_e4m3fnuz, 240.0),
        (torch.float8_e4m3fnuz, 224.0),
        (torch.float8_e5m2, 57344.0),
    ],
    ids=str,
)
def test_overflow_saturates_and_nan_stays(dtype: torch.dtype, top: float) -> None:
    """A row of ones has the root mean square 1, so that the weight is what is quantised."""

    def fn(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) * w
        return (y / s).clamp(-top, top).to(dtype)

    x, s = torch.ones(2, 8), torch.tensor(1.0)
    made = Passed(trace(lambda x, w, s: fn(x, w, s), x, EXTREME, s))
    wanted = fn(x, EXTREME, s)
    assert_same_bits(run(made.after, x, EXTREME, s), [wanted])
    assert_same_bits(run(made.fused, x, EXTREME, s), [wanted])
    got = wanted.float()[0].tolist()
    assert got[3:6] == [top, top, -top] and got[6] != got[6]


def test_power_of_two_scales_are_rounded_before_they_divide() -> None:
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    usual = fp8pass.ops.dynamic_form("group128")
    rounded = replace(usual, power="ceil")

    def restored(codes: Tensor, scale: Tensor) -> float:
        value = (codes.float().unflatten(-1, (-1, 128)) * scale.unsqueeze(-1)).flatten(-2)
        return float((value - x).norm() / x.norm())

    codes, scale = torch.ops.fp8pass.quantize(x, None, str(rounded))
    assert bool((torch.frexp(scale)[0] == 0.5).all()) and restored(codes, scale) < 0.03
    plain, exact = torch.ops.fp8pass.quantize(x, None, str(usual))
    assert restored(plain, exact) < 0.03 and restored(plain, scale) > 0.3
    assert bool((scale >= exact).all()) and float((scale / exact).max()) <= 2.0


@pytest.mark.parametrize("rows", [0, 1, 6])
@pytest.mark.parametrize("layout", ["row", "col", "tma"])
def test_strides_of_group_scales_are_the_truth(layout: str, rows: int) -> None:
    x = values(rows, 512) if rows else values(1, 512)[:0]
    form = replace(fp8pass.ops.dynamic_form("group128"), layout=layout)
    codes, scale = torch.ops.fp8pass.quantize(x, None, str(form))
    apart = {"row": None, "col": rows, "tma": -(-rows // 4) * 4}[layout]
    assert scale.shape == (rows, 4)
    assert scale.stride() == ((4, 1) if apart is None else (1, apart))
    amax = x.float().abs().unflatten(-1, (4, 128)).amax(-1)
    assert torch.equal(scale, (amax / 448).clamp(min=1e-12))
    assert codes.shape == x.shape and codes.is_contiguous()


@pytest.mark.parametrize("kind", ["norm", "silu"])
@pytest.mark.parametrize("recipe", ["static", "token"])
def test_no_rows_at_all(kind: str, recipe: str) -> None:
    def fn(x: Tensor, w: Tensor, weight: Tensor, s: Tensor) -> Any:
        y = rms(x, w) if kind == "norm" else torch.nn.functional.silu(x) * (x + w)
        if recipe == "static":
            scale, sw = s, s
        else:
            scale = (y.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
            sw = s.expand(1, 48).contiguous()
        codes = q(y, scale)
        return torch._scaled_mm(codes, weight.t(), scale, sw, out_dtype=torch.bfloat16), codes

    x, w = torch.empty(0, K, dtype=torch.bfloat16), vector(K)
    weight = values(48, K).to(E4)
    made = passed(fn, x, w, weight, S)
    assert made.fusions == 1 and len(made.sites("scaled_mm", "lowered")) == 1
    out, codes = Reference(made.after).run(x, w, weight, S)
    assert (out.shape, out.dtype, codes.shape) == ((0, 48), torch.bfloat16, (0, K))


def test_a_scale_computed_in_bf16_is_not_one_computed_in_float32() -> None:
    def narrow(x: Tensor) -> Any:
        scale = (x.abs().amax(-1, keepdim=True) / 448).float()
        return q(x, scale), scale

    def wide(x: Tensor) -> Any:
        scale = x.abs().amax(-1, keepdim=True).float() / 448
        return q(x, scale), scale

    x = values(64, 256)
    assert float((narrow(x)[1] / wide(x)[1] - 1)[1:].abs().max()) > 1e-3
    for fn in (narrow, wide):
        passed(fn, x)


@pytest.mark.parametrize("kind", ["norm", "silu"])
def test_every_number_of_rows_with_one_graph(kind: str) -> None:
    def fn(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        if kind == "norm":
            return q(rms(x, w), s)
        gate, up = x.chunk(2, -1)
        return q(torch.nn.functional.silu(gate) * up, s)

    counter = CompileCounterWithBackend("fp8pass")
    compiled = torch.compile(fn, backend=counter, fullgraph=True)
    w = vector(K)
    with torch.no_grad():
        for rows in (7, 3, 17, 5):
            x = values(rows, 3, K)
            torch._dynamo.mark_dynamic(x, 0)
            assert_within_contract([compiled(x, w, S)], [fn(x, w, S)])
        assert counter.frame_count == 1
        one = values(1, 3, K)
        assert_within_contract([compiled(one, w, S)], [fn(one, w, S)])
    assert counter.frame_count <= 2


def test_a_symbolic_width_is_no_error() -> None:
    def fn(x: Tensor, s: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return q(torch.nn.functional.silu(gate) * up, s)

    with torch.no_grad():
        compiled = torch.compile(fn, backend=fp8pass.fp8pass_backend, fullgraph=True, dynamic=True)
        for width in (64, 96):
            x = values(5, width)
            assert_within_contract([compiled(x, S)], [fn(x, S)])


def test_the_rules_can_be_built_again_and_again(x: Tensor, w: Tensor) -> None:
    for _ in range(3):
        rules.cache_clear()
        assert passed(lambda x, w, s: q(rms(x, w), s), x, w, S).fusions == 1
        assert passed(lambda x, w, s: q(rms(x, w, 1e-5), s), x, w, S).fusions == 1


def test_a_quantise_alone_is_left_to_the_code_generator(x: Tensor) -> None:
    made = passed(lambda x, s: q(x, s), x, S)
    assert str(made.after.graph) == str(made.before.graph)
    (site,) = made.record.sites
    assert (site.status, site.code) == ("left", "FP8-F002")


# ---- products ------------------------------------------------------------------------------------


def product(bias: Tensor | None, out: torch.dtype) -> Callable[..., Tensor]:
    def fn(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
        return torch._scaled_mm(a, b.t(), sa, sb, bias=bias, out_dtype=out)

    return fn


def operands(m: int = 16, k: int = 32, n: int = 48) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    a, b = (torch.randn(size, k, generator=generator).mul(16).to(E4) for size in (m, n))
    return a, b, torch.rand(m, 1, generator=generator), torch.rand(1, n, generator=generator)


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_bias_is_added_after_the_scales(bias: torch.dtype | None, out: torch.dtype) -> None:
    a, b, sa, sb = operands()
    vector = None if bias is None else torch.randn(48).mul(3).to(bias)

    def fn(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, *bias: Tensor) -> Tensor:
        return torch._scaled_mm(a, b.t(), sa, sb, bias=(*bias, None)[0], out_dtype=out)

    given = (a, b, sa, sb) if vector is None else (a, b, sa, sb, vector)
    made = Passed(trace(fn, *given))
    assert [site.status for site in made.sites("scaled_mm")] == ["lowered"]
    (got,) = run(made.after, *given)
    wanted = (a.double() @ b.double().t()) * sa * sb
    wanted = wanted + (0 if vector is None else vector.double())
    assert got.dtype == out
    torch.testing.assert_close(got.double(), wanted, rtol=2**-7, atol=2**-6)


def test_a_matrix_added_to_a_product_stays_an_addition() -> None:
    a, b, sa, sb = operands()
    matrix = torch.randn(16, 48).bfloat16()

    def fn(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, c: Tensor) -> Tensor:
        return product(None, torch.bfloat16)(a, b, sa, sb) + c

    made = Passed(trace(fn, a, b, sa, sb, matrix))
    (got,) = run(made.after, a, b, sa, sb, matrix)
    assert_same_bits([got], [fn(a, b, sa, sb, matrix)])
    (call,) = [n for n in made.after.graph.nodes if "scaled_mm" in str(n.target)]
    assert call.args[4] is None


def test_the_dtype_of_the_result_is_that_of_the_source() -> None:
    a, b, sa, sb = operands()
    for out in (torch.float16, torch.float32):
        made = Passed(trace(product(None, out), a, b, sa, sb))
        assert run(made.after, a, b, sa, sb)[0].dtype == out
    one = torch.tensor(0.5)
    made = Passed(trace(lambda *v: torch._scaled_mm(v[0], v[1].t(), v[2], v[3]), a, b, one, one))
    assert [site.status for site in made.sites("scaled_mm")] == ["left"]
    assert run(made.after, a, b, one, one)[0].dtype == E4


def test_inputs_are_never_written_to(x: Tensor, w: Tensor) -> None:
    def fn(x: Tensor, r: Tensor, w: Tensor, s: Tensor) -> Any:
        total = x + r
        codes = q(rms(total, w), s)
        return codes, total.add(1)

    r = values(2, 4, K, seed=9)
    copies = copy.deepcopy((x, r))
    passed(fn, x, r, w, S)
    assert_same_bits((x, r), copies)
