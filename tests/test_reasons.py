"""The reason catalogue: complete entries, stable codes, and calls that give every value."""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

import fp8pass
from fp8pass.reasons import CATALOGUE, YES, Reason, Verdict, _catalogue, no

PACKAGE = Path(fp8pass.__file__).parent


def names(template: str) -> set[str]:
    """The names that a template wants."""
    return {field for _, field, _, _ in string.Formatter().parse(template) if field}


def calls() -> Iterator[tuple[str, str, set[str] | None]]:
    """(place, code, names of the values) of every ``no("FP8-...", ...)`` in the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            code = node.args[0]
            if name == "no" and isinstance(code, ast.Constant):
                given = {keyword.arg for keyword in node.keywords}
                place = f"{path.relative_to(PACKAGE)}:{node.lineno}"
                known = None if None in given else {str(n) for n in given}
                yield place, str(code.value), known


CALLS = list(calls())


@pytest.mark.parametrize("code", CATALOGUE)
def test_entry(code: str) -> None:
    reason = CATALOGUE[code]
    assert reason.code == code and re.fullmatch(r"FP8-[RFLPU]\d{3}", code)
    assert reason.title and reason.template
    values = {name: f"<{name}>" for name in names(reason.template) | names(reason.hint)}
    verdict = no(code, **values)
    assert not verdict and verdict.code == code
    for value in values.values():
        assert value in verdict.message + verdict.hint


def test_calls_are_found() -> None:
    assert len(CALLS) > 20


@pytest.mark.parametrize(("place", "code", "given"), CALLS, ids=[c[0] for c in CALLS])
def test_call_gives_every_value(place: str, code: str, given: set[str] | None) -> None:
    assert code in CATALOGUE
    if given is not None:
        reason = CATALOGUE[code]
        assert names(reason.template) | names(reason.hint) <= given


def test_a_missing_value_raises() -> None:
    with pytest.raises(KeyError):
        no("FP8-R001", node="x")
    with pytest.raises(KeyError):
        no("FP8-X999")


def test_verdicts() -> None:
    assert YES and YES.code == ""
    assert Verdict(True) == YES and not Verdict(False)


def test_braces_in_values_are_text() -> None:
    assert "{x}" in no("FP8-R002", node="{x}", why="{why}").message


def test_one_entry_per_code() -> None:
    with pytest.raises(ValueError, match="share one code"):
        _catalogue(Reason("FP8-R001", "a", "b"), Reason("FP8-R001", "c", "d"))
