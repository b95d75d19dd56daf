"""Reader: finds what the spellings recognise in a graph and puts generic operators in its place.

Order: norms and activations first, then quantises (they may look through a view to a producer that
was read), then scaled products. Each generic operator gets the uses of the node it was read from,
which stays behind as dead code (see :mod:`fp8pass.workbench`). Reading changes no number: the
reference of the generic operator with its form equals the nodes it stands for, bit for bit in
eager mode.

Operators of ``fp8pass::`` that the model emitted itself are taken as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.quant_key import FP8_DTYPES
from fp8pass.reasons import YES, Verdict, no
from fp8pass.site_draft import Draft
from fp8pass.spellings.any_quantize import match_any_quantize as match_quantize
from fp8pass.spellings.by_place import read_by_place
from fp8pass.spellings.dequantised import DequantisedMatch
from fp8pass.spellings.library_ops import (
    LibraryOp,
    LinearMatch,
    ProductMatch,
    library_op,
    match_library_op,
)
from fp8pass.spellings.linear import is_scaled_mm, match_product
from fp8pass.spellings.look_through import GENERIC, PRODUCERS, look_through, mixed_rows
from fp8pass.spellings.put_layout import put_layouts
from fp8pass.spellings.put_product import library_operands, put_dequantised, put_weight_only
from fp8pass.spellings.put_zero_point import given_pair, put_pair
from fp8pass.spellings.quantize import QuantMatch, is_int8_cast, is_quantise_cast
from fp8pass.spellings.registry import Part, Producer, quantised_spellings, spellings_at
from fp8pass.spellings.scale import stored_e8m0
from fp8pass.spellings.walk import (
    aten,
    is_call,
    peel_views,
    val,
    where,
)
from fp8pass.spellings.weight_only import WeightOnlyMatch, key_of
from fp8pass.workbench import Swap, Workbench

_ops = torch.ops.fp8pass


def anchors(graph: fx.Graph) -> list[fx.Node]:
    """What makes a graph an FP8 graph: quantising casts, scaled products, our operators."""
    found = []
    for node in graph.nodes:
        if node.op == "call_function" and (
            is_quantise_cast(node) or is_scaled_mm(node) or _is_ours(node) or _is_library(node)
        ):
            found.append(node)
    return found


def _is_library(node: fx.Node) -> bool:
    library = library_op(node)
    return library is not None and library.kind not in ("norm", "activation")


def touches_fp8(graph: fx.Graph) -> bool:
    """Whether any value of the graph is fp8, or quantised to int8, or one of ours is called."""
    for node in graph.nodes:
        value = val(node)
        if isinstance(value, torch.Tensor) and value.dtype in FP8_DTYPES:
            return True
        if _is_ours(node) or is_int8_cast(node) or is_scaled_mm(node) or _is_library(node):
            return True
    return False


def _is_ours(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "fp8pass"


class Reader:
    """Reads one graph; the drafts of its sites are in :attr:`drafts` by generic node."""

    def __init__(self, bench: Workbench) -> None:
        self.bench = bench
        self.drafts: dict[fx.Node, Draft] = {}
        #: casts to fp8 and scaled products that were not read: (kind, node, reason)
        self.unread: list[tuple[str, fx.Node, Verdict]] = []
        #: scales that were computed -> what took their uses
        self._scales: dict[fx.Node, fx.Node] = {}
        #: given scales with their zero points -> both in one tensor
        self._pairs: dict[tuple[fx.Node, fx.Node], fx.Node] = {}

    # ---- the three passes --------------------------------------------------------------------

    def read_producers(self) -> None:
        """Norms and activations."""
        for node in list(self.bench.graph.nodes):
            if node.op != "call_function":
                continue
            if node.target in PRODUCERS:
                self._take_native(node)
                continue
            library = library_op(node)
            if library is not None:
                if library.kind in ("norm", "activation"):
                    self._read_library(node, library)
                continue
            for spelling in spellings_at(node):
                found = spelling.match(node)
                if found is not None:
                    if not read_by_place(found.all_nodes()):
                        self._put_producer(found)
                    break

    def read_quantises(self) -> None:
        """Casts to fp8 and int8: all are matched before the first one is put in.

        The scale of one may be a step on the way to the scale of another, ``s`` and ``s + eps``.
        """
        matches = []
        for node in list(self.bench.graph.nodes):
            if is_call(node, _ops.quantize.default):
                self._take_native(node)
            elif (library := library_op(node)) is not None:
                if library.kind == "quantize":
                    self._read_library(node, library)
            elif node.op == "call_function" and is_quantise_cast(node):
                found = match_quantize(node)
                if isinstance(found, Verdict):
                    self.unread.append(("quantize", node, found))
                else:
                    matches.append(self._with_producer(node, found))
        for match in matches:
            self._put_quantise(match)
        put_layouts(self.bench, self.drafts.values())

    def read_products(self) -> None:
        """Scaled products."""
        for node in list(self.bench.graph.nodes):
            if is_call(node, _ops.scaled_mm.default, _ops.w8a16_mm.default):
                self._take_native(node)
            elif (library := library_op(node)) is not None:
                if library.kind == "scaled_mm":
                    self._read_library(node, library)
            elif is_scaled_mm(node):
                found = match_product(node)
                if isinstance(found, Verdict):
                    self.unread.append(("scaled_mm", node, found))
                    continue
                if isinstance(found, (DequantisedMatch, WeightOnlyMatch)):
                    self._put_dequantised(found)
                    continue
                args = (
                    found.a,
                    found.b,
                    found.scale_a,
                    found.scale_b,
                    found.bias,
                    found.out_dtype,
                    found.act_key,
                    found.weight_key,
                    found.use_fast_accum,
                    None,
                )
                draft = self._put_single(
                    "scaled_mm", found.root, _ops.scaled_mm.default, args, "", name="out"
                )
                draft.key = f"{found.act_key} x {found.weight_key}"

    def split_linears(self, takes: Callable[[Draft], Verdict]) -> int:
        """Take library calls that quantise and multiply apart; returns how many.

        Only where ``takes`` says that a kernel takes the product: what is put in place stays, so
        that it crosses to a later hook as if the model had emitted it.
        """
        made = 0
        shared: dict[tuple[fx.Node, str], tuple[fx.Node, fx.Node]] = {}
        for node in list(self.bench.graph.nodes):
            library = library_op(node)
            if library is None or library.kind != "linear":
                continue
            found = match_library_op(node)
            if isinstance(found, LinearMatch):
                found = self._split(found, takes, shared)
            if isinstance(found, Verdict) and not found:
                self.unread.append(("scaled_mm", node, found))
            else:
                made += 1
        return made

    def _split(
        self,
        found: LinearMatch,
        takes: Callable[[Draft], Verdict],
        shared: dict[tuple[fx.Node, str], tuple[fx.Node, fx.Node]],
    ) -> Verdict:
        """Put a quantise (one for all that read the same value) and a product in place of one."""
        bench, root = self.bench, found.root
        x, out, key = val(found.x), val(root), (found.x, str(found.form))
        last = root.prev
        with bench.graph.inserting_before(root):
            q, scale = shared.get(key) or self._quantised(found)
            b = bench.call(aten.permute.default, (found.weight, [1, 0]), root)
            scale_b = found.scale_b
            if val(scale_b).dim() == 2:
                scale_b = bench.call(aten.permute.default, (scale_b, [1, 0]), root)
            keys = (found.act_key, found.weight_key, False, None, "")
            args = (q, b, scale, scale_b, None, out.dtype, *keys)
            product = bench.call(_ops.scaled_mm.default, args, root)
            result = product
            if x.dim() != 2:
                sizes = [self._size(found.x, i) for i in range(x.dim() - 1)]
                result = bench.call(aten.reshape.default, (product, [*sizes, out.shape[-1]]), root)
        place = where(root)
        draft = Draft("scaled_mm", "scaled product", product, {}, [], root.name, "", where=place)
        verdict = takes(draft)
        if not verdict:
            while root.prev is not last:
                bench.graph.erase_node(root.prev)
            why = f"it quantises and multiplies in one call, and {verdict.message}"
            return no("FP8-R010", op=str(root.target), node=root.name, why=why)
        shared[key] = q, scale
        bench.swap(root, result)
        return YES

    def _quantised(self, found: LinearMatch) -> tuple[fx.Node, fx.Node]:
        """Codes and scale of what a library's linear quantises, both as matrices."""
        bench, root, x = self.bench, found.root, val(found.x)
        made = bench.call(_ops.quantize.default, (found.x, None, str(found.form)), root)
        q, scale = bench.items(made, root)
        if x.dim() != 2:
            q = bench.call(aten.reshape.default, (q, [-1, val(found.weight).shape[1]]), root)
            scale = bench.call(aten.reshape.default, (scale, [-1, val(scale).shape[-1]]), root)
        return q, scale

    def _size(self, node: fx.Node, dim: int) -> Any:
        """A size for an argument: a number, or the node of a symbolic one."""
        size = val(node).shape[dim]
        if type(size) is int:
            return size
        return self.bench.call(aten.sym_size.int, (node, dim), node, size)

    def _read_library(self, node: fx.Node, library: LibraryOp) -> None:
        """An operator of a quantisation library."""
        found = match_library_op(node)
        if isinstance(found, Verdict):
            self.unread.append((library.kind, node, found))
        elif isinstance(found, ProductMatch):
            self._put_library_product(found)
        elif isinstance(found, QuantMatch):
            self._put_quantise(found)
        elif isinstance(found, Producer):
            self._put_producer(found)
        if not isinstance(found, Verdict):
            latest = next(reversed(self.drafts.values()))
            latest.source = library.dialect or str(node.target).partition(".")[0]

    # ---- putting generic operators in ----------------------------------------------------------

    def _draft(self, node: fx.Node, root: fx.Node, outputs: dict[str, fx.Node], form: str) -> Draft:
        spec = GENERIC[node.target]
        value = val(next(iter(outputs.values())))
        draft = Draft(spec.kind, spec.what, node, outputs, [], root.name, form, where=where(root))
        draft.shape = "x".join(str(size) for size in value.shape)
        self.drafts[node] = draft
        return draft

    def _take_native(self, node: fx.Node) -> None:
        """An operator of fp8pass that the model emitted itself."""
        names = GENERIC[node.target].results
        outputs = {names[0]: node}
        if len(names) > 1:
            graph = self.bench.graph
            with graph.inserting_after(node):
                found = {u.args[1]: u for u in node.users if is_call(u, operator.getitem)}
                outputs = {
                    name: found.get(i)
                    or self.bench.call(operator.getitem, (node, i), node, val(node)[i])
                    for i, name in enumerate(names)
                }
        form = next((str(a) for a in reversed(node.args) if isinstance(a, str)), "")
        draft = self._draft(node, node, outputs, form)
        draft.source = "fp8pass"
        if is_call(node, _ops.w8a16_mm.default):
            draft.key, draft.form = key_of(node), str((*node.args, "")[6])
        elif draft.kind == "scaled_mm":
            draft.key = f"{node.args[6]} x {node.args[7]}"

    def _put_single(
        self,
        kind: str,
        root: fx.Node,
        op: Any,
        args: tuple[Any, ...],
        form: str,
        name: str = "y",
    ) -> Draft:
        with self.bench.graph.inserting_after(root):
            node = self.bench.call(op, args, root, val(root))
        draft = self._draft(node, root, {name: node}, form)
        draft.swaps.append(self.bench.swap(root, node))
        return draft

    def _put_producer(self, found: Producer) -> None:
        """Put the generic operator in, behind the first of the nodes that it stands for."""
        bench, olds, flat = self.bench, found.nodes(), found.all_nodes()
        parts = [arg for arg in found.args if isinstance(arg, Part)]
        if parts:
            made = {part: self._cut(part, flat[0]) for part in parts}
            args = tuple(made[a] if isinstance(a, Part) else a for a in found.args)
            return self._put_producer(replace(found, args=args))
        cycle = any(bench.depends_on(arg, old) for old in flat for arg in found.args)
        if cycle and found.otherwise is not None:
            return self._put_producer(found.otherwise)
        root = flat[0]
        if len(olds) == 1:
            spec = GENERIC[found.op]
            (name,) = olds
            self._put_single(spec.kind, root, found.op, found.args, found.form, name)
            return None
        known = all(olds.values())  # else a result is one that no node has
        value = tuple(val(nodes[0]) for nodes in olds.values()) if known else None
        with bench.graph.inserting_after(root):
            node = bench.call(found.op, found.args, root, value)
        with bench.graph.inserting_after(node):
            news = dict(zip(olds, bench.items(node, root), strict=True))
        draft = self._draft(node, root, news, found.form)
        for name, nodes in olds.items():
            draft.swaps += [bench.swap(old, news[name]) for old in nodes]
        return None

    def _cut(self, part: Part, root: fx.Node) -> fx.Node:
        value = val(part.node)
        sizes = (*value.shape[:-1], part.stop - part.start)
        cut = self.bench.fresh(value, sizes, value.dtype, value.stride())
        args = (part.node, value.dim() - 1, part.start, part.stop)
        with self.bench.graph.inserting_before(root):
            return self.bench.call(aten.slice.Tensor, args, root, cut)

    def _put_dequantised(self, found: DequantisedMatch | WeightOnlyMatch) -> None:
        weight_only = isinstance(found, WeightOnlyMatch)
        put = put_weight_only if weight_only else put_dequantised
        node, result = put(self.bench, found)  # type: ignore[arg-type]
        draft = self._draft(node, found.root, {"out": node}, str(found.form))
        draft.key = key_of(node) if weight_only else f"{node.args[6]} x {node.args[7]}"
        draft.swaps.append(self.bench.swap(found.root, result))

    def _put_library_product(self, found: ProductMatch) -> None:
        b, scale_a, scale_b = library_operands(self.bench, found)
        keys = (found.act_key, found.weight_key, found.use_fast_accum, None, "")
        args = (found.a, b, scale_a, scale_b, found.bias, found.out_dtype, *keys)
        root, op = found.root, _ops.scaled_mm.default
        draft = self._put_single("scaled_mm", root, op, args, "", name="out")
        draft.key = f"{found.act_key} x {found.weight_key}"

    def _put_quantise(self, found: QuantMatch) -> None:
        now = self._scales.get
        found = replace(found, x=now(found.x, found.x))
        if found.form.static:
            found = replace(found, scale=now(found.scale, found.scale))
        base, views = look_through(found)
        form = str(found.form)
        scale = found.scale if found.form.static else None
        if scale is not None and found.zero is not None:
            scale = self._pair(found.root, scale, found.zero)
        args: tuple[Any, ...] = (base, scale, form)
        if found.scale_ub is not None:
            args = (*args, now(found.scale_ub, found.scale_ub))
        bench, graph = self.bench, self.bench.graph
        last = found.root
        if scale is None and bench._order.get(found.scale, 0) > bench._order.get(last, 0):
            last = found.scale
        if scale is None and found.zero is not None:
            order = bench._order.get
            last = max(last, found.zero, key=lambda node: order(node, 0))
        value = self._quantise_value(found, base, viewed=bool(views))
        with graph.inserting_after(last):
            node = bench.call(_ops.quantize.default, args, found.root, value)
        with graph.inserting_after(node):
            q, scale_out = bench.items(node, found.root)
        draft = self._draft(node, found.root, {"q": q, "scale": scale_out}, form)
        draft.key = found.form.key
        draft.match = found
        mixed = mixed_rows(found) if base is found.x else None
        if mixed is not None:
            draft.refuse("", mixed)
        split, group = found.split, found.form.group
        seen = views if split is None or found.codes_split else views[1:]
        draft.swaps.append(self._swap_viewed(found.root, q, seen, None, None))
        if scale is None and group is not None:
            count = val(base).shape[-1] // group
            draft.swaps.append(self._swap_viewed(found.scale, scale_out, views, count, split))
        elif scale is None:
            per_token = found.form.granularity == "token"
            if found.zero is not None:
                scale_out, zero = put_pair(bench, scale_out, found)
                again = views if per_token else []
                draft.swaps.append(self._swap_viewed(found.zero, zero, again, 1, None))
            draft.swaps.append(
                self._swap_viewed(found.scale, scale_out, views if per_token else [], 1, None)
            )
        if scale is None:
            made = draft.swaps[-1].new
            self._scales.setdefault(found.scale, made)
            stored = stored_e8m0(found.scale)
            if stored is not None and val(stored).shape == val(found.scale).shape:
                draft.swaps.append(self._store(stored, made))

    def _store(self, stored: fx.Node, scale: fx.Node) -> Swap:
        """Give the readers of a scale as it is stored the scale of the quantise, stored so."""
        with self.bench.graph.inserting_after(scale):
            new = self.bench.call(stored.target, (scale, *stored.args[1:]), stored, val(stored))
        new.kwargs = stored.kwargs
        return self.bench.swap(stored, new)

    def _pair(self, root: fx.Node, scale: fx.Node, zero: fx.Node) -> fx.Node:
        """A given scale and zero point in one tensor; the same one for the same two."""
        if (scale, zero) not in self._pairs:
            self._pairs[scale, zero] = given_pair(self.bench, root, scale, zero)
        return self._pairs[scale, zero]

    def _with_producer(self, cast: fx.Node, found: QuantMatch) -> QuantMatch:
        """``found`` after its source was read, if that is something read only where quantised."""
        source = peel_views(found.x)
        if not isinstance(source, fx.Node) or source.op != "call_function":
            return found
        for spelling in quantised_spellings():
            producer = spelling.match(source)
            if producer is not None and not read_by_place(producer.all_nodes()):
                self._put_producer(producer)
                again = match_quantize(cast)
                assert isinstance(again, QuantMatch)  # the same nodes around another source
                return again
        return found

    def _quantise_value(
        self, found: QuantMatch, base: fx.Node, viewed: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fake codes and scale of a generic quantise of ``base``."""
        codes, scale, x = val(found.root), val(found.scale), val(base)
        if viewed:
            codes = self.bench.fresh(x, x.shape, codes.dtype)
        if found.form.static or found.zero is not None:
            if not found.form.static:
                pair = found.form.scale_shape(tuple(x.shape))
                return codes, self.bench.fresh(x, pair, torch.float32)
            return codes, self.bench.fresh(x, (0,), torch.float32)
        shape = found.form.scale_shape(tuple(x.shape))
        if not viewed and len(shape) == scale.dim():
            return codes, scale
        return codes, self.bench.fresh(x, shape, torch.float32)

    def _swap_viewed(
        self,
        old: fx.Node,
        new: fx.Node,
        views: list[fx.Node],
        last_dim: int | None,
        split: fx.Node | None,
    ) -> Swap:
        """Give the uses of ``old`` to ``new`` after the same reshapes, innermost first.

        ``last_dim``: the last dim of scales, which stands for the width of the reshapes; ``split``
        is the reshape to groups, after which each group is a row.
        """
        bench = self.bench
        for view in reversed(views):
            args: tuple[Any, ...] = (new, *view.args[1:])
            if last_dim is not None and view.target not in (
                aten.unsqueeze.default,
                aten.squeeze.dim,
            ):
                sizes: Any = view.args[1]
                args = (new, list(sizes[:-1]) if view is split else [*sizes[:-1], last_dim])
            # the outermost reshape gives what was there before, so its fake value is known
            value = val(old) if view is views[0] and last_dim is None else None
            with bench.graph.inserting_after(new):
                new = bench.call(view.target, args, old, value)
        before, after = val(old), val(new)
        kept = before.dim() - after.dim()
        if last_dim is not None and views and kept == 1 or kept == -1 and after.dim() > 1:
            # a maximum that kept its dim, or one per token that did not
            target = aten.unsqueeze.default if kept == 1 else aten.squeeze.dim
            with bench.graph.inserting_after(new):
                new = bench.call(target, (new, -1), old, None)
        elif kept:  # an amax over everything that kept its dims: 0-d to [1, 1]
            with bench.graph.inserting_after(new):
                new = bench.call(aten.reshape.default, (new, list(before.shape)), old, before)
        return bench.swap(old, new)
