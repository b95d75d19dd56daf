"""A quantise that no rule fused, given to a kernel of its own where the user prefers one.

Inductor makes such a quantise part of the loop that computes its input, which no other kernel can
beat. An input that no loop computes (what a product, an attention or another opaque operator left
in memory, or an input of the graph) has to be read anyway. There a kernel may be faster, above all
one whose launch overlaps its neighbours'.

Only by preference (``prefer="triton"``, say): whether it pays has not been measured.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from fp8pass.lowerings.producers import choose_producer, problem_of_producer
from fp8pass.options import Options
from fp8pass.reasons import Verdict
from fp8pass.site_draft import Draft
from fp8pass.spellings.walk import VIEWS, contiguous, is_call, same
from fp8pass.strides import contiguous_strides
from fp8pass.target import Target

aten = torch.ops.aten

#: Operators of aten whose results Inductor reads from memory: their loops are a library's.
_STORED = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten._scaled_mm.default,
        aten._int_mm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)
_RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
_LOOKED_THROUGH = (
    *VIEWS, aten.permute.default, aten.transpose.int, aten.slice.Tensor, aten.select.int,
    aten.alias.default, operator.getitem,
)  # fmt: skip
#: Names of operators that Inductor decomposes although they are not aten's.
_NOT_OPAQUE = ("aten", "prims", "prim")


def reads_stored(x: fx.Node) -> bool:
    """Whether ``x`` is in memory as rows before the quantise runs, whatever computes it.

    Looks through views, and into operators with several results.
    """
    if not _rows(x.meta["val"]):
        return False
    while is_call(x, *_LOOKED_THROUGH):
        source = x.args[0]
        assert isinstance(source, fx.Node)
        if x.target in _RESHAPES and not contiguous(source.meta["val"]):
            return False  # it may copy
        x = source
    if x.op in ("placeholder", "get_attr"):
        return True
    if x.op != "call_function" or not isinstance(x.target, torch._ops.OpOverload):
        return False
    return x.target in _STORED or x.target.namespace not in _NOT_OPAQUE


def _source(x: fx.Node) -> fx.Node | None:
    """What the kernel may read instead of ``x``: the same values in memory; None if there is none.

    A copy that only makes rows contiguous is not needed by a kernel that reads rows with any pitch.
    """
    while is_call(x, aten.clone.default) and not reads_stored(x):
        source = x.args[0]
        assert isinstance(source, fx.Node)
        x = source
    return x if reads_stored(x) else None


def _rows(value: torch.Tensor) -> bool:
    """Whether the rows of a tensor are contiguous, and one distance leads from each to the next."""
    strides = value.stride()
    if value.dim() < 1 or not same(strides[-1], 1):
        return False
    if value.dim() <= 2:
        return True
    pitch: Any = strides[-2]
    usual = contiguous_strides(value.shape[:-1])
    return all(same(a, b * pitch) for a, b in zip(strides[:-1], usual, strict=True))


def lower_alone(
    drafts: Iterable[Draft], target: Target, options: Options, take: Callable[[], Verdict]
) -> int:
    """Give every quantise that was left to the kernel that the user prefers; returns how many.

    The operator in the graph is replaced by the kernel's, of the same schema; a site that is not
    taken keeps its reason. ``take`` is asked before each, and may refuse.
    """
    made = 0
    for draft in drafts if options.prefer else ():
        node = draft.node
        if draft.status != "left" or draft.fused_into is not None:
            continue
        if not is_call(node, torch.ops.fp8pass.quantize.default):
            continue
        x, bound = node.args[0], node.args[3] if len(node.args) > 3 else None
        source = _source(x) if isinstance(x, fx.Node) and bound is None else None
        if source is None:
            continue
        choice = choose_producer(target, problem_of_producer(node), options, draft.path)
        if choice.kernel is None or choice.why != "preferred" or not take():
            continue
        node.args = (source, *node.args[1:])
        node.target = choice.kernel.replaces("quantize")
        draft.status, draft.rule, draft.kernel = "lowered", "quantize", choice.kernel.name
        draft.why, draft.rejected = choice.why, list(choice.rejected)
        made += 1
    return made
