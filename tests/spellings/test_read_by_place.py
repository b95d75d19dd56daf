"""Values whose memory is read or written by its place are given no other: each beside a control."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import Passed, Reading, assert_same_bits, codes, run, trace, values, vector
from spell import llama
from test_zero_point_spans import quantise

Tensor = torch.Tensor
F8, BF16 = torch.float8_e4m3fn, torch.bfloat16


def groups(x: Tensor, n: int = 16) -> tuple[Tensor, Tensor]:
    split = x.reshape(*x.shape[:-1], -1, n).float()
    scale = split.abs().amax(-1).clamp(min=1e-4) / 448
    q = (split / scale.unsqueeze(-1)).clamp(-448, 448).to(F8)
    return q.view(x.shape), scale


def rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (x.float() / scale).clamp(-448, 448).to(F8), scale


def padded(scale: Tensor) -> Tensor:
    m = scale.shape[0]
    return torch.nn.functional.pad(scale, (0, 0, 0, -m % 4)).t().contiguous().t()[:m]


def column_major(scale: Tensor) -> Tensor:
    return scale.t().contiguous().t()


def strided(*size: int) -> Callable[[Tensor], Tensor]:
    return lambda t: torch.as_strided(t, size, (size[1], 1))


def written(t: Tensor) -> Tensor:
    return torch.ops.aten.as_strided_scatter(t, torch.ones(2, 2), (2, 2), (2, 1), 0)


# ---- layouts -------------------------------------------------------------------------------------

#: how the copy of a scale ``[5, 4]`` in one layout is read
BY_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "as_strided": strided(4, 5),
    "of_a_view": lambda t: strided(4, 5)(t.unsqueeze(0).squeeze(0)),
    "of_a_transpose": lambda t: strided(4, 5)(t.t()),
    "of_a_slice": lambda t: strided(3, 5)(t[:, 1:]),
    "of_a_part": lambda t: strided(2, 5)(t.split(2, 1)[0]),
    "scattered": written,
}
LAYOUTS = {"tma": padded, "col": column_major}


def forms(reading: Reading) -> str:
    return " ".join(reading.forms("quantize"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BY_PLACE)
def test_the_layout_of_a_scale_stays_a_copy(name: str, layout: str) -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        q, scale = groups(x)
        return q, BY_PLACE[name](LAYOUTS[layout](scale))

    def control(x: Tensor) -> tuple[Tensor, ...]:
        q, scale = groups(x)
        return q, LAYOUTS[layout](scale).t()[1:] * 2

    x = values(5, 64)
    reading = Reading(trace(fn, x))
    reading.check(x)
    # without padding a copy by columns is the whole of its memory, as ours is
    assert ("layout=col" in forms(reading)) == (layout == "col") and forms(reading)
    assert_same_bits(run(Passed(trace(fn, x)).after, x), run(trace(fn, x), x))
    held = Reading(trace(control, x))
    held.check(x)
    assert f"layout={layout}" in forms(held)


def test_what_stands_in_the_padding_is_zeros_before_and_after() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        q, scale = groups(x)
        return q, strided(4, 8)(padded(scale))

    x = values(5, 64)
    _, got = run(Passed(trace(fn, x)).after, x)
    assert not got[:, 5:].any() and got[:, :5].all()
    assert_same_bits(run(Passed(trace(fn, x)).after, x), fn(x))


# ---- values --------------------------------------------------------------------------------------


def _norm(x: Tensor, v: Tensor) -> Tensor:
    return llama(x, v, 1e-6)


def _gated(x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x) * x.tanh()


def _quantised(y: Tensor) -> tuple[Tensor, ...]:
    return y, *rows(y)


def _residual(total: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return total, *rows(_norm(total, v))


def _turned(values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return *values[1:], values[0]


#: name -> (values ``fn(x, v)`` of which the first is read by its place, kind of the site)
SITES: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Tensor, ...]], str]] = {
    "codes": (lambda x, v: rows(x), "quantize"),
    "scale": (lambda x, v: rows(x)[::-1], "quantize"),
    "zero_point": (lambda x, v: quantise()(x)[::-1], "quantize"),
    "scale_beside_one": (lambda x, v: _turned(quantise()(x)), "quantize"),
    "norm": (lambda x, v: _quantised(_norm(x, v)), "norm"),
    "activation": (lambda x, v: _quantised(_gated(x)), "activation"),
    "residual": (lambda x, v: _residual(x + x.tanh(), v), "norm"),
}


@pytest.mark.parametrize("name", SITES)
def test_a_value_that_is_the_whole_of_its_memory_is_read(name: str) -> None:
    """What takes its place is contiguous as well: a stride is then the same."""
    fn, kind = SITES[name]

    def by_place(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        first, *others = fn(x, v)
        return torch.as_strided(first, (2, 3), (3, 1)), *others

    inputs = values(6, 64), vector(64)
    reading = Reading(trace(by_place, *inputs))
    reading.check(*inputs)
    # a zero point is a column of the scale and itself
    assert bool(reading.forms(kind)) == (name not in ("zero_point", "scale_beside_one"))
    assert Reading(trace(fn, *inputs)).forms(kind), "the control"
    passed = Passed(trace(by_place, *inputs))
    assert passed.after.graph.find_nodes(
        op="call_function", target=torch.ops.aten.as_strided.default
    )
    for a, b in zip(run(passed.after, *inputs), run(passed.before, *inputs), strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2**-3, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", SITES)
def test_a_value_that_is_written_to_is_not_read(name: str) -> None:
    fn, kind = SITES[name]
    inputs = values(6, 64), vector(64)
    traced = trace(fn, *inputs)
    assert Reading(trace(fn, *inputs)).forms(kind), "the control"
    first = traced.graph.output_node().args[0][0]
    with traced.graph.inserting_after(first):
        view = traced.graph.call_function(torch.ops.aten.view.default, (first, [-1]))
        view.meta["val"] = first.meta["val"].view(-1)
    with traced.graph.inserting_after(view):
        fill = traced.graph.call_function(torch.ops.aten.zero_.default, (view,))
        fill.meta["val"] = view.meta["val"]
    traced.recompile()
    reading = Reading(traced)
    reading.check(*inputs)
    assert not reading.forms(kind)


def _mm(q: Tensor, w: Tensor, s: Tensor, sw: Tensor) -> Tensor:
    return torch._scaled_mm(q, w.t(), s, sw, out_dtype=BF16)


PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "scaled_mm": _mm,
    "dequantised": lambda q, w, s, sw: ((q.float() @ w.float().t()) * s * sw).to(BF16),
    "weight_only": lambda q, w, s, sw: q.to(BF16) @ (w.to(BF16) * sw.t().to(BF16)).t(),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_that_is_written_to_is_not_read(name: str) -> None:
    s, sw = torch.rand(5, 1), torch.rand(1, 32)
    first = values(5, 64) if name == "weight_only" else codes(5, 64)
    inputs = first, codes(32, 64), s, sw

    def fill(traced: Any) -> Any:
        out = traced.graph.output_node().args[0][0]
        with traced.graph.inserting_after(out):
            node = traced.graph.call_function(torch.ops.aten.zero_.default, (out,))
            node.meta["val"] = out.meta["val"]
        traced.recompile()
        return traced

    reading = Reading(fill(trace(PRODUCTS[name], *inputs)))
    reading.check(*inputs)
    assert not reading.drafts
    (unread,) = reading.unread
    assert "written to" in unread[2]
    assert Reading(trace(PRODUCTS[name], *inputs)).forms("scaled_mm") is not None
    assert Reading(trace(PRODUCTS[name], *inputs)).drafts
    by_place = lambda *given: torch.as_strided(PRODUCTS[name](*given), (4, 8), (8, 1))  # noqa: E731
    held = Reading(trace(by_place, *inputs))
    held.check(*inputs)
    assert held.drafts
