"""Weight-only products (W8A16): read as one product with its form, bit for bit, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import Reading as Read
from graphs import codes, post_grad, read, trace, values

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4 = torch.float8_e4m3fn
Tensor = torch.Tensor
Fn = Callable[..., Tensor]


def scales(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 0.01).to(dtype)


def only(reading: Read) -> tuple[str, str]:
    """Granularity and form of the one product."""
    assert not reading.unread, reading.unread
    (draft,) = [d for d in reading.drafts if d.kind == "scaled_mm"]
    return draft.key.split("/")[-1], draft.form


def in_bf16(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, w.to(BF16) * s.to(BF16))


def product_of(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return x @ (s.to(BF16) * w.to(BF16)).t()


def in_f32(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, (w.float() * s).to(BF16))


def by_way_of_bf16(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, (w.to(BF16).float() * s).to(BF16))


def all_f32(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return (x.float() @ (w.float() * s).t()).to(BF16)


def kept_f32(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return x.float() @ (w.float() * s).t()


def scaled_product(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, w.to(BF16)) * s.to(BF16).reshape(-1)


def product_scaled_f32(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return (F.linear(x, w.to(BF16)) * s.reshape(1, -1)).to(BF16)


def transposed_first(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return x @ (w.t().to(BF16) * s.to(BF16).reshape(1, -1))


PER_CHANNEL: dict[Fn, str] = {
    in_bf16: "weight,bfloat16,bfloat16,after",
    product_of: "weight,bfloat16,bfloat16,after",
    in_f32: "weight,float32,bfloat16,after",
    by_way_of_bf16: "weight,float32,bfloat16,after",
    all_f32: "weight,float32,float32,after",
    kept_f32: "weight,float32,float32,after",
    scaled_product: "product,bfloat16,bfloat16,after",
    product_scaled_f32: "product,float32,bfloat16,after",
    transposed_first: "weight,bfloat16,bfloat16,after",
}


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize(
    ("fn", "form"), PER_CHANNEL.items(), ids=lambda v: getattr(v, "__name__", v)
)
def test_per_channel(fn: Fn, form: str, rank: int) -> None:
    x = values(5, 32) if rank == 2 else values(2, 3, 32)
    assert only(read(fn, x, codes(48, 32), scales(48, 1))) == ("channel", form)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("fn", [in_bf16, in_f32, all_f32, kept_f32, product_scaled_f32])
def test_per_tensor(fn: Fn, shape: tuple[int, ...]) -> None:
    kind, form = only(read(fn, values(5, 32), codes(48, 32), scales(*shape)))
    assert kind == "tensor"
    if fn is not product_scaled_f32:
        assert form == PER_CHANNEL[fn]


def test_a_scale_without_dimensions_does_not_decide_the_dtype() -> None:
    """bf16 times a float32 scalar is computed in float32 and rounded once, to bf16."""

    def fn(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return F.linear(x, w.to(BF16) * s)

    reading = read(fn, values(5, 32), codes(48, 32), scales())
    assert only(reading) == ("tensor", "weight,bfloat16,bfloat16,after")


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("n", [384, 300])
def test_per_block(n: int, dtype: torch.dtype) -> None:
    def fn(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        wide = s.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
        return F.linear(x, (w.to(dtype) * wide.to(dtype)).to(BF16))

    reading = read(fn, values(5, 256), codes(n, 256), scales(3, 2))
    word = "float32" if dtype == F32 else "bfloat16"
    assert only(reading) == ("group128x128", f"weight,{word},bfloat16,after")


@pytest.mark.parametrize("codes_dtype", [E4, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_dtypes(codes_dtype: torch.dtype, dtype: torch.dtype) -> None:
    def fn(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return F.linear(x, (w.to(dtype).float() * s).to(dtype))

    reading = read(fn, values(5, 32, dtype=dtype), codes(48, 32, dtype=codes_dtype), scales(48, 1))
    name = str(dtype).removeprefix("torch.")
    assert only(reading) == ("channel", f"weight,float32,{name},after")


def test_bias() -> None:
    b = values(48)

    def inside(x: Tensor, w: Tensor, s: Tensor, b: Tensor) -> Tensor:
        return F.linear(x, (w.float() * s).to(BF16), b)

    def after(x: Tensor, w: Tensor, s: Tensor, b: Tensor) -> Tensor:
        return F.linear(x, (w.float() * s).to(BF16)) + b

    def wide(x: Tensor, w: Tensor, s: Tensor, b: Tensor) -> Tensor:
        return (F.linear(x.float(), w.float()) * s.t() + b.float()).to(BF16)

    for fn, form in (
        (inside, "weight,float32,bfloat16,inside"),
        (after, "weight,float32,bfloat16,after"),
        (wide, "product,float32,float32,after"),
    ):
        reading = read(fn, values(2, 3, 32), codes(48, 32), scales(48, 1), b)
        assert only(reading) == ("channel", form)
        (draft,) = reading.drafts
        assert draft.node.args[3] is not None, fn.__name__


def test_any_number_of_rows() -> None:
    reading = read(in_f32, values(5, 32), codes(48, 32), scales(48, 1), dynamic=[0])
    assert only(reading) == ("channel", PER_CHANNEL[in_f32])


@pytest.mark.parametrize("fn", PER_CHANNEL, ids=lambda fn: fn.__name__)
def test_after_the_passes_of_inductor(fn: Fn) -> None:
    data = values(5, 32), codes(48, 32), scales(48, 1)
    reading = Read(post_grad(trace(fn, *data)))
    reading.check(*data)
    assert only(reading)[0] == "channel"


# ---- near misses, each beside what is read -------------------------------------------------------


def refused(fn: Fn, *data: Tensor, control: Fn = in_bf16) -> str:
    """The reason that ``fn`` is not read, where ``control`` on the same data is."""
    only(read(control, *data[:3]))
    reading = read(fn, *data)
    assert not [d for d in reading.drafts if d.kind == "scaled_mm"]
    ((kind, code, message),) = reading.unread
    assert (kind, code) == ("scaled_mm", "FP8-R005")
    return message


def given() -> tuple[Tensor, Tensor, Tensor]:
    return values(5, 32), codes(48, 32), scales(48, 1)


def test_nothing_scales_it() -> None:
    assert "nothing scales it" in refused(lambda x, w, s: F.linear(x, w.to(BF16)), *given())


def test_a_scale_along_k_is_not_one_per_channel() -> None:
    def fn(x: Tensor, w: Tensor, s: Tensor, along: Tensor) -> Tensor:
        return F.linear(x, w.to(BF16) * along.to(BF16))

    assert "not one per tensor, channel or block" in refused(fn, *given(), scales(1, 32))


def test_a_square_weight_is_not_taken_by_its_shape() -> None:
    """``[K]`` beside ``[N, K]`` with N = K is a scale of the columns, not of the channels."""

    def fn(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return F.linear(x, w.to(BF16) * s.to(BF16).reshape(-1))

    data = values(5, 48), codes(48, 48), scales(48, 1)
    assert "not one per tensor, channel or block" in refused(fn, *data)


def test_a_weight_that_is_rounded_twice() -> None:
    def fn(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return F.linear(x, (w.float() * s).to(F16).to(BF16))

    assert "rounded more than once" in refused(fn, *given())


def test_a_weight_that_is_scaled_twice() -> None:
    def fn(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return F.linear(x, w.to(BF16) * s.to(BF16) * s.to(BF16))

    assert "its weight is made by aten.mul" in refused(fn, *given())


def test_a_scale_that_is_a_number() -> None:
    def fn(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return F.linear(x, w.to(BF16) * 0.5)

    assert "its scale is not a tensor" in refused(fn, *given())


def test_a_scale_for_each_element() -> None:
    def fn(x: Tensor, w: Tensor, s: Tensor, each: Tensor) -> Tensor:
        return F.linear(x, w.to(BF16) * each.to(BF16))

    assert "not one per tensor" in refused(fn, *given(), scales(48, 32))


def test_two_scales() -> None:
    """The product's second factor stays behind what is read."""

    def fn(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return F.linear(x, w.to(BF16) * s.to(BF16)) * s.to(BF16).reshape(-1)

    reading = read(fn, *given())
    assert only(reading)[1] == "weight,bfloat16,bfloat16,after"
    assert any(str(n.target) == "aten.mul.Tensor" for n in reading.after.graph.nodes)


def test_a_weight_that_others_read_is_read_for_each() -> None:
    def fn(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        wide = w.to(BF16) * s.to(BF16)
        return F.linear(x, wide), F.linear(x + 1, wide), wide

    assert len(read(fn, *given()).drafts) == 2


def test_a_product_without_codes_is_nothing_to_us() -> None:
    reading = read(lambda x, w: F.linear(x, w), values(5, 32), values(48, 32))
    assert reading.unread == [] and reading.drafts == []
