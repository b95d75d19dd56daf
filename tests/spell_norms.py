"""Spellings of RMSNorm, with the form that each must be read as."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from spell_common import NAMES, Tensor


def _mean_square(h: Tensor) -> Tensor:
    return h.pow(2).mean(-1, keepdim=True)


def llama(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.to(torch.float32)
    h = h * torch.rsqrt(_mean_square(h) + eps)
    return w * h.to(x.dtype)


def weight_right(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    h = torch.rsqrt(eps + _mean_square(h)) * h
    return h.to(x.dtype) * w


def x_times_x(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt((h * h).mean(x.dim() - 1, keepdim=True) + eps)
    return w * h.type_as(x)


def square(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    return w * (h * (h.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def converts_twice(x: Tensor, w: Tensor, eps: float) -> Tensor:
    variance = x.float().pow(2).mean(-1, keepdim=True)
    return w * (x.float() * torch.rsqrt(variance + eps)).to(x.dtype)


def weight_first(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(_mean_square(h) + eps)
    return (w * h).to(x.dtype)


def gemma(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(_mean_square(h) + eps)
    return (h * (1.0 + w.float())).type_as(x)


def functional(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), w, eps)


def one_over_sqrt(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    h = h * (1.0 / torch.sqrt(_mean_square(h) + eps))
    return w * h.to(x.dtype)


def reciprocal_sqrt(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    h = h * torch.reciprocal(torch.sqrt(_mean_square(h) + eps))
    return w * h.to(x.dtype)


def over_sqrt(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    h = h / torch.sqrt(_mean_square(h) + eps)
    return w * h.to(x.dtype)


def sum_over_width(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) / x.shape[-1] + eps)
    return w * h.to(x.dtype)


def promoted(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """x is not upcast in the last product: torch does that, and the product is float32."""
    return w * (x * torch.rsqrt(_mean_square(x.float()) + eps)).to(x.dtype)


def promoted_weight_first(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return (x * torch.rsqrt(_mean_square(x.float()) + eps) * w).to(x.dtype)


def no_keepdim(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1) + eps)[..., None]
    return w * h.to(x.dtype)


def no_keepdim_view(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    mean = h.pow(2).mean(x.dim() - 1).view(*x.shape[:-1], 1)
    return w * (h / torch.sqrt(mean + eps)).to(x.dtype)


def flat_rows(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """The mean of a row goes through a flat list of rows and back."""
    h = x.float()
    inverse = torch.rsqrt((h * h).sum(-1).reshape(-1) / x.shape[-1] + eps)
    return w * (h * inverse.reshape(*x.shape[:-1]).unsqueeze(-1)).to(x.dtype)


def vector_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    norm = torch.linalg.vector_norm(h, dim=-1, keepdim=True)
    return w * (h * torch.rsqrt(norm**2 / x.shape[-1] + eps)).to(x.dtype)


def norm_method(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    mean = h.norm(2, -1).pow(2).unsqueeze(-1) / x.shape[-1]
    return w * (h / (mean + eps).sqrt()).to(x.dtype)


def inverse_power(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    return w * (h * (_mean_square(h) + eps) ** -0.5).to(x.dtype)


def over_power(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    return w * (h / (_mean_square(h) + eps).pow(0.5)).to(x.dtype)


def sum_times(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    mean = h.pow(2).sum(-1, keepdim=True) * (1.0 / x.shape[-1])
    return w * (h * torch.rsqrt(mean + eps)).to(x.dtype)


def weight_into_x(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    return ((h * w) * torch.rsqrt(_mean_square(h) + eps)).to(x.dtype)


def weight_into_x_over(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    return ((w * h) / torch.sqrt(_mean_square(h) + eps)).to(x.dtype)


def weight_into_root(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    return (h * (torch.rsqrt(_mean_square(h) + eps) * w)).to(x.dtype)


def weight_over_root(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    return (h * (w / torch.sqrt(_mean_square(h) + eps))).to(x.dtype)


def weight_as_row(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(_mean_square(h) + eps)
    return h.to(x.dtype) * w.view(*(1,) * (x.dim() - 1), -1)


def eps_max(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    return w * (h * torch.rsqrt(_mean_square(h).clamp(min=eps))).to(x.dtype)


def eps_maximum(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    return w * (h * torch.rsqrt(torch.maximum(_mean_square(h), torch.full((), eps)))).to(x.dtype)


def eps_outside(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    return w * (h / (torch.sqrt(_mean_square(h)) + eps)).to(x.dtype)


def eps_outside_recip(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    return w * (h * (1.0 / (eps + torch.sqrt(_mean_square(h))))).to(x.dtype)


def eps_outside_max(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    return w * (h / torch.sqrt(_mean_square(h)).clamp_min(eps)).to(x.dtype)


Norm = Callable[[Tensor, Tensor, float], Tensor]

#: name -> (function, mean, root, whether the weight is multiplied before the cast, or its word)
NORMS: dict[str, tuple[Norm, str, str, bool | str]] = {
    "llama": (llama, "mean", "rsqrt", False),
    "weight_right": (weight_right, "mean", "rsqrt", False),
    "x_times_x": (x_times_x, "mean", "rsqrt", False),
    "square": (square, "mean", "rsqrt", False),
    "converts_twice": (converts_twice, "mean", "rsqrt", False),
    "weight_first": (weight_first, "mean", "rsqrt", True),
    "gemma": (gemma, "mean", "rsqrt", True),
    "functional": (functional, "mean", "rsqrt", True),
    "one_over_sqrt": (one_over_sqrt, "mean", "recip_sqrt", False),
    "reciprocal_sqrt": (reciprocal_sqrt, "mean", "recip_sqrt", False),
    "over_sqrt": (over_sqrt, "mean", "div_sqrt", False),
    "sum_over_width": (sum_over_width, "sum_div", "rsqrt", False),
    "promoted": (promoted, "mean", "rsqrt", False),
    "promoted_weight_first": (promoted_weight_first, "mean", "rsqrt", True),
    "no_keepdim": (no_keepdim, "mean", "rsqrt", False),
    "no_keepdim_view": (no_keepdim_view, "mean", "div_sqrt", False),
    "flat_rows": (flat_rows, "sum_div", "rsqrt", False),
    "vector_norm": (vector_norm, "norm_div", "rsqrt", False),
    "norm_method": (norm_method, "norm_div", "div_sqrt", False),
    "inverse_power": (inverse_power, "mean", "rsqrt", False),
    "over_power": (over_power, "mean", "div_sqrt", False),
    "sum_times": (sum_times, "sum_mul", "rsqrt", False),
    "weight_into_x": (weight_into_x, "mean", "rsqrt", "x_first"),
    "weight_into_x_over": (weight_into_x_over, "mean", "div_sqrt", "x_first"),
    "weight_into_root": (weight_into_root, "mean", "rsqrt", "root_first"),
    "weight_over_root": (weight_over_root, "mean", "div_sqrt", "root_first"),
    "weight_as_row": (weight_as_row, "mean", "rsqrt", False),
    "eps_max": (eps_max, "mean", "rsqrt", False),
    "eps_maximum": (eps_maximum, "mean", "rsqrt", False),
    "eps_outside": (eps_outside, "mean", "div_sqrt", False),
    "eps_outside_recip": (eps_outside_recip, "mean", "recip_sqrt", False),
    "eps_outside_max": (eps_outside_max, "mean", "div_sqrt", False),
}
#: Where epsilon goes, of those where it does not go inside the root.
NORM_EPSILONS = {
    "eps_max": "max",
    "eps_maximum": "max",
    "eps_outside": "outside",
    "eps_outside_recip": "outside",
    "eps_outside_max": "outside_max",
}


def norm_form(name: str, dtype: torch.dtype) -> str:
    """The form of a norm of ``dtype`` values. In float32 there is no cast to come before."""
    _, mean, root, before = NORMS[name]
    order = "before_cast" if before or dtype == torch.float32 else "after_cast"
    order = before if isinstance(before, str) else order
    eps = f",eps={NORM_EPSILONS[name]}" if name in NORM_EPSILONS else ""
    return f"{mean},{root},{order},{NAMES[dtype]}{eps}"
