"""Sites and reports: what is refused, and that everything survives JSON."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import report_samples as samples
from hypothesis import given
from hypothesis import strategies as st

from fp8pass.options import Options
from fp8pass.reasons import CATALOGUE, no
from fp8pass.report import KINDS, STATUSES, GraphRecord, Rejected, Report, Site, merge

text = st.text(st.characters(codec="utf-8"), max_size=12)
rejections = st.builds(
    Rejected, kernel=text.filter(bool), code=st.sampled_from(sorted(CATALOGUE)), message=text
)
sites = st.builds(
    Site,
    kind=st.sampled_from(KINDS),
    status=st.sampled_from(STATUSES),
    rule=text,
    code=st.sampled_from(sorted(CATALOGUE)),
    message=text.filter(bool),
    hint=text,
    kernel=text,
    where=text,
    readers=st.integers(0, 10),
    rejected=st.lists(rejections, max_size=3).map(tuple),
)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kind": "conv"}, "'conv'.*'norm', 'activation', 'quantize', 'scaled_mm'"),
        ({"status": "lost"}, "'lost'.*'fused', 'lowered', 'left'"),
        ({"code": "FP8-F999"}, "FP8-F999"),
        ({"status": "left", "code": "", "message": "because"}, "needs a reason code"),
        ({"status": "left", "code": "FP8-F002", "message": ""}, "needs a reason code"),
    ],
)
def test_a_bad_site_is_refused_by_name(changes: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(samples.norm(0), **changes)


def test_a_good_site_is_accepted_beside_the_bad_ones() -> None:
    assert replace(samples.norm(0), status="left", code="FP8-F002", message="because").code


@pytest.mark.parametrize(("kernel", "code"), [("", "FP8-L003"), ("torch_row", "FP8-L999")])
def test_a_bad_rejection_is_refused(kernel: str, code: str) -> None:
    with pytest.raises(ValueError, match=r"needs a name|FP8-L999"):
        Rejected(kernel, code, "message")


def test_rejected_given_as_a_list_becomes_a_tuple() -> None:
    site = Site("scaled_mm", "lowered", rejected=list(samples.REJECTED))  # type: ignore[arg-type]
    assert site.rejected == samples.REJECTED
    assert hash(site) == hash(Site("scaled_mm", "lowered", rejected=samples.REJECTED))


@given(sites)
def test_a_site_survives_json(site: Site) -> None:
    assert Site.from_dict(json.loads(json.dumps(site.to_dict()))) == site


@given(st.lists(st.lists(sites, max_size=3), max_size=3), st.booleans())
def test_a_report_survives_json(groups: list[list[Site]], cached: bool) -> None:
    graphs = [GraphRecord(f"g{i}", "joint", sites=group) for i, group in enumerate(groups)]
    report = Report(graphs, from_cache=cached, uuid="u", versions={"torch": "2"}, note="n")
    assert Report.from_dict(json.loads(report.to_json())) == report


def test_every_field_of_a_record_survives_json() -> None:
    record = samples.joint()
    record.verdict = no("FP8-P001", why="an input requires grad")
    record.source, record.number, record.from_cache = "post_joint", 7, True
    record.files = {"received": "007-joint-received.py"}
    report = Report([record, samples.post_grad()])
    again = Report.from_dict(json.loads(report.to_json()))
    assert again == report
    assert again.graphs[0].verdict == record.verdict


def test_options_may_be_given_as_a_record() -> None:
    record = GraphRecord("g", "joint", options=Options(prefer=("cpu",)))  # type: ignore[arg-type]
    assert record.options["prefer"] == ["cpu"]
    assert record.options["numerics"] == "exact"


def test_counts_and_selection() -> None:
    report = samples.report()
    assert report.counts() == {
        ("norm", "fused"): 3,
        ("quantize", "left"): 3,
        ("scaled_mm", "lowered"): 3,
    }
    assert report.to_dict()["counts"]["norm"] == {"fused": 3}
    assert len(report.sites) == 9
    assert [s.where for s in report.select("norm")] == [samples.norm(i).where for i in range(3)]
    assert report.select(status="left") == [samples.left(i) for i in range(3)]


def test_json_sites_are_flat_and_name_their_graph() -> None:
    data = samples.report().to_dict()
    assert [s["graph"] for s in data["sites"]] == [0] * 6 + [1] * 3
    assert all("sites" not in graph for graph in data["graphs"])
    wanted = {"kind", "status", "rule", "code", "message", "kernel", "where", "readers", "rejected"}
    assert wanted <= set(data["sites"][0])


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"graphs": None},
        {"graphs": [{"name": "g"}]},
        {"graphs": [{"name": "g", "hook": 3}]},
        {"sites": [{"graph": 9, "kind": "norm", "status": "fused"}]},
        {"sites": [{"graph": 0, "kind": "norm", "status": "fused", "readers": "3"}]},
        {"sites": [{"graph": 0, "kind": "norm", "status": "left"}]},
        {"sites": "text"},
        {"versions": ["torch"]},
    ],
)
def test_damaged_data_is_one_kind_of_error(change: dict[str, object]) -> None:
    data = samples.report().to_dict()
    Report.from_dict(data)
    with pytest.raises(ValueError, match=r"report|schema|graph|reason code"):
        Report.from_dict({**data, **change})


def test_fields_of_a_later_version_are_ignored() -> None:
    data = samples.report().to_dict()
    data["later"] = 1
    data["graphs"][0]["later"] = 1
    data["sites"][0]["later"] = 1
    assert Report.from_dict(data) == samples.report()


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    samples.report().save(path)
    assert Report.load(path) == samples.report()
    assert os.listdir(path.parent) == ["report.json"]


def test_a_crash_while_saving_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    samples.report().save(path)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        Report().save(path)
    assert Report.load(path) == samples.report()
    assert os.listdir(tmp_path) == ["report.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "{}", '{"schema": 1}', "\ud800"])
def test_loading_what_is_no_report(tmp_path: Path, content: str) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(ValueError, match=r"report|Expecting|decode"):
        Report.load(path)


def test_merge_keeps_order_and_is_cached_only_if_all_are() -> None:
    one, two = Report([samples.joint()], uuid="a"), Report([samples.post_grad()], True, uuid="a")
    merged = merge([one, two])
    assert [g.hook for g in merged.graphs] == ["joint", "post_grad"]
    assert (merged.from_cache, merged.uuid) == (False, "a")
    assert merge([two, replace(two, uuid="b")]) == Report(two.graphs * 2, True, uuid="")
    assert not merge([]).from_cache


def test_summary_says_why_nothing_was_done() -> None:
    record = GraphRecord("g", "joint", verdict=no("FP8-P004"))
    assert record.summary() == "FP8-P004 there is no FP8 in this graph"
    assert samples.joint().summary() == "3 norm fused, 3 quantize left"
    assert GraphRecord("g", "joint").summary() == "no site"
