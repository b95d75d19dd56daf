"""examples/vllm_serve.py with a tiny model: two engines, with and without fp8pass."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from engines import LIMIT, Job, run_process

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "vllm_serve.py"


def test_the_example_runs(tmp_path: Path) -> None:
    env = Job(tmp_path).environment(tmp_path / "run", tmp_path / "cache")
    log = run_process([sys.executable, str(EXAMPLE), "--tiny"], env, 2 * LIMIT)
    assert re.search(r"^fp8pass: [0-9.]+ times as fast$", log, re.MULTILINE), log[-4000:]
    assert "8 scaled_mm lowered" in log
