"""What quantisation libraries write, as it reaches the graph, without the libraries.

Each function is the forward of a library's quantised linear in plain torch, derived from the graphs
that the real library gives (``tests/dialects/with_libraries`` compares them); ``FORMS`` has the
form that each must be read as, by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

E4 = torch.float8_e4m3fn
Tensor = torch.Tensor


def _clamped(value: Tensor) -> Tensor:
    return value.clamp(min=-448.0, max=448.0).to(E4)


# ---- torchao 0.18: Float8Tensor ------------------------------------------------------------------


def torchao_quantise(
    x: Tensor, dims: list[int], bounds: tuple[float | None, float | None] | None = None
) -> tuple[Tensor, Tensor]:
    """The scale is computed in the dtype of ``x`` and converted to float32 afterwards."""
    amax = x.view(x.shape).abs().amax(dim=dims, keepdim=True)
    if bounds is not None:
        amax = torch.clamp(amax, min=bounds[0], max=bounds[1])
    scale = (amax / 448.0).reshape(amax.shape).to(torch.float32)
    return _clamped(x.to(torch.float32) / scale), scale


def torchao_row(x: Tensor, w: Tensor, s: Tensor, bias: Tensor | None = None) -> Tensor:
    """``Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())``; s: [N, 1]."""
    q, scale = torchao_quantise(x, [x.dim() - 1])
    scale = scale.unsqueeze(-1).reshape(-1, 1)
    out = torch._scaled_mm(
        q.reshape(-1, q.shape[-1]),
        w.t(),
        scale,
        s.t(),
        bias=bias,
        out_dtype=x.dtype,
        use_fast_accum=True,
    )
    return out.reshape(*x.shape[:-1], w.shape[0])


def torchao_row_bounds(x: Tensor, w: Tensor, s: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same with ``activation_value_lb=1e-4, activation_value_ub=50.0``."""
    q, scale = torchao_quantise(x, [x.dim() - 1], (1e-4, 50.0))
    out = torch._scaled_mm(
        q.reshape(-1, q.shape[-1]),
        w.t(),
        scale.unsqueeze(-1).reshape(-1, 1),
        s.t(),
        bias=bias,
        out_dtype=x.dtype,
        use_fast_accum=True,
    )
    return out.reshape(*x.shape[:-1], w.shape[0])


def torchao_tensor(x: Tensor, w: Tensor, s: Tensor, bias: Tensor | None = None) -> Tensor:
    """``granularity=PerTensor()``; s: [1, 1]."""
    q, scale = torchao_quantise(x, list(range(x.dim())))
    out = torch._scaled_mm(
        q.reshape(-1, q.shape[-1]),
        w.t(),
        scale.reshape(1, 1),
        s.t(),
        bias=bias,
        out_dtype=x.dtype,
        use_fast_accum=True,
    )
    return out.reshape(*x.shape[:-1], w.shape[0])


# ---- compressed-tensors, run compressed by transformers 5 ----------------------------------------


def without_zero_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, and a scale without the last dim; a row of zeros is given the amax 1."""
    wide = x.to(torch.float32)
    amax = wide.abs().amax(dim=-1)
    scale = torch.where(amax > 0, amax, torch.ones_like(amax)) / 448.0
    return torch.clamp(wide / scale.unsqueeze(-1), min=-448.0, max=448.0).to(E4), scale


def compressed_tensors(x: Tensor, w: Tensor, s: Tensor, bias: Tensor | None = None) -> Tensor:
    """``CompressedTensorsFP8Linear``; s: [1, N]."""
    q, scale = without_zero_rows(x.reshape(-1, x.shape[-1]))
    row = torch.nn.functional.ScalingType.RowWise
    out = torch.nn.functional.scaled_mm(
        q, w.t(), scale.unsqueeze(-1), row, s, row, bias=bias, output_dtype=x.dtype
    )
    return out.reshape(*x.shape[:-1], -1)


Linear = Callable[..., Tensor]
_LOW = torch.tensor(1e-4).bfloat16().item()

#: name -> (linear, shape of the weight's scale for N, form for bf16, act key, weight key)
LINEARS: dict[str, tuple[Linear, Callable[[int], tuple[int, int]], str, str, str]] = {
    "torchao_row": (
        torchao_row,
        lambda n: (n, 1),
        "float8_e4m3fn,token,float32,div,448.0,none,0.0,div,-448.0,448.0,scale_dtype=bfloat16",
        "dynamic/token",
        "static/channel",
    ),
    "torchao_row_bounds": (
        torchao_row_bounds,
        lambda n: (n, 1),
        f"float8_e4m3fn,token,float32,div,448.0,amax,{_LOW!r},div,-448.0,448.0"
        ",scale_dtype=bfloat16,ceiling=50.0",
        "dynamic/token",
        "static/channel",
    ),
    "torchao_tensor": (
        torchao_tensor,
        lambda n: (1, 1),
        "float8_e4m3fn,tensor,float32,div,448.0,none,0.0,div,-448.0,448.0,scale_dtype=bfloat16",
        "dynamic/tensor",
        "static/tensor",
    ),
    "compressed_tensors": (
        compressed_tensors,
        lambda n: (1, n),
        "float8_e4m3fn,token,float32,div,448.0,amax_zero,1.0,div,-448.0,448.0",
        "dynamic/token",
        "static/channel",
    ),
}


def operands(name: str, n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight ``[N, K]`` and its scale in the shape that the library keeps it in."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(n, k, generator=generator) * 16).to(E4)
    shape = LINEARS[name][1](n)
    return weight, torch.rand(shape, generator=generator) * 1e-3 + 1e-3


def dequantised(weight: Tensor, scale: Any) -> Tensor:
    """The weight in float64."""
    column = scale.reshape(-1, 1) if scale.numel() > 1 else scale
    return weight.double() * column.double()
