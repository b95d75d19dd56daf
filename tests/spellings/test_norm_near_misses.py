"""Norms that are not read: each says which condition failed (FP8-R003), beside its control.

What looks like a norm and is another function must not be taken for one, and must not be silent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import test_near_misses
import torch
import torch.nn.functional as F
from graphs import Passed, Reading, assert_same_bits, run, trace, values, vector
from spell import LAYER_NORMS, llama, static

Tensor = torch.Tensor
Fn = Callable[[Tensor, Tensor], Tensor]
EPS, M, H = 1e-6, 6, 64
X, W, S = values(M, H), vector(H), torch.tensor(0.02)
SQUARE = values(H, H)


@dataclass(frozen=True)
class Miss:
    """``norm(x, w)`` is not read, and the reason says ``why``; ``control`` is read and fused."""

    norm: Fn
    why: str
    control: Fn
    x: Tensor = X


def rms(
    *,
    of: Callable[[Tensor], Tensor] = lambda h: h,
    mean: Callable[[Tensor], Tensor] = lambda h: h.pow(2).mean(-1, keepdim=True),
    root: Callable[[Tensor], Tensor] = lambda v: torch.rsqrt(v + EPS),
    times: Callable[[Tensor, Tensor], Tensor] = lambda h, r: h * r,
) -> Fn:
    def norm(x: Tensor, w: Tensor) -> Tensor:
        h = x.float()
        return w * times(of(h), root(mean(h))).to(x.dtype)

    return norm


CONTROL = rms()


def layer(
    *,
    center: Callable[[Tensor], Tensor] = lambda h: h.mean(-1, keepdim=True),
    variance: Callable[[Tensor], Tensor] = lambda h: h.var(-1, correction=0, keepdim=True),
    wide: Callable[[Tensor], Tensor] = lambda x: x.float(),
) -> Fn:
    def norm(x: Tensor, w: Tensor) -> Tensor:
        h = wide(x)
        return w * ((h - center(h)) * torch.rsqrt(variance(h) + EPS)).to(x.dtype)

    return norm


LAYER = layer()


def half_way(x: Tensor, w: Tensor) -> Tensor:
    """No upcast at all."""
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


def in_double(x: Tensor, w: Tensor) -> Tensor:
    h = x.double()
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def narrow_squares(x: Tensor, w: Tensor) -> Tensor:
    """The squares are rounded, their mean is taken in float32."""
    mean = x.pow(2).mean(-1, keepdim=True, dtype=torch.float32)
    return w * (x.float() * torch.rsqrt(mean + EPS)).to(x.dtype)


def weight_into_narrow_x(x: Tensor, w: Tensor) -> Tensor:
    """x * weight is rounded to bf16 before the root is multiplied."""
    inverse = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
    return ((x * w) * inverse).to(x.dtype)


def weight_into_wide_x(x: Tensor, w: Tensor) -> Tensor:
    inverse = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
    return ((x.float() * w) * inverse).to(x.dtype)


def original(x: Tensor, w: Tensor) -> Tensor:
    """The code of the RMSNorm paper: the norm times ``H ** -0.5``, epsilon outside."""
    h = x.float()
    rms = h.norm(2, dim=-1, keepdim=True) * H**-0.5
    return w * (h / (rms + EPS)).to(x.dtype)


def outside(x: Tensor, w: Tensor) -> Tensor:
    h = x.float()
    return w * (h / (h.pow(2).mean(-1, keepdim=True).sqrt() + EPS)).to(x.dtype)


def normalize(x: Tensor, w: Tensor) -> Tensor:
    return w * (F.normalize(x.float(), dim=-1) * H**0.5).to(x.dtype)


MISSES = {
    "bf16_throughout": Miss(half_way, "computed in torch.bfloat16", CONTROL),
    "squares_in_bf16": Miss(narrow_squares, "computed in torch.bfloat16", CONTROL),
    "float64": Miss(in_double, "computed in torch.float64", CONTROL),
    "mean_rounded": Miss(
        rms(root=lambda v: torch.rsqrt(v.bfloat16().float() + EPS)), "cast to", CONTROL
    ),
    "root_rounded": Miss(
        rms(root=lambda v: torch.rsqrt(v + EPS).bfloat16()), "cast to torch.bfloat16", CONTROL
    ),
    "mean_over_rows": Miss(
        rms(mean=lambda h: h.pow(2).mean(0, keepdim=True)), "over dims [0]", CONTROL, SQUARE
    ),
    "mean_over_two_dims": Miss(
        rms(mean=lambda h: h.pow(2).mean((0, 1), keepdim=True)), "over dims [0, 1]", CONTROL
    ),
    "mean_over_all": Miss(rms(mean=lambda h: h.pow(2).mean()), "over ", CONTROL),
    "one_root_per_column": Miss(
        rms(mean=lambda h: h.pow(2).mean(-1)), "the shape (64,), not (64, 1)", CONTROL, SQUARE
    ),
    "mean_of_fourth_powers": Miss(
        rms(mean=lambda h: h.pow(4).mean(-1, keepdim=True)), "not the square", CONTROL
    ),
    "other_width": Miss(
        rms(mean=lambda h: h.pow(2).sum(-1, keepdim=True) / (H - 1)),
        "another number than the width",
        rms(mean=lambda h: h.pow(2).sum(-1, keepdim=True) / H),
    ),
    "other_factor": Miss(
        rms(mean=lambda h: h.pow(2).sum(-1, keepdim=True) * (1 / 63)),
        "unknown order",
        rms(mean=lambda h: h.pow(2).sum(-1, keepdim=True) * (1 / 64)),
    ),
    "l2_normalisation": Miss(normalize, "L2 normalisation", CONTROL),
    "l2_normalisation_by_hand": Miss(
        rms(mean=lambda h: h.pow(2).sum(-1, keepdim=True)), "L2 normalisation", CONTROL
    ),
    "norm_scaled_afterwards": Miss(original, "scaled afterwards", outside),
    "eps_subtracted": Miss(rms(root=lambda v: torch.rsqrt(v - EPS)), "subtracted", CONTROL),
    "eps_is_computed": Miss(
        rms(root=lambda v: torch.rsqrt(v + v.amax() * EPS)), "epsilon is a tensor", CONTROL
    ),
    "two_epsilons": Miss(
        rms(root=lambda v: torch.rsqrt((v + EPS).clamp(min=EPS))), "unknown order", CONTROL
    ),
    "eps_inside_and_outside": Miss(
        rms(root=lambda v: 1 / ((v + EPS).sqrt() + EPS)), "unknown order", CONTROL
    ),
    "root_of_a_reciprocal": Miss(
        rms(root=lambda v: torch.sqrt(1 / (v + EPS))),
        "unknown order",
        rms(root=lambda v: 1 / torch.sqrt(v + EPS)),
    ),
    "upper_bound": Miss(
        rms(root=lambda v: torch.rsqrt(v.clamp(EPS, 1e4))),
        "unknown order",
        rms(root=lambda v: torch.rsqrt(v.clamp(EPS))),
    ),
    "another_x": Miss(rms(of=lambda h: h + 1), "is not the tensor", CONTROL),
    "x_of_other_rows": Miss(rms(of=lambda h: h.flip(0)), "is not the tensor", CONTROL),
    "weight_into_rounded_x": Miss(weight_into_narrow_x, "is not the tensor", weight_into_wide_x),
    "layer_norm_unbiased": Miss(
        layer(variance=lambda h: h.var(-1, keepdim=True)), "correction", LAYER
    ),
    "layer_norm_over_rows": Miss(
        layer(variance=lambda h: h.var(0, correction=0, keepdim=True)),
        "variance is over dims [0]",
        LAYER,
        SQUARE,
    ),
    "layer_norm_centered_elsewhere": Miss(
        layer(center=lambda h: h.mean(0, keepdim=True)), "x - mean(x)", LAYER, SQUARE
    ),
    "layer_norm_of_a_sum": Miss(
        layer(variance=lambda h: (h + h.flip(0)).var(-1, correction=0, keepdim=True)),
        "x - mean(x)",
        LAYER,
    ),
    "not_centered": Miss(layer(center=lambda h: h * 0.5), "x - mean(x)", LAYER),
    "layer_norm_in_float64": Miss(
        layer(wide=lambda x: x.double()), "computed in torch.float64", LAYER
    ),
    "layer_norm_in_bf16": Miss(layer(wide=lambda x: x), "computed in torch.bfloat16", LAYER),
}


def behind(norm: Fn) -> Callable[..., tuple[Tensor, ...]]:
    return lambda x, w, s: static(norm(x, w), s)


@pytest.mark.parametrize("name", MISSES)
def test_not_read_with_its_reason(name: str) -> None:
    miss = MISSES[name]
    inputs = (miss.x, W, S)
    traced = trace(behind(miss.norm), *inputs)
    reading = Reading(traced)
    reading.check(*inputs)
    assert reading.forms("norm") == []
    for stage in ("all", "joint"):
        passed = Passed(traced, stage, strict=True)
        assert passed.fusions == 0
        (site,) = passed.sites("quantize")
        assert site.code == "FP8-R003"
        assert miss.why in site.message
        assert str(passed.after.graph) == str(passed.before.graph)


@pytest.mark.parametrize("name", MISSES)
def test_its_control_fuses(name: str) -> None:
    miss = MISSES[name]
    inputs = (miss.x, W, S)
    passed = Passed(trace(behind(miss.control), *inputs), strict=True)
    assert passed.fusions == 1
    assert_same_bits(run(passed.fused, *inputs), run(passed.before, *inputs))


@pytest.mark.parametrize("name", test_near_misses.NORM_CASES)
def test_no_near_miss_is_silent(name: str) -> None:
    case = test_near_misses.NORM_CASES[name]
    passed = Passed(trace(case.fn, *case.inputs))
    for site in passed.sites("quantize"):
        assert site.code in ("FP8-R003", "FP8-R001")


NO_NORMS: dict[str, Fn] = {
    "softmax": lambda x, w: x.float().softmax(-1).to(x.dtype),
    "scaled": lambda x, w: x * H**-0.5,
    "root_of_x": lambda x, w: x.float().abs().sqrt().to(x.dtype) * w,
    "mean_only": lambda x, w: x * x.float().mean(-1, keepdim=True).to(x.dtype),
    "a_linear": lambda x, w: x @ torch.eye(H, dtype=x.dtype),
    "norm_far_away": lambda x, w: llama(x, w, EPS) @ torch.eye(H, dtype=x.dtype),
}


@pytest.mark.parametrize("name", NO_NORMS)
def test_what_is_no_norm_is_not_called_one(name: str) -> None:
    passed = Passed(trace(behind(NO_NORMS[name]), X, W, S), strict=True)
    (site,) = passed.sites("quantize")
    assert site.code == "FP8-F002"


def test_a_layer_norm_is_no_rms_norm() -> None:
    """Nor is one with the weight of the other kind read as it."""
    fn = LAYER_NORMS["mean_square"][0]
    reading = Reading(trace(lambda x, w, s: static(fn(x, w, w, EPS), s), X, W, S))
    (draft,) = [d for d in reading.drafts if d.kind == "norm"]
    assert str(draft.node.target) == "fp8pass.layer_norm.default"
