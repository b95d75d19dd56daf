"""INT8 with a zero point: quantises and products, against float64, beside their near misses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import Passed, Reading, assert_same_bits, read, run, trace, values, vector
from spell import int8_token, llama
from spell_zero_point import (
    BF16,
    F32,
    I8,
    I32,
    ZERO_PRODUCTS,
    ZERO_QUANTS,
    by_codes,
    by_int32,
    given_zero,
    shifted,
    static,
    token,
    torchao_symmetric,
)

Tensor = torch.Tensor
K, N = 64, 48
S = torch.tensor(0.05)
QUANTS, PRODUCTS = list(ZERO_QUANTS), list(ZERO_PRODUCTS)


def weight(seed: int = 0, n: int = N) -> tuple[Tensor, Tensor, Tensor]:
    """Codes ``[N, K]``, scales ``[1, N]`` and a bias."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (n, K), generator=g).to(I8)
    return codes, torch.rand(1, n, generator=g) + 0.01, torch.randn(n, generator=g).to(BF16)


def shifted_values(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Values that are mostly positive, as a zero point is for; one row of zeros."""
    x = values(*shape, dtype=F32) + values(*shape, dtype=F32, seed=9).abs() + 1
    x[0] = 0
    return x.to(dtype)


# ---- quantises -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", QUANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(6, K), (2, 3, K)], ids=str)
def test_quantise(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    fn, wanted = ZERO_QUANTS[name]
    reading = read(fn, shifted_values(*shape, dtype=dtype), S)
    (form,) = reading.forms("quantize")
    narrow = "" if dtype == F32 or "torchao" not in name else str(dtype).removeprefix("torch.")
    parts = [part for part in form.split(",") if not part.startswith("scale_dtype")]
    assert ",".join(parts) == wanted
    assert (f",scale_dtype={narrow}" in form) == bool(narrow)
    assert not reading.unread
    (draft,) = reading.drafts
    assert draft.key.endswith("/asym")


@pytest.mark.parametrize("name", QUANTS)
def test_rows_that_are_symbolic_add_no_guard(name: str) -> None:
    traced = trace(ZERO_QUANTS[name][0], shifted_values(6, K), S, dynamic=(0,))
    reading = Reading(traced)
    for rows in (6, 1, 3):
        reading.check(shifted_values(6, K)[:rows].contiguous(), S)
    assert len(reading.forms("quantize")) == 1


def test_symmetric_mapping_of_torchao() -> None:
    """Zeros are no zero point."""
    (form,) = read(torchao_symmetric, values(6, K), S).forms("quantize")
    assert form == (
        f"int8,token,float32,div,127.5,scale,{2.0**-23},mul_recip,-128.0,127.0,scale_dtype=bfloat16"
    )


Fn = Callable[..., Any]


def _token(
    lo: float = -128,
    hi: float = 127,
    zero: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda low, high, s: -128 - low / s,
    scale: Callable[[Tensor, Tensor], Tensor] = lambda low, high: (high - low) / 255,
    add: Callable[[Tensor, Tensor], Tensor] = lambda q, z: q + z,
    low_of: Callable[[Tensor], Tensor] = lambda v: v.amin(-1, keepdim=True),
) -> Fn:
    def fn(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        wide = y.float()
        low, high = low_of(wide), wide.amax(-1, keepdim=True)
        made = scale(low, high).clamp(min=1e-7)
        z = torch.round(zero(low, high, made)).to(I32)
        return add(torch.round(wide / made), z).clamp(lo, hi).to(I8), made, z

    return fn


def _after_the_clamp(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    return ((torch.round(y.float() / s).clamp(-128, 127) + given_zero(s)).to(I8),)


def _before_the_division(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    return (torch.round((y.float() + given_zero(s)) / s).clamp(-128, 127).to(I8),)


def _zero_of_the_values(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    zero = torch.round(y.float().mean())
    return ((torch.round(y.float() / s) + zero).clamp(-128, 127).to(I8),)


def _zero_per_column(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    return ((torch.round(y.float() / s) + s * torch.arange(K)).clamp(-128, 127).to(I8),)


def _other_scale(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    """The zero point is made with the scale as it was before its floor."""
    wide = y.float()
    low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    raw = (high - low) / 255
    made = raw.clamp(min=1e-2)
    zero = torch.round(-128 - low / raw).clamp(-128, 127)
    return ((torch.round(wide / made) + zero).clamp(-128, 127).to(I8),)


#: name -> (near miss, control)
NEAR: dict[str, tuple[Fn, Fn]] = {
    "added_after_the_clamp": (_after_the_clamp, static),
    "zero_point_of_the_values": (_zero_of_the_values, static),
    "zero_point_per_column": (_zero_per_column, static),
    "clamped_as_uint8": (_token(lo=0, hi=255), _token()),
    "clamped_low": (_token(lo=-100), _token()),
    "clamped_high": (_token(hi=126), _token()),
    "zero_point_from_127": (_token(zero=lambda a, b, s: 127 - a / s), _token()),
    "zero_point_of_the_maximum": (_token(zero=lambda a, b, s: -128 - b / s), _token()),
    "zero_point_added_the_other_way": (_token(zero=lambda a, b, s: a / s - -128), _token()),
    "zero_point_not_of_its_scale": (_other_scale, _token()),
    "zero_point_subtracted": (_token(add=lambda q, z: q - z), _token()),
    "zero_point_twice": (_token(add=lambda q, z: q + 2 * z), _token()),
    "span_of_a_sum": (_token(scale=lambda a, b: (b + a) / 255), _token()),
    "span_the_other_way": (_token(scale=lambda a, b: (a - b) / 255), _token()),
    "smallest_of_the_whole": (
        _token(low_of=lambda v: v.amin().expand(v.shape[0], 1) * 1.0),
        _token(),
    ),
    "smallest_of_others": (_token(low_of=lambda v: v[:, 1:].amin(-1, keepdim=True)), _token()),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_miss_of_a_quantise_and_its_control(name: str) -> None:
    near, control = NEAR[name]
    x = shifted_values(6, K)
    reading = Reading(trace(near, x, S))
    reading.check(x, S)
    assert reading.forms("quantize") == []
    assert [code for _, code, _ in reading.unread] == ["FP8-R001"]
    (form,) = read(control, x, S).forms("quantize")
    assert ",zero=" in form


def test_one_end_bounded_by_zero_alone_is_not_read() -> None:
    near = _token(low_of=lambda v: v.amin(-1, keepdim=True).clamp(max=0.0))
    reading = Reading(trace(near, shifted_values(6, K), S))
    assert reading.forms("quantize") == []


def test_a_number_added_before_the_division_is_no_zero_point() -> None:
    """It is a quantise of the sum, without one."""
    (draft,) = read(_before_the_division, shifted_values(6, K), S).drafts
    assert draft.key == "int8/static/tensor"


@pytest.mark.parametrize("name", QUANTS)
@pytest.mark.parametrize("shape", [(6, K), (2, 3, K)], ids=str)
def test_fused_with_a_norm(name: str, shape: tuple[int, ...]) -> None:
    """One quantise for two products; the numbers are those of the source, bit for bit."""
    quantise, product = ZERO_QUANTS[name][0], by_int32 if name != "zero_static_float" else by_codes

    def fn(x: Tensor, v: Tensor, s: Tensor, *w: Tensor) -> tuple[Tensor, ...]:
        y = llama(x, v, 1e-6)
        outs = []
        for i in (0, 3):
            q, scale, zero = quantise(y, s)
            flat = [scale, zero] if scale.numel() == 1 else [scale.view(-1, 1), zero.view(-1, 1)]
            if scale.numel() == 1 and scale.dim() > 1:
                flat = [scale.view(()), zero.view(())]
            outs.append(product(q.view(-1, K), *flat, *w[i : i + 3]))
        return tuple(outs)

    inputs = shifted_values(*shape), vector(K), S, *weight(), *weight(1)
    passed = Passed(trace(fn, *inputs))
    assert passed.fusions == 1, [(s.kind, s.code, s.message) for s in passed.record.sites]
    assert [site.status for site in passed.sites("scaled_mm")] == ["lowered"] * 2
    assert not passed.sites("quantize", "left")
    assert_same_bits(run(passed.fused, *inputs), run(passed.before, *inputs))


# ---- products ------------------------------------------------------------------------------------


def product_of(quantise: Fn, product: Fn) -> Fn:
    def fn(x: Tensor, s: Tensor, w: Tensor, sb: Tensor, b: Tensor) -> Tensor:
        q, scale, zero = quantise(x, s)
        return product(q, scale, zero, w, sb, b)

    return fn


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("quant", ["zero_static", "zero_token", "zero_torchao_token"])
def test_product(name: str, quant: str) -> None:
    product, wanted = ZERO_PRODUCTS[name]
    inputs = shifted_values(19, K), S, *weight()
    fn = product_of(ZERO_QUANTS[quant][0], product)
    traced = trace(fn, *inputs)
    reading = Reading(traced)
    # a float32 sum of products of whole numbers is exact here; scaled operands round
    if name != "values":
        reading.check(*inputs)
    (form,) = reading.forms("scaled_mm")
    if quant == "zero_static":  # one number times a row is a row of scales
        form = form.replace("none,ab,float32", "none,joined,float32")
    assert form == wanted and not reading.unread
    passed = Passed(traced)
    (site,) = passed.sites("scaled_mm")
    assert (site.status, site.kernel) == ("lowered", "torch_int8_cpu")
    assert ("/asym" in site.key.split(" x ")[0]) == (name != "shifted")


def in_float64(q: Tensor, s: Tensor, z: Tensor, w: Tensor, sb: Tensor, b: Tensor) -> Tensor:
    """The dequantised operands, multiplied."""
    return ((q.double() - z) * s.double()) @ (w.double() * sb.double().t()).t() + b.double()


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("seed", range(4))
def test_numbers_against_float64(name: str, seed: int) -> None:
    """Random codes, scales and zero points of every row, the whole pass, dequantised in float64."""
    g = torch.Generator().manual_seed(seed)
    rows = 1 + 6 * seed
    q = torch.randint(-128, 128, (rows, K), generator=g).to(I8)
    scale = torch.rand(rows, 1, generator=g) * 0.1 + 1e-3
    zero = torch.randint(-128, 128, (rows, 1), generator=g).to(I32)
    inputs = q, scale, zero, *weight(seed + 5)
    product = ZERO_PRODUCTS[name][0]
    passed = Passed(trace(product, *inputs))
    assert [site.status for site in passed.sites("scaled_mm")] == ["lowered"]
    (got,), wanted = run(passed.after, *inputs), in_float64(*inputs)
    magnitude = ((q.double() - zero).abs() * scale) @ (inputs[3].double().abs() * inputs[4].t()).t()
    if name == "shifted":  # rounds twice on the way, in the source as here
        (before,) = run(passed.before, *inputs)
        assert_same_bits([got], [before])
        return
    limit = 2 * wanted.abs() * 2.0**-8 + 2.0**-10 * magnitude + 2.0**-8 * inputs[5].abs()
    assert ((got.double() - wanted).abs() <= limit).all()
    wrong = in_float64(q, scale, zero + 1, *inputs[3:])
    assert not ((got.double() - wrong).abs() <= limit).all()


def test_a_product_with_another_zero_point_is_read_as_that() -> None:
    """What is read is the arithmetic: the zero point of the product, not that of the codes."""

    def fn(x: Tensor, s: Tensor, w: Tensor, sb: Tensor, b: Tensor, other: Tensor) -> Tensor:
        q, scale, _ = token(x, s)
        return by_int32(q, scale, other, w, sb, b)

    other = torch.arange(19, dtype=I32).view(-1, 1)
    inputs = shifted_values(19, K), S, *weight(), other
    reading = Reading(trace(fn, *inputs))
    reading.check(*inputs)
    (draft,) = [d for d in reading.drafts if d.kind == "scaled_mm"]
    assert draft.node.args[11].op == "placeholder"
    passed = Passed(trace(fn, *inputs))
    assert_same_bits(run(passed.after, *inputs), run(passed.before, *inputs))


def _zero_clamped(clamp: Callable[[Tensor], Tensor]) -> Fn:
    def fn(x: Tensor, s: Tensor, z: Tensor, w: Tensor, sb: Tensor) -> Tensor:
        q = (torch.round(x.float() / s) + 3).clamp(-128, 127).to(I8)
        total = torch._int_mm(q, w.t()) - clamp(z) * w.sum(1, dtype=I32)
        return (total.float() * s * sb).to(BF16)

    return fn


#: name -> (how the zero point is made from float32, whether every value of it is one of int8)
CLAMPED: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "as_int32": (lambda z: z.to(I32).clamp(-128, 127), True),
    "as_int64": (lambda z: z.to(torch.int64).clamp(-128, 127).to(I32), True),
    "as_float32": (lambda z: z.clamp(-128, 127).to(I32), False),
    "as_float32_rounded": (lambda z: z.clamp(-128, 127).round().to(I32), False),
    "wider": (lambda z: z.to(I32).clamp(-128, 128), False),
}


@pytest.mark.parametrize("name", CLAMPED)
@pytest.mark.parametrize("zero", [float("nan"), float("inf"), -float("inf"), 2.7, 300.0])
def test_a_zero_point_goes_as_int8_where_it_is_one_whatever_it_is_made_from(
    name: str, zero: float
) -> None:
    """NaN passes a clamp: as int32 it is another number than as int8."""
    clamp, fits = CLAMPED[name]
    codes, scales, _ = weight()
    fn, inputs = _zero_clamped(clamp), (values(19, K), S, torch.tensor(zero), codes, scales)
    reading = Reading(trace(fn, *inputs))
    reading.check(*inputs)
    (draft,) = [d for d in reading.drafts if d.kind == "scaled_mm"]
    assert (draft.node.args[11].meta["val"].dtype == I8) == fits
    for kernel in ("torch_int8_cpu", "torch_dequant"):
        passed = Passed(trace(fn, *inputs), force=kernel)
        assert [site.kernel for site in passed.sites("scaled_mm")] == [kernel]
        assert_same_bits(run(passed.after, *inputs), run(passed.before, *inputs))


@pytest.mark.parametrize("zero_dtype", [I32, F32], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.0, 3.0])
def test_the_clamped_zero_point_of_a_quantise_stays_what_it_is(
    zero_dtype: torch.dtype, value: float
) -> None:
    """Rows that hold no number, or one number: the zero point is NaN before it is clamped."""

    def fn(x: Tensor, w: Tensor, sb: Tensor) -> Tensor:
        wide = x.float()
        low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
        scale = (high - low) / 255
        zero = torch.round(-128 - low / scale).clamp(-128, 127).to(zero_dtype)
        q = (torch.round(wide / scale) + zero).clamp(-128, 127).to(I8)
        sums = w.sum(1, dtype=I32)
        if zero_dtype == I32:
            total = (torch._int_mm(q, w.t()) - zero * sums).float()
        else:
            total = torch._int_mm(q, w.t()).float() - zero * sums.float()
        return (total * scale * sb).to(BF16)

    codes, scales, _ = weight()
    x = shifted_values(19, K)
    x[3], x[5, 7] = value, value
    passed = Passed(trace(fn, x, codes, scales))
    assert [site.status for site in passed.sites("scaled_mm")] == ["lowered"]
    (form,) = Reading(trace(fn, x, codes, scales)).forms("quantize")
    assert "zero_clamp=codes" in form
    assert_same_bits(run(passed.after, x, codes, scales), run(passed.before, x, codes, scales))


Wrong = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def _int32(sums: Callable[[Tensor, Tensor], Tensor], sign: int = 1) -> Wrong:
    def fn(q: Tensor, s: Tensor, z: Tensor, w: Tensor, sb: Tensor, b: Tensor, v: Tensor) -> Tensor:
        off = z * sums(w, v)
        total = torch._int_mm(q, w.t())
        total = total - off if sign > 0 else total + off
        return (total.float() * s * sb + b).to(BF16)

    return fn


def _float32(sums: Callable[[Tensor, Tensor], Tensor]) -> Wrong:
    def fn(q: Tensor, s: Tensor, z: Tensor, w: Tensor, sb: Tensor, b: Tensor, v: Tensor) -> Tensor:
        total = torch._int_mm(q, w.t()).float() - z.float() * sums(w, v)
        return (total * s * sb + b).to(BF16)

    return fn


def _reversed(
    q: Tensor, s: Tensor, z: Tensor, w: Tensor, sb: Tensor, b: Tensor, v: Tensor
) -> Tensor:
    total = z * w.sum(1, dtype=I32) - torch._int_mm(q, w.t())
    return (total.float() * s * sb + b).to(BF16)


def _halved(q: Tensor, s: Tensor, z: Tensor, w: Tensor, sb: Tensor, b: Tensor, v: Tensor) -> Tensor:
    """An ``alpha``: half of the correction."""
    total = torch.sub(torch._int_mm(q, w.t()), z * w.sum(1, dtype=I32), alpha=2)
    return (total.float() * s * sb + b).to(BF16)


def _shift(by: int, back: int, of_other: bool = False) -> Wrong:
    def fn(q: Tensor, s: Tensor, z: Tensor, w: Tensor, sb: Tensor, b: Tensor, v: Tensor) -> Tensor:
        moved = (q.to(I32) + by).to(torch.uint8)
        sums = (v if of_other else w).t().sum(0, keepdim=True, dtype=I32)
        total = torch._int_mm(moved, w.t()) - back * sums
        return (total.float() * s * sb + b).to(BF16)

    return fn


def _sum(w: Tensor, dim: int, dtype: torch.dtype = I32) -> Tensor:
    return w.sum(dim, dtype=dtype)


#: the weight is square, so that no shape tells rows from columns
WRONG: dict[str, tuple[Wrong, Wrong]] = {
    "another_weight": (_int32(lambda w, v: _sum(v, 1)), _int32(lambda w, v: _sum(w, 1))),
    "over_the_other_dim": (_int32(lambda w, v: _sum(w, 0)), _int32(lambda w, v: _sum(w.t(), 0))),
    "over_n_of_the_transpose": (
        _int32(lambda w, v: _sum(w.t(), 1)),
        _int32(lambda w, v: _sum(w, 1)),
    ),
    "a_column_of_sums": (
        _int32(lambda w, v: w.sum(1, keepdim=True, dtype=I32)),
        _int32(lambda w, v: w.t().sum(0, keepdim=True, dtype=I32)),
    ),
    "of_a_part": (
        _int32(lambda w, v: _sum(w[:, 1:], 1)),
        _int32(lambda w, v: _sum(w, 1)),
    ),
    "of_magnitudes": (_int32(lambda w, v: _sum(w.abs(), 1)), _int32(lambda w, v: _sum(w, 1))),
    "added": (_int32(lambda w, v: _sum(w, 1), -1), _int32(lambda w, v: _sum(w, 1))),
    "the_other_way": (_reversed, _int32(lambda w, v: _sum(w, 1))),
    "twice": (_halved, _int32(lambda w, v: _sum(w, 1))),
    "given_sums": (_int32(lambda w, v: v[0].to(I32)), _int32(lambda w, v: _sum(w, 1))),
    "float_of_another_weight": (
        _float32(lambda w, v: v.float().sum(1)),
        _float32(lambda w, v: w.float().sum(1)),
    ),
    "float_over_the_other_dim": (
        _float32(lambda w, v: w.float().sum(0)),
        _float32(lambda w, v: w.float().sum(1)),
    ),
    "sums_rounded_to_bf16": (
        _float32(lambda w, v: w.float().sum(1).to(BF16).float()),
        _float32(lambda w, v: w.float().sum(1)),
    ),
    "shifted_by_127": (_shift(127, 127), _shift(128, 128)),
    "shifted_back_by_less": (_shift(128, 127), _shift(128, 128)),
    "shifted_back_by_another_weight": (_shift(128, 128, of_other=True), _shift(128, 128)),
}


def product_inputs() -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(3)
    w, sb, b = weight(0, K)
    q = torch.randint(-128, 128, (K, K), generator=g).to(I8)
    zero = torch.randint(-128, 128, (K, 1), generator=g).to(I32)
    return q, torch.rand(K, 1, generator=g) + 0.01, zero, w, sb, b, weight(1, K)[0]


@pytest.mark.parametrize("name", WRONG)
def test_near_miss_of_a_product_and_its_control(name: str) -> None:
    near, control = WRONG[name]
    inputs = product_inputs()
    reading = Reading(trace(near, *inputs))
    reading.check(*inputs)
    assert reading.forms("scaled_mm") == []
    ((kind, code, message),) = reading.unread
    assert (kind, code) == ("scaled_mm", "FP8-R002"), message
    assert len(read(control, *inputs).forms("scaled_mm")) == 1
    passed = Passed(trace(near, *inputs))
    assert_same_bits(run(passed.after, *inputs), run(passed.before, *inputs))


def _less(zero: Callable[[Tensor], Tensor], turned: bool = False) -> Wrong:
    def fn(q: Tensor, s: Tensor, z: Tensor, w: Tensor, sb: Tensor, b: Tensor, v: Tensor) -> Tensor:
        a = q.float() - zero(z)
        return (torch.mm(a.t() if turned else a, w.float().t()) * s * sb + b).to(BF16)

    return fn


@pytest.mark.parametrize(
    "near",
    [
        _less(lambda z: z.view(1, -1)),
        _less(lambda z: z.view(-1)),
        _less(lambda z: z, turned=True),
        _less(lambda z: z.to(BF16)),
    ],
    ids=["row", "vector", "turned", "bf16"],
)
def test_zero_points_that_are_not_of_the_rows(near: Wrong) -> None:
    inputs = product_inputs()
    reading = Reading(trace(near, *inputs))
    reading.check(*inputs)
    assert reading.forms("scaled_mm") == []
    assert [code for _, code, _ in reading.unread] == ["FP8-R002"]
    assert read(_less(lambda z: z), *inputs).forms("scaled_mm") == ["none,ab,codes"]


def test_a_sum_that_may_overflow() -> None:
    """The largest sum of a product less a zero point is twice that of the product."""
    for depth, count in ((65792, 1), (65808, 0)):
        q, w = torch.zeros(17, depth, dtype=I8), torch.zeros(16, depth, dtype=I8)
        zero = torch.zeros(17, 1, dtype=I32)
        inputs = q, torch.ones(17, 1), zero, w, torch.ones(1, 16), torch.zeros(16, dtype=BF16)
        assert len(Reading(trace(by_int32, *inputs)).forms("scaled_mm")) == count


def test_a_weight_with_a_zero_point_is_not_read() -> None:
    def fn(q: Tensor, s: Tensor, z: Tensor, w: Tensor, sb: Tensor, b: Tensor, v: Tensor) -> Tensor:
        return (torch.mm(q.float(), (w.float() - z).t()) * s * sb + b).to(BF16)

    reading = Reading(trace(fn, *product_inputs()))
    assert reading.forms("scaled_mm") == []
    ((_, code, message),) = reading.unread
    assert code == "FP8-R002" and "second operand" in message


def test_the_symmetric_neighbour_has_no_zero_point() -> None:
    def fn(x: Tensor, s: Tensor, w: Tensor, sb: Tensor, b: Tensor) -> Tensor:
        q, scale = int8_token(x, s)
        return (torch._int_mm(q, w.t()).float() * scale * sb + b).to(BF16)

    reading = read(fn, values(19, K), S, *weight())
    assert [draft.key for draft in reading.drafts if draft.kind == "scaled_mm"] == [
        "int8/dynamic/token x int8/static/channel"
    ]


def test_shifted_codes_alone_are_the_codes() -> None:
    inputs = product_inputs()[:6]
    reading = read(shifted, *inputs)
    (draft,) = reading.drafts
    assert draft.node.args[0].name == "arg0_1" and len(draft.node.args) == 10
