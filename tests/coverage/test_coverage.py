"""``fp8pass coverage``: the counts are right, and as committed; the command says what fails."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from coverage_golden import FILE, compact
from torch import nn

from fp8pass.coverage.count import count
from fp8pass.coverage.recipes import RECIPES

transformers = pytest.importorskip("transformers")


class _RMSNorm(nn.RMSNorm):
    pass


class _Block(nn.Module):
    """One of each: norm to two linears, SiLU·mul, a chunked product, a linear with no producer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = _RMSNorm(128)
        self.gate, self.up = nn.Linear(128, 256, bias=False), nn.Linear(128, 256, bias=False)
        self.down = nn.Linear(256, 128, bias=False)
        self.packed, self.last = nn.Linear(128, 256), nn.Linear(128, 128)
        self.alone = nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        h = self.down(F.silu(self.gate(y)) * self.up(y.view(-1, 128)).view(*x.shape[:-1], 256))
        a, b = self.packed(self.alone(h)).chunk(2, -1)
        return self.last(b * F.gelu(a))


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_pairs_and_products_of_a_block(recipe: str) -> None:
    model, x = _Block().to(torch.bfloat16).eval(), torch.randn(2, 3, 128, dtype=torch.bfloat16)
    RECIPES[recipe].apply(model, (x,))
    counted = count(model, (x,), RECIPES[recipe].granularity)
    assert counted.gemms == ["gate", "up", "down", "alone", "packed", "last"]
    pairs = [(pair.kind, pair.consumers) for pair in counted.pairs]
    expected = [("norm", ["gate", "up"]), ("activation", ["down"]), ("activation", ["last"])]
    if recipe == "weight_only":
        expected = []  # no input is quantised
    if recipe == "static":  # scales that calibration could not prove to be one
        pairs = [(kind, [c]) for kind, cs in pairs for c in cs]
        expected = [(kind, [c]) for kind, cs in expected for c in cs]
    assert pairs == expected
    assert not counted.not_fusible


class _Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = _RMSNorm(32), nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x.view(-1, 4, 32)).view(-1, 128))


@pytest.mark.parametrize(("recipe", "pairs"), [("dynamic", 0), ("dynamic_tensor", 1)])
def test_rows_that_a_view_joins_are_no_pair_per_token(recipe: str, pairs: int) -> None:
    model, x = _Heads().to(torch.bfloat16).eval(), torch.randn(3, 128, dtype=torch.bfloat16)
    RECIPES[recipe].apply(model, (x,))
    counted = count(model, (x,), RECIPES[recipe].granularity)
    assert (len(counted.pairs), len(counted.not_fusible)) == (pairs, 1 - pairs)


class _Changed(nn.Module):
    """The norm's output is written to, or cut, or copied, before the linear reads it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.norm, self.out = how, _RMSNorm(128), nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        if self.how == "written":
            y.add_(1)
        elif self.how == "cut":
            y = y[:1]
        elif self.how == "copied":
            y = y + 0
        return self.out(y)


@pytest.mark.parametrize(
    ("how", "pairs"), [("as it is", 1), ("written", 0), ("cut", 0), ("copied", 0)]
)
def test_only_the_very_output_makes_a_pair(how: str, pairs: int) -> None:
    model, x = _Changed(how).to(torch.bfloat16).eval(), torch.randn(3, 128, dtype=torch.bfloat16)
    RECIPES["dynamic"].apply(model, (x,))
    assert len(count(model, (x,), "token").pairs) == pairs


# ---- the table -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    """The committed results, if they were made with the versions that are installed."""
    data: dict[str, Any] = json.loads(FILE.read_text())
    for module in (torch, transformers):
        made, here = data[module.__name__], module.__version__
        if made.split(".")[:2] != here.split(".")[:2]:
            pytest.skip(f"made with {module.__name__} {made}, this is {here}")
    return data


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("llama", "dynamic"),
        ("gemma3", "static"),
        ("phi3", "dynamic_tensor"),
        ("deepseek-v3", "dynamic"),
        ("starcoder2", "static"),
        ("llama", "group128"),
        ("qwen3", "int8_dynamic"),
    ],
)
def test_a_family_is_as_committed(golden: dict[str, Any], family: str, recipe: str) -> None:
    from fp8pass.coverage.run import cell

    found = cell(family, recipe)
    assert not found.error
    assert found.differing == 0
    assert found.graphs == 1
    assert compact(asdict(found)) == golden["cells"][family][recipe]


def test_every_family_is_committed(golden: dict[str, Any]) -> None:
    from fp8pass.coverage.families import FAMILIES

    wanted = {name for name, recipe in RECIPES.items() if recipe.required}
    assert set(golden["cells"]) == set(FAMILIES)
    for family, recipes in golden["cells"].items():
        assert set(recipes) >= wanted, family
        for name in wanted:
            assert "error" not in recipes[name]
            lowered, expected = recipes[name]["gemms"].split("/")
            assert lowered == expected, family


# ---- the command ---------------------------------------------------------------------------------


def _main(*arguments: str) -> int:
    from fp8pass.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["coverage", *arguments])
    return int(ended.value.code or 0)


def test_the_command_writes_json_and_markdown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8pass.coverage.spelled.spellings", lambda: "")
    out, page = tmp_path / "out.json", tmp_path / "page.md"
    chosen = ("--family", "llama", "--recipe", "dynamic")
    assert _main(*chosen, "--json", str(out), "--markdown", str(page)) == 0
    data = json.loads(out.read_text())
    assert (data["schema"], data["torch"]) == (1, torch.__version__)
    (cell,) = data["cells"]
    assert cell["pairs"] == {"expected": 6, "fused": 6}
    assert cell["gemms"] == {"expected": 14, "lowered": 14}
    assert "| llama | 6/6 pairs, 14/14 products |" in page.read_text()
    assert "6/6" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({}, 0, ""),
        ({"pairs": {"expected": 20, "fused": 19}}, 0, ""),
        ({"pairs": {"expected": 20, "fused": 18}}, 1, "18 of 20 pairs fused"),
        ({"pairs": {"expected": 1, "fused": 2}}, 1, "only 1 were counted"),
        ({"gemms": {"expected": 20, "lowered": 19}}, 1, "19 of 20 products lowered"),
        ({"differing": 1}, 1, "1 elements differ"),
        ({"error": "RuntimeError: no"}, 1, "RuntimeError: no"),
        ({"error": "RuntimeError: no", "required": False}, 0, "not required"),
    ],
)
def test_what_makes_the_command_fail(
    change: dict[str, Any],
    code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from fp8pass.coverage import run

    full = {"expected": 20, "fused": 20}, {"expected": 20, "lowered": 20}
    made = run.Cell("llama", "dynamic", **{"pairs": full[0], "gemms": full[1], **change})
    monkeypatch.setattr(run, "cell", lambda *_: made)
    assert _main("--family", "llama", "--recipe", "dynamic") == code
    assert text in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("option", ["--family", "--recipe"])
def test_an_unknown_name_is_said(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(option, "lama") == 2
    error = capsys.readouterr().err
    assert "'lama'" in error and "allowed" in error


def test_a_family_that_cannot_be_compiled_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8pass.coverage import run

    def broken(_name: str) -> Any:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(run, "family", broken)
    found = run.cell("llama", "dynamic")
    assert found.error == "RuntimeError: first line"
    assert found.shortfall


def test_without_transformers_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    assert _main("--family", "llama") == 2
    assert "pip install 'fp8pass[demo]'" in capsys.readouterr().err
