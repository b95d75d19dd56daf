"""How much faster an engine generates on a CPU: two engines in turn, medians."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from engines import SMALL, WAY_A, Job, measured_prompts, run_process, smollm2

from fp8pass.errors import UnsupportedError

INTERLEAVED = Path(__file__).parent / "interleaved_process.py"


def seconds_in_turn(job: Job, folder: Path, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round of ``theirs`` and ``ours``, which differ in fp8pass alone."""
    folder.mkdir(parents=True, exist_ok=True)
    plain: dict[str, Any] = {**SMALL, **job.arguments}
    plain["compilation_config"] = {"mode": job.mode, **job.compilation}
    named = {**plain, "compilation_config": {**plain["compilation_config"], **WAY_A}}
    described = {
        "model": str(job.model),
        "engines": {"theirs": plain, "ours": named},
        "prompts": job.prompts,
        "tokens": tokens,
        "rounds": rounds,
        "result": str(folder / "result.json"),
    }
    (folder / "job.json").write_text(json.dumps(described), "utf-8")
    env = job.environment(folder, folder / "cache")
    log = run_process([sys.executable, str(INTERLEAVED), str(folder / "job.json")], env, 2400)
    (folder / "log.txt").write_text(log, "utf-8")
    assert (folder / "result.json").is_file(), log[-4000:]
    found: dict[str, list[float]] = json.loads((folder / "result.json").read_text())["seconds"]
    return found


def test_generation_with_torchs_products_is_much_faster(
    tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    try:
        model = smollm2("dynamic")
    except UnsupportedError as error:
        pytest.skip(str(error))
    job = Job(model, 2, mends=(), prompts=measured_prompts(1, 8))
    found = seconds_in_turn(job, tmp_path / "run", tokens=4, rounds=3)
    ratio = median(found["theirs"]) / median(found["ours"])
    print(f"generation {ratio:.1f} times as fast: {found}")
    record_property("ratio", f"{ratio:.2f}")
    assert ratio >= 10
