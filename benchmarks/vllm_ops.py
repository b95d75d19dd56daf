"""vLLM's compiled operators as peers: its product inside any model, and the block all of its own.

Loaded from its two libraries, without its Python (``fetch_vllm_ops.py`` gets them). All of them
write into outputs that the caller allocates. Signatures are those of vLLM 0.21.
"""

from __future__ import annotations

from pathlib import Path

import torch
from block_model import BF16, EPS, FP8, Block, Linear, Weights
from fetch_vllm_ops import LIBRARIES
from torch import Tensor


def load(folder: Path) -> None:
    """Load both libraries of ``folder``.

    Raises:
        OSError: one is missing, or does not fit this torch.
    """
    for name in LIBRARIES:
        torch.ops.load_library(str(folder / name))


@torch.library.custom_op("fp8pass_bench::vllm_scaled_mm", mutates_args=())
def vllm_scaled_mm(q: Tensor, weight: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """``cutlass_scaled_mm`` as a functional operator, which is opaque to Inductor.

    Args:
        q: fp8 ``[M, K]``.
        weight: fp8 ``[N, K]``.
        scale_a, scale_b: float32, one element each, or ``[M, 1]`` and ``[1, N]``.

    Returns:
        bf16 ``[M, N]``.
    """
    out = torch.empty((q.shape[0], weight.shape[0]), dtype=BF16, device=q.device)
    torch.ops._C.cutlass_scaled_mm(out, q, weight.t(), scale_a, scale_b, None)
    return out


@vllm_scaled_mm.register_fake
def _(q: Tensor, weight: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return q.new_empty((q.shape[0], weight.shape[0]), dtype=BF16)


def product(q: Tensor, weight: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """vLLM's product as a :data:`block_model.Product`."""
    result: Tensor = vllm_scaled_mm(q, weight, scale_a, scale_b)
    return result


# ---- the block as vLLM's fusion passes make it ---------------------------------------------------


def fused_block(recipe: str) -> Block:
    """The block composed of vLLM's kernels, which writes into the ``residual`` that it is given.

    Recipe dynamic: norm (with the residual's sum) + per-token quantise is one kernel; SiLU·mul and
    its quantise are two, since vLLM 0.21 has no kernel for both. Recipe static: one kernel each.
    """
    return _dynamic if recipe == "dynamic" else _static


def _codes(x: Tensor, width: int) -> Tensor:
    return torch.empty((x.shape[0], width), dtype=FP8, device=x.device)


def _token_scales(x: Tensor) -> Tensor:
    return torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)


def _mm(q: Tensor, scale: Tensor, layer: Linear) -> Tensor:
    out = torch.empty((q.shape[0], layer.weight.shape[0]), dtype=BF16, device=q.device)
    torch.ops._C.cutlass_scaled_mm(out, q, layer.weight.t(), scale, layer.weight_scale, None)
    return out


def _dynamic(hidden: Tensor, residual: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
    ops, width = torch.ops._C, hidden.shape[1]

    def norm_linear(x: Tensor, weight: Tensor, layer: Linear) -> Tensor:
        q, scale = _codes(x, width), _token_scales(x)
        ops.rms_norm_dynamic_per_token_quant(q, x, weight, scale, EPS, None, residual)
        return _mm(q, scale, layer)

    def linear(x: Tensor, layer: Linear) -> Tensor:
        q, scale = _codes(x, x.shape[1]), _token_scales(x)
        ops.dynamic_per_token_scaled_fp8_quant(q, x, scale, None)
        return _mm(q, scale, layer)

    qkv = norm_linear(hidden, w.input_norm, w.qkv)
    attention = linear(qkv[:, :width], w.o)
    gate_up = norm_linear(attention, w.post_norm, w.gate_up)
    product = torch.empty(
        (hidden.shape[0], gate_up.shape[1] // 2), dtype=BF16, device=hidden.device
    )
    ops.silu_and_mul(product, gate_up)
    return linear(product, w.down), residual


def _static(hidden: Tensor, residual: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
    ops, width = torch.ops._C, hidden.shape[1]

    def norm_linear(x: Tensor, weight: Tensor, layer: Linear) -> Tensor:
        q, scale = _codes(x, width), layer.input_scale
        ops.fused_add_rms_norm_static_fp8_quant(q, x, residual, weight, scale, EPS)
        assert scale is not None
        return _mm(q, scale, layer)

    qkv = norm_linear(hidden, w.input_norm, w.qkv)
    q = _codes(hidden, width)
    ops.static_scaled_fp8_quant(q, qkv[:, :width], w.o.input_scale)
    attention = _mm(q, w.o.input_scale, w.o)  # type: ignore[arg-type]
    gate_up = norm_linear(attention, w.post_norm, w.gate_up)
    q = _codes(hidden, gate_up.shape[1] // 2)
    ops.silu_and_mul_quant(q, gate_up, w.down.input_scale)
    return _mm(q, w.down.input_scale, w.down), residual  # type: ignore[arg-type]
