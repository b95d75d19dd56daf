"""Makes one product of several whose weights are neighbours in one buffer.

    a ─┬─ scaled_mm(W[0:n1].t())     ─ q                 a ─ scaled_mm(W.t()) ─┬─ [:, 0:n1] ─ q
       ├─ scaled_mm(W[n1:n2].t())    ─ k          ──►                          ├─ [:, n1:n2] ─ k
       └─ scaled_mm(W[n2:].t())      ─ v                                       └─ [:, n2:] ─ v

The linears laid their weights into the buffer (:mod:`fp8pass.merging`). That they read the same
tensor is proven here, by identity of nodes: same codes, same scale of theirs, rows that follow one
another in the same buffer, their scales and biases likewise. Each part of the result is copied, so
that everything behind it keeps the strides it was traced with; the code generator folds the copy
into what reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8pass.site_draft import Draft
from fp8pass.spellings.walk import aten, is_call, tensor, val
from fp8pass.workbench import Workbench

_TRANSPOSES = (aten.t.default, aten.permute.default, aten.transpose.int)
_END = 2**62


@dataclass(slots=True, eq=False)
class Merged:
    """Products that became one: ``draft`` is the one, ``members`` those it stands for."""

    draft: Draft
    members: list[Draft]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows ``[start, stop)`` of a buffer."""

    buffer: fx.Node
    start: int
    stop: int


def _rows(node: Any, dim: int) -> _Rows | None:
    """The buffer that ``node`` is a slice of along ``dim``, with static ends; None otherwise."""
    if not is_call(node, aten.slice.Tensor) or len(node.args) > 4 or node.kwargs:
        return None
    buffer, along, start, stop = (*node.args, None, None, None)[:4]
    whole = tensor(buffer)
    if whole is None or (along or 0) != dim or not isinstance(buffer, fx.Node):
        return None
    size = whole.shape[dim]
    start = 0 if start is None else start
    stop = size if stop is None or (type(stop) is int and stop > _END) else stop
    if not all(type(value) is int for value in (size, start, stop)):
        return None
    return _Rows(buffer, start, stop) if 0 <= start < stop <= size else None


def _weight_rows(b: Any) -> _Rows | None:
    """The rows behind ``b = W[start:stop].t()``."""
    if not is_call(b, *_TRANSPOSES) or b.kwargs:
        return None
    swapped = [*b.args[1:]] in ([], [[1, 0]], [0, 1], [1, 0], [-1, -2], [-2, -1])
    return _rows(b.args[0], 0) if swapped else None


@dataclass(frozen=True, slots=True)
class _Part:
    """One product with what it takes from the buffers."""

    draft: Draft
    weight: _Rows
    scale: fx.Node
    bias: fx.Node | None


def _part(draft: Draft) -> _Part | None:
    _, b, _, scale_b, bias, _, _, weight_key, _, prepared, *form = draft.node.args
    weight, scale = _weight_rows(b), _rows(scale_b, 1)
    if weight is None or scale is None or prepared is not None or any(form):
        return None
    if not str(weight_key).endswith("/static/channel"):
        return None
    if (scale.start, scale.stop) != (weight.start, weight.stop):
        return None
    biases = None
    if bias is not None:
        found = _rows(bias, 0)
        if found is None or (found.start, found.stop) != (weight.start, weight.stop):
            return None
        biases = found.buffer
    return _Part(draft, weight, scale.buffer, biases)


def _key(part: _Part) -> tuple[Any, ...]:
    a, _, scale_a, _, _, out_dtype, act_key, weight_key, fast = part.draft.node.args[:9]
    return (
        a, scale_a, out_dtype, act_key, weight_key, fast, part.weight.buffer, part.scale, part.bias,
    )  # fmt: skip


def merge_products(bench: Workbench, drafts: list[Draft]) -> list[Merged]:
    """Put one product in place of each run of two or more that can be merged."""
    groups: dict[tuple[Any, ...], list[_Part]] = {}
    for draft in drafts:
        scaled = is_call(draft.node, torch.ops.fp8pass.scaled_mm.default)
        part = _part(draft) if scaled and draft.node.users else None
        if part is not None:
            groups.setdefault(_key(part), []).append(part)
    merged = []
    for parts in groups.values():
        parts.sort(key=lambda part: part.weight.start)
        run = [parts[0]]
        for part in [*parts[1:], None]:
            if part is not None and part.weight.start == run[-1].weight.stop:
                run.append(part)
                continue
            if len(run) > 1:
                merged.append(_merge(bench, run))
            if part is not None:
                run = [part]
    return merged


def _merge(bench: Workbench, run: list[_Part]) -> Merged:
    first = min((part.draft for part in run), key=lambda d: bench.position(d.node))
    node = first.node
    a, _, scale_a, _, _, out_dtype, act_key, weight_key, fast = node.args[:9]
    start, stop = run[0].weight.start, run[-1].weight.stop
    size = val(run[0].weight.buffer).shape[0]

    def part_of(buffer: fx.Node, dim: int) -> fx.Node:
        if (start, stop) == (0, size):
            return buffer
        return bench.call(aten.slice.Tensor, (buffer, dim, start, stop), node)

    with bench.graph.inserting_before(node):
        weight = part_of(run[0].weight.buffer, 0)
        b = bench.call(aten.permute.default, (weight, [1, 0]), node)
        scale_b = part_of(run[0].scale, 1)
        bias = None if run[0].bias is None else part_of(run[0].bias, 0)
        args = (a, b, scale_a, scale_b, bias, out_dtype, act_key, weight_key, fast, None)
        value = val(node)
        wide = bench.fresh(value, (value.shape[0], stop - start), value.dtype)
        whole = bench.call(torch.ops.fp8pass.scaled_mm.default, args, node, wide)
    draft = Draft(
        "scaled_mm", first.what, whole, {"out": whole}, [], first.root_name, "", first.source,
        where=first.where, key=first.key,
    )  # fmt: skip
    for part in run:
        own = part.draft.node
        low, high = part.weight.start - start, part.weight.stop - start
        with bench.graph.inserting_before(node):
            columns = bench.call(aten.slice.Tensor, (whole, 1, low, high), own)
            copy = bench.graph.call_function(
                aten.clone.default, (columns,), {"memory_format": torch.contiguous_format}
            )
        copy.meta.update({k: v for k, v in own.meta.items() if k != "eager_input_vals"})
        draft.swaps.append(bench.swap(own, copy))
    return Merged(draft, [part.draft for part in run])


def finish(bench: Workbench, merged: Merged) -> None:
    """Book the outcome: the members share the kernel, or get their own product back."""
    draft = merged.draft
    if draft.status != "lowered":
        bench.undo(draft.swaps)
        return
    count = len(merged.members)
    for member in merged.members:
        member.status, member.kernel, member.rule = "lowered", draft.kernel, draft.rule
        member.plan, member.rejected, member.shape = draft.plan, draft.rejected, draft.shape
        member.why = f"{draft.why}; one product with {count - 1} more"
