"""What vLLM's own passes leave unfused, each case on its own, for an H200 and for a CPU.

Norms are operators of vLLM's IR, quantises are its native ones (``QuantFP8.forward_native``): what
a pass of vLLM's compilation is handed by default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import vllm_standins  # noqa: F401  (the operators)
from graphs import Passed, assert_within_contract, run, trace, values, vector
from vllm_graphs import moved

from fp8pass.absent_device import absent_device

Tensor = torch.Tensor
E4 = torch.float8_e4m3fn
LEAST = 1 / (448.0 * 512.0)


def norm(x: Tensor, w: Tensor, eps: float = 1e-5) -> Tensor:
    return torch.ops.vllm_ir.rms_norm(x, w, eps)


def add_norm(x: Tensor, r: Tensor, w: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    return torch.ops.vllm_ir.fused_add_rms_norm(x, r, w, eps)


def silu_mul(x: Tensor) -> Tensor:
    d = x.shape[-1] // 2
    return torch.nn.functional.silu(x[..., :d]) * x[..., d:]


def _applied(x: Tensor, scale: Tensor) -> Tensor:
    return (x.to(torch.float32) * scale.reciprocal()).clamp(-448.0, 448.0).to(E4)


def static(x: Tensor, scale: Tensor) -> Tensor:
    return _applied(x, scale)


def token(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = (x.abs().amax(dim=-1).unsqueeze(-1).to(torch.float32) / 448.0).clamp(min=LEAST)
    return _applied(x, scale), scale


def token_max(x: Tensor) -> tuple[Tensor, Tensor]:
    """As vLLM 0.21 writes it."""
    scale = (x.abs().max(dim=-1)[0].unsqueeze(-1).to(torch.float32) / 448.0).clamp(min=LEAST)
    return _applied(x, scale), scale


def tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = (x.abs().max().unsqueeze(-1).to(torch.float32) / 448.0).clamp(min=LEAST)
    return _applied(x, scale), scale


def group(x: Tensor) -> tuple[Tensor, Tensor]:
    grouped = x.view(-1, x.shape[-1] // 128, 128)
    amax = grouped.abs().max(dim=-1, keepdim=True)[0].float()
    scale = (amax / 448.0).clamp(min=LEAST)
    q = (grouped / scale).clamp(-448.0, 448.0).to(E4).view(-1, x.shape[-1]).view(x.shape)
    scale = scale.squeeze(-1).reshape(*x.shape[:-1], x.shape[-1] // 128)
    return q, scale.transpose(-2, -1).contiguous().transpose(-1, -2)


Case = tuple[Callable[..., Any], int]
#: Each takes x, residual, weight, two scales and [M, 2 H]; with the number of fusions.
CASES: dict[str, Case] = {
    "norm, static": (lambda x, r, w, s, t, g: static(norm(x, w), s), 1),
    "add-norm, static": (lambda x, r, w, s, t, g: _both(add_norm(x, r, w), s), 1),
    "norm, per token": (lambda x, r, w, s, t, g: token(norm(x, w)), 1),
    "norm, per token by max": (lambda x, r, w, s, t, g: token_max(norm(x, w)), 1),
    "silu, static": (lambda x, r, w, s, t, g: static(silu_mul(g), s), 1),
    "another epsilon": (lambda x, r, w, s, t, g: token(norm(x, w, 3e-5)), 1),
    "another epsilon, add": (lambda x, r, w, s, t, g: _both(add_norm(x, r, w, 2e-6), s), 1),
    "a second reader": (lambda x, r, w, s, t, g: _kept(norm(x, w), token), 1),
    "a second reader, static": (
        lambda x, r, w, s, t, g: _kept(norm(x, w), lambda y: (static(y, s),)), 1),
    "a second reader, add": (lambda x, r, w, s, t, g: _kept(add_norm(x, r, w)[0], token), 1),
    "two quantises, one scale": (
        lambda x, r, w, s, t, g: (lambda y: (static(y, s), static(y, s) ))(norm(x, w)), 1),
    "two quantises, two scales": (
        lambda x, r, w, s, t, g: (lambda y: (static(y, s), static(y, t)))(norm(x, w)), 1),
    "no residual read": (lambda x, r, w, s, t, g: token(add_norm(x, r, w)[0]), 1),
    "norm, per tensor": (lambda x, r, w, s, t, g: tensor(norm(x, w)), 1),
    "add-norm, per tensor": (lambda x, r, w, s, t, g: tensor(add_norm(x, r, w)[0]), 1),
    "silu, per token": (lambda x, r, w, s, t, g: token(silu_mul(g)), 1),
    "silu, per tensor": (lambda x, r, w, s, t, g: tensor(silu_mul(g)), 1),
    "norm, 1x128": (lambda x, r, w, s, t, g: group(norm(x, w)), 1),
    "silu, 1x128": (lambda x, r, w, s, t, g: group(silu_mul(g)), 1),
    "what attention made": (lambda x, r, w, s, t, g: token(x), 0),
}  # fmt: skip


def _both(pair: tuple[Tensor, Tensor], scale: Tensor) -> tuple[Tensor, Tensor]:
    return static(pair[0], scale), pair[1]


def _kept(y: Tensor, quantise: Callable[..., Any]) -> tuple[Tensor, ...]:
    return (*quantise(y), y + 1)


def inputs() -> tuple[Tensor, ...]:
    x, r, g = values(6, 256), values(6, 256, seed=3), values(6, 512, seed=4)
    return x + 0.01, r, vector(256), torch.tensor(0.02), torch.tensor(0.03), g


@pytest.mark.parametrize("case", CASES)
def test_fused_on_an_h200(case: str) -> None:
    function, fusions = CASES[case]
    traced = trace(function, *inputs(), dynamic=(0, 1, 5))
    with absent_device("cuda"):
        made = Passed(moved(traced, "cuda"), target="sm90")
    fused = [site for site in made.record.sites if site.status == "fused"]
    assert len(fused) == fusions == made.fusions
    assert {site.kernel for site in fused} <= {"triton"}


@pytest.mark.parametrize("case", CASES)
def test_same_numbers(case: str) -> None:
    function, fusions = CASES[case]
    made = Passed(trace(function, *inputs()))
    assert made.fusions == fusions
    assert_within_contract(run(made.fused, *inputs()), run(made.before, *inputs()))


def _powers(x: Tensor, first: bool) -> tuple[Tensor, Tensor]:
    """Blocks with scales that are powers of two; the floor before (vLLM 0.33) or after (0.32)."""
    grouped = x.view(-1, x.shape[-1] // 128, 128)
    scale = grouped.abs().max(dim=-1, keepdim=True)[0].float() / 448.0
    scale = scale.clamp(min=LEAST) if first else scale
    scale = torch.exp2(torch.ceil(torch.log2(scale)))
    scale = scale if first else scale.clamp(min=LEAST)
    q = (grouped / scale).clamp(-448.0, 448.0).to(E4).view(-1, x.shape[-1]).view(x.shape)
    return q, scale.squeeze(-1).reshape(*x.shape[:-1], x.shape[-1] // 128)


@pytest.mark.parametrize("first", [True, False], ids=["0.33", "0.32"])
def test_scales_that_are_powers_of_two(first: bool) -> None:
    """A floor behind the power of two is none of the forms: it is left, with a reason."""

    def function(x: Tensor, w: Tensor) -> Any:
        return _powers(norm(x, w), first)

    given = inputs()[0], inputs()[2]
    made = Passed(trace(function, *given))
    assert made.fusions == first
    assert bool(made.sites("quantize", "left")) is not first
    assert_within_contract(run(made.fused, *given), run(made.before, *given))
