"""Helpers that readers share: constants, lossless casts, commutative operands, views, positions.

All of them answer "not known" (None, False) rather than guess, and none adds a guard on a symbolic
size: sizes are compared with :func:`same` only, which says no where it cannot be proven.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass.target import HOST

aten = torch.ops.aten
prims = torch.ops.prims

ADD = (aten.add.Tensor, aten.add.Scalar)
MUL = (aten.mul.Tensor, aten.mul.Scalar)
DIV = (aten.div.Tensor, aten.div.Scalar)
CAST = (prims.convert_element_type.default, aten._to_copy.default)
#: The only operators that a reader looks through because they change the shape alone.
VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
)
#: Casts that lose nothing; every other cast rounds and is part of a form, or not read.
_WIDENING = frozenset(
    {
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float8_e4m3fn, torch.float32),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.float8_e4m3fn, torch.float16),
    }
)


def is_call(node: Any, *targets: Any) -> TypeGuard[Any]:
    """Whether ``node`` calls one of ``targets``."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def val(node: Any) -> Any:
    """The fake value of a node, None if it has none."""
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def tensor(node: Any) -> torch.Tensor | None:
    """The fake tensor of a node, None if it is not a tensor."""
    value = val(node)
    return value if isinstance(value, torch.Tensor) else None


def dtype_of(node: Any) -> torch.dtype | None:
    """Dtype of a node's value."""
    value = tensor(node)
    return None if value is None else value.dtype


def same(a: Any, b: Any) -> bool:
    """Whether two sizes are known to be equal; False where that cannot be shown."""
    if type(a) is int and type(b) is int:
        return a == b
    return bool(statically_known_true(a == b))


def same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two shapes are known to be equal."""
    return a.dim() == b.dim() and all(same(x, y) for x, y in zip(a.shape, b.shape, strict=True))


def contiguous(value: torch.Tensor) -> bool:
    """Whether a (fake) tensor is known to be contiguous; strides of size-1 dims do not count."""
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not same(size, 1) and not same(stride, expected):
            return False
        expected = expected * size
    return True


def one_element(value: torch.Tensor) -> bool:
    """Whether a tensor is known to have exactly one element."""
    return all(same(size, 1) for size in value.shape)


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """An argument of a call, given by position or by name."""
    if len(node.args) > index:
        return node.args[index]
    return node.kwargs.get(name, default)


def scalar(value: Any) -> float | None:
    """A Python number, or that of a node that holds one constant (``full``, a constant tensor)."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, fx.Node):
        return None
    if value.op == "get_attr":
        owner: Any = value.graph.owning_module
        for part in str(value.target).split("."):
            owner = getattr(owner, part, None)
        # a plain tensor only: a parameter or a buffer may change after compiling
        if type(owner) is torch.Tensor and owner.numel() == 1 and not _is_buffer(value):
            with unset_fake_temporarily():
                return float(owner)
        return None
    if is_call(value, aten.lift_fresh_copy.default):
        return scalar(value.args[0])
    if is_call(value, aten.full.default) and isinstance(value.args[1], (int, float)):
        held = tensor(value)
        if held is None or not one_element(held):
            return None
        # what the tensor holds: a narrow dtype rounds the number it is filled with
        with unset_fake_temporarily():
            return float(torch.tensor(value.args[1], dtype=held.dtype, device=HOST))
    return None


def _is_buffer(node: fx.Node) -> bool:
    module = node.graph.owning_module
    if module is None:
        return True
    names = {name for name, _ in module.named_buffers()} | {n for n, _ in module.named_parameters()}
    return str(node.target) in names


def cast_to(node: Any) -> torch.dtype | None:
    """The dtype a node casts to if it is a pure dtype cast, else None."""
    if is_call(node, prims.convert_element_type.default):
        target = argument(node, 1, "dtype")
        return target if isinstance(target, torch.dtype) else None
    if is_call(node, aten._to_copy.default):
        extra = {k: v for k, v in node.kwargs.items() if v is not None}
        dtype = extra.pop("dtype", None)
        extra.pop("memory_format", None)
        return dtype if not extra and isinstance(dtype, torch.dtype) else None
    return None


def peel_widening(node: Any) -> Any:
    """Strip casts that lose nothing (and no-op clones); the value is the same number."""
    while isinstance(node, fx.Node):
        target = cast_to(node)
        if target is not None:
            source = dtype_of(node.args[0])
            if source != target and (source, target) not in _WIDENING:
                return node
        elif not is_call(node, aten.alias.default):
            return node
        node = node.args[0]
    return node


def peel_views(node: Any) -> Any:
    """Strip shape-only operators."""
    while is_call(node, *VIEWS):
        node = node.args[0]
    return node


def commuted(
    node: Any, targets: tuple[Any, ...], wanted: Callable[[Any], Any]
) -> tuple[Any, Any] | None:
    """For ``op(a, b)`` in either order: ``(wanted(a), b)`` for the operand that ``wanted`` takes.

    ``add`` and ``mul`` with an ``alpha`` are not plain and give None.
    """
    if not is_call(node, *targets) or len(node.args) != 2 or node.kwargs:
        return None
    for i in (0, 1):
        found = wanted(node.args[i])
        if found is not None and found is not False:
            return found, node.args[1 - i]
    return None


def is_last_dim(node: Any, dims: Any) -> bool:
    """Whether ``dims`` names the last dim of ``node`` and nothing else; negative or positive."""
    value = tensor(node)
    dims = list(dims) if isinstance(dims, (list, tuple)) else [dims]
    if value is None or value.dim() == 0 or len(dims) != 1 or not isinstance(dims[0], int):
        return False
    return bool(dims[0] % value.dim() == value.dim() - 1)


def only_user(node: fx.Node) -> fx.Node | None:
    """The single user of a node, None if there are none or several."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def item(node: Any, index: int) -> Any:
    """For ``getitem(x, index)``: x, else None."""
    return node.args[0] if is_call(node, operator.getitem) and node.args[1] == index else None


#: What Dynamo's name of a module starts with: a local or global variable of the frame that was
#: compiled, which is what its author called ``self``, or an argument of a wrapper around it.
ROOT = re.compile(
    r"[LG]\['([^']*)'\](?:\[\d+\])?"
    r"(?:\.(?:args\[\d+\]|keywords\['[^']*'\]|func|__self__|_torchdynamo_orig_callable))*"
)


def module_path(name: str) -> str:
    """The path of a module from its name in ``nn_module_stack``, as ``named_modules`` gives it.

    Dynamo writes ``L['self'].model.layers[0].attn``, or ``L['self']._modules['model']...``; what
    ``self`` is called there is no part of the path, unless there is nothing else.
    """
    root = ROOT.match(name)
    rest = name if root is None else name[root.end() :]
    path = re.sub(r"\._modules\['([^']*)'\]|\['([^']*)'\]|\[(\d+)\]", r".\1\2\3", rest)
    path = re.sub(r"^\.?(self\b)?\.?", "", path)
    if not path and root is not None and root[1] not in ("self", "fn", "args"):
        path = root[1]
    return re.sub(r"\s", "_", path)  # a place in the source follows behind a space


def where(node: fx.Node) -> str:
    """Module path and source line of a node, as far as the graph knows them."""
    parts = []
    stack = node.meta.get("nn_module_stack")
    if stack:
        parts.append(module_path(list(stack.values())[-1][0]))
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    if lines:
        file, _, rest = lines[-1].removeprefix("File ").partition(", line ")
        parts.append(f"{file.strip(chr(34)).rsplit('/', 1)[-1]}:{rest.split(',')[0]}")
    return " ".join(part for part in parts if part)
