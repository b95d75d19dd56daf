"""Spellings of LayerNorm, with the form that each must be read as."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from spell_common import NAMES, Tensor

LayerNorm = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def ln_functional(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b, eps)


def ln_no_bias(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, None, eps)


def ln_plain(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), None, None, eps)


def ln_var(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    h = x.float()
    d = h - h.mean(-1, keepdim=True)
    return b + w * (d * torch.rsqrt(h.var(-1, keepdim=True, unbiased=False) + eps)).to(x.dtype)


def ln_var_mean(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    variance, mean = torch.var_mean(x.float(), -1, correction=0)
    d = x - mean[..., None]
    return (w * (d / torch.sqrt(variance[..., None] + eps)) + b).to(x.dtype)


def ln_mean_square(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    """As Cohere's LayerNorm, which has no bias."""
    h = x.to(torch.float32)
    mean = h.mean(-1, keepdim=True)
    variance = (h - mean).pow(2).mean(-1, keepdim=True)
    h = (h - mean) * torch.rsqrt(variance + eps)
    h = w.to(torch.float32) * h
    return h.to(x.dtype)


def ln_recip(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    h = x.float()
    d = h - h.mean(-1, keepdim=True)
    root = (d * d).mean(-1, keepdim=True).add(eps).sqrt()
    return (d * (1.0 / root) + b).to(x.dtype)


#: name -> (function, variance, root, affine)
LAYER_NORMS: dict[str, tuple[LayerNorm, str, str, str]] = {
    "functional": (ln_functional, "var_mean", "rsqrt", "before_cast"),
    "no_bias": (ln_no_bias, "var_mean", "rsqrt", "before_cast"),
    "plain": (ln_plain, "var_mean", "rsqrt", "none"),
    "var": (ln_var, "var", "rsqrt", "after_cast"),
    "var_mean": (ln_var_mean, "var_mean", "div_sqrt", "before_cast"),
    "mean_square": (ln_mean_square, "mean_square", "rsqrt", "before_cast"),
    "recip": (ln_recip, "mean_square", "recip_sqrt", "before_cast"),
}


def layer_norm_form(name: str, dtype: torch.dtype) -> str:
    """The form of a LayerNorm of ``dtype`` values."""
    _, variance, root, affine = LAYER_NORMS[name]
    if affine == "after_cast" and dtype == torch.float32:
        affine = "before_cast"
    return f"{variance},{root},{affine},{NAMES[dtype]}"
