"""Spellings of norms, activations and quantises, with the form that each must be read as.

Each is written the way some model or library writes it; the expected form is derived by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

E4 = torch.float8_e4m3fn
Tensor = torch.Tensor

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


# ---- norms ---------------------------------------------------------------------------------------


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


# ---- activations ---------------------------------------------------------------------------------


def silu_two(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def silu_right(gate: Tensor, up: Tensor) -> Tensor:
    return up * F.silu(gate)


def silu_wide(gate: Tensor, up: Tensor) -> Tensor:
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def silu_sigmoid(gate: Tensor, up: Tensor) -> Tensor:
    wide = gate.float()
    return (wide * torch.sigmoid(wide)).to(gate.dtype) * up


ACTIVATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu_two": silu_two,
    "silu_right": silu_right,
    "silu_wide": silu_wide,
    "silu_sigmoid": silu_sigmoid,
    "silu_narrow": lambda gate, up: gate * torch.sigmoid(gate) * up,
    "silu_narrow_commuted": lambda gate, up: up * (torch.sigmoid(gate) * gate),
}


def act_form(name: str, dtype: torch.dtype) -> str:
    """The form of an activation of ``dtype`` values."""
    silu = "sigmoid" if name in ("silu_sigmoid", *_IN_STEPS) else "div"
    mid = torch.float32 if name == "silu_wide" else dtype
    return f"{silu},{NAMES[mid]},{NAMES[dtype]}{_steps(name, dtype)}"


def gelu_by_hand(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def gelu_by_hand_wide(x: Tensor) -> Tensor:
    return gelu_by_hand(x.float()).to(x.dtype)


def gelu_new(x: Tensor) -> Tensor:
    """GPT-2's, every step in the dtype of ``x``."""
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def gelu_quick(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def relu_times_relu(x: Tensor) -> Tensor:
    y = F.relu(x)
    return y * y


#: name -> (activation of one tensor, word of its form)
ALONE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "silu": (F.silu, "div"),
    "gelu_erf": (F.gelu, "gelu_erf"),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), "gelu_tanh"),
    "gelu_by_hand": (gelu_by_hand, "gelu_erf_div"),
    "gelu_by_hand_wide": (gelu_by_hand_wide, "gelu_erf_div"),
    "gelu_new": (gelu_new, "gelu_tanh_pow"),
    "gelu_quick": (gelu_quick, "gelu_quick"),
    "relu": (F.relu, "relu"),
    "relu2": (lambda x: F.relu(x).square(), "relu2"),
    "relu_times_relu": (relu_times_relu, "relu2"),
}
#: Spellings whose every step is rounded to the dtype of the gate.
_IN_STEPS = (
    "silu_narrow",
    "silu_narrow_commuted",
    "gelu_by_hand",
    "gelu_new",
    "gelu_quick",
    "relu",
    "relu2",
    "relu_times_relu",
)


def _steps(name: str, dtype: torch.dtype) -> str:
    return f",{NAMES[dtype]}" if name in _IN_STEPS and dtype != torch.float32 else ""


def alone_form(name: str, dtype: torch.dtype) -> str:
    """The form of an activation of ``dtype`` values, alone or times an ``up`` of that dtype."""
    return f"{ALONE[name][1]},{NAMES[dtype]},{NAMES[dtype]}{_steps(name, dtype)}"


def gpt_oss(gate: Tensor, up: Tensor, limit: float = 7.0, alpha: float = 1.702) -> Tensor:
    """The clamped SwiGLU of GPT-OSS."""
    gate = gate.clamp(min=None, max=limit)
    up = up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


# ---- quantises -----------------------------------------------------------------------------------

Quant = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


def static(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    return ((y.float() / s).clamp(-448, 448).to(E4),)


def static_recip(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    return ((y.float() * (1.0 / s)).clamp(-448.0, 448.0).to(E4),)


def static_narrow(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    """The division in the model dtype: one rounding more (``s`` is 0-d)."""
    return ((y / s).clamp(-448, 448).to(E4),)


def static_240(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    return ((y.float() / s).clamp(-240, 240).to(E4),)


def token(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    scale = (y.float().abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-12)
    return (y.float() / scale).clamp(-448, 448).to(E4), scale


def token_recip(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    scale = (y.abs().amax(-1, keepdim=True).float() * (1 / 448)).clamp(min=1e-7)
    return (y.float() * scale.reciprocal()).clamp(-448, 448).to(E4), scale


def token_amax_floor(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    amax = y.abs().max(-1, keepdim=True)[0].float().clamp_min(1e-4)
    scale = amax / 448
    return torch.clamp(y / scale, -448, 448).to(E4), scale


def tensor(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    scale = (y.abs().max().float() / 448.0).clamp(min=1e-12)
    return (y.float() / scale).clamp(-448, 448).to(E4), scale


def tensor_recip(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    scale = y.float().abs().amax() * (1.0 / 448.0)
    scale = torch.clamp(scale, min=1e-10)
    return (y.float() * (1.0 / scale)).clamp(-448, 448).to(E4), scale


def tensor_all_dims(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    scale = y.float().abs().amax(tuple(range(y.dim())), keepdim=True) / 448.0
    return (y.float() / scale).clamp(-448, 448).to(E4), scale


_RECIP = repr(1 / 448)

#: name -> (function, form without dtype)
QUANTS: dict[str, tuple[Quant, str]] = {
    "static": (static, "tensor,float32,given,448.0,none,0.0,div,-448.0,448.0"),
    "static_recip": (static_recip, "tensor,float32,given,448.0,none,0.0,mul_recip,-448.0,448.0"),
    "static_narrow": (static_narrow, "tensor,{dtype},given,448.0,none,0.0,div,-448.0,448.0"),
    "static_240": (static_240, "tensor,float32,given,240.0,none,0.0,div,-240.0,240.0"),
    "token": (token, "token,float32,div,448.0,scale,1e-12,div,-448.0,448.0"),
    "token_recip": (
        token_recip,
        f"token,float32,mul,{_RECIP},scale,1e-07,mul_recip,-448.0,448.0",
    ),
    "token_amax_floor": (
        token_amax_floor,
        "token,float32,div,448.0,amax,0.0001,div,-448.0,448.0",
    ),
    "tensor": (tensor, "tensor,float32,div,448.0,scale,1e-12,div,-448.0,448.0"),
    "tensor_recip": (
        tensor_recip,
        f"tensor,float32,mul,{_RECIP},scale,1e-10,mul_recip,-448.0,448.0",
    ),
    "tensor_all_dims": (
        tensor_all_dims,
        "tensor,float32,div,448.0,none,0.0,div,-448.0,448.0",
    ),
}


def quant_form(name: str, dtype: torch.dtype) -> str:
    """The form of a quantise of ``dtype`` values to e4m3fn."""
    return "float8_e4m3fn," + QUANTS[name][1].format(dtype=NAMES[dtype])


# ---- layer norms ---------------------------------------------------------------------------------

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


# ---- quantises beyond the usual ones (widths are a multiple of 16) -------------------------------

U4, E5, U5, I8 = (
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.int8,
)
G = 16


def saturated(value: Tensor, top: float = 448.0, dtype: torch.dtype = E4) -> Tensor:
    return value.clamp(-top, top).to(dtype)


def _token(scale: Callable[[Tensor], Tensor]) -> Quant:
    """Per token in float32, with ``scale(amax)``."""

    def fn(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        made = scale(y.float().abs().amax(-1, keepdim=True))
        return saturated(y.float() / made), made

    return fn


def token_no_keepdim(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    scale = (y.abs().amax(-1).float() / 448).clamp(min=1e-12)
    return saturated(y.float() / scale[..., None]), scale


def token_aminmax(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    low, high = y.float().aminmax(dim=-1, keepdim=True)
    scale = (torch.maximum(high, -low) / 448).clamp(min=1e-12)
    return saturated(y.float() / scale), scale


def token_narrow_scale(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    scale = (y.bfloat16().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-6).float()
    return saturated(y.bfloat16().float() / scale), scale


def token_inverse(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    r = 448.0 / y.float().abs().amax(-1, keepdim=True).clamp(min=1e-12)
    return saturated(y.float() * r), r.reciprocal()


def token_inverse_double(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    amax = y.abs().amax(-1, keepdim=True).to(torch.float64)
    r = (448.0 / torch.clamp(amax, min=1e-12)).to(torch.float32)
    return saturated(y.float() * r), 1.0 / r


def tensor_inverse_power(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    r = (448.0 / y.abs().amax().double().clamp(min=1e-12)).float()
    r = torch.exp2(torch.floor(torch.log2(r)))
    return saturated(y.float() * r), r.reciprocal()


def group(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    parts = y.float().unflatten(-1, (y.shape[-1] // G, G))
    scale = (parts.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-10)
    return saturated(parts / scale).flatten(-2), scale.squeeze(-1)


def group_deepseek(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    """Split in the model dtype; the codes are reshaped back before the cast."""
    parts = y.view(*y.shape[:-1], y.shape[-1] // G, G)
    amax = parts.abs().float().amax(dim=-1).clamp(1e-4)
    scale = amax / 448.0
    wide = (parts.float() * (1.0 / scale.unsqueeze(-1))).reshape(y.shape)
    return saturated(wide), scale


def group_power(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    parts = y.reshape(*y.shape[:-1], y.shape[-1] // G, G)
    scale = parts.float().abs().amax(-1).clamp(min=1e-4) / 448
    scale = torch.pow(2.0, torch.ceil(torch.log2(scale)))
    return saturated(parts.float() / scale[..., None]).view(y.shape), scale


def laid_out(layout: Callable[[Tensor], Tensor]) -> Quant:
    """Scales ``[M, G]``, copied into another layout."""

    def fn(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        q, scale = group(y, s)
        return q, layout(scale.reshape(-1, scale.shape[-1]))

    return fn


def aligned(rows: int) -> int:
    """TMA takes columns that are a multiple of 16 bytes apart."""
    return (rows + 3) // 4 * 4


def column_major(scale: Tensor) -> Tensor:
    return scale.t().contiguous().t()


def column_major_copy(scale: Tensor) -> Tensor:
    made = torch.empty((scale.shape[1], scale.shape[0]), dtype=torch.float32).t()
    made.copy_(scale)
    return made


def tma_padded(scale: Tensor) -> Tensor:
    rows = scale.shape[0]
    return F.pad(scale, (0, 0, 0, aligned(rows) - rows)).t().contiguous().t()[:rows]


def tma_strided(scale: Tensor) -> Tensor:
    rows, groups = scale.shape
    made = torch.empty_strided((rows, groups), (1, aligned(rows)), dtype=torch.float32)
    made.copy_(scale)
    return made


def tma_sliced(scale: Tensor) -> Tensor:
    """As DeepGEMM: a batch of one, copied into a part of what is larger."""
    rows, groups = scale.shape
    made = torch.empty((1, groups, aligned(rows)), dtype=torch.float32).transpose(1, 2)
    made[:, :rows, :] = scale.unsqueeze(0)
    return made[:, :rows, :].squeeze(0)


#: name -> (what copies the scales, layout)
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "column_major": (column_major, "col"),
    "column_major_copy": (column_major_copy, "col"),
    "tma_padded": (tma_padded, "tma"),
    "tma_strided": (tma_strided, "tma"),
    "tma_sliced": (tma_sliced, "tma"),
}


def int8_token(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    scale = (y.float().abs().amax(-1, keepdim=True) / 127).clamp(min=1e-7)
    return (y.float() / scale).round().clamp(-128, 127).to(I8), scale


def int8_tensor(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    scale = (y.float().abs().amax() / 127).clamp(min=1e-7)
    return torch.round((y.float() / scale).clamp(-127, 127)).to(I8), scale


def int8_static(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    return (torch.clamp(torch.round(y.float() / s), -128, 127).to(I8),)


def fnuz(top: float) -> Quant:
    def fn(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        scale = (y.float().abs().amax(-1, keepdim=True) / top).clamp(min=1e-12)
        return saturated(y.float() / scale, top, U4), scale

    return fn


def _static_as(dtype: torch.dtype) -> Quant:
    top = float(torch.finfo(dtype).max)
    return lambda y, s: (saturated(y.float() / s, top, dtype),)


def bounded(scale: Callable[[Tensor, Tensor], Tensor]) -> Quant:
    """Per token, with ``scale(amax, bound)`` where the bound is a tensor of one element."""

    def fn(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        made = scale(y.float().abs().amax(-1, keepdim=True), s)
        return saturated(y.float() / made), made

    return fn


def group_bounded(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    parts = y.float().unflatten(-1, (y.shape[-1] // G, G))
    scale = torch.minimum((parts.abs().amax(-1) / 448), s).clamp(min=1e-10)
    return saturated(parts / scale[..., None]).flatten(-2), scale


def token_inverse_bounded(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    r = 448.0 / torch.clamp(y.float().abs().amax(-1, keepdim=True), max=s * 200).clamp(min=1e-12)
    return saturated(y.float() * r), r.reciprocal()


def tensor_bounded(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    scale = (torch.minimum(s * 300, y.float().abs().amax()) / 448).clamp(min=1e-12)
    return saturated(y.float() / scale), scale


E8 = torch.float8_e8m0fnu


def group_stored(power: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Quant:
    """``power(scale)`` gives the scale that divides, and the one that is stored."""

    def fn(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        parts = y.float().unflatten(-1, (y.shape[-1] // G, G))
        scale, stored = power((parts.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-10))
        return saturated(parts / scale).flatten(-2), stored.squeeze(-1)

    return fn


def e8m0(scale: Tensor) -> tuple[Tensor, Tensor]:
    stored = scale.to(E8)
    return stored.float(), stored


def ceil_then_e8m0(scale: Tensor) -> tuple[Tensor, Tensor]:
    return e8m0(torch.exp2(torch.ceil(torch.log2(scale))))


def ceil_stored(scale: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return scale, scale.to(E8)


def ceil_bits(scale: Tensor) -> tuple[Tensor, Tensor]:
    """As DeepGEMM: the exponent's bits, which are those of e8m0."""
    scale = torch.pow(2.0, torch.ceil(torch.log2(scale.abs())))
    return scale, (scale.view(torch.int32) >> 23).to(torch.uint8)


def ceil_bits_as_e8m0(scale: Tensor) -> tuple[Tensor, Tensor]:
    scale, stored = ceil_bits(scale)
    return scale, stored.view(E8)


#: name -> (what a scale is made, power of the form)
STORED: dict[str, tuple[Callable[[Tensor], tuple[Tensor, Tensor]], str]] = {
    "e8m0": (e8m0, "e8m0"),
    "ceil_then_e8m0": (ceil_then_e8m0, "ceil_e8m0"),
    "ceil_stored": (ceil_stored, "ceil"),
    "ceil_bits": (ceil_bits, "ceil"),
    "ceil_bits_as_e8m0": (ceil_bits_as_e8m0, "ceil"),
}

_E4 = "float8_e4m3fn,"
_END = "div,-448.0,448.0"
_LOW = float(torch.tensor(1e-4))  # a tensor of float32 holds another number

#: name -> (function, form)
MORE_QUANTS: dict[str, tuple[Quant, str]] = {
    "no_floor": (_token(lambda a: a / 448), f"{_E4}token,float32,div,448.0,none,0.0,{_END}"),
    "eps_added": (
        _token(lambda a: a / 448 + 1e-12),
        f"{_E4}token,float32,div,448.0,scale_add,1e-12,{_END}",
    ),
    "eps_added_to_amax": (
        _token(lambda a: (a + 1e-4) / 448),
        f"{_E4}token,float32,div,448.0,amax_add,0.0001,{_END}",
    ),
    "floor_by_maximum": (
        _token(lambda a: torch.maximum(a, torch.full((), 1e-4)) / 448),
        f"{_E4}token,float32,div,448.0,amax,{_LOW},{_END}",
    ),
    "upper_bound": (
        _token(lambda a: (a.clamp(max=3.0) / 448).clamp(min=1e-6)),
        f"{_E4}token,float32,div,448.0,scale,1e-06,{_END},ceiling=3.0",
    ),
    "tensor_bound": (
        bounded(lambda a, s: (a.clamp(max=s * 200) / 448).clamp(min=1e-12)),
        f"{_E4}token,float32,div,448.0,scale,1e-12,{_END},upper=amax",
    ),
    "tensor_bound_last": (
        bounded(lambda a, s: torch.minimum(a.clamp(min=1e-4), s * 200) * (1 / 448)),
        f"{_E4}token,float32,mul,{_RECIP},amax,0.0001,{_END},upper=amax_last",
    ),
    "tensor_bound_of_scale": (
        bounded(lambda a, s: torch.minimum(s, a / 448)),
        f"{_E4}token,float32,div,448.0,none,0.0,{_END},upper=scale",
    ),
    "tensor_bound_of_scale_last": (
        bounded(lambda a, s: torch.minimum((a / 448).clamp(min=1e-4), s)),
        f"{_E4}token,float32,div,448.0,scale,0.0001,{_END},upper=scale_last",
    ),
    "group_bounded": (
        group_bounded,
        f"{_E4}group16,float32,div,448.0,scale,1e-10,{_END},upper=scale",
    ),
    "token_inverse_bounded": (
        token_inverse_bounded,
        f"{_E4}token,float32,inverse,448.0,amax,1e-12,mul_inverse,-448.0,448.0,upper=amax",
    ),
    "tensor_bounded": (
        tensor_bounded,
        f"{_E4}tensor,float32,div,448.0,scale,1e-12,{_END},upper=amax",
    ),
    **{
        f"group_{name}": (
            group_stored(power),
            f"{_E4}group16,float32,div,448.0,scale,1e-10,{_END},power={word}",
        )
        for name, (power, word) in STORED.items()
    },
    "token_e8m0": (
        _token(lambda a: e8m0((a / 448).clamp(min=1e-12))[0]),
        f"{_E4}token,float32,div,448.0,scale,1e-12,{_END},power=e8m0",
    ),
    "both_bounds": (
        _token(lambda a: a.clamp(1e-3, 3.0) / 448),
        f"{_E4}token,float32,div,448.0,amax,0.001,{_END},ceiling=3.0",
    ),
    "power": (
        _token(lambda a: torch.exp2(torch.ceil(torch.log2((a / 448).clamp(min=1e-12))))),
        f"{_E4}token,float32,div,448.0,scale,1e-12,{_END},power=ceil",
    ),
    "double": (
        _token(lambda a: (a.double() / 448).clamp(min=1e-12).float()),
        f"{_E4}token,float32,div,448.0,scale,1e-12,{_END},scale_dtype=float64",
    ),
    "token_no_keepdim": (
        token_no_keepdim,
        f"{_E4}token,float32,div,448.0,scale,1e-12,{_END}",
    ),
    "token_aminmax": (token_aminmax, f"{_E4}token,float32,div,448.0,scale,1e-12,{_END}"),
    "token_inverse": (
        token_inverse,
        f"{_E4}token,float32,inverse,448.0,amax,1e-12,mul_inverse,-448.0,448.0",
    ),
    "token_inverse_double": (
        token_inverse_double,
        f"{_E4}token,float32,inverse,448.0,amax,1e-12,mul_inverse,-448.0,448.0,scale_dtype=float64",
    ),
    "tensor_inverse_power": (
        tensor_inverse_power,
        f"{_E4}tensor,float32,inverse,448.0,amax,1e-12,mul_inverse,-448.0,448.0,"
        "scale_dtype=float64,power=floor",
    ),
    "group": (group, f"{_E4}group16,float32,div,448.0,scale,1e-10,{_END}"),
    "group_deepseek": (
        group_deepseek,
        f"{_E4}group16,float32,div,448.0,amax,0.0001,mul_recip,-448.0,448.0",
    ),
    "group_power": (
        group_power,
        f"{_E4}group16,float32,div,448.0,amax,0.0001,{_END},power=ceil",
    ),
    **{
        f"group_{name}": (
            laid_out(copy),
            f"{_E4}group16,float32,div,448.0,scale,1e-10,{_END},layout={layout}",
        )
        for name, (copy, layout) in LAYOUTS.items()
    },
    "int8_token": (int8_token, "int8,token,float32,div,127.0,scale,1e-07,div,-128.0,127.0"),
    "int8_tensor": (int8_tensor, "int8,tensor,float32,div,127.0,scale,1e-07,div,-127.0,127.0"),
    "int8_static": (int8_static, "int8,tensor,float32,given,127.0,none,0.0,div,-128.0,127.0"),
    "fnuz_240": (
        fnuz(240.0),
        "float8_e4m3fnuz,token,float32,div,240.0,scale,1e-12,div,-240.0,240.0",
    ),
    "fnuz_224": (
        fnuz(224.0),
        "float8_e4m3fnuz,token,float32,div,224.0,scale,1e-12,div,-224.0,224.0",
    ),
    "e5m2": (
        _static_as(E5),
        "float8_e5m2,tensor,float32,given,57344.0,none,0.0,div,-57344.0,57344.0",
    ),
    "e5m2fnuz": (
        _static_as(U5),
        "float8_e5m2fnuz,tensor,float32,given,57344.0,none,0.0,div,-57344.0,57344.0",
    ),
}
