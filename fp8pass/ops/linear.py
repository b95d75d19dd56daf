"""``fp8pass::scaled_mm``, the generic scaled product."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from fp8pass.ops.library import OpSpec, register
from fp8pass.ops.product_form import ProductForm
from fp8pass.quant_key import GroupShape, QuantKey


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
    The product of int8 codes is exact.
    """
    value = product_of_codes(a, b) * scale_a * scale_b
    if bias is not None:
        value = value + bias.to(torch.float32)
    return value.to(out_dtype)


def shaped_scale(scale: torch.Tensor, granularity: str) -> torch.Tensor:
    """A scale in float32, in the shape that its granularity (never its own shape) asks for.

    ``[M, 1]`` per-token, ``[1, N]`` per-channel; others broadcast, or are spread, as they are.
    """
    scale = scale.to(torch.float32)
    if granularity == "token":
        return scale.reshape(-1, 1)
    return scale.reshape(1, -1) if granularity == "channel" else scale


def spread_scale(scale: torch.Tensor, group: GroupShape, shape: torch.Size) -> torch.Tensor:
    """A scale per block as one per element of ``shape``; the last blocks may be cut short."""
    for dim, (size, block) in enumerate(zip(shape, (group.row, group.col), strict=True)):
        if block > 1:
            scale = scale.repeat_interleave(block, dim).narrow(dim, 0, size)
    return scale


def product_of_codes(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` in float32: of int8 codes the exact sum, rounded once."""
    if a.dtype == b.dtype == torch.int8:
        return torch.mm(a.to(torch.float64), b.to(torch.float64)).to(torch.float32)
    return torch.mm(a.to(torch.float32), b.to(torch.float32))


def scaled_product(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    act_key: str,
    weight_key: str,
    form: str,
) -> torch.Tensor:
    """The product as :class:`ProductForm` says: float32 throughout, one rounding at the end."""
    made = ProductForm.parse(form)
    left = []
    values = []
    for operand, codes, given, text in (("a", a, scale_a, act_key), ("b", b, scale_b, weight_key)):
        group = QuantKey.parse(text).scale.group
        scale = shaped_scale(given, group.name)
        blocks = group.name.startswith("group")
        if blocks:
            scale = spread_scale(scale, group, codes.shape)
        if blocks or made.scales(operand):
            values.append(codes.to(torch.float32) * scale)
        else:
            values.append(codes)
            left.append(scale)
    value = product_of_codes(*values)
    if len(left) == 2 and made.order == "joined":
        value = value * (left[0] * left[1])
    else:
        for scale in reversed(left) if made.order == "ba" else left:
            value = value * scale
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
    form: str = "",
) -> torch.Tensor:
    """The scaled product of two fp8 matrices, or of two int8 ones.

    Args:
        a: ``[M, K]`` codes.
        b: ``[K, N]`` codes, normally the ``.t()`` view of a row-major ``[N, K]`` weight.
        scale_a: dequant scale, one element (per-tensor), ``[M, 1]`` (per-token) or, with a key
            ``group1xG``, ``[M, ceil(K / G)]``.
        scale_b: dequant scale, one element, ``[1, N]`` (per-channel) or, with a key ``groupGxH``,
            ``[ceil(K / G), ceil(N / H)]``: oriented as ``b`` is, so that the usual ``[N / H,
            K / G]`` beside a row-major weight comes as its ``.t()`` view. Scales of other
            dtypes are converted to float32; per-token and per-channel ones may be vectors.
        bias: ``[N]`` or None, added in float32.
        out_dtype: bf16, fp16 or fp32.
        act_key, weight_key: ``str`` of the :class:`fp8pass.quant_key.QuantKey` of ``a`` and ``b``.
        use_fast_accum: the product may be accumulated with less than float32.
        prepared: the weight copy made by :func:`fp8pass.prepare`, or None.
        form: ``str`` of a :class:`fp8pass.ops.product_form.ProductForm`.

    Returns:
        contiguous ``[M, N]``: product, scales and bias in float32, one rounding. The product of
        int8 codes is exact.

    Raises:
        OptionError: a key or a form that is not known.
    """
    return scaled_product(a, b, scale_a, scale_b, bias, out_dtype, act_key, weight_key, form)


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
    yield from _other_forms(generator)


def _other_forms(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    """Blocks of scales (the last one cut short), int8 codes, and every form."""
    m, k, n = 3, 200, 72
    pairs = (
        ("float8_e4m3fn/dynamic/group1x128", "float8_e4m3fn/static/group128x128", (3, 2), (2, 1)),
        ("float8_e4m3fn/dynamic/group1x64", "float8_e4m3fn/static/channel", (3, 4), (1, 72)),
        ("int8/dynamic/token", "int8/static/channel", (3, 1), (1, 72)),
        ("int8/static/tensor", "int8/static/tensor", (), ()),
    )
    forms = [f"{operands},{order}" for operands in ProductForm.OPERANDS for order in ("ab", "ba")]
    for act, weight, rows, cols in pairs:
        for form in ("", "none,joined", *forms):
            dtype = QuantKey.parse(act).dtype
            a = (torch.randn(m, k, generator=generator) * 16).to(dtype)
            b = (torch.randn(n, k, generator=generator) * 16).to(dtype)
            scale_a = torch.rand(rows, generator=generator) + 0.01
            scale_b = torch.rand(cols, generator=generator) + 0.01
            bias = torch.randn(n, generator=generator).to(torch.bfloat16)
            out = torch.bfloat16
            yield a, b.t(), scale_a, scale_b, bias, out, act, weight, False, None, form


SCALED_MM = register(
    OpSpec(
        "scaled_mm",
        "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype,"
        " str act_key, str weight_key, bool use_fast_accum, Tensor? prepared, str form='')"
        " -> Tensor",
        scaled_mm,
        fake_scaled_mm,
        _inputs,
        0.0,
        "2 ulp of the result plus 2^-10 of the sum of magnitudes: see docs/numerics.md",
        kind="scaled_mm",
        what="scaled product",
    )
)
