"""fp8pass.testing: layers, the recording backend, forcing a kernel, checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8pass.errors import NoKernelError, OptionError
from fp8pass.quant_key import PER_CHANNEL, PER_TENSOR, PER_TOKEN, GroupShape
from fp8pass.testing import Fp8TestLayer, RecordingBackend, forced_kernel
from fp8pass.testing.checkpoints import RECIPES, write, write_tiny
from fp8pass.testing.vllm_operators import OPERATORS, install, uninstall

BLOCK = GroupShape(128, 128)
LAYERS: dict[str, dict[str, Any]] = {
    "static": {"activation": PER_TENSOR, "weight": PER_TENSOR, "static": True},
    "dynamic_tensor": {"activation": PER_TENSOR, "weight": PER_TENSOR},
    "token": {"activation": PER_TOKEN, "weight": PER_CHANNEL},
    "unfused": {"activation": PER_TOKEN, "weight": PER_CHANNEL, "unfused": True},
    "block": {"activation": GroupShape(1, 128), "weight": BLOCK},
}


@pytest.fixture(scope="module", autouse=True)
def _operators_of_this_module() -> Iterator[None]:
    yield
    uninstall()
    assert not any(hasattr(torch.ops._C, name) for name in OPERATORS)


class Normed(nn.Module):
    """A norm and an FP8 linear."""

    def __init__(self, layer: nn.Module, size: int) -> None:
        super().__init__()
        self.layer = layer
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.layer(h.to(x.dtype) * self.weight.to(x.dtype))


def dequantised(layer: Fp8TestLayer) -> Tensor:
    """The layer's weight ``[N, K]`` in float32."""
    scale = layer.weight_scale
    if scale.dim() == 2 and scale.shape[1] > 1:
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        scale = scale[: layer.weight.shape[0], : layer.weight.shape[1]]
    return layer.weight.float() * scale


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_its_linear(name: str) -> None:
    install()
    layer = Fp8TestLayer(256, 384, **LAYERS[name])
    x = torch.randn(5, 256, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
    expected = x.float() @ dequantised(layer).t()
    out = layer(x)
    assert out.dtype == x.dtype and out.shape == (5, 384)
    error = (out.float() - expected).norm() / expected.norm()
    assert 0.001 < error < 0.05, error


@pytest.mark.parametrize(
    "bad",
    [
        {"activation": PER_TENSOR, "weight": PER_CHANNEL},
        {"activation": PER_TOKEN, "weight": PER_CHANNEL, "static": True},
        {"activation": GroupShape(1, 128), "weight": PER_CHANNEL},
        {"activation": GroupShape(1, 100), "weight": GroupShape(100, 100)},
    ],
)
def test_granularities_that_do_not_go_together(bad: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        Fp8TestLayer(256, 384, **bad)


@torch.no_grad()
@pytest.mark.parametrize("name", ["static", "dynamic_tensor", "token", "unfused"])
def test_the_backend_records_operators_and_matches(name: str) -> None:
    model = Normed(Fp8TestLayer(256, 384, **LAYERS[name]), 256).eval()
    backend = RecordingBackend(target="sm90", execute=False)
    torch.compile(model, backend=backend, fullgraph=True)(torch.randn(5, 256).bfloat16())
    assert backend.graphs == 1
    assert backend.count(torch.ops.aten._scaled_mm.default, before=True) == 1
    # another device's kernels are not chosen for tensors of a CPU, and that is what is recorded
    assert backend.report.graphs[0].verdict is not None
    assert backend.matched == {}

    here = RecordingBackend(execute=False)
    torch._dynamo.reset()
    torch.compile(model, backend=here, fullgraph=True)(torch.randn(5, 256).bfloat16())
    assert here.matched == {"norm fused": 1, "scaled_mm lowered": 1}
    here.check_before(torch.ops.aten._scaled_mm.default, "aten::_scaled_mm")
    here.check_after("fp8pass::cpu_scaled_mm")
    with pytest.raises(AssertionError, match="aten::_scaled_mm: 1 before, 0 after"):
        here.check_after("aten::_scaled_mm")


@torch.no_grad()
def test_the_backend_gives_code_that_runs() -> None:
    model = Normed(Fp8TestLayer(64, 96, **LAYERS["token"]), 64).eval()
    x = torch.randn(5, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
    backend = RecordingBackend()
    torch._dynamo.reset()
    out = torch.compile(model, backend=backend)(x)
    assert backend.matched["scaled_mm lowered"] == 1
    error = (out.float() - model(x).float()).norm() / model(x).float().norm()
    assert error < 0.02


@torch.no_grad()
def test_a_forced_kernel_is_taken_or_says_why_not() -> None:
    model = Normed(Fp8TestLayer(64, 96, **LAYERS["token"]), 64).eval()
    x = torch.randn(5, 64, dtype=torch.bfloat16)

    def kernels() -> set[str]:
        torch._dynamo.reset()
        backend = RecordingBackend(execute=False)
        torch.compile(model, backend=backend)(x)
        return {site.kernel for site in backend.report.select("scaled_mm", "lowered")}

    assert kernels() == {"cpu"}
    with forced_kernel("torch_dequant"):
        assert kernels() == {"torch_dequant"}
    assert "FP8PASS_FORCE" not in os.environ
    with forced_kernel("torch_tensor"), pytest.raises(Exception) as error:
        kernels()
    assert NoKernelError.__name__ in repr(error.value) or "torch_tensor" in str(error.value)
    with pytest.raises(OptionError), forced_kernel("no such kernel"):
        pass


def test_the_operators_are_defined_once_and_with_cudas_schemas() -> None:
    install()
    assert install() == []
    for name, (schema, _) in OPERATORS.items():
        found = str(getattr(torch.ops._C, name).default._schema)
        assert found.startswith(f"_C::{name}(") and found.endswith("-> ()"), schema


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_dequantises_to_its_model(recipe: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    plain = load_file(write_tiny(tmp_path / "plain", "bf16", hidden_size=192) / "model.safetensors")
    folder = write(tmp_path / "plain", tmp_path / recipe, recipe)
    config = json.loads((folder / "config.json").read_text())
    assert ("quantization_config" in config) == (recipe != "bf16")
    found = load_file(folder / "model.safetensors")
    assert (folder / "tokenizer.json").is_file()
    for name, weight in plain.items():
        module = name.removesuffix(".weight")
        scale = found.get(f"{module}.weight_scale", found.get(f"{module}.weight_scale_inv"))
        if scale is None:
            assert torch.equal(found[name], weight)
            continue
        assert found[name].dtype == torch.float8_e4m3fn and "layers" in name
        assert (f"{module}.input_scale" in found) == ("static" in recipe)
        if recipe == "block":
            scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            scale = scale[: weight.shape[0], : weight.shape[1]]
        error = (found[name].float() * scale - weight.float()).norm() / weight.float().norm()
        assert error < 0.04


def test_an_unknown_recipe_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="fp8_static"):
        write_tiny(tmp_path, "int4")
