"""The demo from end to end on the tiny model, and what it does where torch has no such product."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
from rich.console import Console

from fp8pass.demo import run as demo
from fp8pass.demo.model import load
from fp8pass.demo.reference import reference_products
from fp8pass.demo.run import Plan, passed, probe_product, run
from fp8pass.demo.show import show
from fp8pass.demo.variants import Variant
from fp8pass.errors import OptionError

SMALL: dict[str, Any] = {"model": "tiny", "window": 64, "tokens": 128}


def shown(result: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=140)
    show(result, console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "COMPARED_TOKENS", 512)


def test_everything_is_measured_and_every_check_holds() -> None:
    said: list[str] = []
    result = run(Plan(**SMALL), said.append)
    assert passed(result), result["checks"]
    assert json.loads(json.dumps(result)) == result

    assert result["tokens"] == 128 and result["windows"] == 2
    assert {"torch", "fp8pass", "python"} <= set(result["versions"])
    assert result["machine"]["target"] and result["machine"]["threads"] >= 1
    variants = result["variants"]
    assert set(variants) == {"bf16", "stock", "fp8pass", "fp8pass_prepared"}
    for key, variant in variants.items():
        if key == "stock" and variant["error"]:
            continue  # torch 2.11 has no row-wise product on a CPU
        assert variant["perplexity_tokens"] == 128 and variant["perplexity"] > 1
        assert len(variant["seconds"]) >= 5 and variant["compile_seconds"] >= 0
        assert variant["continuation"]
    assert result["reference"]["perplexity"] > 1
    assert variants["fp8pass"]["to_reference"]["tokens"] >= 128

    # memory: fp8 is half of bf16, prepared is fp8 and bf16
    sizes = {key: variant["weights_bytes"] for key, variant in variants.items()}
    assert sizes["bf16"]["fp8"] == sizes["fp8pass"]["prepared"] == 0
    assert sizes["fp8pass_prepared"]["prepared"] == 2 * sizes["fp8pass"]["fp8"] > 0

    kinds = [(site["kind"], site["status"]) for site in result["sites"]]
    assert kinds.count(("norm", "fused")) == 4
    assert kinds.count(("activation", "fused")) == 2
    assert kinds.count(("scaled_mm", "lowered")) == 14
    left = [site for site in result["sites"] if site["status"] == "left"]
    assert sorted(site["kind"] for site in left) == ["norm", "quantize", "quantize"]
    assert all(site["code"].startswith("FP8-") and site["message"] for site in left)

    text = shown(result)
    for expected in ("FP8, fp8pass prepared", "greedy continuation", "GEMM kernels", "ok"):
        assert expected in text
    assert "FAILED " not in text.replace("ASSERT FAILED", "")  # torch 2.11 words its error so
    assert any("compiling FP8, fp8pass prepared" in line for line in said)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """All variants run eagerly, with quick products: for what does not depend on compiling."""

    def compile(self: Variant, ids: torch.Tensor) -> None:
        def call(ids: torch.Tensor) -> torch.Tensor:
            with reference_products():
                logits: torch.Tensor = self.module(ids)
                return logits

        self.call, self.first_call_seconds = call, 1.0

    monkeypatch.setattr(Variant, "compile", compile)


@pytest.mark.usefixtures("uncompiled")
def test_without_the_pass_the_checks_fail() -> None:
    """The control: what fp8pass has not touched must not look like success."""
    result = run(Plan(**SMALL, skip_stock=True), lambda text: None)
    assert not passed(result)
    assert "stock" not in result["variants"]
    for key in ("fp8pass", "fp8pass_prepared"):
        assert not result["checks"][f"sites_{key}"]["ok"]
        assert result["checks"][f"perplexity_{key}_vs_reference"]["ok"]
    assert not result["checks"]["products_executed_fp8pass"]["ok"]
    assert "FAILED" in shown(result)


@pytest.mark.usefixtures("uncompiled")
def test_all_recipes_and_few_tokens_where_stock_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "TOO_SLOW_SECONDS", 0.0)
    result = run(Plan(**SMALL, recipe="all", numerics="both"), lambda text: None)
    assert list(result["recipes"]) == ["dynamic", "static", "dynamic_tensor"]
    for recipe, record in result["recipes"].items():
        variants = record["variants"]
        if not variants["stock"]["error"]:
            assert variants["stock"]["tokens_per_forward"] == 4
            assert ("fp8pass_4_tokens" in variants) == (recipe != "dynamic")
        assert variants["stock"]["perplexity"] is None
        assert variants["stock"]["continuation"] is None
        assert variants["fp8pass"]["perplexity_tokens"] == 128
        assert variants["fp8pass_prepared_fast"]["to_reference"]["tokens"] >= 128
        assert f"{recipe}: perplexity_reference_vs_bf16" in result["checks"]
    assert "stock is measured on 4 tokens" in shown(result)


def test_a_torch_without_the_product_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on torch 2.11, whose CPU has no row-wise product: everything else goes on."""
    real = torch._scaled_mm

    def no_rows(a: Any, b: Any, scale_a: Any, scale_b: Any, **options: Any) -> Any:
        if scale_a.numel() > 1 or scale_b.numel() > 1:
            raise RuntimeError("row-wise scaling is not here\nat all")
        return real(a, b, scale_a, scale_b, **options)

    model = load("tiny").quantised("dynamic", 0)
    monkeypatch.setattr(torch, "_scaled_mm", no_rows)
    probe = probe_product(model, 64)
    assert probe["error"] == "RuntimeError: row-wise scaling is not here"
    found = demo._compare("dynamic")
    assert found["scales"] == "per-tensor x per-tensor" and "row-wise" in found["row_wise_error"]
    assert [item["differing"] for item in found["bit_identical"]] == [0, 0, 0]


def test_probe_measures_the_product() -> None:
    model = load("tiny").quantised("dynamic_tensor", 0)
    probe = probe_product(model, 64)
    assert probe["error"] == "" and probe["gmac_per_second"] > 0
    assert probe["estimated_seconds_per_forward"] > 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "big"}, "unknown model 'big'; allowed: .*smollm2"),
        ({"recipe": "int8"}, "unknown recipe 'int8'; allowed: .*dynamic.*all"),
        ({"numerics": "loose"}, "unknown numerics 'loose'; allowed: .*exact"),
        ({"window": 8}, "window is 8; allowed: 32 to 2048"),
        ({"tokens": 10}, "tokens is 10"),
    ],
)
def test_a_bad_option_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Plan(**values)


@pytest.mark.parametrize("recipe", ["dynamic", "static", "dynamic_tensor"])
def test_recipes_copy_the_model(recipe: str) -> None:
    model = load("tiny")
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    module = model.quantised(recipe, 256)
    ids = torch.tensor([model.tokenizer.encode("Catherine was in great good looks.")])
    with torch.no_grad(), reference_products() as mode:
        exact, quantised = model.module(ids).float(), module(ids).float()
    assert mode.calls == 7 * model.layers
    assert 0 < (quantised - exact).norm() < 0.3 * exact.norm()
    assert all(torch.equal(before[name], t) for name, t in model.module.state_dict().items())
    with pytest.raises(OptionError, match="unknown recipe 'int4'"):
        model.quantised("int4", 0)
