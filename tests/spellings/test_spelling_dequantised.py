"""Products spelled without ``_scaled_mm``: read as one scaled product, bit for bit, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import Reading, codes, post_grad, read, run, trace, values
from spell import E4

BF16, F32 = torch.bfloat16, torch.float32
Tensor = torch.Tensor
Fn = Callable[..., Tensor]


def scales(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.01


def only(reading: Reading) -> tuple[str, str]:
    """Key and form of the one product."""
    assert not reading.unread, reading.unread
    (draft,) = [d for d in reading.drafts if d.kind == "scaled_mm"]
    return draft.key.replace("float8_e4m3fn/", ""), draft.form


def ab(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
    return (torch.mm(q.float(), w.float().t()) * sa * sb).to(BF16)


def ba(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
    return (sb * torch.mm(q.float(), w.t().float()) * sa).to(BF16)


def joined(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
    return (torch.mm(q.float(), w.t().to(BF16).to(F32)) * (sa * sb)).to(BF16)


def linear(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
    return (F.linear(q.float(), w.float()) * sa * sb).to(BF16)


def float32(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
    return torch.mm(q.float(), w.float().t()) * sa * sb


def operands_first(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
    return torch.mm(q.float() * sa, (w.float() * sb.reshape(-1, 1)).t()).to(BF16)


def weight_first(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
    return (torch.mm(q.float(), w.t().float() * sb) * sa).to(BF16)


def batched(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
    return (torch.bmm(q.float()[None], w.float().t()[None]) * sa * sb)[0].to(BF16)


ROWS = {
    "ab": (ab, "none,ab"),
    "ba": (ba, "none,ba"),
    "joined": (joined, "none,joined"),
    "linear": (linear, "none,ab"),
    "float32": (float32, "none,ab"),
    "operands_first": (operands_first, "both,ab"),
    "weight_first": (weight_first, "b,ab"),
    "batched": (batched, "none,ab"),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_per_token_and_channel(name: str, dynamic: bool) -> None:
    fn, form = ROWS[name]
    given = (codes(5, 32), codes(48, 32, seed=3), scales(5, 1), scales(1, 48, seed=1))
    reading = read(fn, *given, dynamic=(0, 2) if dynamic else ())
    assert only(reading) == ("dynamic/token x static/channel", form)


@pytest.mark.parametrize("name", ["ab", "ba", "operands_first"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_per_tensor(name: str, shape: tuple[int, ...]) -> None:
    fn, _ = ROWS[name]
    given = (codes(5, 32), codes(48, 32, seed=3), scales(*shape), scales(*shape, seed=1))
    if name == "operands_first":

        def fn(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
            return torch.mm(q.float() * sa, (w.float() * sb).t()).to(BF16)

    key, _ = only(read(fn, *given))
    assert key == "static/tensor x static/tensor"


@pytest.mark.parametrize("bias", [BF16, torch.float16, F32], ids=str)
def test_bias(bias: torch.dtype) -> None:
    def fn(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor, v: Tensor) -> Tensor:
        return (torch.mm(q.float(), w.float().t()) * sa * sb + v.float()).to(BF16)

    given = (codes(5, 32), codes(48, 32, seed=3), scales(5, 1), scales(1, 48, seed=1))
    reading = read(fn, *given, values(48, dtype=bias))
    only(reading)
    (node,) = [d.node for d in reading.drafts]
    assert node.args[4] is not None and node.args[4].meta["val"].dtype == bias


def test_bias_inside_addmm_behind_scaled_operands() -> None:
    def fn(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor, v: Tensor) -> Tensor:
        return torch.addmm(v, q.float() * sa, (w.float() * sb.reshape(-1, 1)).t()).to(BF16)

    given = (codes(5, 32), codes(48, 32, seed=3), scales(5, 1), scales(1, 48, seed=1))
    reading = Reading(trace(fn, *given, values(48, dtype=F32)))
    assert only(reading)[1] == "both,ab"
    (node,) = [d.node for d in reading.drafts]
    assert node.args[4] is not None


def test_one_scale_of_both() -> None:
    """A scale multiplied beforehand; the other is one."""

    def fn(q: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return (torch.mm(q.float(), w.float().t()) * s).to(BF16)

    assert only(read(fn, codes(5, 32), codes(48, 32), scales()))[0].endswith("static/tensor")


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_batch_of_sequences(dynamic: bool) -> None:
    def fn(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
        return (F.linear(q.float(), w.float()) * sa * sb).to(BF16)

    given = (codes(2, 3, 32), codes(48, 32, seed=3), scales(2, 3, 1), scales(48, seed=1))
    reading = read(fn, *given, dynamic=(0, 2) if dynamic else ())
    assert only(reading) == ("dynamic/token x static/channel", "none,ab")
    assert run(reading.after, *given)[0].shape == (2, 3, 48)


def unit(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
    one = torch.ones(1)
    return (torch._scaled_mm(q, w.t(), one, one, out_dtype=F32) * sa * sb.t()).to(BF16)


def padded(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
    one, rows = torch.ones(1), q.shape[0]
    q = F.pad(q, (0, 0, 0, 17 - rows))
    out = torch.narrow(torch._scaled_mm(q, w.t(), one, one, out_dtype=F32), 0, 0, rows)
    return (out * sa * sb.t()).to(BF16)


@pytest.mark.parametrize("fn", [unit, padded])
def test_unit_scales_multiplied_afterwards(fn: Fn) -> None:
    given = (codes(5, 32), codes(48, 32, seed=3), scales(5, 1), scales(48, 1, seed=1))
    reading = read(fn, *given)
    assert only(reading) == ("dynamic/token x static/channel", "none,ab")
    (node,) = [d.node for d in reading.drafts]
    assert node.args[0].op == "placeholder"  # without the padding


# ---- blocks --------------------------------------------------------------------------------------


def spread(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
    a = q.float() * sa.repeat_interleave(128, 1)
    b = w.float() * sb.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return torch.mm(a, b.t()).to(BF16)


def split(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
    (m, k), n = q.shape, w.shape[0]
    a = (q.float().view(m, k // 128, 128) * sa[:, :, None]).view(m, k)
    b = w.float().view(n // 128, 128, k // 128, 128) * sb[:, None, :, None]
    return F.linear(a, b.view(n, k)).to(BF16)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn", [spread, split])
def test_blocks(fn: Fn, dynamic: bool) -> None:
    given = (codes(5, 256), codes(384, 256, seed=3), scales(5, 2), scales(3, 2, seed=1))
    reading = read(fn, *given, dynamic=(0, 2) if dynamic else ())
    key, form = only(reading)
    assert (key, form) == ("dynamic/group1x128 x static/group128x128", "none,ab")
    (node,) = [d.node for d in reading.drafts]
    assert [tuple(n.meta["val"].shape)[1:] for n in node.args[2:4]] == [(2,), (3,)]


def test_blocks_cut_short() -> None:
    def fn(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
        b = sb.repeat_interleave(128, 0)[:72].repeat_interleave(128, 1)[:, :200]
        return (torch.mm(q.float(), (w.float() * b).t()) * sa).to(BF16)

    given = (codes(5, 200), codes(72, 200, seed=3), scales(5, 1), scales(1, 2, seed=1))
    assert only(read(fn, *given))[0] == "dynamic/token x static/group128x128"


# ---- int8 ----------------------------------------------------------------------------------------


def int8(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, generator=generator).to(torch.int8)


def int_mm(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
    return (torch._int_mm(q, w.t()).float() * sa * sb).to(BF16)


def int_mm_reversed(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
    return (torch._int_mm(q, w.t()).to(F32) * sb * sa).to(BF16)


@pytest.mark.parametrize(("fn", "form"), [(int_mm, "none,ab"), (int_mm_reversed, "none,ba")])
@pytest.mark.parametrize("rows", [False, True])
def test_int8(fn: Fn, form: str, rows: bool) -> None:
    sa, sb = (scales(19, 1), scales(1, 48, seed=1)) if rows else (scales(), scales(seed=1))
    reading = read(fn, int8(19, 64), int8(48, 64, seed=1), sa, sb)
    key, found = only(reading)
    assert key == (
        "int8/dynamic/token x int8/static/channel"
        if rows
        else "int8/static/tensor x int8/static/tensor"
    )
    assert found == (form if rows else "none,ab")


# ---- after Inductor's passes ---------------------------------------------------------------------


@pytest.mark.parametrize("fn", [ab, joined, operands_first, unit, int_mm])
def test_after_inductors_passes(fn: Fn) -> None:
    make = int8 if fn is int_mm else codes
    sb = scales(48, 1, seed=1) if fn is unit else scales(1, 48, seed=1)
    given = (make(6, 32), make(48, 32, seed=3), scales(6, 1), sb)
    reading = Reading(post_grad(trace(fn, *given, dynamic=(0, 2))))
    reading.check(*given)
    assert only(reading)[0].endswith("channel")


# ---- not read, beside a positive control ---------------------------------------------------------


def refused(fn: Fn, *inputs: Tensor, control: Fn = ab, count: int = 4) -> str:
    only(read(control, *inputs[:count]))
    reading = read(fn, *inputs)
    assert reading.forms("scaled_mm") == []
    (entry,) = reading.unread
    assert entry[0] == "scaled_mm" and entry[1] == "FP8-R002"
    return entry[2]


def given() -> tuple[Tensor, ...]:
    return codes(5, 32), codes(48, 32, seed=3), scales(5, 1), scales(1, 48, seed=1)


def test_a_product_rounded_before_the_scales() -> None:
    why = refused(lambda q, w, sa, sb: torch.mm(q.to(BF16), w.to(BF16).t()) * sa * sb, *given())
    assert "product is rounded to bfloat16 before" in why


def test_operands_rounded_after_the_scales() -> None:
    def fn(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
        return torch.mm(q.to(BF16) * sa.to(BF16), (w.to(BF16) * sb.t().to(BF16)).t())

    assert "operands are rounded to bfloat16 after" in refused(fn, *given())


def test_nothing_scales_it() -> None:
    why = refused(lambda q, w, sa, sb: torch.mm(q.float(), w.float().t()).to(BF16), *given())
    assert "nothing scales it" in why


def test_a_scale_along_the_inner_dim() -> None:
    """A vector along K is neither per-token nor per-channel."""

    def fn(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor, v: Tensor) -> Tensor:
        return (torch.mm(q.float() * v, w.float().t()) * sb).to(BF16)

    assert "operand" in refused(fn, *given(), scales(32))


def test_integers_with_a_zero_point() -> None:
    data = (int8(19, 64), int8(48, 64, seed=1), scales(19, 1), scales(1, 48))

    def fn(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor, zero: Tensor) -> Tensor:
        return ((torch._int_mm(q, w.t()) - zero).float() * sa * sb).to(BF16)

    zero = torch.arange(48, dtype=torch.int32)
    assert "zero point" in refused(fn, *data, zero, control=int_mm)


def test_integers_rounded_to_the_model_dtype() -> None:
    data = (int8(19, 64), int8(48, 64, seed=1), scales(19, 1), scales(1, 48))

    def fn(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
        return torch._int_mm(q, w.t()).to(BF16) * sa.to(BF16) * sb.to(BF16)

    assert "rounding before the scales" in refused(fn, *data, control=int_mm)


def test_bias_before_the_scales_is_not_a_bias() -> None:
    def fn(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor, v: Tensor) -> Tensor:
        return ((torch.mm(q.float(), w.float().t()) + v) * sa * sb).to(BF16)

    assert "nothing scales it" in refused(fn, *given(), values(48, dtype=F32))


def test_a_matrix_is_not_a_bias() -> None:
    def fn(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor, v: Tensor) -> Tensor:
        return (torch.mm(q.float(), w.float().t()) * sa * sb + v).to(BF16)

    reading = read(fn, *given(), values(5, 48, dtype=F32))
    only(reading)
    (node,) = [d.node for d in reading.drafts]
    assert node.args[4] is None and node.args[5] == F32


def test_a_value_in_between_that_is_read_elsewhere() -> None:
    """The product before a scale has another reader: what is read ends there."""

    def fn(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> tuple[Tensor, ...]:
        half = torch.mm(q.float(), w.float().t()) * sa
        return (half * sb).to(BF16), half

    reading = read(fn, *given())
    assert only(reading)[0] == "dynamic/token x static/tensor"


# ---- torch.nn.functional.scaled_mm ---------------------------------------------------------------


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_scaled_mm_v2"), reason="an older torch")
@pytest.mark.parametrize("recipe", ["TensorWise", "RowWise"])
def test_scaled_mm_v2(recipe: str) -> None:
    kind = getattr(F.ScalingType, recipe)

    def fn(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
        return F.scaled_mm(q, w.t(), sa, kind, sb, kind, output_dtype=BF16)

    rows = recipe == "RowWise"
    sa, sb = (scales(5, 1), scales(1, 48)) if rows else (scales(1), scales(1))
    reading = Reading(trace(fn, codes(5, 32), codes(48, 32), sa, sb))
    key, form = only(reading)
    assert form == ""
    assert key == ("dynamic/token x static/channel" if rows else "static/tensor x static/tensor")


def test_dtype_of_the_codes() -> None:
    assert codes(2, 2).dtype == E4
