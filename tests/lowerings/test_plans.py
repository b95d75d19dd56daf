"""Plans over several ranges of M, and the tables that order them."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lowering_sites import build, operands, problem

from fp8pass.errors import NoKernelError, OptionError
from fp8pass.lowerings import EmitSite, Kernel, choose, find, kernels, register, tables, unregister
from fp8pass.lowerings.planned import emit_planned, parse_plan, run_planned
from fp8pass.lowerings.tables import SCHEMA, Table, parse, table_for
from fp8pass.options import Options
from fp8pass.problem import MRange
from fp8pass.reasons import YES
from fp8pass.target import Target

ROW = ("token", "channel")
SM90 = Target.parse("sm90")
RANGES = st.builds(
    lambda lo, more: MRange(lo, None if more is None else lo + more),
    st.integers(0, 200),
    st.none() | st.integers(0, 200),
)


@given(RANGES, RANGES)
def test_ranges_as_sets(one: MRange, other: MRange) -> None:
    top = 600
    a = set(range(one.lo, top if one.hi is None else one.hi + 1))
    b = set(range(other.lo, top if other.hi is None else other.hi + 1))
    assert one.overlaps(other) == bool(a & b)
    assert one.covers(other) == (b <= a and (one.hi is None or other.hi is not None))
    assert MRange.parse(str(one)) == one


@given(RANGES, st.sets(st.integers(-5, 500), max_size=6))
def test_split_keeps_every_number(m: MRange, starts: set[int]) -> None:
    parts = m.split(starts)
    assert parts[0].lo == m.lo and parts[-1].hi == m.hi
    for before, after in pairwise(parts):
        assert before.hi == after.lo - 1 and before.lo <= before.hi
        assert after.lo in starts


@pytest.mark.parametrize("text", ["", "-", "a-3", "3-b", "1-2-3"])
def test_bad_ranges(text: str) -> None:
    with pytest.raises(ValueError):
        MRange.parse(text)


# ---- choosing over ranges ------------------------------------------------------------------------


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a table in place of the shipped one."""

    def use(*entries: dict[str, Any]) -> None:
        made = parse(json.dumps({"schema": SCHEMA, "entries": list(entries)}))
        monkeypatch.setattr("fp8pass.lowerings.choice.table_for", lambda target: made)

    return use


def plan(m: int | MRange | None, *pair: str, options: Options | None = None, **more: Any) -> str:
    p = problem(*(pair or ROW), target=SM90, m=m if isinstance(m, int) else None, **more)
    if isinstance(m, MRange):
        p = dataclasses.replace(p, m=m)
    return choose(SM90, p, options or Options()).text


def entry(m: str, *order: str, **more: Any) -> dict[str, Any]:
    return {"activation": "token", "weight": "channel", "m": m, "order": list(order), **more}


def test_a_plan_has_one_part_for_each_answer(table: Any) -> None:
    table(entry("0-16", "triton_skinny"), entry("17-128", "triton_general"), entry("129-"))
    assert plan(None) == "0-16=triton_skinny;17-128=triton_general;129-=torch_row"
    assert plan(MRange(2, None)) == "2-16=triton_skinny;17-128=triton_general;129-=torch_row"
    assert plan(MRange(17, 100)) == "17-100=triton_general"
    assert plan(16) == "16=triton_skinny"
    assert plan(129) == "129=torch_row"


def test_neighbours_with_one_answer_are_one_part(table: Any) -> None:
    table(entry("0-16", "torch_row"), entry("17-", "torch_row", "triton_general"))
    assert plan(None) == "0-=torch_row"


def test_an_entry_is_for_its_sizes_and_accumulation_only(table: Any) -> None:
    table(
        entry("0-", "triton_general", n="48", fast_accum=True),
        entry("0-", "torch_row", n="48"),
    )
    assert plan(200, n=48, use_fast_accum=True) == "200=triton_general"
    assert plan(200, n=48) == "200=torch_row"
    assert plan(None, n=64) == "0-64=triton_skinny;65-=torch_row", "no entry: static priority"
    assert plan(200, n=48, options=Options(numerics="fast")) == "200=triton_general"


def test_a_kernel_that_cannot_is_passed_over(table: Any) -> None:
    table(entry("0-", "vllm_cutlass", "torch_tensor", "triton_general"))
    assert plan(None) == "0-=triton_general"
    choice = choose(SM90, problem(*ROW, target=SM90, m=None), Options())
    assert choice.why == "measured table"
    told = {r.kernel: r.verdict.code for r in choice.rejected}
    assert told["vllm_cutlass"] == "FP8-L011" and told["torch_tensor"] == "FP8-L003"
    assert told["torch_row"] == told["triton_skinny"] == "FP8-L013"


def test_preference_beats_the_table_where_it_can(table: Any) -> None:
    table(entry("0-", "torch_row"))
    assert plan(None, options=Options(prefer=("triton_skinny",))) == (
        "0-64=triton_skinny;65-=torch_row"
    )
    off = Options(disable=("triton_skinny", "triton_general", "torch_row"))
    assert plan(None, options=off) == "0-=torch_channel"


def test_a_kernel_of_several_calls_stands_for_a_whole_site_only(table: Any) -> None:
    table(entry("0-64", "torch_channel"), entry("65-", "torch_row"))
    assert find("torch_channel").run is None
    assert plan(None) == "0-64=triton_skinny;65-=torch_row"
    assert plan(7) == "7=torch_channel"
    # nothing else for more rows: the one kernel that takes them all
    off = Options(disable=("torch_row", "triton_general"))
    assert plan(None, options=off) == "0-=torch_channel"


def test_force_must_take_every_row() -> None:
    assert plan(64, options=Options(force="triton_skinny")) == "64=triton_skinny"
    with pytest.raises(NoKernelError, match="FP8-L014.*0-64 rows.*0-"):
        plan(None, options=Options(force="triton_skinny"))


def test_a_part_without_any_kernel() -> None:
    off = Options(disable=tuple(k.name for k in kernels() if k.name != "triton_skinny"))
    choice = choose(SM90, problem(*ROW, target=SM90, m=None), off)
    assert not choice.plan and choice.verdict.code == "FP8-L012"
    told = {r.kernel: r.verdict for r in choice.rejected}
    assert told["triton_skinny"].code == "FP8-L014"


# ---- tables --------------------------------------------------------------------------------------


def test_shipped_tables_name_kernels_that_exist() -> None:
    found = sorted(p.stem for p in tables.files())
    assert "sm90" in found
    for arch in found:
        shipped = table_for(Target.parse(arch))
        assert shipped.entries and shipped.provenance
        for item in shipped.entries:
            for name in item.order:
                assert Target.parse(arch).kind in find(name).kinds


def test_no_table_for_an_architecture_that_was_not_measured() -> None:
    assert table_for(Target.parse("sm120")).entries == ()


@pytest.mark.parametrize(
    ("change", "word"),
    [({"schema": 2}, "schema"), ({"entries": [{"order": [], "oder": 1}]}, "oder")],
)
def test_bad_tables(change: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        parse(json.dumps({"schema": SCHEMA, "entries": [], **change}))


ENTRY = {"activation": "token", "weight": "channel", "m": "0-64", "order": ["triton_skinny"]}


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{}", "[" * 100_000, '{"schema": 1}', '{"schema": 1, "entries": [5]}']
    + [
        json.dumps({"schema": SCHEMA, "entries": [{**ENTRY, **change}]})
        for change in (
            {"m": 5}, {"m": "9-2"}, {"n": "-1"}, {"k": "\u0663"}, {"m": "9" * 400}, {"m": "1e999"},
            {"order": "triton_skinny"}, {"order": [1]}, {"order": None},
        )
    ],
    ids=lambda text: text[-40:],
)  # fmt: skip
def test_a_damaged_table_orders_nothing(
    text: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is shipped, so that this is a damaged installation: a line, and static priority."""
    file = tmp_path / "sm90.json"
    monkeypatch.setattr(tables, "files", lambda: [file])
    file.write_text(json.dumps({"schema": SCHEMA, "entries": [ENTRY]}))
    tables._load.cache_clear()
    try:
        assert table_for(SM90).entries[0].order == ("triton_skinny",)
        file.write_text(text)
        tables._load.cache_clear()
        assert table_for(SM90) is tables.EMPTY
    finally:
        tables._load.cache_clear()
    (line,) = caplog.records
    assert "sm90.json is not used" in line.message and "\n" not in line.message


# ---- the operator --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0-16",
        "0-16=nonsense",
        "x=torch_row",
        "0-16=torch_row;20-=torch_row",
        "0-=torch_channel",
    ],
)
def test_bad_plans(text: str) -> None:
    with pytest.raises(OptionError):
        parse_plan(text)


@pytest.fixture
def recorder() -> Any:
    """Two kernels that say which of them ran, registered for the test."""
    calls: list[str] = []

    def make(name: str) -> Kernel:
        def run(a: Any, b: Any, *rest: Any) -> torch.Tensor:
            calls.append(name)
            return a.new_empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16)

        return register(
            dataclasses.replace(
                find("torch_row"), name=name, run=run, can_implement=lambda t, p: YES
            )
        )

    made = [make("one"), make("other")]
    yield calls
    for kernel in made:
        unregister(kernel.name)


def test_the_plan_branches_on_rows(recorder: list[str]) -> None:
    p = problem(*ROW)
    for m, expected in ((0, "one"), (1, "one"), (16, "one"), (17, "other"), (900, "other")):
        v = operands(p, m, "cpu")
        out = run_planned(
            v["a"], v["b"], v["scale_a"], v["scale_b"], None, torch.bfloat16, False,
            "2-16=one;17-300=other",
        )  # fmt: skip
        assert recorder.pop() == expected and out.shape == (m, p.n)


def test_the_operator_in_a_graph_computes_the_product() -> None:
    """On a CPU its reference runs, so that a graph for a GPU can be interpreted here."""
    p = problem(*ROW, target=SM90, m=None)
    choice = choose(SM90, p, Options())
    assert len(choice.plan) > 1

    def emit(graph: Any, site: EmitSite) -> Any:
        return emit_planned(graph, site, choice)

    built = build(emit, SM90, p, m=5, device="cpu")
    values = operands(p, 5, "cpu", seed=3)
    found = built.module(*(values[name] for name in built.names))[0]
    exact = values["a"].float() @ values["b"].float() * values["scale_a"] * values["scale_b"]
    assert torch.equal(found, exact.to(torch.bfloat16))
    assert built.result.args[-1] == choice.text


def test_an_empty_table_orders_nothing() -> None:
    p = problem(*ROW)
    assert Table().order(p) == () and Table().starts(p) == ()
