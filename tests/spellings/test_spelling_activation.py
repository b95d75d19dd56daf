"""SiLU·mul spellings: read as the right form, no number changed, given back to the node."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import Reading, post_grad, read, run, trace, values
from spell import ACTIVATIONS, act_form, silu_two, static

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


PACKED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "chunk": chunked,
    "split": splitted,
    "slice": sliced,
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
    assert reading.forms("activation") == [act_form(name, torch.bfloat16)]


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
