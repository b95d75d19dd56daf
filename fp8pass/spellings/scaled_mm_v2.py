"""Reads ``aten._scaled_mm_v2``: what ``torch.nn.functional.scaled_mm`` (torch 2.10) becomes.

    scaled_mm(q, w.t(), sa, ScalingType.RowWise, sb, ScalingType.RowWise, output_dtype=...)

The recipe of each scale is an argument, so granularity is never taken from a shape. Read: one scale
for the whole tensor and one for each row, without swizzle and without contraction dims. Blocks,
microscaling and two-level scales have no kernel and are refused by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8pass.ops.forms import MODEL_DTYPES
from fp8pass.quant_key import FP8_DTYPES, dtype_name
from fp8pass.spellings.linear import ScaledMMMatch, quantise_form
from fp8pass.spellings.walk import argument, one_element, same, tensor

#: What the integers of a recipe are (``torch.nn.functional.ScalingType``).
RECIPES = (
    "TensorWise",
    "RowWise",
    "BlockWise1x16",
    "BlockWise1x32",
    "BlockWise1x128",
    "BlockWise128x128",
)
_NAMES = (
    "self",
    "mat2",
    "scale_a",
    "recipe_a",
    "swizzle_a",
    "scale_b",
    "recipe_b",
    "swizzle_b",
    "bias",
    "out_dtype",
    "contraction_dim",
    "use_fast_accum",
)


def read_scaled_mm_v2(root: fx.Node) -> ScaledMMMatch | str:
    """The product, or why it is not read."""
    given = {name: argument(root, i, name) for i, name in enumerate(_NAMES)}
    a, b, bias = given["self"], given["mat2"], given["bias"]
    va, vb, result = tensor(a), tensor(b), tensor(root)
    if va is None or vb is None or result is None or va.dim() != 2 or vb.dim() != 2:
        return "the graph does not know its shapes"
    if va.dtype not in FP8_DTYPES or vb.dtype not in FP8_DTYPES:
        return f"its operands are {va.dtype} and {vb.dtype}"
    if any(given["swizzle_a"] or ()) or any(given["swizzle_b"] or ()):
        return "its scales are swizzled"
    if given["contraction_dim"]:
        return f"it contracts the dims {given['contraction_dim']}"
    if result.dtype not in MODEL_DTYPES:
        return f"its result is {result.dtype}"
    scale_a = _scale(given["scale_a"], given["recipe_a"], (va.shape[0], 1))
    scale_b = _scale(given["scale_b"], given["recipe_b"], (1, vb.shape[1]))
    for found in (scale_a, scale_b):
        if isinstance(found, str):
            return found
    assert not isinstance(scale_a, str) and not isinstance(scale_b, str)
    vbias = tensor(bias)
    if bias is not None and (vbias is None or vbias.dtype not in MODEL_DTYPES or vbias.dim() != 1):
        return "its bias is not a vector of bf16, fp16 or fp32"
    form = quantise_form(a)
    when = "static" if form is not None and form.static else "dynamic"
    act = "tensor" if scale_a[1] == 0 else "token"
    weight = "tensor" if scale_b[1] == 0 else "channel"
    return ScaledMMMatch(
        root,
        a,
        b,
        scale_a[0],
        scale_b[0],
        bias,
        result.dtype,
        f"{dtype_name(va.dtype)}/{when}/{act}",
        f"{dtype_name(vb.dtype)}/static/{weight}",
        bool(given["use_fast_accum"]),
    )


def _scale(scales: Any, recipes: Any, rows: tuple[Any, Any]) -> tuple[fx.Node, int] | str:
    """The only scale of an operand and its recipe, of the shape that the recipe says."""
    if len(scales) != 1 or len(recipes) != 1:
        return f"an operand has {len(scales)} scales"
    scale, recipe = scales[0], recipes[0]
    value = tensor(scale)
    if recipe not in (0, 1):
        known = isinstance(recipe, int) and recipe < len(RECIPES)
        return f"its scales are {RECIPES[recipe] if known else f'of the unknown kind {recipe}'}"
    if value is None or value.dtype != torch.float32:
        return f"its scales are {None if value is None else value.dtype}, not float32"
    right = one_element(value) if recipe == 0 else value.dim() == 2
    if recipe == 1 and right:
        right = all(map(same, value.shape, rows))
    return (scale, recipe) if right else f"its scale has the shape {tuple(value.shape)}"
