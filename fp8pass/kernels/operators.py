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

from fp8pass.ops import activation, layer_norm, linear, norm, quantize, weight_only
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
_XPU = "XPU"


def _with_kernel(spec: OpSpec, kernel: Callable[..., Any], key: str = _GPU) -> OpSpec:
    register(spec)
    LIBRARY.impl(spec.name, kernel, key)
    return spec


def _producer(base: OpSpec, module: str) -> OpSpec:
    return _producer_of("triton", base, f"fp8pass.kernels.{module}")


def _producer_of(library: str, base: OpSpec, module: str) -> OpSpec:
    """The operator ``<library>_<base>``, run by the function ``base`` of ``module``."""
    spec = OpSpec(
        f"{library}_{base.name}",
        base.schema,
        base.reference,
        base.fake,
        base.inputs,
        1e-3,
        "the order of a reduction, and the last bits of exp, erf, tanh and rsqrt",
    )
    return _with_kernel(spec, _kernel(module, base.name))


TRITON_RMS_NORM_QUANT = _producer(norm.RMS_NORM_QUANT, "triton_norm")
TRITON_ADD_RMS_NORM_QUANT = _producer(norm.ADD_RMS_NORM_QUANT, "triton_norm")
TRITON_LAYER_NORM_QUANT = _producer(layer_norm.LAYER_NORM_QUANT, "triton_layer_norm")
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


def _keyed_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    act_key: str,
    weight_key: str,
) -> torch.Tensor:
    """As :func:`fp8pass.ops.linear.scaled_mm` in the plain form."""
    return linear.scaled_product(a, b, scale_a, scale_b, bias, out_dtype, act_key, weight_key, "")


def _product(
    name: str,
    rest: str,
    kernel: Callable[..., Any],
    *how: Any,
    key: str = _GPU,
    reference: Callable[..., Any] = _reference,
    inputs: Callable[[torch.Generator], Iterator[tuple[Any, ...]]] | None = None,
) -> OpSpec:
    spec = OpSpec(
        name,
        f"{_OPERANDS}{rest}) -> Tensor",
        reference,
        linear.fake_scaled_mm,
        inputs or _inputs(*how),
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
    zero_point: torch.Tensor | None = None,
) -> torch.Tensor:
    """The own product where it computes what the keys and the form say, else the reference."""
    kinds = [QuantKey.parse(key).granularity for key in (act_key, weight_key)]
    plain = all(kind in ("tensor", "token", "channel") for kind in kinds)
    own = (torch.float8_e4m3fn, torch.float8_e5m2)
    if form or not plain or a.dtype not in own or b.dtype not in own:
        return linear.scaled_product(
            a, b, scale_a, scale_b, bias, out_dtype, act_key, weight_key, form, zero_point
        )
    if prepared is not None and prepared.dtype != torch.bfloat16:
        prepared = None  # laid out for another device
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
#: torch's product without scales, and one launch for them.
TORCH_RESCALED_MM = _product(
    "torch_rescaled_mm",
    ", bool fast_accum",
    _kernel("fp8pass.kernels.triton_rescale", "scaled_mm"),
    False,
)
#: vLLM's CUTLASS product, where its library is loaded; it always accumulates in less than float32.
VLLM_CUTLASS_SCALED_MM = _product(
    "vllm_cutlass_scaled_mm", "", _kernel("fp8pass.lowerings.vllm_cutlass", "run_operator")
)


# ---- products with scales per block, and plans ---------------------------------------------------

BLOCK_KEYS = "float8_e4m3fn/dynamic/group1x128", "float8_e4m3fn/static/group128x128"


def _block_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *how: Any,
) -> torch.Tensor:
    """Scales per 1x128 and 128x128: ``[M, K / 128]`` and ``[K / 128, N / 128]``, rounded up."""
    return _keyed_reference(a, b, scale_a, scale_b, bias, out_dtype, *BLOCK_KEYS)


def block_inputs(*how: Any) -> Callable[[torch.Generator], Iterator[tuple[Any, ...]]]:
    """Random operands with scales per block, the last block cut short in some."""

    def inputs(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
        for m, k, n in ((3, 256, 128), (1, 200, 72), (0, 128, 128)):
            a = (torch.randn(m, k, generator=generator) * 16).to(torch.float8_e4m3fn)
            w = (torch.randn(n, k, generator=generator) * 16).to(torch.float8_e4m3fn)
            groups, blocks = -(-k // 128), -(-n // 128)
            scale_a = torch.rand((m, groups), generator=generator) + 0.01
            scale_b = torch.rand((blocks, groups), generator=generator) + 0.01
            bias = torch.randn(n, generator=generator).to(torch.bfloat16)
            yield a, w.t(), scale_a, scale_b.t(), bias, torch.bfloat16, *how

    return inputs


def _keyed_inputs(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for *operands, keys in linear.operands(generator):
        yield *operands, *keys
    yield from block_inputs(*BLOCK_KEYS)(generator)


def _torch_block_inputs(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for m, n, k in ((1, 128, 512), (3, 256, 512), (16, 128, 1024), (0, 128, 512)):
        a = (torch.randn(m, k, generator=generator) * 16).to(torch.float8_e4m3fn)
        w = (torch.randn(n, k, generator=generator) * 16).to(torch.float8_e4m3fn)
        scale_a = torch.rand((m, k // 128), generator=generator) + 0.01
        scale_b = torch.rand((n // 128, k // 128), generator=generator) + 0.01
        yield a, w.t(), scale_a, scale_b.t(), None, torch.bfloat16, False


#: torch's own product with those scales, for any number of rows.
TORCH_BLOCK_SCALED_MM = _product(
    "torch_block_scaled_mm",
    ", bool fast_accum",
    _kernel("fp8pass.lowerings.torch_block", "run_operator"),
    reference=_block_reference,
    inputs=_torch_block_inputs,
)
#: fp8pass's own product on a GPU with scales per 1x128 and 128x128.
TRITON_BLOCK_MM = _product(
    "triton_block_mm",
    "",
    _kernel("fp8pass.kernels.triton_block", "block_mm"),
    reference=_block_reference,
    inputs=block_inputs(),
)


def _azp_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    zero: torch.Tensor,
    sums: torch.Tensor,
) -> torch.Tensor:
    """``((a @ b) - zero * sums) * scale_a * scale_b + bias``, exact before the scales."""
    zero = zero if zero.numel() == 1 else zero.reshape(-1, 1)
    total = torch.mm(a.to(torch.float64), b.to(torch.float64)).to(torch.int32)
    value = (total - zero * sums.reshape(1, -1)).to(torch.float32) * scale_a * scale_b
    if bias is not None:
        value = value + bias.to(torch.float32)
    return value.to(out_dtype)


def _azp_inputs(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for m, rows in ((3, True), (5, False), (1, True), (0, True)):
        a, b = (
            torch.randint(-128, 128, (size, 48), generator=generator).to(torch.int8)
            for size in (m, 32)
        )
        scale_a = torch.rand((m, 1) if rows else (), generator=generator) + 0.01
        scale_b = torch.rand(1, 32, generator=generator) + 0.01
        shape = (m, 1) if rows else ()
        zero = torch.randint(-128, 128, shape, generator=generator).to(torch.int32)
        sums = b.sum(1, dtype=torch.int32)[None, :]
        bias = torch.randn(32, generator=generator).to(torch.bfloat16)
        yield a, b.t(), scale_a, scale_b, bias, torch.bfloat16, zero, sums


#: vLLM's product of int8 codes with a zero point, and the sums of the weight's columns.
VLLM_CUTLASS_SCALED_MM_AZP = _product(
    "vllm_cutlass_scaled_mm_azp",
    ", Tensor zero, Tensor sums",
    _kernel("fp8pass.lowerings.vllm_int8", "run_operator"),
    reference=_azp_reference,
    inputs=_azp_inputs,
)


def _library_block(name: str, module: str, run: str) -> OpSpec:
    return _product(
        name,
        "",
        _kernel(f"fp8pass.lowerings.{module}", run),
        reference=_block_reference,
        inputs=block_inputs(),
    )


#: Other libraries' products, where they are loaded or installed.
VLLM_CUTLASS_BLOCK_MM = _library_block("vllm_cutlass_block_mm", "vllm_block", "run_operator")
DEEPGEMM_BLOCK_MM = _library_block("deepgemm_block_mm", "deepgemm", "run_library")
FLASHINFER_BLOCK_MM = _library_block("flashinfer_block_mm", "flashinfer", "run_block")
FLASHINFER_BMM_FP8 = _product(
    "flashinfer_scaled_mm", "", _kernel("fp8pass.lowerings.flashinfer", "run_tensor")
)


def _planned_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    plan: str,
    keys: str = "",
) -> torch.Tensor:
    """The product of the kernels of ``plan``; ``keys`` says what is scaled where they have blocks
    of scales: ``"activation key;weight key"``."""
    if keys:
        return _keyed_reference(a, b, scale_a, scale_b, bias, out_dtype, *keys.split(";"))
    return _reference(a, b, scale_a, scale_b, bias, out_dtype)


#: Several kernels by number of rows; see :mod:`fp8pass.lowerings.planned`.
SCALED_MM_PLANNED = _product(
    "scaled_mm_planned",
    ", bool fast_accum, str plan, str keys=''",
    _kernel("fp8pass.lowerings.planned", "run_planned"),
    False,
    "0-16=triton_skinny;17-=torch_row",
    reference=_planned_reference,
)


def _planned_on_cpu(*args: Any) -> torch.Tensor:
    """The plan where its kernels are for CPUs; else the reference, as for every other operator of a
    graph for an absent device."""
    from fp8pass.lowerings.planned import plan_is_for, run_planned

    if plan_is_for(args[7], "cpu"):
        return run_planned(*args)
    return _planned_reference(*args)


LIBRARY.impl(SCALED_MM_PLANNED.name, _planned_on_cpu, _CPU)


# ---- weight-only products -----------------------------------------------------------------------


def _weight_only(name: str, kernel: Callable[..., Any], key: str) -> OpSpec:
    """An operator of one kernel for ``fp8pass::w8a16_mm``, whose arguments it has but the last."""
    spec = OpSpec(
        name,
        "(Tensor a, Tensor b, Tensor scale_b, Tensor? bias, ScalarType out_dtype, str weight_key,"
        " str form='') -> Tensor",
        weight_only.weight_only_product,
        weight_only.fake_w8a16_mm,
        weight_only.operands,
        0.0,
        "as w8a16_mm",
    )
    return _with_kernel(spec, kernel, key)


#: fp8pass's own weight-only product on a GPU.
TRITON_W8A16_MM = _weight_only(
    "triton_w8a16_mm", _kernel("fp8pass.kernels.triton_w8a16", "w8a16_mm"), _GPU
)
#: Products by vllm-xpu-kernels, where its library is loaded.
XPU_SCALED_MM = _product(
    "xpu_scaled_mm",
    ", str act_key, str weight_key",
    _kernel("fp8pass.lowerings.xpu", "scaled_mm"),
    key=_XPU,
    reference=_keyed_reference,
    inputs=_keyed_inputs,
)
XPU_W8A16_MM = _weight_only("xpu_w8a16_mm", _kernel("fp8pass.lowerings.xpu", "w8a16_mm"), _XPU)

# behind what it is made of
from fp8pass.kernels import rocm_operators, vllm_operators  # noqa: E402, F401  isort: skip
