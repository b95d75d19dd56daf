"""Reads SiLU(gate) * up as decomposed torch writes it.

gate ─ f32 ─┬─ neg ─ exp ─ + 1 ─┐
            └────────────────── div ─ [cast] ─ mul up ─ [cast]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.ops.forms import MODEL_DTYPES, ActForm
from fp8pass.spellings.registry import Producer, Spelling
from fp8pass.spellings.walk import (
    ADD,
    aten,
    cast_to,
    commuted,
    contiguous,
    dtype_of,
    is_call,
    only_user,
    peel_widening,
    same_shape,
    scalar,
    tensor,
)

_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class ActMatch:
    """One SiLU·mul: ``root`` is the node whose value it is."""

    root: fx.Node
    gate: fx.Node
    up: fx.Node
    form: ActForm


def _silu_core(node: fx.Node) -> tuple[fx.Node, str] | None:
    """``(gate in float32, silu form)`` if ``node`` is SiLU of it."""
    if is_call(node, aten.div.Tensor) and not node.kwargs:
        shifted = commuted(node.args[1], ADD, lambda a: scalar(a) == 1.0)
        if shifted is None or not is_call(shifted[1], aten.exp.default):
            return None
        negated = shifted[1].args[0]
        if is_call(negated, aten.neg.default) and negated.args[0] is node.args[0]:
            gate = node.args[0]
            return (gate, "div") if isinstance(gate, fx.Node) else None
        return None
    found = commuted(
        node, (aten.mul.Tensor,), lambda a: a if is_call(a, aten.sigmoid.default) else None
    )
    if found is not None and found[0].args[0] is found[1]:
        return found[1], "sigmoid"
    return None


def match_silu_mul(node: fx.Node) -> ActMatch | None:
    """Read the SiLU·mul whose SiLU is ``node``; None if it is not one.

    Conditions beyond the drawing: SiLU in float32 from a bf16, fp16 or fp32 gate; ``up`` of the
    gate's shape (no broadcast); the result contiguous; nothing else reads the nodes in between.
    """
    core = _silu_core(node)
    if core is None or dtype_of(core[0]) != torch.float32 or dtype_of(node) != torch.float32:
        return None
    gate, mid = peel_widening(core[0]), torch.float32
    value = tensor(gate)
    if value is None or value.dtype not in MODEL_DTYPES:
        return None
    silu = node
    user = only_user(node)
    narrow = cast_to(user)
    if narrow in _NARROW and user is not None:
        silu, mid = user, narrow
        user = only_user(user)
    if user is None or not is_call(user, aten.mul.Tensor) or user.args[0] is user.args[1]:
        return None
    up = user.args[1] if user.args[0] is silu else user.args[0]
    other = tensor(up)
    if other is None or not same_shape(other, value) or not isinstance(up, fx.Node):
        return None
    up = peel_widening(up) if dtype_of(user) == torch.float32 else up
    root = user
    if mid == torch.float32 and dtype_of(user) == torch.float32:
        last = only_user(user)
        if cast_to(last) in _NARROW and last is not None:
            root = last
    result, up_value = tensor(root), tensor(up)
    if result is None or up_value is None or up_value.dtype not in MODEL_DTYPES:
        return None
    promoted = torch.promote_types(mid, up_value.dtype)
    if dtype_of(user) != promoted or not same_shape(result, value) or not contiguous(result):
        return None
    return ActMatch(root, gate, up, ActForm(core[1], mid, result.dtype))


def _spelled(node: fx.Node) -> Producer | None:
    found = match_silu_mul(node)
    if found is None:
        return None
    form = str(found.form)
    args = (found.gate, found.up, form)
    return Producer(torch.ops.fp8pass.silu_mul.default, args, form, {"y": found.root})


SPELLINGS = (Spelling("silu_mul", (aten.mul.Tensor, aten.div.Tensor), _spelled, order=20),)
