"""Keys and group shapes: text and value are inverse, whatever is not known raises."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8pass import quant_key as qk
from fp8pass.errors import OptionError
from fp8pass.quant_key import GroupShape, QuantKey, ScaleDesc, dtype_name, fp8_max

groups = st.one_of(
    st.sampled_from([qk.PER_TENSOR, qk.PER_TOKEN, qk.PER_CHANNEL]),
    st.builds(GroupShape, st.integers(1, 4096), st.integers(1, 4096)),
)
dtypes = st.sampled_from([*sorted(qk.FP8_DTYPES, key=str), torch.int8])
keys = st.builds(
    QuantKey,
    dtypes,
    st.builds(
        ScaleDesc, st.just(torch.float32), st.booleans(), groups, st.sampled_from(["fp32", "ue8m0"])
    ),
    st.booleans(),
)


@given(keys)
def test_round_trip(key: QuantKey) -> None:
    assert QuantKey.parse(str(key)) == key
    assert str(QuantKey.parse(str(key))) == str(key)
    assert key.granularity == key.scale.group.name


@given(groups)
def test_group_round_trip(group: GroupShape) -> None:
    assert GroupShape.parse(group.name) == group


@given(st.text(max_size=40) | st.text("group0123456789x²٣-", max_size=12))
def test_any_text_is_a_key_or_an_option_error(text: str) -> None:
    for parse in (
        QuantKey.parse,
        GroupShape.parse,
        lambda t: QuantKey.parse(f"float8_e4m3fn/static/{t}"),
    ):
        try:
            parse(text)
        except OptionError as error:
            assert str(error)


@pytest.mark.parametrize(
    ("name", "text", "group"),
    [
        ("kFp8StaticTensorSym", "float8_e4m3fn/static/tensor", (-1, -1)),
        ("kFp8DynamicTensorSym", "float8_e4m3fn/dynamic/tensor", (-1, -1)),
        ("kFp8DynamicTokenSym", "float8_e4m3fn/dynamic/token", (1, -1)),
        ("kFp8StaticChannelSym", "float8_e4m3fn/static/channel", (-1, 1)),
    ],
)
def test_constants(name: str, text: str, group: tuple[int, int]) -> None:
    key = getattr(qk, name)
    assert str(key) == text and (key.scale.group.row, key.scale.group.col) == group
    assert key.scale.static == ("static" in text) and key.symmetric
    assert key.scale.dtype == torch.float32 and key.scale.format == "fp32"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("float8_e4m3/static/tensor", "float8_e4m3fn"),
        ("float8_e4m3fn/static", "dtype/static"),
        ("float8_e4m3fn/sometimes/tensor", "static|dynamic"),
        ("float8_e4m3fn/static/row", "tensor, token, channel"),
        ("float8_e4m3fn/static/group128", "group<rows>x<cols>"),
        ("float8_e4m3fn/static/groupx", "group<rows>x<cols>"),
        ("float8_e4m3fn/static/group²x1", "group<rows>x<cols>"),
        ("float8_e4m3fn/static/group0x128", "group<rows>x<cols>"),
        ("float8_e4m3fn/static/tensor/e8m0", "ue8m0"),
        ("float8_e4m3fn/static/tensor/", "ue8m0"),
    ],
)
def test_errors_name_the_allowed_values(text: str, names: str) -> None:
    with pytest.raises(OptionError) as info:
        QuantKey.parse(text)
    assert names in str(info.value)


@pytest.mark.parametrize(
    ("dtype", "top"),
    [
        (torch.float8_e4m3fn, 448.0),
        (torch.float8_e4m3fnuz, 240.0),
        (torch.float8_e5m2, 57344.0),
        (torch.float8_e5m2fnuz, 57344.0),
    ],
    ids=str,
)
def test_fp8_max(dtype: torch.dtype, top: float) -> None:
    assert fp8_max(dtype) == top and dtype in qk.FP8_DTYPES
    assert dtype_name(dtype) == str(dtype).removeprefix("torch.")


def test_int8_is_a_key_but_not_fp8() -> None:
    assert QuantKey.parse("int8/dynamic/token").dtype == torch.int8
    assert torch.int8 not in qk.FP8_DTYPES
