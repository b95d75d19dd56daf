"""Spellings of activations: read as the right form, no number changed, given back to the node."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import Passed, Reading, assert_same_bits, post_grad, read, run, trace, values
from spell import (
    ACTIVATIONS,
    ALONE,
    QUANTS,
    act_form,
    alone_form,
    gpt_oss,
    silu_two,
    static,
    token,
)

S = torch.tensor(0.02)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Tensor = torch.Tensor


def chunked(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = x.chunk(2, dim=-1)
    return gate, up


def splitted(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = torch.split(x, [x.shape[-1] // 2] * 2, -1)
    return gate, up


def sliced(x: Tensor) -> tuple[Tensor, Tensor]:
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def swapped(x: Tensor) -> tuple[Tensor, Tensor]:
    up, gate = x.chunk(2, dim=-1)
    return gate, up


def interleaved(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., 0::2], x[..., 1::2]


def unbound(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).unbind(-1)
    return gate, up


def unflattened(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = x.unflatten(-1, (2, -1)).unbind(-2)
    return gate, up


PACKED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "chunk": chunked,
    "split": splitted,
    "slice": sliced,
    "swapped": swapped,
    "interleaved": interleaved,
    "unbound": unbound,
    "unflattened": unflattened,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_form_and_numbers(name: str, dtype: torch.dtype) -> None:
    fn = ACTIVATIONS[name]
    gate, up = values(5, 64, dtype=dtype), values(5, 64, dtype=dtype, seed=5)
    reading = read(lambda g, u, s: static(fn(g, u), s), gate, up, S)
    assert reading.forms("activation") == [act_form(name, dtype)]
    assert len(reading.forms("quantize")) == 1


@pytest.mark.parametrize("shape", [(6, 64), (6, 3, 46)], ids=str)
@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("name", ["silu_two", "silu_wide"])
def test_halves_of_one_tensor(name: str, packed: str, shape: tuple[int, ...]) -> None:
    fn, halves = ACTIVATIONS[name], PACKED[packed]
    reading = read(lambda x, s: static(fn(*halves(x)), s), values(*shape), S, dynamic=(0,))
    assert reading.forms("activation") == [act_form(name, torch.bfloat16)]
    for rows in (1, 3):
        reading.check(values(rows, *shape[1:], seed=rows), S)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_after_inductors_passes(name: str) -> None:
    fn, x = ACTIVATIONS[name], values(6, 64)
    reading = Reading(post_grad(trace(lambda x, s: static(fn(*chunked(x)), s), x, S)))
    reading.check(x, S)
    expected = act_form(name, torch.bfloat16)
    if name == "silu_wide" and torch.__version__.startswith("2.11."):
        expected = "div,float32,float32"  # it has dropped the last rounding, before the quantise
    assert reading.forms("activation") == [expected]


@pytest.mark.parametrize("shape", [(1, 64), (0, 64), (3, 1), (47,)], ids=str)
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    reading = read(silu_two, values(*shape), values(*shape, seed=1))
    assert reading.forms("activation") == [act_form("silu_two", torch.bfloat16)]


def test_mixed_dtypes() -> None:
    """A float32 ``up`` promotes the product; the gate's rounding to bf16 stays."""
    gate, up = values(5, 64), values(5, 64, dtype=torch.float32, seed=1)
    reading = read(silu_two, gate, up)
    assert reading.forms("activation") == ["div,bfloat16,float32"]


def test_special_values() -> None:
    gate = torch.tensor([[torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e30, -1e30, 88.0, -88.0]])
    for dtype in DTYPES:
        reading = read(lambda g, u, s: static(silu_two(g, u), s), gate.to(dtype), gate.to(dtype), S)
        assert len(reading.forms("activation")) == 1


def test_product_read_twice() -> None:
    """The product may have any number of readers; the SiLU in between only one."""

    def fn(g: Tensor, u: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        y = F.silu(g) * u
        return *static(y, s), y, y + 1

    reading = read(fn, values(5, 64), values(5, 64, seed=1), S)
    assert len(reading.forms("activation")) == 1
    assert len(run(reading.after, values(5, 64), values(5, 64, seed=1), S)) == 3


def test_gate_times_itself() -> None:
    reading = read(lambda g: F.silu(g) * g, values(5, 64))
    assert reading.forms("activation") == [act_form("silu_two", torch.bfloat16)]


# ---- the other activations -----------------------------------------------------------------------


def fused_once(fn: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> Passed:
    """One activation and its quantise become one operator; no number changes."""
    traced = trace(fn, *inputs)
    passed = Passed(traced, strict=True)
    assert passed.fusions == 1, [(s.kind, s.code, s.message) for s in passed.record.sites]
    assert_same_bits(run(passed.fused, *inputs), run(passed.before, *inputs))
    assert_same_bits(run(passed.after, *inputs), run(passed.before, *inputs))
    return passed


def form_of(passed: Passed) -> str:
    """The form of the one fused activation."""
    (form,) = (
        node.args[3]
        for node in passed.fused.graph.nodes
        if str(node.target) in ("fp8pass.silu_mul_quant.default", "fp8pass.act_mul_quant.default")
    )
    return str(form)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ALONE)
def test_alone_and_times_up(name: str, dtype: torch.dtype) -> None:
    fn = ALONE[name][0]
    gate, up = values(5, 64, dtype=dtype), values(5, 64, dtype=dtype, seed=5)
    for act in (lambda g, u: fn(g), lambda g, u: fn(g) * u, lambda g, u: u * fn(g)):
        reading = read(lambda g, u, s, act=act: static(act(g, u), s), gate, up, S)
        assert reading.forms("activation") == [alone_form(name, dtype)]
        assert len(reading.forms("quantize")) == 1


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("name", ALONE)
def test_every_quantise(name: str, quant: str) -> None:
    fn, recipe = ALONE[name][0], QUANTS[quant][0]
    gate, up = values(5, 64), values(5, 64, seed=5)
    fused_once(lambda g, s: recipe(fn(g), s), gate, S)
    fused_once(lambda g, u, s: recipe(fn(g) * u, s), gate, up, S)


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("name", ["gelu_tanh", "relu2", "gelu_quick"])
def test_packed_in_every_way(name: str, packed: str) -> None:
    fn, halves = ALONE[name][0], PACKED[packed]
    for shape in ((6, 64), (2, 3, 46), (2, 2, 3, 32)):

        def act(x: Tensor, s: Tensor) -> tuple[Tensor, ...]:
            gate, up = halves(x)
            return static(fn(gate) * up, s)

        reading = read(act, values(*shape), S, dynamic=(0,))
        assert reading.forms("activation") == [alone_form(name, torch.bfloat16)]


@pytest.mark.parametrize("name", ALONE)
def test_others_after_inductors_passes(name: str) -> None:
    fn, x = ALONE[name][0], values(6, 64)
    for act in (lambda x: fn(x), lambda x: fn(chunked(x)[0]) * chunked(x)[1]):
        reading = Reading(post_grad(trace(lambda x, s, act=act: static(act(x), s), x, S)))
        reading.check(x, S)
        assert len(reading.forms("activation")) == 1, name


@pytest.mark.parametrize("name", ["silu", "gelu_erf", "gelu_tanh", "relu2"])
def test_without_the_round_trip(name: str) -> None:
    """An older torch drops ``f32 -> bf16 -> f32``: the quantise reads the float32 value."""
    fn = ALONE[name][0]
    passed = fused_once(lambda x, s: static(fn(x.float()), s), values(5, 64), S)
    assert form_of(passed) == f"{ALONE[name][1]},float32,float32"
    fused_once(lambda x, u, s: static(fn(x.float()) * u, s), values(5, 64), values(5, 64), S)


@pytest.mark.parametrize("name", ALONE)
def test_more_readers(name: str) -> None:
    """The value is read by another, and quantised in two equal ways; it is kept."""
    fn = ALONE[name][0]

    def act(x: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        y = fn(x)
        return *token(y, s), *token(y.view(2, 3, 64), s), y, y + 1

    passed = fused_once(act, values(6, 64), S)
    assert len(passed.sites("activation")) == 1


@pytest.mark.parametrize("view", [(2, 3, 64), (6, 1, 64), (3, 128)], ids=str)
def test_alone_through_a_view(view: tuple[int, ...]) -> None:
    traced = trace(lambda x, s: token(F.gelu(x).view(view), s), values(6, 64), S)
    passed = Passed(traced, strict=True)
    if view[-1] == 64:
        assert passed.fusions == 1
    else:
        assert passed.fusions == 0 and passed.sites("quantize")[0].code == "FP8-F008"
    assert_same_bits(run(passed.after, values(6, 64), S), run(passed.before, values(6, 64), S))


def test_mixed_dtypes_of_every_activation() -> None:
    for gate_dtype in DTYPES:
        for up_dtype in DTYPES:
            gate, up = values(5, 64, dtype=gate_dtype), values(5, 64, dtype=up_dtype, seed=1)
            for name in ("silu", "gelu_tanh", "relu2"):
                fn = ALONE[name][0]
                reading = read(lambda g, u, s, fn=fn: static(fn(g) * u, s), gate, up, S)
                assert len(reading.forms("activation")) == 1, (gate_dtype, up_dtype, name)


def test_a_wide_up_and_a_cast_back() -> None:
    """A float32 product that is cast back to the model dtype is one value."""
    gate, up = values(5, 64), values(5, 64, dtype=torch.float32, seed=1)
    fn = lambda g, u, s: static((F.silu(g) * u).bfloat16(), s)  # noqa: E731
    passed = fused_once(fn, gate, up, S)
    assert form_of(passed) == "div,bfloat16,bfloat16"


def test_special_values_of_every_activation() -> None:
    gate = torch.tensor([[torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e30, -1e30, 9.0, -9.0]])
    for name, (fn, _) in ALONE.items():
        for dtype in DTYPES:
            reading = read(lambda g, s, fn=fn: static(fn(g), s), gate.to(dtype), S)
            assert len(reading.forms("activation")) == 1, name


# ---- GPT-OSS -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packed", ["interleaved", "chunk"])
def test_gpt_oss(packed: str, dtype: torch.dtype) -> None:
    x = values(5, 64, dtype=dtype)
    assert float(x.float().max()) > 7.0
    passed = fused_once(lambda x, s: static(gpt_oss(*PACKED[packed](x)), s), x, S)
    name = str(dtype).removeprefix("torch.")
    steps = "" if dtype == torch.float32 else f",{name}"
    assert form_of(passed) == f"gpt_oss,{name},{name}{steps}"


def test_gpt_oss_with_another_limit() -> None:
    """Read as what it is: a quick GELU of a clamped gate, times another value."""
    gate, up = values(5, 64), values(5, 64, seed=1)
    passed = fused_once(lambda g, u, s: static(gpt_oss(g, u, limit=6.0), s), gate, up, S)
    assert form_of(passed).startswith("gelu_quick,")


# ---- not read, with a reason ---------------------------------------------------------------------


def reason(fn: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[str, str]:
    passed = Passed(trace(fn, *inputs), strict=True)
    assert passed.fusions == 0
    (site,) = passed.sites("quantize")
    return site.code, site.message


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda g, u: F.gelu(g) * u[1], "a broadcast up"),
        (lambda g, u: F.silu(g) * 1.5, "multiplied by a number"),
        (lambda g, u: F.silu(g) + u, "read by aten.add.Tensor"),
        (lambda g, u: F.mish(g), "is not a step of an activation"),
        (lambda g, u: g * torch.sigmoid(1.7 * g), "aten.sigmoid.default"),
        (lambda g, u: g * torch.erf(g), "aten.erf.default"),
        (lambda g, u: F.gelu(g.t()).contiguous(), "read by aten.clone"),
        (lambda g, u: F.gelu(g.double()).bfloat16(), "aten.erf.default"),
    ],
)
def test_reason_of_an_activation_that_is_not_read(
    act: Callable[[Tensor, Tensor], Tensor], says: str
) -> None:
    code, message = reason(lambda g, u, s: static(act(g, u), s), values(5, 64), values(5, 64), S)
    assert code == "FP8-R004" and says in message, message


def test_reason_of_an_activation_read_in_between() -> None:
    def fn(g: Tensor, u: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        y = F.gelu(g)
        return static(y * u, s)[0], y

    code, message = reason(fn, values(5, 64), values(5, 64), S)
    assert code == "FP8-R004" and "read by 2 nodes" in message


@pytest.mark.parametrize(
    "other", [lambda g: g * 2, lambda g: g.softmax(-1), lambda g: g.float().exp(), lambda g: g + 1]
)
def test_what_is_no_activation_keeps_its_reason(other: Callable[[Tensor], Tensor]) -> None:
    code, _ = reason(lambda g, s: static(other(g), s), values(5, 64), S)
    assert code == "FP8-F002"
