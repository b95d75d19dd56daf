"""Operators that one kernel stands behind, and which kernel that is on which kind of device.

Each has the fake and the semantics of a generic operator. The reference is registered for every
device, so that a graph made for an absent device can be interpreted on a CPU; the kernel is
registered for its own kind of device and imported on its first call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from fp8pass.ops import activation, linear, norm, quantize
from fp8pass.ops.library import LIBRARY, OpSpec, register
from fp8pass.quant_key import QuantKey


def _kernel(module: str, name: str) -> Callable[..., Any]:
    """``module.name``, imported on the first call: importing a kernel imports Triton."""
    found: ModuleType | None = None

    def call(*args: Any) -> Any:
        nonlocal found
        if found is None:
            found = importlib.import_module(module)
        return getattr(found, name)(*args)

    return call


#: torch's dispatch key of GPUs, ROCm's too.
_GPU = "CUDA"
_CPU = "CPU"


def _with_kernel(spec: OpSpec, kernel: Callable[..., Any], key: str = _GPU) -> OpSpec:
    register(spec)
    LIBRARY.impl(spec.name, kernel, key)
    return spec


def _producer(base: OpSpec, module: str) -> OpSpec:
    spec = OpSpec(
        f"triton_{base.name}",
        base.schema,
        base.reference,
        base.fake,
        base.inputs,
        1e-3,
        "the order of a reduction, and the last bits of exp, erf, tanh and rsqrt",
    )
    return _with_kernel(spec, _kernel(f"fp8pass.kernels.{module}", base.name))


TRITON_RMS_NORM_QUANT = _producer(norm.RMS_NORM_QUANT, "triton_norm")
TRITON_ADD_RMS_NORM_QUANT = _producer(norm.ADD_RMS_NORM_QUANT, "triton_norm")
TRITON_SILU_MUL_QUANT = _producer(activation.SILU_MUL_QUANT, "triton_activation")
TRITON_ACT_MUL_QUANT = _producer(activation.ACT_MUL_QUANT, "triton_activation")
TRITON_QUANTIZE = _producer(quantize.SPEC, "triton_quantize")


# ---- products -----------------------------------------------------------------------------------

_OPERANDS = (
    "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype"
)
_AS_GENERIC = "as scaled_mm"


def _reference(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *how: Any,
) -> torch.Tensor:
    """As :func:`fp8pass.ops.linear.scaled_mm`; ``how`` says which kernel, not what it computes."""
    return linear.dequantised_product(a, b, scale_a, scale_b, bias, out_dtype)


def _inputs(*how: Any) -> Callable[[torch.Generator], Iterator[tuple[Any, ...]]]:
    def inputs(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
        for *operands, _ in linear.operands(generator):
            yield *operands, *how

    return inputs


def _product(
    name: str, rest: str, kernel: Callable[..., Any], *how: Any, key: str = _GPU
) -> OpSpec:
    spec = OpSpec(
        name,
        f"{_OPERANDS}{rest}) -> Tensor",
        _reference,
        linear.fake_scaled_mm,
        _inputs(*how),
        0.0,
        _AS_GENERIC,
    )
    return _with_kernel(spec, kernel, key)


_cpu_scaled_mm = _kernel("fp8pass.kernels.cpu", "scaled_mm")

#: fp8pass's own product on a CPU; ``prepared`` is the weight copy made by :func:`fp8pass.prepare`.
CPU_SCALED_MM = _product("cpu_scaled_mm", ", Tensor? prepared", _cpu_scaled_mm, None, key=_CPU)


def _generic_on_cpu(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    act_key: str,
    weight_key: str,
    use_fast_accum: bool,
    prepared: torch.Tensor | None,
    form: str = "",
) -> torch.Tensor:
    """The own product where it computes what the keys and the form say, else the reference."""
    kinds = [QuantKey.parse(key).granularity for key in (act_key, weight_key)]
    plain = all(kind in ("tensor", "token", "channel") for kind in kinds)
    if form or not plain or torch.int8 in (a.dtype, b.dtype):
        return linear.scaled_product(
            a, b, scale_a, scale_b, bias, out_dtype, act_key, weight_key, form
        )
    scale_a, scale_b = map(linear.shaped_scale, (scale_a, scale_b), kinds)
    return _cpu_scaled_mm(a, b, scale_a, scale_b, bias, out_dtype, prepared)


LIBRARY.impl(linear.SCALED_MM.name, _generic_on_cpu, _CPU)

#: fp8pass's own product on a GPU; ``kind`` is ``"skinny"`` (few rows) or ``"general"``.
TRITON_SCALED_MM = _product(
    "triton_scaled_mm",
    ", bool fast_accum, str kind",
    _kernel("fp8pass.kernels.triton_gemm", "scaled_mm"),
    False,
    "skinny",
)
#: vLLM's CUTLASS product, where its library is loaded; it always accumulates in less than float32.
VLLM_CUTLASS_SCALED_MM = _product(
    "vllm_cutlass_scaled_mm", "", _kernel("fp8pass.lowerings.vllm_cutlass", "run_operator")
)


def _block_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *how: Any,
) -> torch.Tensor:
    """As ``scaled_mm`` with one scale per 1x128 of ``a`` and per 128x128 of ``b``."""
    return linear.scaled_product(a, b, scale_a, scale_b, bias, out_dtype, *BLOCK_KEYS, "")


BLOCK_KEYS = ("float8_e4m3fn/dynamic/group1x128", "float8_e4m3fn/static/group128x128")


def _block_inputs(*how: Any) -> Callable[[torch.Generator], Iterator[tuple[Any, ...]]]:
    def inputs(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
        for m, n, k in ((1, 128, 512), (3, 256, 512), (16, 128, 1024), (0, 128, 512)):
            a = (torch.randn(m, k, generator=generator) * 16).to(torch.float8_e4m3fn)
            b = (torch.randn(n, k, generator=generator) * 16).to(torch.float8_e4m3fn)
            scale_a = torch.rand(m, k // 128, generator=generator) + 0.01
            scale_b = torch.rand(n // 128, k // 128, generator=generator) + 0.01
            yield a, b.t(), scale_a, scale_b.t(), None, torch.bfloat16, *how

    return inputs


#: torch's own product with a scale per block.
TORCH_BLOCK_SCALED_MM = _with_kernel(
    OpSpec(
        "torch_block_scaled_mm",
        f"{_OPERANDS}, bool fast_accum) -> Tensor",
        _block_reference,
        linear.fake_scaled_mm,
        _block_inputs(False),
        0.0,
        _AS_GENERIC,
    ),
    _kernel("fp8pass.lowerings.torch_block", "run_operator"),
)
#: Several kernels by number of rows; see :mod:`fp8pass.lowerings.planned`.
SCALED_MM_PLANNED = _product(
    "scaled_mm_planned",
    ", bool fast_accum, str plan",
    _kernel("fp8pass.lowerings.planned", "run_planned"),
    False,
    "0-16=triton_skinny;17-=torch_row",
)


def _planned_on_cpu(*args: Any) -> torch.Tensor:
    """The plan where its kernels are for CPUs; else the reference, as for every other operator of a
    graph for an absent device."""
    from fp8pass.lowerings.planned import plan_is_for, run_planned

    if plan_is_for(args[-1], "cpu"):
        return run_planned(*args)
    return _reference(*args)


LIBRARY.impl(SCALED_MM_PLANNED.name, _planned_on_cpu, _CPU)
