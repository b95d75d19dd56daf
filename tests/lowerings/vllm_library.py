"""A stand-in for vLLM's fused norms, SiLU·mul and quantises: their schemas, checks and arithmetic.

Written after ``csrc/`` of vLLM (``layernorm_quant_kernels.cu``, ``quantization/fused_kernels``,
``quantization/w8a8/fp8``, ``quantization/activation_kernels.cu``): like those it writes into
buffers, overwrites a residual, reads rows as if they were packed, and lets a NaN become the largest
code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

Tensor = torch.Tensor
SCHEMAS = json.loads((Path(__file__).parents[1] / "golden/schemas.json").read_text())
SPACE = "fp8pass_test_vllm"
TOP = 448.0
FLOOR = 1.0 / (448.0 * 512.0)


def _packed(*tensors: Tensor | None) -> None:
    assert all(t is None or (t.is_contiguous() and not t.data_ptr() % 16) for t in tensors)


def _put(out: Tensor, value: Tensor) -> None:
    """``fmaxf(-448, fminf(x, 448))``: a NaN becomes 448."""
    assert out.dtype == torch.float8_e4m3fn and out.shape == value.shape and out.is_contiguous()
    out.copy_(value.nan_to_num(nan=TOP).clamp(-TOP, TOP))


def _amax(value: Tensor) -> Tensor:
    return value.abs().nan_to_num(nan=0.0).amax(-1, keepdim=True)


def _normed(wide: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rounded before the weight and behind it."""
    inverse = torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) / wide.shape[-1] + eps)
    return ((wide * inverse).to(weight.dtype) * weight).float()


def _one(scale: Tensor) -> Tensor:
    assert scale.dtype == torch.float32 and scale.shape == (1,)
    return 1.0 / scale


def rms_norm_static_fp8_quant(out: Any, x: Any, weight: Any, scale: Any, eps: float) -> None:
    _packed(out, x, weight)
    assert weight.dtype == x.dtype
    _put(out, _normed(x.float(), weight, eps) * _one(scale))


def fused_add_rms_norm_static_fp8_quant(
    out: Any, x: Any, residual: Any, weight: Any, scale: Any, eps: float
) -> None:
    _packed(out, x, residual, weight)
    assert weight.dtype == residual.dtype == x.dtype
    residual.add_(x)  # rounded, and read again
    _put(out, _normed(residual.float(), weight, eps) * _one(scale))


def _wide_sum(x: Tensor, residual: Tensor | None) -> Tensor:
    wide = x.float()
    if residual is not None:
        assert residual.dtype == x.dtype and residual.shape == x.shape
        wide = wide + residual.float()
        residual.copy_(wide)
    return wide


def rms_norm_dynamic_per_token_quant(
    out: Any, x: Any, weight: Any, scale: Any, eps: float, scale_ub: Any, residual: Any
) -> None:
    _packed(out, x, weight, scale, residual)
    assert scale.shape == (x.shape[0], 1) and scale.dtype == torch.float32 and scale_ub is None
    value = _normed(_wide_sum(x, residual), weight, eps)
    scale.copy_((_amax(value) / TOP).clamp(min=FLOOR))
    _put(out, value / scale)


def rms_norm_per_block_quant(
    out: Any, x: Any, weight: Any, scale: Any, eps: float, scale_ub: Any, residual: Any,
    group: int, transposed: bool,
) -> None:  # fmt: skip
    _packed(out, x, weight, scale, residual)
    assert group in (64, 128) and scale_ub is None and not transposed
    assert scale.shape == (x.shape[0], x.shape[1] // group)
    parts = _normed(_wide_sum(x, residual), weight, eps).unflatten(-1, (-1, group))
    made = (_amax(parts) / TOP).clamp(min=FLOOR)
    scale.copy_(made.squeeze(-1))
    _put(out, (parts / made).flatten(-2))


def _halves(both: Tensor) -> tuple[Tensor, Tensor]:
    _packed(both)
    assert both.dtype in (torch.bfloat16, torch.float16) and not both.shape[-1] % 32
    return both.chunk(2, -1)


def silu_and_mul_quant(out: Any, both: Any, scale: Any) -> None:
    gate, up = _halves(both)
    wide = gate.float()
    silu = (wide / (1.0 + torch.exp(-wide))).to(gate.dtype)
    _put(out, (silu * up).float() * _one(scale))


def silu_and_mul_per_block_quant(
    out: Any, both: Any, scale: Any, group: int, scale_ub: Any = None, transposed: bool = False
) -> None:
    gate, up = _halves(both)
    assert group in (64, 128) and scale_ub is None and not transposed
    wide = gate.float()
    parts = (wide / (1.0 + torch.exp(-wide)) * up.float()).unflatten(-1, (-1, group))
    made = (_amax(parts) / TOP).clamp(min=FLOOR)
    scale.copy_(made.squeeze(-1))
    _put(out, (parts / made).flatten(-2))


def static_scaled_fp8_quant(out: Any, x: Any, scale: Any, group_shape: Any = None) -> None:
    assert group_shape is None
    _put(out, x.float() * _one(scale))


def dynamic_scaled_fp8_quant(out: Any, x: Any, scale: Any) -> None:
    assert scale.shape == (1,)
    scale.copy_(_amax(x.float()).amax() / TOP)
    _put(out, x.float() * (1.0 / scale))


def dynamic_per_token_scaled_fp8_quant(out: Any, x: Any, scale: Any, scale_ub: Any) -> None:
    assert scale.shape == (x.shape[0], 1)
    amax = _amax(x.float())
    if scale_ub is not None:
        assert scale_ub.dtype == torch.float32 and scale_ub.numel() == 1
        amax = torch.minimum(amax, scale_ub)
    scale.copy_((amax / TOP).clamp(min=FLOOR))
    _put(out, x.float() / scale)


def per_token_group_fp8_quant(
    x: Any, out: Any, scale: Any, group: int, eps: float, low: float, high: float, ue8m0: bool,
    *flags: bool,
) -> None:  # fmt: skip
    _packed(x, out)
    assert (low, high) == (-TOP, TOP) and not ue8m0 and not any(flags)
    assert scale.shape == (x.shape[0], x.shape[1] // group) and scale.is_contiguous()
    parts = x.float().unflatten(-1, (-1, group))
    made = _amax(parts).clamp(min=eps) / high
    scale.copy_(made.squeeze(-1))
    _put(out, (parts / made).flatten(-2))


OPERATORS = (
    rms_norm_static_fp8_quant, fused_add_rms_norm_static_fp8_quant,
    rms_norm_dynamic_per_token_quant, rms_norm_per_block_quant, silu_and_mul_quant,
    silu_and_mul_per_block_quant, static_scaled_fp8_quant, dynamic_scaled_fp8_quant,
    dynamic_per_token_scaled_fp8_quant, per_token_group_fp8_quant,
)  # fmt: skip


@contextmanager
def loaded(older: bool = False) -> Iterator[list[str]]:
    """The operators in a namespace of their own, on a CPU; yields the names of those called."""
    library = torch.library.Library(SPACE, "FRAGMENT")
    seen: list[str] = []
    for kernel in OPERATORS:
        name = kernel.__name__
        key = f"_C::{name} before its flags" if older else f"_C::{name}"
        schema = SCHEMAS.get(key, SCHEMAS[f"_C::{name}"])["schema"]
        library.define(schema.removeprefix("_C::"))

        def call(*args: Any, _kernel: Any = kernel) -> None:
            seen.append(_kernel.__name__)
            _kernel(*args)

        library.impl(name, call, "CPU")
    try:
        yield seen
    finally:
        library._destroy()
        for kernel in OPERATORS:
            getattr(torch.ops, SPACE).__dict__.pop(kernel.__name__, None)


def operator(name: str) -> Any:
    """What stands in for :func:`fp8pass.lowerings.external.vllm_operator`."""
    return getattr(getattr(torch.ops, SPACE), name)
