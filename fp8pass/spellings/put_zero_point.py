"""Puts a scale and its zero point into the one tensor that the generic quantise has for both."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8pass.spellings.quantize import QuantMatch, clamped
from fp8pass.spellings.walk import VIEWS, aten, cast_to, dtype_of, is_call, val
from fp8pass.workbench import Workbench

_WHOLE = (torch.int32, torch.int64)
_CONVERT = torch.ops.prims.convert_element_type.default


def given_pair(bench: Workbench, root: fx.Node, scale: fx.Node, zero: fx.Node) -> fx.Node:
    """``[2]`` in float32 from a scale and a zero point of one element each, before ``root``."""
    with bench.graph.inserting_before(root):
        parts = []
        for part in (scale, zero):
            if dtype_of(part) != torch.float32:
                part = bench.call(_CONVERT, (part, torch.float32), root)
            parts.append(bench.call(aten.reshape.default, (part, [1]), root))
        return bench.call(aten.cat.default, (parts,), root)


def put_pair(bench: Workbench, pair: fx.Node, found: QuantMatch) -> tuple[fx.Node, fx.Node]:
    """The scale and the zero point of a dynamic quantise, as nodes behind ``pair``.

    ``[..., 1]`` each, or 0-d per tensor; the zero point in the dtype that it had.
    """
    with bench.graph.inserting_after(pair):
        whole = found.form.granularity == "tensor"
        parts = []
        for i in (1, 0):  # each is inserted right behind the pair: the last one comes first
            if whole:
                parts.append(bench.call(aten.select.int, (pair, 0, i), found.root))
            else:
                last = val(pair).dim() - 1
                parts.append(bench.call(aten.slice.Tensor, (pair, last, i, i + 1), found.root))
        zero, scale = parts
    wanted = dtype_of(found.zero)
    if wanted != torch.float32:
        with bench.graph.inserting_after(zero):
            zero = bench.call(_CONVERT, (zero, wanted), found.root)
    return scale, zero


def clamped_zero(node: fx.Node) -> bool:
    """Whether ``node`` is a zero point that int8 holds: an integer that was clamped as one.

    Not one that was clamped before it was made an integer: NaN passes a clamp, and is no code
    afterwards (on CPUs the smallest int32, where int8 has 0).
    """
    inner: Any = node
    while is_call(inner, *VIEWS) or cast_to(inner) in _WHOLE and dtype_of(inner.args[0]) in _WHOLE:
        inner = inner.args[0]
    limits = clamped(inner)
    return (
        dtype_of(inner) in _WHOLE and limits is not None and -128 <= limits[1] <= limits[2] <= 127
    )
