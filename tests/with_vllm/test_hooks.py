"""The places of vLLM that fp8pass relies on: in the installed one, and in other wheels.

``FP8PASS_VLLM_WHEELS`` names a folder of wheels of other versions, such as CUDA's, whose sources
are looked through (``pip download --no-deps vllm==0.33.0``).
"""

from __future__ import annotations

import importlib.util
import os
import zipfile
from pathlib import Path

import pytest
from hooks import missing

WHEELS = sorted(Path(os.environ.get("FP8PASS_VLLM_WHEELS") or "/nonexistent").glob("vllm*.whl"))


def test_the_installed_vllm_has_the_hooks() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    assert missing(Path(spec.origin).parent) == []


def test_what_is_not_there_is_found(tmp_path: Path) -> None:
    found = missing(tmp_path)
    assert "there is no class VllmConfig" in found and len(found) >= 10


@pytest.mark.parametrize("wheel", WHEELS, ids=lambda path: path.name.split("-cp")[0])
def test_another_version_has_the_hooks(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py")]
        archive.extractall(tmp_path, [name for name in names if name.startswith("vllm/")])
    assert missing(tmp_path / "vllm") == []
