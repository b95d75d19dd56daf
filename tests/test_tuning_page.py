"""docs/tuning.md: what it lists is what the options take, and what it calls an error is one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fp8pass.errors import OptionError
from fp8pass.lowerings.vllm_names import AUTO, BACKENDS, backend_kernels
from fp8pass.options import Options
from fp8pass.selectors import SCHEMES

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "tuning.md").read_text(encoding="utf-8")


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_the_backends_are_those_that_are_taken() -> None:
    (row,) = (line for line in PAGE.splitlines() if line.startswith("| `linear_backend` |"))
    listed = quoted(row)[1:]
    for name in listed:
        assert Options.resolve({}, linear_backend=name).backends == (name,)
    taken = [AUTO]
    for name in BACKENDS:
        try:
            taken += [name] if backend_kernels(name) else []
        except OptionError:
            continue
    assert sorted(listed) == sorted(taken)


def test_what_it_calls_an_error_is_one() -> None:
    sentence = re.search(r"A backend of which fp8pass has no kernel \(([^)]+)\)", PAGE)
    assert sentence is not None
    names = quoted(sentence[1])
    assert "machete" in names
    for name in names:
        with pytest.raises(OptionError, match="has no kernel in fp8pass; allowed: 'auto', 'torch'"):
            Options.resolve({}, linear_backend=name)


def test_the_schemes_are_those_that_are_known() -> None:
    listed = re.search(r"- a scheme: (.+?);\n", PAGE, re.DOTALL)
    assert listed is not None and sorted(quoted(listed[1])) == sorted(SCHEMES)
