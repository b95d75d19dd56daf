"""``fp8pass::silu_mul``, alone and followed by a quantise."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from fp8pass.ops.forms import ActForm, QuantForm
from fp8pass.ops.library import OpSpec, contiguous_like, nothing, register
from fp8pass.ops.quantize import (
    QUANT_FORMS,
    fake_quantize_with,
    quantize_with,
    random_activation,
    random_scale,
)


def silu_mul(gate: torch.Tensor, up: torch.Tensor, form: str) -> torch.Tensor:
    """``silu(gate) * up`` (SwiGLU, Shazeer 2020), SiLU in float32.

    Args:
        gate, up: ``[..., I]`` of one shape; bf16, fp16 or fp32, any strides.
        form: ``str`` of a :class:`fp8pass.ops.forms.ActForm`.

    Returns:
        contiguous ``[..., I]`` of the form's dtype.
    """
    parsed = ActForm.parse(form)
    wide = gate.to(torch.float32)
    if parsed.silu == "div":
        value = wide / (wide.neg().exp() + 1)
    else:
        value = wide * wide.sigmoid()
    return (value.to(parsed.mid) * up).to(parsed.out).contiguous()


def fake_silu_mul(gate: torch.Tensor, up: torch.Tensor, form: str) -> torch.Tensor:
    """Shapes of :func:`silu_mul`."""
    return contiguous_like(gate, ActForm.parse(form).out)


def silu_mul_quant(
    gate: torch.Tensor,
    up: torch.Tensor,
    scale: torch.Tensor | None,
    form: str,
    quant_form: str,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`silu_mul` and the quantise of its result; returns ``(q, scale_out, y)``.

    ``scale`` is the given dequant scale of a static quantise, else None. ``y`` is an empty tensor
    unless ``keep``; ``scale_out`` is empty if the scale was given.
    """
    y = silu_mul(gate, up, form)
    q, scale_out = quantize_with(y, scale, QuantForm.parse(quant_form))
    return q, scale_out, y if keep else nothing(y, y.dtype)


def fake_silu_mul_quant(
    gate: torch.Tensor,
    up: torch.Tensor,
    scale: torch.Tensor | None,
    form: str,
    quant_form: str,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes of :func:`silu_mul_quant`."""
    y = fake_silu_mul(gate, up, form)
    q, scale_out = fake_quantize_with(y, scale, QuantForm.parse(quant_form))
    return q, scale_out, y if keep else nothing(y, y.dtype)


_CASES = (
    (torch.bfloat16, "div,bfloat16,bfloat16"),
    (torch.float16, "div,float32,float16"),
    (torch.float32, "sigmoid,float32,float32"),
)


def _inputs(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for (dtype, form), shape in product(_CASES, ((3, 64), (1, 47), (2, 3, 32))):
        # two halves of one packed product: strided, as a packed gate_up linear makes them
        packed = random_activation(generator, *shape[:-1], 2 * shape[-1], dtype=dtype)
        gate, up = packed.chunk(2, -1)
        yield gate, up, form


def _quant_inputs(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    keep = False
    for gate, up, form in _inputs(generator):
        for quant_form in QUANT_FORMS:
            keep = not keep
            yield gate, up, random_scale(generator, quant_form), form, quant_form, keep


SILU_MUL = register(
    OpSpec(
        "silu_mul",
        "(Tensor gate, Tensor up, str form) -> Tensor",
        silu_mul,
        fake_silu_mul,
        _inputs,
        1e-3,
        "exp differs between math libraries in the last bit",
        kind="activation",
        what="SiLU·mul",
    )
)
SILU_MUL_QUANT = register(
    OpSpec(
        "silu_mul_quant",
        "(Tensor gate, Tensor up, Tensor? scale, str form, str quant_form, bool keep)"
        " -> (Tensor q, Tensor scale_out, Tensor y)",
        silu_mul_quant,
        fake_silu_mul_quant,
        _quant_inputs,
        1e-3,
        "exp differs between math libraries in the last bit",
    )
)
