"""Which recipe is advised: from measurements where there are all, else from stated facts."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch

from fp8pass.advice import MODELS, SCALES, WORKLOADS, Advice, Workload, advise, shapes_of
from fp8pass.cli import main
from fp8pass.errors import OptionError
from fp8pass.nn import RECIPES, quantize_
from fp8pass.options import Options
from fp8pass.problem import MRange
from fp8pass.problem_spec import parse_problem
from fp8pass.target import Target, architectures
from fp8pass.tuning.measured import Measured, Point, Record, key_of

SM90 = Target.parse("sm90")
DECODE = Workload.parse("decode")


def test_workloads() -> None:
    assert Workload.parse("decode:32x256+512") == DECODE
    assert DECODE.steps == ((8192, 1), (32, 512))
    assert Workload.parse("4x10+0").steps == ((40, 1),)
    assert Workload.parse("4x0+10").steps == ((4, 10),)
    assert {Workload.parse(name).name for name in WORKLOADS} == set(WORKLOADS)
    for bad in (
        "",
        "decoding",
        "decode:32x256",
        "0x1+1",
        "1x0+0",
        "-1x2+3",
        "\u0663x1+1",
        f"{'9' * 5000}x1+1",
        "1x2+3+4",
        "decode:",
    ):
        with pytest.raises(OptionError, match="allowed: 'decode'"):
            Workload.parse(bad)


def test_shapes() -> None:
    assert shapes_of("Llama-3-8B") == MODELS["llama-3-8b"]
    assert shapes_of("64,32;16, 8") == ((64, 32), (16, 8))
    for bad in ("", "gpt", "64", "64,0", "1,2,3", "1x2", "64,32;", "\u0663,1", f"1,{'9' * 5000}"):
        with pytest.raises(OptionError, match="allowed: 'llama-3-8b'"):
            shapes_of(bad)


@pytest.mark.parametrize("name", architectures())
def test_every_target_gets_a_recipe_and_a_sentence(name: str) -> None:
    target = Target.parse(name)
    for workload in map(Workload.parse, WORKLOADS):
        for calibrated in (True, False):
            found = advise(target, MODELS["llama-3-8b"], workload, Options(target=name),
                           calibrated=calibrated)  # fmt: skip
            assert found.recipe in RECIPES and found.why and found.basis == "stated"
            assert found.recipe == found.ranking[0].recipe
            assert (found.recipe == "static") <= calibrated
            assert found.recipe in found.text() and json.dumps(found.to_dict())


def test_nothing_is_advised_for_a_target_that_is_not_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not known is said there too
        target = Target.parse("sm999")
        found = advise(target, MODELS["llama-3-8b"], DECODE, Options(target="sm999"))
        assert (found.basis, found.recipe) == ("unknown", "dynamic")
        assert "nothing is known of sm999" in found.why and "(unknown)" in found.text()
        code, out, _ = command(capsys, "--target", "sm999")
        assert code == 0 and out.count("dynamic (unknown): nothing is known of sm999") == 3


def test_stated_facts() -> None:
    def recipe(name: str) -> str:
        options = Options(target=name)
        found = advise(Target.parse(name), [(4096, 4096)], DECODE, options, calibrated=False)
        return found.recipe

    assert recipe("sm90") == "dynamic"
    assert recipe("xpu-bmg") == "dynamic_tensor", "the documented default there"


def advised(monkeypatch: pytest.MonkeyPatch, static: float, row: float, rows: int = 32) -> Advice:
    """With times of the decode step; the prefill takes one millisecond in each."""
    records: dict[str, Record] = {}
    for scales, us, kernel in (("static", static, "torch_tensor"), ("row", row, "torch_row")):
        problem = parse_problem(f"{scales}, n=4096, k=4096", SM90)
        points = (
            Point(MRange(17, 32), rows, {kernel: us, "nonsense": 0.1}),
            Point(MRange(4097, None), 16384, {kernel: 1000.0}),
        )
        records[key_of(problem)] = Record(points)
    known = Measured(records)
    monkeypatch.setattr("fp8pass.tuning.session.measured_for", lambda t, o: known)
    return advise(SM90, [(4096, 4096)], DECODE)


def test_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = advised(monkeypatch, static=12.0, row=8.0)
    assert (slow.recipe, slow.basis) == ("dynamic", "measured")
    assert slow.ranking[0].milliseconds == pytest.approx((8.0 * 512 + 1000) / 1e3)
    assert "% faster than with static" in slow.why
    fast = advised(monkeypatch, static=8.0, row=12.0)
    assert fast.recipe == "static" and "without one take dynamic" in fast.why
    equal = advised(monkeypatch, static=10.1, row=10.0)
    assert equal.recipe == "static" and "within 2 %" in equal.why


def test_a_measurement_that_is_not_all_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    advised(monkeypatch, 1.0, 2.0)  # leaves its measurements in place
    other = advise(SM90, [(4096, 4096), (4096, 64)], DECODE)
    assert other.basis == "stated" and all(r.milliseconds is None for r in other.ranking)


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["advise", *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command(capsys, "--target", "sm90", "--no-calibrated", "--json")
    found = json.loads(out)
    assert code == 0 and [f["workload"]["name"] for f in found] == list(WORKLOADS)
    assert {f["recipe"] for f in found} == {"dynamic"}
    code, out, _ = command(capsys, "--target", "sm90", "--workload", "4x8+2")
    assert code == 0 and out.startswith("workload: 4 x 8 + 2 on sm90\n")
    assert command(capsys, "--target", "sm90", "--measure")[0] == 2
    code, _, err = command(capsys, "--target", "sm90", "--model-shapes", "gpt")
    assert code == 2 and "llama-3-8b" in err


@pytest.mark.parametrize("target", [None, "sm90", SM90])
def test_recipe_auto(target: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 16)).bfloat16()
    summary = quantize_(model, "auto", target=target, workload="decode", progress=False)
    assert summary.layers == 2 and summary.recipe in ("dynamic", "dynamic_tensor")
    assert summary.why and summary.why in str(summary)


def test_auto_with_a_calibration_may_be_static() -> None:
    from fp8pass.nn import calibrate

    model = torch.nn.Sequential(torch.nn.Linear(64, 32)).bfloat16()
    scales = calibrate(model, [torch.randn(4, 64).bfloat16()])
    summary = quantize_(model, "auto", calibration=scales, target="sm90", progress=False)
    assert summary.recipe == "static" and summary.layers == 1


def test_options_of_auto_alone() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    for more in ({"target": "sm90"}, {"workload": "decode"}):
        with pytest.raises(OptionError, match="for recipe 'auto'"):
            quantize_(model, "dynamic", **more)
    with pytest.raises(OptionError, match="workload 'x'"):
        quantize_(model, "auto", workload="x")
    assert set(SCALES) == set(RECIPES)
