"""``fp8pass::w8a16_mm``, the generic product of unquantised activations and an fp8 weight."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from fp8pass.ops.library import OpSpec, register
from fp8pass.ops.linear import spread_scale
from fp8pass.ops.weight_form import WeightForm
from fp8pass.quant_key import QuantKey, dtype_name


def weight_only_product(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    weight_key: str,
    form: str = "",
) -> torch.Tensor:
    """The product as :class:`WeightForm` says, with torch's own operators and roundings.

    A scale without dimensions is multiplied as it is: torch computes that in float32 and rounds
    once (on a CPU), where a scale with dimensions decides about the dtype.
    """
    made = WeightForm.parse(form)
    group = QuantKey.parse(weight_key).scale.group
    blocks = group.name.startswith("group")
    scale = scale_b
    if group.name == "channel":
        scale = scale.reshape(1, -1)
    if scale.dim():
        scale = scale.to(made.scaled)
    if blocks:
        scale = spread_scale(scale, group, b.shape)
    at_weight = blocks or made.at == "weight"
    weight = (b.to(made.scaled) * scale).to(made.product) if at_weight else b.to(made.product)
    left = a.to(made.product)
    inside = bias is not None and made.bias == "inside"
    if inside:
        assert bias is not None
        value = torch.addmm(bias.to(made.product), left, weight)
    else:
        value = torch.mm(left, weight)
    if not at_weight:
        value = value.to(made.scaled) * scale
    if bias is not None and not inside:
        value = value + bias
    return value.to(out_dtype)


def w8a16_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    weight_key: str,
    form: str = "",
    act_key: str = "",
) -> torch.Tensor:
    """The product of activations that are not quantised and an fp8 weight.

    Args:
        a: ``[M, K]`` activations, bf16, fp16 or fp32: never codes.
        b: ``[K, N]`` codes, normally the ``.t()`` view of a row-major ``[N, K]`` weight.
        scale_b: dequant scale of ``b``: one element, ``[1, N]`` (per-channel) or, with a key
            ``groupGxH``, ``[ceil(K / G), ceil(N / H)]``, oriented as ``b`` is.
        bias: ``[N]`` or None.
        out_dtype: bf16, fp16 or fp32.
        weight_key: ``str`` of the :class:`fp8pass.quant_key.QuantKey` of ``b``.
        form: ``str`` of a :class:`fp8pass.ops.weight_form.WeightForm`; ``""``: everything in
            float32, one rounding.
        act_key: the key of the activation's quantise, where this product was put in the place of
            one of two quantised operands because the user asked for it; else ``""``. It changes no
            number, and goes into the report.

    Returns:
        contiguous ``[M, N]``.

    Raises:
        OptionError: a key or a form that is not known.
    """
    return weight_only_product(a, b, scale_b, bias, out_dtype, weight_key, form)


def fake_w8a16_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *rest: Any,
) -> torch.Tensor:
    """Shape of the product: contiguous ``[M, N]``."""
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def operands(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    """``(a, b, scale_b, bias, out_dtype, weight_key, form)``: odd sizes, each granularity."""
    kinds = ("tensor", "channel", "group128x128")
    shapes = ((3, 160, 144), (1, 47, 63), (17, 64, 5), (0, 16, 16))
    exact, rounded = "", "weight,bfloat16,bfloat16,inside"
    for (m, k, n), kind, form in product(shapes, kinds, (exact, rounded)):
        dtype = torch.bfloat16
        a = torch.randn(m, k, generator=generator).to(dtype)
        b = (torch.randn(n, k, generator=generator) * 16).to(torch.float8_e4m3fn).t()
        sizes = {"tensor": (), "channel": (1, n)}.get(kind, (-(-k // 128), -(-n // 128)))
        scale = torch.rand(sizes, generator=generator) + 0.01
        bias = torch.randn(n, generator=generator).to(dtype) if m != 1 else None
        yield a, b, scale, bias, dtype, f"{dtype_name(b.dtype)}/static/{kind}", form


def _inputs(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    yield from operands(generator)
    m, k, n = 3, 64, 48
    for place, scaled, made, bias in product(
        WeightForm.PLACES, ("float32", "float16"), ("float32", "float16"), WeightForm.BIASES
    ):
        a = torch.randn(m, k, generator=generator).half()
        b = (torch.randn(n, k, generator=generator) * 4).to(torch.float8_e5m2).t()
        scale = torch.rand((1, n), generator=generator) + 0.01
        vector = torch.randn(n, generator=generator).half()
        form = f"{place},{scaled},{made},{bias}"
        yield a, b, scale, vector, torch.float16, "float8_e5m2/static/channel", form


W8A16_MM = register(
    OpSpec(
        "w8a16_mm",
        "(Tensor a, Tensor b, Tensor scale_b, Tensor? bias, ScalarType out_dtype, str weight_key,"
        " str form='', str act_key='') -> Tensor",
        w8a16_mm,
        fake_w8a16_mm,
        _inputs,
        0.0,
        "2 ulp of the result plus 2^-10 of the sum of magnitudes: see docs/numerics.md",
        kind="scaled_mm",
        what="weight-only product",
    )
)
