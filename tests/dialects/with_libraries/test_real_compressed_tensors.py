"""compressed-tensors, run compressed by transformers' ``CompressedTensorsFP8Linear``, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captured import Block, calls, captured
from graphs import Passed, trace, values
from spelled import LINEARS, operands
from torch import nn

pytest.importorskip("compressed_tensors")
pytest.importorskip("transformers", minversion="5.20")
from transformers.integrations import compressed_tensors as integration  # noqa: E402

import fp8pass  # noqa: E402


def quantised(model: nn.Module, bias: bool) -> nn.Module:
    """``model`` as a checkpoint with ``use_optimized_inference=True`` is loaded."""
    integration.replace_with_compressed_tensors_fp8_linear(model, targets=["Linear"])
    for i, (name, module) in enumerate(list(model.named_modules())):
        if not isinstance(module, integration.CompressedTensorsFP8Linear):
            continue
        weight, scale = operands(
            "compressed_tensors", module.out_features, module.in_features, seed=i
        )
        module.weight = nn.Parameter(weight, requires_grad=False)
        module.weight_scale = nn.Parameter(scale, requires_grad=False)
        if bias:
            vector = torch.randn(module.out_features, dtype=torch.bfloat16)
            module.bias = nn.Parameter(vector, requires_grad=False)
        assert name
    return model.eval()


@pytest.mark.parametrize("bias", [False, True])
def test_our_spelling_is_theirs(bias: bool) -> None:
    model = quantised(nn.Sequential(nn.Linear(64, 48, bias=bias, dtype=torch.bfloat16)), bias)
    layer: Any = model[0]
    x = values(2, 3, 64)
    plain = [layer.weight.detach(), layer.weight_scale.detach()]
    plain += [layer.bias.detach()] if bias else []
    ours = trace(LINEARS["compressed_tensors"][0], x, *plain)
    assert sorted(calls(captured(model, x))) == sorted(calls(ours))


@pytest.mark.parametrize("dynamic", [False, True])
def test_products_are_lowered(dynamic: bool) -> None:
    model = quantised(Block(bias=True), True)
    sites = Passed(captured(model, values(5, 64), dynamic=dynamic)).sites("scaled_mm")
    assert [site.status for site in sites] == ["lowered"] * 3


def test_compiled() -> None:
    model, x = quantised(Block(bias=True), True), values(2, 3, 64)
    with torch.no_grad():
        wanted = model(x)
        torch._dynamo.reset()
        got = torch.compile(model, backend=fp8pass.fp8pass_backend)(x)
    for a, b in zip(got, wanted, strict=True):
        assert (a.float() - b.float()).norm() < 0.02 * b.float().norm()


@pytest.mark.parametrize("strategy", ["token", "tensor"])
@pytest.mark.parametrize(
    ("kind", "symmetric"), [("float", True), ("int", True), ("int", False)], ids=str
)
def test_fake_quantisation_is_left(kind: str, symmetric: bool, strategy: str) -> None:
    """The library's own forward multiplies in bf16: no product of codes, nothing to fuse, no error.

    FP8, and INT8 with and without a zero point of the activation (W8A8).
    """
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    bits = {"num_bits": 8, "type": kind}
    dynamic = strategy == "token"
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**bits, symmetric=True, strategy="tensor", dynamic=False),
        input_activations=QuantizationArgs(
            **bits, symmetric=symmetric, strategy=strategy, dynamic=dynamic
        ),
    )
    model = nn.Sequential(nn.Linear(64, 48, dtype=torch.bfloat16))
    config = QuantizationConfig(config_groups={"all": scheme}, quantization_status="frozen")
    apply_quantization_config(model, config)
    for name, parameter in model.named_parameters():
        if name.endswith("_scale"):
            parameter.data.fill_(0.01)
    report = fp8pass.explain(model, values(5, 64))
    statuses = {site.status for graph in report.graphs for site in graph.sites}
    assert statuses <= {"left"}


@pytest.mark.parametrize("bias", [False, True])
def test_for_an_absent_gpu(bias: bool) -> None:
    """As on a CPU: every product lowered, norm and activation fused, with the GPU's kernels."""
    model = quantised(Block(512, 1024, bias=bias), bias)
    report = fp8pass.graphs_for(model, values(5, 512), target="sm90").report
    products = report.select("scaled_mm")
    assert [site.status for site in products] == ["lowered"] * 3, [s.message for s in products]
    assert {site.kernel for site in products} == {"triton_skinny"}
    fused = [site for site in report.sites if site.status == "fused"]
    assert [(site.kind, site.kernel) for site in fused] == [
        ("norm", "triton"), ("activation", "triton"),
    ]  # fmt: skip
