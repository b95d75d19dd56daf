"""Makes the layout that the scale of a quantise is copied into a part of the quantise's form."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fp8pass.ops.forms import QuantForm
from fp8pass.site_draft import Draft
from fp8pass.spellings.by_place import read_by_place
from fp8pass.spellings.scale_layout import Laid, read_layouts
from fp8pass.spellings.walk import aten, val
from fp8pass.workbench import Swap, Workbench, returned


def put_layouts(bench: Workbench, drafts: Iterable[Draft]) -> None:
    """Rewrite the quantises per group whose scales are read in one other layout only.

    Only those that were read from aten: taking the swaps back gives their copies back.
    """
    waiting = [draft for draft in drafts if _may_be_laid_out(draft)]
    if not waiting:
        return
    live = bench.live()
    results = returned(bench.graph)
    for draft in waiting:
        found = read_layouts(draft.outputs["scale"], live)
        # two copies that are both results must stay two tensors; nothing pads ours for a reader
        if read_by_place(laid.node for laid in found):
            continue
        if found and sum(bool(laid.layout) and laid.node in results for laid in found) < 2:
            _put(bench, draft, found)


def _may_be_laid_out(draft: Draft) -> bool:
    if draft.kind != "quantize" or draft.source != "aten":
        return False
    form = QuantForm.parse(draft.form)
    return form.group is not None and not form.static and form.layout == "row"


def _put(bench: Workbench, draft: Draft, found: list[Laid]) -> None:
    """Give the uses of the copies to the scale of ``draft``, which has their layout now.

    The new scale is a second ``getitem``: the copies go on reading the first, so that they can have
    their uses back.
    """
    node, first = draft.node, next(laid for laid in found if laid.layout)
    form = replace(QuantForm.parse(draft.form), layout=first.layout)
    codes, scale = val(node)
    end = val(first.node)
    apart: Any = end.stride()[0 if first.turned else 1]
    strides: list[Any] = [apart]
    step: Any = 1
    for size in reversed(scale.shape[:-1]):
        strides.insert(0, step)
        step = step * size
    value = bench.fresh(scale, scale.shape, torch.float32, strides)
    node.args = (*node.args[:2], str(form), *node.args[3:])
    node.meta["val"] = (codes, value)
    draft.form = str(form)
    if draft.match is not None:
        draft.match = replace(draft.match, form=form)
    with bench.graph.inserting_after(draft.outputs["scale"]):
        made = bench.call(operator.getitem, (node, 1), node, value)
        sized = bench.call(operator.getitem, (node, 1), node, value)
    draft.outputs["scale"] = made
    for laid in dict.fromkeys(found):
        if not laid.layout:  # its own node: what is read for its size must not wait for the copy
            draft.swaps.append(bench.swap(laid.node, _matrix(bench, laid, sized)))
    for laid in (laid for laid in found if laid.layout):
        draft.swaps.append(_swap(bench, laid, made))


def _swap(bench: Workbench, laid: Laid, made: fx.Node) -> Swap:
    new = _matrix(bench, laid, made)
    if laid.turned:
        with bench.graph.inserting_after(new):
            new = bench.call(aten.permute.default, (new, [1, 0]), laid.node, val(laid.node))
    return bench.swap(laid.node, new)


def _matrix(bench: Workbench, laid: Laid, made: fx.Node) -> fx.Node:
    """The scale ``made`` as a matrix ``[M, G]``: a view, whatever its layout is."""
    value, end = val(made), val(laid.node)
    if value.dim() == 2:
        return made
    rows, groups = end.shape[::-1] if laid.turned else end.shape
    flat = bench.fresh(value, (rows, groups), value.dtype, (1, value.stride()[-1]))
    with bench.graph.inserting_after(made):
        return bench.call(aten.reshape.default, (made, [-1, groups]), laid.node, flat)
