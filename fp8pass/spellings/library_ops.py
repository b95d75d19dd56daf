"""Operators of libraries, read from the arguments of their schema.

A library may be absent, or be imported long after fp8pass, so no operator is ever looked up: a node
of the graph carries its operator, and the name in that operator's schema is what the tables are
keyed by. A file of this folder lists its own in ``OPS``; they are found by that name.

An operator that writes to its arguments is read in the functional form that torch gives such calls
(:mod:`fp8pass.spellings.functionalised`), where its entry says which arguments it writes.

Such an operator is opaque: what it computes is what its library documents and its source shows, in
the version that the table's entry names. An argument that the entry does not know must have its
default value: then the operator does what it did before the argument was added.
"""

from __future__ import annotations

import importlib
import operator
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from fp8pass.ops.forms import QuantForm
from fp8pass.reasons import Verdict, no
from fp8pass.spellings.by_place import read_by_place
from fp8pass.spellings.functionalised import Functional, functional, inner_operator, not_fresh
from fp8pass.spellings.quantize import QuantMatch
from fp8pass.spellings.registry import Producer
from fp8pass.spellings.walk import is_call


@dataclass(frozen=True, slots=True)
class ProductMatch:
    """One scaled product of a library.

    Attributes:
        a: codes ``[M, K]``.
        weight: codes ``[N, K]``, as the library takes them; the generic operator reads ``.t()``.
        scale_a: ``[M]`` or ``[M, 1]``; one element; or one for each block.
        scale_b: ``[N]``, ``[N, 1]`` or ``[1, N]``; one element; or one for each block of the
            weight, oriented as it is.
        act_key, weight_key: see :class:`fp8pass.quant_key.QuantKey`.
        turned: the weight is ``[K, N]`` already, as the generic operator takes it.
    """

    root: fx.Node
    a: fx.Node
    weight: fx.Node
    scale_a: fx.Node
    scale_b: fx.Node
    bias: fx.Node | None
    out_dtype: torch.dtype
    act_key: str
    weight_key: str
    use_fast_accum: bool
    turned: bool = False


@dataclass(frozen=True, slots=True)
class LinearMatch:
    """Quantise and product in one call.

    Attributes:
        x: the values ``[..., K]`` that are quantised as ``form`` says.
        weight: codes ``[N, K]``.
        scale_b: one element, or one for each block of the weight, oriented as it is.
        act_key, weight_key: see :class:`fp8pass.quant_key.QuantKey`.
    """

    root: fx.Node
    x: fx.Node
    form: QuantForm
    weight: fx.Node
    scale_b: fx.Node
    act_key: str
    weight_key: str


Arguments = dict[str, Any]
Match = QuantMatch | ProductMatch | LinearMatch | Producer
#: What the node computes, or why it is not read (as FP8-R010, or as a reason of its own).
Read = Callable[[fx.Node, Arguments], Match | Verdict | str]


@dataclass(frozen=True, slots=True)
class LibraryOp:
    """One entry of a dialect's table.

    Attributes:
        name: a regular expression for ``namespace::name`` of the schema, or for ``triton:name`` of
            the kernel that a launch runs.
        kind: ``norm``, ``activation``, ``quantize`` or ``scaled_mm``: what the report calls the
            site; ``linear``: a quantise and a product.
        known: names of the arguments whose meaning is known, None where that does not matter.
        read: reads a call.
        tested: where its meaning was taken from, and with which version.
        writes: names of the arguments that it writes to and does not read.
        changes: names of those that it reads and writes to.
        renamed: names that an argument has in other versions -> the one used here.
        ignored: names of arguments that change nothing of what is read.
        dialect: what the report gives as source; else the namespace.
        order: entries are asked in this order, then in that of the files.
    """

    name: str
    kind: str
    known: tuple[str, ...] | None
    read: Read
    tested: str
    writes: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    dialect: str = ""
    order: int = 100


@cache
def _table() -> tuple[LibraryOp, ...]:
    """The entries of every file of this folder."""
    package = importlib.import_module(__package__)
    found: list[LibraryOp] = []
    for info in pkgutil.iter_modules(package.__path__):
        found += getattr(importlib.import_module(f"{__package__}.{info.name}"), "OPS", ())
    return tuple(sorted(found, key=lambda op: op.order))


_found: dict[torch._ops.OpOverload, LibraryOp | None] = {}


def library_op(node: Any) -> LibraryOp | None:
    """The entry for the operator that ``node`` calls, None if it is not one of a known library."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    target = inner_operator(node) or node.target
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace in ("aten", "prims"):
            return None
        if target not in _found:
            _found[target] = _entry(name_of(node))
        return _found[target]
    if isinstance(target, torch._ops.HigherOrderOperator) and "kernel_idx" in node.kwargs:
        return _entry(name_of(node))
    return None


def _entry(name: str) -> LibraryOp | None:
    return next((op for op in _table() if re.fullmatch(op.name, name)), None)


def name_of(node: fx.Node) -> str:
    """``namespace::name`` of the operator that a call calls, or ``triton:name`` of a kernel."""
    target = inner_operator(node) or node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name)
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    index: Any = node.kwargs["kernel_idx"]
    kernel: Any = kernel_side_table.get_kernel(index)
    while hasattr(kernel, "fn"):  # an autotuner, the kernel, its Python function
        kernel = kernel.fn
    return f"triton:{kernel.__name__}"


def arguments_of(node: fx.Node) -> Arguments:
    """The arguments of a call by name, defaults filled in."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    bound: Arguments = {}
    positional = list(node.args)
    for argument in target._schema.arguments:
        if positional and not argument.kwarg_only:
            bound[argument.name] = positional.pop(0)
        else:
            default = argument.default_value if argument.has_default_value() else None
            bound[argument.name] = node.kwargs.get(argument.name, default)
    return bound


def match_library_op(node: fx.Node) -> Match | Verdict:
    """Read a call that :func:`library_op` knows, or say why not (FP8-R010)."""
    op = library_op(node)
    assert op is not None
    found = _read(op, node)
    if not isinstance(found, (str, Verdict)):
        made = list(found.all_nodes()) if isinstance(found, Producer) else [found.root]
        if isinstance(found, QuantMatch) and not found.form.static:
            made.append(found.scale)
        found = read_by_place(made) or found
    if isinstance(found, str):
        return no("FP8-R010", op=name_of(node), node=node.name, why=found)
    return found


def _read(op: LibraryOp, node: fx.Node) -> Match | Verdict | str:
    call = functional(node)
    target = node.target if call is None else call.op
    if not isinstance(target, torch._ops.OpOverload):
        return op.read(node, {})
    schema = target._schema
    if schema.overload_name:
        return "it is an overload that is not known"
    if op.known is None:
        return op.read(node, arguments_of(node) if call is None else call.given)
    names = dict(op.renamed)
    if call is None:
        if schema.is_mutable:
            return "it writes to its arguments"
        bound = arguments_of(node)
    else:
        why = _why_not_functional(op, call, names)
        if why is not None:
            return why
        bound = call.given
    bound = {names.get(name, name): value for name, value in bound.items()}
    missing = [name for name in op.known if name not in bound]
    if missing:
        return f"its schema has no argument {missing[0]}, unlike that of {op.tested}"
    for argument in schema.arguments:
        name = names.get(argument.name, argument.name)
        if name not in op.known and name not in op.ignored:
            default = argument.default_value if argument.has_default_value() else None
            if bound[name] != default:
                return f"its argument {name} is not known ({op.tested})"
    return op.read(node, bound)


def _why_not_functional(op: LibraryOp, call: Functional, names: dict[str, str]) -> str | None:
    """Why the arguments that a call writes to are not those that its entry says."""
    written = {names.get(name, name): name for name in call.places}
    known = {*op.writes, *op.changes}
    unlike = [name for name in written if name not in known]
    if unlike:
        return f"it writes to its argument {unlike[0]}, unlike that of {op.tested}"
    for name in op.changes:
        if written.get(name) in call.unknown:
            return f"its argument {name} is a part of another tensor"
    for name in op.writes:
        if name not in written:
            return f"it does not write to {name}, unlike that of {op.tested}"
        why = not_fresh(call, written[name])
        if why is not None:
            return why
    return None


def written(node: fx.Node, *names: str) -> tuple[fx.Node, ...]:
    """What reads an argument after a call in functional form wrote to it; one of its ``names``."""
    call = functional(node)
    return () if call is None else next((call.results(n) for n in names if n in call.places), ())


def result(node: fx.Node, index: int) -> fx.Node | None:
    """The only ``getitem`` of one result of a call, None if there is none, or several."""
    found = [u for u in node.users if is_call(u, operator.getitem) and u.args[1] == index]
    return found[0] if len(found) == 1 else None


def may_be_merged(node: fx.Node) -> bool:
    """Whether two equal calls are one: a quantise that was read (a stochastic one is not)."""
    op = library_op(node)
    return op is not None and op.kind == "quantize" and isinstance(_read(op, node), QuantMatch)


def merge_arguments(node: fx.Node) -> tuple[Any, Any]:
    """``(args, kwargs)`` of a call for comparing it with another one.

    Memory that a call in functional form was given to write to is not compared, but its layout is:
    it is the call's own (:func:`functionalised.not_fresh`) where the call is read.
    """
    call = functional(node)
    if call is None or not may_be_merged(node):
        return node.args, node.kwargs
    own = {id(call.given[name]) for name in call.places}

    def laid_out(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(laid_out(item) for item in value)
        if not isinstance(value, fx.Node) or id(value) not in own:
            return value
        held = value.meta["val"]
        return str((held.dtype, held.device, tuple(held.shape), held.stride()))

    return node.args, {name: laid_out(value) for name, value in node.kwargs.items()}
