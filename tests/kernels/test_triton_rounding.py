"""Roundings of the Triton kernels, as their interpreter computes them, against torch's casts."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from producer_checks import code_steps

tl = pytest.importorskip("triton.language")

# numpy's, of the interpreter, where a test asks for infinities
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ALL_BF16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16)

# Set for the kernels below by the fixture: functions of the interpreted copy.
widen = narrow = to_fp8 = divisor = divided = silu = inverse_root = None


@pytest.fixture(scope="module")
def rounding(interpreted: Callable[[str], ModuleType]) -> ModuleType:
    module = interpreted("rounding")
    for name in ("widen", "narrow", "to_fp8", "divisor", "divided", "silu", "inverse_root"):
        globals()[name] = getattr(module, name)
    return module


def run(kernel: Any, x: torch.Tensor, out: torch.Tensor, *constants: Any) -> torch.Tensor:
    """``kernel`` on all of ``x`` in one program, padded to a power of two."""
    from triton.runtime.interpreter import InterpretedFunction

    size = 1 << (x.numel() - 1).bit_length()
    padded = torch.zeros(size, dtype=x.dtype)
    padded[: x.numel()] = x.flatten()
    result = torch.empty(size, dtype=out.dtype)
    InterpretedFunction(kernel)[(1,)](padded, result, size, *constants)
    return result[: x.numel()].view(x.shape)


def _widen(x_ptr, out_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, N)
    tl.store(out_ptr + places, widen(tl.load(x_ptr + places), False))


def _narrow(x_ptr, out_ptr, N: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, N)
    tl.store(out_ptr + places, narrow(tl.load(x_ptr + places), DTYPE, False))


def _to_fp8(x_ptr, out_ptr, N: tl.constexpr, FP8: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, N)
    tl.store(out_ptr + places, to_fp8(tl.load(x_ptr + places), FP8, LO, HI, False))


def _silu(x_ptr, out_ptr, N: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, N)
    tl.store(out_ptr + places, silu(tl.load(x_ptr + places), KIND, False))


def _root(x_ptr, out_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, N)
    tl.store(out_ptr + places, inverse_root(tl.load(x_ptr + places)))


def _divide(x_ptr, scale_ptr, out_ptr, N: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, N)
    first, second, third = divisor(tl.load(scale_ptr), False, False)
    x = tl.load(x_ptr + places)
    tl.store(out_ptr + places, divided(x, first, second, third, False, LO, HI, False))


def random_float32(count: int) -> torch.Tensor:
    """Random bit patterns, and numbers half-way between two of bf16, fp16 and fp8."""
    g = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=g).to(torch.int32)
    near = torch.randint(-(2**31), 2**31, (count,), generator=g).to(torch.int32)
    near = near & 0x4FFFFFFF | 0x38000000  # around 1
    halves = [near & ~((1 << k) - 1) | 1 << (k - 1) for k in (13, 16, 20, 21)]
    edges = torch.tensor(
        [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 3.4e38, 65519.0, 65520.0]
    )
    return torch.cat([v.view(F32) for v in (bits, near, *halves)] + [edges])


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal, zeros with their sign, NaN with NaN."""
    numbers = torch.equal(got.isnan(), want.isnan()) and torch.equal(
        got.nan_to_num(nan=7.0), want.nan_to_num(nan=7.0)
    )
    signed = ~want.isnan()
    return numbers and torch.equal(got.signbit()[signed], want.signbit()[signed])


def test_widen(rounding: ModuleType) -> None:
    assert same(run(_widen, ALL_BF16, torch.empty(0)), ALL_BF16.float())


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_narrow(rounding: ModuleType, dtype: torch.dtype) -> None:
    x = random_float32(2048)
    names = {BF16: tl.bfloat16, F16: tl.float16, F32: tl.float32}
    assert same(
        run(_narrow, x, torch.empty(0, dtype=dtype), names[dtype]).float(), x.to(dtype).float()
    )


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [E4, E5], ids=str)
def test_to_fp8(rounding: ModuleType, dtype: torch.dtype, fraction: float) -> None:
    top = torch.finfo(dtype).max * fraction
    x = torch.cat([ALL_BF16.float(), random_float32(4096)])
    fp8 = tl.float8e4nv if dtype == E4 else tl.float8e5
    got = run(_to_fp8, x, torch.empty(0, dtype=torch.uint8), fp8, -top, top)
    assert int(code_steps(got.view(dtype), x.clamp(-top, top).to(dtype)).max()) == 0


@pytest.mark.parametrize("kind", ["div", "sigmoid"])
def test_silu(rounding: ModuleType, kind: str) -> None:
    x = torch.cat([torch.linspace(-120, 120, 2000), torch.tensor([math.inf, -math.inf, math.nan])])
    got = run(_silu, x, torch.empty(0), kind)
    want = x / (1 + (-x).exp()) if kind == "div" else x * x.sigmoid()
    torch.testing.assert_close(got, want, rtol=3e-7, atol=0.0, equal_nan=True)


def test_inverse_root(rounding: ModuleType) -> None:
    x = torch.tensor([0.0, 1e-45, 1e-39, 2.0**-101, 2.0**-100, 1e-6, 3.0, 3e38, math.inf, -1.0])
    got = run(_root, x, torch.empty(0))
    torch.testing.assert_close(got, x.rsqrt(), rtol=2e-7, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-30, 0.01, 3.0, 1e30, math.inf, math.nan])
def test_divided(rounding: ModuleType, scale: float) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    x, s = random_float32(256), torch.tensor(scale)
    size = 1 << (x.numel() - 1).bit_length()
    padded, out = torch.zeros(size), torch.empty(size)
    padded[: x.numel()] = x
    InterpretedFunction(_divide)[(1,)](padded, s, out, size, -448.0, 448.0)
    quotient = (padded / s).clamp(-448, 448)
    far = quotient.isnan() | (quotient.abs() >= 2.0**-18)
    assert far.any() and same(out.clamp(-448, 448)[far], quotient[far])
    # the others are zero in every fp8 dtype
    assert torch.equal(out.signbit()[~far], quotient.signbit()[~far])
    assert bool((out[~far].abs() < 2.0**-17).all())


def test_what_compiled_kernels_find_is_untouched(rounding: ModuleType) -> None:
    """Neither the interpreted copies nor the interpreter's patches stay in the process."""
    from triton.runtime.interpreter import InterpretedFunction

    run(_widen, ALL_BF16[:16], torch.empty(0))
    from fp8pass.kernels import triton_rounding as usual

    assert usual is not rounding
    assert isinstance(rounding.widen, InterpretedFunction)
    assert type(usual.widen).__name__ == (
        "JITFunction" if usual.NATIVE.value else "InterpretedFunction"
    )
    assert "interpreter" not in repr(tl.reduce) and tl.reduce.__module__ == "triton.language.core"
