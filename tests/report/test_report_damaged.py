"""A report file whose every value is replaced by what no report holds: one kind of error, or none.

``fp8pass explain`` and everything else that reads a report must never end in another one.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import report_samples as samples

from fp8pass.errors import OptionError
from fp8pass.reasons import no
from fp8pass.report import describe_dump, load_dump, store

#: As JSON, since some of them Python's own writer would not write.
BAD = (
    "1e999", "-1e999", "NaN", "9" * 400, "-1", "0.5", "true", "null", '"word"', '"\\ud800"', "[]",
    "[1]", "{}", '{"a": 1e999}', "9" * 5000,
)  # fmt: skip
MARK = "replaced here"


def whole() -> dict[str, Any]:
    report = samples.report()
    report.graphs[0].verdict = no("FP8-P004", limit=3)
    report.graphs[0].files = {"after": "000-joint-after.py"}
    return json.loads(report.to_json())


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value; of a list the first item alone."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else list(enumerate(value))[:1] if (
        isinstance(value, list)) else ()  # fmt: skip
    for key, item in items:
        yield from places(item, (*path, key))


def replaced(data: dict[str, Any], path: tuple[Any, ...], text: str) -> str:
    """The JSON of ``data`` with the value at ``path`` replaced."""
    made = copy.deepcopy(data)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = MARK
    return json.dumps(made).replace(json.dumps(MARK), text)


def test_the_whole_one_is_read(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text(json.dumps(whole()))
    assert "rms_norm_quant" in describe_dump(file)


@pytest.mark.parametrize("bad", BAD, ids=lambda text: text[:12])
def test_one_kind_of_error(bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, data = tmp_path / "report.json", whole()
    refused = 0
    for path in places(data):
        file.write_text(replaced(data, path, bad))
        try:
            load_dump(file).to_json()
            describe_dump(file)
        except OptionError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "5", "null", '"x"', "\0", ""])
def test_a_file_of_something_else(text: str, tmp_path: Path, cache: Path) -> None:
    """Also as one of a folder, and as a report of an earlier compile."""
    file = tmp_path / "report.json"
    file.write_text(text)
    with pytest.raises(OptionError, match=r"report\.json.*is not an fp8pass report"):
        load_dump(file)
    samples.report().save(tmp_path / "000.json")
    (tmp_path / "001.json").write_text(text)
    (tmp_path / "002.json").mkdir()
    assert load_dump(tmp_path).sites
    assert store.save("key", samples.report()) and store.load("key")
    next(store.folder().glob("*.json")).write_text(text)
    assert store.load("key") is None
