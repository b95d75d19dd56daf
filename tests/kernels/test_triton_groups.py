"""A scale for each group of neighbours: the Triton producers in Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from types import ModuleType

import pytest
import torch
from graphs import values, vector
from producer_checks import assert_exact

from fp8pass.errors import UnsupportedError
from fp8pass.kernels.triton_limits import (
    MAX_ROW,
    why_not_activation,
    why_not_norm,
    why_not_quantize,
)
from fp8pass.ops import SPECS, QuantForm, dynamic_form, static_form
from fp8pass.ops.quantize import reference

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

E5 = torch.float8_e5m2
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LAYOUTS = ("row", "col", "tma")
G16, G32, G64 = (dynamic_form(f"group{n}") for n in (16, 32, 64))
#: (width, group): rows of one chunk, of one with groups beyond the row, and of several.
SIZES = ((32, 16), (64, 64), (96, 32), (160, 16), (192, 64))

Kernels = Callable[[str], ModuleType]


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """The same bits; of NaN the sign is free."""
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    a, b = got.float(), want.float()
    assert torch.equal(a.nan_to_num(999.0), b.nan_to_num(999.0))
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a.signbit()[~a.isnan()], b.signbit()[~b.isnan()])


def check(interpreted: Kernels, x: torch.Tensor, form: QuantForm) -> torch.Tensor:
    """A quantise alone has the same bits as the reference. Returns the scales."""
    got = interpreted("quantize").quantize(x, None, str(form))
    want = reference(x, None, str(form))
    for a, b in zip(got, want, strict=True):
        same(a, b)
    scale: torch.Tensor = got[1]
    return scale


def rows_of(rows: int, width: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return values(max(rows, 1), width, dtype=dtype, seed=seed)[:rows]


# ---- quantise -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("width", "group"), SIZES)
def test_quantize(interpreted: Kernels, width: int, group: int, layout: str) -> None:
    form = replace(dynamic_form(f"group{group}"), layout=layout)
    for rows, dtype in product((0, 1, 3), (BF16, F16, F32)):
        scale = check(interpreted, rows_of(rows, width, dtype), form)
        assert scale.shape == (rows, width // group)


def test_strides_of_the_scale(interpreted: Kernels) -> None:
    x = values(5, 96)
    for layout, strides in zip(LAYOUTS, ((3, 1), (1, 5), (1, 8)), strict=True):
        assert check(interpreted, x, replace(G32, layout=layout)).stride() == strides
        cube = values(2, 3, 64)
        check(interpreted, cube, replace(G16, layout=layout))
        check(interpreted, cube[0, 0], replace(G16, layout=layout))
        check(interpreted, cube[:, :1], replace(G16, layout=layout))


FORMS = {
    "reciprocal": replace(G32, apply="mul_recip"),
    "factor": replace(G32, scale="mul", qmax=1 / 448),
    "floor of amax": replace(G32, floor="amax", floor_value=1e-4),
    "no floor": replace(G32, floor="none", floor_value=0.0),
    "no floor, reciprocal": replace(G16, floor="none", floor_value=0.0, apply="mul_recip"),
    "narrow clamp": replace(G16, lo=-240.0, hi=240.0),
    "e5m2": dynamic_form("group16", E5),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(interpreted: Kernels, name: str) -> None:
    for dtype, layout in zip((BF16, F16, F32), LAYOUTS, strict=True):
        x = values(3, 96, dtype=dtype)
        x[1], x[2, :32] = 0, -0.0
        check(interpreted, x, replace(FORMS[name], layout=layout))


@pytest.mark.parametrize("form", [G16, FORMS["no floor"], FORMS["reciprocal"]], ids=str)
def test_special_values(interpreted: Kernels, form: QuantForm) -> None:
    """NaN and infinities stay within their group; very small and very large values."""
    x = values(9, 96, dtype=F32)
    x[1, 3], x[2, 35], x[3, 70] = math.nan, math.inf, -math.inf
    x[4], x[5], x[6] = 0.0, x[5] * 1e-30, x[6] * 1e30
    x[7, 0], x[7, 1], x[8, ::32] = math.inf, math.nan, math.nan
    for row in x.unsqueeze(1):
        check(interpreted, row, form)
    scale = check(interpreted, x, form)
    assert scale[1, 0].isnan() and scale[1, 2:].isfinite().all()
    assert scale[2].isinf().sum() == 1 and scale[8].isnan().sum() == 3


def test_strided_rows(interpreted: Kernels) -> None:
    wide, cube = values(6, 100), values(2, 3, 4, 32)
    for x in (wide[:, 5:37], wide[::2, :64], cube[:, :, 1:3], cube.transpose(0, 1),
              wide[:, :64:2], cube[0, 0, 0]):  # fmt: skip
        for layout in LAYOUTS:
            got = interpreted("quantize").quantize(x, None, str(replace(G16, layout=layout)))
            want = reference(x.contiguous(), None, str(replace(G16, layout=layout)))
            for a, b in zip(got, want, strict=True):
                same(a, b)


def test_several_pieces_and_programs(interpreted: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks wholly beyond the row, and programs that take several pieces or rows in turn."""
    host = interpreted("quantize").host
    monkeypatch.setattr(host, "piece_shape", lambda width, rows: host.Shape(1, 32, 2, 3))
    monkeypatch.setattr(host, "row_shape", lambda width, rows: host.Shape(1, 32, 4, 2))
    for layout in LAYOUTS:
        form = replace(G16, layout=layout)
        for width in (80, 96, 112, 128):
            check(interpreted, values(5, width), form)
        norm(interpreted, form, 5, 112)


# ---- producers ----------------------------------------------------------------------------------


def norm(
    interpreted: Kernels,
    form: QuantForm,
    rows: int,
    width: int,
    dtype: torch.dtype = BF16,
    special: bool = False,
) -> None:
    kernels, name = interpreted("norm"), str(dtype).removeprefix("torch.")
    x, residual = rows_of(rows, width, dtype), rows_of(rows, width, dtype, 9)
    if special:
        x[0], x[1, 3], x[2, 5], residual[0] = 0, math.nan, math.inf, 0
    weight = vector(width, dtype)
    for keep, where in product((True, False), ("after_cast", "before_cast")):
        rest = (weight, None, 1e-6, f"mean,rsqrt,{where},{name}", str(form), keep)
        for op, inputs in (("rms_norm_quant", (x,)), ("add_rms_norm_quant", (x, residual))):
            got = getattr(kernels, op)(*inputs, *rest)
            assert_exact(got, SPECS[op].reference(*inputs, *rest), op=op, form=rest[3])
            if keep:  # whatever the norm rounded to, its quantise has the bits of the reference
                for a, b in zip(got[:2], reference(got[2], None, str(form)), strict=True):
                    same(a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("width", "group"), SIZES[1:4])
def test_norms(interpreted: Kernels, width: int, group: int, layout: str) -> None:
    form = replace(dynamic_form(f"group{group}"), layout=layout)
    for rows, dtype in product((0, 1, 3), (BF16, F16)):
        norm(interpreted, form, rows, width, dtype)
    norm(interpreted, form, 4, width, special=True)


def activation(
    interpreted: Kernels,
    form: QuantForm,
    rows: int,
    width: int,
    dtype: torch.dtype = BF16,
    special: bool = False,
) -> None:
    kernels, name = interpreted("activation"), str(dtype).removeprefix("torch.")
    packed = rows_of(rows, 2 * width, dtype)
    if special:
        packed[0], packed[1, 3], packed[2, width + 5] = 0, math.nan, math.inf
    gate, up = packed.chunk(2, -1)
    for keep in (True, False):
        for op, other, act in (("silu_mul_quant", up, "div"), ("act_mul_quant", up, "gelu_tanh"),
                               ("act_mul_quant", None, "relu")):  # fmt: skip
            args = (gate, other, None, f"{act},{name},{name}", str(form), keep)
            got, want = getattr(kernels, op)(*args), SPECS[op].reference(*args)
            assert_exact(got, want, op=op, form=args[3])
            if keep:
                for a, b in zip(got[:2], reference(got[2], None, str(form)), strict=True):
                    same(a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("width", "group"), SIZES[1:4])
def test_activations(interpreted: Kernels, width: int, group: int, layout: str) -> None:
    form = replace(dynamic_form(f"group{group}"), layout=layout)
    for rows, dtype in product((0, 1, 3), (BF16, F16)):
        activation(interpreted, form, rows, width, dtype)
    activation(interpreted, form, 4, width, special=True)


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_producers(interpreted: Kernels, name: str) -> None:
    norm(interpreted, FORMS[name], 3, 96)
    activation(interpreted, FORMS[name], 3, 96)


# ---- limits -------------------------------------------------------------------------------------

REFUSED = {
    "groups of 8 values": (dynamic_form("group8"), 64),
    "groups of 48 values": (dynamic_form("group48"), 96),
    "groups of 512 values": (dynamic_form("group512"), 512),
    "in rows of 100": (G32, 100),
    "codes of torch.float8_e4m3fnuz": (
        replace(G32, dtype=torch.float8_e4m3fnuz, qmax=240.0, lo=-240.0, hi=240.0), 64,
    ),
    "with a zero point": (
        replace(static_form(), dtype=torch.int8, lo=-128.0, hi=127.0, zero="given"), 64,
    ),
    "bounded by a tensor": (replace(G32, upper="amax"), 64),
    "a cast to float8_e8m0fnu": (replace(G32, power="e8m0"), 64),
    "layout=col": (replace(dynamic_form("token"), layout="col"), 64),
    "not known": (G32, None),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_refused_with_a_reason(words: str) -> None:
    form, width = REFUSED[words]
    for why in (
        why_not_quantize(str(form), width, BF16),
        why_not_norm("mean,rsqrt,after_cast,bfloat16", str(form), width, BF16, None, BF16),
        why_not_activation("div,bfloat16,bfloat16", str(form), width, BF16, BF16),
    ):
        assert why is not None and words in why


def test_what_is_taken(interpreted: Kernels) -> None:
    for n, layout in product((16, 32, 64, 128, 256), LAYOUTS):
        form = str(replace(dynamic_form(f"group{n}"), layout=layout))
        assert why_not_quantize(form, 512, BF16) is None
        # element-wise kernels take any width, a norm keeps its row
        assert why_not_quantize(form, 4 * MAX_ROW, BF16) is None
        assert why_not_activation("div,bfloat16,bfloat16", form, 4 * MAX_ROW, BF16, BF16) is None
        norm_form = "mean,rsqrt,after_cast,bfloat16"
        assert why_not_norm(norm_form, form, MAX_ROW, BF16, None, BF16) is None
        assert why_not_norm(norm_form, form, 4 * MAX_ROW, BF16, None, BF16) is not None
    for form in FORMS.values():
        assert why_not_quantize(str(form), 96, BF16) is None
    with pytest.raises(UnsupportedError, match="in rows of 40"):
        interpreted("quantize").quantize(values(2, 40), None, str(G16))


def test_every_chunk_holds_whole_groups(interpreted: Kernels) -> None:
    host = interpreted("launch")
    for group, rows in product((16, 32, 64, 128, 256), (1, 128, 129, 4096)):
        for width in range(group, MAX_ROW + 1, group):
            assert host.row_shape(width, rows).chunk % group == 0
            assert host.piece_shape(width, rows).chunk % group == 0
