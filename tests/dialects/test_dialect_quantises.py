"""The quantises of torchao and compressed-tensors: every dtype and shape, and their near misses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graphs import Reading, read, run, trace, values
from spell import NAMES
from spelled import E4, torchao_quantise, without_zero_rows

Tensor = torch.Tensor
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def scale_dtype(dtype: torch.dtype) -> str:
    return "" if dtype == torch.float32 else f",scale_dtype={NAMES[dtype]}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("granularity", ["token", "tensor"])
@pytest.mark.parametrize("shape", [(5, 64), (1, 64), (2, 3, 47), (7, 1)], ids=str)
def test_torchao(shape: tuple[int, ...], granularity: str, dtype: torch.dtype) -> None:
    dims = [len(shape) - 1] if granularity == "token" else list(range(len(shape)))
    reading = read(lambda x: torchao_quantise(x, dims), values(*shape, dtype=dtype))
    (form,) = reading.forms("quantize")
    if shape == (7, 1) or shape == (1, 64):
        granularity = form.split(",")[1]  # one row or one column: both are the same numbers
    assert form == (
        f"float8_e4m3fn,{granularity},float32,div,448.0,none,0.0,div,-448.0,448.0"
        + scale_dtype(dtype)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("low", "high"), [(1e-4, 50.0), (1e-4, None), (None, 0.3), (2.0, 2.0)], ids=str
)
def test_torchao_bounds(low: float | None, high: float | None, dtype: torch.dtype) -> None:
    """Bounds are what the dtype of the values makes of them."""
    reading = read(lambda x: torchao_quantise(x, [1], (low, high)), values(9, 64, dtype=dtype))
    (form,) = reading.forms("quantize")

    def rounded(value: float) -> float:
        wide = dtype == torch.float32
        return value if wide else float(torch.tensor(value, dtype=dtype))

    floor = "none,0.0" if low is None else f"amax,{rounded(low)!r}"
    ceiling = "" if high is None else f",ceiling={rounded(high)!r}"
    assert form == (
        f"float8_e4m3fn,token,float32,div,448.0,{floor},div,-448.0,448.0"
        f"{scale_dtype(dtype)}{ceiling}"
    )


def test_where_torchao_rounds_its_scale_matters() -> None:
    """Read with a float32 scale the codes would be others: the form is not decoration."""
    x = values(64, 256)
    ours = run(read(lambda x: torchao_quantise(x, [1]), x).after, x)

    def wide(x: Tensor) -> tuple[Tensor, ...]:
        scale = x.float().abs().amax(-1, keepdim=True) / 448.0
        return (x.float() / scale).clamp(-448, 448).to(E4), scale

    other = run(read(wide, x).after, x)
    different = (ours[0].view(torch.uint8) != other[0].view(torch.uint8)).float().mean()
    assert 0.001 < different < 0.2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 64), (1, 64), (2, 3, 47), (7, 1), (64,)], ids=str)
def test_compressed_tensors(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = values(*shape, dtype=dtype)
    reading = read(without_zero_rows, x)
    assert reading.forms("quantize") == [
        "float8_e4m3fn,token,float32,div,448.0,amax_zero,1.0,div,-448.0,448.0"
    ]
    x[..., 0] = torch.nan
    reading.check(x)


def test_symbolic_rows() -> None:
    for fn in (without_zero_rows, lambda x: torchao_quantise(x, [1])):
        reading = read(fn, values(6, 48), dynamic=(0,))
        assert len(reading.forms("quantize")) == 1
        for rows in (1, 4):
            reading.check(values(rows, 48, seed=rows))


# ---- near misses -------------------------------------------------------------------------------


def _codes(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(-448, 448).to(E4)


def per_column(x: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    return torchao_quantise(x, [0])


def of_another(x: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    scale = (z.abs().amax(1, keepdim=True) / 448.0).float()
    return _codes(x, scale), scale


def of_other_rows(x: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    scale = (x.view(-1, x.shape[0]).abs().amax(1, keepdim=True)[: x.shape[0]] / 448.0).float()
    return _codes(x, scale), scale


def rounded_twice(x: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    scale = (x.abs().amax(1, keepdim=True) / 448.0).half().float()
    return _codes(x, scale), scale


def signed_maximum(x: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    scale = (x.amax(1, keepdim=True) / 448.0).float()
    return _codes(x, scale), scale


def crossed_bounds(x: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    return torchao_quantise(x, [1], (3.0, 1.0))


def uneven_clamp(x: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    scale = (x.abs().amax(1, keepdim=True) / 448.0).float()
    return (x.float() / scale).clamp(-448, 400).to(E4), scale


def _where(x: Tensor, condition: Callable[[Tensor], Tensor], other: Tensor) -> tuple[Tensor, ...]:
    amax = x.float().abs().amax(-1)
    scale = torch.where(condition(amax), amax, other) / 448.0
    return _codes(x, scale.unsqueeze(-1)), scale


def not_below_zero(x: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    return _where(x, lambda amax: amax >= 0, x.new_ones(x.shape[0], dtype=torch.float32))


def above_a_floor(x: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    return _where(x, lambda amax: amax > 1e-3, x.new_ones(x.shape[0], dtype=torch.float32))


def another_tensor(x: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    return _where(x, lambda amax: amax > 0, z.float()[:, 0])


def another_condition(x: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    return _where(x, lambda amax: z.float()[:, 0] > 0, x.new_ones(x.shape[0], dtype=torch.float32))


def over_columns(x: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    amax = x.float().abs().amax(0)
    scale = torch.where(amax > 0, amax, torch.ones_like(amax)) / 448.0
    return _codes(x, scale.unsqueeze(0)), scale


NEAR_MISSES = (
    per_column,
    of_another,
    of_other_rows,
    rounded_twice,
    signed_maximum,
    crossed_bounds,
    uneven_clamp,
    not_below_zero,
    above_a_floor,
    another_tensor,
    another_condition,
    over_columns,
)


@pytest.mark.parametrize("miss", NEAR_MISSES, ids=lambda fn: fn.__name__)
def test_near_miss(miss: Callable[..., tuple[Tensor, ...]]) -> None:
    """Not read as a scale of its own values; what it nearly is, is read (the tests above).

    Refused with FP8-R001, or taken for the quantise with a given scale that it is.
    """
    x, z = values(8, 64), values(8, 64, seed=9) + 1
    reading = Reading(trace(miss, x, z))
    assert [form for form in reading.forms("quantize") if ",given," not in form] == []
    if reading.forms("quantize"):
        reading.check(x, z)
    else:
        assert [entry[:2] for entry in reading.unread] == [("quantize", "FP8-R001")]
