"""A Llama of two layers in plain torch, for the demo without any download.

Spelled like Hugging Face's Llama (where the norm casts, how rotary embeddings are applied, the
tied head), so that the graph has the same sites as a real one; its weights are random.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class TinyConfig:
    """Sizes, under the names of Hugging Face's ``LlamaConfig``."""

    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    vocab_size: int = 256
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class RMSNorm(nn.Module):
    """``weight * (x / rms(x))``: float32 inside, rounded to the model's dtype before the weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        h = x.to(torch.float32)
        variance = h.pow(2).mean(-1, keepdim=True)
        h = h * torch.rsqrt(variance + self.eps)
        return self.weight * h.to(dtype)


def _rotate_half(x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((-right, left), dim=-1)


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped key/value heads."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_size = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        split = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (
            p(x).view(split).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q = q * cos + _rotate_half(q) * sin
        k = k * cos + _rotate_half(k) * sin
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        merged: Tensor = self.o_proj(out.transpose(1, 2).reshape(x.shape))
        return merged


class MLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        hidden, intermediate = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class TinyLlama(nn.Module):
    """Token ids ``[batch, tokens]`` to logits ``[batch, tokens, vocabulary]``."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        half = torch.arange(0, self.config.head_dim, 2, device=ids.device) / self.config.head_dim
        positions = torch.arange(ids.shape[1], device=ids.device)
        angles = torch.outer(positions, self.config.rope_theta**-half).repeat(1, 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "backslashreplace")


def build(seed: int = 0) -> tuple[TinyLlama, Bytes]:
    """The model in bf16, always with the same weights; torch's generator is left as it was."""
    config = TinyConfig()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = TinyLlama(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter is model.embed_tokens.weight:
                    parameter.normal_(std=0.05)  # also the head's: keeps its logits small
                elif parameter.dim() == 2:
                    parameter.normal_(std=parameter.shape[1] ** -0.5)
                else:
                    parameter.uniform_(0.5, 1.5)
    return model.to(torch.bfloat16).eval(), Bytes()
