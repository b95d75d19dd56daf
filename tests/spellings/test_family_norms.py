"""The norm classes of model families, as ``transformers`` has them: each is read and fused."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from graphs import Passed, Reading, assert_same_bits, run, trace, values
from spell import static, tensor, token
from torch import nn

pytest.importorskip("transformers")

Tensor = torch.Tensor
H = 64
S = torch.tensor(0.02)
LLAMA = "mean,rsqrt,after_cast,bfloat16"
GEMMA = "mean,rsqrt,before_cast,bfloat16"

#: family -> (module, class, form of a bf16 norm)
FAMILIES = {
    "llama": ("llama", "LlamaRMSNorm", LLAMA),
    "qwen3": ("qwen3", "Qwen3RMSNorm", LLAMA),
    "mistral": ("mistral", "MistralRMSNorm", LLAMA),
    "gemma3": ("gemma3", "Gemma3RMSNorm", GEMMA),
    "qwen3_next": ("qwen3_next", "Qwen3NextRMSNorm", GEMMA),
    "olmo2": ("olmo2", "Olmo2RMSNorm", GEMMA),
    "gpt_oss": ("gpt_oss", "GptOssRMSNorm", GEMMA),
    "phi3": ("phi3", "Phi3RMSNorm", LLAMA),
    "granite": ("granite", "GraniteRMSNorm", LLAMA),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3RMSNorm", LLAMA),
    "glm4": ("glm4", "Glm4RMSNorm", LLAMA),
}


def norm_of(family: str, weight: torch.dtype) -> nn.Module:
    """A norm of ``H`` values with a random weight."""
    module, name, _ = FAMILIES[family]
    made = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
    norm: nn.Module = made(H)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(H, generator=generator) * 0.3 + 1)
    return norm.to(weight)


def quantised(
    norm: nn.Module, quant: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
) -> Callable[..., tuple[Tensor, ...]]:
    """``norm`` with its weight as an argument, and a quantise behind it."""

    def fn(x: Tensor, r: Tensor, s: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(dict(norm.named_parameters()), weights, strict=True))
        total = x + r
        y = torch.func.functional_call(norm, named, (total,))
        return *quant(y, s), total

    return fn


@pytest.mark.parametrize("quant", [static, token, tensor])
@pytest.mark.parametrize("family", FAMILIES)
def test_its_norm_is_fused(family: str, quant) -> None:  # type: ignore[no-untyped-def]
    norm = norm_of(family, torch.bfloat16)
    inputs = (values(2, 5, H), values(2, 5, H, seed=4), S, *norm.parameters())
    inputs = tuple(value.detach() for value in inputs)
    traced = trace(quantised(norm, quant), *inputs, dynamic=(0, 1))
    reading = Reading(traced)
    reading.check(*inputs)
    assert reading.forms("norm") == [FAMILIES[family][2]]
    passed = Passed(traced, strict=True)
    assert passed.fusions == 1
    (site,) = passed.sites("norm")
    assert (site.status, site.rule) == ("fused", "add_rms_norm_quant")
    assert_same_bits(run(passed.fused, *inputs), run(passed.before, *inputs))


@pytest.mark.parametrize("x", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_every_pair_of_dtypes(family: str, weight: torch.dtype, x: torch.dtype) -> None:
    norm = norm_of(family, weight)
    inputs = (values(5, H, dtype=x), values(5, H, dtype=x, seed=4), S, *norm.parameters())
    inputs = tuple(value.detach() for value in inputs)
    passed = Passed(trace(quantised(norm, token), *inputs), strict=True)
    assert passed.fusions == 1
    assert_same_bits(run(passed.fused, *inputs), run(passed.before, *inputs))
