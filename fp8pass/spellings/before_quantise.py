"""The activations before their quantise: what makes a weight-only product of a quantised one.

    x ─ quantize ─ (q, s) ─ scaled_mm(q, w, s, sw)   ──►   x ─ w8a16_mm(x, w, sw)

A W8A16 kernel must never see codes, and the activations' scale must leave the product with them.
So nothing is taken for granted: the codes must be those of a quantise that was read, the scale of
the product must be that very quantise's, and only reshapes may stand between them. Other readers
of the quantise keep it; if there are none it is dead, and goes.
"""

from __future__ import annotations

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

    ``x`` is the value, or None where it was quantised by the operator that made it.
    """

    made: fx.Node
    x: fx.Node | None
    key: str
    dtype: torch.dtype
    views: tuple[fx.Node, ...]


def before_quantise(draft: Draft) -> Source | Verdict:
    """The activations of a ``fp8pass::scaled_mm`` before their quantise, or FP8-L042."""
    a, scale = draft.node.args[0], draft.node.args[2]
    found = _before(a, scale)
    return no("FP8-L042", node=draft.root_name, why=found) if isinstance(found, str) else found


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
    return Source(made, x, form.key, dtype, tuple(views))


def _kept(made: fx.Node, keep: bool) -> fx.Node | None:
    """The producer's own value, where the model asked for it beside the codes."""
    return next((user for user in made.users if keep and item(user, 2) is made), None)


def activations(bench: Workbench, source: Source, like: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The activations in the shape of the product's operand, at the graph's insertion point.

    Returns them and the operators that had to be put in to make them anew.
    """
    x, new = source.x, []
    if x is None:
        op, result = _FUSED[source.made.target]  # type: ignore[index]
        names = [argument.name for argument in source.made.target._schema.arguments]  # type: ignore[union-attr]
        given = dict(zip(names, source.made.args, strict=False))
        args = tuple(given[argument.name] for argument in op._schema.arguments)
        x = bench.call(op, args, source.made)
        new.append(x)
        if result is not None:
            x = bench.items(x, source.made)[result]
    for view in reversed(source.views):
        keeps = is_call(view, aten.unsqueeze.default, aten.squeeze.dim)
        x = bench.call(view.target if keeps else aten.reshape.default, (x, *view.args[1:]), like)
    return x, new


def put_weight_only(
    bench: Workbench, draft: Draft, source: Source
) -> tuple[fx.Node, list[fx.Node]]:
    """``fp8pass::w8a16_mm`` before the product of ``draft``, which keeps its uses for now."""
    node = draft.node
    _, b, _, scale_b, bias, out_dtype, _, weight_key = node.args[:8]
    with bench.graph.inserting_before(node):
        a, new = activations(bench, source, node)
        args = (a, b, scale_b, bias, out_dtype, weight_key, "", source.key)
        value = val(node)
        product = bench.call(
            _ops.w8a16_mm.default, args, node, bench.fresh(value, value.shape, value.dtype)
        )
    assert same(val(a).shape[1], val(b).shape[0])
    return product, new
