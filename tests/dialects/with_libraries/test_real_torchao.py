"""torchao's own tensors, quantised through ``quantize_``, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captured import Block, calls, captured
from graphs import Passed, trace, values
from spell_zero_point import int8_asymmetric, int8_symmetric
from spelled import LINEARS
from torch import nn

torchao = pytest.importorskip("torchao")
from torchao.quantization import (  # noqa: E402
    Float8DynamicActivationFloat8WeightConfig,
    Float8StaticActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8StaticActivationInt8WeightConfig,
    PerRow,
    PerTensor,
    quantize_,
)
from torchao.quantization.quant_primitives import MappingType  # noqa: E402

import fp8pass  # noqa: E402

CONFIGS: dict[str, Any] = {
    "torchao_row": lambda: Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
    "torchao_tensor": lambda: Float8DynamicActivationFloat8WeightConfig(granularity=PerTensor()),
    "torchao_row_bounds": lambda: Float8DynamicActivationFloat8WeightConfig(
        granularity=PerRow(), activation_value_lb=1e-4, activation_value_ub=50.0
    ),
}


@pytest.fixture(autouse=True)
def any_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao asks for an H100 before it quantises; what it writes is the same on a CPU."""
    monkeypatch.setattr("torchao.quantization.quant_api._check_hardware_support", lambda _: None)


def quantised(config: Any, model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    quantize_(model, config)
    return model.eval()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("bias", [False, True])
def test_our_spelling_is_theirs(name: str, bias: bool) -> None:
    """The copy that the ordinary tests use gives the graph that the library gives."""
    model = quantised(CONFIGS[name](), nn.Linear(64, 48, bias=bias, dtype=torch.bfloat16))
    x = values(2, 3, 64)
    weight: Any = model.weight
    plain = [weight.qdata, weight.scale, *([model.bias.detach()] if bias else [])]
    ours = trace(LINEARS[name][0], x, *plain)
    assert sorted(calls(captured(model, x))) == sorted(calls(ours))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_products_are_lowered(name: str, dynamic: bool) -> None:
    graph = captured(quantised(CONFIGS[name](), Block(bias=True)), values(5, 64), dynamic=dynamic)
    sites = Passed(graph).sites("scaled_mm")
    assert [site.status for site in sites] == ["lowered"] * 3


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["torchao_row", "torchao_tensor"])
def test_compiled(name: str, device: str) -> None:
    """Near eager: where a norm's rounding moves the largest element, all codes of a row move."""
    model = quantised(CONFIGS[name](), Block(bias=True).to(device))
    x = values(2, 3, 64).to(device)
    x[0] = x[1]
    with torch.no_grad():
        wanted = model(x)
        torch._dynamo.reset()
        got = torch.compile(model, backend=fp8pass.fp8pass_backend)(x)
    for a, b in zip(got, wanted, strict=True):
        assert (a.float() - b.float()).norm() < 0.04 * b.float().norm()


def test_static() -> None:
    """Calibrated by observers. Each linear has a scale of its own: a norm is fused with one."""
    model, x = quantised(Float8StaticActivationFloat8WeightConfig(step="prepare"), Block()), None
    with torch.no_grad():
        model(x := values(5, 64))
    quantize_(model, Float8StaticActivationFloat8WeightConfig(step="convert"))
    passed = Passed(captured(model, x))
    fused = [site.key for site in passed.record.sites if site.status == "fused"]
    assert fused == ["float8_e4m3fn/static/tensor"] * 2
    assert [site.status for site in passed.sites("scaled_mm")] == ["lowered"] * 3
    assert [site.status for site in passed.sites("quantize")] == ["left"]


GRANULARITIES: dict[str, tuple[Any, str, str]] = {
    "row": (PerRow(), "token", "token"),
    "tensor": (PerTensor(), "tensor", "tensor"),
    "row_tensor": ([PerRow(), PerTensor()], "token", "token"),
    "tensor_row": ([PerTensor(), PerRow()], "tensor", "tensor"),
}


def int8_config(name: str, mapping: str, reduced: bool) -> Any:
    return Int8DynamicActivationInt8WeightConfig(
        granularity=GRANULARITIES[name][0],
        act_mapping_type=MappingType[mapping],
        reduce_range=reduced,
    )


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("mapping", ["SYMMETRIC", "ASYMMETRIC"])
@pytest.mark.parametrize("name", GRANULARITIES)
def test_int8(name: str, mapping: str, reduced: bool, dynamic: bool) -> None:
    """Every granularity and mapping: two producers fused, three products lowered, nothing left.

    torchao rounds the product to bf16 between its scales, so the product is read with the scale of
    the activation alone; the weight's scale, and the correction by the zero point, stay behind it.
    """
    model = quantised(int8_config(name, mapping, reduced), Block(bias=True))
    passed = Passed(captured(model, values(5, 64), dynamic=dynamic))
    end = "/asym" if mapping == "ASYMMETRIC" else ""
    fused = [site.key for site in passed.record.sites if site.status == "fused"]
    assert fused == [f"int8/dynamic/{GRANULARITIES[name][1]}{end}"] * 2
    products = passed.sites("scaled_mm", "lowered")
    assert [site.key.split(" x ")[0] for site in products] == [
        f"int8/dynamic/{GRANULARITIES[name][1]}"
    ] * 3
    assert len(passed.record.sites) == 5


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mapping", ["SYMMETRIC", "ASYMMETRIC"])
def test_our_spelling_of_int8_is_theirs(mapping: str, bias: bool) -> None:
    """The copy that the ordinary tests use gives the operators of the library, but for views."""
    model = quantised(
        int8_config("row", mapping, False), nn.Linear(64, 48, bias=bias, dtype=torch.bfloat16)
    )
    x = values(2, 3, 64)
    weight: Any = model.weight
    vector = [model.bias.detach()] if bias else []
    fn = int8_asymmetric if mapping == "ASYMMETRIC" else int8_symmetric
    ours, theirs = (
        sorted(call for call in calls(graph) if ".view." not in call)
        for graph in (trace(fn, x, weight.qdata, weight.scale, *vector), captured(model, x))
    )
    assert ours == theirs


@pytest.mark.parametrize("mapping", ["SYMMETRIC", "ASYMMETRIC"])
def test_int8_compiled(mapping: str) -> None:
    model = quantised(int8_config("row", mapping, False), Block(bias=True))
    x = values(2, 3, 64)
    x[0] = x[1]
    with torch.no_grad():
        wanted = model(x)
        torch._dynamo.reset()
        got = torch.compile(model, backend=fp8pass.fp8pass_backend)(x)
    for a, b in zip(got, wanted, strict=True):
        assert (a.float() - b.float()).norm() < 0.02 * b.float().norm()


@pytest.mark.parametrize("mapping", ["SYMMETRIC", "ASYMMETRIC"])
def test_int8_static(mapping: str) -> None:
    """One scale (and zero point) for each linear, in a tensor of its own."""
    zero = torch.tensor([[3]], dtype=torch.int8) if mapping == "ASYMMETRIC" else None
    config = Int8StaticActivationInt8WeightConfig(
        act_quant_scale=torch.tensor([[0.05]]),
        act_quant_zero_point=zero,
        granularity=PerTensor(),
        act_mapping_type=MappingType[mapping],
    )
    passed = Passed(captured(quantised(config, Block(bias=True)), values(5, 64)))
    fused = [site.key for site in passed.record.sites if site.status == "fused"]
    assert fused == ["int8/static/tensor" + ("" if zero is None else "/asym")] * 2
    assert [site.status for site in passed.sites("scaled_mm")] == ["lowered"] * 3
    assert [site.status for site in passed.sites("quantize")] == ["left"]


def test_left_as_they_are() -> None:
    """Weight-only FP8: nothing is rewritten, nothing fails."""
    model = quantised(Float8WeightOnlyConfig(), Block())
    report = fp8pass.explain(model, values(5, 64))
    assert not [site for graph in report.graphs for site in graph.sites if site.status == "fused"]
