"""The example of docs/add-a-rule.md, applied to the package as it is and run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOC = ROOT / "docs" / "add-a-rule.md"

#: What a checkout with the diff applied has by itself: the new file among the spellings.
CONFTEST = """
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, {tests!r})

import fp8pass.spellings

fp8pass.spellings.__path__.append(str(HERE.parent / "fp8pass" / "spellings"))


@pytest.fixture
def golden():
    def check(name, text):
        assert (HERE / "golden" / (name + ".txt")).read_text() == text + "\\n", text

    return check
"""


def added() -> dict[str, str]:
    """Path -> text of the files that the diffs of the document add."""
    files = {}
    for block in re.findall(r"^```diff\n(.*?)^```$", DOC.read_text(), flags=re.S | re.M):
        head, name, *lines = block.splitlines()
        assert head == "--- /dev/null" and all(line.startswith("+") for line in lines)
        files[name.removeprefix("+++ b/")] = "".join(line[1:] + "\n" for line in lines)
    return files


def test_one_file_and_its_tests() -> None:
    names = [name for name in added() if name.startswith("fp8pass/")]
    assert names == ["fp8pass/spellings/acme.py"]


def test_the_example_runs(tmp_path: Path) -> None:
    for name, text in added().items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "tests" / "conftest.py").write_text(CONFTEST.format(tests=str(ROOT / "tests")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert "7 passed" in done.stdout.splitlines()[-1]
