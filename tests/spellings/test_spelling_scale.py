"""Recipes of scales, groups and int8: read as the right form, no number changed, fused or given."""

from __future__ import annotations

import pytest
import torch
from graphs import Passed, Reading, assert_same_bits, read, run, trace, values, vector
from spell import LAYOUTS, MORE_QUANTS, G, llama, saturated, silu_two, token_narrow_scale

S = torch.tensor(0.02)
GROUPS = ("group", "group_deepseek", "group_power", *(f"group_{name}" for name in LAYOUTS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MORE_QUANTS)
def test_form_and_numbers(name: str, dtype: torch.dtype) -> None:
    fn, form = MORE_QUANTS[name]
    reading = read(fn, values(5, 64, dtype=dtype), S)
    assert reading.unread == []
    assert reading.forms("quantize") == [form]


@pytest.mark.parametrize("name", MORE_QUANTS)
def test_three_dims_symbolic_batch_and_a_norm(name: str) -> None:
    """The generic quantise reads the norm itself, also where groups split its last dim."""
    fn, form = MORE_QUANTS[name]

    def model(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return fn(llama(x, w, 1e-6), s)

    reading = read(model, values(6, 3, 64), vector(64), S, dynamic=(0,))
    assert reading.forms("quantize") == [form]
    (draft,) = [d for d in reading.drafts if d.kind == "quantize"]
    assert draft.node.args[0].target is torch.ops.fp8pass.rms_norm.default
    for rows in (1, 4):
        reading.check(values(rows, 3, 64, seed=rows), vector(64), S)


@pytest.mark.parametrize("name", GROUPS)
def test_flattened_before_the_groups(name: str) -> None:
    fn, form = MORE_QUANTS[name]

    def model(g: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return fn(silu_two(g, u).view(-1, 64), S)

    reading = read(model, values(2, 3, 64), values(2, 3, 64, seed=4))
    assert reading.forms("quantize") == [form]
    (draft,) = [d for d in reading.drafts if d.kind == "quantize"]
    assert draft.node.args[0].target is torch.ops.fp8pass.silu_mul.default


@pytest.mark.parametrize("rows", [0, 1, 6])
@pytest.mark.parametrize("name", GROUPS)
def test_strides_of_group_scales(name: str, rows: int) -> None:
    """Scales have the shape and the strides of the source, at one row, none and several (R30)."""
    x = values(rows, 64)
    reading = Reading(trace(MORE_QUANTS[name][0], x, S))
    q, scale = run(reading.after, x, S)
    wanted_q, wanted = run(reading.before, x, S)
    assert q.shape == (rows, 64) and scale.shape == (rows, 64 // G)
    assert q.stride() == wanted_q.stride()
    if rows > 1:
        assert scale.stride() == wanted.stride()
    for node in reading.after.graph.output_node().all_input_nodes:
        assert isinstance(node.meta["val"], torch.Tensor)


@pytest.mark.parametrize("name", GROUPS)
def test_groups_fuse_or_stay(name: str) -> None:
    fn, _ = MORE_QUANTS[name]
    inputs = values(6, 64), vector(64), S
    passed = Passed(trace(lambda x, w, s: fn(llama(x, w, 1e-6), s), *inputs), strict=True)
    assert_same_bits(run(passed.after, *inputs), run(passed.before, *inputs))
    assert passed.fusions == 1


def test_scale_computed_in_bf16() -> None:
    reading = read(token_narrow_scale, values(5, 64), S)
    (form,) = reading.forms("quantize")
    assert form.endswith("scale_dtype=bfloat16") and ",scale," in form


@pytest.mark.parametrize("shape", [(5, 1), (5, 4)], ids=["token", "group"])
def test_given_scales(shape: tuple[int, ...]) -> None:
    """One scale a row, or one a group, that is an input of the graph."""

    def fn(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if s.shape[-1] == 1:
            return (saturated(x.float() / s),)
        return (saturated(x.view(5, 4, G).float() / s.unsqueeze(-1)).view(5, 64),)

    given = torch.rand(shape) + 0.01
    reading = read(fn, values(5, 64), given)
    name = "token" if shape[-1] == 1 else f"group{G}"
    assert reading.forms("quantize") == [
        f"float8_e4m3fn,{name},float32,given,448.0,none,0.0,div,-448.0,448.0"
    ]


def test_power_of_two_scale_is_the_one_that_is_used() -> None:
    """R11: quantised with the rounded scale, so that codes times scale is close to x."""
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    reading = read(MORE_QUANTS["group_power"][0], x, S)
    q, scale = run(reading.after, x, S)
    back = q.float().unflatten(-1, (-1, G)) * scale[..., None]
    error = (back.flatten(-2) - x).norm() / x.norm()
    assert 0.02 < error < 0.03
    assert torch.equal(torch.exp2(torch.log2(scale).round()), scale)


@pytest.mark.parametrize("name", MORE_QUANTS)
def test_overflow_saturates(name: str) -> None:
    fn, form = MORE_QUANTS[name]
    x = torch.tensor([[448.0, 1e6, torch.inf, -torch.inf, torch.nan, -0.0, 0.0, 1e-30] * 8] * 2)
    if form.startswith("int8"):
        x = x.nan_to_num(0.0)  # NaN has no code
    assert len(read(fn, x, torch.tensor(1.0)).forms("quantize")) == 1


def test_a_quantise_alone_is_unchanged() -> None:
    """R33."""
    for name in ("group", "int8_token", "token_inverse_double"):
        traced = trace(MORE_QUANTS[name][0], values(6, 64), S)
        passed = Passed(traced, strict=True)
        assert [n.target for n in passed.after.graph.nodes if n.op == "call_function"] == [
            n.target for n in passed.before.graph.nodes if n.op == "call_function"
        ]


def test_recipes_are_not_taken_for_each_other() -> None:
    """All recipes of one tensor: each keeps its own quantise."""

    def fn(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(r for quant, _ in recipes for r in quant(x, s))

    # one quantise whose scale is wanted in several layouts is one quantise
    recipes = [made for made in MORE_QUANTS.values() if "layout=" not in made[1]]
    forms = read(fn, values(5, 64), S).forms("quantize")
    assert sorted(set(forms)) == sorted({form for _, form in recipes})
