"""Workbench: edits an FX graph so that every edit can be taken back.

While the pass runs, a node that was replaced stays in the graph as dead code, and its inputs are
kept current because ``replace_all_uses_with`` updates dead users too. So a :class:`Swap` is undone
by swapping the uses back: "not fused" means the very nodes that were there before, not a
re-derivation of them. Dead code is removed once, at the end.
"""

from __future__ import annotations

import gc
import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.graph import _Namespace

from fp8pass.spellings.library_ops import may_be_merged, merge_arguments
from fp8pass.spellings.walk import argument, aten, prims, same_shape, tensor
from fp8pass.strides import contiguous_strides


@dataclass(frozen=True, slots=True)
class Swap:
    """All uses of ``old`` were given to ``new``."""

    old: fx.Node
    new: fx.Node


class Workbench:
    """One graph under work."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._order = {node: i for i, node in enumerate(graph.nodes)}
        self._fake_mode = _find_fake_mode(graph)

    # ---- making nodes ------------------------------------------------------------------------

    def call(self, target: Any, args: tuple[Any, ...], like: fx.Node, value: Any = None) -> fx.Node:
        """A new call at the graph's insertion point, with the provenance of ``like``.

        ``value`` is its fake value; computed by running the call on fake inputs if not given.
        """
        node = self.graph.call_function(target, args)
        for name in ("stack_trace", "nn_module_stack", "source_fn_stack", "original_aten"):
            if name in like.meta:
                node.meta[name] = like.meta[name]
        node.meta["val"] = self.run_fake(target, args) if value is None else value
        return node

    def items(self, node: fx.Node, like: fx.Node) -> list[fx.Node]:
        """One ``getitem`` for each result of a call that returns a tuple."""
        values = node.meta["val"]
        return [
            self.call(operator.getitem, (node, i), like, value) for i, value in enumerate(values)
        ]

    def fresh(
        self,
        like: torch.Tensor,
        shape: Iterable[Any],
        dtype: torch.dtype,
        strides: Iterable[Any] | None = None,
    ) -> torch.Tensor:
        """A fake tensor on the device of ``like``, made without running an operator.

        Contiguous, if no other ``strides`` are given.

        Running ``new_empty`` on fake tensors costs a millisecond; a model has hundreds of sites.
        """
        sizes = tuple(shape)
        steps = contiguous_strides(sizes) if strides is None else list(strides)
        if not isinstance(like, FakeTensor):
            return like.new_empty_strided(sizes, steps, dtype=dtype)
        meta = torch.empty_strided(sizes, steps, dtype=dtype, device="meta")
        return FakeTensor(like.fake_mode, meta, like.device)

    def run_fake(self, target: Any, args: tuple[Any, ...]) -> Any:
        """The fake result of a call on the fake values of its arguments."""
        values = torch.utils._pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], args)
        if self._fake_mode is None:
            return target(*values)
        with self._fake_mode:
            return target(*values)

    # ---- replacing ---------------------------------------------------------------------------

    def swap(self, old: fx.Node, new: fx.Node) -> Swap:
        """Give all uses of ``old`` to ``new`` (but not the use that ``new`` itself makes of it)."""
        old.replace_all_uses_with(new, delete_user_cb=partial(_is_not, new))
        return Swap(old, new)

    def undo(self, swaps: Iterable[Swap]) -> None:
        """Take swaps back, the latest first."""
        for swap in reversed(list(swaps)):
            old = swap.old
            swap.new.replace_all_uses_with(old, delete_user_cb=partial(_is_not, old))

    # ---- asking ------------------------------------------------------------------------------

    def position(self, node: fx.Node) -> int:
        """Place of a node in the graph as received; the last place for one that was added since."""
        return self._order.get(node, len(self._order))

    def live(self) -> set[fx.Node]:
        """Nodes that an output or a side effect needs."""
        stack = [node for node in self.graph.nodes if _impure(node)]
        seen = set(stack)
        while stack:
            for source in stack.pop().all_input_nodes:
                if source not in seen:
                    seen.add(source)
                    stack.append(source)
        return seen

    def depends_on(self, node: Any, target: fx.Node) -> bool:
        """Whether ``node`` is computed from ``target`` (or is it)."""
        if not isinstance(node, fx.Node):
            return False
        floor = self._order.get(target, -1)
        stack, seen = [node], {node}
        while stack:
            current = stack.pop()
            if current is target:
                return True
            # what stood before the target in the graph as received cannot depend on it
            if self._order.get(current, floor) < floor:
                continue
            for source in current.all_input_nodes:
                if source not in seen:
                    seen.add(source)
                    stack.append(source)
        return False

    # ---- finishing ---------------------------------------------------------------------------

    def finish(self) -> None:
        """Remove dead code, restore a topological order, check the graph."""
        from torch._inductor.pattern_matcher import stable_topological_sort

        # first the order, which removing dead code checks: what was put in place of a residual sum
        # may stand behind a reader of that sum
        stable_topological_sort(self.graph)
        self.graph.eliminate_dead_code(is_impure_node=_impure)
        self.graph.lint()


def _is_not(node: fx.Node, user: fx.Node) -> bool:
    return user is not node


@cache
def _impure_target(target: torch._ops.OpOverload) -> bool:
    probe = fx.Graph()
    return probe.call_function(target).is_impure()


def _impure(node: fx.Node) -> bool:
    """Whether a node must stay though nothing reads it; asked once per operator, as it is slow."""
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        return _impure_target(node.target)
    return node.op in ("output", "placeholder") or bool(node.is_impure())


def _find_fake_mode(graph: fx.Graph) -> FakeTensorMode | None:
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return None


# ---- snapshots ------------------------------------------------------------------------------


@contextmanager
def collector_paused() -> Iterator[None]:
    """Hold off Python's cyclic garbage collector, if it is on, until the block ends.

    A full collection walks every object of the process, 0.5 s beside a 30-layer model in the middle
    of its compilation, and the snapshot of a large graph allocates enough to set one off. Cycles
    that are dropped meanwhile wait for the next collection, a second later.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Snapshot:
    """What a graph was, so that it can be put back to it in place.

    A list of the nodes' fields, not a copy of the graph: arguments of FX nodes are immutable and
    get replaced, never changed, so references to them stay true. It costs microseconds a node.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._nodes = [
            (n, n.op, n.target, n.args, n.kwargs, n.name, n.type, dict(n.meta)) for n in graph.nodes
        ]
        self._signature = _output_signature(graph)

    def restore(self, graph: fx.Graph) -> None:
        """Make ``graph`` what it was when the snapshot was taken, names included."""
        nodes = list(graph.nodes)
        for node in nodes:  # first the edges, since the order may be broken by now
            node.args, node.kwargs = (), {}
        for node in nodes:
            graph.erase_node(node)
        # names are handed out by a namespace that would still count the erased ones
        graph._graph_namespace = _Namespace()
        made: dict[fx.Node, fx.Node] = {}
        for old, op, target, args, kwargs, name, type_expr, meta in self._nodes:
            new_args = fx.node.map_arg(args, made.__getitem__)
            new_kwargs = fx.node.map_arg(kwargs, made.__getitem__)
            made[old] = graph.create_node(op, target, new_args, new_kwargs, name, type_expr)
            made[old].meta = dict(meta)
        graph.lint()

    def check_outputs(self, graph: fx.Graph) -> str | None:
        """Why the outputs of ``graph`` are not those of the snapshot, None if they are."""
        now = _output_signature(graph)
        if len(now) != len(self._signature):
            return f"{len(self._signature)} outputs became {len(now)}"
        for i, (before, after) in enumerate(zip(self._signature, now, strict=True)):
            if before != after:
                return f"output {i} changed from {before} to {after}"
        return None


def _output_signature(graph: fx.Graph) -> list[tuple[Any, ...] | None]:
    outputs: list[tuple[Any, ...] | None] = []
    for node in torch.utils._pytree.tree_leaves(graph.output_node().args):
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if isinstance(value, torch.Tensor):
            sizes = tuple(str(s) for s in value.shape), tuple(str(s) for s in value.stride())
            outputs.append((*sizes, value.dtype, value.device))
        else:
            outputs.append(None)
    return outputs


# ---- common subexpressions -------------------------------------------------------------------

#: Operators whose result may be a view of their input.
_ALIASING = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.permute.default,
        aten.t.default,
        aten.alias.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.expand.default,
        operator.getitem,
    }
)

#: What a quantise and the norm or activation before it are made of. Common subexpressions are
#: merged among these only: the rest of the graph is not ours to touch.
_MERGED = frozenset(
    {
        prims.convert_element_type.default,
        aten._to_copy.default,
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.permute.default,
        aten.t.default,
        aten.abs.default,
        aten.amax.default,
        aten.amin.default,
        aten.max.dim,
        aten.max.default,
        aten.clamp.default,
        aten.clamp_min.default,
        aten.clamp_max.default,
        aten.clamp_max.Tensor,
        aten.clamp.Tensor,
        aten.reciprocal.default,
        aten.round.default,
        aten.log2.default,
        aten.exp2.default,
        aten.ceil.default,
        aten.floor.default,
        aten.minimum.default,
        aten.pow.Scalar,
        aten.div.Tensor,
        aten.div.Scalar,
        aten.mul.Tensor,
        aten.mul.Scalar,
        aten.add.Tensor,
        aten.add.Scalar,
        aten.sub.Tensor,
        aten.maximum.default,
        aten.var.correction,
        aten.var_mean.correction,
        aten.full.default,
        aten.gt.Scalar,
        aten.where.self,
        aten.neg.default,
        aten.exp.default,
        aten.sigmoid.default,
        aten.erf.default,
        aten.tanh.default,
        aten.relu.default,
        aten.pow.Tensor_Scalar,
        aten.mean.dim,
        aten.sum.dim_IntList,
        aten.rsqrt.default,
        aten.sqrt.default,
        operator.getitem,
    }
)


#: A view of the whole of their input, of its shape and strides.
_SAME = frozenset(
    {
        aten.alias.default,
        aten.detach.default,
        aten.lift_fresh.default,
        prims.view_of.default,
    }
)


def see_through_aliases(graph: fx.Graph) -> int:
    """Let what reads a view of a whole tensor read that tensor; returns the number of views gone.

    ``alias`` is what is left of a slice that takes everything. No reader of a spelling has to look
    through them then, wherever they stand. Results of the graph keep theirs, and so do writes.
    """
    gone = 0
    results: set[fx.Node] | None = None
    for node in list(graph.nodes):
        if node.op != "call_function" or not _is_same(node):
            continue
        results = returned(graph) if results is None else results
        for user in list(node.users):
            target = user.target
            writes = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
            shares = user.op == "output" or user in results and user.target in _ALIASING
            if not shares and not writes:
                user.replace_input_with(node, node.all_input_nodes[0])
        if not node.users:
            graph.erase_node(node)
            gone += 1
    return gone


def _is_same(node: fx.Node) -> bool:
    """Whether ``node`` is a view of the whole of its input."""
    if node.target in _SAME:
        return len(node.args) == 1 and len(node.all_input_nodes) == 1
    if node.target is not aten.slice.Tensor or len(node.all_input_nodes) != 1:
        return False
    before, after = tensor(node.args[0]), tensor(node)
    step = argument(node, 4, "step", 1)
    return before is not None and after is not None and step == 1 and same_shape(before, after)


def merge_common(graph: fx.Graph, anchors: Iterable[fx.Node]) -> int:
    """Merge equal calls among the small operators that the anchors are computed from.

    Inductor merges none in inference graphs, so one norm read by three linears has three quantises.
    Returns the number of nodes merged. Does nothing in a graph that writes to tensors, except for
    copies into inputs at its very end, but to see through aliases.
    """
    see_through_aliases(graph)
    if _writes_inside(graph):
        return 0
    cone: set[fx.Node] = set()
    stack = list(anchors)
    while stack:
        node = stack.pop()
        if node in cone or node.op != "call_function":
            continue
        if may_be_merged(node):
            cone.update(user for user in node.users if user.target is operator.getitem)
        elif node.target not in _MERGED:
            continue
        cone.add(node)
        stack.extend(node.all_input_nodes)
    results = returned(graph)
    seen: dict[Any, fx.Node] = {}
    merged = 0
    for node in list(graph.nodes):
        if node not in cone:
            continue
        key = (node.target, *map(_key, merge_arguments(node)))
        try:
            first = seen.setdefault(key, node)
        except TypeError:  # an argument that cannot be hashed
            continue
        if first is node or {first, node} <= results:
            continue
        node.replace_all_uses_with(first)
        if node in results:
            results.add(first)
        graph.erase_node(node)
        merged += 1
    return merged


def returned(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose memory a result of the graph has: two results must stay two tensors."""
    found: set[fx.Node] = set()
    stack = list(graph.output_node().all_input_nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            if node.target in _ALIASING:
                stack.extend(node.all_input_nodes)
    return found


def _key(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_key(v) for v in value)
    if isinstance(value, dict):
        return tuple(sorted((k, _key(v)) for k, v in value.items()))
    if isinstance(value, float):
        return float, value.hex()  # 0.0 == -0.0, but adding them is not the same
    return type(value), value  # the type, since 1 == 1.0 == True


def _writes_inside(graph: fx.Graph) -> bool:
    """Whether a call other than trailing ``copy_`` nodes writes to a tensor."""
    trailing = True
    for node in reversed(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if node.target._schema.is_mutable:
            if not (trailing and node.target is aten.copy_.default):
                return True
        else:
            trailing = False
    return False
