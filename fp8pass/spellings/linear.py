"""Reads ``aten._scaled_mm``: operands, scales with their granularity, bias, dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8pass.ops.forms import MODEL_DTYPES, QuantForm
from fp8pass.quant_key import FP8_DTYPES, dtype_name
from fp8pass.reasons import Verdict, no
from fp8pass.spellings.quantize import QuantMatch, is_fp8_cast
from fp8pass.spellings.walk import (
    argument,
    aten,
    is_call,
    item,
    one_element,
    peel_views,
    same,
    tensor,
)

#: the second came with torch 2.10 (:mod:`fp8pass.spellings.scaled_mm_v2`)
SCALED_MM = (
    aten._scaled_mm.default,
    *([aten._scaled_mm_v2.default] if hasattr(aten, "_scaled_mm_v2") else []),
)


@dataclass(frozen=True, slots=True)
class ScaledMMMatch:
    """One scaled product; keys as text (see :class:`fp8pass.quant_key.QuantKey`)."""

    root: fx.Node
    a: fx.Node
    b: fx.Node
    scale_a: fx.Node
    scale_b: fx.Node
    bias: fx.Node | None
    out_dtype: torch.dtype
    act_key: str
    weight_key: str
    use_fast_accum: bool


def _read(root: fx.Node) -> ScaledMMMatch | str:
    a, b, scale_a, scale_b = (
        argument(root, i, name) for i, name in enumerate(("self", "mat2", "scale_a", "scale_b"))
    )
    bias = argument(root, 4, "bias")
    scale_result = argument(root, 5, "scale_result")
    fast = bool(argument(root, 7, "use_fast_accum", False))
    va, vb, vsa, vsb, result = (tensor(n) for n in (a, b, scale_a, scale_b, root))
    if va is None or vb is None or vsa is None or vsb is None or result is None:
        return "the graph does not know its shapes"
    if va.dtype not in FP8_DTYPES or vb.dtype not in FP8_DTYPES:
        return f"its operands are {va.dtype} and {vb.dtype}"
    if scale_result is not None:
        return "it scales its result"
    if result.dtype not in MODEL_DTYPES:
        return f"its result is {result.dtype}"
    if vsa.dtype != torch.float32 or vsb.dtype != torch.float32:
        return f"its scales are {vsa.dtype} and {vsb.dtype}, not float32"
    vbias = tensor(bias)
    if bias is not None and (vbias is None or vbias.dtype not in MODEL_DTYPES or vbias.dim() != 1):
        return "its bias is not a vector of bf16, fp16 or fp32"
    act = _granularity(vsa, a, va.shape[0], "token")
    weight = _granularity(vsb, None, vb.shape[1], "channel")
    if act is None or weight is None:
        return f"its scales have shapes {tuple(vsa.shape)} and {tuple(vsb.shape)}"
    if act[0] != weight[0] and "tensor" in (act[0], weight[0]):
        # aten has no mixed kind; with one row (or one column) both readings are the same numbers
        if one_element(vsa) and one_element(vsb):
            act, weight = ("tensor", act[1]), ("tensor", weight[1])
        elif one_element(vsa) and weight[0] == "channel" and vsa.dim() == 2:
            act = ("token", "dynamic")
        elif one_element(vsb) and act[0] == "token" and vsb.dim() == 2:
            weight = ("channel", weight[1])
        else:
            return f"its scales mix kinds: {act[0]} and {weight[0]}"
    act_key = f"{dtype_name(va.dtype)}/{act[1]}/{act[0]}"
    weight_key = f"{dtype_name(vb.dtype)}/static/{weight[0]}"
    return ScaledMMMatch(
        root, a, b, scale_a, scale_b, bias, result.dtype, act_key, weight_key, fast
    )


def quantise_form(codes: Any) -> QuantForm | None:
    """Form of the quantise that made ``codes``, through shape-only operators, if it is known.

    The quantise may have been read already: then the generic operator carries its form.
    """
    producer = peel_views(codes)
    made = item(producer, 0)
    form = _recorded_form(made)
    if form is not None:
        return QuantForm.parse(form)
    if not is_fp8_cast(producer):
        return None
    from fp8pass.spellings.any_quantize import match_any_quantize

    found = match_any_quantize(producer)
    return found.form if isinstance(found, QuantMatch) else None


def _recorded_form(node: Any) -> str | None:
    """The quantise form that an operator of fp8pass carries, alone or behind a producer."""
    if not isinstance(node, fx.Node) or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target.namespace != "fp8pass":
        return None
    schema = node.target._schema
    names = [argument.name for argument in schema.arguments]
    for name in ("quant_form", "form"):
        if name in names and schema.returns and schema.returns[0].name == "q":
            return str(node.args[names.index(name)])
    return None


def _granularity(scale: torch.Tensor, codes: Any, size: Any, vector: str) -> tuple[str, str] | None:
    """``(granularity, static or dynamic)`` of one scale; None if its shape is neither kind.

    The quantise that made the codes decides if it can be read; the shape only if it cannot.
    """
    form = quantise_form(codes)
    if form is not None:
        name = form.granularity
        when = "static" if form.static else "dynamic"
        if name == "tensor" and one_element(scale):
            return name, when
        if name == "token" and scale.dim() == 2 and same(scale.shape[0], size):
            return name, when
    if scale.dim() == 2:
        rows, cols = scale.shape
        length, other = (rows, cols) if vector == "token" else (cols, rows)
        if same(other, 1) and same(length, size) and not same(size, 1):
            return vector, "dynamic"
    if one_element(scale):
        return "tensor", "static" if peel_views_is_input(codes) else "dynamic"
    return None


def peel_views_is_input(codes: Any) -> bool:
    """Whether the codes come straight from an input of the graph (so their scale does too)."""
    source = peel_views(codes)
    return isinstance(source, fx.Node) and source.op in ("placeholder", "get_attr")


def is_scaled_mm(node: Any) -> bool:
    """The anchor of :func:`match_scaled_mm`."""
    return is_call(node, *SCALED_MM)


def match_scaled_mm(root: fx.Node) -> ScaledMMMatch | Verdict:
    """Read one ``aten._scaled_mm`` or ``aten._scaled_mm_v2``, or say why not (FP8-R002)."""
    from fp8pass.spellings.scaled_mm_v2 import read_scaled_mm_v2

    found = _read(root) if is_call(root, aten._scaled_mm.default) else read_scaled_mm_v2(root)
    return no("FP8-R002", node=root.name, why=found) if isinstance(found, str) else found
