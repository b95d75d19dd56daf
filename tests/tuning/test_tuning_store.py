"""Measurements on disk: two processes at once, damaged, foreign and read-only files."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8pass
from fp8pass.lowerings import choose
from fp8pass.options import Options
from fp8pass.passes import Fp8Pass
from fp8pass.problem import MRange
from fp8pass.problem_spec import parse_problem
from fp8pass.target import HOST, Target
from fp8pass.tuning import session, store
from fp8pass.tuning.live import identity_of
from fp8pass.tuning.measured import Point, Record, key_of
from fp8pass.tuning.session import digest, measured_for

ROOT = Path(__file__).resolve().parents[2]
TARGET = Target.detect(HOST)
PROBLEM = parse_problem("row, m=8, n=64, k=64", TARGET)


@pytest.fixture(autouse=True)
def fresh() -> Any:
    session.forget()
    store._told.clear()
    yield
    session.forget()


def record(m: str = "8", **us: float) -> Record:
    span = MRange.parse(m)
    return Record((Point(span, span.hi or span.lo, us),), {}, "2026-01-01")


def put(folder: Path, made: Record, identity: dict[str, Any] | None = None) -> Path:
    identity = identity or identity_of(TARGET)
    path = store.file_for(folder, identity_of(TARGET))
    folder.mkdir(exist_ok=True)
    path.write_text(store.render({key_of(PROBLEM): made}, identity, {}))
    return path


def winner(folder: Path, **more: Any) -> tuple[str, str]:
    choice = choose(TARGET, PROBLEM, Options(tune_cache=str(folder), **more))
    assert choice.kernel is not None
    return choice.kernel.name, choice.why


def test_what_was_measured_comes_before_static_priority(tmp_path: Path) -> None:
    assert winner(tmp_path) == ("cpu", "static priority")
    put(tmp_path, record(torch_row=1.0, cpu=2.0, torch_dequant=3.0))
    assert winner(tmp_path) == ("torch_row", "measured on this device")
    assert winner(tmp_path, tune="off") == ("cpu", "static priority")
    assert winner(tmp_path, prefer=("cpu",)) == ("cpu", "preferred")
    assert winner(tmp_path, force="torch_dequant") == ("torch_dequant", "forced")
    assert winner(tmp_path, disable=("torch_row",)) == ("cpu", "measured on this device")
    assert winner(tmp_path, target=TARGET.arch) == ("cpu", "static priority"), "a named target"


def test_a_measurement_is_for_its_product_and_rows_only(tmp_path: Path) -> None:
    put(tmp_path, record(torch_row=1.0, cpu=2.0))
    options = Options(tune_cache=str(tmp_path))
    for text in ("row, m=9, n=64, k=64", "row, m=8, n=64, k=96", "row, m=8, n=64, k=64, bias",
                 "row, m=8, n=64, k=64, out=fp32", "static, m=8, n=64, k=64"):  # fmt: skip
        assert "measured" not in choose(TARGET, parse_problem(text, TARGET), options).why, text


def test_a_kernel_that_did_wrong_is_refused(tmp_path: Path) -> None:
    made = Record(record(cpu=1.0).points, {"torch_row": "wrong numbers: 3 times"}, "2026-01-01")
    put(tmp_path, made)
    choice = choose(TARGET, PROBLEM, Options(tune_cache=str(tmp_path)))
    told = {r.kernel: r.verdict for r in choice.rejected}
    assert told["torch_row"].code == "FP8-L070" and "3 times" in told["torch_row"].message


def test_a_name_that_is_no_kernel_or_cannot_changes_nothing(tmp_path: Path) -> None:
    put(tmp_path, record(nonsense=0.1, torch_tensor=0.2, triton_skinny=0.3, cpu=5.0))
    assert winner(tmp_path) == ("cpu", "measured on this device")


def test_the_content_is_in_the_identity_of_the_pass(tmp_path: Path) -> None:
    one = Options(tune_cache=str(tmp_path))
    first = Fp8Pass(one).uuid()
    assert first == Fp8Pass(one).uuid()
    put(tmp_path, record(torch_row=1.0))
    second = Fp8Pass(one).uuid()
    assert second != first
    put(tmp_path, record(torch_row=1.5))
    assert Fp8Pass(one).uuid() not in (first, second)
    off = Options(tune="off", tune_cache=str(tmp_path))
    assert digest(off) == "" and Fp8Pass(off).uuid() == Fp8Pass(Options(tune="off")).uuid()


#: Numbers as JSON text that neither a count nor a time can be.
NUMBERS = {
    "too large for a float": "1e999", "infinite": "Infinity", "none": "NaN",
    "of 400 digits": "9" * 400, "of 5000 digits": "9" * 5000, "below zero": "-8", "a truth": "true",
    "text": '"8"', "nothing": "null", "a list": "[8]",
}  # fmt: skip
DAMAGED = {
    "truncated": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "no object": lambda text: "[]",
    "schema": lambda text: text.replace('"schema": 1', '"schema": 2'),
    "no schema": lambda text: text.replace("schema", "scheme"),
    "a time that is none": lambda text: text.replace("1.0", "NaN"),
    "a time of text": lambda text: text.replace("1.0", '"fast"'),
    "a range that is none": lambda text: text.replace('"8"', '"all"'),
    "rows outside": lambda text: text.replace('"rows": 8', '"rows": 9'),
    "deep": lambda text: "[" * 100_000,
    "a deep object": lambda text: '{"a":' * 100_000,
    "no file of text": lambda text: "\0" * 50,
    "products of another kind": lambda text: text.replace('"products"', '"products": [], "more"'),
    "points of another kind": lambda text: text.replace('"points"', '"points": 5, "more"'),
    **{
        f"rows {name}": (lambda text, number=number: text.replace('"rows": 8', f'"rows": {number}'))
        for name, number in NUMBERS.items()
    },
    **{
        f"a time {name}": (lambda text, number=number: text.replace("1.0", number))
        for name, number in NUMBERS.items()
    },
    **{
        f"a range {text}": (lambda has, text=text: has.replace('"m": "8"', f'"m": {text}'))
        for text in (
            '"-5-"',
            '"9-5"',
            '"\\u0668"',
            "8",
            f'"{"9" * 400}-"',
            '" 8"',
            '"+8"',
            '"8_0-"',
        )
    },
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = put(tmp_path, record(torch_row=1.0, cpu=2.0))
    path.write_text(DAMAGED[damage](path.read_text()))
    with caplog.at_level(logging.WARNING, "fp8pass"):
        for _ in range(2):
            assert winner(tmp_path) == ("cpu", "static priority")
            session.forget()
    (line,) = caplog.records
    assert str(path) in line.message and "not used" in line.message
    assert "\n" not in line.message
    # the next measurement replaces it
    kept = store.save(path, identity_of(TARGET), {key_of(PROBLEM): record(torch_row=1.0)}, {})
    assert kept and winner(tmp_path) == ("torch_row", "measured on this device")


@pytest.mark.parametrize("name", ["device", "arch", "torch", "kernels", "libraries", "driver"])
def test_a_file_from_elsewhere(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path, record(torch_row=1.0), identity_of(TARGET) | {name: "another"})
    with caplog.at_level(logging.WARNING, "fp8pass"):
        assert winner(tmp_path) == ("cpu", "static priority")
    (line,) = caplog.records
    assert f"measured with {name} 'another'" in line.message


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process keeps what it measured, and says once that nobody else will."""
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")  # also root cannot make a folder below it
    options = Options(tune="measure", tune_cache=str(in_the_way / "tuning"))
    with caplog.at_level(logging.WARNING, "fp8pass"):
        before = digest(options)
        session.ensure(TARGET, PROBLEM, options)
        session.ensure(TARGET, PROBLEM, options)
    read, kept = (record.message for record in caplog.records)
    assert "are not kept" in kept and str(in_the_way) in kept
    assert "no measurements are used" in read and str(in_the_way) in read
    assert choose(TARGET, PROBLEM, options).why == "measured on this device"
    assert digest(options) != before, "compiles after it are others"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = put(tmp_path, record(torch_row=1.0, cpu=2.0))
    tmp_path.chmod(0o500)
    try:
        assert winner(tmp_path) == ("torch_row", "measured on this device")
        with caplog.at_level(logging.WARNING, "fp8pass"):
            store.save(path, identity_of(TARGET), {"x": record(cpu=1.0)}, {})
    finally:
        tmp_path.chmod(0o700)
    assert "are not kept" in caplog.text


@pytest.mark.parametrize("tune", ["cached", "measure"])
@pytest.mark.parametrize(
    "name", ["y" * 300, "x" * 5000, "\0", "a\0b", "\ud800", "/dev/null", "file/x"]
)
def test_a_path_that_cannot_be_a_folder(
    name: str, tune: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the option's check let through: one clear line, and no measurements."""
    (tmp_path / "file").write_text("")
    options = Options(tune_cache=os.path.join(tmp_path, name), tune=tune)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "fp8pass"):
        digest(options)
        for _ in range(2):
            assert choose(TARGET, PROBLEM, options).why == "static priority"
        assert len(caplog.records) == 1
        session.keep(
            store.file_for(session.folder(options), identity_of(TARGET)), identity_of(TARGET),
            {key_of(PROBLEM): record(torch_row=1.0)}, {},
        )  # fmt: skip
    lines = [each.message for each in caplog.records]
    assert "no measurements are used" in lines[0] and "are not kept" in lines[1]
    assert not any("\n" in line or len(line) > 400 for line in lines)
    if tune == "measure":
        session.ensure(TARGET, PROBLEM, options)
        assert choose(TARGET, PROBLEM, options).why == "measured on this device"


@pytest.mark.parametrize("name", ["y" * 300, "/dev/null"])
def test_a_compile_goes_on_without_such_a_folder(name: str) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(x, w, s, s, out_dtype=torch.bfloat16)

    x, w = (torch.randn(32, 32).to(torch.float8_e4m3fn) for _ in range(2))
    s = torch.ones(())
    for strict in (False, True):
        torch._dynamo.reset()
        options = {"fp8pass.tune_cache": name, "fp8pass.strict": strict}
        made = torch.compile(fn, backend="fp8pass", options=options)
        assert torch.equal(made(x, w.t(), s), fn(x, w.t(), s))
        assert fp8pass.reports()[-1].counts()[("scaled_mm", "lowered")] == 1


WRITER = """
import sys
from pathlib import Path
from fp8pass.problem import MRange
from fp8pass.tuning import store
from fp8pass.tuning.measured import Point, Record
path, who = Path(sys.argv[1]), sys.argv[2]
identity = {"device": "d", "arch": "a"}
for i in range(40):
    made = Record((Point(MRange(i, i), i, {who: float(i)}),), {}, "2026-01-01")
    both = Record((), {who: "x"}, "")
    store.save(path, identity, {who: made, f"{who}{i}": made, "both": both}, {})
"""


def test_processes_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tuning" / "file.json"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), who], env=environment)
        for who in ("one", "two", "three")
    ]
    assert [process.wait(timeout=300) for process in running] == [0, 0, 0]
    found = store.load(path, {"device": "d", "arch": "a"})
    for who in ("one", "two", "three"):
        assert [p.rows for p in found[who].points] == list(range(40))
        assert all(f"{who}{i}" in found for i in range(40))
    assert set(found["both"].refused) == {"one", "two", "three"}
    assert not [p for p in path.parent.iterdir() if p.suffix == ".tmp"]


MEASURER = """
import sys
from fp8pass.lowerings import choose
from fp8pass.options import Options
from fp8pass.problem_spec import parse_problem
from fp8pass.target import Target
from fp8pass.tuning import session
target = Target.detect("cpu")
options = Options(tune="measure", tune_cache=sys.argv[1])
for n in (32, 64):
    problem = parse_problem(f"row, m=4, n={n}, k=64", target)
    session.ensure(target, problem, options)
    choice = choose(target, problem, options)
    assert choice.why == "measured on this device", choice
"""


def test_two_processes_that_measure_at_once(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", MEASURER, str(tmp_path)]
    running = [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    told = [process.communicate(timeout=300)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], told
    (file,) = tmp_path.glob("*.json")
    data = json.loads(file.read_text())
    assert len(data["products"]) == 2 and data["measured_on"]["arch"] == TARGET.arch
    problem = parse_problem("row, m=4, n=64, k=64", TARGET)
    assert measured_for(TARGET, Options(tune_cache=str(tmp_path))).order(problem)
