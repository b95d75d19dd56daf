"""Each example runs as a program of its own and checks its own numbers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
#: Needs vLLM; what it does without is tested here, what it does with it by `make test-vllm`.
WITH_VLLM = "vllm_serve.py"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != WITH_VLLM)


def run(*command: str, folder: Path) -> str:
    """Run Python in ``folder``, free of fp8pass options of the caller; return its output."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FP8PASS_")}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_all_examples_are_found() -> None:
    assert {
        "torch_compile.py",
        "inductor_option.py",
        "graph_dump_depyf.py",
        "cross_target.py",
        "custom_lowering.py",
    } <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_example_runs(name: str, tmp_path: Path) -> None:
    assert "relative L2 error" in run(str(EXAMPLES / name), folder=tmp_path)


def test_the_example_with_vllm_says_where_to_read_what_to_install(tmp_path: Path) -> None:
    program = (
        "import importlib.util as u, runpy, sys; find = u.find_spec; sys.argv = ['example']\n"
        "u.find_spec = lambda name, *rest: None if name == 'vllm' else find(name, *rest)\n"
        f"runpy.run_path({str(EXAMPLES / WITH_VLLM)!r}, run_name='__main__')\n"
    )
    assert "docs/vllm.md" in run("-c", program, folder=tmp_path)


def test_graph_dump_writes_where_it_is_told(tmp_path: Path) -> None:
    output = run(str(EXAMPLES / "graph_dump_depyf.py"), "dump", folder=tmp_path)
    assert "norm: fused" in output and "scaled_mm: lowered" in output
    assert list((tmp_path / "dump" / "fp8pass").rglob("report.json"))
    assert list((tmp_path / "dump" / "depyf").rglob("*fp8pass*"))


def test_graph_dump_without_depyf_says_what_to_install(tmp_path: Path) -> None:
    program = (
        "import importlib.util as u, runpy; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'depyf' else find(name, *rest)\n"
        f"runpy.run_path({str(EXAMPLES / 'graph_dump_depyf.py')!r}, run_name='__main__')\n"
    )
    assert "pip install depyf" in run("-c", program, folder=tmp_path)
