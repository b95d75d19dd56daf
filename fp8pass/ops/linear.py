"""``fp8pass::scaled_mm``, the generic scaled product."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from fp8pass.ops.library import OpSpec, register


def dequantised_product(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``((a.f32 @ b.f32) * scale_a * scale_b + bias)`` in float32, rounded once to ``out_dtype``.

    This is what ``torch._scaled_mm`` computes on a CPU, bit for bit, up to the order of the sum.
    """
    value = torch.mm(a.to(torch.float32), b.to(torch.float32)) * scale_a * scale_b
    if bias is not None:
        value = value + bias.to(torch.float32)
    return value.to(out_dtype)


def scaled_mm(
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
) -> torch.Tensor:
    """The scaled product of two fp8 matrices.

    Args:
        a: ``[M, K]`` codes.
        b: ``[K, N]`` codes, normally the ``.t()`` view of a row-major ``[N, K]`` weight.
        scale_a: float32 dequant scale, one element (per-tensor) or ``[M, 1]`` (per-token).
        scale_b: float32 dequant scale, one element or ``[1, N]`` (per-channel).
        bias: ``[N]`` or None, added in float32.
        out_dtype: bf16, fp16 or fp32.
        act_key, weight_key: ``str`` of the :class:`fp8pass.quant_key.QuantKey` of ``a`` and ``b``.
        use_fast_accum: the product may be accumulated with less than float32.
        prepared: the weight copy made by :func:`fp8pass.prepare`, or None.

    Returns:
        contiguous ``[M, N]``: product, scales and bias in float32, one rounding.
    """
    return dequantised_product(a, b, scale_a, scale_b, bias, out_dtype)


def fake_scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *rest: Any,
) -> torch.Tensor:
    """Shape of the product: contiguous ``[M, N]``."""
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def operands(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    """``(a, b, scale_a, scale_b, bias, out_dtype, (act_key, weight_key))``, random, odd sizes."""
    shapes = ((3, 32, 16), (1, 47, 63), (17, 64, 5), (0, 16, 16))
    for (m, k, n), rows, bias in product(shapes, (False, True), (None, torch.bfloat16)):
        fp8 = torch.float8_e4m3fn
        a = (torch.randn(m, k, generator=generator) * 16).to(fp8)
        weight = (torch.randn(n, k, generator=generator) * 16).to(fp8)
        scale_a = torch.rand((m, 1) if rows else (), generator=generator) + 0.01
        scale_b = torch.rand((1, n) if rows else (), generator=generator) + 0.01
        vector = None if bias is None else torch.randn(n, generator=generator).to(bias)
        keys = (
            "float8_e4m3fn/dynamic/" + ("token" if rows else "tensor"),
            "float8_e4m3fn/static/" + ("channel" if rows else "tensor"),
        )
        yield a, weight.t(), scale_a, scale_b, vector, torch.bfloat16, keys


def _inputs(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for *given, keys in operands(generator):
        yield *given, *keys, False, None


SCALED_MM = register(
    OpSpec(
        "scaled_mm",
        "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype,"
        " str act_key, str weight_key, bool use_fast_accum, Tensor? prepared) -> Tensor",
        scaled_mm,
        fake_scaled_mm,
        _inputs,
        0.0,
        "2 ulp of the result plus 2^-10 of the sum of magnitudes: see docs/numerics.md",
        kind="scaled_mm",
        what="scaled product",
    )
)
