"""The producer that a quantise reads, through reshapes that can be done to its codes instead."""

from __future__ import annotations

from typing import Any

from torch import fx

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.ops.library import generic
from fp8pass.reasons import Verdict, no
from fp8pass.spellings.quantize import QuantMatch
from fp8pass.spellings.walk import VIEWS, aten, is_call, item, peel_views, same, tensor, val

#: the operators that stand for something read
GENERIC = generic()
PRODUCERS = frozenset(op for op, spec in GENERIC.items() if spec.kind in ("norm", "activation"))


def look_through(found: QuantMatch) -> tuple[fx.Node, list[fx.Node]]:
    """The producer that a quantise reads through reshapes, and these reshapes, outermost first.

    Only reshapes that keep the last dim, only to a producer that was read, and only where nothing
    is lost by reshaping codes and scale instead; otherwise ``(x, [])``.
    """
    own = [] if found.split is None else [found.split]
    if found.form.layout != "row":  # strides of its scale that a reshape would not keep
        return found.x, own
    views: list[fx.Node] = []
    node = found.x
    while is_call(node, *VIEWS) and isinstance(node.args[0], fx.Node):
        before, after = tensor(node.args[0]), tensor(node)
        if before is None or after is None or before.dim() == 0 or after.dim() == 0:
            return found.x, own
        if found.form.granularity != "tensor" and not same(before.shape[-1], after.shape[-1]):
            return found.x, own
        if node.target in (aten.unsqueeze.default, aten.squeeze.dim):
            dim = node.args[1]
            rank = max(before.dim(), after.dim())
            if not isinstance(dim, int) or dim % rank == rank - 1:
                return found.x, own
        elif not isinstance(node.args[1], (list, tuple)) or not node.args[1]:
            return found.x, own
        views.append(node)
        node = node.args[0]
    return (node, own + views) if _producer_of(node) is not None else (found.x, own)


def _producer_of(node: Any) -> fx.Node | None:
    """The generic producer whose normalised or activated value ``node`` is."""
    made = node if is_call(node, *PRODUCERS) else item(node, 0)
    return made if is_call(made, *PRODUCERS) else None


def mixed_rows(found: QuantMatch) -> Verdict | None:
    """FP8-F008 if a reshape keeps a per-token quantise from the producer of its rows."""
    source = peel_views(found.x)
    producer = _producer_of(source)
    if found.form.granularity != "token" or source is found.x or producer is None:
        return None
    return no(
        "FP8-F008",
        before=tuple(val(source).shape),
        after=tuple(val(found.x).shape),
        what=GENERIC[producer.target].what,
    )
