"""The dump folder: numbered files, an index, several writers, and no compile ever broken."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import report_samples as samples

from fp8pass.errors import OptionError
from fp8pass.reasons import no
from fp8pass.report import (
    Dump,
    GraphRecord,
    Report,
    count_ops,
    describe_dump,
    dump,
    load_dump,
    show_graph,
)

GRAPH_FILES = [
    "000-joint-received.py",
    "000-joint-after.py",
    "001-post_grad-received.py",
    "001-post_grad-after.py",
]
SUMS = ["000.json", "001.json", "index.json", "index.txt", "report.json"]


def compile_once(folder: Path | str | None) -> Report:
    """What the backend does in one compile: two hooks, each dumped before and after."""
    report = samples.report()
    out = Dump(folder)
    for record in report.graphs:
        for step in ("received", "after"):
            show_graph(step, samples.small_graph().graph, record.hook, out, record)
    out.write_report(report)
    return report


def test_the_files_of_one_compile(tmp_path: Path) -> None:
    report = compile_once(tmp_path / "new" / "dump")
    folder = tmp_path / "new" / "dump"
    assert sorted(os.listdir(folder)) == sorted(GRAPH_FILES + SUMS)
    assert report.graphs[0].files == {"received": GRAPH_FILES[0], "after": GRAPH_FILES[1]}
    assert [g.number for g in report.graphs] == [0, 1]
    for name in GRAPH_FILES:
        text = (folder / name).read_text()
        assert count_ops(text) == count_ops(samples.small_graph())
    index = json.loads((folder / "index.json").read_text())["graphs"]
    assert [(e["number"], e["hook"], list(e["files"].values())) for e in index] == [
        (0, "joint", GRAPH_FILES[:2]),
        (1, "post_grad", GRAPH_FILES[2:]),
    ]
    assert index[0]["counts"] == {"norm": {"fused": 3}, "quantize": {"left": 3}}
    assert (index[0]["nodes_before"], index[0]["nodes_after"]) == (120, 60)
    text = (folder / "index.txt").read_text()
    assert all(name in text for name in [*GRAPH_FILES, "000.json", "001.json"])


def test_report_json_is_the_whole_report(tmp_path: Path) -> None:
    report = compile_once(tmp_path)
    assert Report.load(tmp_path / "report.json").sites == report.sites
    loaded = load_dump(tmp_path)
    assert loaded == report
    assert load_dump(tmp_path / "report.json") == report
    for name in ("000.json", "001.json"):
        (tmp_path / name).unlink()
    assert load_dump(tmp_path) == report


def test_describe_is_the_table_and_the_files(tmp_path: Path) -> None:
    report = compile_once(tmp_path)
    text = describe_dump(tmp_path)
    assert text.startswith(report.table())
    assert all(name in text for name in GRAPH_FILES)
    assert describe_dump(tmp_path / "report.json") == report.table()


def test_graphs_of_later_compiles_get_later_numbers(tmp_path: Path) -> None:
    compile_once(tmp_path)
    (tmp_path / "007.json").write_text("{}")
    report = compile_once(tmp_path)
    assert [g.number for g in report.graphs] == [8, 9]
    assert len(load_dump(tmp_path).graphs) == 4


def test_a_step_that_comes_again_is_a_new_graph(tmp_path: Path) -> None:
    out, graph = Dump(tmp_path), samples.small_graph().graph
    names = [out.write_graph(step, graph, "post-grad") for step in ("received", "after") * 2]
    assert names == [f"00{n}-post_grad-{s}.py" for n in (0, 1) for s in ("received", "after")]


def test_writing_a_report_again_updates_it(tmp_path: Path) -> None:
    out, report = Dump(tmp_path), Report([samples.joint()])
    for _ in range(2):
        assert out.write_report(report) == str(tmp_path / "report.json")
    assert (report.graphs[0].number, len(load_dump(tmp_path).graphs)) == (0, 1)
    report.graphs.append(samples.post_grad())
    out.write_report(report)
    assert load_dump(tmp_path) == report


def test_a_report_from_a_cache_says_so(tmp_path: Path) -> None:
    report = samples.report()
    report.from_cache = True
    Dump(tmp_path).write_report(report)
    assert load_dump(tmp_path).from_cache
    assert "restored from cache" in describe_dump(tmp_path)
    assert "restored from cache" in (tmp_path / "index.txt").read_text()


def test_a_compile_that_ended_early_leaves_its_graph_and_says_so(tmp_path: Path) -> None:
    compile_once(tmp_path)
    Dump(tmp_path).write_graph("received", samples.small_graph().graph, "joint")
    Dump(tmp_path).write_report(Report([GraphRecord("g", "joint", verdict=no("FP8-P004"))]))
    text = describe_dump(tmp_path)
    assert "002  hook joint" in text
    assert "no report: the compile ended before it" in text
    assert "FP8-P004 there is no FP8" in text
    assert len(load_dump(tmp_path).graphs) == 3


def test_damaged_records_do_not_hide_the_others(tmp_path: Path) -> None:
    report = compile_once(tmp_path)
    (tmp_path / "000.json").write_bytes(b"\xff{")
    assert load_dump(tmp_path).graphs == report.graphs[1:]
    assert len(compile_once(tmp_path).graphs) == 2
    assert len(load_dump(tmp_path).graphs) == 3


def test_without_a_folder_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = compile_once(None)
    assert not Dump(None).enabled
    assert report.graphs[0].files == {}
    assert os.listdir(tmp_path) == []


def test_a_relative_folder_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = Dump("dump")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    out.write_report(samples.report())
    assert (tmp_path / "dump" / "report.json").is_file()


def test_a_folder_that_cannot_be_written_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "dump").write_text("a file in place of the folder")
    with caplog.at_level(logging.WARNING, logger="fp8pass"):
        for _ in range(3):
            report = compile_once(tmp_path / "dump")
    assert report.graphs[0].files == {}
    assert [r.getMessage() for r in caplog.records if str(tmp_path / "dump") in r.getMessage()]
    assert len(caplog.records) == 1
    assert not Dump(tmp_path / "dump").enabled


def test_a_full_disk_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    report = compile_once(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(dump, "write_atomic", full)
        compile_once(tmp_path)
    assert "No space left on device" in caplog.text
    assert load_dump(tmp_path) == report


def test_a_graph_that_torch_cannot_print_loses_only_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    out, graph = Dump(tmp_path), samples.small_graph().graph

    def bad(*_: object) -> str:
        raise RuntimeError("cannot print")

    with monkeypatch.context() as patch:
        patch.setattr(dump, "graph_text", bad)
        assert out.write_graph("received", graph, "joint") is None
    assert "cannot print" in caplog.text
    assert out.enabled
    assert out.write_graph("after", graph, "joint") == "000-joint-after.py"


@pytest.mark.parametrize("make", ["nothing", "empty folder", "bad report"])
def test_loading_what_is_no_dump_names_it(tmp_path: Path, make: str) -> None:
    folder = tmp_path / "dump"
    if make != "nothing":
        folder.mkdir()
    if make == "bad report":
        (folder / "report.json").write_text("{}")
    for read in (load_dump, describe_dump):
        with pytest.raises(OptionError, match=str(folder)):
            read(folder)


def test_threads_share_a_folder(tmp_path: Path) -> None:
    threads = [threading.Thread(target=compile_once, args=(tmp_path,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _check_shared(tmp_path, 4)


_WRITER = """
import sys
import time
from pathlib import Path
import test_report_dump as tests
ready, go, folder = map(Path, sys.argv[1:])
ready.touch()
while not go.exists():
    time.sleep(0.01)
for _ in range(3):
    tests.compile_once(folder)
"""


def test_processes_share_a_folder(tmp_path: Path) -> None:
    folder, go = tmp_path / "dump", tmp_path / "go"
    root = Path(dump.__file__).parents[2]
    paths = os.pathsep.join([str(Path(__file__).parent), str(root)])
    ready = tmp_path / "ready"
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(ready), str(go), str(folder)],
        env={**os.environ, "PYTHONPATH": paths},
    )
    while not ready.exists() and writer.poll() is None:
        time.sleep(0.01)
    go.touch()
    for _ in range(3):
        compile_once(folder)
    assert writer.wait(timeout=120) == 0
    _check_shared(folder, 6)
    processes = {e["process"] for e in json.loads((folder / "index.json").read_text())["graphs"]}
    assert processes == {f"pid {writer.pid}", f"pid {os.getpid()}"}


def _check_shared(folder: Path, compiles: int) -> None:
    """Every graph has a number of its own, and what sums the folder up has all of them."""
    report = Report.load(folder / "report.json")
    assert report.counts()[("norm", "fused")] == 3 * compiles
    assert sorted(g.number or 0 for g in report.graphs) == list(range(2 * compiles))
    for graph in report.graphs:
        assert list(graph.files) == ["received", "after"]
        for name in graph.files.values():
            assert name.startswith(f"{graph.number:03d}-{graph.hook}-")
            assert count_ops((folder / name).read_text()) == count_ops(samples.small_graph())
    assert len(json.loads((folder / "index.json").read_text())["graphs"]) == 2 * compiles
    assert not [name for name in os.listdir(folder) if name.endswith(".tmp")]
