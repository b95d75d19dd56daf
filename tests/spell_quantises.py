"""Spellings of the usual quantises to e4m3fn, with the form that each must be read as."""

from __future__ import annotations

from collections.abc import Callable

import torch
from spell_common import E4, NAMES, Tensor

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
