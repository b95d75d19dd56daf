"""Why a site that was read was left: the words of the report for what no rule took."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from fp8pass.reasons import Verdict, no
from fp8pass.site_draft import Draft
from fp8pass.spellings.activation import why_not_read
from fp8pass.spellings.by_place import read_by_place
from fp8pass.spellings.functionalised import inner_operator
from fp8pass.spellings.library_ops import library_op, match_library_op
from fp8pass.spellings.norm_reasons import unread_norm
from fp8pass.spellings.walk import VIEWS, is_call, peel_views


def _fused_already(value: Any, drafts: dict[fx.Node, Draft]) -> Draft | None:
    """The producer that gives ``value`` beside the codes of another quantise, if there is one."""
    for draft in drafts.values():
        if draft.status == "fused" and any(swap.new is value for swap in draft.swaps):
            return draft
    return None


def _unread_library(source: Any) -> Verdict | None:
    """Why a norm or an activation in an operator of a library, which made ``source``, is unread."""
    made = peel_views(source)
    made = made.args[0] if is_call(made, operator.getitem) else made
    op = library_op(made)
    if op is None or op.kind not in ("norm", "activation"):
        return None
    found = match_library_op(made)
    if not isinstance(found, Verdict):
        return None
    if op.kind == "norm":
        return no("FP8-R003", node=made.name, why=found.message)
    return no("FP8-R004", producer=describe(source), why=found.message)


def describe(node: Any) -> str:
    """A short name of what made a value, for messages."""
    if not isinstance(node, fx.Node):
        return repr(node)
    if node.op == "placeholder":
        return f"graph input {node.name}"
    if is_call(node, *VIEWS):
        return f"{describe(node.args[0])} (reshaped)"
    made = node.args[0] if is_call(node, operator.getitem) else node
    return f"{called(made)} ({node.name})"


def called(node: Any) -> str:
    """What a call calls, for messages; the operator inside of a call in functional form."""
    return str(inner_operator(node) or node.target)


def readers_text(nodes: list[fx.Node]) -> str:
    """The readers of a value, for messages."""
    names = [called(n) if n.op == "call_function" else f"the graph's {n.op}" for n in nodes]
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:4]) + (" ..." if len(distinct) > 4 else "") or "nothing"


def _bounded(node: fx.Node) -> bool:
    """Whether a generic quantise has an upper bound that is a tensor."""
    name = getattr(node.target, "name", lambda: "")()
    return name == "fp8pass::quantize" and len(node.args) > 3 and node.args[3] is not None


def not_fused(draft: Draft, live: set[fx.Node], drafts: dict[fx.Node, Draft]) -> Verdict:
    """Why a producer or a quantise that no rule took was left; asked before anything is lowered."""
    if draft.kind == "quantize":
        source = draft.node.args[0]
        if _bounded(draft.node):
            return no("FP8-F030", node=draft.root_name, bound=draft.node.args[3])
        first = _fused_already(source, drafts)
        if first is not None:
            return no(
                "FP8-F004",
                node=draft.root_name,
                what=first.what,
                key=draft.form,
                fused=first.quant_form,
            )
        assert isinstance(source, fx.Node)
        unread = _unread_library(source)
        if unread is not None:
            return unread
        placed = read_by_place((source,))
        norm = unread_norm(source)
        if norm is not None:
            return no("FP8-R003", node=norm[0], why=placed or norm[1])
        why = why_not_read(source)
        if why is not None:
            return no("FP8-R004", producer=describe(source), why=placed or why)
        return no("FP8-F002", producer=describe(source))
    users = [u for u in draft.outputs["y"].users if u in live]
    for user in users:
        if user in drafts and _bounded(user):
            return no("FP8-F030", node=drafts[user].root_name, bound=user.args[3])
    return no("FP8-F001", what=draft.what, readers=readers_text(users))
