"""Where records go while a compile runs, and what a cache hit gets back."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
import report_samples as samples

from fp8pass.report import GraphRecord, add, collector, reports, store
from fp8pass.report.collector import active, collecting


def test_two_hooks_are_one_report() -> None:
    with collecting(uuid="u", versions={"torch": "2"}) as report:
        assert active() is report
        assert add(samples.joint()) is report
        assert add(samples.post_grad(), uuid="ignored") is report
        assert reports() == []
    assert active() is None
    assert reports() == [report]
    assert [g.hook for g in report.graphs] == ["joint", "post_grad"]
    assert (report.uuid, report.versions, report.from_cache) == ("u", {"torch": "2"}, False)


def test_without_a_collection_each_record_is_a_report() -> None:
    first, second = (add(samples.post_grad(), uuid="u") for _ in range(2))
    assert reports() == [first, second]
    assert first.uuid == "u"
    assert "torch" in first.versions


def test_the_innermost_collection_gets_the_record() -> None:
    with collecting() as outer:
        with collecting() as inner:
            add(samples.joint())
        add(samples.post_grad())
    assert [g.hook for g in inner.graphs] == ["joint"]
    assert [g.hook for g in outer.graphs] == ["post_grad"]
    assert reports() == [inner, outer]


def test_reports_are_bounded_newest_last() -> None:
    for index in range(collector.LIMIT + 5):
        add(GraphRecord(f"g{index}", "joint"))
    kept = reports()
    assert len(kept) == collector.LIMIT
    assert kept[-1].graphs[0].name == f"g{collector.LIMIT + 4}"
    collector.clear()
    assert reports() == []


def test_threads_do_not_see_each_others_collection() -> None:
    gate = threading.Barrier(4, timeout=60)
    wrong: list[str] = []

    def compile_one(name: str) -> None:
        with collecting() as report:
            gate.wait()
            for hook in ("joint", "post_grad"):
                add(GraphRecord(name, hook))
                gate.wait()
        if [(g.name, g.hook) for g in report.graphs] != [(name, "joint"), (name, "post_grad")]:
            wrong.append(name)

    threads = [threading.Thread(target=compile_one, args=(f"t{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(reports()) == 4


def test_one_line_per_graph_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fp8pass"):
        add(samples.joint())
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [
        (logging.INFO, "graph_0 (joint hook): 3 norm fused, 3 quantize left")
    ]


def test_a_cache_hit_gets_the_report_of_the_compile(cache: Path) -> None:
    with collecting("key", uuid="u", versions={"torch": "then"}) as cold:
        add(samples.joint())
        add(samples.post_grad())
    with collecting("key", uuid="u", versions={"torch": "then"}) as warm:
        pass
    assert (cold.from_cache, warm.from_cache) == (False, True)
    assert warm.sites == cold.sites
    assert warm.versions == cold.versions
    assert reports() == [cold, warm]
    with collecting("another key") as lost:
        pass
    assert lost.from_cache
    assert "restored from cache" in lost.table()


def test_only_one_of_two_caches_hits(cache: Path) -> None:
    with collecting("key"):
        add(samples.joint())
        add(samples.post_grad())
    with collecting("key") as half:
        add(samples.joint(layers=1))
    assert [(g.hook, g.from_cache) for g in half.graphs] == [("joint", False), ("post_grad", True)]
    assert half.counts()[("norm", "fused")] == 1
    assert half.counts()[("scaled_mm", "lowered")] == 3
    assert not half.from_cache
    with collecting("key") as warm:
        pass
    assert warm.sites == half.sites


def test_without_a_key_nothing_is_stored(cache: Path) -> None:
    with collecting() as report:
        add(samples.joint())
    with collecting() as empty:
        pass
    assert report.sites
    assert not empty.from_cache
    assert not list(cache.rglob("*.json"))


def test_a_compile_that_raises_is_kept_and_not_stored(cache: Path) -> None:
    def fail(*records: GraphRecord) -> None:
        with collecting("key"):
            for record in records:
                add(record)
            raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        fail(samples.joint())
    assert len(reports()) == 1
    with pytest.raises(RuntimeError, match="no compiler"):
        fail()
    assert len(reports()) == 1
    assert store.load("key") is None
    assert active() is None


def test_a_store_that_cannot_be_written_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))
    with collecting("key") as report:
        add(samples.joint())
    assert reports() == [report]


def test_the_inductor_option_stores_a_set(cache: Path) -> None:
    add(samples.post_grad(), uuid="u", persist=True)
    add(samples.post_grad(), uuid="v")
    assert len(store.load_set("u")) == 1
    assert store.load_set("v") == []
