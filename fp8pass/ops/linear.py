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
    if b.dtype == torch.int8:  # a may be codes less a zero point, whole numbers in float32
        return torch.mm(a.to(torch.float64), b.to(torch.float64)).to(torch.float32)
    return torch.mm(a.to(torch.float32), b.to(torch.float32))


def corrected(a: torch.Tensor, b: torch.Tensor, zero: torch.Tensor, how: str) -> torch.Tensor:
    """``(a @ b) - zero * sum(b)`` of int8 codes in float32, by the ``zero`` of a product's form."""
    total = torch.mm(a.to(torch.float64), b.to(torch.float64))
    if how == "float32":
        sums = b.sum(0, keepdim=True).to(torch.float32)
        return total.to(torch.float32) - zero.to(torch.float32) * sums
    whole = torch.int32 if how == "int32" else torch.int64
    sums = b.sum(0, keepdim=True, dtype=whole)
    return (total.to(whole) - zero.to(whole) * sums).to(torch.float32)


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
    zero_point: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product as :class:`ProductForm` says: float32 throughout, one rounding at the end."""
    made = ProductForm.parse(form)
    if (made.zero == "none") != (zero_point is None):
        raise ValueError(f"form {form!r} and a zero point that is or is not given disagree")
    zero = None if zero_point is None or zero_point.numel() == 1 else zero_point.reshape(-1, 1)
    zero = zero_point if zero is None else zero
    left = []
    values = []
    for operand, codes, given, text in (("a", a, scale_a, act_key), ("b", b, scale_b, weight_key)):
        group = QuantKey.parse(text).scale.group
        scale = shaped_scale(given, group.name)
        blocks = group.name.startswith("group")
        if operand == "a" and made.zero == "codes" and zero is not None:
            codes = codes.to(torch.float32) - zero
        if blocks:
            scale = spread_scale(scale, group, codes.shape)
        if blocks or made.scales(operand):
            values.append(codes.to(torch.float32) * scale)
        else:
            values.append(codes)
            left.append(scale)
    value = product_of_codes(*values)
    if zero is not None and made.zero != "codes":
        value = corrected(a, b, zero, made.zero)
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
    zero_point: torch.Tensor | None = None,
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
        zero_point: that of ``a``, if the form has one: one element or ``[M, 1]``, int8, int32,
            int64 or float32; ``x ~ (a - zero_point) * scale_a``.

    Returns:
        contiguous ``[M, N]``: product, scales and bias in float32, one rounding. The product of
        int8 codes is exact.

    Raises:
        OptionError: a key or a form that is not known.
        ValueError: the form has a zero point and none is given, or the reverse.
    """
    return scaled_product(
        a, b, scale_a, scale_b, bias, out_dtype, act_key, weight_key, form, zero_point
    )


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
    act, weight = "int8/dynamic/token/asym", "int8/static/channel"
    for form in ("none,ab,int32", "none,ba,int64", "none,joined,float32", "none,ab,codes",
                 "both,ab,codes"):  # fmt: skip
        for rows, dtype in (((m, 1), torch.int32), ((), torch.int8), ((m, 1), torch.float32)):
            a, b = (
                torch.randint(-128, 128, (size, k), generator=generator).to(torch.int8)
                for size in (m, n)
            )
            scale_a = torch.rand(m, 1, generator=generator) + 0.01
            scale_b = torch.rand(1, n, generator=generator) + 0.01
            zero = torch.randint(-128, 128, rows, generator=generator).to(dtype)
            out = torch.float32
            yield (
                a, b.t(), scale_a, scale_b, None, out, act, weight, False, None, form, zero
            )  # fmt: skip


SCALED_MM = register(
    OpSpec(
        "scaled_mm",
        "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype,"
        " str act_key, str weight_key, bool use_fast_accum, Tensor? prepared, str form='',"
        " Tensor? zero_point=None) -> Tensor",
        scaled_mm,
        fake_scaled_mm,
        _inputs,
        0.0,
        "2 ulp of the result plus 2^-10 of the sum of magnitudes: see docs/numerics.md",
        kind="scaled_mm",
        what="scaled product",
    )
)
