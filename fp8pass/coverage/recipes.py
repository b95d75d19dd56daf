"""Recipes by which a model is quantised: those of :mod:`fp8pass.nn`, and what others write.

The linears here are plain torch, spelled as the libraries named in their docstrings spell them.
They are made for the table of coverage, not for use: nothing here is tuned or can be loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fp8pass.errors import OptionError, choices
from fp8pass.fp8_linear import Fp8Linear

E4 = torch.float8_e4m3fn
GROUP = 128


class _Linear(nn.Module):
    """A quantised linear of this module; subclasses make the weight and the forward."""

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        codes, scale = self.quantize(linear.weight.detach().float())
        self.register_buffer("weight", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scale of a float32 weight ``[N, K]``."""
        raise NotImplementedError


class GroupLinear(_Linear):
    """1x128 groups of the input, 128x128 blocks of the weight, as DeepSeek-V3's checkpoints.

    The product is written out on dequantised operands, as its reference implementation does where
    there is no kernel.
    """

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes ``[N, K]`` and scales ``[ceil(N / 128), K / 128]``."""
        n, k = weight.shape
        padded = nn.functional.pad(weight, (0, 0, 0, -n % GROUP))
        blocks = padded.view(-1, GROUP, k // GROUP, GROUP)
        scale = (blocks.abs().amax((1, 3)) / 448.0).clamp(min=1e-12)
        wide = _spread(scale, n)
        return (weight / wide).clamp(-448.0, 448.0).to(E4), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` ``[..., K]`` -> ``[..., N]`` in the dtype of ``x``."""
        groups = x.unflatten(-1, (-1, GROUP)).float()
        scale = (groups.abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-12)
        q = (groups / scale).clamp(-448.0, 448.0).to(E4)
        a = (q.float() * scale).flatten(-2)
        w = self.weight.float() * _spread(self.scale, self.out_features)
        out = (a @ w.t()).to(x.dtype)
        return out if self.bias is None else out + self.bias


def _spread(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """Scales of 128x128 blocks as one per element."""
    return scale.repeat_interleave(GROUP, 0)[:rows].repeat_interleave(GROUP, 1)


class Int8Linear(_Linear):
    """INT8, symmetric: per token and per channel, as torchao and compressed-tensors."""

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes ``[N, K]`` and scales ``[1, N]``."""
        scale = (weight.abs().amax(-1, keepdim=True) / 127.0).clamp(min=1e-12)
        return (weight / scale).round().clamp(-128, 127).to(torch.int8), scale.t().contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` ``[..., K]`` -> ``[..., N]`` in the dtype of ``x``."""
        rows = x.reshape(-1, self.in_features)
        wide = rows.float()
        scale = (wide.abs().amax(-1, keepdim=True) / 127.0).clamp(min=1e-12)
        q = (wide / scale).round().clamp(-128, 127).to(torch.int8)
        total = torch._int_mm(q, self.weight.t())
        out = (total.float() * scale * self.scale).to(x.dtype)
        out = out if self.bias is None else out + self.bias
        return out.reshape(*x.shape[:-1], self.out_features)


class WeightOnlyLinear(_Linear):
    """An fp8 weight with a scale per channel; the input stays as it is (W8A16)."""

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes ``[N, K]`` and scales ``[N, 1]``."""
        scale = (weight.abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-12)
        return (weight / scale).clamp(-448.0, 448.0).to(E4), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` ``[..., K]`` -> ``[..., N]`` in the dtype of ``x``."""
        weight = (self.weight.float() * self.scale).to(x.dtype)
        return nn.functional.linear(x, weight, self.bias)


#: The types whose calls are counted as scaled products.
QUANTISED: tuple[type[nn.Module], ...] = (Fp8Linear, _Linear)


@dataclass(frozen=True)
class CoverageRecipe:
    """One recipe of the table.

    Attributes:
        name: as on the command line.
        apply: quantises a model in place, given its inputs.
        granularity: of the input's scale: ``tensor``, ``token``, ``group``, or ``none`` when the
            input is not quantised.
        required: the command fails when a family falls short of the limits with this recipe.
    """

    name: str
    apply: Callable[[nn.Module, tuple[Any, ...]], None]
    granularity: str
    required: bool = True


def _own(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def apply(model: nn.Module, inputs: tuple[Any, ...]) -> None:
        from fp8pass.nn import calibrate, quantize_

        seen = calibrate(model, [inputs], progress=False) if name == "static" else None
        quantize_(model, name, calibration=seen, progress=False)

    return apply


def _replaced(kind: type[_Linear]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def apply(model: nn.Module, inputs: tuple[Any, ...]) -> None:
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear and name != "lm_head":
                    setattr(module, name, kind(child))

    return apply


RECIPES: dict[str, CoverageRecipe] = {
    recipe.name: recipe
    for recipe in (
        CoverageRecipe("static", _own("static"), "tensor"),
        CoverageRecipe("dynamic", _own("dynamic"), "token"),
        CoverageRecipe("dynamic_tensor", _own("dynamic_tensor"), "tensor"),
        CoverageRecipe("group128", _replaced(GroupLinear), "group"),
        CoverageRecipe("int8_dynamic", _replaced(Int8Linear), "token"),
        CoverageRecipe("weight_only", _replaced(WeightOnlyLinear), "none", required=False),
    )
}


def recipe(name: str) -> CoverageRecipe:
    """The recipe of that name. Raises :class:`OptionError` naming the allowed ones."""
    if name not in RECIPES:
        raise OptionError(f"unknown recipe {name!r}; allowed: {choices(RECIPES)}")
    return RECIPES[name]
