"""What the commands targets and kernels say, and that docs/backends.md says the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8pass.cli import main
from fp8pass.lowerings import kernel_names
from fp8pass.problem_spec import parse_problem
from fp8pass.reasons import CATALOGUE
from fp8pass.survey import default_problems, markdown, survey
from fp8pass.target import Target, architectures

ROOT = Path(__file__).resolve().parents[1]
WITHOUT_FP8 = {"sm70", "sm75", "sm80", "sm86", "gfx90a", "gfx1100"}


@pytest.mark.parametrize("name", [*architectures(), "cpu"])
def test_every_kernel_answers_every_problem(name: str) -> None:
    target = Target.parse(name)
    problems = default_problems(target)
    assert len(problems) == 9 * 2 * 2 * 4
    found = survey(target, problems)
    assert json.dumps(found) == json.dumps(survey(Target.parse(name), problems)), "deterministic"
    assert [k["name"] for k in found["kernels"]] == list(kernel_names())
    for asked in found["problems"]:
        chosen = {part.partition("=")[2] for part in asked["plan"].split(";")} - {""}
        assert [a["kernel"] for a in asked["kernels"]] == list(kernel_names())
        for answer in asked["kernels"]:
            assert (answer["answer"] == "chosen") == (answer["kernel"] in chosen)
            if answer["answer"] != "chosen":
                assert answer["code"] in CATALOGUE and answer["kernel"] in answer["message"]
        assert chosen or asked["code"] == "FP8-L012"
        if "ue8m0" in asked["problem"]:
            assert not any("torch" in name or name == "cpu" for name in chosen)
        if target.arch in WITHOUT_FP8 and "float8" in asked["problem"]:
            assert not any(n.startswith(("torch_tensor", "torch_row", "triton_")) for n in chosen)
    for asked in found["producers"]:
        assert sum(a["answer"] == "chosen" for a in asked["kernels"]) == 1


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_the_list_of_targets(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command(capsys, "targets", "--json")
    rows = json.loads(out)
    assert code == 0 and [row["name"] for row in rows] == list(architectures())
    by_name = {row["name"]: row for row in rows}
    assert by_name["gfx942"]["fp8_dtype"] == "float8_e4m3fnuz"
    assert by_name["gfx942"]["fp8_max"] == 240
    assert by_name["sm80"]["fp8_dtype"] is None and by_name["sm80"]["notes"]
    code, out, _ = command(capsys, "targets")
    assert code == 0 and len(out.splitlines()) == len(rows) + 1


def test_one_problem_in_detail(capsys: pytest.CaptureFixture[str]) -> None:
    problem = "token x channel, m=1-, n=4096, k=4096, out=bf16, bias"
    code, out, _ = command(capsys, "kernels", "--target", "sm90", "--problem", problem)
    assert code == 0
    assert "float8_e4m3fn/dynamic/token x float8_e4m3fn/static/channel, m=1-, n=4096" in out
    assert "vllm_cutlass" in out and "FP8-L011" in out and "for 257- rows" in out
    code, out, _ = command(
        capsys, "kernels", "--target", "sm90", "--problem", problem, "--option", "force=torch_row",
        "--json",
    )  # fmt: skip
    (asked,) = json.loads(out)["problems"]
    assert asked["plan"] == "1-=torch_row" and asked["why"] == "forced"


def test_rows_that_are_not_named(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = command(capsys, "kernels", "--target", "cpu", "--problem", "row", "--json")
    assert [p["m"] for p in json.loads(out)["problems"]] == ["1", "4", "17", "0-"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--target", "sm999"), "sm999"),
        (("--target", "sm90", "--problem", "tokens"), "scales 'tokens' are not known"),
        (("--target", "sm90", "--problem", "row, q=3"), "'q=3' is not known"),
        (("--target", "sm90", "--problem", "row", "--option", "force"), "NAME=VALUE"),
        (
            ("--target", "sm90", "--problem", "row, m=8", "--option", "force=torch_tensor"),
            "FP8-L003",
        ),
    ],
)
def test_mistakes(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = command(capsys, "kernels", *arguments)
    if code == 0:  # a name that has become a target by itself
        assert words == "sm999" and out
        return
    assert code == 2 and not out and words in err


def test_the_page_is_fresh() -> None:
    page = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")
    assert page == markdown(), "python -m fp8pass.survey docs/backends.md"


def test_provenance_is_marked() -> None:
    lines = markdown().splitlines()
    sm90, sm120 = (
        next(line for line in lines if line.startswith(f"| {name}")) for name in ("sm90", "sm120")
    )
    assert "**torch_tensor**," in sm90 and "**torch_tensor†**" in sm120


def test_a_problem_of_a_target() -> None:
    target = Target.parse("gfx942")
    assert str(parse_problem("row", target).weight) == "float8_e4m3fnuz/static/channel"
    assert parse_problem("row", target).device_type == target.device_type
