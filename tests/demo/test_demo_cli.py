"""The command: each subcommand as a process of its own, and its errors in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fp8pass
from fp8pass import cli


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from fp8pass.cli import main; main(sys.argv[1:])"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from fp8pass.demo.model import load

    folder = tmp_path_factory.mktemp("dump")
    module = load("tiny").quantised("dynamic", 0)
    fp8pass.explain(module, torch.zeros(1, 32, dtype=torch.long), dump=str(folder))
    return folder


def test_importing_the_command_is_light() -> None:
    heavy = "{'torch', 'typer', 'rich', 'transformers'} & set(sys.modules)"
    code = f"import sys, fp8pass.cli; print(sorted({heavy}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # `import fp8pass` may load torch, on which everything rests; nothing of the extras
    assert set(json.loads(done.stdout.replace("'", '"'))) <= {"torch"}


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_missing_extra_is_one_clear_line(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from fp8pass.cli import main; main([])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [cli.MISSING.format(name=missing)]


def test_help_names_the_commands() -> None:
    done = command("--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("demo", "explain", "env"))


def test_explain_prints_the_table_of_a_dump(dump: Path) -> None:
    done = command("explain", str(dump))
    assert done.returncode == 0, done.stderr
    assert "14 scaled_mm lowered" in done.stdout and "post_grad-after.py" in done.stdout
    as_json = command("explain", str(dump / "report.json"), "--json")
    assert json.loads(as_json.stdout)["counts"]["norm"] == {"fused": 4, "left": 1}


def test_env_tells_versions_target_and_folders() -> None:
    done = command("env")
    assert done.returncode == 0, done.stderr
    facts = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    for name in ("python", "torch", "fp8pass", "target of the CPU", "C++ compiler", "demo's cache"):
        assert facts[name].strip()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo", "--model", "big"), "fp8pass: unknown model 'big'; allowed:"),
        (("demo", "--recipe", "int8"), "fp8pass: unknown recipe 'int8'; allowed:"),
        (("explain", "/no/such/folder"), "fp8pass: no fp8pass dump in '/no/such/folder'"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments: tuple[str, ...], message: str) -> None:
    done = command(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(message) and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_an_unwritable_file_is_known_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = command("demo", "--model", "tiny", "--json", str(tmp_path / "file" / "out.json"))
    assert done.returncode == 2 and "compiling" not in done.stderr
