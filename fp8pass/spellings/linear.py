"""Reads scaled products: ``aten._scaled_mm`` and ``_scaled_mm_v2`` here, the others by one door.

:func:`match_product` takes every anchor (:func:`is_scaled_mm`); products spelled without scales
inside are read in :mod:`fp8pass.spellings.dequantised`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8pass.ops.forms import MODEL_DTYPES, QuantForm
from fp8pass.quant_key import FP8_DTYPES, GroupShape, dtype_name
from fp8pass.reasons import Verdict, no
from fp8pass.spellings.by_place import read_by_place
from fp8pass.spellings.dequantised import (
    INT_MM,
    DequantisedMatch,
    is_product_of_codes,
    match_dequantised,
    match_epilogue,
    weight_only,
)
from fp8pass.spellings.operands import Operand
from fp8pass.spellings.padding import without_padding
from fp8pass.spellings.quantize import QuantMatch, is_fp8_cast
from fp8pass.spellings.walk import (
    argument,
    aten,
    dtype_of,
    is_call,
    item,
    one_element,
    peel_views,
    same,
    scalar,
    tensor,
)
from fp8pass.spellings.weight_only import WeightOnlyMatch, match_weight_only

SCALED_MM = (aten._scaled_mm.default,)
#: torch.nn.functional.scaled_mm; torch 2.10 and older have no such operator.
SCALED_MM_V2 = tuple(
    getattr(aten, name).default for name in ("_scaled_mm_v2",) if hasattr(aten, name)
)
#: ``torch.nn.functional.ScalingType`` by number -> granularity of an activation, of a weight.
_RECIPES = {
    0: ("tensor", "tensor"),
    1: ("token", "channel"),
    4: ("group1x128", "group128x1"),
    5: ("group128x128", "group128x128"),
}


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
    root, a = without_padding(root, a, scale_a)
    va, vb, vsa, vsb, result = (tensor(n) for n in (a, b, scale_a, scale_b, root))
    if va is None or vb is None or vsa is None or vsb is None or result is None:
        return "the graph does not know its shapes"
    if va.dtype not in FP8_DTYPES or vb.dtype not in FP8_DTYPES:
        return f"its operands are {va.dtype} and {vb.dtype}"
    if scale_result is not None:
        return "it scales its result"
    if result.dtype not in MODEL_DTYPES:
        return f"its result is {result.dtype}"
    if torch.float8_e8m0fnu in (vsa.dtype, vsb.dtype):
        return "its scales are float8_e8m0fnu, one for 32 elements of K (MX), not float32"
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


def _read_v2(root: fx.Node) -> ScaledMMMatch | str:
    names = ("self", "mat2", "scale_a", "recipe_a", "swizzle_a", "scale_b", "recipe_b",
             "swizzle_b", "bias", "out_dtype", "contraction_dim", "use_fast_accum")  # fmt: skip
    given = {name: argument(root, i, name) for i, name in enumerate(names)}
    a, b, bias = given["self"], given["mat2"], given["bias"]
    va, vb, result = tensor(a), tensor(b), tensor(root)
    if va is None or vb is None or result is None:
        return "the graph does not know its shapes"
    if va.dtype not in FP8_DTYPES or vb.dtype not in FP8_DTYPES:
        return f"its operands are {va.dtype} and {vb.dtype}"
    if va.dim() != 2 or vb.dim() != 2 or given["contraction_dim"]:
        return "it does not contract the inner dims of two matrices"
    if any(given["swizzle_a"] or ()) or any(given["swizzle_b"] or ()):
        return "its scales are swizzled"
    if any(len(given[name] or ()) != 1 for name in ("scale_a", "recipe_a", "scale_b", "recipe_b")):
        return "an operand has scales on several levels"
    (ra,), (rb,) = given["recipe_a"], given["recipe_b"]
    if ra not in _RECIPES or rb not in _RECIPES:
        return f"its scales are in recipes {ra} and {rb}: per 16 or 32 elements (MX, NVFP4)"
    act, weight = _RECIPES[ra][0], _RECIPES[rb][1]
    if act == "group128x128":
        return "its activations have a scale per block of 128 rows"
    (scale_a,), (scale_b,) = given["scale_a"], given["scale_b"]
    vsa, vsb = tensor(scale_a), tensor(scale_b)
    if vsa is None or vsb is None or vsa.dtype != torch.float32 or vsb.dtype != torch.float32:
        return f"its scales are {dtype_of(scale_a)} and {dtype_of(scale_b)}, not float32"
    for kind, scale, codes in ((act, vsa, va), (weight, vsb, vb)):
        if not _has_shape(scale, kind, codes):
            return f"its scales have shapes {tuple(vsa.shape)} and {tuple(vsb.shape)}"
    if result.dtype not in MODEL_DTYPES:
        return f"its result is {result.dtype}"
    vbias = tensor(bias)
    if bias is not None and (vbias is None or vbias.dtype not in MODEL_DTYPES or vbias.dim() != 1):
        return "its bias is not a vector of bf16, fp16 or fp32"
    form = quantise_form(a)
    static = form.static if form is not None else act == "tensor" and peel_views_is_input(a)
    act_key = f"{dtype_name(va.dtype)}/{'static' if static else 'dynamic'}/{act}"
    weight_key = f"{dtype_name(vb.dtype)}/static/{weight}"
    fast = bool(given["use_fast_accum"])
    return ScaledMMMatch(
        root, a, b, scale_a, scale_b, bias, result.dtype, act_key, weight_key, fast
    )


def _has_shape(scale: torch.Tensor, kind: str, codes: torch.Tensor) -> bool:
    """Whether a scale has the shape of its granularity, oriented as its operand is."""
    if kind == "tensor":
        return one_element(scale)
    group = GroupShape.parse(kind)
    if scale.dim() != 2:
        return False
    for count, size, block in zip(scale.shape, codes.shape, (group.row, group.col), strict=True):
        if block == 1 or block == -1:
            if not same(count, size if block == 1 else 1):
                return False
        elif type(size) is not int or not same(count, -(-size // block)):
            return False
    return True


def _unit(scale: Any) -> bool:
    return scalar(scale) == 1.0


def _read_unit(root: fx.Node) -> DequantisedMatch | None:
    """A ``_scaled_mm`` with scales of one to float32, that is scaled afterwards."""
    names = ("self", "mat2", "scale_a", "scale_b", "bias", "scale_result")
    a, b, scale_a, scale_b, bias, scale_result = (
        argument(root, i, name) for i, name in enumerate(names)
    )
    va, vb = tensor(a), tensor(b)
    if dtype_of(root) != torch.float32 or bias is not None or scale_result is not None:
        return None
    if va is None or vb is None or va.dtype not in FP8_DTYPES or vb.dtype not in FP8_DTYPES:
        return None
    if not _unit(scale_a) or not _unit(scale_b):
        return None
    found = match_epilogue(root, root, Operand(a), Operand(b))
    if isinstance(found, str):
        return None
    found.use_fast_accum = bool(argument(root, 7, "use_fast_accum", False))
    return found


def is_scaled_mm(node: Any) -> bool:
    """The anchor of :func:`match_product`: a product of codes, with its scales inside or not."""
    return is_call(node, *SCALED_MM, *SCALED_MM_V2) or is_product_of_codes(node)


def match_product(
    root: fx.Node,
) -> ScaledMMMatch | DequantisedMatch | WeightOnlyMatch | Verdict:
    """Read one product of codes, or say why not (FP8-R002; FP8-R005: only its weight is fp8)."""
    found = _match(root)
    if not isinstance(found, str):
        found = read_by_place((getattr(found, "root", root),)) or found
    if not isinstance(found, str):
        return found
    return no("FP8-R005" if _weight_only(root) else "FP8-R002", node=root.name, why=found)


def _weight_only(root: fx.Node) -> bool:
    return not is_call(root, *SCALED_MM, *SCALED_MM_V2, INT_MM) and weight_only(root)


def _match(root: fx.Node) -> ScaledMMMatch | DequantisedMatch | WeightOnlyMatch | str:
    if is_call(root, *SCALED_MM):
        return _read_unit(root) or _read(root)
    if is_call(root, *SCALED_MM_V2):
        return _read_v2(root)
    return match_weight_only(root) if _weight_only(root) else match_dequantised(root)
