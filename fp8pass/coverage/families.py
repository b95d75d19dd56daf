"""Model families: tiny random configurations of the classes of ``transformers``, made offline.

Every family keeps what its own modeling file writes (where the norm casts, which activation, what
is packed); only the sizes are small. The weights of norms are drawn as well: their initial value,
all ones or zeros, would hide an order of roundings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fp8pass.errors import OptionError, UnsupportedError, choices

#: Sizes under the names that most configurations share; widths hold two or three groups of 128.
_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        name: as on the command line.
        stem: of the class names in ``transformers``: ``<stem>Config``, ``<stem>ForCausalLM``.
        changes: fields of the configuration beside the common sizes.
        note: what a reader of the table should know.
        config_class, model_class: where they are not made of the stem.
    """

    name: str
    stem: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    config_class: str = ""
    model_class: str = ""

    def build(self, seed: int = 0) -> nn.Module:
        """The model in bf16, in ``eval`` mode, always with the same weights.

        Raises:
            UnsupportedError: this ``transformers`` does not have the family.
        """
        transformers = require_transformers()
        names = (self.config_class or f"{self.stem}Config",
                 self.model_class or f"{self.stem}ForCausalLM")  # fmt: skip
        try:
            config_class, model_class = (getattr(transformers, name) for name in names)
        except AttributeError as error:
            raise UnsupportedError(
                f"transformers {transformers.__version__} has no {error.name}"
            ) from error
        config = config_class(**{**_SIZES, **self.changes})
        config._attn_implementation = "sdpa" if self.name != "gpt-oss" else "eager"
        # the loop over experts asks for values, which would break the graph
        config._experts_implementation = "batched_mm"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: nn.Module = model_class(config)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if parameter.dim() == 1 and "norm" in name and name.endswith("weight"):
                        parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))
        return model.to(torch.bfloat16).eval()


def inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Token ids ``[2, 12]``, the inputs of every family."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(3, _SIZES["vocab_size"], (2, 12), generator=generator),)


def require_transformers() -> Any:
    """The module ``transformers``. Raises :class:`UnsupportedError` if it is missing or too old."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise UnsupportedError(
            "coverage builds models of transformers, which is not installed: "
            "pip install 'fp8pass[demo]'"
        ) from None
    if int(transformers.__version__.partition(".")[0]) < 5:
        raise UnsupportedError(f"coverage needs transformers >= 5, this is "
                               f"{transformers.__version__}")  # fmt: skip
    return transformers


_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}

_ALL = (
    Family("llama", "Llama"),
    Family("qwen3", "Qwen3", {"head_dim": 64}),
    Family("mistral", "Mistral", {"head_dim": 64, "sliding_window": 8}),
    Family(
        "gemma3", "Gemma3", {"head_dim": 64, "sliding_window": 8}, "text model; weight 1 + w",
        config_class="Gemma3TextConfig",
    ),
    Family(
        "qwen3-next", "Qwen3Next",
        {**_MOE, "head_dim": 64, "shared_expert_intermediate_size": 256,
         "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 64,
         "linear_value_head_dim": 64, "layer_types": ["linear_attention", "full_attention"]},
        "experts are packed parameters, not linears",
    ),
    Family("olmo2", "Olmo2", note="the norm comes after the block"),
    Family(
        "gpt-oss", "GptOss", {**_MOE, "head_dim": 64, "sliding_window": 8},
        "experts and router are parameters, not linears",
    ),
    Family("phi3", "Phi3", note="packed qkv and gate_up"),
    Family("granite", "Granite"),
    Family(
        "deepseek-v3", "DeepseekV3",
        {**_MOE, "num_key_value_heads": 4, "q_lora_rank": 256, "kv_lora_rank": 256,
         "qk_rope_head_dim": 16, "qk_nope_head_dim": 48, "v_head_dim": 64, "n_group": 2,
         "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1},
        "experts are packed parameters, not linears",
    ),
    Family("glm4", "Glm4", {"head_dim": 64}, "packed gate_up; norms before and after"),
    Family("starcoder2", "Starcoder2", {"sliding_window": None}, "LayerNorm and GELU"),
)  # fmt: skip

#: name -> family, in the order of the table
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}


def family(name: str) -> Family:
    """The family of that name. Raises :class:`OptionError` naming the allowed ones."""
    if name not in FAMILIES:
        raise OptionError(f"unknown family {name!r}; allowed: {choices(FAMILIES)}")
    return FAMILIES[name]
