"""Problems as text and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8pass.errors import OptionError
from fp8pass.problem import MRange
from fp8pass.problem_spec import SHORT, parse_problem, problem_text


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
    st.none() | st.integers(0, 9999),
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
    ],
)
def test_mistakes(text: str, word: str) -> None:
    with pytest.raises(OptionError, match=word):
        parse_problem(text)
