"""Operators of quantisation libraries, read from the arguments of their schema.

A library may be absent, or be imported long after fp8pass, so no operator is ever looked up: a node
of the graph carries its operator, and the name in that operator's schema is what the tables of
:mod:`fp8pass.spellings.fbgemm`, :mod:`~fp8pass.spellings.finegrained` and
:mod:`~fp8pass.spellings.torchao` are keyed by.

Such an operator is opaque: what it computes is what its library documents and its source shows, in
the version that the table's entry names. An argument that the entry does not know must have its
default value: then the operator does what it did before the argument was added.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8pass.ops.forms import QuantForm
from fp8pass.reasons import Verdict, no
from fp8pass.spellings.by_place import read_by_place
from fp8pass.spellings.quantize import QuantMatch
from fp8pass.spellings.walk import is_call


@dataclass(frozen=True, slots=True)
class ProductMatch:
    """One scaled product of a library.

    Attributes:
        a: codes ``[M, K]``.
        weight: codes ``[N, K]``, as the library takes them; the generic operator reads ``.t()``.
        scale_a: ``[M]`` or ``[M, 1]``.
        scale_b: ``[N]``, ``[N, 1]`` or ``[1, N]``.
        act_key, weight_key: see :class:`fp8pass.quant_key.QuantKey`.
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
Match = QuantMatch | ProductMatch | LinearMatch
#: What the node computes, or why it is not read.
Read = Callable[[fx.Node, Arguments], Match | str]


@dataclass(frozen=True, slots=True)
class LibraryOp:
    """One entry of a dialect's table.

    Attributes:
        name: a regular expression for ``namespace::name`` of the schema, or for ``triton:name`` of
            the kernel that a launch runs.
        kind: ``quantize`` or ``scaled_mm``: what the report calls the site; ``linear``: both.
        known: names of the arguments whose meaning is known, None where that does not matter.
        read: reads a call.
        tested: where its meaning was taken from, and with which version.
    """

    name: str
    kind: str
    known: tuple[str, ...] | None
    read: Read
    tested: str


def _table() -> tuple[LibraryOp, ...]:
    from fp8pass.spellings import fbgemm, finegrained, torchao

    return (*fbgemm.OPS, *finegrained.OPS, *torchao.OPS)


_found: dict[torch._ops.OpOverload, LibraryOp | None] = {}


def library_op(node: Any) -> LibraryOp | None:
    """The entry for the operator that ``node`` calls, None if it is not one of a known library."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace in ("aten", "prims"):
            return None
        if target not in _found:
            _found[target] = _entry(_name(node))
        return _found[target]
    if isinstance(target, torch._ops.HigherOrderOperator) and "kernel_idx" in node.kwargs:
        return _entry(_name(node))
    return None


def _entry(name: str) -> LibraryOp | None:
    return next((op for op in _table() if re.fullmatch(op.name, name)), None)


def _name(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target._schema.name)
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
    if not isinstance(found, str):
        made = [found.root]
        if isinstance(found, QuantMatch) and not found.form.static:
            made.append(found.scale)
        found = read_by_place(made) or found
    if isinstance(found, str):
        return no("FP8-R010", op=_name(node), node=node.name, why=found)
    return found


def _read(op: LibraryOp, node: fx.Node) -> Match | str:
    if not isinstance(node.target, torch._ops.OpOverload):
        return op.read(node, {})
    schema = node.target._schema
    if schema.is_mutable or schema.overload_name:
        return "it writes to its arguments, or is an overload that is not known"
    bound = arguments_of(node)
    if op.known is None:
        return op.read(node, bound)
    missing = [name for name in op.known if name not in bound]
    if missing:
        return f"its schema has no argument {missing[0]}, unlike that of {op.tested}"
    for argument in schema.arguments:
        if argument.name not in op.known:
            default = argument.default_value if argument.has_default_value() else None
            if bound[argument.name] != default:
                return f"its argument {argument.name} is not known ({op.tested})"
    return op.read(node, bound)


def result(node: fx.Node, index: int) -> fx.Node | None:
    """The only ``getitem`` of one result of a call, None if there is none, or several."""
    found = [u for u in node.users if is_call(u, operator.getitem) and u.args[1] == index]
    return found[0] if len(found) == 1 else None


def may_be_merged(node: fx.Node) -> bool:
    """Whether two equal calls are one: a quantise that was read (a stochastic one is not)."""
    op = library_op(node)
    return op is not None and op.kind == "quantize" and not isinstance(_read(op, node), str)
