"""Reads weight-only products (W8A16): ``x @ (w.to(bf16) * s)`` and ``(x @ w.to(bf16)) * s``.

The weight's codes are made a model dtype (losslessly), moved, and multiplied by a scale per tensor,
per channel or per block before the product, or the product is multiplied by it. Which of the two,
and in which dtypes, is the form: a product in bf16 of a weight that was scaled in bf16 is not the
same number as one in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fp8pass.ops.forms import MODEL_DTYPES
from fp8pass.ops.weight_form import WeightForm
from fp8pass.quant_key import FP8_DTYPES, dtype_name
from fp8pass.spellings.dequantised import operands_of
from fp8pass.spellings.operands import MOVES, Operand, codes_behind, scale_of
from fp8pass.spellings.walk import (
    MUL,
    VIEWS,
    aten,
    cast_to,
    contiguous,
    dtype_of,
    is_call,
    one_element,
    only_user,
    peel_widening,
    same,
    same_shape,
    tensor,
)

#: (dtype of codes) -> model dtypes that hold every one of them.
_HELD = {
    torch.float8_e4m3fn: (torch.bfloat16, torch.float16, torch.float32),
    torch.float8_e5m2: (torch.bfloat16, torch.float16, torch.float32),
    torch.float8_e4m3fnuz: (torch.float32,),
    torch.float8_e5m2fnuz: (torch.float32,),
}


@dataclass(slots=True)
class WeightOnlyMatch:
    """One weight-only product.

    ``a_views`` turn ``a`` into the product's operand, outermost first; ``scale`` is
    ``(node, granularity, transposed)``; ``views`` of the result are to be done again.
    """

    root: fx.Node
    a: fx.Node
    a_views: list[fx.Node]
    b: Operand
    scale: tuple[fx.Node, str, bool]
    bias: fx.Node | None
    out_dtype: torch.dtype
    weight_key: str
    form: WeightForm
    views: list[fx.Node] = field(default_factory=list)


@dataclass(slots=True)
class _Weight:
    """The weight of a product: its codes, and the scale it was multiplied by, if any."""

    operand: Operand
    scaled: torch.dtype


def key_of(node: fx.Node) -> str:
    """The keys of a ``fp8pass::w8a16_mm`` in the report: its activations have a dtype alone."""
    dtype = dtype_of(node.args[0])
    assert dtype is not None
    return f"{dtype_name(dtype)} x {node.args[5]}"


def match_weight_only(product: fx.Node) -> WeightOnlyMatch | str:
    """Read a product whose weight alone is fp8, or say why not."""
    a_node, b_node, bias = operands_of(product)
    value = tensor(product)
    if value is None or value.dim() != 2:
        return "it is not the product of two matrices"
    if product.kwargs:
        return "it scales its summands (alpha, beta)"
    if value.dtype not in MODEL_DTYPES:
        return f"its result is {value.dtype}"
    weight = _weight(b_node, value.dtype)
    if isinstance(weight, str):
        return weight
    if bias is not None and not _is_bias(bias, value.shape[1], (value.dtype,)):
        return "what is added to it is not a vector of its dtype along its columns"
    walk = _Walk(product, weight, bias)
    while walk.step():
        pass
    return walk.match(a_node)


def _weight(node: Any, product: torch.dtype) -> _Weight | str:
    """The weight operand, or why it is not known how it is made."""
    moves: list[fx.Node] = []  # outermost first
    scale: Any = None
    multiplied: fx.Node | None = None
    outer = 0
    cast = False  # from the dtype of the scaling to that of the product
    while dtype_of(node) not in FP8_DTYPES:
        if not isinstance(node, fx.Node):
            return "how its weight is made of codes is not known"
        source = cast_to(node)
        if source is not None and dtype_of(node.args[0]) in FP8_DTYPES:
            codes = dtype_of(node.args[0])
            if source not in _HELD.get(codes, ()):  # type: ignore[arg-type]
                return f"{dtype_name(source)} does not hold the codes of its weight"
            node = node.args[0]
        elif is_call(node, *MOVES):
            moves.append(node)
            node = node.args[0]
        elif source is not None:
            inner = dtype_of(node.args[0])
            # codes made wide twice lose nothing; a scaled weight is rounded once, to the product's
            if multiplied is not None:
                if inner not in (torch.bfloat16, torch.float16) or source != torch.float32:
                    return "its weight is rounded before it is scaled"
            elif cast or source != product:
                return "its weight is rounded more than once"
            else:
                cast = True
            node = node.args[0]
        elif multiplied is None and is_call(node, *MUL) and not node.kwargs:
            sides = [codes_behind(arg) is not None for arg in node.args]
            if sum(sides) != 1:
                return "which of two factors is the scale of its weight is not known"
            multiplied, outer = node, len(moves)
            scale = node.args[1 - sides.index(True)]
            node = node.args[sides.index(True)]
            before, after = tensor(node), tensor(multiplied)
            if before is None or after is None or not same_shape(before, after):
                return "its weight is spread by its scale"
        else:
            return f"its weight is made by {getattr(node, 'target', node)}"
    inner_first = tuple(reversed(moves))
    if multiplied is None:
        return _Weight(Operand(node, inner_first), product)
    scaled = dtype_of(multiplied)
    if scaled not in MODEL_DTYPES or not isinstance(scale, fx.Node):
        return "its scale is not a tensor"
    if not cast and scaled != product:
        return f"its weight is {scaled}, its product {product}"
    scale = _unrounded(scale, scaled)
    found = scale_of(scale, multiplied, moves[:outer], "b", MODEL_DTYPES)
    if found is None:
        return "its scale is not one per tensor, channel or block"
    return _Weight(Operand(node, inner_first, *found), scaled)


def _unrounded(scale: fx.Node, scaled: torch.dtype) -> fx.Node:
    """The scale before a cast to the dtype in which it is multiplied, which the form repeats."""
    value = tensor(scale)
    if value is None or value.dim() == 0 or cast_to(scale) != scaled:
        return scale
    source = scale.args[0]
    return source if isinstance(source, fx.Node) and dtype_of(source) in MODEL_DTYPES else scale


def _is_bias(node: Any, width: Any, dtypes: Any) -> bool:
    value = tensor(node)
    return (
        value is not None
        and value.dtype in dtypes
        and value.dim() == 1
        and same(value.shape[0], width)
    )


class _Walk:
    """From a product along its single readers: a scale of the product, a bias, one rounding."""

    def __init__(self, product: fx.Node, weight: _Weight, bias: Any) -> None:
        self.at, self.weight, self.bias = product, weight, bias
        self.inside = bias is not None
        self.product = dtype_of(product)
        self.scaled = weight.scaled
        self.scale: tuple[fx.Node, str] | None = None
        self.views: list[fx.Node] = []
        value = tensor(product)
        assert value is not None
        self.width: Any = value.shape[-1]

    @property
    def _has_scale(self) -> bool:
        return self.scale is not None or self.weight.operand.scale is not None

    def step(self) -> bool:
        """Take the next operator, or say that the walk ends here."""
        user = only_user(self.at)
        if user is None or user.op != "call_function" or tensor(user) is None:
            return False
        if self._view(user) or self._scale(user) or self._bias(user):
            self.at = user
            return True
        target = cast_to(user)
        rounds = dtype_of(self.at) == torch.float32 and target in (torch.bfloat16, torch.float16)
        if rounds and self._has_scale:
            self.at = user
        return False

    def _view(self, user: fx.Node) -> bool:
        value = tensor(user)
        if not is_call(user, *VIEWS) or user.args[0] is not self.at or value is None:
            return False
        if value.dim() < 2 or not same(value.shape[-1], self.width):
            return False
        self.views.append(user)
        return True

    def _other(self, user: fx.Node, targets: tuple[Any, ...]) -> Any:
        """The other operand of a plain call with this value once, which keeps its shape."""
        if not is_call(user, *targets) or user.kwargs or len(user.args) != 2:
            return None
        first, second = user.args
        value, before = tensor(user), tensor(self.at)
        if (first is self.at) == (second is self.at) or value is None or before is None:
            return None
        return (second if first is self.at else first) if same_shape(value, before) else None

    def _scale(self, user: fx.Node) -> bool:
        other = self._other(user, (aten.mul.Tensor,))
        if other is None or self._has_scale or self.bias is not None:
            return False
        scaled, held = dtype_of(user), tensor(other)
        if scaled not in MODEL_DTYPES or held is None or held.dtype not in MODEL_DTYPES:
            return False
        if scaled != self.product and scaled != torch.float32:
            return False
        scale = _unrounded(other, scaled)
        if one_element(held):
            kind = "tensor"
        elif (
            held.dim() <= tensor(self.at).dim()  # type: ignore[union-attr]
            and all(same(size, 1) for size in held.shape[:-1])
            and same(held.shape[-1], self.width)
        ):
            kind = "channel"
        else:
            return False
        self.scale, self.scaled = (scale, kind), scaled
        return True

    def _bias(self, user: fx.Node) -> bool:
        other = self._other(user, (aten.add.Tensor,))
        if other is None or self.bias is not None or not self._has_scale:
            return False
        here, result = dtype_of(self.at), dtype_of(user)
        bias = peel_widening(other) if here == result == torch.float32 else other
        if not _is_bias(bias, self.width, MODEL_DTYPES):
            return False
        self.bias = bias
        return True

    def match(self, a_node: Any) -> WeightOnlyMatch | str:
        """What was read, or why nothing was."""
        operand = self.weight.operand
        if self.scale is not None:
            at, scale = "product", (*self.scale, False)
        elif operand.scale is not None:
            kind = operand.group
            if isinstance(kind, tuple):
                rows, cols = reversed(kind) if operand.transposed else kind
                kind = f"group{rows}x{cols}"
            at = "weight"
            name = "channel" if kind == "vector" else kind
            scale = (operand.scale, name, operand.transposed and name.startswith("group"))
        else:
            return "nothing scales it"
        value = tensor(self.at)
        if value is None or not contiguous(value):
            return "its result is not contiguous"
        a, a_views = _activation(a_node)
        if a is None or dtype_of(a) not in MODEL_DTYPES or self.product is None:
            return "its activations are not bf16, fp16 or fp32"
        codes = dtype_of(operand.codes)
        assert codes is not None
        form = WeightForm(at, self.scaled, self.product, "inside" if self.inside else "after")
        key = f"{dtype_name(codes)}/static/{scale[1]}"
        return WeightOnlyMatch(
            self.at, a, a_views, operand, scale, self.bias, value.dtype, key, form, self.views
        )


def _activation(node: Any) -> tuple[Any, list[fx.Node]]:
    """The activations before a cast that loses nothing, and the reshapes behind it."""
    views: list[fx.Node] = []
    inner = node
    while is_call(inner, *VIEWS):
        views.append(inner)
        inner = inner.args[0]
    source = peel_widening(inner)
    if source is inner or dtype_of(source) not in MODEL_DTYPES:
        return node, []
    return source, views
