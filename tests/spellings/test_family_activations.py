"""The MLP classes of transformers: each activation is fused with its quantise."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from graphs import Passed, assert_same_bits, assert_within_contract, run, trace, values
from torch import nn

import fp8pass
from fp8pass.nn import calibrate, quantize_

pytest.importorskip("transformers", minversion="5")

WIDTH, INNER = 64, 96
COMMON: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 64,
}
#: GPT-2 and Phi have names of their own for the sizes.
GPT2: dict[str, Any] = {"n_embd": WIDTH, "n_head": 4, "n_layer": 1, "vocab_size": 64}

#: family -> (module, config class, MLP class, further settings, form of the activation)
FAMILIES: dict[str, tuple[str, str, str, dict[str, Any], str]] = {
    "llama": ("llama", "LlamaConfig", "LlamaMLP", {}, "div"),
    "mistral": ("mistral", "MistralConfig", "MistralMLP", {}, "div"),
    "qwen3": ("qwen3", "Qwen3Config", "Qwen3MLP", {}, "div"),
    "granite": ("granite", "GraniteConfig", "GraniteMLP", {}, "div"),
    "olmo2": ("olmo2", "Olmo2Config", "Olmo2MLP", {}, "div"),
    "phi3": ("phi3", "Phi3Config", "Phi3MLP", {"pad_token_id": 0}, "div"),
    "glm4": ("glm4", "Glm4Config", "Glm4MLP", {"pad_token_id": 0}, "div"),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3Config", "DeepseekV3MLP", {}, "div"),
    "gemma3": ("gemma3", "Gemma3TextConfig", "Gemma3MLP", {}, "gelu_tanh"),
    "phi": ("phi", "PhiConfig", "PhiMLP", {"hidden_act": "gelu_new"}, "gelu_tanh_pow"),
    "starcoder2": (
        "starcoder2",
        "Starcoder2Config",
        "Starcoder2MLP",
        {"hidden_act": "gelu_pytorch_tanh"},
        "gelu_tanh",
    ),
    "gpt_neox": ("gpt_neox", "GPTNeoXConfig", "GPTNeoXMLP", {"hidden_act": "gelu"}, "gelu_erf"),
    "nemotron": ("nemotron", "NemotronConfig", "NemotronMLP", {"hidden_act": "relu2"}, "relu2"),
    "clip": ("clip", "CLIPTextConfig", "CLIPMLP", {"hidden_act": "quick_gelu"}, "gelu_quick"),
    "opt-like": ("clip", "CLIPTextConfig", "CLIPMLP", {"hidden_act": "relu"}, "relu"),
}
FORM = {name: entry[-1] for name, entry in FAMILIES.items()}


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def mlp(family: str, recipe: str) -> nn.Module:
    """A tiny random MLP of a family with FP8 linears."""
    folder, config_name, name, more, _ = FAMILIES[family]
    package = f"transformers.models.{folder}"
    config = getattr(importlib.import_module(package), config_name)(**COMMON, **more)
    made = getattr(importlib.import_module(f"{package}.modeling_{folder}"), name)(config)
    model: nn.Module = made.eval().to(torch.bfloat16)
    calibration = calibrate(model, [values(8, WIDTH)]) if recipe == "static" else None
    quantize_(model, recipe, calibration=calibration)
    return model


def traced(model: nn.Module, x: torch.Tensor) -> Any:
    """The graph of a model: its tensors are inputs."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    call: Callable[..., Any] = lambda x, *s: torch.func.functional_call(  # noqa: E731
        model, dict(zip(state, s, strict=True)), (x,)
    )
    inputs = (x, *state.values())
    return trace(call, *inputs, dynamic=(0,)), inputs


@pytest.mark.parametrize("recipe", ["static", "dynamic"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_once(family: str, recipe: str) -> None:
    model = mlp(family, recipe)
    graph, inputs = traced(model, values(6, WIDTH))
    passed = Passed(graph, "joint", strict=True)
    assert passed.fusions == 1, [(s.kind, s.code, s.message) for s in passed.record.sites]
    forms = [
        str(node.args[3])
        for node in passed.fused.graph.nodes
        if str(node.target) in ("fp8pass.silu_mul_quant.default", "fp8pass.act_mul_quant.default")
    ]
    assert [form.split(",")[0] for form in forms] == [FORM[family]]
    before = run(passed.before, *inputs)
    assert_same_bits(run(passed.after, *inputs), before)
    assert_same_bits(run(passed.fused, *inputs), before)
    for rows in (1, 3):
        other = (values(rows, WIDTH, seed=rows), *inputs[1:])
        assert_same_bits(run(passed.fused, *other), run(passed.before, *other))


@pytest.mark.parametrize("family", ["gemma3", "nemotron"])
def test_compiled(family: str) -> None:
    model = mlp(family, "dynamic")
    x = values(6, WIDTH)
    got = torch.compile(model, backend=fp8pass.fp8pass_backend, options={"fp8pass.strict": True})(x)
    sites = fp8pass.reports()[-1].sites
    assert len([s for s in sites if s.kind == "activation" and s.status == "fused"]) == 1
    assert_within_contract([got], [model(x)])
