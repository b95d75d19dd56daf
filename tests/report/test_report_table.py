"""The table as text: golden, grouped, and honest about caches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import report_samples as samples

from fp8pass.reasons import no
from fp8pass.report import GraphRecord, Report, Site
from fp8pass.report.site import Rejected

GOLDEN = Path(__file__).with_name("golden_table.txt")


def test_golden_table() -> None:
    assert str(samples.report()) == GOLDEN.read_text()


def test_a_cache_hit_never_looks_like_a_compile_that_found_nothing() -> None:
    restored = replace(samples.report(), from_cache=True).table()
    first = "fp8pass: restored from cache, 9 sites in 2 graphs when it was compiled\n"
    assert restored.startswith(first)
    lost = Report(from_cache=True).table()
    assert "restored from cache" in lost
    assert "0 " not in lost
    assert Report().table() == "fp8pass: no graph came through\n"


def test_one_hook_restored_and_the_other_not() -> None:
    report = samples.report()
    report.graphs[1].from_cache = True
    lines = report.table().splitlines()
    assert "restored" not in lines[0]
    assert [line for line in lines if "restored from cache" in line] == [
        "  graph_0, hook post_grad (60 -> 60 nodes, 0.12 s, restored from cache): "
        "3 scaled_mm lowered"
    ]


def test_layers_are_one_row_and_other_places_are_not() -> None:
    def rows(*sites: object) -> list[list[str]]:
        record = GraphRecord("g", "joint", sites=list(sites))  # type: ignore[arg-type]
        lines = Report([record]).table().split("fused and lowered\n")[1].splitlines()[1:]
        return [line.split() for line in lines if line]

    thirty = [samples.norm(i) for i in range(30)]
    (row,) = rows(*thirty)
    assert (row[0], row[-1]) == ("30", "model.layers.*.input_layernorm")
    assert len(rows(*thirty, samples.norm(0, "final_norm"))) == 2
    assert len(rows(*thirty, replace(samples.norm(3), readers=2))) == 2
    assert rows(samples.norm(7))[0][-1] == "model.layers.7.input_layernorm"
    here, there = (replace(samples.norm(0), where=f"model.py:{n}") for n in (66, 70))
    assert [r[-1] for r in rows(here, there)] == ["model.py:66", "model.py:70"]


def test_reasons_that_differ_in_a_node_name_are_one_row_and_in_a_value_are_two() -> None:
    def reasons(*values: object) -> int:
        sites = []
        for index, value in enumerate(values):
            verdict = no("FP8-L009", kernel="cpu", what="K", wants=16, has=value)
            sites.append(
                replace(samples.left(index), code=verdict.code, message=verdict.message, hint="")
            )
        return Report([GraphRecord("g", "joint", sites=sites)]).table().count("why:")

    assert reasons("view_1", "view_22", "view") == 1
    assert reasons(17, 33) == 2


def test_a_plan_of_several_kernels_is_shown() -> None:
    site = replace(samples.product(0), kernel="torch_row", plan="0-16=cpu;17-=torch_row")
    table = Report([GraphRecord("g", "post_grad", sites=[site])]).table()
    assert "torch_row (0-16=cpu;17-=torch_row)" in table


def test_a_failure_and_its_hint_are_shown() -> None:
    verdict = no("FP8-P003", step="fuse", node="mul_3", error="KeyError: 'val'", repro="repro-1")
    table = Report([GraphRecord("g", "joint", verdict=verdict)]).table()
    assert "g, hook joint: FP8-P003 step fuse failed at mul_3: KeyError: 'val'" in table
    assert "hint: please report it with the folder repro-1" in table


def test_note_and_source_are_shown() -> None:
    record = replace(samples.joint(), source="post_joint")
    table = Report([record], note="one of 2").table()
    assert "  one of 2\n" in table
    assert "source post_joint" in table


def test_kernels_of_other_devices_are_one_line() -> None:
    others = tuple(Rejected(f"there_{i}", "FP8-L001", "elsewhere") for i in range(3))
    site = Site("scaled_mm", "lowered", kernel="here", plan="0-=here", rejected=others)
    report = Report([GraphRecord("graph", "post", sites=[site])])
    (line,) = [line for line in report.table().splitlines() if "FP8-L001" in line]
    assert line.endswith("there_0, there_1, there_2")
