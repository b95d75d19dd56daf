"""``torch_rescaled``: what it takes, and that nobody gets it unasked."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fp8pass.lowerings import choose, consider, find
from fp8pass.options import Options
from fp8pass.problem_spec import parse_problem
from fp8pass.target import NO_TRITON, Target

KERNEL = find("torch_rescaled")
SM90 = Target.parse("sm90")


def code(text: str, target: Target = SM90) -> str:
    return consider(KERNEL, target, parse_problem(text, target)).code


@pytest.mark.parametrize("text", ["row", "mixed", "token x tensor", "row, out=fp32, bias=fp16"])
def test_scales_that_torch_takes_in_no_other_way(text: str) -> None:
    assert consider(KERNEL, SM90, parse_problem(f"{text}, n=64, k=64", SM90))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("static, n=64, k=64", "FP8-L003"),
        ("block, n=128, k=128", "FP8-L003"),
        ("int8, n=64, k=64", "FP8-L007"),
        ("row, n=64, k=24", "FP8-L009"),
        ("row, n=17, k=64", "FP8-L009"),
    ],
)
def test_what_it_does_not_take(text: str, wanted: str) -> None:
    assert code(text) == wanted
    assert code("row, n=64, k=64") == ""


@pytest.mark.parametrize("name", ["sm80", "gfx942", "cpu", "xpu-bmg"])
def test_where_it_cannot_run(name: str) -> None:
    assert code("row, n=64, k=64", Target.parse(name)) in ("FP8-L001", "FP8-L011")


def test_without_triton() -> None:
    bare = dataclasses.replace(SM90, features=frozenset({NO_TRITON}))
    assert code("row, n=64, k=64", bare) == "FP8-L011"


def test_only_where_it_was_measured_or_is_asked_for() -> None:
    for name in ("sm89", "sm90", "sm100", "sm120"):
        target = Target.parse(name)
        for m in ("1", "64", "256", "4096", "0-"):
            problem = parse_problem(f"row, m={m}, n=4096, k=4096", target)
            assert KERNEL not in [k for _, k in choose(target, problem, Options(tune="off")).plan]
            forced = choose(target, problem, Options(tune="off", force="torch_rescaled"))
            assert [k for _, k in forced.plan] == [KERNEL]
    assert torch.ops.fp8pass.torch_rescaled_mm.default is not None
