"""The activations before their quantise: what makes a weight-only product of a quantised one.

    x ─ quantize ─ (q, s) ─ scaled_mm(q, w, s, sw)   ──►   x ─ w8a16_mm(x, w, sw)

A W8A16 kernel must never see codes, and the activations' scale must leave the product with them.
So nothing is taken for granted: the codes must be those of a quantise that was read, the scale of
the product must be that very quantise's, and only reshapes may stand between them. Other readers
of the quantise keep it; if there are none it is dead, and goes.

A quantise rounds, which is what a weight-only product is to be without; and it may cut values off,
which is part of the function. A scale that is given saturates, and so the activations are cut to
what its codes can say. One that is computed with a bound below the largest value is refused: to cut
there needs the scale, which would stay in the graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8pass.ops.forms import MODEL_DTYPES, QuantForm
from fp8pass.reasons import Verdict, no
from fp8pass.site_draft import Draft
from fp8pass.spellings.walk import VIEWS, aten, dtype_of, is_call, item, peel_views, same, val
from fp8pass.workbench import Workbench

_ops = torch.ops.fp8pass
_CONVERT = torch.ops.prims.convert_element_type.default
#: By how much a quotient may be above the largest code without being cut: less than the half of the
#: last step of any fp8 format, so that it is rounded there anyway.
_ROUNDED_AWAY = 1.01
#: A floor below that is of values too small to matter.
_SMALL = 1e-6
#: A producer that was fused with a quantise by the model -> the producer alone, and where its
#: normalised or activated value is among its results.
_FUSED = {
    _ops.rms_norm_quant.default: (_ops.rms_norm.default, None),
    _ops.add_rms_norm_quant.default: (_ops.add_rms_norm.default, 0),
    _ops.layer_norm_quant.default: (_ops.layer_norm.default, None),
    _ops.silu_mul_quant.default: (_ops.silu_mul.default, None),
    _ops.act_mul_quant.default: (_ops.act_mul.default, None),
}


@dataclass(frozen=True, slots=True)
class Source:
    """What was quantised: the operator that did it, and the reshapes behind it, outermost first.

    ``x`` is the value, or None where it was quantised by the operator that made it. ``scale`` and
    ``top`` are those of a quantise that saturates: values were cut to ``[-top, top] * scale``.
    """

    made: fx.Node
    x: fx.Node | None
    key: str
    dtype: torch.dtype
    views: tuple[fx.Node, ...]
    scale: fx.Node | None = None
    top: float = math.inf


def before_quantise(draft: Draft) -> Source | Verdict:
    """The activations of a ``fp8pass::scaled_mm`` before their quantise, or why they cannot be had:
    FP8-L042, or FP8-L043 for a quantise that cuts values off."""
    a, scale = draft.node.args[0], draft.node.args[2]
    try:
        found = _before(a, scale)
    except _CutsOff as cut:
        return no("FP8-L043", node=draft.root_name, why=str(cut))
    return no("FP8-L042", node=draft.root_name, why=found) if isinstance(found, str) else found


class _CutsOff(Exception):
    """A quantise that cuts values off in a way that would not be kept."""


def _before(a: Any, scale: Any) -> Source | str:
    views = []
    codes = a
    while is_call(codes, *VIEWS):
        views.append(codes)
        codes = codes.args[0]
    made = item(codes, 0)
    if made is None or not is_call(made, _ops.quantize.default, *_FUSED):
        return "its codes do not come from a quantise that was read"
    schema = made.target._schema
    given = dict(zip((arg.name for arg in schema.arguments), made.args, strict=False))
    form = QuantForm.parse(str(given.get("quant_form", given.get("form"))))
    own = peel_views(given["scale"]) if form.static else None
    its = peel_views(scale)
    if form.static:
        if its is not own:
            return "its scale is not the one that its codes were quantised by"
    elif item(its, 1) is not made:
        return "its scale is not the one that was computed with its codes"
    if is_call(made, _ops.quantize.default):
        x: Any = given["x"]
        dtype = dtype_of(x)
    else:
        x = _kept(made, bool(given.get("keep")))
        dtype = val(made)[2].dtype
    if dtype not in MODEL_DTYPES:
        return f"its activations are {dtype} before the quantise"
    why = _static_cut(form) if form.static else _dynamic_cut(form)
    if why:
        raise _CutsOff(why)
    if form.static:
        return Source(made, x, form.key, dtype, tuple(views), own, form.hi)
    return Source(made, x, form.key, dtype, tuple(views))


def _static_cut(form: QuantForm) -> str:
    """Why the saturation of a given scale cannot be kept, "" if it can."""
    if form.group is not None:
        return "it saturates by scales that are given per group"
    if form.lo != -form.hi:
        return f"its codes are clamped to [{form.lo:g}, {form.hi:g}], which is not symmetric"
    if (form.floor, form.power, form.ceiling) != ("none", "none", math.inf):
        return "it saturates by another scale than the one that is given"
    return ""


def _dynamic_cut(form: QuantForm) -> str:
    """How a quantise cuts values off although its scale is computed from them, "" if it does not.

    Nothing is cut where the largest value becomes the largest code.
    """
    if form.upper != "none":
        return "a tensor (scale_ub) bounds its scale, so that larger values saturate"
    if form.ceiling != math.inf:
        return f"the maximum is bounded by {form.ceiling:g}, so that larger values saturate"
    largest = 1 / form.qmax if form.scale == "mul" else form.qmax
    if not 0 < largest <= _ROUNDED_AWAY * min(form.hi, -form.lo):
        return (
            f"its scale lets quotients reach {largest:g}, its codes are clamped to "
            f"[{form.lo:g}, {form.hi:g}]"
        )
    upward = ("none", "floor") if form.scale == "inverse" else ("none", "ceil", "ceil_e8m0")
    if form.power not in upward:
        return f"its scale is made a power of two that may be smaller ({form.power})"
    if form.floor_value < 0:
        return f"{form.floor_value:g} is the floor of its scale"
    if form.floor == "divisor" and form.floor_value > _SMALL:
        return f"values are divided by {form.floor_value:g} at least, and multiplied by less"
    return ""


def _kept(made: fx.Node, keep: bool) -> fx.Node | None:
    """The producer's own value, where the model asked for it beside the codes."""
    return next((user for user in made.users if keep and item(user, 2) is made), None)


def _remade(bench: Workbench, source: Source) -> tuple[fx.Node, list[fx.Node]]:
    """The value that was quantised, made anew if the model fused that; and what was put in."""
    if source.x is not None:
        return source.x, []
    op, result = _FUSED[source.made.target]  # type: ignore[index]
    names = [argument.name for argument in source.made.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, source.made.args, strict=False))
    args = tuple(given[argument.name] for argument in op._schema.arguments)
    x = bench.call(op, args, source.made)
    return (x if result is None else bench.items(x, source.made)[result]), [x]


def _cut(bench: Workbench, source: Source, x: fx.Node) -> fx.Node:
    """``x`` cut to what the codes of a given scale can say, NaN kept; rounded to its dtype.

    By minimum and maximum of tensors, which no decomposition makes a comparison that NaN fails.
    """
    like = source.made

    def cast(node: fx.Node, dtype: torch.dtype) -> fx.Node:
        same_dtype = dtype_of(node) == dtype
        return node if same_dtype else bench.call(_CONVERT, (node, dtype), like)

    assert source.scale is not None
    scale = source.scale
    if "/tensor" in source.key and val(scale).dim():
        scale = bench.call(aten.reshape.default, (scale, []), like)
    size = bench.call(aten.abs.default, (cast(scale, torch.float32),), like)
    top = bench.call(aten.mul.Tensor, (size, source.top), like)
    bottom = bench.call(aten.neg.default, (top,), like)
    wide = bench.call(aten.maximum.default, (cast(x, torch.float32), bottom), like)
    return cast(bench.call(aten.minimum.default, (wide, top), like), source.dtype)


#: quantise -> the activations before it, for all products that read its codes
Made = dict[fx.Node, fx.Node]


def activations(
    bench: Workbench, source: Source, like: fx.Node, made: Made
) -> tuple[fx.Node, list[fx.Node]]:
    """The activations in the shape of the product's operand, at the graph's insertion point.

    Returns them and the operators that had to be put in to make them anew, the first time.
    """
    x = made.get(source.made)
    new: list[fx.Node] = []
    if x is None:
        # where what the quantise reads is known, or behind the value that it returned as well
        quantise, kept = source.made, source.x
        late = kept is not None and quantise in kept.all_input_nodes
        with bench.graph.inserting_before(kept.next if late and kept else quantise):
            x, new = _remade(bench, source)
            if source.scale is not None:
                x = _cut(bench, source, x)
        made[source.made] = x
    for view in reversed(source.views):
        keeps = is_call(view, aten.unsqueeze.default, aten.squeeze.dim)
        x = bench.call(view.target if keeps else aten.reshape.default, (x, *view.args[1:]), like)
    return x, new


def put_weight_only(
    bench: Workbench, draft: Draft, source: Source, made: Made
) -> tuple[fx.Node, list[fx.Node]]:
    """``fp8pass::w8a16_mm`` before the product of ``draft``, which keeps its uses for now."""
    node = draft.node
    _, b, _, scale_b, bias, out_dtype, _, weight_key = node.args[:8]
    with bench.graph.inserting_before(node):
        a, new = activations(bench, source, node, made)
        args = (a, b, scale_b, bias, out_dtype, weight_key, "", source.key)
        value = val(node)
        product = bench.call(
            _ops.w8a16_mm.default, args, node, bench.fresh(value, value.shape, value.dtype)
        )
    assert same(val(a).shape[1], val(b).shape[0])
    return product, new
