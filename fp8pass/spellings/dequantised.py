"""Reads a scaled product that is spelled without scales inside: codes, product, multiplications.

``(q.float() @ w.float()) * sa * sb + bias``, rounded once at the end: by ``mm``, ``addmm`` or a
``bmm`` of one batch in float32, by ``_int_mm``, or by ``_scaled_mm`` with unit scales and a float32
result. The scales are found by walking from the product along single readers; the walk ends at the
rounding to the result's dtype, or where the value is no longer a scaled product.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fp8pass.ops.forms import MODEL_DTYPES
from fp8pass.ops.product_form import ProductForm
from fp8pass.quant_key import FP8_DTYPES, dtype_name
from fp8pass.spellings.integer_product import read_integers
from fp8pass.spellings.operands import CODES, Operand, codes_behind, read_operand
from fp8pass.spellings.walk import (
    VIEWS,
    argument,
    aten,
    cast_to,
    contiguous,
    dtype_of,
    is_call,
    one_element,
    only_user,
    peel_views,
    peel_widening,
    same,
    tensor,
)

PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
INT_MM = aten._int_mm.default
#: From here on a sum of int8 products may leave int32.
_INT32_SUMMANDS = 2**31 // 128**2


@dataclass(slots=True)
class DequantisedMatch:
    """One product with its scales; keys as text, views of the result to be done again.

    ``scale_a`` and ``scale_b`` are ``(node, granularity, transposed)``, None for a scale of one.
    """

    root: fx.Node
    product: fx.Node
    a: Operand
    b: Operand
    scale_a: tuple[fx.Node, str, bool] | None
    scale_b: tuple[fx.Node, str, bool] | None
    bias: fx.Node | None
    out_dtype: torch.dtype
    form: ProductForm
    act_dtype: torch.dtype
    weight_dtype: torch.dtype
    batch: bool = False
    use_fast_accum: bool = False
    views: list[fx.Node] = field(default_factory=list)


def operands_of(node: fx.Node) -> tuple[Any, Any, Any]:
    """``(a, b, bias)`` of a product."""
    if is_call(node, aten.addmm.default):
        return node.args[1], node.args[2], node.args[0]
    return node.args[0], node.args[1], None


def is_product_of_codes(node: Any) -> bool:
    """Whether ``node`` multiplies two matrices of which codes can be seen behind one or both."""
    if is_call(node, INT_MM):
        return True
    if not is_call(node, *PRODUCTS):
        return False
    value = tensor(node)
    if value is None or (value.dim() == 3 and not same(value.shape[0], 1)):
        return False
    a, b, _ = operands_of(node)
    behind = codes_behind(b)
    if behind is None:
        return False
    return dtype_of(behind) in FP8_DTYPES or codes_behind(a) is not None


def weight_only(node: fx.Node) -> bool:
    """Whether only the weight of a product is quantised (W8A16)."""
    a, b, _ = operands_of(node)
    return codes_behind(a) is None and codes_behind(b) is not None


def match_dequantised(product: fx.Node) -> DequantisedMatch | str:
    """Read the product :func:`is_product_of_codes`, or say why not."""
    a_node, b_node, bias = operands_of(product)
    value = tensor(product)
    if value is None:
        return "the graph does not know its shapes"
    start, how = product, "none"
    if is_call(product, INT_MM):
        whole = read_integers(product)
        if isinstance(whole, str):
            return whole
        a, b = Operand(whole.a, zero=whole.zero), Operand(b_node)
        why = _integers(product, a, b)
        if why:
            return why
        start, how = whole.start, whole.how
    else:
        if product.kwargs:
            return "it scales its summands (alpha, beta)"
        if value.dtype != torch.float32:
            scaled = any(_multiplied(operand) for operand in (a_node, b_node))
            name = dtype_name(value.dtype)
            return (
                f"its operands are rounded to {name} after they were scaled"
                if scaled
                else f"its product is rounded to {name} before it is scaled"
            )
        first, second = read_operand(a_node, "a"), read_operand(b_node, "b")
        if first is None or second is None:
            which = "first" if first is None else "second"
            return f"how its {which} operand is made of codes and a scale is not known"
        a, b = first, second
        if a.zero is not None:
            how = "codes"
            if bias is not None or _integers(product, a, b):
                return _integers(product, a, b) or "a bias is added to it inside the product"
    found = match_epilogue(product, start, a, b, bias)
    if isinstance(found, DequantisedMatch) and how != "none":
        found.form = replace(found.form, zero=how)
    return found


def _integers(product: fx.Node, a: Operand, b: Operand) -> str:
    va, vb = tensor(a.codes), tensor(b.codes)
    if va is None or vb is None or va.dtype != torch.int8 or vb.dtype != torch.int8:
        return "its operands are not int8"
    depth = va.shape[1]
    if type(depth) is not int or depth >= _INT32_SUMMANDS:
        return f"its int32 sum over K = {depth} may overflow"
    return ""


def _multiplied(node: Any) -> bool:
    while isinstance(node, fx.Node) and dtype_of(node) not in CODES:
        if is_call(node, aten.mul.Tensor):
            return True
        node = node.args[0] if node.args else None
    return False


def match_epilogue(
    product: fx.Node, start: fx.Node, a: Operand, b: Operand, bias: Any = None
) -> DequantisedMatch | str:
    """The scales, bias and rounding behind the float32 value ``start`` of ``a @ b``."""
    walk = _Walk(start, a, b, bias)
    while walk.step():
        pass
    scales = walk.assigned()
    if isinstance(scales, str):
        return scales
    scale_a, scale_b, order = scales
    if scale_a is None and scale_b is None:
        return "nothing scales it"
    if walk.bias is not None and not _is_bias(walk.bias, walk.width):
        return "what is added to it is not a vector of bf16, fp16 or fp32 along its columns"
    root = tensor(walk.at)
    if root is None or not contiguous(root):
        return "its result is not contiguous"
    va, vb = tensor(walk.a.codes), tensor(b.codes)
    assert va is not None and vb is not None
    if va.dtype != vb.dtype and torch.int8 in (va.dtype, vb.dtype):
        return f"its operands are {va.dtype} and {vb.dtype}"
    before = [s for s, operand in (("a", walk.a), ("b", b)) if _scaled_before(operand)]
    words = "both" if len(before) == 2 else before[0] if before else "none"
    batch = len(tensor(product).shape) == 3  # type: ignore[union-attr]
    return DequantisedMatch(
        walk.at,
        product,
        walk.a,
        b,
        scale_a,
        scale_b,
        walk.bias,
        root.dtype,
        ProductForm(words, order),
        va.dtype,
        vb.dtype,
        batch,
        views=walk.views,
    )


def _scaled_before(operand: Operand) -> bool:
    return operand.scale is not None and isinstance(operand.group, str)


def _is_bias(node: Any, width: Any) -> bool:
    value = tensor(node)
    return (
        value is not None
        and value.dtype in MODEL_DTYPES
        and value.dim() == 1
        and same(value.shape[0], width)
    )


class _Walk:
    """From a product along its single readers."""

    def __init__(self, start: fx.Node, a: Operand, b: Operand, bias: Any) -> None:
        self.at, self.a, self.b, self.bias = start, a, b, bias
        self.added = bias is not None
        #: (scale, kind) in the order of the multiplications
        self.scales: list[tuple[fx.Node, str]] = []
        self.joined = False
        self.views: list[fx.Node] = []
        value = tensor(start)
        assert value is not None
        self.width: Any = value.shape[-1]
        self.free = [operand.scale is None for operand in (a, b)].count(True)

    def step(self) -> bool:
        """Take the next operator, or say that the walk ends here."""
        user = only_user(self.at)
        if user is None or user.op != "call_function" or tensor(user) is None:
            return False
        taken = self._view(user) or self._unpad(user) or self._scale(user) or self._bias(user)
        if taken:
            self.at = user
            return True
        target = cast_to(user)
        if target in (torch.bfloat16, torch.float16) and (self.scales or not self.free):
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

    def _unpad(self, user: fx.Node) -> bool:
        """Rows cut off again that were padded to the codes."""
        if not is_call(user, aten.slice.Tensor) or self.views or user.args[0] is not self.at:
            return False
        dim, first = argument(user, 1, "dim", 0), argument(user, 2, "start", 0)
        if dim != 0 or first not in (0, None) or argument(user, 4, "step", 1) != 1:
            return False
        pad = self.a.codes
        if not is_call(pad, aten.constant_pad_nd.default) or self.a.moves or self.a.scale:
            return False
        if self.a.zero is not None:  # it has the padded rows
            return False
        inside, cut = tensor(pad.args[0]), tensor(user)
        sizes: Any = pad.args[1]
        if inside is None or cut is None or inside.dim() != 2 or len(sizes) != 4:
            return False
        if any(not same(size, 0) for size in sizes[:3]) or self.scales or self.added:
            return False
        if not same(cut.shape[0], inside.shape[0]):
            return False
        assert isinstance(pad.args[0], fx.Node)
        self.a = replace(self.a, codes=pad.args[0])
        return True

    def _scale(self, user: fx.Node) -> bool:
        if not is_call(user, aten.mul.Tensor) or self.added or dtype_of(user) != torch.float32:
            return False
        first, second = user.args
        if (first is self.at) == (second is self.at):
            return False
        other = second if first is self.at else first
        value, before = tensor(user), tensor(self.at)
        assert value is not None and before is not None
        if value.dim() != before.dim() or not all(
            same(x, y) for x, y in zip(value.shape, before.shape, strict=True)
        ):
            return False
        kind = self._kind(other)
        if kind:
            if len(self.scales) >= self.free or self.joined:
                return False
            if kind != "tensor" and kind in [known for _, known in self.scales]:
                return False
            self.scales.append((other, kind))
            return True
        # one multiplication by the product of both scales
        if not is_call(other, aten.mul.Tensor) or self.scales or self.free != 2:
            return False
        pair = [(arg, self._kind(arg)) for arg in other.args]
        if sorted(k for _, k in pair) not in (
            ["channel", "token"], ["channel", "tensor"], ["tensor", "token"]
        ):  # fmt: skip
            return False
        self.scales += pair
        self.joined = True
        return True

    def _kind(self, scale: Any) -> str:
        """``tensor``, ``token`` or ``channel`` beside the value here, else ``""``."""
        held, value = tensor(scale), tensor(self.at)
        if held is None or value is None or held.dtype != torch.float32:
            return ""
        if held.dim() > value.dim():
            return ""
        if one_element(held):
            return "tensor"
        if held.dim() >= 2 and same(held.shape[-1], 1):
            leading = (1,) * (value.dim() - held.dim())
            rows = zip((*leading, *held.shape[:-1]), value.shape[:-1], strict=True)
            return "token" if all(same(x, y) for x, y in rows) else ""
        alone = all(same(size, 1) for size in held.shape[:-1])
        return "channel" if alone and same(held.shape[-1], self.width) else ""

    def _bias(self, user: fx.Node) -> bool:
        if not is_call(user, aten.add.Tensor) or user.kwargs or len(user.args) != 2 or self.added:
            return False
        if not self.scales and self.free:  # before the scales: it would be scaled too
            return False
        first, second = user.args
        if (first is self.at) == (second is self.at) or dtype_of(user) != torch.float32:
            return False
        bias = peel_widening(second if first is self.at else first)
        if not _is_bias(bias, self.width):
            return False
        self.bias, self.added = bias, True
        return True

    def assigned(self) -> Any:
        """``(scale_a, scale_b, order)``: which of the scales is whose, or why that is not known."""
        found: dict[str, tuple[fx.Node, str, bool] | None] = {"a": None, "b": None}
        for side, operand in (("a", self.a), ("b", self.b)):
            if operand.scale is not None:
                found[side] = _before(operand, side)
        sides = [side for side in ("a", "b") if found[side] is None]
        owners: dict[int, str] = {}
        for i, (_, kind) in enumerate(self.scales):
            if kind != "tensor":
                owners[i] = "a" if kind == "token" else "b"
        for i, (node, kind) in enumerate(self.scales):
            if kind == "tensor" and _belongs(node, self.a.codes) and "a" not in owners.values():
                owners[i] = "a"
        for i in range(len(self.scales)):
            if i not in owners:
                free = [side for side in sides if side not in owners.values()]
                if not free:
                    return "it is multiplied by more scales than it has operands"
                owners[i] = free[0]
        for i, side in owners.items():
            if side not in sides:
                return f"operand {side} has a scale before the product and one after it"
            node, kind = self.scales[i]
            found[side] = (node, kind, False)
        order = "joined" if self.joined else "ba" if owners.get(0) == "b" else "ab"
        if len(self.scales) < 2:
            order = "ab"
        return found["a"], found["b"], order


def _before(operand: Operand, side: str) -> tuple[fx.Node, str, bool]:
    assert operand.scale is not None
    if isinstance(operand.group, tuple):
        rows, cols = reversed(operand.group) if operand.transposed else operand.group
        return operand.scale, f"group{rows}x{cols}", operand.transposed
    if operand.group == "vector":
        return operand.scale, "token" if side == "a" else "channel", operand.transposed
    return operand.scale, "tensor", False


def keys_of(found: DequantisedMatch) -> tuple[str, str]:
    """The quantisation keys of both operands, as text."""
    from fp8pass.spellings.linear import peel_views_is_input, quantise_form

    form = quantise_form(found.a.codes)
    kind = "tensor" if found.scale_a is None else found.scale_a[1]
    if form is not None:
        when = "static" if form.static else "dynamic"
        if kind == "tensor" and form.granularity == "token":
            kind = "token"  # one row
    else:
        given = kind == "tensor" and peel_views_is_input(found.a.codes)
        when = "static" if given else "dynamic"
    weight = "tensor" if found.scale_b is None else found.scale_b[1]
    return (
        f"{dtype_name(found.act_dtype)}/{when}/{kind}{'' if found.a.zero is None else '/asym'}",
        f"{dtype_name(found.weight_dtype)}/static/{weight}",
    )


def _belongs(scale: Any, codes: Any) -> bool:
    """Whether both are results of one operator, or the codes were divided by this scale."""
    made = peel_views(codes)
    source = peel_views(scale)
    if not isinstance(made, fx.Node) or not isinstance(source, fx.Node):
        return False
    if (
        made.args
        and source.args
        and made.args[0] is source.args[0]
        and made.target is source.target
    ):
        return isinstance(made.args[0], fx.Node)
    from fp8pass.spellings.any_quantize import match_any_quantize
    from fp8pass.spellings.quantize import QuantMatch, is_fp8_cast

    if not is_fp8_cast(made):
        return False
    found = match_any_quantize(made)
    return isinstance(found, QuantMatch) and found.scale is source
