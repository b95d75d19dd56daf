"""Quantise spellings: read as the right form, no number changed, given back to the node."""

from __future__ import annotations

import pytest
import torch
from graphs import Reading, ordered, post_grad, read, run, trace, values, vector
from spell import E4, QUANTS, functional, llama, quant_form, static, token

S = torch.tensor(0.02)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check(
    name: str, x: torch.Tensor, s: torch.Tensor = S, form: str | None = None, dynamic: bool = False
) -> Reading:
    reading = read(QUANTS[name][0], x, s, dynamic=(0,) if dynamic else ())
    assert reading.forms("quantize") == [form or quant_form(name, x.dtype)]
    assert reading.unread == []
    return reading


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", QUANTS)
def test_form_and_numbers(name: str, dtype: torch.dtype) -> None:
    check(name, values(5, 64, dtype=dtype))


@pytest.mark.parametrize("name", QUANTS)
def test_three_dims_and_symbolic_batch(name: str) -> None:
    reading = check(name, values(6, 3, 48), dynamic=True)
    for rows in (1, 4):
        reading.check(values(rows, 3, 48, seed=rows), S)


@pytest.mark.parametrize("shape", [(1, 64), (3, 47), (7, 1), (64,), (1,)], ids=str)
@pytest.mark.parametrize("name", ["static", "token", "token_recip", "token_amax_floor", "tensor"])
def test_odd_shapes(name: str, shape: tuple[int, ...]) -> None:
    x = values(*shape)
    if shape == (64,) or shape == (1,):
        # one row: a maximum over the last dim that keeps it is per token all the same
        assert len(read(QUANTS[name][0], x, S).forms("quantize")) == 1
    else:
        check(name, x)


def test_no_dims() -> None:
    """A number is one tensor with one scale, however the dims of the maximum are written."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = (x.abs().amax(0) / 448).clamp(min=1e-12)
        return (x / scale).clamp(-448, 448).to(E4), scale

    x = torch.tensor(3.0)
    assert read(fn, x).forms("quantize") == [quant_form("tensor", torch.float32)]


@pytest.mark.parametrize("name", ["static", "static_recip", "token", "token_recip"])
def test_no_rows(name: str) -> None:
    reading = check(name, values(0, 64))
    results = run(reading.after, values(0, 64), S)
    assert results[0].shape == (0, 64)
    if len(results) > 1:
        assert results[1].shape == (0, 1)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("name", ["static", "static_recip"])
def test_shapes_of_a_given_scale(name: str, shape: tuple[int, ...]) -> None:
    check(name, values(5, 64), torch.full(shape, 0.02))


@pytest.mark.parametrize("name", QUANTS)
def test_after_inductors_passes(name: str) -> None:
    x = values(6, 3, 64)
    reading = Reading(post_grad(trace(QUANTS[name][0], x, S, dynamic=(0,))))
    reading.check(x, S)
    assert reading.forms("quantize") == [quant_form(name, torch.bfloat16)]


@pytest.mark.parametrize("name", QUANTS)
def test_special_values(name: str) -> None:
    """Overflow saturates, NaN stays NaN, the sign of zero stays."""
    special = [448.0, 465.0, 500.0, 1e6, torch.inf, -torch.inf, torch.nan, -0.0, 0.0, 1e-30]
    x = torch.tensor([special, [0.0] * len(special), [1.0] * len(special)])
    for dtype in DTYPES:
        reading = read(QUANTS[name][0], x.to(dtype), torch.tensor(1.0))
        assert len(reading.forms("quantize")) == 1
        if name == "static":
            q = run(reading.after, x.to(dtype), torch.tensor(1.0))[0].float()[0]
            assert q[:6].tolist() == [448.0] * 5 + [-448.0]
            assert q[6].isnan() and q[7].signbit() and not q[8].signbit()


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz], ids=str)
def test_other_fp8_dtypes(dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    reading = read(lambda x, s: (x.float() / s).clamp(-top, top).to(dtype), values(5, 64), S)
    (form,) = reading.forms("quantize")
    assert form == f"{str(dtype)[6:]},tensor,float32,given,{top},none,0.0,div,-{top},{top}"


def test_e4m3fnuz_does_not_take_the_bounds_of_e4m3fn() -> None:
    reading = read(
        lambda x, s: (x.float() / s).clamp(-448, 448).to(torch.float8_e4m3fnuz), values(5, 64), S
    )
    assert reading.forms("quantize") == []
    assert reading.unread[0][1] == "FP8-R001" and "448" in reading.unread[0][2]


def test_where_the_scale_is_rounded_matters() -> None:
    """Dividing in bf16 is another form than dividing in float32, with other codes."""
    x, s = values(64, 256), torch.tensor(0.0123)
    results = [run(read(QUANTS[n][0], x, s).after, x, s)[0] for n in ("static", "static_narrow")]
    step = (ordered(results[0]) - ordered(results[1])).abs()
    assert 0.001 < (step > 0).float().mean() < 0.1


# ---- shapes between a norm and its quantise ------------------------------------------------------

VIEWS = {
    "view": lambda y: y.view(-1, 64),
    "reshape": lambda y: y.reshape(-1, y.shape[-1]),
    "flatten": lambda y: y.flatten(0, 1),
    "unsqueeze": lambda y: y.unsqueeze(1),
    "unsqueeze_negative": lambda y: y.unsqueeze(-2),
    "squeeze": lambda y: y.unsqueeze(0).squeeze(0),
    "twice": lambda y: y.view(-1, 64).view(2, -1, 64),
    "none": lambda y: y,
}


@pytest.mark.parametrize(("norm", "dynamic"), [(llama, False), (llama, True), (functional, False)])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", ["static", "token", "tensor"])
def test_reshape_before_the_quantise(name: str, view: str, norm, dynamic: bool) -> None:  # type: ignore[no-untyped-def]
    """The generic quantise reads the norm itself; the reshapes follow it."""
    reshape, quant = VIEWS[view], QUANTS[name][0]

    def fn(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return quant(reshape(norm(x, w, 1e-6)), s)

    inputs = values(6, 4, 64), vector(64), S
    reading = read(fn, *inputs, dynamic=(0,) if dynamic else ())
    (draft,) = [d for d in reading.drafts if d.kind == "quantize"]
    source = draft.node.args[0]
    assert source.target is torch.ops.fp8pass.rms_norm.default, source
    if dynamic:
        reading.check(values(2, 4, 64, seed=3), vector(64), S)


@pytest.mark.parametrize("name", ["token"])
def test_reshape_that_mixes_rows_is_not_looked_through(name: str) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return QUANTS[name][0](llama(x, w, 1e-6).view(-1, 32), s)

    reading = read(fn, values(6, 64), vector(64), S)
    (draft,) = [d for d in reading.drafts if d.kind == "quantize"]
    assert draft.node.args[0].target is not torch.ops.fp8pass.rms_norm.default


def test_static_reshape_may_mix_rows() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return static(llama(x, w, 1e-6).view(-1, 32), s)

    reading = read(fn, values(6, 64), vector(64), S)
    (draft,) = [d for d in reading.drafts if d.kind == "quantize"]
    assert draft.node.args[0].target is torch.ops.fp8pass.rms_norm.default


def test_scale_that_is_viewed_before_its_use() -> None:
    """A per-tensor scale unsqueezed to [1, 1], as F.linear-like code does."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = (x.abs().amax().float() / 448).clamp(min=1e-12)
        wide = scale.unsqueeze(0).unsqueeze(0)
        return (x.float() / wide).clamp(-448, 448).to(E4), scale, wide

    assert len(read(fn, values(5, 64)).forms("quantize")) == 1


def test_equal_quantises_are_one() -> None:
    """q, k and v of one norm: one quantise with three readers; another scale is another one."""

    def fn(x: torch.Tensor, s: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
        three = [static(x, s)[0].float() + i for i in range(3)]
        return (*three, static(x, other)[0].float(), *token(x, s), *token(x, s)[1:])

    reading = read(fn, values(5, 64), S, S * 2)
    assert len(reading.forms("quantize")) == 3


def test_two_forms_of_one_tensor_stay_two() -> None:
    def fn(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(r for name in QUANTS for r in QUANTS[name][0](x, s))

    forms = read(fn, values(5, 64), S).forms("quantize")
    assert sorted(forms) == sorted(quant_form(name, torch.bfloat16) for name in QUANTS)
