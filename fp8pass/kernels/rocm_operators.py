"""Operators behind which a ROCm library's product or producer stands.

As in :mod:`fp8pass.kernels.operators`: fake and semantics are those of a generic operator, the
reference is registered for every device, and the adapter that calls the library for GPUs. Nothing
of a library is looked up before such an operator is called on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fp8pass.kernels.operators import (
    _OPERANDS,
    _inputs,
    _kernel,
    _producer_of,
    _product,
    _with_kernel,
)
from fp8pass.ops import activation, linear, norm
from fp8pass.ops.library import OpSpec

_BLOCK_KEYS = ("float8_e4m3fn/dynamic/group1x128", "float8_e4m3fn/static/group128x128")

#: vLLM's product for up to four rows, per-tensor scales.
VLLM_SKINNY_SCALED_MM = _product(
    "vllm_skinny_scaled_mm", "", _kernel("fp8pass.lowerings.vllm_skinny", "run_operator")
)


# ---- a scale per row and per column --------------------------------------------------------------


def _row_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    split_k: bool,
) -> torch.Tensor:
    """As :func:`fp8pass.ops.linear.scaled_mm`; ``split_k`` says how, not what it computes."""
    value = linear.product_of_codes(a, b) * scale_a * scale_b
    return (value if bias is None else value + bias.to(torch.float32)).to(out_dtype)


#: AITER's product with a scale per row and per column, of fp8 or int8 codes; with ``split_k`` it
#: may cut K into parts whose sums are rounded.
AITER_SCALED_MM = _with_kernel(
    OpSpec(
        "aiter_scaled_mm",
        f"{_OPERANDS}, bool split_k) -> Tensor",
        _row_reference,
        linear.fake_scaled_mm,
        _inputs(False),
        0.0,
        "as scaled_mm",
    ),
    _kernel("fp8pass.lowerings.aiter_row", "run_operator"),
)


# ---- a weight laid out in tiles ------------------------------------------------------------------


def shuffle(codes: torch.Tensor) -> torch.Tensor:
    """``[N, K]`` one-byte codes in tiles of 16 rows and 32 columns, each half of a tile's columns
    by itself: the layout that AITER's pre-shuffled product reads.

    Raises:
        ValueError: N is not a multiple of 16, or K not one of 32.
    """
    n, k = codes.shape
    if n % 16 or k % 32:
        raise ValueError(f"a weight of {n} x {k} cannot be laid out in tiles of 16 x 32")
    tiles = codes.contiguous().view(torch.uint8).view(n // 16, 16, k // 32, 2, 16)
    return tiles.permute(0, 2, 3, 1, 4).reshape(n, k).view(codes.dtype)


def unshuffle(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`shuffle`."""
    n, k = codes.shape
    tiles = codes.contiguous().view(torch.uint8).view(n // 16, k // 32, 2, 16, 16)
    return tiles.permute(0, 3, 1, 2, 4).reshape(n, k).view(codes.dtype)


def _shuffled_reference(
    a: torch.Tensor,
    tiles: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """As :func:`fp8pass.ops.linear.scaled_mm`, of a weight that :func:`shuffle` laid out."""
    weight = unshuffle(tiles)
    return linear.dequantised_product(a, weight.t(), scale_a, scale_b, None, out_dtype)


def _shuffled_fake(
    a: torch.Tensor,
    tiles: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    return a.new_empty((a.shape[0], tiles.shape[0]), dtype=out_dtype)


def _shuffled_inputs(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for m in (0, 1, 3):
        fp8 = torch.float8_e4m3fn
        a = (torch.randn(m, 64, generator=generator) * 16).to(fp8)
        weight = (torch.randn(48, 64, generator=generator) * 16).to(fp8)
        scale_a = torch.rand(m, 1, generator=generator) + 0.01
        scale_b = torch.rand(1, 48, generator=generator) + 0.01
        yield a, shuffle(weight), scale_a, scale_b, torch.bfloat16


#: AITER's pre-shuffled product: the weight is :func:`shuffle` of its ``[N, K]``.
AITER_SHUFFLED_SCALED_MM = _with_kernel(
    OpSpec(
        "aiter_shuffled_scaled_mm",
        "(Tensor a, Tensor tiles, Tensor scale_a, Tensor scale_b, ScalarType out_dtype) -> Tensor",
        _shuffled_reference,
        _shuffled_fake,
        _shuffled_inputs,
        0.0,
        "as scaled_mm",
    ),
    _kernel("fp8pass.lowerings.aiter_shuffled", "run_operator"),
)


# ---- a scale per block ---------------------------------------------------------------------------


def _block_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    split_k: bool,
) -> torch.Tensor:
    """As :func:`fp8pass.ops.linear.scaled_mm` with a scale per block."""
    return linear.scaled_product(a, b, scale_a, scale_b, None, out_dtype, *_BLOCK_KEYS, "")


def _block_fake(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    split_k: bool,
) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def _block_inputs(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for m in (0, 1, 3):
        fp8 = torch.float8_e4m3fn
        a = (torch.randn(m, 256, generator=generator) * 16).to(fp8)
        weight = (torch.randn(128, 256, generator=generator) * 16).to(fp8)
        scale_a = torch.rand(m, 2, generator=generator) + 0.01
        scale_b = torch.rand(1, 2, generator=generator) + 0.01
        yield a, weight.t(), scale_a, scale_b.t(), torch.bfloat16, False


#: AITER's product with a scale per 1x128 of ``a`` and per 128x128 of ``b``, oriented as ``b`` is.
AITER_BLOCK_SCALED_MM = _with_kernel(
    OpSpec(
        "aiter_block_scaled_mm",
        "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, ScalarType out_dtype, bool split_k)"
        " -> Tensor",
        _block_reference,
        _block_fake,
        _block_inputs,
        0.0,
        "as scaled_mm",
    ),
    _kernel("fp8pass.lowerings.aiter_block", "run_operator"),
)


# ---- producers -----------------------------------------------------------------------------------

_ADAPTERS = "fp8pass.lowerings.aiter_producers"

AITER_RMS_NORM_QUANT = _producer_of("aiter", norm.RMS_NORM_QUANT, _ADAPTERS)
AITER_ADD_RMS_NORM_QUANT = _producer_of("aiter", norm.ADD_RMS_NORM_QUANT, _ADAPTERS)
AITER_SILU_MUL_QUANT = _producer_of("aiter", activation.SILU_MUL_QUANT, _ADAPTERS)
