"""Reports beside Inductor's cache: found again, marked as restored, never in the way."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import report_samples as samples

from fp8pass.report import GraphRecord, Report, store


def test_what_is_saved_is_found_and_marked_as_restored(cache: Path) -> None:
    assert store.save("key", samples.report())
    found = store.load("key")
    assert found is not None
    assert found.from_cache
    assert all(graph.from_cache for graph in found.graphs)
    assert found.sites == samples.report().sites
    assert "restored from cache" in found.table()
    assert (cache / "fp8pass" / "reports" / "key.json").is_file()


def test_saving_does_not_change_the_report_and_forgets_the_dump(cache: Path) -> None:
    report = samples.report()
    report.graphs[0].files, report.graphs[0].number = {"after": "000-joint-after.py"}, 0
    store.save("key", report)
    assert report.graphs[0].number == 0
    found = store.load("key")
    assert found is not None
    assert (found.graphs[0].files, found.graphs[0].number) == ({}, None)


@pytest.mark.parametrize("key", ["../../evil", "a/b", "", ".", "x" * 500, "ключ", "a\0b"])
def test_any_text_is_a_key_and_stays_in_the_folder(cache: Path, key: str) -> None:
    assert store.save(key, samples.report())
    assert store.load(key) is not None
    assert store.load(key + "2") is None
    files = [path for path in cache.rglob("*") if path.is_file()]
    assert [path.parent for path in files] == [cache / "fp8pass" / "reports"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"schema": 99}'])
def test_a_damaged_file_is_no_report(cache: Path, content: bytes) -> None:
    store.save("key", samples.report())
    (store.folder() / "key.json").write_bytes(content)
    assert store.load("key") is None
    assert store.save("key", samples.report())
    assert store.load("key") is not None


def test_a_folder_that_cannot_be_made_costs_one_debug_line(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.mkdir()
    (cache / "fp8pass").write_text("a file in place of the folder")
    with caplog.at_level(logging.DEBUG, logger="fp8pass"):
        assert not store.save("key", samples.report())
    assert [r.levelno for r in caplog.records] == [logging.DEBUG]
    assert store.load("key") is None
    assert not store.save_set("uuid", samples.report())
    assert store.load_set("uuid") == []


def test_no_cache_folder_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert not store.save("key", samples.report())
    assert store.load("key") is None


def test_a_crash_while_saving_leaves_the_old_report(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save("key", samples.report())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert not store.save("key", Report())
    found = store.load("key")
    assert found is not None
    assert found.sites == samples.report().sites
    assert os.listdir(store.folder()) == ["key.json"]


def test_the_set_of_a_pass(cache: Path) -> None:
    slow, quick = samples.report(), samples.report()
    quick.graphs[0].seconds = {"read": 0.0}
    other = Report([samples.post_grad()])
    for report in (slow, quick, other):
        assert store.save_set("uuid", report)
    found = store.load_set("uuid")
    assert sorted(len(report.sites) for report in found) == [3, 9]
    assert all(r.from_cache and "one of 2 stored" in r.note for r in found)
    assert store.load_set("another") == []
    (store.folder() / "uuid.set" / "bad.json").write_text("{")
    assert len(store.load_set("uuid")) == 2


def test_the_set_is_bounded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SET_LIMIT", 3)
    for index in range(6):
        report = Report([GraphRecord(f"g{index}", "post_grad")])
        store.save_set("uuid", report)
        for age, path in enumerate(store._newest_first(store.folder() / "uuid.set")):
            os.utime(path, ns=((index - age + 1) * 10**9,) * 2)
    names = [report.graphs[0].name for report in store.load_set("uuid")]
    assert names == ["g3", "g4", "g5"]
