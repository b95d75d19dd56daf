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
from typing import Any

import torch
from torch import fx

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.quant_key import FP8_DTYPES
from fp8pass.reasons import YES, Verdict, no
from fp8pass.site_draft import Draft
from fp8pass.spellings.activation import match_silu_mul
from fp8pass.spellings.any_quantize import match_any_quantize as match_quantize
from fp8pass.spellings.library_ops import (
    LibraryOp,
    LinearMatch,
    ProductMatch,
    library_op,
    match_library_op,
)
from fp8pass.spellings.linear import is_scaled_mm, match_scaled_mm
from fp8pass.spellings.norm import NormMatch, match_norm
from fp8pass.spellings.quantize import QuantMatch, is_fp8_cast
from fp8pass.spellings.walk import (
    VIEWS,
    aten,
    is_call,
    item,
    peel_views,
    same,
    tensor,
    val,
    where,
)
from fp8pass.workbench import Swap, Workbench

_ops = torch.ops.fp8pass

#: generic operator -> (kind, word for messages, names of its results)
GENERIC: dict[Any, tuple[str, str, tuple[str, ...]]] = {
    _ops.rms_norm.default: ("norm", "norm", ("y",)),
    _ops.add_rms_norm.default: ("norm", "norm", ("y", "total")),
    _ops.silu_mul.default: ("activation", "SiLU·mul", ("y",)),
    _ops.quantize.default: ("quantize", "quantise", ("q", "scale")),
    _ops.scaled_mm.default: ("scaled_mm", "scaled product", ("out",)),
}
_PRODUCERS = frozenset({_ops.rms_norm.default, _ops.add_rms_norm.default, _ops.silu_mul.default})


def anchors(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that make a graph an FP8 graph: casts to fp8, scaled products, our operators."""
    found = []
    for node in graph.nodes:
        if node.op == "call_function" and (
            is_fp8_cast(node) or is_scaled_mm(node) or _is_ours(node) or library_op(node)
        ):
            found.append(node)
    return found


def touches_fp8(graph: fx.Graph) -> bool:
    """Whether any value of the graph is fp8, or an operator of fp8pass is called."""
    for node in graph.nodes:
        value = val(node)
        if isinstance(value, torch.Tensor) and value.dtype in FP8_DTYPES:
            return True
        if _is_ours(node):
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

    # ---- the three passes --------------------------------------------------------------------

    def read_producers(self) -> None:
        """Norms and activations."""
        for node in list(self.bench.graph.nodes):
            if node.op != "call_function":
                continue
            if node.target in GENERIC and GENERIC[node.target][0] in ("norm", "activation"):
                self._take_native(node)
            elif node.target in (aten.mul.Tensor, aten.div.Tensor):
                norm = match_norm(node)
                if norm is not None:
                    self._put_norm(norm)
                    continue
                act = match_silu_mul(node)
                if act is not None:
                    form = str(act.form)
                    self._put_single(
                        "activation",
                        act.root,
                        _ops.silu_mul.default,
                        (act.gate, act.up, form),
                        form,
                    )

    def read_quantises(self) -> None:
        """Casts to fp8."""
        for node in list(self.bench.graph.nodes):
            if is_call(node, _ops.quantize.default):
                self._take_native(node)
            elif (library := library_op(node)) is not None:
                if library.kind == "quantize":
                    self._read_library(node, library)
            elif node.op == "call_function" and is_fp8_cast(node):
                found = match_quantize(node)
                if isinstance(found, Verdict):
                    self.unread.append(("quantize", node, found))
                else:
                    self._put_quantise(found)

    def read_products(self) -> None:
        """Scaled products."""
        for node in list(self.bench.graph.nodes):
            if is_call(node, _ops.scaled_mm.default):
                self._take_native(node)
            elif (library := library_op(node)) is not None:
                if library.kind == "scaled_mm":
                    self._read_library(node, library)
            elif is_scaled_mm(node):
                found = match_scaled_mm(node)
                if isinstance(found, Verdict):
                    self.unread.append(("scaled_mm", node, found))
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
                    "scaled_mm", node, _ops.scaled_mm.default, args, "", name="out"
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
            keys = (found.act_key, found.weight_key, False, None)
            args = (q, b, scale, scale_b, None, out.dtype, *keys)
            product = bench.call(_ops.scaled_mm.default, args, root)
            result = product
            if x.dim() != 2:
                sizes = [self._size(found.x, i) for i in range(x.dim() - 1)]
                result = bench.call(aten.reshape.default, (product, [*sizes, out.shape[-1]]), root)
        verdict = takes(Draft("scaled_mm", "scaled product", product, {}, [], root.name, ""))
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
        if not isinstance(found, Verdict):
            latest = next(reversed(self.drafts.values()))
            latest.source = str(node.target).partition(".")[0]

    # ---- putting generic operators in ----------------------------------------------------------

    def _draft(self, node: fx.Node, root: fx.Node, outputs: dict[str, fx.Node], form: str) -> Draft:
        kind, what, _ = GENERIC[node.target]
        value = val(next(iter(outputs.values())))
        draft = Draft(kind, what, node, outputs, [], root.name, form, where=where(root))
        draft.shape = "x".join(str(size) for size in value.shape)
        self.drafts[node] = draft
        return draft

    def _take_native(self, node: fx.Node) -> None:
        """An operator of fp8pass that the model emitted itself."""
        _, _, names = GENERIC[node.target]
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
        if draft.kind == "scaled_mm":
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

    def _put_library_product(self, found: ProductMatch) -> None:
        """The generic product of a library's, whose weight is ``[N, K]`` and scales may be 1-D."""
        bench, root = self.bench, found.root
        with bench.graph.inserting_before(root):
            b = bench.call(aten.permute.default, (found.weight, [1, 0]), root)
            scale_a, scale_b = found.scale_a, found.scale_b
            if val(scale_a).dim() == 1:
                scale_a = bench.call(aten.unsqueeze.default, (scale_a, -1), root)
            if val(scale_b).dim() == 1:
                scale_b = bench.call(aten.unsqueeze.default, (scale_b, 0), root)
            elif not same(val(scale_b).shape[0], 1):
                scale_b = bench.call(aten.permute.default, (scale_b, [1, 0]), root)
        keys = (found.act_key, found.weight_key, found.use_fast_accum, None)
        args = (found.a, b, scale_a, scale_b, found.bias, found.out_dtype, *keys)
        draft = self._put_single("scaled_mm", root, _ops.scaled_mm.default, args, "", name="out")
        draft.key = f"{found.act_key} x {found.weight_key}"

    def _put_norm(self, found: NormMatch) -> None:
        form = str(found.form)
        add = found.add
        if add is not None and self.bench.depends_on(found.weight, add):
            add = None  # the weight is computed from the sum: taking the sum over would be a cycle
        if add is None:
            plain = (found.x, found.weight, found.eps, form)
            self._put_single("norm", found.root, _ops.rms_norm.default, plain, form)
            return
        root = found.root
        with self.bench.graph.inserting_after(root):
            args = (*add.args, found.weight, found.eps, form)
            node = self.bench.call(_ops.add_rms_norm.default, args, root, (val(root), val(add)))
        with self.bench.graph.inserting_after(node):
            y, total = self.bench.items(node, root)
        draft = self._draft(node, root, {"y": y, "total": total}, form)
        draft.swaps += [self.bench.swap(root, y), self.bench.swap(add, total)]

    def _put_quantise(self, found: QuantMatch) -> None:
        base, views = _look_through(found)
        form = str(found.form)
        scale = found.scale if found.form.static else None
        bench, graph = self.bench, self.bench.graph
        last = found.root
        if scale is None and bench._order.get(found.scale, 0) > bench._order.get(last, 0):
            last = found.scale
        value = self._quantise_value(found, base, viewed=bool(views))
        with graph.inserting_after(last):
            node = bench.call(_ops.quantize.default, (base, scale, form), found.root, value)
        with graph.inserting_after(node):
            q, scale_out = bench.items(node, found.root)
        draft = self._draft(node, found.root, {"q": q, "scale": scale_out}, form)
        draft.key = found.form.key
        draft.match = found
        mixed = _mixed_rows(found) if base is found.x else None
        if mixed is not None:
            draft.refuse("", mixed)
        draft.swaps.append(self._swap_viewed(found.root, q, views, last_dim=None))
        if scale is None:
            per_token = found.form.granularity == "token"
            draft.swaps.append(
                self._swap_viewed(found.scale, scale_out, views if per_token else [], last_dim=1)
            )

    def _quantise_value(
        self, found: QuantMatch, base: fx.Node, viewed: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fake codes and scale of a generic quantise of ``base``."""
        codes, scale, x = val(found.root), val(found.scale), val(base)
        if viewed:
            codes = self.bench.fresh(x, x.shape, codes.dtype)
        if found.form.static:
            return codes, self.bench.fresh(x, (0,), torch.float32)
        if found.form.granularity == "tensor":
            return codes, scale if scale.dim() == 0 else self.bench.fresh(x, (), torch.float32)
        if viewed or scale.dim() != x.dim():
            scale = self.bench.fresh(x, (*x.shape[:-1], 1), torch.float32)
        return codes, scale

    def _swap_viewed(
        self, old: fx.Node, new: fx.Node, views: list[fx.Node], last_dim: int | None
    ) -> Swap:
        """Give the uses of ``old`` to ``new`` after the same reshapes, innermost first."""
        bench = self.bench
        for view in reversed(views):
            args: tuple[Any, ...] = (new, *view.args[1:])
            if last_dim is not None and view.target not in (
                aten.unsqueeze.default,
                aten.squeeze.dim,
            ):
                sizes: Any = view.args[1]
                args = (new, [*sizes[:-1], last_dim])
            # the outermost reshape gives what was there before, so its fake value is known
            same_rank = val(old).dim() == val(view).dim()
            value = val(old) if view is views[0] and same_rank else None
            with bench.graph.inserting_after(new):
                new = bench.call(view.target, args, old, value)
        before, after = val(old), val(new)
        if last_dim is not None and before.dim() + 1 == after.dim():  # a scale without its last dim
            with bench.graph.inserting_after(new):
                new = bench.call(aten.squeeze.dim, (new, -1), old, before)
        elif tuple(before.shape) != tuple(after.shape):  # an amax that kept its dims: 0-d to [1, 1]
            with bench.graph.inserting_after(new):
                new = bench.call(aten.reshape.default, (new, list(before.shape)), old, before)
        return bench.swap(old, new)


def _look_through(found: QuantMatch) -> tuple[fx.Node, list[fx.Node]]:
    """The producer that a quantise reads through reshapes, and these reshapes, outermost first.

    Only reshapes that keep the last dim, only to a producer that was read, and only where nothing
    is lost by reshaping codes and scale instead; otherwise ``(x, [])``.
    """
    views: list[fx.Node] = []
    node = found.x
    while is_call(node, *VIEWS) and isinstance(node.args[0], fx.Node):
        before, after = tensor(node.args[0]), tensor(node)
        if before is None or after is None or before.dim() == 0 or after.dim() == 0:
            return found.x, []
        if found.form.granularity == "token" and not same(before.shape[-1], after.shape[-1]):
            return found.x, []
        if node.target in (aten.unsqueeze.default, aten.squeeze.dim):
            dim = node.args[1]
            rank = max(before.dim(), after.dim())
            if not isinstance(dim, int) or dim % rank == rank - 1:
                return found.x, []
        elif not isinstance(node.args[1], (list, tuple)) or not node.args[1]:
            return found.x, []
        views.append(node)
        node = node.args[0]
    return (node, views) if _producer_of(node) is not None else (found.x, [])


def _producer_of(node: Any) -> fx.Node | None:
    """The generic producer whose normalised or activated value ``node`` is."""
    made = node if is_call(node, *_PRODUCERS) else item(node, 0)
    return made if is_call(made, *_PRODUCERS) else None


def _mixed_rows(found: QuantMatch) -> Verdict | None:
    """FP8-F008 if a reshape keeps a per-token quantise from the producer of its rows."""
    source = peel_views(found.x)
    producer = _producer_of(source)
    if found.form.granularity != "token" or source is found.x or producer is None:
        return None
    return no(
        "FP8-F008",
        before=tuple(val(source).shape),
        after=tuple(val(found.x).shape),
        what=GENERIC[producer.target][1],
    )


def describe(node: Any) -> str:
    """A short name of what made a value, for messages."""
    if not isinstance(node, fx.Node):
        return repr(node)
    if node.op == "placeholder":
        return f"graph input {node.name}"
    if is_call(node, *VIEWS):
        return f"{describe(node.args[0])} (reshaped)"
    return f"{node.target} ({node.name})"


def readers_text(nodes: list[fx.Node]) -> str:
    """The readers of a value, for messages."""
    names = [str(n.target) if n.op == "call_function" else f"the graph's {n.op}" for n in nodes]
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:4]) + (" ..." if len(distinct) > 4 else "") or "nothing"


def not_fused(draft: Draft, live: set[fx.Node]) -> Verdict:
    """Why a producer or a quantise that no rule took was left."""
    if draft.kind == "quantize":
        source = draft.node.args[0]
        return no("FP8-F002", producer=describe(source))
    users = [u for u in draft.outputs["y"].users if u in live]
    return no("FP8-F001", what=draft.what, readers=readers_text(users))
