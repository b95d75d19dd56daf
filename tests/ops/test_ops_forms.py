"""Forms: texts and records are two views of one closed list."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8pass.errors import OptionError
from fp8pass.ops import ActForm, LayerNormForm, NormForm, QuantForm, dynamic_form, static_form
from fp8pass.ops.forms import MODEL_DTYPES
from fp8pass.ops.product_form import ProductForm
from fp8pass.quant_key import FP8_DTYPES, QuantKey

model = st.sampled_from(sorted(MODEL_DTYPES, key=str))
fp8 = st.sampled_from(sorted(FP8_DTYPES, key=str))
codes = st.one_of(fp8, st.just(torch.int8))
number = st.floats(allow_nan=False, allow_infinity=False)
#: (root, eps): there is no epsilon outside of an inverse root
ROOTS = tuple(
    (root, eps)
    for root in NormForm.ROOTS
    for eps in NormForm.EPSILONS
    if root != "rsqrt" or not eps.startswith("outside")
)
narrow = st.sampled_from((torch.bfloat16, torch.float16))
norms = st.tuples(st.sampled_from(ROOTS), st.sampled_from(NormForm.WEIGHTS)).flatmap(
    lambda how: st.builds(
        NormForm,
        mean=st.sampled_from(NormForm.MEANS),
        root=st.just(how[0][0]),
        weight=st.just(how[1]),
        mid=model,
        eps=st.just(how[0][1]),
        sum=st.sampled_from(NormForm.SUMS),
        out=st.one_of(st.none(), narrow) if how[1] == "after_cast" else st.none(),
    )
)
layer_norms = st.builds(
    LayerNormForm,
    st.sampled_from(LayerNormForm.VARIANCES),
    st.sampled_from(LayerNormForm.ROOTS),
    st.sampled_from(LayerNormForm.AFFINES),
    model,
)
acts = st.builds(ActForm, st.sampled_from(ActForm.ACTS), model, model, model)
#: (scale, apply): an inverse scale is multiplied by, a dequant scale never is
HOW = (
    ("inverse", "mul_inverse"),
    *((s, a) for s in ("given", "div", "mul") for a in ("div", "mul_recip")),
)
quants = st.sampled_from(HOW).flatmap(
    lambda how: st.builds(
        QuantForm,
        dtype=codes,
        granularity=st.sampled_from(("tensor", "token", "group128", "group64", "group1")),
        compute=model,
        scale=st.just(how[0]),
        qmax=number,
        floor=st.sampled_from(QuantForm.FLOORS),
        floor_value=number,
        apply=st.just(how[1]),
        lo=number,
        hi=number,
        scale_dtype=st.one_of(model, st.just(torch.float64)),
        ceiling=st.one_of(st.just(math.inf), st.floats(1e-30, 1e30)),
        power=st.sampled_from(QuantForm.POWERS),
        layout=st.sampled_from(QuantForm.LAYOUTS),
    )
)


@settings(deadline=None)
@given(st.one_of(norms, layer_norms, acts, quants))
def test_round_trip(form: NormForm | LayerNormForm | ActForm | QuantForm) -> None:
    text = str(form)
    assert type(form).parse(text) == form
    assert str(type(form).parse(text)) == text


@settings(deadline=None)
@given(quants)
def test_key_of_a_quantise(form: QuantForm) -> None:
    key = QuantKey.parse(form.key)
    assert key.dtype == form.dtype and key.scale.static == form.static
    name = form.granularity
    assert key.granularity == (name if form.group is None else f"group1x{form.group}")


@settings(deadline=None)
@given(st.one_of(norms, layer_norms, acts, quants), st.data())
def test_a_changed_part_is_refused(
    form: NormForm | LayerNormForm | ActForm | QuantForm, data: st.DataObject
) -> None:
    parts = str(form).split(",")
    index = data.draw(st.integers(0, len(parts) - 1))
    parts[index] = data.draw(
        st.sampled_from(["", "other", "float65", "float4", "RSQRT", "-", "0x", "group0"])
    )
    with pytest.raises(OptionError):
        type(form).parse(",".join(parts))


@pytest.mark.parametrize(
    "extra",
    [
        "power=up",
        "layout",
        "ceiling=-1.0",
        "ceiling=nan",
        "scale_dtype=int8",
        "power=ceil,power=ceil",
    ],
)
def test_parts_by_name_are_a_closed_list_too(extra: str) -> None:
    with pytest.raises(OptionError):
        QuantForm.parse(f"{static_form()},{extra}")


_AFFINE = "int8,token,float32,div,255.0,scale,1e-07,div,-128.0,127.0"


@pytest.mark.parametrize(
    "changed",
    [
        ("", ",zero=round"),
        ("", ",zero=given"),  # the scale is computed
        ("", ",zero=lo_round,zero_at=between"),
        ("", ",zero=lo_round,zero_clamp=all"),
        ("", ",zero=lo_round,zero_dtype=int64"),
        ("", ",zero=lo_round,zero_dtype=int8"),  # may not hold it
        ("", ",zero=lo_round,span=abs"),
        ("", ",zero=lo_round,power=ceil"),
        ("", ",zero=lo_round,ceiling=3.0"),
        ("", ",zero_at=before"),
        ("", ",span=zero"),
        ("int8", "float8_e4m3fn"),
        ("token", "group16"),
        ("token,float32", "token,bfloat16"),
        ("scale,1e-07", "amax,1e-07"),
    ],
    ids=str,
)
def test_a_zero_point_goes_with_few_other_parts(changed: tuple[str, str]) -> None:
    old, new = changed
    good = f"{_AFFINE},zero=lo_round"
    assert str(QuantForm.parse(good)) == good and QuantForm.parse(good).key.endswith("/asym")
    with pytest.raises(OptionError):
        QuantForm.parse(good.replace(old, new) if old else _AFFINE + new)


@pytest.mark.parametrize("text", ["none,ab,int16", "a,ab,int32", "none,ab,int32,codes"])
def test_product_forms_with_a_zero_point_that_are_not_known(text: str) -> None:
    assert str(ProductForm.parse("none,ab,int32")) == "none,ab,int32"
    with pytest.raises(OptionError):
        ProductForm.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "mean,rsqrt,none,bfloat16,eps=below",
        "mean,rsqrt,none,bfloat16,eps",
        "mean,rsqrt,none,bfloat16,eps=max,eps=max",
        "mean,rsqrt,none,bfloat16,sum=bfloat16",
        "mean,rsqrt,after_cast,bfloat16,out=float32",
        "mean,rsqrt,before_cast,bfloat16,out=bfloat16",
        "mean,rsqrt,none,bfloat16,eps=outside",
        "mean,rsqrt,none,bfloat16,eps=outside_max",
    ],
)
def test_parts_of_a_norm_by_name(text: str) -> None:
    with pytest.raises(OptionError):
        NormForm.parse(text)


@pytest.mark.parametrize("kind", [NormForm, LayerNormForm, ActForm, QuantForm])
@settings(deadline=None)
@given(st.text(max_size=80))
def test_any_text_is_a_form_or_an_option_error(kind: type, text: str) -> None:
    try:
        kind.parse(text)  # type: ignore[attr-defined]
    except OptionError:
        return


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("part", [4, 6, 8, 9])
def test_numbers_must_be_finite(bad: str, part: int) -> None:
    parts = str(static_form()).split(",")
    parts[part] = bad
    with pytest.raises(OptionError):
        QuantForm.parse(",".join(parts))


def test_forms_are_plain_values() -> None:
    form = static_form()
    assert form == static_form() and hash(form) == hash(static_form())
    with pytest.raises(dataclasses.FrozenInstanceError):
        form.lo = 0.0  # type: ignore[misc]


@pytest.mark.parametrize("granularity", ["tensor", "token"])
@pytest.mark.parametrize("dtype", sorted(FP8_DTYPES, key=str), ids=str)
def test_usual_forms(dtype: torch.dtype, granularity: str) -> None:
    top = torch.finfo(dtype).max
    name = str(dtype).removeprefix("torch.")
    form = dynamic_form(granularity, dtype)
    assert (form.lo, form.hi, form.qmax) == (-top, top, top) and not form.static
    assert form.key == f"{name}/dynamic/{granularity}"
    assert static_form(dtype).static and static_form(dtype).key == f"{name}/static/tensor"
