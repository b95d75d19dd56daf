"""FP8 checkpoints for tests: a Hugging Face Llama folder rewritten in one of the known formats.

Weights are quantised here, with plain rules (amax / 448), so that a test needs no quantisation
library: ``write(source, folder, "dynamic")`` makes a folder that vLLM and transformers load.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8pass.errors import OptionError, choices

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0

#: recipe -> what it is.
RECIPES = {
    "bf16": "not quantised; for quantisation while loading (vLLM: quantization='fp8')",
    "dynamic": "compressed-tensors: weights per channel, activations per token",
    "static": "compressed-tensors: weights per tensor, activations per tensor, static",
    "fp8_static": "format 'fp8': weights per tensor, activations per tensor, static",
    "block": "format 'fp8': weights in blocks, activations in groups of one row, dynamic",
}
_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: Files of a model folder that are taken over as they are.
_BESIDE = (
    "tokenizer.json", "tokenizer_config.json", "generation_config.json",
    "chat_template.jinja", "special_tokens_map.json",
)  # fmt: skip


def write(
    source: Path,
    folder: Path,
    recipe: str,
    *,
    amax: Mapping[str, float] | None = None,
    block: tuple[int, int] = (128, 128),
) -> Path:
    """Write the model of ``source`` into ``folder`` in one format; returns ``folder``.

    Args:
        source: folder of a Llama-like model in bf16: ``config.json``, ``model.safetensors``.
        recipe: one of :data:`RECIPES`.
        amax: for the static recipes, name of a linear -> largest ``|input|``; linears without an
            entry get 6.
        block: rows and columns of a weight's block.

    Raises:
        OptionError: unknown recipe.
    """
    from safetensors.torch import load_file

    config = json.loads((source / "config.json").read_text("utf-8"))
    weights = load_file(source / "model.safetensors")
    _write(folder, config, weights, recipe, amax or {}, block)
    for name in _BESIDE:
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)
    return folder


def write_smollm2(folder: Path, recipe: str) -> Path:
    """Write SmolLM2-135M into ``folder``; a static recipe is calibrated on a chapter of a novel.

    Raises:
        UnsupportedError: the package with its weights is not installed.
    """
    from fp8pass.demo.weights import converted

    amax = _smollm2_amax() if "static" in recipe else None
    return write(converted(), folder, recipe, amax=amax)


def _smollm2_amax(tokens: int = 256) -> dict[str, float]:
    from fp8pass.calibration import calibrate
    from fp8pass.demo import text
    from fp8pass.demo.weights import converted, load

    model, tokenizer = load(converted())
    ids = tokenizer.encode(text.calibration_text())[:tokens]
    return calibrate(model, [torch.tensor([ids])], progress=False).amax


def write_tiny(folder: Path, recipe: str, *, seed: int = 0, **sizes: Any) -> Path:
    """Write a Llama of two layers with random weights (and a tokenizer of words ``t0 t1 ...``).

    Args:
        sizes: fields of the model's ``config.json`` that differ from the defaults below, such as
            ``hidden_size=512`` or ``rms_norm_eps=2e-6``.
    """
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "bos_token_id": 510,
        "eos_token_id": 511,
        "tie_word_embeddings": False,
        **sizes,
    }
    weights = _random_llama(config, torch.Generator().manual_seed(seed))
    _write(folder, config, weights, recipe, {}, (128, 128))
    _write_words(folder, config["vocab_size"])
    return folder


def _random_llama(config: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]

    def random(*shape: int, gain: float) -> Tensor:
        return (torch.randn(shape, generator=generator) * gain).bfloat16()

    def norm() -> Tensor:
        return 1 + random(hidden, gain=0.1)

    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    weights = {"model.embed_tokens.weight": random(config["vocab_size"], hidden, gain=0.5)}
    for layer in range(config["num_hidden_layers"]):
        place = f"model.layers.{layer}"
        for name, (n, k) in shapes.items():
            weights[f"{place}.{name}.weight"] = random(n, k, gain=2.0 / k**0.5)
        weights[f"{place}.input_layernorm.weight"] = norm()
        weights[f"{place}.post_attention_layernorm.weight"] = norm()
    weights["model.norm.weight"] = norm()
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = random(config["vocab_size"], hidden, gain=2.0 / hidden**0.5)
    return weights


def _write(
    folder: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    recipe: str,
    amax: Mapping[str, float],
    block: tuple[int, int],
) -> None:
    from safetensors.torch import save_file

    if recipe not in RECIPES:
        raise OptionError(f"unknown recipe {recipe!r}; allowed: {choices(RECIPES)}")
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if recipe == "bf16" or module.rpartition(".")[2] not in _LINEARS:
            found[name] = weight.contiguous()
            continue
        for suffix, tensor in _quantised(weight, recipe, amax.get(module, 6.0), block).items():
            found[f"{module}.{suffix}"] = tensor.contiguous()
    described = dict(config)
    if recipe != "bf16":
        described["quantization_config"] = _description(recipe, block)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(described, indent=1) + "\n", "utf-8")
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


def _quantised(
    weight: Tensor, recipe: str, amax: float, block: tuple[int, int]
) -> dict[str, Tensor]:
    """The tensors that stand for one weight ``[N, K]``; scales are float32, dequantising."""
    w = weight.float()
    if recipe == "block":
        scale = _block_amax(w, block) / FP8_MAX
        spread = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        return {
            "weight": _codes(w, spread[: w.shape[0], : w.shape[1]]),
            "weight_scale_inv": scale,
        }
    if recipe == "dynamic":
        scale = w.abs().amax(1, keepdim=True) / FP8_MAX
        return {"weight": _codes(w, scale), "weight_scale": scale}
    scale = w.abs().amax().reshape(1) / FP8_MAX
    return {
        "weight": _codes(w, scale),
        "weight_scale": scale,
        "input_scale": torch.tensor([amax / FP8_MAX]),
    }


def _codes(w: Tensor, scale: Tensor) -> Tensor:
    return (w / scale.clamp(min=1e-12)).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def _block_amax(w: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest magnitude of every block, the last ones smaller where the size does not divide."""
    n, k = w.shape
    pad = (0, -k % block[1], 0, -n % block[0])
    whole = torch.nn.functional.pad(w, pad)
    blocks = whole.reshape(-1, block[0], whole.shape[1] // block[1], block[1])
    return blocks.abs().amax((1, 3))


def _description(recipe: str, block: tuple[int, int]) -> dict[str, Any]:
    """``quantization_config`` of ``config.json``."""
    if recipe == "block":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": list(block),
        }
    if recipe == "fp8_static":
        return {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "ignored_layers": ["lm_head"],
        }
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    dynamic = recipe == "dynamic"
    weights = {**common, "dynamic": False, "strategy": "channel" if dynamic else "tensor"}
    inputs = {**common, "dynamic": dynamic, "strategy": "token" if dynamic else "tensor"}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": inputs,
                "output_activations": None,
            }
        },
    }


def _write_words(folder: Path, size: int) -> None:
    """A tokenizer of ``size`` words, the last two of them begin and end of a text."""
    words = {f"t{i}": i for i in range(size - 3)}
    words |= {"<unk>": size - 3, "<s>": size - 2, "</s>": size - 1}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": words[word], "content": word, "special": True, "single_word": False,
                "lstrip": False, "rstrip": False, "normalized": False,
            }
            for word in ("<unk>", "<s>", "</s>")
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }  # fmt: skip
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(about), "utf-8")
