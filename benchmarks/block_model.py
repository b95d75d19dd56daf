"""The linear path of a Llama decoder block in FP8, in plain torch, and what it means in float64.

    residual += hidden;  norm ─ quantise ─ qkv ─ (query part) ─ quantise ─ o ─┐
    residual += that;    norm ─ quantise ─ gate_up ─ SiLU·mul ─ quantise ─ down ─► hidden

The query part of QKV is passed on where attention would be. The residual is carried beside the
hidden state, and added before the next norm, as Llama does in vLLM: a block is then the same
function wherever it stands, so that one compile serves them all. Every linear is what
``fp8pass.nn.Fp8Linear`` computes: *quantise -> torch._scaled_mm*. Weights are arguments, not
attributes, so that no guard distinguishes one block from the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
EPS = 1e-5
RECIPES = ("dynamic", "static")


@dataclass(frozen=True)
class Sizes:
    """Of a stack of blocks; by default four of Llama-3-8B."""

    hidden: int = 4096
    intermediate: int = 14336
    qkv: int = 6144
    blocks: int = 4

    @property
    def weight_bytes(self) -> int:
        """FP8 weights of one block."""
        per_hidden = self.qkv + self.hidden + 3 * self.intermediate
        return self.hidden * per_hidden


class Linear(NamedTuple):
    """One FP8 linear: ``x ≈ q * scale`` on both sides.

    Attributes:
        weight: e4m3fn ``[N, K]``.
        weight_scale: float32, ``[1, N]`` (recipe dynamic) or 0-d (static).
        input_scale: float32 0-d; None unless the recipe is static.
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None


class Weights(NamedTuple):
    """One block; the norms' weights are bf16 ``[hidden]``."""

    input_norm: Tensor
    qkv: Linear
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


#: ``product(q, weight, scale_a, scale_b)``: ``[M, K]`` and ``[N, K]`` codes -> bf16 ``[M, N]``.
Product = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
#: ``block(hidden, residual, weights)`` -> ``(hidden, residual)``, all bf16 ``[M, hidden]``.
Block = Callable[[Tensor, Tensor, Weights], tuple[Tensor, Tensor]]


# ---- the block -----------------------------------------------------------------------------------


def torch_product(q: Tensor, weight: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """torch's own product, as ``Fp8Linear`` asks for it: accumulated in float32."""
    return torch._scaled_mm(q, weight.t(), scale_a, scale_b, out_dtype=BF16)


def torch_product_fast(q: Tensor, weight: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """The same, with the tensor cores' reduced accumulation allowed."""
    return torch._scaled_mm(q, weight.t(), scale_a, scale_b, out_dtype=BF16, use_fast_accum=True)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Llama's: float32 inside, rounded to bf16 before the weight."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def quantise(x: Tensor, input_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes of ``x`` and their dequant scale: 0-d as given, or ``[M, 1]`` from each row."""
    wide = x.float()
    if input_scale is None:
        scale = (wide.abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-12)
    else:
        scale = input_scale
    return (wide / scale).clamp(-448.0, 448.0).to(FP8), scale


def make_block(product: Product) -> Block:
    """The block with that product in its linears; the recipe is that of the weights."""

    def linear(x: Tensor, layer: Linear) -> Tensor:
        q, scale = quantise(x.contiguous(), layer.input_scale)
        return product(q, layer.weight, scale, layer.weight_scale)

    def block(hidden: Tensor, residual: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
        residual = residual + hidden
        qkv = linear(rms_norm(residual, w.input_norm), w.qkv)
        residual = residual + linear(qkv[:, : hidden.shape[1]], w.o)
        gate, up = linear(rms_norm(residual, w.post_norm), w.gate_up).chunk(2, dim=-1)
        return linear(F.silu(gate) * up, w.down), residual

    return block


def run_blocks(
    block: Block, stack: Sequence[Weights], hidden: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """All blocks, one after the other."""
    for weights in stack:
        hidden, residual = block(hidden, residual, weights)
    return hidden, residual


# ---- data ----------------------------------------------------------------------------------------


def make_inputs(sizes: Sizes, rows: int, device: str, seed: int = 1) -> tuple[Tensor, Tensor]:
    """A hidden state and a residual, bf16 ``[rows, hidden]``."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (2, rows, sizes.hidden)
    both = torch.randn(shape, device=device, generator=generator)
    return both[0].to(BF16), (both[1] * 2).to(BF16)


def make_weights(
    sizes: Sizes, recipe: str, device: str, blocks: int | None = None, seed: int = 0
) -> list[Weights]:
    """Random weights of variance 1/K, quantised by ``recipe``; static input scales calibrated.

    Raises:
        ValueError: an unknown recipe.
    """
    if recipe not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r}; allowed: {', '.join(RECIPES)}")
    generator = torch.Generator(device).manual_seed(seed)

    def norm() -> Tensor:
        weight = torch.rand(sizes.hidden, device=device, generator=generator) + 0.5
        return weight.to(BF16)

    def linear(n: int, k: int) -> Linear:
        weight = torch.randn(n, k, device=device, generator=generator) * k**-0.5
        amax = weight.abs()
        amax = amax.amax(1, keepdim=True) if recipe == "dynamic" else amax.amax()
        scale = amax / 448.0
        codes = (weight / scale).clamp(-448.0, 448.0).to(FP8)
        return Linear(codes, scale.reshape(1, -1) if recipe == "dynamic" else scale, None)

    h, i = sizes.hidden, sizes.intermediate
    stack = [
        Weights(norm(), linear(sizes.qkv, h), linear(h, h), norm(), linear(2 * i, h), linear(h, i))
        for _ in range(sizes.blocks if blocks is None else blocks)
    ]
    return stack if recipe == "dynamic" else _calibrated(stack, *make_inputs(sizes, 64, device))


def _calibrated(stack: list[Weights], hidden: Tensor, residual: Tensor) -> list[Weights]:
    """``stack`` with the scale of each linear's input, its largest value on these inputs / 448."""
    seen: list[Tensor] = []

    def watch(x: Tensor, layer: Linear) -> Tensor:
        seen.append((x.abs().amax() / 448.0).float())
        return x

    _meaning(stack, hidden, residual, watch, torch.float32)
    scales = iter(seen)
    return [
        Weights(
            *(
                part._replace(input_scale=next(scales)) if isinstance(part, Linear) else part
                for part in weights
            )
        )
        for weights in stack
    ]


# ---- the reference -------------------------------------------------------------------------------


def reference(stack: Sequence[Weights], hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The blocks in float64: every quantise, no rounding to bf16, dequantised operands."""

    def dequantised(x: Tensor, layer: Linear) -> Tensor:
        if layer.input_scale is None:
            scale = (x.abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-12)
        else:
            scale = layer.input_scale.double()
        return (x / scale).clamp(-448.0, 448.0).float().to(FP8).double() * scale

    return _meaning(stack, hidden, residual, dequantised, torch.float64)


def _meaning(
    stack: Sequence[Weights],
    hidden: Tensor,
    residual: Tensor,
    quantised: Callable[[Tensor, Linear], Tensor],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The blocks in a wide dtype; ``quantised`` is called on the input of every linear."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight.to(dtype)

    def linear(x: Tensor, layer: Linear) -> Tensor:
        weight = layer.weight.to(dtype) * layer.weight_scale.to(dtype).reshape(-1, 1)
        return quantised(x, layer) @ weight.t()

    hidden, residual = hidden.to(dtype), residual.to(dtype)
    for w in stack:
        residual = residual + hidden
        qkv = linear(norm(residual, w.input_norm), w.qkv)
        residual = residual + linear(qkv[:, : hidden.shape[1]], w.o)
        gate, up = linear(norm(residual, w.post_norm), w.gate_up).chunk(2, dim=-1)
        hidden = linear(F.silu(gate) * up, w.down)
    return hidden, residual


def distances(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> tuple[float, float]:
    """Relative L2 distance, and that of the worst row; each the larger one of all tensors."""
    whole, worst = 0.0, 0.0
    for value, exact in zip(found, wanted, strict=True):
        off, size = value.double() - exact, exact.double()
        pair = torch.stack(
            [off.norm() / size.norm(), (off.norm(dim=-1) / size.norm(dim=-1)).amax()]
        )
        total, row = pair.tolist()
        if total != total or row != row:
            return float("nan"), float("nan")
        whole, worst = max(whole, total), max(worst, row)
    return whole, worst
