"""Fixtures of the report tests: no report of another test, a cache folder of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8pass.report import clear


@pytest.fixture(autouse=True)
def no_reports() -> Iterator[None]:
    clear()
    yield
    clear()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Inductor's cache folder, empty."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    return folder
