"""Measuring: what is tried, that numbers come before speed, and what follows for a range of M."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8pass.lowerings import choose, find, kernels, register, unregister
from fp8pass.options import Options
from fp8pass.problem import MRange, unquantised
from fp8pass.problem_spec import parse_problem
from fp8pass.reasons import YES
from fp8pass.target import HOST, Target
from fp8pass.tuning import measure as measuring
from fp8pass.tuning import session
from fp8pass.tuning.measure import ROWS, measure, ranges
from fp8pass.tuning.measured import Measured, Point, Record, key_of, overall
from fp8pass.tuning.operands import caller, operands, why_not_measured, why_wrong
from fp8pass.tuning.timing import interleaved

TARGET = Target.detect(HOST)
DEVICE = torch.device(HOST)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    session.forget()
    yield
    session.forget()


def measured(text: str, **more: Any) -> Record:
    made = Record()
    for part in measure(TARGET, parse_problem(text, TARGET), DEVICE, rounds=3, **more):
        made = made.merged(part)
    return made


@pytest.mark.parametrize(
    "text",
    ["row, m=5", "static, m=5, bias", "mixed, m=5, out=fp32", "token x tensor, m=5, padded",
     "int8, m=5, bias=fp32", "block, m=5, n=192, k=256", "row, m=5, prepared, out=fp16"],
)  # fmt: skip
def test_every_kernel_that_can_is_right(text: str) -> None:
    problem = parse_problem(text if "n=" in text else f"{text}, n=96, k=80", TARGET)
    s = operands(problem, 5, DEVICE, 3)
    able = measuring.candidates(TARGET, problem, ())
    assert able
    for kernel in able:
        call = caller(kernel, TARGET, problem, s, "exact")
        assert why_wrong(call(s), s, problem) == "", kernel.name


def test_times_of_all_candidates() -> None:
    made = measured("row, m=3, n=96, k=80")
    (point,) = made.points
    assert point.rows == 3 and str(point.m) == "3"
    assert set(point.us) == {"cpu", "torch_row", "torch_dequant"} and not made.refused
    assert all(us > 0 for us in point.us.values())
    assert "cpu" not in measured("row, m=3, n=96, k=80", disabled=("cpu",)).points[0].us


@pytest.fixture
def extra() -> Iterator[Any]:
    """Registers a kernel for the test."""
    made = []

    def add(name: str, run: Any, **more: Any) -> None:
        kernel = dataclasses.replace(
            find("torch_row"), name=name, run=run, can_implement=lambda t, p: YES,
            requirements=lambda t: YES, kinds=frozenset({TARGET.kind}),
            priority=lambda t, p: 1, **more,
        )  # fmt: skip
        made.append(register(kernel).name)

    yield add
    for name in made:
        unregister(name)


def exact(a: Any, b: Any, sa: Any, sb: Any, bias: Any, out: torch.dtype, fast: bool) -> Any:
    return ((a.double() @ b.double()) * sa * sb).to(out)


WRONG = {
    "scaled": lambda *s: exact(*s) * 1.05,
    "one_element": lambda *s: exact(*s).index_fill_(1, torch.tensor([7]), 0.0),
    "last_row": lambda *s: exact(*s).index_fill_(0, torch.tensor([-1]), 0.0),
    "nan": lambda *s: exact(*s) * float("nan"),
    "other_dtype": lambda *s: exact(*s).float(),
    "other_shape": lambda *s: exact(*s)[:, :-1],
    "nothing": lambda *s: None,
    "raises": lambda *s: 1 / 0,
    "scales_ignored": lambda a, b, sa, sb, bias, out, fast: exact(a, b, 1, 1, bias, out, fast),
}


@pytest.mark.parametrize("how", WRONG)
def test_wrong_numbers_never_win(how: str, extra: Any, tmp_path: Path) -> None:
    extra("right_one", exact)
    extra("wrong_one", WRONG[how])
    problem = parse_problem("row, m=70, n=64, k=48", TARGET)
    options = Options(tune="measure", tune_cache=str(tmp_path))
    before = choose(TARGET, problem, Options(tune="off"))
    assert before.kernel is not None and before.kernel.name == "right_one"
    session.ensure(TARGET, problem, options)
    record = session.measured_for(TARGET, options).record(problem)
    assert record is not None and set(record.refused) == {"wrong_one"}, record
    assert "right_one" in record.points[0].us
    choice = choose(TARGET, problem, options)
    told = {r.kernel: r.verdict for r in choice.rejected}
    assert told["wrong_one"].code == "FP8-L070"
    assert choice.why == "measured on this device"


def test_a_kernel_that_came_later_is_measured_too(extra: Any, tmp_path: Path) -> None:
    problem = parse_problem("row, m=7, n=64, k=48", TARGET)
    options = Options(tune="measure", tune_cache=str(tmp_path))
    session.ensure(TARGET, problem, options)
    extra("newcomer", exact)
    session.ensure(TARGET, problem, options)
    record = session.measured_for(TARGET, options).record(problem)
    assert record is not None and "newcomer" in record.known()


def test_what_was_measured_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = parse_problem("row, m=7, n=64, k=48", TARGET)
    options = Options(tune="measure", tune_cache=str(tmp_path))
    session.ensure(TARGET, problem, options)

    def never(*args: Any, **more: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(measuring, "measure", never)
    session.forget()
    session.ensure(TARGET, problem, options)
    assert choose(TARGET, problem, options).why == "measured on this device"
    session.ensure(TARGET, problem, Options(tune="cached", tune_cache=str(tmp_path)))
    session.ensure(TARGET, parse_problem("row, m=9", TARGET), Options(tune="off"))


@pytest.mark.parametrize(
    "text", ["row, m=3, n=any", "row, m=3, b=row", "block-ue8m0, m=3", "int8-azp, m=3"]
)
def test_what_cannot_be_measured_is_said(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    problem = parse_problem(text, TARGET)
    assert why_not_measured(problem)
    session.store._told.clear()
    options = Options(tune="measure", tune_cache=str(tmp_path))
    for _ in range(2):
        session.ensure(TARGET, problem, options)
    assert caplog.text.count("was not measured") == 1
    choose(TARGET, problem, options)


def test_weight_only_products_and_zero_points_are_not_measured() -> None:
    plain = parse_problem("row, m=3", TARGET)
    assert why_not_measured(plain) == ""
    wide = dataclasses.replace(plain, activation=unquantised(torch.bfloat16))
    assert "not quantised" in why_not_measured(wide) and key_of(wide) != key_of(plain)
    assert "zero point" in why_not_measured(dataclasses.replace(plain, zero="row"))
    assert "empty" in why_not_measured(dataclasses.replace(plain, n=0))


def test_a_measurement_that_breaks_costs_nothing_but_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("no clock")

    monkeypatch.setattr(measuring, "interleaved", broken)
    session.store._told.clear()
    problem = parse_problem("row, m=3, n=64, k=48", TARGET)
    options = Options(tune="measure", tune_cache=str(tmp_path))
    session.ensure(TARGET, problem, options)
    assert "no clock" in caplog.text
    assert choose(TARGET, problem, options).why == "static priority"


class Clock:
    """A candidate that takes the times of a list, over and over, and counts how often it ran."""

    def __init__(self, *us: float) -> None:
        self.us, self.ran = us, 0

    def microseconds(self) -> float:
        self.ran += 1
        return self.us[self.ran % len(self.us)]


@pytest.mark.parametrize("runoff", [True, False])
def test_the_nearer_to_the_fastest_the_more_often_timed(runoff: bool) -> None:
    clocks = {
        "best": Clock(10.0), "near": Clock(10.3), "far": Clock(20.0), "hopeless": Clock(31.0),
        measuring._WRITER: Clock(1.0),
    }  # fmt: skip
    found = measuring._contest(clocks, 4, 15, runoff=runoff)
    assert found == {name: clock.us[0] for name, clock in clocks.items()}
    final = 45 if runoff else 0
    assert {name: clock.ran for name, clock in clocks.items()} == {
        "best": 18 + final, "near": 18 + final, "far": 18, "hopeless": 3, measuring._WRITER: 18,
    }  # fmt: skip


def test_slow_products_are_timed_less_often() -> None:
    clocks = {"one": Clock(1e5), "other": Clock(3e5)}
    measuring._contest(clocks, 4, 15, runoff=True)
    assert [clock.ran for clock in clocks.values()] == [8, 8]


def test_turns_change_their_order() -> None:
    order: list[str] = []

    class Noted:
        def __init__(self, name: str) -> None:
            self.name = name

        def microseconds(self) -> float:
            order.append(self.name)
            return 1.0

    interleaved({name: Noted(name) for name in "abc"}, 40)
    rounds = ["".join(order[i : i + 3]) for i in range(0, 120, 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) == 6


# ---- ranges --------------------------------------------------------------------------------------


@given(
    st.builds(
        lambda lo, more: MRange(lo, None if more is None else lo + more),
        st.integers(0, 20000), st.none() | st.integers(0, 20000),
    )
)  # fmt: skip
def test_ranges_cover_and_are_measured_inside(m: MRange) -> None:
    found = ranges(m, ROWS)
    if m == MRange(0, 0):
        assert not found
        return
    assert found[0][0].lo == m.lo and found[-1][0].hi == m.hi
    for (one, _), (other, _) in zip(found, found[1:], strict=False):
        assert one.hi is not None and other.lo == one.hi + 1
    for part, rows in found:
        assert part.covers(MRange(rows, rows)) and rows > 0


def test_symbolic_rows_make_a_plan_of_what_is_fastest_where() -> None:
    sm90 = Target.parse("sm90")
    problem = parse_problem("row, m=0-", sm90)
    points = (
        Point(MRange(0, 16), 16, {"triton_skinny": 5.0, "torch_row": 9.0}),
        Point(MRange(17, 64), 64, {"triton_general": 6.0, "torch_row": 6.05}),
        Point(MRange(65, None), 16384, {"torch_row": 100.0, "triton_general": 103.0}),
    )
    known = Measured({key_of(problem): Record(points)})
    assert known.starts(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fp8pass.lowerings.choice.measured_for", lambda target, options: known)
        choice = choose(sm90, problem, Options())
        at_17 = choose(sm90, parse_problem("row, m=17", sm90), Options())
        away = choose(sm90, parse_problem("row, m=17, n=48", sm90), Options())
    # 0.05 us are noise, but the neighbour is another kernel
    assert choice.text == "0-16=triton_skinny;17-64=triton_general;65-=torch_row"
    assert choice.why == "measured on this device"
    assert at_17.text == "17=triton_general" and away.why != "measured on this device"


def test_noise_keeps_the_neighbours_kernel() -> None:
    points = (
        Point(MRange(0, 16), 16, {"a": 5.0, "b": 9.0}),
        Point(MRange(17, 64), 64, {"a": 6.05, "b": 6.0}),
        Point(MRange(65, 128), 128, {"a": 9.0, "b": 8.0}),
    )
    orders = dict(Record(points).orders())
    assert orders[MRange(17, 64)] == ("a", "b") and orders[MRange(65, 128)] == ("b", "a")
    assert orders[MRange(0, 128)] == ("b", "a") or orders[MRange(0, 128)] == ("a", "b")


def test_one_kernel_for_all_rows() -> None:
    times = [{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 2.0, "c": 1.0}]
    assert overall(times) == ("a", "b") and overall([]) == ()
    sm = Target.detect(HOST)
    problem = parse_problem("row, m=0-, n=64, k=64", sm)
    points = tuple(
        Point(MRange(lo, hi), lo + 1, us)
        for lo, hi, us in (
            (0, 9, {"cpu": 1.0, "torch_row": 1.2}),
            (10, None, {"cpu": 9.0, "torch_row": 1.0}),
        )
    )
    known = Measured({key_of(problem): Record(points)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fp8pass.lowerings.choice.measured_for", lambda target, options: known)
        choice = choose(sm, problem, Options())
    # cpu is no part of a plan of several kernels, torch_row is
    assert choice.text == "0-=torch_row" and choice.why == "measured on this device"


def test_registered_kernels_did_not_change() -> None:
    assert "right_one" not in [k.name for k in kernels()]
