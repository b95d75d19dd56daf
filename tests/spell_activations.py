"""Spellings of activations, alone and gated, with the form that each must be read as."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from spell_common import NAMES, Tensor


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
