"""transformers' FBGEMM and fine-grained FP8 linears for an absent GPU.

Their kernels are not there: the operators that the linears call are stand-ins of the same schema.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from captured import Block
from stand_ins import fbgemm, finegrained
from torch import nn

pytest.importorskip("transformers", minversion="5.20")
from transformers.integrations import fbgemm_fp8, finegrained_fp8  # noqa: E402

import fp8pass  # noqa: E402


@pytest.mark.parametrize("bias", [False, True])
def test_fbgemm(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products lowered; the quantise is left, for its upper bound is a tensor of the module."""
    fbgemm()
    monkeypatch.setattr(fbgemm_fp8, "on_device", lambda x: contextlib.nullcontext())
    model = Block(bias=bias)
    fbgemm_fp8.replace_with_fbgemm_fp8_linear(model, pre_quantized=True)
    model = model.to_empty(device="cpu")
    found = fp8pass.graphs_for(model, torch.randn(2, 3, 64).bfloat16(), target="sm90")
    sites = found.report.sites
    products = [site for site in sites if site.kind == "scaled_mm"]
    assert [site.status for site in products] == ["lowered"] * 3
    assert {site.key for site in products} == {
        "float8_e4m3fn/dynamic/token x float8_e4m3fn/static/channel"
    }
    left = [site for site in sites if site.kind == "quantize"]
    # of a norm, and of what no rule fuses
    assert {site.code for site in left} <= {"FP8-F030", "FP8-F002", "FP8-R010"}
    assert "FP8-F030" in {site.code for site in left}


@pytest.mark.parametrize("block_size", [(128, 128), None], ids=str)
def test_finegrained(block_size: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One scale per weight: taken apart, fused, lowered. Blocks: if a kernel takes them."""
    ops = finegrained()

    def matmul(A: Any, B: Any, Bs: Any, size: Any, dtype: Any, activation_scale: Any) -> Any:
        if size is None:
            return ops.w8a8_tensor_dynamic_fp8_matmul(A, B, Bs, dtype)
        return ops.w8a8_block_dynamic_fp8_matmul(A, B, Bs, size, dtype)

    kernels = finegrained_fp8.FineGrainedFP8(matmul, None, None)
    monkeypatch.setattr(finegrained_fp8, "_FINEGRAINED_FP8", kernels)
    model = Block(128, 256)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            linear = finegrained_fp8.FP8Linear(
                module.in_features, module.out_features, block_size=block_size
            )
            model.set_submodule(name, linear)
    model.requires_grad_(False)
    found = fp8pass.graphs_for(model, torch.randn(2, 3, 128).bfloat16(), target="sm90")
    products = [site for site in found.report.sites if site.kind == "scaled_mm"]
    fused = [site for site in found.report.sites if site.status == "fused"]
    if block_size is None or {site.status for site in products} == {"lowered"}:
        assert [site.status for site in products] == ["lowered"] * 3
        assert {site.kind for site in fused} == {"norm", "activation"}
    else:
        assert [(site.status, site.code) for site in products] == [("left", "FP8-R010")] * 3
        assert not fused
