"""Every form of a quantise in the Triton producers, in Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from graphs import values, vector
from hypothesis import given, settings
from hypothesis import strategies as st
from quantise_forms import FORMS, dequantised, inside, int8, random_given, same, slack

from fp8pass.errors import UnsupportedError
from fp8pass.kernels.triton_limits import why_not_quantize
from fp8pass.ops import SPECS, QuantForm, static_form
from fp8pass.ops.quantize import reference

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
Kernels = Callable[[str], ModuleType]


def check(
    interpreted: Kernels,
    x: torch.Tensor,
    form: QuantForm,
    scale: torch.Tensor | None = None,
) -> None:
    """The bits of the reference, and codes times scales near the values that were quantised."""
    if scale is None:
        scale = random_given(form, tuple(x.shape))
    got, want = (f(x, scale, str(form)) for f in (interpreted("quantize").quantize, reference))
    for a, b in zip(got, want, strict=True):
        same(a, b)
    used = got[1] if scale is None else scale
    if form.floor != "divisor" and x.numel() and used.isfinite().all() and (used > 1e-30).all():
        wide = x.double()
        near = (dequantised(got[0], used, form) - wide).abs() <= slack(form, wide, used)
        assert bool(near[inside(form, wide, used)].all()), str(form)


@pytest.mark.parametrize("name", FORMS)
def test_quantize(interpreted: Kernels, name: str) -> None:
    form = FORMS[name]
    for dtype in (BF16, F16, F32):
        x = values(4, 96, dtype=dtype)
        x[1], x[2, :16] = 0, -0.0
        for rows in (x, x[:1], x[2, :]):
            check(interpreted, rows, form)
        if form.granularity != "tensor" or form.static:
            check(interpreted, x[:0], form)
    wide, cube = values(6, 100), values(2, 3, 4, 32)
    for x in (wide[:, 5:37], wide[::2, :64], cube[:, :, 1:3], cube.transpose(0, 1), wide[:, :64:2]):
        got = interpreted("quantize").quantize(x, random_given(form, tuple(x.shape)), str(form))
        plain = x.contiguous()
        want = reference(plain, random_given(form, tuple(x.shape)), str(form))
        for a, b in zip(got, want, strict=True):
            same(a, b)


@pytest.mark.parametrize("name", FORMS)
def test_special_values(interpreted: Kernels, name: str) -> None:
    x = values(8, 32, dtype=F32)
    x[1, 3], x[2, 5], x[3, 7] = math.nan, math.inf, -math.inf
    x[4], x[5], x[6] = 0.0, x[5] * 1e-30, x[6] * 1e30
    form = FORMS[name]
    scale = random_given(form, (1, 32))
    for row in x.unsqueeze(1):
        got = interpreted("quantize").quantize(row, scale, str(form))
        want = reference(row, scale, str(form))
        for a, b in zip(got, want, strict=True):
            same(a, b)


@pytest.mark.parametrize("name", FORMS)
def test_producers(interpreted: Kernels, name: str) -> None:
    form, weight = FORMS[name], vector(96, BF16)
    x, residual = values(3, 96), values(3, 96, seed=9)
    gate, up = values(3, 192).chunk(2, -1)
    scale = random_given(form, (3, 96))
    norm, silu = "mean,rsqrt,after_cast,bfloat16", "div,bfloat16,bfloat16"
    for module, op, inputs, text in (
        ("norm", "rms_norm_quant", (x, weight, scale, 1e-6), norm),
        ("norm", "add_rms_norm_quant", (x, residual, weight, scale, 1e-6), norm),
        ("activation", "silu_mul_quant", (gate, up, scale), silu),
        ("activation", "act_mul_quant", (gate, None, scale), "relu2,bfloat16,bfloat16"),
    ):
        args = (*inputs, text, str(form), True)
        got, want = getattr(interpreted(module), op)(*args), SPECS[op].reference(*args)
        for a, b in zip(got[:2], reference(got[2], scale, str(form)), strict=True):
            same(a, b)
        assert (got[2] != want[2]).sum() <= max(1, want[2].numel() // 200)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMS)),
    rows=st.integers(1, 4),
    groups=st.integers(1, 6),
    seed=st.integers(0, 10**6),
    size=st.sampled_from([1e-6, 1.0, 500.0]),
    dtype=st.sampled_from([BF16, F32]),
)
def test_any_rows(
    interpreted: Kernels,
    name: str,
    rows: int,
    groups: int,
    seed: int,
    size: float,
    dtype: torch.dtype,
) -> None:
    check(interpreted, (values(rows, 16 * groups, dtype=F32, seed=seed) * size).to(dtype),
          FORMS[name])  # fmt: skip


def test_ties_go_to_even(interpreted: Kernels) -> None:
    form = int8(static_form())
    x = (torch.arange(-300, 301, dtype=F32) / 2).reshape(1, -1)
    codes = interpreted("quantize").quantize(x, torch.ones(()), str(form))[0]
    assert torch.equal(codes, x.round().clamp(-128, 127).to(torch.int8))


def test_powers_of_two_are_exact(interpreted: Kernels) -> None:
    """A largest value that is 448 times a power of two has that power as its scale."""
    form = FORMS["power group, no floor"]
    x = torch.zeros(240, 16)
    x[:, 0] = 448.0 * torch.ldexp(torch.ones(240), torch.arange(-125, 115))
    scale = interpreted("quantize").quantize(x, None, str(form))[1]
    assert torch.equal(scale[:, 0], x[:, 0] / 448)
    same(scale, reference(x, None, str(form))[1])


# ---- limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_taken(name: str) -> None:
    assert why_not_quantize(str(FORMS[name]), 96, BF16) is None


def test_given_scales_of_other_shapes_are_refused(interpreted: Kernels) -> None:
    quantize, x = interpreted("quantize").quantize, values(3, 32)
    for name, bad in (
        ("given token", torch.ones(3)),
        ("given token", torch.ones(1, 1)),
        ("given group", torch.ones(3, 1)),
        ("given group", torch.ones(3, 2, dtype=torch.float64)),
    ):
        with pytest.raises(UnsupportedError, match="scale of shape"):
            quantize(x, bad, str(FORMS[name]))
    fine = quantize(x, torch.ones(3, 1), str(FORMS["given token"]))
    assert fine[0].shape == (3, 32)
