"""``fp8pass compile``: graph and table on standard output, mistakes in one line and status 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fp8pass.cli import main
from fp8pass.report import Report

PROGRAM = """
import models

def pair():
    return models.build(models.Pair), (models.rows(3),)

def item():
    pair = models.build(models.Pair)
    return (lambda x: pair(x) * float(x.sum())), (models.rows(3),)

def two():
    return (lambda x, y: x + y), (models.rows(3), models.rows(3))
"""


@dataclass
class Done:
    """How the command ended."""

    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Done]


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    """Run the command in a folder that is not on ``sys.path``, with a program in it."""
    (tmp_path / "a_program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in os.environ if name.startswith("FP8PASS_")]:
        monkeypatch.delenv(name)

    def run(*arguments: str) -> Done:
        with pytest.raises(SystemExit) as ended:
            main(["compile", *arguments])
        return Done(int(ended.value.code or 0), *capsys.readouterr())

    yield run
    sys.modules.pop("a_program", None)


def test_as_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a_program.py").write_text(PROGRAM)
    tests = Path(__file__).resolve().parent
    environment = {**os.environ, "PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}"}
    code = "import sys; from fp8pass.cli import main; main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, "compile", "a_program:pair", "--target", "sm90"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("graph 0/0 after fp8pass, for sm90\ninputs on cuda:0\n")


def test_graph_table_and_file(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "graphs.json"
    done = command(
        "a_program:pair", "--target", "sm90", "--dynamic-dim", "0", "--json", str(file),
        "--option", "prefer=torch_row",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    graph, _, table = done.stdout.partition("\n\n")
    assert graph.startswith("graph 0/0 after fp8pass, for sm90\ninputs on cuda:0\n")
    assert "  linear.weight_scale  float32[1, 32]" in graph
    assert " = aten._scaled_mm.default(%1, " in graph and "bfloat16[s0, 32]" in graph
    assert table.startswith("fp8pass: 2 sites in 2 graphs\n  target sm90,")
    data = json.loads(file.read_text())
    assert data["target"] == "sm90" and len(data["graphs"]) == 1
    assert graph == f"graph 0/0 after fp8pass, for sm90\n{data['graphs'][0]['after']}"
    assert data["graphs"][0]["calls"][-1] == "aten._scaled_mm.default"
    assert Report.from_dict(data["report"]).table() == table


def test_which_graph(command: Command) -> None:
    both = command("a_program:pair", "--target", "gfx950", "--graph", "both").stdout
    assert both.index("graph 0/0 before fp8pass") < both.index("graph 0/0 after fp8pass")
    assert "aten.rsqrt" in both
    none = command("a_program:pair", "--target", "xpu-bmg", "--dynamic", "--graph", "none")
    assert none.stdout.startswith("fp8pass: 2 sites") and "2-x32x64" in none.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a_program:pair", "--target", "sn90"), "fp8pass: unknown target 'sn90'; allowed:"),
        (("a_program:none", "--target", "sm90"), "fp8pass: module 'a_program' has no 'none'"),
        (("nowhere:f", "--target", "sm90"), "fp8pass: cannot import 'nowhere':"),
        (
            ("a_program:pair", "--target", "sm90", "--graph", "all"),
            "fp8pass: unknown graph 'all'; allowed: 'before', 'after', 'both', 'none'",
        ),
        (
            ("a_program:pair", "--target", "sm90", "--option", "fuel"),
            "fp8pass: option 'fuel' is not NAME=VALUE",
        ),
        (
            ("a_program:pair", "--target", "sm90", "--option", "target=cpu"),
            "fp8pass: option 'target=cpu' is not NAME=VALUE",
        ),
        (
            ("a_program:pair", "--target", "sm90", "--option", "colour=1"),
            "fp8pass: unknown fp8pass option 'colour'; allowed:",
        ),
        (
            ("a_program:two", "--target", "sm90", "--dynamic-dim", "2"),
            "fp8pass: dynamic dim 2: no input has it",
        ),
        (
            ("a_program:pair", "--target", "sm90", "--json", "/proc/no/such.json"),
            "fp8pass: /proc/no/such.json cannot be written: its folder does not exist",
        ),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    command: Command, arguments: tuple[str, ...], message: str
) -> None:
    done = command(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(message)


def test_what_the_model_does_is_said_in_the_last_line(command: Command) -> None:
    """torch's own warnings come before it."""
    done = command("a_program:item", "--target", "sm90")
    assert done.returncode == 2 and done.stdout == ""
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("fp8pass: the model asks for the value of a tensor")


def test_the_target_must_be_named(command: Command) -> None:
    done = command("a_program:pair")
    assert done.returncode == 2 and "--target" in done.stderr
