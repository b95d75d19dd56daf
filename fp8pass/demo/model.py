"""What the demo runs: a model as one function from token ids to logits, with its tokenizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from fp8pass.demo import text
from fp8pass.errors import OptionError, choices

MODELS = ("smollm2", "tiny")
RECIPES = ("dynamic", "static", "dynamic_tensor")


class Tokenizer(Protocol):
    """What the demo asks of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class Logits(nn.Module):
    """A Hugging Face causal model as ids ``[1, tokens]`` -> logits ``[1, tokens, vocabulary]``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits


@dataclass
class DemoModel:
    """A model to be shown.

    Attributes:
        name: for people.
        module: ids ``[1, tokens]`` -> logits, in bf16; never altered, :meth:`quantised` copies.
        tokenizer: text <-> ids.
        layers: number of decoder layers; each has two norms and seven linears.
        note: a sentence for the reader.
    """

    name: str
    module: nn.Module
    tokenizer: Tokenizer
    layers: int
    note: str = ""

    def expected_sites(self) -> dict[str, int]:
        """``kind status`` -> number of sites that fp8pass must report for one forward.

        Two norms a layer feed quantised linears, the last one feeds the head, which stays in bf16;
        what ``o_proj`` reads comes from attention, with which nothing is fused.
        """
        return {
            "norm fused": 2 * self.layers,
            "norm left": 1,
            "activation fused": self.layers,
            "quantize left": self.layers,
            "scaled_mm lowered": 7 * self.layers,
        }

    def quantised(self, recipe: str, calibration_tokens: int) -> nn.Module:
        """An FP8 copy of the model; a static recipe is calibrated on text that is never measured.

        Raises:
            OptionError: unknown recipe.
        """
        from fp8pass.nn import calibrate, quantize_

        if recipe not in RECIPES:
            raise OptionError(f"unknown recipe {recipe!r}; allowed: {choices(RECIPES)}")
        module = copy.deepcopy(self.module)
        calibration = None
        if recipe == "static":
            ids = self.tokenizer.encode(text.calibration_text())[:calibration_tokens]
            calibration = calibrate(module, [torch.tensor([ids])], progress=False)
        quantize_(module, recipe, calibration=calibration, progress=False)
        return module


def load(name: str, say: Callable[[str], None] = lambda text: None) -> DemoModel:
    """The model of that name.

    Args:
        say: told in a sentence what takes long.

    Raises:
        OptionError: unknown model.
        UnsupportedError: what the real model needs is not installed.
    """
    if name == "tiny":
        from fp8pass.demo import tiny

        module, tokenizer = tiny.build()
        layers = module.config.num_hidden_layers
        note = "random weights: its perplexity shows only that all variants agree"
        return DemoModel("tiny Llama", module, tokenizer, layers, note)
    if name == "smollm2":
        from fp8pass.demo import weights

        weights.check_packages()
        model, tokenizer = weights.load(weights.converted(say))
        layers = model.config.num_hidden_layers
        return DemoModel("SmolLM2-135M-Instruct", Logits(model).eval(), tokenizer, layers)
    raise OptionError(f"unknown model {name!r}; allowed: {choices(MODELS)}")
