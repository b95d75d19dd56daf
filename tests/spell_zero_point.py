"""INT8 with a zero point as models write it: quantises ``fn(y, s)`` and products of their codes."""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensor = torch.Tensor
I8, I32, F32 = torch.int8, torch.int32, torch.float32
#: codes, scale, zero point
Affine = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


def given_zero(s: Tensor, dtype: torch.dtype = I32) -> Tensor:
    """A zero point that is computed from a given scale, and from nothing else."""
    return (s * 300).round().to(dtype)


def static(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    zero = given_zero(s)
    return torch.clamp(torch.round(y.float() / s) + zero, -128, 127).to(I8), s.clone(), zero


def static_float(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    zero = given_zero(s, F32)
    return torch.round(torch.clamp(zero + y.float() * (1 / s), -128, 127)).to(I8), s.clone(), zero


def token(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    """As vLLM's kernels compute it: the zero point rounded, and not clamped."""
    wide = y.float()
    low, high = torch.aminmax(wide, dim=-1, keepdim=True)
    scale = ((high - low) / 255).clamp(min=1e-7)
    zero = torch.round(-128 - low / scale).to(I32)
    return (torch.round(wide / scale) + zero).clamp(-128, 127).to(I8), scale, zero


def token_by_zero(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    """As compressed-tensors computes it: the range holds 0, the zero point is clamped."""
    wide = y.float()
    low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    low, high = (
        torch.minimum(low, torch.zeros_like(low)),
        torch.maximum(high, torch.zeros_like(high)),
    )
    scale = (high - low) / 255.0 + 1e-6
    zero = torch.round(torch.clamp(-128 - low / scale, -128, 127)).to(I8)
    return torch.round(torch.clamp(wide / scale + zero, -128, 127)).to(I8), scale, zero


def _torchao(y: Tensor, dims: list[int], lo: int = -128, hi: int = 127) -> tuple[Tensor, ...]:
    """As torchao 0.18: scale and zero point in the dtype of the values."""
    low, high = y.amin(dims, keepdim=True), y.amax(dims, keepdim=True)
    low, high = (
        torch.minimum(low, torch.zeros_like(low)),
        torch.maximum(high, torch.zeros_like(high)),
    )
    scale = ((high - low) / float(hi - lo)).clamp(min=2.0**-23)
    zero = (lo - torch.round(low / scale)).clamp(lo, hi).to(I8)
    scale = scale.float()
    return (torch.round(y * (1.0 / scale)) + zero).clamp(lo, hi).to(I8), scale, zero


def torchao_token(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    return _torchao(y, [y.dim() - 1])


def torchao_reduced(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    return _torchao(y, [y.dim() - 1], -64, 63)


def torchao_tensor(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    return _torchao(y, list(range(y.dim())))


def torchao_symmetric(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    """Its symmetric mapping: a zero point of zeros, and the largest |x| by both ends."""
    dims = [y.dim() - 1]
    low, high = y.amin(dims, keepdim=True), y.amax(dims, keepdim=True)
    low, high = (
        torch.minimum(low, torch.zeros_like(low)),
        torch.maximum(high, torch.zeros_like(high)),
    )
    scale = (torch.maximum(-low, high) / 127.5).clamp(min=2.0**-23)
    zero = torch.full_like(scale, 0).to(I8)
    scale = scale.float()
    return (torch.round(y * (1.0 / scale)) + zero).clamp(-128, 127).to(I8), scale


_FROM = "div,255.0,scale"
#: name -> (function, form of a float32 value)
ZERO_QUANTS: dict[str, tuple[Affine, str]] = {
    "zero_static": (static, "int8,tensor,float32,given,255.0,none,0.0,div,-128.0,127.0,zero=given"),
    "zero_static_float": (
        static_float,
        "int8,tensor,float32,given,255.0,none,0.0,mul_recip,-128.0,127.0,zero=given,zero_at=before",
    ),
    "zero_token": (
        token,
        f"int8,token,float32,{_FROM},1e-07,div,-128.0,127.0,zero=round_lo,zero_dtype=int32",
    ),
    "zero_token_by_zero": (
        token_by_zero,
        "int8,token,float32,div,255.0,scale_add,1e-06,div,-128.0,127.0,zero=round_lo"
        ",zero_at=before,zero_clamp=codes,zero_dtype=int8,span=zero",
    ),
    "zero_torchao_token": (
        torchao_token,
        f"int8,token,float32,{_FROM},{2.0**-23},mul_recip,-128.0,127.0,zero=lo_round"
        ",zero_clamp=codes,zero_dtype=int8,span=zero",
    ),
    "zero_torchao_reduced": (
        torchao_reduced,
        f"int8,token,float32,div,127.0,scale,{2.0**-23},mul_recip,-64.0,63.0,zero=lo_round"
        ",zero_clamp=codes,zero_dtype=int8,span=zero",
    ),
    "zero_torchao_tensor": (
        torchao_tensor,
        f"int8,tensor,float32,{_FROM},{2.0**-23},mul_recip,-128.0,127.0,zero=lo_round"
        ",zero_clamp=codes,zero_dtype=int8,span=zero",
    ),
}

#: ``fn(q, s, zero, w, sb, bias)``: a product of codes ``[M, K]`` and a weight ``[N, K]``
Product = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
BF16 = torch.bfloat16


def by_int32(q: Tensor, s: Tensor, z: Tensor, w: Tensor, sb: Tensor, b: Tensor) -> Tensor:
    total = torch._int_mm(q, w.t()) - z.to(I32) * w.sum(1, dtype=I32)
    return (total.float() * s * sb + b).to(BF16)


def by_int64(q: Tensor, s: Tensor, z: Tensor, w: Tensor, sb: Tensor, b: Tensor) -> Tensor:
    total = torch._int_mm(q, w.t()) - w.t().sum(0, keepdim=True) * z.to(I32)
    return (sb * total.float() * s + b).to(BF16)


def by_float32(q: Tensor, s: Tensor, z: Tensor, w: Tensor, sb: Tensor, b: Tensor) -> Tensor:
    total = torch._int_mm(q, w.t()).float() - z.float() * w.float().sum(1)
    return (total * (s * sb) + b).to(BF16)


def by_codes(q: Tensor, s: Tensor, z: Tensor, w: Tensor, sb: Tensor, b: Tensor) -> Tensor:
    return (torch.mm(q.float() - z, w.float().t()) * s * sb + b).to(BF16)


def by_values(q: Tensor, s: Tensor, z: Tensor, w: Tensor, sb: Tensor, b: Tensor) -> Tensor:
    """Both operands dequantised first."""
    return (torch.mm((q.float() - z) * s, w.float().t() * sb) + b).to(BF16)


def shifted(q: Tensor, s: Tensor, z: Tensor, w: Tensor, sb: Tensor, b: Tensor) -> Tensor:
    """torchao's on a CPU: codes shifted to uint8 and back, then the zero point by itself."""
    moved = (q.to(I32) + 128).to(torch.uint8)
    total = torch._int_mm(moved, w.t()) - 128 * w.t().sum(0, keepdim=True, dtype=I32)
    y = (total.float() * s).to(BF16)
    y = y - (z.float() * s * w.sum(-1).float()).to(BF16)
    return (y * sb + b).to(BF16)


#: name -> (function, form)
ZERO_PRODUCTS: dict[str, tuple[Product, str]] = {
    "int32": (by_int32, "none,ab,int32"),
    "int64": (by_int64, "none,ba,int64"),
    "float32": (by_float32, "none,joined,float32"),
    "codes": (by_codes, "none,ab,codes"),
    "values": (by_values, "both,ab,codes"),
    "shifted": (shifted, "none,ab"),
}


def int8_asymmetric(x: Tensor, w: Tensor, sw: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear of torchao 0.18 on a CPU; ``w [N, K]``, ``sw [N, 1]``."""
    q, scale, zero = torchao_token(x, sw)
    return _torchao_linear(q, scale, zero, w, sw, bias)


def int8_symmetric(x: Tensor, w: Tensor, sw: Tensor, bias: Tensor | None = None) -> Tensor:
    return _torchao_linear(*torchao_symmetric(x, sw), None, w, sw, bias)


def _torchao_linear(
    q: Tensor, s: Tensor, zero: Tensor | None, w: Tensor, sw: Tensor, bias: Tensor | None
) -> Tensor:
    turned, k, shape = w.t(), w.shape[1], (*q.shape[:-1], w.shape[0])
    moved = (q.view(-1, k).to(I32) + 128).to(torch.uint8)
    total = torch._int_mm(moved, turned) - 128 * turned.sum(0, keepdim=True, dtype=I32)
    y = (total.float() * s.view(-1, 1)).to(BF16)
    if zero is not None:
        off = zero.view(-1, 1).to(F32) * s.view(-1, 1) * w.sum(-1).to(F32)
        y = y - off.to(BF16)
    y = (y * sw.view(-1)).view(shape)
    return (y if bias is None else y + bias).to(BF16)
