"""The Triton norms in Triton's interpreter, and their limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
from graphs import values, vector
from producer_checks import assert_exact

from fp8pass.errors import OptionError, UnsupportedError
from fp8pass.kernels.triton_limits import MAX_ROW, why_not_norm
from fp8pass.ops import SPECS, NormForm, QuantForm, dynamic_form, norm, static_form

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

E5 = torch.float8_e5m2
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
STATIC, TOKEN, TENSOR = static_form(), dynamic_form("token"), dynamic_form("tensor")
LLAMA = "mean,rsqrt,after_cast,bfloat16"


@pytest.fixture(scope="module")
def kernels(interpreted: Callable[[str], ModuleType]) -> ModuleType:
    return interpreted("norm")


def check(
    kernels: ModuleType,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    form: str = LLAMA,
    quant: QuantForm = TOKEN,
    *,
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    keep: bool = True,
) -> tuple[torch.Tensor, ...]:
    """Within the contract; returns the results."""
    if weight is None and form.split(",")[2] != "none":
        weight = vector(x.shape[-1])
    scale = torch.tensor(0.02) if quant.static else None
    rest = (weight, scale, eps, form, str(quant), keep)
    if residual is None:
        got, want = kernels.rms_norm_quant(x, *rest), norm.rms_norm_quant(x, *rest)
    else:
        got = kernels.add_rms_norm_quant(x, residual, *rest)
        want = norm.add_rms_norm_quant(x, residual, *rest)
    assert_exact(got, want, form=form, quant=str(quant), shape=tuple(x.shape))
    results: tuple[torch.Tensor, ...] = got
    return results


@pytest.mark.parametrize("name", ["rms_norm_quant", "add_rms_norm_quant"])
def test_inputs_of_the_record(kernels: ModuleType, name: str) -> None:
    spec = SPECS[name]
    for args in spec.inputs(torch.Generator().manual_seed(5)):
        assert_exact(getattr(kernels, name)(*args), spec.reference(*args), args=args[2:])


FORMS = [
    ",".join(parts) for parts in product(NormForm.ROOTS, NormForm.WEIGHTS, ("float32", "bfloat16"))
]


@pytest.mark.parametrize("rest", FORMS)
def test_forms(kernels: ModuleType, rest: str) -> None:
    for mean, quant in zip(NormForm.MEANS, (TOKEN, TENSOR, STATIC, TOKEN), strict=True):
        check(kernels, values(3, 48), form=f"{mean},{rest}", quant=quant)


@pytest.mark.parametrize("weight", NormForm.WEIGHTS)
@pytest.mark.parametrize("eps", NormForm.EPSILONS)
def test_epsilons(kernels: ModuleType, eps: str, weight: str) -> None:
    """At this magnitude epsilon counts; the first row is zero, whose root is epsilon's alone."""
    x = (values(3, 48).float() * 1e-3).bfloat16()
    for root in NormForm.ROOTS if eps in ("inside", "max") else NormForm.ROOTS[1:]:
        for quant in (TOKEN, TENSOR):
            check(
                kernels, x, form=f"mean,{root},{weight},bfloat16,eps={eps}", quant=quant, eps=1e-3
            )


@pytest.mark.parametrize("quant", [STATIC, TOKEN, TENSOR], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_sum_that_the_norm_reads_unrounded(
    kernels: ModuleType, rows: int, quant: QuantForm
) -> None:
    form = f"{LLAMA},sum=float32"
    for width in (48, 40):
        x, residual = values(rows, width), values(rows, width, seed=9)
        check(kernels, x, form=form, quant=quant, residual=residual)
        check(kernels, x, form=form, quant=quant, residual=residual, keep=False)


def test_last_cast(kernels: ModuleType) -> None:
    for quant in (STATIC, TOKEN, TENSOR):
        check(kernels, values(3, 40), vector(40, F32), f"{LLAMA},out=float16", quant)
    why = why_not_norm(f"{LLAMA},out=float16", str(TOKEN), 64, BF16, None, BF16)
    assert why is not None and "bfloat16" in why and "float16" in why
    assert why_not_norm(f"{LLAMA},out=float16", str(TOKEN), 64, BF16, None, F32) is None


@pytest.mark.parametrize("residual_dtype", [None, BF16, F32], ids=str)
@pytest.mark.parametrize("weight_dtype", [BF16, F16, F32], ids=str)
def test_dtypes(
    kernels: ModuleType, weight_dtype: torch.dtype, residual_dtype: torch.dtype | None
) -> None:
    """Any mix of dtypes: the sum and the weighted value have the promoted one."""
    for i, (x_dtype, weight) in enumerate(product((BF16, F16, F32), ("after_cast", "before_cast"))):
        residual = None if residual_dtype is None else values(3, 40, dtype=residual_dtype, seed=9)
        check(
            kernels,
            values(3, 40, dtype=x_dtype),
            vector(40, weight_dtype),
            f"mean,rsqrt,{weight},float16",
            (STATIC, TOKEN, TENSOR)[i % 3],
            residual=residual,
        )


def test_outputs_that_nobody_asked_for(kernels: ModuleType) -> None:
    for quant in (STATIC, TOKEN, TENSOR):
        assert check(kernels, values(2, 16), quant=quant, keep=False)[2].shape == (0,)


@pytest.mark.parametrize("quant", [STATIC, TOKEN, TENSOR, replace(TOKEN, floor="none")], ids=str)
def test_special_values(kernels: ModuleType, quant: QuantForm) -> None:
    """NaN, infinities and zeros; with and without epsilon, in a row that its chunks do not fill."""
    x = values(5, 40)
    x[1, 3], x[2, 5], x[3, 7], x[4, 9] = math.nan, math.inf, -math.inf, -0.0
    for rows, eps in product((x, *x.unsqueeze(1)), (1e-6, 0.0)):
        check(kernels, rows, quant=quant, eps=eps)
    q, scale, y = check(kernels, x, quant=quant)
    if quant.granularity == "token":
        assert y[0].eq(0).all() and q[1].float().isnan().all()
        if quant.floor == "scale":
            assert scale[0].item() == torch.tensor(quant.floor_value).item()


def test_negative_zero(kernels: ModuleType) -> None:
    q, *_ = check(kernels, torch.full((1, 32), -0.0, dtype=BF16))
    assert q.view(torch.uint8).eq(0x80).all()


def test_fp8_e5m2(kernels: ModuleType) -> None:
    for quant in (static_form(E5), dynamic_form("token", E5), dynamic_form("tensor", E5)):
        check(kernels, values(3, 48), quant=quant)


def test_layouts(kernels: ModuleType) -> None:
    wide, cube = values(4, 120), values(2, 3, 4, 32)
    for quant in (STATIC, TOKEN, TENSOR):
        check(kernels, wide[:, 5:37], quant=quant, residual=wide[:, 64:96])
        check(kernels, cube.transpose(0, 1), quant=quant, residual=cube.transpose(0, 1))
        check(kernels, cube[:, :, 1:3], quant=quant, residual=cube[:, :, :2].contiguous())
        check(kernels, wide[0, :64:2], vector(64)[::2], quant=quant)


def test_no_rows(kernels: ModuleType) -> None:
    x = torch.empty(2, 0, 64, dtype=BF16)
    for quant in (STATIC, TOKEN):
        check(kernels, x, quant=quant)
        check(kernels, x, quant=quant, residual=x)
    q, scale, _ = kernels.rms_norm_quant(x, vector(64), None, 1e-6, LLAMA, str(TENSOR), False)
    assert q.shape == x.shape and scale.shape == () and scale.item() > 0


def test_several_rows_to_a_program(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    host = kernels.host
    monkeypatch.setattr(host, "PARTIALS", 4)
    monkeypatch.setattr(host, "row_shape", lambda width, rows: host.Shape(1, 16, 5, 3))
    monkeypatch.setattr(host, "piece_shape", lambda width, rows: host.Shape(1, 16, 2, 3))
    for quant in (STATIC, TOKEN, TENSOR):
        check(kernels, values(7, 72), quant=quant, residual=values(7, 72, seed=4))


# ---- refusals -----------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Any, ...]] = {
    "rows of 32769 values (at most 32768)": (LLAMA, STATIC, MAX_ROW + 1, BF16, None, BF16),
    "a width that is not known": (LLAMA, STATIC, None, BF16, None, BF16),
    "a residual of torch.float64": (LLAMA, STATIC, 64, BF16, torch.float64, BF16),
    "a weight of torch.int8": (LLAMA, STATIC, 64, BF16, None, torch.int8),
    "without a weight": (LLAMA, STATIC, 64, BF16, None, None),
    "with a weight": ("mean,rsqrt,none,bfloat16", STATIC, 64, BF16, None, BF16),
    "codes of torch.float8_e5m2fnuz": (
        LLAMA, replace(STATIC, dtype=torch.float8_e5m2fnuz), 64, BF16, None, BF16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_refused_with_a_reason(words: str) -> None:
    form, quant, *rest = REFUSED[words]
    assert words in (why_not_norm(form, str(quant), *rest) or "")


def test_what_is_taken() -> None:
    for form, dtype, quant in product(FORMS, (BF16, F16, F32), (STATIC, TOKEN, TENSOR)):
        weight = None if ",none," in form else F32
        args = (f"mean,{form}", str(quant), MAX_ROW, dtype, BF16, weight)
        assert why_not_norm(*args) is None


def test_calls_are_refused_in_the_same_words(kernels: ModuleType) -> None:
    x, rest = values(2, 16), (None, 1e-6, LLAMA, str(TOKEN), False)
    with pytest.raises(UnsupportedError, match="without a weight"):
        kernels.rms_norm_quant(x, None, *rest)
    with pytest.raises(UnsupportedError, match="a weight of shape"):
        kernels.rms_norm_quant(x, vector(15), *rest)
    with pytest.raises(UnsupportedError, match="operands of shapes"):
        kernels.add_rms_norm_quant(x, values(1, 16), vector(16), *rest)
    with pytest.raises(UnsupportedError, match="norm root"):
        kernels.rms_norm_quant(x, vector(16), None, 1e-6, "mean,x,none,bfloat16", str(TOKEN), False)
    with pytest.raises(OptionError):
        NormForm.parse("mean,x,none,bfloat16")
