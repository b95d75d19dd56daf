"""Problems as text and back."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8pass.errors import OptionError
from fp8pass.problem import MRange
from fp8pass.problem_spec import SHORT, parse_problem, parse_rows, parse_sizes, problem_text


def test_what_a_text_says() -> None:
    p = parse_problem("token x channel, m=1-, n=4096, k=512, out=fp16, bias, fast_accum, padded")
    assert (p.activation.granularity, p.weight.granularity) == ("token", "channel")
    assert not p.activation.scale.static and p.weight.scale.static
    assert (p.m, p.n, p.k) == (MRange(1, None), 4096, 512)
    assert p.out_dtype == p.bias == torch.float16 and p.use_fast_accum and not p.packed
    assert parse_problem("row, bias=fp32").bias == torch.float32
    assert parse_problem("row, n=any").n is None
    assert not parse_problem("int8-azp").activation.symmetric
    assert parse_problem("block-ue8m0").weight.scale.format == "ue8m0"


@given(
    st.sampled_from(sorted(SHORT)),
    st.builds(MRange, st.integers(0, 9), st.none() | st.integers(9, 99)),
    st.none() | st.integers(1, 9999),
    st.sampled_from(["bf16", "fp16", "fp32"]),
    st.sets(st.sampled_from(["bias", "fast_accum", "padded", "prepared", "a=col", "b=row"])),
)
def test_there_and_back(scales: str, m: MRange, n: int | None, out: str, more: set[str]) -> None:
    size = "any" if n is None else str(n)
    text = ", ".join([scales, f"m={m}", f"n={size}", f"out={out}", *sorted(more)])
    problem = parse_problem(text)
    assert problem.m == m and problem.n == n
    assert parse_problem(problem_text(problem)) == problem
    assert problem_text(parse_problem(problem_text(problem))) == problem_text(problem)


def test_every_field_of_a_problem_is_in_its_text() -> None:
    """Two products that differ in anything but their device must never share a measurement."""
    plain = parse_problem("row, n=64")
    changes = {
        "activation": parse_problem("static").activation,
        "weight": parse_problem("static").weight,
        "m": MRange(3, 3),
        "n": 65,
        "k": 65,
        "out_dtype": torch.float32,
        "bias": torch.float32,
        "use_fast_accum": True,
        "a_layout": "col",
        "b_layout": "row",
        "packed": False,
        "prepared": True,
        "zero": "other",
        "zero_dtype": torch.int32,
        "prepared_dtype": torch.bfloat16,
        "form": "a,b",
    }
    names = {field.name for field in dataclasses.fields(plain)} - {"device_type"}
    assert names == set(changes)
    for name, value in changes.items():
        changed = dataclasses.replace(plain, **{name: value})
        assert problem_text(changed) != problem_text(plain), name
        assert parse_problem(problem_text(changed)) == changed, name
    assert "float64" in problem_text(dataclasses.replace(plain, out_dtype=torch.float64))


#: What is no number greater than 0 in ASCII digits that a tensor may have.
NO_SIZES = ["", "0", "-1", "+1", "1.0", "1e3", "1_0", "1 0", "\u0663", "\uff13", "0x10", "9" * 20,
            "9" * 5000, str(2**63)]  # fmt: skip
NO_ROWS = ["9-2", "0-0", "-5", "5--9", "1-2-3", "-", *(size for size in NO_SIZES)]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "scales ''"),
        ("row x", "scales"),
        ("token x nothing", "granularity"),
        ("row, m=a", "m='a'"),
        ("row, n=-3", "n='-3'"),
        ("row, out=int8", "out='int8'"),
        ("row, bias=int8", "bias='int8'"),
        ("row, m=1, m=2", "twice"),
        ("row, fast_accum=1", "not known"),
        ("row, m", "not known"),
        ("row, a=diagonal", "a='diagonal'"),
        ("group0x128 x channel", "granularity"),
        (f"group{'9' * 5000}x1 x channel", "granularity"),
        *((f"row, {name}={text}", f"{name}=") for name in "nk" for text in NO_SIZES),
        *((f"row, m={text}", "m=") for text in NO_ROWS),
    ],
    ids=lambda text: text[:40],
)
def test_mistakes(text: str, word: str) -> None:
    with pytest.raises(OptionError, match=word):
        parse_problem(text)


def test_sizes_and_rows() -> None:
    assert parse_sizes("64, 128") == (64, 128)
    for text in ("64x128", "64", "1,2,3", "", ",", *(f"{size},64" for size in NO_SIZES)):
        assert parse_sizes(text) is None
    assert parse_rows("any") == MRange() and parse_rows(f"7-{2**63 - 1}").lo == 7
    assert parse_problem("row, m=0-").m == MRange() and parse_rows("0-4") == MRange(0, 4)
    for text in NO_ROWS:
        with pytest.raises(OptionError, match=r"rows m=.*LO <= HI"):
            parse_rows(text, "rows ")
