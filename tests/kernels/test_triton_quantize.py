"""The Triton quantise in Triton's interpreter, its limits, and its launch shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from graphs import values
from hypothesis import given
from hypothesis import strategies as st
from producer_checks import assert_exact

from fp8pass.errors import UnsupportedError
from fp8pass.kernels.triton_limits import MAX_ROW, MAX_WIDTH, why_not_quantize
from fp8pass.ops import SPECS, QuantForm, dynamic_form, static_form
from fp8pass.ops.quantize import QUANT_FORMS, reference

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
STATIC, TOKEN, TENSOR = static_form(), dynamic_form("token"), dynamic_form("tensor")


@pytest.fixture(scope="module")
def kernels(interpreted: Callable[[str], ModuleType]) -> ModuleType:
    return interpreted("quantize")


def check(
    kernels: ModuleType, x: torch.Tensor, form: QuantForm, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """The same bits as the reference: a maximum and a quotient leave no room. Returns the codes."""
    if form.static and scale is None:
        scale = torch.tensor(0.37)
    got, want = kernels.quantize(x, scale, str(form)), reference(x, scale, str(form))
    assert_exact(got, want, form=str(form), shape=tuple(x.shape))
    assert torch.equal(got[0].float().nan_to_num(999.0), want[0].float().nan_to_num(999.0))
    assert got[1].equal(want[1]) or (got[1].isnan() == want[1].isnan()).all()
    return got[0]


def test_inputs_of_the_record(kernels: ModuleType) -> None:
    taken = set()
    for x, scale, form, *_ in SPECS["quantize"].inputs(torch.Generator().manual_seed(3)):
        if why_not_quantize(form, x.shape[-1], x.dtype) is None:
            taken.add(form)
            check(kernels, x, QuantForm.parse(form), scale)
    assert taken >= set(QUANT_FORMS)


FORMS = {
    "reciprocal": replace(TOKEN, apply="mul_recip"),
    "static reciprocal": replace(STATIC, apply="mul_recip"),
    "factor": replace(TOKEN, scale="mul", qmax=1 / 448),
    "floor of amax": replace(TOKEN, floor="amax", floor_value=1e-4),
    "no floor": replace(TENSOR, floor="none", floor_value=0.0),
    "narrow clamp": replace(TOKEN, lo=-240.0, hi=240.0),
    "one-sided clamp": replace(STATIC, lo=0.0, hi=224.0),
    "e5m2 token": dynamic_form("token", E5),
    "e5m2 tensor": dynamic_form("tensor", E5),
    "e5m2 static": static_form(E5),
    "bf16 token": replace(TOKEN, compute=BF16),
    "bf16 tensor": replace(TENSOR, compute=BF16),
    "bf16 static": replace(STATIC, compute=BF16),
    "fp16 static reciprocal": replace(STATIC, compute=F16, apply="mul_recip"),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(kernels: ModuleType, name: str) -> None:
    for dtype in (BF16, F16, F32):
        check(kernels, values(3, 72, dtype=dtype), FORMS[name])
    if FORMS[name].static:
        check(kernels, values(3, 72), FORMS[name], torch.tensor([0.01]))


@pytest.mark.parametrize("form", [STATIC, TOKEN, TENSOR, FORMS["no floor"]], ids=str)
def test_special_values(kernels: ModuleType, form: QuantForm) -> None:
    """NaN, infinities, zeros and rows of very small numbers, alone in their row and not."""
    x = values(9, 40, dtype=F32)
    x[1, 3], x[2, 5], x[3, 7], x[4, :2] = math.nan, math.inf, -math.inf, torch.tensor([-0.0, 0.0])
    x[5], x[6], x[7] = 0.0, x[6] * 1e-30, x[7] * 1e30
    x[8, 0], x[8, 1] = math.inf, math.nan
    for row in x.unsqueeze(1):
        check(kernels, row, form)
    codes = check(kernels, x, form)
    if form.granularity == "token":
        assert codes[1].float().isnan().all() and not codes[4:7].float().isnan().any()


@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-25, 1e25, math.inf, math.nan])
def test_extreme_scales(kernels: ModuleType, scale: float) -> None:
    x = values(2, 40, dtype=F32)
    for factor in (1.0, scale if math.isfinite(scale) else 1.0):
        check(kernels, x * factor, STATIC, torch.tensor(scale))


def test_layouts(kernels: ModuleType) -> None:
    wide = values(6, 100)
    cube = values(2, 3, 4, 32)
    for form in (STATIC, TOKEN, TENSOR):
        for x in (
            wide[:, 5:37],  # a pitch, and an odd start
            wide[::2, :32],
            cube[:, :, 1:3],
            cube.transpose(0, 1),  # no single pitch
            wide[:, :64:2],  # a last dim with a stride
            wide[:, :1],
            cube[0, 0, 0],  # one row, one dim
        ):
            check(kernels, x, form)


def test_no_rows(kernels: ModuleType) -> None:
    x = torch.empty(0, 64, dtype=BF16)
    for form in (STATIC, TOKEN):
        check(kernels, x, form)
    q, scale = kernels.quantize(x, None, str(TENSOR))  # the reference has no maximum to take
    assert q.shape == (0, 64) and scale.item() == torch.tensor(1e-12).item()


def test_many_programs_for_one_scale(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """More pieces than programs: each takes several; and several chunks to a piece."""
    host = kernels.host
    monkeypatch.setattr(host, "PARTIALS", 4)
    monkeypatch.setattr(host, "piece_shape", lambda width, rows: host.Shape(1, 16, 2))
    for form in (TENSOR, STATIC):
        check(kernels, values(7, 72), form)
    monkeypatch.setattr(host, "piece_shape", lambda width, rows: host.Shape(1, 16, 2, 3))
    monkeypatch.setattr(host, "row_shape", lambda width, rows: host.Shape(1, 16, 5, 3))
    for form in (TENSOR, STATIC, TOKEN):
        check(kernels, values(7, 72), form)


# ---- refusals -----------------------------------------------------------------------------------

REFUSED = {
    "float8_e4m3fnuz": (replace(STATIC, dtype=torch.float8_e4m3fnuz, lo=-240, hi=240), 64, BF16),
    "float64": (STATIC, 64, torch.float64),
    "not known": (STATIC, None, BF16),
    "of 0 values": (STATIC, 0, BF16),
    f"{MAX_ROW + 1}": (TOKEN, MAX_ROW + 1, BF16),
    f"{MAX_WIDTH + 1}": (STATIC, MAX_WIDTH + 1, BF16),
    "cannot hold": (replace(STATIC, hi=500.0), 64, BF16),
    "rounds": (replace(STATIC, compute=BF16, hi=447.0), 64, BF16),
    "constant 0": (replace(TOKEN, qmax=0.0), 64, BF16),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused_with_a_reason(words: str) -> None:
    form, width, dtype = REFUSED[words]
    why = why_not_quantize(str(form), width, dtype)
    assert why is not None and words in why


def test_unknown_forms_are_refused() -> None:
    assert "parts" in (why_not_quantize("nonsense", 64, BF16) or "")


def test_what_is_taken() -> None:
    for form in (*FORMS.values(), STATIC, TOKEN, TENSOR):
        assert why_not_quantize(str(form), MAX_ROW, BF16) is None
    assert why_not_quantize(str(TENSOR), 10 * MAX_ROW, F32) is None


def test_calls_are_refused_in_the_same_words(kernels: ModuleType) -> None:
    x = values(2, 16)
    fnuz = REFUSED["float8_e4m3fnuz"][0]
    with pytest.raises(UnsupportedError, match="float8_e4m3fnuz"):
        kernels.quantize(x, torch.tensor(1.0), str(fnuz))
    with pytest.raises(UnsupportedError, match="not known"):
        kernels.quantize(torch.tensor(1.0), torch.tensor(1.0), str(STATIC))
    for bad in (torch.ones(2), torch.ones((), dtype=torch.float64)):
        with pytest.raises(UnsupportedError, match="scale of shape"):
            kernels.quantize(x, bad, str(STATIC))
    for scale, form in ((None, STATIC), (torch.tensor(1.0), TOKEN)):
        with pytest.raises(ValueError, match="disagree"):
            kernels.quantize(x, scale, str(form))


# ---- launch shapes ------------------------------------------------------------------------------


@given(width=st.integers(1, MAX_ROW), rows=st.integers(1, 10**6))
def test_row_shapes(interpreted: Callable[[str], ModuleType], width: int, rows: int) -> None:
    host = interpreted("launch")
    shape = host.row_shape(width, rows)
    assert shape.warps in (1, 2, 4, 8, 16, 32)
    assert shape.chunk & (shape.chunk - 1) == 0 and shape.chunk >= 16
    assert (shape.chunks - 1) * shape.chunk < width <= shape.chunks * shape.chunk
    # registers: values that a thread keeps of the row
    assert shape.chunk * shape.chunks <= 32 * shape.warps * 72
    constants = host.row_constants(width, shape)
    assert constants["LIMIT"] == (0 if width == shape.chunk * shape.chunks else width)


@given(width=st.integers(1, 10**6), rows=st.integers(1, 10**6))
def test_piece_shapes(interpreted: Callable[[str], ModuleType], width: int, rows: int) -> None:
    host = interpreted("launch")
    shape = host.piece_shape(width, rows)
    constants = host.piece_constants(width, shape)
    piece = shape.chunk * shape.chunks
    assert (constants["PER_ROW"] - 1) * piece < width <= constants["PER_ROW"] * piece
    assert (constants["LIMIT"] == 0) == (width % piece == 0)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (TOKEN, True),
        (dynamic_form("tensor", E5), True),
        (replace(TOKEN, scale="mul", qmax=1 / 448), True),
        (replace(TOKEN, floor="amax"), True),
        (STATIC, False),
        (replace(TOKEN, floor="none"), False),
        (replace(TOKEN, floor_value=1e-30), False),
        (replace(TOKEN, compute=F16), False),
        (replace(TOKEN, scale="mul", qmax=1.0), False),
    ],
    ids=str,
)
def test_ordinary_scales(
    interpreted: Callable[[str], ModuleType], form: QuantForm, expected: bool
) -> None:
    """The quotient without its safeguards is only for forms whose scales are bounded."""
    assert interpreted("launch").ordinary(form) is expected
