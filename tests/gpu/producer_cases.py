"""Calls of the Triton producers for the tests on a GPU, and compiling them in parallel."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from fp8pass.ops import SPECS, QuantForm, dynamic_form, static_form

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
WIDTHS = (576, 1536, 4096, 5120, 8192, 14336)
ROWS = (0, 1, 3, 16, 255, 2048)
RECIPES = {
    "static": static_form(),
    "token": dynamic_form("token"),
    "tensor": dynamic_form("tensor"),
}
OPS = {
    "rms_norm_quant": "norm",
    "add_rms_norm_quant": "norm",
    "silu_mul_quant": "activation",
    "act_mul_quant": "activation",
    "quantize": "quantize",
}
ACTIVATIONS = ("silu_mul_quant", "act_mul_quant")
#: Operators of two tensors of one shape.
OF_TWO = (*ACTIVATIONS, "add_rms_norm_quant")
#: What fp8 e4m3fn rounds to: half a step of three bits, and of the numbers without them.
HALF_STEP, HALF_LEAST = 2.0**-4, 2.0**-10


class Case(NamedTuple):
    """``recipe``: a name of :data:`RECIPES`, or the text of a form."""

    op: str
    width: int
    dtype: torch.dtype
    recipe: str
    keep: bool = False


def kernel(op: str) -> Callable[..., Any]:
    """The Triton implementation of an operator."""
    import importlib

    module = importlib.import_module(f"fp8pass.kernels.triton_{OPS[op]}")
    function: Callable[..., Any] = getattr(module, op)
    return function


def reference(op: str) -> Callable[..., Any]:
    return SPECS[op].reference


def values(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random values of several binades, with a row of zeros if there are three."""
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, width, device="cuda", generator=g)
    x *= torch.rand(width, device="cuda", generator=g) * 4
    if rows > 2:
        x[2] = 0
    return x.to(dtype)


def form_of(op: str, dtype: torch.dtype, weight: str = "after_cast") -> str:
    """The form of a Llama in ``dtype``; of a Gemma's activation for ``act_mul_quant``."""
    name = str(dtype).removeprefix("torch.")
    if "norm" in op:
        return f"mean,rsqrt,{weight},{name}"
    return f"{'div' if op == 'silu_mul_quant' else 'gelu_tanh'},{name},{name}"


def arguments(
    op: str,
    rows: int,
    width: int,
    dtype: torch.dtype,
    quant: QuantForm,
    *,
    keep: bool = False,
    seed: int = 0,
) -> tuple[Any, ...]:
    """Arguments of one call; gate and up are halves of one tensor."""
    scale = torch.tensor(0.01, device="cuda") if quant.static else None
    if op == "quantize":
        return values(rows, width, dtype, seed), scale, str(quant)
    if op in ACTIVATIONS:
        gate, up = values(rows, 2 * width, dtype, seed).chunk(2, -1)
        return gate, up, scale, form_of(op, dtype), str(quant), keep
    weight = (values(1, width, F32, seed + 1)[0] * 0.1 + 1).to(dtype)
    rest = (weight, scale, 1e-6, form_of(op, dtype), str(quant), keep)
    if op == "rms_norm_quant":
        return values(rows, width, dtype, seed), *rest
    return values(rows, width, dtype, seed), values(rows, width, dtype, seed + 2), *rest


def exact(op: str, args: tuple[Any, ...]) -> torch.Tensor:
    """What is quantised, in float64 and without a rounding."""
    if op == "quantize":
        return args[0].double()
    if op == "silu_mul_quant":
        gate, up = args[0].double(), args[1].double()
        return gate * gate.sigmoid() * up
    if op == "act_mul_quant":
        gate, up = args[0].double(), args[1].double()
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    x = args[0].double()
    if op == "add_rms_norm_quant":
        x = (args[0] + args[1]).double()  # the sum has a dtype of its own
    weight, eps = args[-6], args[-4]
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


# ---- compiling ----------------------------------------------------------------------------------


def _compile(cases: list[Case]) -> None:
    for op, width, dtype, recipe, keep in cases:
        quant = RECIPES.get(recipe) or QuantForm.parse(recipe)
        for rows in (2, 200, 2048):  # the launch shapes of a width
            kernel(op)(*arguments(op, rows, width, dtype, quant, keep=keep))


def compile_in_parallel(cases: Iterable[Case]) -> None:
    """Fill Triton's cache on the disk from several processes: one alone would take minutes."""
    listed = list(cases)
    workers = max(1, min(12, (os.cpu_count() or 1) - 2))
    if workers == 1:
        return
    shares = [listed[i::workers] for i in range(workers)]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, shares))
