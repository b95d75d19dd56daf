"""Reads activation · up, and activations that a quantise reads alone, as decomposed torch has them.

gate ─ [cast] ─ act ─ [cast] ─ mul up ─ [cast]        act: :mod:`fp8pass.spellings.act_core`

Gate and up may be any nodes of one shape: two linears, halves of one tensor in either order, every
second column of it. What matters is only where values are rounded, and that is the form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.ops.act_form import GPT_OSS_LIMIT
from fp8pass.ops.forms import MODEL_DTYPES, ActForm
from fp8pass.spellings.act_core import Core, is_activation_step, match_core
from fp8pass.spellings.registry import Producer, Spelling
from fp8pass.spellings.walk import (
    ADD,
    CAST,
    DIV,
    MUL,
    VIEWS,
    argument,
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

_ops = torch.ops.fp8pass
_NARROW = (torch.bfloat16, torch.float16)
#: What :func:`why_not_read` climbs through from a quantise, and how many nodes at most.
_CLIMBED = (
    *ADD,
    *MUL,
    *DIV,
    *CAST,
    *VIEWS,
    aten.clamp.default,
    aten.pow.Tensor_Scalar,
    aten.clone.default,
)
_CLIMB = 32


@dataclass(frozen=True, slots=True)
class ActMatch:
    """One activation: ``root`` is the node whose value it is; ``up`` is None where it is alone."""

    root: fx.Node
    gate: fx.Node
    up: fx.Node | None
    form: ActForm


def match_act_mul(node: fx.Node) -> ActMatch | str | None:
    """Read the activation · up whose activation is ``node``; None if ``node`` is none.

    Conditions beyond the drawing: gate and up bf16, fp16 or fp32; ``up`` of the gate's shape (no
    broadcast); the result contiguous; nothing else reads the nodes in between.

    Returns:
        the match, or a phrase that says why an activation is not read with an ``up``.
    """
    core = match_core(node)
    if core is None:
        return None
    gate = peel_widening(core.gate)
    value = tensor(gate)
    if value is None or value.dtype not in MODEL_DTYPES:
        return f"its gate is of {dtype_of(gate)}"
    end, user = _rounded(node)
    if user is None:
        return f"{end.name} is read by {len(end.users)} nodes before it is multiplied"
    if not is_call(user, aten.mul.Tensor) or user.args[0] is user.args[1]:
        return f"{end.name} is read by {user.target}, not by a product with an up"
    up = user.args[1] if user.args[0] is end else user.args[0]
    other = tensor(up)
    if other is None or not isinstance(up, fx.Node):
        return "it is multiplied by a number"
    if not same_shape(other, value):
        shapes = f"{_shape(other)}, the gate {_shape(value)}"
        return f"the other factor of {user.name} has the shape {shapes} (a broadcast up)"
    up = peel_widening(up) if dtype_of(user) == torch.float32 else up
    root = user
    if dtype_of(user) == torch.float32:
        last = only_user(user)
        if cast_to(last) in _NARROW and last is not None:
            root = last
    result, up_value = tensor(root), tensor(up)
    if result is None or up_value is None or up_value.dtype not in MODEL_DTYPES:
        return f"its up is of {dtype_of(up)}"
    mid, compute = dtype_of(end), dtype_of(node)
    assert mid is not None and compute is not None
    if dtype_of(user) != torch.promote_types(mid, up_value.dtype):
        return f"the product {user.name} is rounded to {dtype_of(user)}"
    if not same_shape(result, value) or not contiguous(result):
        return f"the layout of {root.name} is not contiguous"
    form = ActForm(core.act, mid, result.dtype, compute)
    return _gpt_oss(root, core, up, form) or ActMatch(root, gate, up, form)


def match_act_alone(root: fx.Node) -> ActMatch | str | None:
    """Read the activation whose value ``root`` is, without an ``up``; None if it is none."""
    node = root
    if cast_to(root) in _NARROW:
        node = root.args[0]  # type: ignore[assignment]
        if dtype_of(node) != torch.float32 or len(node.users) != 1:
            node = root
    core = match_core(node)
    if core is None:
        return None
    gate = peel_widening(core.gate)
    value, result = tensor(gate), tensor(root)
    if value is None or value.dtype not in MODEL_DTYPES:
        return f"its gate is of {dtype_of(gate)}"
    assert result is not None
    if not same_shape(result, value) or not contiguous(result):
        return f"the layout of {root.name} is not contiguous"
    compute = dtype_of(node)
    assert compute is not None
    return ActMatch(root, gate, None, ActForm(core.act, result.dtype, result.dtype, compute))


def _rounded(node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """``node`` or the cast that alone reads it and rounds it, and what alone reads that."""
    user = only_user(node)
    if user is not None and dtype_of(node) == torch.float32 and cast_to(user) in _NARROW:
        return user, only_user(user)
    return node, user


def _shape(value: torch.Tensor) -> str:
    return "x".join(str(size) for size in value.shape)


# ---- GPT-OSS -------------------------------------------------------------------------------------


def _gpt_oss(root: fx.Node, core: Core, up: fx.Node, form: ActForm) -> ActMatch | None:
    """The clamped SwiGLU of GPT-OSS: ``(clamp(up) + 1) * quick_gelu(clamp(gate))``.

    Only if all of it is in one dtype; a quick GELU around other nodes is read without them.
    """
    if form.act != "gelu_quick" or form.mid != form.compute:
        return None
    raised = commuted(up, ADD, lambda a: scalar(a) == 1.0)
    if raised is None or {dtype_of(core.gate), dtype_of(up), dtype_of(raised[1])} != {form.compute}:
        return None
    gate = _clamped(core.gate, -math.inf, GPT_OSS_LIMIT)
    inner = _clamped(raised[1], -GPT_OSS_LIMIT, GPT_OSS_LIMIT)
    if gate is None or inner is None:
        return None
    return ActMatch(root, gate, inner, ActForm("gpt_oss", form.mid, form.out, form.compute))


def _clamped(node: fx.Node, low: float, high: float) -> fx.Node | None:
    """``x`` for ``clamp(x, low, high)`` with exactly these bounds, in the dtype of ``node``.

    torch clamps bf16 and fp16 in float32 and casts back, which loses nothing: the values have that
    dtype, and so have the bounds.
    """
    dtype = dtype_of(node)
    inside = node
    if cast_to(node) in _NARROW and dtype_of(node.args[0]) == torch.float32:
        inside = node.args[0]  # type: ignore[assignment]
    bounds: dict[str, float] = {"min": -math.inf, "max": math.inf}
    source: Any = inside
    # the lower bound is applied first, as clamp does: then a maximum stands outside
    for name, op in (("max", aten.clamp_max.default), ("min", aten.clamp_min.default)):
        if is_call(source, op):
            bound = scalar(argument(source, 1, name))
            if bound is None:
                return None
            bounds[name], source = bound, source.args[0]
    if source is inside and is_call(inside, aten.clamp.default):
        for i, name in enumerate(bounds):
            given = argument(inside, i + 1, name)
            bound = bounds[name] if given is None else scalar(given)
            if bound is None:
                return None
            bounds[name] = bound
        source = inside.args[0]
    if source is inside or (bounds["min"], bounds["max"]) != (low, high):
        return None
    found = peel_widening(source)
    if not isinstance(found, fx.Node) or dtype_of(found) not in MODEL_DTYPES:
        return None
    return found if inside is node or dtype_of(found) == dtype else None


# ---- reasons -------------------------------------------------------------------------------------


def why_not_read(source: fx.Node) -> str | None:
    """Why the activation-like nodes that make ``source`` were not read; None if there are none."""
    waiting, seen = [source], {source}
    step = None
    while waiting:
        node = waiting.pop(0)
        if match_core(node) is not None:
            alone = match_act_alone(node) if node is source else None
            found = alone if isinstance(alone, str) else match_act_mul(node)
            return found if isinstance(found, str) else f"{node.name} was not taken"
        if step is None and is_activation_step(node):
            step = node
        elif is_call(node, *_CLIMBED) and len(seen) < _CLIMB:
            fresh = [n for n in node.all_input_nodes if n not in seen]
            seen.update(fresh)
            waiting += fresh
    if step is None:
        return None
    return f"the {step.target} at {step.name} is not a step of an activation whose form is known"


# ---- for the reader ------------------------------------------------------------------------------


def _producer(found: ActMatch | str | None) -> Producer | None:
    if not isinstance(found, ActMatch):
        return None
    form = str(found.form)
    silu = found.up is not None and found.form.act in ActForm.SILUS
    op = _ops.silu_mul.default if silu else _ops.act_mul.default
    return Producer(op, (found.gate, found.up, form), form, {"y": found.root})


SPELLINGS = (
    Spelling(
        "act_mul",
        (aten.mul.Tensor, aten.div.Tensor, aten.relu.default, aten.pow.Tensor_Scalar),
        lambda node: _producer(match_act_mul(node)),
        order=20,
    ),
    # elsewhere an activation alone is no business of ours
    Spelling("act_alone", (), lambda node: _producer(match_act_alone(node)), quantised=True),
)
