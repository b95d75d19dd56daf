"""Norm spellings: read as the right form, no number changed, given back to the node."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import (
    Passed,
    Reading,
    assert_same_bits,
    post_grad,
    read,
    run,
    trace,
    values,
    vector,
)
from spell import NAMES, NORMS, functional, gemma, llama, norm_form, static

S = torch.tensor(0.02)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check(name: str, dtype: torch.dtype, shape: tuple[int, ...], dynamic: bool = False) -> Reading:
    fn = NORMS[name][0]
    x, w = values(*shape, dtype=dtype), vector(shape[-1], dtype)
    reading = read(
        lambda x, w, s: static(fn(x, w, 1e-5), s), x, w, S, dynamic=(0,) if dynamic else ()
    )
    assert reading.forms("norm") == [norm_form(name, dtype)]
    assert len(reading.forms("quantize")) == 1
    assert reading.unread == []
    return reading


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_form_and_numbers(name: str, dtype: torch.dtype) -> None:
    check(name, dtype, (5, 64))


@pytest.mark.parametrize("name", NORMS)
def test_three_dims_and_symbolic_batch(name: str) -> None:
    reading = check(name, torch.bfloat16, (6, 3, 48), dynamic=True)
    # the graph is right for other batch sizes too
    w = vector(48)
    for rows in (1, 4):
        reading.check(values(rows, 3, 48, seed=rows), w, S)


@pytest.mark.parametrize("shape", [(1, 64), (0, 64), (3, 47), (7, 1), (64,)], ids=str)
@pytest.mark.parametrize("name", ["llama", "functional", "over_sqrt"])
def test_odd_shapes(name: str, shape: tuple[int, ...]) -> None:
    check(name, torch.bfloat16, shape)


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-8, 3e-5, 0.0, 9.999999747378752e-06])
@pytest.mark.parametrize("fn", [llama, functional], ids=lambda f: f.__name__)
def test_any_eps(fn, eps: float) -> None:  # type: ignore[no-untyped-def]
    # at this magnitude the epsilon is not lost in the mean square
    x, w = (torch.randn(8, 256) * 1e-3).bfloat16(), vector(256)
    reading = read(lambda x, w, s: static(fn(x, w, eps), s), x, w, torch.tensor(1e-3))
    (node,) = [d.node for d in reading.drafts if d.kind == "norm"]
    # F.rms_norm's own decomposition rounds the epsilon to float32
    wanted = torch.tensor(eps).item() if fn is functional else eps
    assert node.args[2] == wanted


@pytest.mark.parametrize(
    ("dtype", "weight"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["llama", "weight_first", "gemma", "functional"])
def test_weight_of_another_dtype(name: str, dtype: torch.dtype, weight: torch.dtype) -> None:
    fn = NORMS[name][0]
    x, w = values(5, 64, dtype=dtype), vector(64, weight)

    def both(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = fn(x, w, 1e-6)
        return *static(y, s), y

    reading = read(both, x, w, S)
    assert reading.forms("norm") == [norm_form(name, dtype)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_weight(dtype: torch.dtype) -> None:
    def fn(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = x.float()
        return static((h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype), s)

    reading = read(fn, values(5, 64, dtype=dtype), S)
    assert reading.forms("norm") == [f"mean,rsqrt,none,{NAMES[dtype]}"]


def test_weight_offset_stays_outside() -> None:
    """``1 + w`` of Gemma is an ordinary operand: the sum is made once, before the operator."""
    reading = check("gemma", torch.bfloat16, (5, 64))
    (node,) = [d.node for d in reading.drafts if d.kind == "norm"]
    assert node.args[1].target is torch.ops.aten.add.Tensor


def test_first_and_second_rounding_stay_apart() -> None:
    """The two orders of weight and cast are different functions: 1.6 % of the codes differ."""
    x, w = values(64, 256), vector(256)
    results = []
    for name in ("llama", "weight_first"):
        fn = NORMS[name][0]
        reading = read(lambda x, w, s, fn=fn: static(fn(x, w, 1e-6), s), x, w, S)
        results.append(run(reading.after, x, w, S)[0].view(torch.uint8))
    assert (results[0] != results[1]).float().mean() > 0.001


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("swapped", [False, True])
def test_residual(dtype: torch.dtype, swapped: bool) -> None:
    def fn(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, s: torch.Tensor):  # type: ignore[no-untyped-def]
        total = r + x if swapped else x + r
        return (*static(llama(total, w, 1e-6), s), total)

    x, r = values(5, 64, dtype=dtype), values(5, 64, dtype=dtype, seed=9)
    reading = read(fn, x, r, vector(64, dtype), S, dynamic=(0, 1))
    (node,) = [d.node for d in reading.drafts if d.kind == "norm"]
    assert node.target is torch.ops.fp8pass.add_rms_norm.default
    names = [str(n.target) for n in reading.after.graph.nodes]
    assert not any("add.Tensor" in name for name in names)


def test_chained_residuals() -> None:
    """Each sum is the residual of the next block and belongs to one norm."""

    def fn(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, s: torch.Tensor):  # type: ignore[no-untyped-def]
        first = x + r
        y = llama(first, w, 1e-6)
        second = first + y * 2
        return (*static(y, s), *static(gemma(second, w, 1e-6), s), second)

    reading = read(fn, values(5, 64), values(5, 64, seed=4), vector(64), S)
    assert [str(d.node.target) for d in reading.drafts if d.kind == "norm"] == [
        "fp8pass.add_rms_norm.default"
    ] * 2


def test_residual_whose_weight_comes_from_the_sum() -> None:
    """Taking over the sum would make a cycle; the norm alone is read."""

    def fn(x: torch.Tensor, r: torch.Tensor, s: torch.Tensor):  # type: ignore[no-untyped-def]
        total = x + r
        return (*static(llama(total, total[1], 1e-6), s), total)

    reading = read(fn, values(5, 64), values(5, 64, seed=4), S)
    assert [str(d.node.target) for d in reading.drafts if d.kind == "norm"] == [
        "fp8pass.rms_norm.default"
    ]


@pytest.mark.parametrize("name", NORMS)
def test_after_inductors_passes(name: str) -> None:
    """The same form where a post-grad hook sees it."""
    fn = NORMS[name][0]
    x, w = values(6, 3, 64), vector(64)
    traced = trace(lambda x, w, s: static(fn(x, w, 1e-5).view(-1, 64), s), x, w, S, dynamic=(0,))
    reading = Reading(post_grad(traced))
    reading.check(x, w, S)
    assert reading.forms("norm") == [norm_form(name, torch.bfloat16)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_eps_hidden_in_a_constant(dtype: torch.dtype) -> None:
    """``eps`` as a tensor: the number that is added is the tensor's, rounded to its dtype."""

    def fn(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        eps: Any = torch.full((), 1e-3, dtype=dtype)
        return static(llama(x, w, eps), s)

    x, w, s = (torch.randn(16, 256) * 1e-2).bfloat16(), vector(256), torch.tensor(1e-2)
    reading = read(fn, x, w, s)
    (node,) = [d.node for d in reading.drafts if d.kind == "norm"]
    assert node.args[2] == float(torch.tensor(1e-3, dtype=dtype))


# ---- forms that the table of spellings does not reach -------------------------------------------


def test_no_epsilon_is_an_epsilon_of_zero() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = x.float()
        return static(w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True))).to(x.dtype), s)

    reading = read(fn, values(5, 64), vector(64), S)  # the first row is zero: 0 * inf
    (node,) = [d.node for d in reading.drafts if d.kind == "norm"]
    assert node.args[2:] == (0.0, "mean,rsqrt,after_cast,bfloat16")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16], ids=str)
def test_cast_after_a_float32_weight(dtype: torch.dtype, cast: torch.dtype) -> None:
    """The weight promotes, and the linear wants the model dtype again."""
    x, w = values(5, 64, dtype=dtype), vector(64, torch.float32)
    reading = read(lambda x, w, s: static(llama(x, w, 1e-6).to(cast), s), x, w, S)
    assert reading.forms("norm") == [
        f"mean,rsqrt,after_cast,{NAMES[dtype]},out={NAMES[cast]}",
    ]


def test_two_roundings_after_the_weight_stay_two() -> None:
    """A product that is fp16 already and is cast to bf16: that cast is left outside."""
    x, w = values(5, 64, dtype=torch.float16), vector(64, torch.float16)
    reading = read(lambda x, w, s: static(llama(x, w, 1e-6).bfloat16(), s), x, w, S)
    assert reading.forms("norm") == ["mean,rsqrt,after_cast,float16"]


def test_heads() -> None:
    """The norm of each head's query, whose codes go back to rows of all heads."""

    def fn(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q = x.view(*x.shape[:-1], 4, 16)
        return static(llama(q, w, 1e-6).reshape(x.shape), s)

    inputs = (values(3, 5, 64), vector(16), S)
    reading = read(fn, *inputs, dynamic=(0,))
    assert reading.forms("norm") == ["mean,rsqrt,after_cast,bfloat16"]
    passed = Passed(trace(fn, *inputs, dynamic=(0,)), strict=True)
    assert passed.fusions == 1


@pytest.mark.parametrize("name", ["llama", "functional", "no_keepdim", "weight_into_root"])
def test_slice_of_a_packed_projection(name: str) -> None:
    fn = NORMS[name][0]

    def packed(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k = x.split([64, 32], -1)
        return *static(fn(q, w, 1e-6), s), *static(fn(k, w[:32], 1e-6), s)

    inputs = (values(6, 96), vector(64), S)
    reading = read(packed, *inputs, dynamic=(0,))
    assert reading.forms("norm") == [norm_form(name, torch.bfloat16)] * 2
    assert Passed(trace(packed, *inputs)).fusions == 2


# ---- residuals ----------------------------------------------------------------------------------

MIXED = [(a, b) for a in DTYPES for b in DTYPES]


@pytest.mark.parametrize(("dtype", "other"), MIXED, ids=str)
@pytest.mark.parametrize("weight", DTYPES, ids=str)
def test_residual_of_any_dtypes(
    dtype: torch.dtype, other: torch.dtype, weight: torch.dtype
) -> None:
    def fn(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, s: torch.Tensor):  # type: ignore[no-untyped-def]
        total = x + r
        y = gemma(total, w, 1e-6)
        return (*static(y, s), y, total)

    inputs = (values(5, 64, dtype=dtype), values(5, 64, dtype=other, seed=9), vector(64, weight), S)
    reading = read(fn, *inputs)
    (node,) = [d.node for d in reading.drafts if d.kind == "norm"]
    assert node.target is torch.ops.fp8pass.add_rms_norm.default
    passed = Passed(trace(fn, *inputs), strict=True)
    assert passed.fusions == 1
    assert_same_bits(run(passed.fused, *inputs), run(passed.before, *inputs))


def wide_sum(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, s: torch.Tensor):  # type: ignore[no-untyped-def]
    """As vLLM's own code: the sum is float32 for the norm, and rounded for the next block."""
    h = x.float() + r.float()
    total = h.to(x.dtype)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (*static(h.to(x.dtype) * w, s), total, total * 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sum_that_is_not_rounded_before_the_norm(dtype: torch.dtype) -> None:
    x, r, w = values(64, 64, dtype=dtype), values(64, 64, dtype=dtype, seed=9), vector(64, dtype)
    reading = read(wide_sum, x, r, w, S, dynamic=(0, 1))
    assert reading.forms("norm") == [f"mean,rsqrt,after_cast,{NAMES[dtype]},sum=float32"]
    passed = Passed(trace(wide_sum, x, r, w, S, dynamic=(0, 1)), strict=True)
    assert [s.rule for s in passed.sites("norm", "fused")] == ["add_rms_norm_quant"]
    assert_same_bits(run(passed.fused, x, r, w, S), run(passed.before, x, r, w, S))
    assert_same_bits(run(passed.after, x, r, w, S), run(passed.before, x, r, w, S))
    # it is another function than that of the rounded sum
    rounded = run(
        trace(lambda x, r, w, s: static(llama(x + r, w, 1e-6), s), x, r, w, S), x, r, w, S
    )
    codes = run(passed.before, x, r, w, S)[0]
    assert (rounded[0].view(torch.uint8) != codes.view(torch.uint8)).float().mean() > 0.001


def test_wide_sum_without_a_reader() -> None:
    """The last block's: nobody reads the sum."""

    def fn(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, s: torch.Tensor):  # type: ignore[no-untyped-def]
        return wide_sum(x, r, w, s)[:1]

    reading = read(fn, values(6, 64), values(6, 64, seed=2), vector(64), S)
    assert reading.forms("norm") == ["mean,rsqrt,after_cast,bfloat16,sum=float32"]


@pytest.mark.parametrize(
    "other",
    [lambda h: h, lambda h: h.half(), lambda h: h * 2, lambda h: h.sum()],
    ids=["itself", "another_dtype", "a_product", "a_sum"],
)
def test_wide_sum_that_is_read_in_float32(other) -> None:  # type: ignore[no-untyped-def]
    """Then the float32 sum is the residual."""

    def fn(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, s: torch.Tensor):  # type: ignore[no-untyped-def]
        h = x.float() + r.float()
        y = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return (*static(y * w, s), h.to(x.dtype), other(h))

    inputs = (values(6, 64), values(6, 64, seed=2), vector(64), S)
    reading = read(fn, *inputs)
    assert reading.forms("norm") == ["mean,rsqrt,after_cast,bfloat16"]
    passed = Passed(trace(fn, *inputs), strict=True)
    assert passed.fusions == 1
    assert_same_bits(run(passed.fused, *inputs), run(passed.before, *inputs))


def test_two_rounded_sums_stay_two_tensors() -> None:
    def fn(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, s: torch.Tensor):  # type: ignore[no-untyped-def]
        h = x.float() + r.float()
        y = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return (*static(y * w, s), h.to(x.dtype), h.to(x.dtype))

    inputs = (values(6, 64), values(6, 64, seed=2), vector(64), S)
    passed = Passed(trace(fn, *inputs), strict=True)
    assert passed.fusions == 1
    *_, first, second = passed.after.graph.output_node().all_input_nodes
    assert first is not second
    assert_same_bits(run(passed.fused, *inputs), run(passed.before, *inputs))


@pytest.mark.parametrize("width", [float("inf"), float("nan"), 64.5])
def test_a_width_that_is_no_number_of_values(width: float) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = x.float()
        mean = h.pow(2).sum(-1, keepdim=True) / width
        return static(w * (h * torch.rsqrt(mean + 1e-6)).to(x.dtype), s)

    passed = Passed(trace(fn, values(6, 64), vector(64), S), strict=True)
    assert passed.fusions == 0 and passed.sites("quantize")[0].code == "FP8-R003"
