"""The Triton LayerNorm + quantise in Triton's interpreter, and its limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from types import ModuleType

import pytest
import torch
from graphs import values, vector
from hypothesis import given, settings
from hypothesis import strategies as st
from producer_checks import assert_exact, assert_layouts
from quantise_forms import FORMS, random_given, same

from fp8pass.errors import UnsupportedError
from fp8pass.kernels.triton_limits import MAX_ROW, why_not_layer_norm
from fp8pass.ops import SPECS, LayerNormForm, QuantForm, dynamic_form, static_form
from fp8pass.ops.quantize import reference

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
USUAL = "var_mean,rsqrt,before_cast,bfloat16"
TOKEN = str(dynamic_form("token"))


@pytest.fixture(scope="module")
def kernels(interpreted: Callable[[str], ModuleType]) -> ModuleType:
    return interpreted("layer_norm")


def check(
    kernels: ModuleType,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    form: str,
    quant: QuantForm,
    keep: bool = True,
    eps: float = 1e-5,
) -> None:
    """The contract against the reference, and the quantise bit for bit of what was normalised."""
    scale = random_given(quant, tuple(x.shape))
    args = (x, weight, bias, scale, eps, form, str(quant), keep)
    got = kernels.layer_norm_quant(*args)
    want = SPECS["layer_norm_quant"].reference(*args)
    if bias is None or want[2].dtype != F32:
        assert_exact(got, want, form=form, quant=str(quant))
    else:  # where product and bias cancel, the last bit of the mean is many of the result's
        assert keep
        assert_layouts(got, want)
    if keep and x.numel():
        for a, b in zip(got[:2], reference(got[2], scale, str(quant)), strict=True):
            same(a, b)
        close_to_float64(got[2], x, weight, bias, eps)


def close_to_float64(
    y: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> None:
    wide = x.double()
    want = torch.nn.functional.layer_norm(wide, x.shape[-1:], eps=eps)
    size = want.abs()
    if weight is not None:
        want, size = want * weight.double(), size * weight.double().abs()
    if bias is not None:
        want, size = want + bias.double(), size + bias.double().abs()
    # what is lost where x - mean cancels, and two or three roundings
    lost = wide.abs().amax(-1, keepdim=True) * 2.0**-22
    lost = lost * (wide.var(-1, correction=0, keepdim=True) + eps).rsqrt()
    step = 2.0**-7 if BF16 in (y.dtype, x.dtype) else 2.0**-9 if F16 in (y.dtype, x.dtype) else 0.0
    slack = size * (3 * step + 2.0**-20) + lost * (1.0 if weight is None else weight.double().abs())
    finite = want.isfinite()
    assert bool(((y.double() - want).abs() <= slack + 1e-7)[finite].all())


AFFINES = (
    ("none", None, None),
    ("before_cast", BF16, BF16),
    ("before_cast", F32, None),
    ("before_cast", None, F32),
    ("after_cast", BF16, BF16),
    ("after_cast", BF16, F32),
    ("after_cast", F32, F32),
    ("after_cast", None, BF16),
    ("after_cast", F16, None),
)


def operands(width: int, dtypes: tuple[torch.dtype | None, ...]) -> list[torch.Tensor | None]:
    return [
        None if dtype is None else (vector(width, F32, seed) * 0.5 + i).to(dtype)
        for i, (seed, dtype) in enumerate(zip((3, 4), dtypes, strict=True))
    ]


@pytest.mark.parametrize("affine", AFFINES, ids=str)
def test_forms_of_the_norm(
    kernels: ModuleType, affine: tuple[str, torch.dtype | None, torch.dtype | None]
) -> None:
    where, *dtypes = affine
    for variance, root, mid in product(
        LayerNormForm.VARIANCES, LayerNormForm.ROOTS, ("bfloat16", "float32")
    ):
        form = f"{variance},{root},{where},{mid}"
        check(kernels, values(3, 72, dtype=BF16), *operands(72, tuple(dtypes)), form,
              dynamic_form("token"))  # fmt: skip


def test_inputs_of_the_record(kernels: ModuleType) -> None:
    for args in SPECS["layer_norm_quant"].inputs(torch.Generator().manual_seed(3)):
        got, want = kernels.layer_norm_quant(*args), SPECS["layer_norm_quant"].reference(*args)
        assert_exact(got, want, form=args[5])


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_the_quantise(kernels: ModuleType, name: str) -> None:
    both = operands(96, (BF16, BF16))
    for rows, dtype, keep in ((3, BF16, True), (1, F16, True), (4, F32, False)):
        check(kernels, values(rows, 96, dtype=dtype), *both, USUAL, FORMS[name], keep)


def test_rows(kernels: ModuleType) -> None:
    both = operands(64, (BF16, BF16))
    wide, cube = values(6, 100), values(2, 3, 4, 64)
    for quant in (dynamic_form("token"), dynamic_form("group16"), static_form(),
                  dynamic_form("tensor")):  # fmt: skip
        for x in (wide[:, 5:69], wide[::2, :64], cube, cube[:, :, 1:3], cube.transpose(0, 1),
                  cube[0, 0, 0], wide[:1, :64]):  # fmt: skip
            check(kernels, x, *both, USUAL, quant)
        if quant.granularity != "tensor" or quant.static:
            check(kernels, wide[:0, :64], *both, USUAL, quant)
    strided = values(64, 2)[:, 0]
    check(kernels, wide[:, :64], strided, strided, USUAL, dynamic_form("token"))


def test_several_chunks_and_programs(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    host = kernels.host
    monkeypatch.setattr(host, "row_shape", lambda width, rows: host.Shape(1, 32, 4, 2))
    for width, quant in product((100, 112, 128), (TOKEN, str(dynamic_form("tensor")))):
        both = operands(width, (BF16, F32))
        check(kernels, values(5, width), *both, USUAL, QuantForm.parse(quant))
    check(kernels, values(5, 112), None, None, "mean_square,rsqrt,none,bfloat16",
          dynamic_form("group16"))  # fmt: skip


def test_special_values(kernels: ModuleType) -> None:
    """NaN and infinities stay in their row; rows of one value, with and without epsilon."""
    x = values(7, 40, dtype=F32)
    x[0], x[1], x[2, 3], x[3, 5] = 0.0, 3.0, math.nan, math.inf
    x[5] *= 1e-20
    for quant in (dynamic_form("token"), static_form()):
        for eps in (1e-5, 0.0):
            args = (x, None, None, random_given(quant, (7, 40)), eps,
                    "var_mean,rsqrt,none,float32", str(quant), False)  # fmt: skip
            got = kernels.layer_norm_quant(*args)
            want = SPECS["layer_norm_quant"].reference(*args)
            assert torch.equal(got[0].float().isnan(), want[0].float().isnan())
            assert not got[0][4:].float().isnan().any() and got[0][2].float().isnan().all()


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 5),
    width=st.integers(1, 12).map(lambda n: 16 * n),
    seed=st.integers(0, 10**6),
    shift=st.sampled_from([0.0, 1.0, 100.0]),
    name=st.sampled_from(sorted(n for n in FORMS if "group32" not in str(FORMS[n]))),
)
def test_any_rows(
    interpreted: Callable[[str], ModuleType],
    rows: int,
    width: int,
    seed: int,
    shift: float,
    name: str,
) -> None:
    x = values(rows, width, dtype=F32, seed=seed) + shift
    both = operands(width, (F32, F32))
    form = "var_mean,rsqrt,before_cast,bfloat16"
    quant, eps = FORMS[name], 1e-5
    scale = random_given(quant, (rows, width))
    got = interpreted("layer_norm").layer_norm_quant(x, *both, scale, eps, form, str(quant), True)
    close_to_float64(got[2], x, *both, eps)
    for a, b in zip(got[:2], reference(got[2], scale, str(quant)), strict=True):
        same(a, b)


# ---- limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "change"),
    {
        "without weight or bias": {"weight_dtype": None, "bias_dtype": None},
        "with weight or bias": {"form": "var_mean,rsqrt,none,bfloat16"},
        "a bias of torch.float64": {"bias_dtype": torch.float64},
        "an input of torch.float64": {"x_dtype": torch.float64},
        "not known": {"width": None},
        f"at most {MAX_ROW}": {"width": MAX_ROW + 1},
        "parts": {"form": "nonsense"},
        "fnuz": {"quant_form": str(dynamic_form("token", torch.float8_e4m3fnuz))},
    }.items(),
)
def test_refused_with_a_reason(words: str, change: dict[str, object]) -> None:
    taken: dict[str, object] = {
        "form": USUAL, "quant_form": TOKEN, "width": 64, "x_dtype": BF16, "weight_dtype": BF16,
        "bias_dtype": BF16,
    }  # fmt: skip
    assert why_not_layer_norm(**taken) is None  # type: ignore[arg-type]
    why = why_not_layer_norm(**{**taken, **change})  # type: ignore[arg-type]
    assert why is not None and words in why


def test_calls_are_refused_in_the_same_words(kernels: ModuleType) -> None:
    x, w = values(2, 64), vector(64, BF16)
    with pytest.raises(UnsupportedError, match="a bias of shape"):
        kernels.layer_norm_quant(x, w, vector(32, BF16), None, 1e-5, USUAL, TOKEN, False)
    with pytest.raises(UnsupportedError, match="scale of shape"):
        quant = str(replace(static_form(), granularity="token"))
        kernels.layer_norm_quant(x, w, w, torch.ones(1, 1), 1e-5, USUAL, quant, False)
    with pytest.raises(ValueError, match="disagree"):
        kernels.layer_norm_quant(x, w, w, torch.ones(()), 1e-5, USUAL, TOKEN, False)
