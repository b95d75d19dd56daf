"""quantize_: what it replaces, what it leaves and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_models import IDS, Model
from torch import nn

from fp8pass.errors import OptionError, UnsupportedError
from fp8pass.nn import RECIPES, Calibration, Fp8Linear, calibrate, quantize_


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    with torch.no_grad():
        yield


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantize_model(recipe: str) -> None:
    model = Model()
    want = model(IDS)
    calibration = calibrate(model, [IDS]) if recipe == "static" else None
    embed = model.embed.weight
    summary = quantize_(model, recipe, calibration=calibration)
    assert summary.layers == 14 == sum(isinstance(m, Fp8Linear) for m in model.modules())
    assert set(summary.skipped) == {"lm_head"} and "skip" in summary.skipped["lm_head"]
    assert model.lm_head.weight is embed is model.embed.weight
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, Fp8Linear))
    saved = summary.bytes_before - summary.bytes_after
    assert 2.7 * weights < saved <= 3 * weights  # the scales are the rest
    assert "14 linears" in str(summary)
    assert (model(IDS) - want).norm() / want.norm() < 0.1
    again = quantize_(model, recipe, calibration=calibration)
    assert again.layers == 0 and again.bytes_before == again.bytes_after == summary.bytes_after
    assert len(again.skipped) == 15 and "already FP8" in again.skipped["layers.0.q_proj"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_model_state_dict_round_trip(recipe: str) -> None:
    source, model = Model(), Model()
    for m in (source, model):
        quantize_(m, recipe, calibration=calibrate(m, [IDS]) if recipe == "static" else None)
    model.load_state_dict(source.state_dict())
    assert torch.equal(model(IDS), source(IDS))


# -- what quantize_ leaves


def test_tied_weights_are_left_with_a_reason() -> None:
    model = Model()
    summary = quantize_(model, "dynamic", skip=())
    assert "tied" in summary.skipped["lm_head"] and type(model.lm_head) is nn.Linear
    untied = Model(tied=False)
    assert quantize_(untied, "dynamic", skip=()).skipped == {}


def test_one_module_in_two_places_is_replaced_once() -> None:
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.ReLU()), "b": shared})
    summary = quantize_(model, "dynamic")
    assert summary.layers == 1 and isinstance(model["b"], Fp8Linear)
    assert model["a"][0] is model["b"]
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": shared})
    assert "'b'" in quantize_(model, "dynamic", skip="b").skipped["a.0"]  # any name counts


@pytest.mark.parametrize(
    "skip,left",
    [
        ("q_proj", 2),
        (("layers.1.*",), 7),
        (["*.0.?_proj"], 4),
        (("layers.0.k_proj", "down*"), 3),
        (("nothing",), 0),
    ],
    ids=str,
)
def test_skip_patterns(skip: Any, left: int) -> None:
    assert quantize_(Model(tied=False), "dynamic", skip=skip).layers == 15 - left


class MyLinear(nn.Linear):
    pass


def test_what_is_left_and_why() -> None:
    model = nn.ModuleDict(
        {
            "ok": nn.Linear(8, 8),
            "subclass": MyLinear(8, 8),
            "meta": nn.Linear(8, 8, device="meta"),
            "no_rows": nn.Linear(8, 0),
            "no_width": nn.Linear(0, 8),
            "doubled": nn.Linear(8, 8).double(),
            "hooked": nn.Linear(8, 8),
            "patched": nn.Linear(8, 8),
            "infinite": nn.Linear(8, 8),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        }
    )
    model["hooked"].register_forward_hook(lambda *_: None)
    model["patched"].forward = lambda x: x
    model["infinite"].weight[0, 0] = float("inf")
    summary = quantize_(model, "dynamic")
    assert summary.layers == 1 and isinstance(model["ok"], Fp8Linear)
    for name, word in {
        "subclass": "MyLinear",
        "meta": "meta",
        "no_rows": "empty",
        "no_width": "empty",
        "doubled": "float64",
        "hooked": "hooks",
        "patched": "overridden",
        "infinite": "not finite",
        "normed": "ParametrizedLinear",
    }.items():
        assert word in summary.skipped[name], summary.skipped
    types = (nn.Linear, MyLinear)
    assert quantize_(model, "dynamic", linear_types=types).layers == 1
    assert isinstance(model["subclass"], Fp8Linear)


def test_transformer_encoder_layer_still_runs() -> None:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1, enable_nested_tensor=False
    ).eval()
    summary = quantize_(model, "dynamic")
    assert summary.layers == 0 and len(summary.skipped) == 3
    model(torch.randn(2, 3, 16))


def test_static_needs_a_calibration_and_leaves_what_it_did_not_reach() -> None:
    model = Model()
    with pytest.raises(OptionError, match=r"calibration=fp8pass.nn.calibrate\(model, inputs\)"):
        quantize_(model, "static")
    with pytest.raises(OptionError, match="got dict"):
        quantize_(model, "static", calibration={})
    with pytest.raises(OptionError, match="takes no calibration"):
        quantize_(model, "dynamic", calibration=Calibration({}))
    for other in ("nope", ["dynamic"], None):
        with pytest.raises(OptionError, match=r"unknown recipe .*'dynamic_tensor', 'auto'"):
            quantize_(model, other)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="'fp4'.*'dynamic'"):
        quantize_(model, "fp4")
    with pytest.raises(UnsupportedError, match="from_linear"):
        quantize_(nn.Linear(8, 8), "dynamic")
    assert not any(isinstance(m, Fp8Linear) for m in model.modules())
    amax = {"layers.0.q_proj": 1.0, "layers.0.k_proj": 0.0, "layers.0.v_proj": float("nan")}
    summary = quantize_(model, "static", calibration=Calibration(amax))
    assert summary.layers == 1
    assert summary.skipped["layers.1.q_proj"] == "not calibrated"
    assert "zeros" in summary.skipped["layers.0.k_proj"]
    assert "not finite" in summary.skipped["layers.0.v_proj"]
    scale = model.layers[0].q_proj.input_scale
    assert scale.dtype == torch.float32 and scale.shape == () and scale == torch.tensor(1 / 448)


def test_quantize_inside_a_compiled_wrapper() -> None:
    model = torch.compile(Model(), backend="eager")
    assert quantize_(model, "dynamic").layers == 14
