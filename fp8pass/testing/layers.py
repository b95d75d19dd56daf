"""FP8 linears for tests, by granularity: modules whose graphs have one quantise and one product.

Spelled as vLLM spells them (``QuantFP8.forward_native``, then the product of its kernel classes),
so that a test of a pass needs neither vLLM nor a model::

    layer = Fp8TestLayer(256, 512, activation=PER_TOKEN, weight=PER_CHANNEL)
    block = Fp8TestLayer(256, 512, activation=GroupShape(1, 128), weight=GroupShape(128, 128))
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fp8pass.errors import OptionError
from fp8pass.quant_key import PER_CHANNEL, PER_TENSOR, PER_TOKEN, GroupShape
from fp8pass.testing.vllm_operators import FLOOR, FP8, FP8_MAX

#: Pairs of (activation, weight) that one ``aten._scaled_mm`` multiplies.
_PLAIN = ((PER_TENSOR, PER_TENSOR), (PER_TOKEN, PER_CHANNEL))


class Fp8TestLayer(nn.Module):
    """``x`` ``[M, in_features]`` -> ``[M, out_features]`` in the dtype of ``x``.

    Args:
        in_features: K.
        out_features: N.
        activation: ``PER_TENSOR``, ``PER_TOKEN`` or ``GroupShape(1, size)``.
        weight: ``PER_TENSOR`` with the first, ``PER_CHANNEL`` with the second, ``GroupShape(size,
            size)`` with the last; seen as ``[K, N]``.
        static: the activation's scale is given; per tensor only.
        input_scale: that scale.
        unfused: per token: the product has scales of one and a float32 result, and the scales are
            multiplied afterwards, as vLLM does where ``_scaled_mm`` has no rowwise scales.
        seed: of the weight, which is random.

    Raises:
        OptionError: granularities that do not go together.
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        activation: GroupShape = PER_TOKEN,
        weight: GroupShape = PER_CHANNEL,
        static: bool = False,
        input_scale: float = 0.02,
        unfused: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        blocks = activation.row == 1 and activation.col > 0 and min(weight.row, weight.col) > 0
        if not blocks and (activation, weight) not in _PLAIN:
            raise OptionError(f"no test layer multiplies {activation.name} by {weight.name}")
        if static and activation != PER_TENSOR:
            raise OptionError(f"a static scale is per tensor, not {activation.name}")
        if blocks and (in_features % activation.col or activation.col != weight.row):
            raise OptionError(f"{activation.name} by {weight.name} does not divide {in_features}")
        self.activation, self.group, self.unfused = activation, weight, unfused
        made = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(seed))
        codes, scale = _quantised_weight(made / in_features**0.5, weight)
        self.register_buffer("weight", codes)
        self.register_buffer("weight_scale", scale)
        self.register_buffer("input_scale", torch.tensor(input_scale) if static else None)

    def forward(self, x: Tensor) -> Tensor:
        if self.activation.col > 0:
            return self._blocks(x)
        scale = self._scale(x)
        codes = (x.to(torch.float32) * scale.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        if self.unfused:
            one = torch.ones(1, dtype=torch.float32, device=x.device)
            wide = torch._scaled_mm(codes, self.weight.t(), one, one, out_dtype=torch.float32)
            return (wide * scale * self.weight_scale.t()).to(x.dtype)
        per_row = self.activation == PER_TOKEN
        of_weight = self.weight_scale.t() if per_row else self.weight_scale
        return torch._scaled_mm(codes, self.weight.t(), scale, of_weight, out_dtype=x.dtype)

    def _scale(self, x: Tensor) -> Tensor:
        """The dequantising scale of ``x``: 0-d where it is given, ``[1, 1]`` or ``[M, 1]``."""
        if self.input_scale is not None:
            return self.input_scale
        amax = x.abs().max().unsqueeze(-1) if self.activation == PER_TENSOR else _row_amax(x)
        return (amax.to(torch.float32) / FP8_MAX).clamp(min=FLOOR)

    def _blocks(self, x: Tensor) -> Tensor:
        """Groups of one row, blocks of the weight: the operator of vLLM's CUDA library.

        Defined on a CPU by :func:`fp8pass.testing.vllm_operators.install`.
        """
        parts = x.to(torch.float32).unflatten(-1, (-1, self.activation.col))
        scale = (parts.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=FLOOR)
        codes = (parts / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).reshape(x.shape)
        out = x.new_empty(x.shape[0], self.weight.shape[0])
        torch.ops._C.cutlass_scaled_mm(
            out, codes, self.weight.t(), scale.squeeze(-1), self.weight_scale.t(), None
        )
        return out


def _row_amax(x: Tensor) -> Tensor:
    return x.abs().amax(dim=-1).unsqueeze(-1)


def _quantised_weight(w: Tensor, group: GroupShape) -> tuple[Tensor, Tensor]:
    """Codes ``[N, K]`` and float32 scales: ``[1]``, ``[N, 1]`` or ``[N / size, K / size]``."""
    if group == PER_TENSOR:
        scale = w.abs().amax().reshape(1) / FP8_MAX
        return (w / scale).to(FP8), scale
    if group == PER_CHANNEL:
        scale = w.abs().amax(1, keepdim=True) / FP8_MAX
        return (w / scale).to(FP8), scale
    k, n = group.row, group.col
    rows, columns = -(-w.shape[0] // n), -(-w.shape[1] // k)
    pad = (0, columns * k - w.shape[1], 0, rows * n - w.shape[0])
    blocks = torch.nn.functional.pad(w, pad).reshape(rows, n, columns, k)
    scale = blocks.abs().amax((1, 3)) / FP8_MAX
    codes = (blocks / scale[:, None, :, None]).to(FP8).reshape(rows * n, columns * k)
    return codes[: w.shape[0], : w.shape[1]].contiguous(), scale
