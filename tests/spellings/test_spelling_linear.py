"""``aten._scaled_mm``: every kind of scale that aten takes, read with the right granularity."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graphs import Reading, codes, post_grad, read, run, trace, values
from spell import E4, static, token

BF16 = torch.bfloat16
Tensor = torch.Tensor


def mm(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, **more: object) -> Tensor:
    more.setdefault("out_dtype", BF16)
    return torch._scaled_mm(a, b, sa, sb, **more)  # type: ignore[arg-type]


def scales(*shape: int, seed: int = 0) -> Tensor:
    """Powers of two: scaling by them is exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-6, 3, shape, generator=generator).float().exp2()


def keys(reading: Reading) -> list[str]:
    return [d.key.replace("float8_e4m3fn/", "") for d in reading.drafts if d.kind == "scaled_mm"]


def check(
    sa: tuple[int, ...],
    sb: tuple[int, ...],
    m: int = 5,
    n: int = 48,
    dynamic: tuple[int, ...] = (),
    fn: Callable[..., Tensor] = mm,
) -> str:
    a, weight = codes(m, 32), codes(n, 32, seed=3)
    reading = read(
        lambda a, w, sa, sb: fn(a, w.t(), sa, sb),
        a,
        weight,
        scales(*sa),
        scales(*sb, seed=1),
        dynamic=dynamic,
    )
    (key,) = keys(reading)
    return key


TENSOR = [(), (1,), (1, 1)]


@pytest.mark.parametrize("sb", TENSOR, ids=str)
@pytest.mark.parametrize("sa", TENSOR, ids=str)
def test_tensor_scales(sa: tuple[int, ...], sb: tuple[int, ...]) -> None:
    assert check(sa, sb) == "static/tensor x static/tensor"


def test_row_scales() -> None:
    assert check((5, 1), (1, 48)) == "dynamic/token x static/channel"


def test_row_scales_of_a_symbolic_batch() -> None:
    assert check((6, 1), (1, 48), m=6, dynamic=(0, 2)) == "dynamic/token x static/channel"


def test_tensor_scales_of_a_symbolic_batch() -> None:
    assert check((1,), (1,), m=6, dynamic=(0,)) == "static/tensor x static/tensor"


def test_one_row() -> None:
    """With one token a per-token scale has one element; the weight's scale tells."""
    assert check((1, 1), (1, 48), m=1) == "dynamic/token x static/channel"
    assert check((), (), m=1) == "static/tensor x static/tensor"


def test_one_column() -> None:
    assert check((5, 1), (1, 1), n=1).startswith("dynamic/token x ")
    assert check((), (1,), n=1) == "static/tensor x static/tensor"


def test_one_row_and_one_column() -> None:
    """Both readings are the same numbers; either is right, but both of one kind."""
    assert check((1, 1), (1, 1), m=1, n=1) in (
        "dynamic/token x static/channel",
        "static/tensor x static/tensor",
    )


def test_no_rows() -> None:
    assert check((0, 1), (1, 48), m=0) == "dynamic/token x static/channel"
    assert check((), (), m=0) == "static/tensor x static/tensor"


@pytest.mark.parametrize("out", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [None, BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [False, True])
def test_bias_and_result_dtype(bias: torch.dtype | None, out: torch.dtype, rows: bool) -> None:
    a, weight = codes(5, 32), codes(48, 32, seed=3)
    sa, sb = (scales(5, 1), scales(1, 48)) if rows else (scales(), scales())
    if bias is None:
        reading = read(lambda a, w, sa, sb: mm(a, w.t(), sa, sb, out_dtype=out), a, weight, sa, sb)
    else:
        vector = torch.randint(-9, 9, (48,)).to(bias)
        reading = read(
            lambda a, w, sa, sb, v: mm(a, w.t(), sa, sb, bias=v, out_dtype=out),
            a,
            weight,
            sa,
            sb,
            vector,
        )
    (node,) = [d.node for d in reading.drafts]
    assert node.args[5] == out and (node.args[4] is None) == (bias is None)


@pytest.mark.parametrize("fast", [False, True])
def test_use_fast_accum(fast: bool) -> None:
    a, weight = codes(5, 32), codes(48, 32, seed=3)
    reading = read(
        lambda a, w, sa, sb: mm(a, w.t(), sa, sb, use_fast_accum=fast),
        a,
        weight,
        scales(),
        scales(),
    )
    (node,) = [d.node for d in reading.drafts]
    assert node.args[8] is fast


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, E4], ids=str)
def test_other_fp8_dtypes_have_their_name_in_the_key(dtype: torch.dtype) -> None:
    a, weight = codes(5, 32, dtype=dtype), codes(48, 32, dtype=dtype, seed=3)
    reading = read(lambda a, w, sa, sb: mm(a, w.t(), sa, sb), a, weight, scales(), scales())
    assert [d.key for d in reading.drafts] == [
        f"{str(dtype)[6:]}/static/tensor x {str(dtype)[6:]}/static/tensor"
    ]


def test_weight_in_rows() -> None:
    """A weight that is not a ``.t()`` view is read too; the layout is the lowering's business."""
    a, weight = codes(5, 32), codes(32, 48, seed=3)
    assert len(read(mm, a, weight, scales(), scales()).drafts) == 1


@pytest.mark.parametrize(("quant", "kind"), [(static, "static/tensor"), (token, "dynamic/token")])
@pytest.mark.parametrize("rows", [1, 6])
def test_the_quantise_tells_the_granularity(quant, kind: str, rows: int) -> None:  # type: ignore[no-untyped-def]
    def fn(x: Tensor, w: Tensor, s: Tensor, sb: Tensor) -> Tensor:
        q, *made = quant(x, s)
        return mm(q.view(-1, 32), w.t(), made[0].view(-1, 1) if made else s, sb)

    sb = scales(1, 48) if quant is token else scales()
    x = values(rows, 3, 32)
    reading = Reading(trace(fn, x, codes(48, 32), torch.tensor(0.02), sb))
    assert keys(reading)[0].startswith(f"{kind} x ")


def test_dynamic_tensor_scale() -> None:
    def fn(x: Tensor, w: Tensor, sb: Tensor) -> Tensor:
        scale = (x.abs().amax().float() / 448).clamp(min=1e-12)
        return mm((x.float() / scale).clamp(-448, 448).to(E4), w.t(), scale, sb)

    reading = Reading(trace(fn, values(5, 32), codes(48, 32), scales()))
    assert keys(reading) == ["dynamic/tensor x static/tensor"]


def test_after_inductors_passes() -> None:
    a, weight, sa, sb = codes(6, 32), codes(48, 32, seed=3), scales(6, 1), scales(1, 48)
    traced = trace(lambda a, w, sa, sb: mm(a, w.t(), sa, sb), a, weight, sa, sb, dynamic=(0, 2))
    reading = Reading(post_grad(traced))
    reading.check(a, weight, sa, sb)
    assert keys(reading) == ["dynamic/token x static/channel"]


# ---- not read, beside a positive control ---------------------------------------------------------


def unread(fn: Callable[..., Tensor], *inputs: Tensor) -> str:
    control = read(lambda a, w, sa, sb: mm(a, w.t(), sa, sb), *inputs[:4])
    assert len(control.drafts) == 1 and not control.unread
    reading = read(fn, *inputs)
    assert reading.forms("scaled_mm") == []
    (entry,) = reading.unread
    assert entry[:2] == ("scaled_mm", "FP8-R002")
    return entry[2]


def operands() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return codes(5, 32), codes(48, 32, seed=3), scales(), scales()


def test_scaled_result_is_not_read() -> None:
    why = unread(
        lambda a, w, sa, sb, r: mm(a, w.t(), sa, sb, scale_result=r),
        *operands(),
        torch.tensor(0.5),
    )
    assert "scales its result" in why


def test_fp8_result_is_not_read() -> None:
    assert "float8_e4m3fn" in unread(
        lambda a, w, sa, sb: torch._scaled_mm(a, w.t(), sa, sb), *operands()
    )


def test_scale_of_a_matrix_product_is_not_touched() -> None:
    """A matrix added to the product is no bias; it stays a separate sum."""
    a, weight, sa, sb = operands()
    other = values(5, 48)
    reading = read(lambda a, w, sa, sb, o: mm(a, w.t(), sa, sb) + o, a, weight, sa, sb, other)
    (node,) = [d.node for d in reading.drafts]
    assert node.args[4] is None
    assert run(reading.after, a, weight, sa, sb, other)[0].shape == (5, 48)
