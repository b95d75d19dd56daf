"""``fp8pass tune``: products of a model or of sizes, the file, the report, the table."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8pass.cli import main
from fp8pass.lowerings import choose
from fp8pass.lowerings.tables import parse
from fp8pass.options import Options
from fp8pass.problem import MRange
from fp8pass.problem_spec import parse_problem
from fp8pass.target import HOST, Target
from fp8pass.tuning import run, session, shipping
from fp8pass.tuning.measured import Point, Record

TARGET = Target.detect(HOST)


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    session.forget()
    for name in [name for name in os.environ if name.startswith("FP8PASS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FP8PASS_TUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    session.forget()
    sys.modules.pop("a_program", None)


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["tune", *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = command(
        capsys, "--shapes", "64,96", "--scales", "row", "--scales", "int8", "--rows", "1-16",
        "--more", "bias", "--json", "found.json", "--table", "table.json",
    )  # fmt: skip
    assert code == 0, err
    found = json.loads((tmp_path / "found.json").read_text())
    assert [p["product"].split(", ")[1:3] for p in found["products"]] == [["m=1-16", "n=64"]] * 2
    assert all([p["m"] for p in f["points"]] == ["1", "2-4", "5-16"] for f in found["products"])
    assert found["method"] and found["measured_on"]["arch"] == TARGET.arch
    table = parse((tmp_path / "table.json").read_text())
    problem = parse_problem("row, m=3, n=64, k=96, bias", TARGET)
    assert table.order(problem)[0] in ("cpu", "torch_row")
    assert TARGET.arch in out and "M, microseconds" in out
    # a compile finds it
    choice = choose(TARGET, problem, Options.resolve())
    assert choice.why == "measured on this device"
    # once is enough
    kept = next((tmp_path / "cache").glob("*.json")).read_text()
    code, _, _ = command(capsys, "--shapes", "64,96", "--rows", "1-16", "--more", "bias")
    assert code == 0 and next((tmp_path / "cache").glob("*.json")).read_text() == kept


def test_more_may_be_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = command(
        capsys, "--shapes", "64,96", "--rows", "2", "--more", "", "--more", "bias",
        "--json", "found.json",
    )  # fmt: skip
    assert code == 0, err
    found = json.loads((tmp_path / "found.json").read_text())
    assert ["bias" in p["product"] for p in found["products"]] == [False, True]
    assert all(p["points"] for p in found["products"])


def test_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a_program.py").write_text(
        "import models\ndef pair():\n    return models.build(models.Pair), (models.rows(3),)\n"
    )
    problems = run.products_of("a_program:pair", ["4", "1-2"])
    assert [str(p.m) for p in problems] == ["4", "1-2"]
    assert {(p.n, p.k) for p in problems} == {(32, 64)}
    found = run.tune(problems, Options.resolve(tune="measure"), progress=False)
    assert all(record is not None and plan for _, record, plan, _ in found.products)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--model MODULE:NAME and --shapes"),
        *(
            (("--shapes", text), "is not N,K")
            for text in ("64", "0,64", "64,0", "64x64", "-1,64", "1,2,3", "\u0663,64", "9" * 5000)
        ),
        *(
            (("--shapes", "64,64", "--rows", text), f"rows m={text!r}")
            for text in ("0", "9-2", "-1")
        ),
        (("--model", "nowhere:f", "--rows", "1, bias"), "rows m='1, bias'"),
        (("--shapes", "64,64", "--scales", "rows"), "scales 'rows'"),
        (("--shapes", "64,64", "--option", "target=sm90"), "beside 'target'"),
        (("--model", "nowhere:f"), "cannot import"),
    ],
)
def test_mistakes(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = command(capsys, *arguments)
    assert code == 2 and not out and words in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--shapes", "64,64", "--scales", "int8-azp"),
        ("--shapes", "64,64", "--rows", "999999999999"),
        ("--shapes", "999999999,999999999"),
    ],
)
def test_nothing_measured_is_nothing_kept(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = command(capsys, *arguments)
    assert code == 0, err
    assert "not measured: " in out and "nothing is kept" in out and "kept in" not in out
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_cannot_be_written_keeps_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FP8PASS_TUNE_CACHE", str(tmp_path / "file" / "cache"))
    code, out, err = command(capsys, "--shapes", "64,64", "--rows", "2", "--json", "found.json")
    assert code == 0, err
    assert "nothing is kept" in out and "M, microseconds" in out
    assert json.loads((tmp_path / "found.json").read_text())["file"] is None


def test_what_cannot_be_measured_is_listed() -> None:
    problems = [parse_problem("int8-azp, m=2, n=32, k=32"), parse_problem("row, m=2, n=32, k=32")]
    found = run.tune(problems, Options.resolve(tune="measure"), progress=False)
    assert [bool(why) for *_, why in found.products] == [True, False]
    assert "not measured: the quantisation int8" in found.text()


# ---- tables --------------------------------------------------------------------------------------

IDENTITY = {"device": "D", "torch": "2", "cuda": "13", "triton": "", "libraries": {"vllm": "0.21"}}


def table(**records: dict[str, dict[str, float]]) -> Any:
    """A table of records named ``n_k``: {range of M: times}."""
    made = {}
    for name, points in records.items():
        n, k = name.strip("_").split("_")
        found = tuple(
            Point(m, m.lo if m.hi is None else m.hi, us)
            for m, us in ((MRange.parse(text), us) for text, us in points.items())
        )
        made[f"row, n={n}, k={k}"] = Record(found, {}, "2026-01-01")
    data = shipping.table(made, IDENTITY)
    assert json.loads(shipping.render(data)) == data
    return parse(shipping.render(data)), data


def order(found: Any, m: int, n: int, k: int, scales: str = "row") -> tuple[str, ...]:
    problem = parse_problem(f"{scales}, m={m}, n={n}, k={k}")
    result: tuple[str, ...] = found.order(problem)
    return result


def test_a_table_of_two_sizes() -> None:
    found, data = table(
        _64_32={"0-16": {"a": 1.0, "b": 2.0}, "17-": {"a": 9.0, "b": 3.0}},
        _48_32={
            "0-16": {"a": 1.0, "b": 8.0},
            "17-64": {"a": 2.0, "b": 3.0},
            "65-": {"a": 5, "b": 4},
        },
    )
    assert order(found, 16, 64, 32) == ("a", "b") and order(found, 17, 64, 32) == ("b", "a")
    assert order(found, 17, 48, 32) == ("a", "b") and order(found, 65, 48, 32) == ("b", "a")
    # another size: what loses least over both
    assert order(found, 5, 999, 32) == ("a", "b") and order(found, 20, 999, 32) == ("b", "a")
    assert order(found, 5, 64, 32, "static") == order(found, 5, 64, 32, "int8") == ()
    assert "D, torch 2, cuda 13, vllm 0.21, 2026-01-01" in data["provenance"]


def test_neighbours_with_one_winner_are_one_entry() -> None:
    _, data = table(_8_8={"0-4": {"a": 1.0, "b": 2.0}, "5-": {"a": 2.0, "b": 4.0}})
    assert [entry["m"] for entry in data["entries"]] == ["0-", "0-"]
