"""``fp8pass::silu_mul`` and ``fp8pass::act_mul``, alone and followed by a quantise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import cycle, product
from typing import Any

import torch

from fp8pass.errors import OptionError
from fp8pass.ops.act_form import CUBIC, GPT_OSS_LIMIT, QUICK, SQRT_2_OVER_PI, SQRT_HALF, SQRT_TWO
from fp8pass.ops.forms import ActForm, QuantForm
from fp8pass.ops.library import OpSpec, contiguous_like, nothing, register
from fp8pass.ops.quantize import (
    QUANT_FORMS,
    fake_quantize_with,
    quantize_with,
    random_activation,
    random_scale,
)


def _activated(g: torch.Tensor, act: str) -> torch.Tensor:
    """The activation of ``g``, step by step in the dtype of ``g``, as the decomposed nodes are."""
    if act == "div":
        return g / (g.neg().exp() + 1)
    if act == "sigmoid":
        return g * g.sigmoid()
    if act in ("gelu_quick", "gpt_oss"):
        return g * (g * QUICK).sigmoid()
    if act == "relu":
        return g.relu()
    if act == "relu2":
        return g.relu().pow(2)
    if act in ("gelu_erf", "gelu_erf_div"):
        inner = g * SQRT_HALF if act == "gelu_erf" else g / SQRT_TWO
        return (g * 0.5) * (inner.erf() + 1)
    cube = g * g * g if act == "gelu_tanh" else g.pow(3)
    return (g * 0.5) * (((g + cube * CUBIC) * SQRT_2_OVER_PI).tanh() + 1)


def act_mul(gate: torch.Tensor, up: torch.Tensor | None, form: str) -> torch.Tensor:
    """``act(gate) * up``, or ``act(gate)`` where ``up`` is None.

    Args:
        gate, up: ``[..., I]`` of one shape; bf16, fp16 or fp32, any strides.
        form: ``str`` of a :class:`fp8pass.ops.forms.ActForm`.

    Returns:
        contiguous ``[..., I]`` of the form's dtype.

    Raises:
        OptionError: the form is not in the closed list, or needs an ``up`` that is not given.
    """
    parsed = ActForm.parse(form)
    g = gate.to(parsed.compute)
    if parsed.act == "gpt_oss":
        if up is None:
            raise OptionError(f"the form {form} without an up")
        g = g.clamp(max=GPT_OSS_LIMIT)
        up = up.to(parsed.compute).clamp(-GPT_OSS_LIMIT, GPT_OSS_LIMIT) + 1
    value = _activated(g, parsed.act).to(parsed.mid)
    if up is not None:
        value = value * up
    return value.to(parsed.out).contiguous()


def fake_act_mul(gate: torch.Tensor, up: torch.Tensor | None, form: str) -> torch.Tensor:
    """Shapes of :func:`act_mul`."""
    return contiguous_like(gate, ActForm.parse(form).out)


def act_mul_quant(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    scale: torch.Tensor | None,
    form: str,
    quant_form: str,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`act_mul` and the quantise of its result; returns ``(q, scale_out, y)``.

    ``scale`` is the given dequant scale of a static quantise, else None. ``y`` is an empty tensor
    unless ``keep``; ``scale_out`` is empty if the scale was given.
    """
    y = act_mul(gate, up, form)
    q, scale_out = quantize_with(y, scale, QuantForm.parse(quant_form))
    return q, scale_out, y if keep else nothing(y, y.dtype)


def fake_act_mul_quant(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    scale: torch.Tensor | None,
    form: str,
    quant_form: str,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes of :func:`act_mul_quant`."""
    y = fake_act_mul(gate, up, form)
    q, scale_out = fake_quantize_with(y, scale, QuantForm.parse(quant_form))
    return q, scale_out, y if keep else nothing(y, y.dtype)


def silu_mul(gate: torch.Tensor, up: torch.Tensor, form: str) -> torch.Tensor:
    """``silu(gate) * up`` (SwiGLU, Shazeer 2020): :func:`act_mul` in a form of SiLU.

    Raises:
        OptionError: the form is not one of SiLU.
    """
    if ActForm.parse(form).act not in ActForm.SILUS:
        raise OptionError(f"the form {form!r} is not one of SiLU: {', '.join(ActForm.SILUS)}")
    return act_mul(gate, up, form)


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


_SILU_CASES = (
    (torch.bfloat16, "div,bfloat16,bfloat16"),
    (torch.float16, "div,float32,float16"),
    (torch.float32, "sigmoid,float32,float32"),
    (torch.bfloat16, "sigmoid,bfloat16,bfloat16,bfloat16"),
)
_CASES = tuple(
    (dtype, form)
    for act in ActForm.ACTS
    for dtype, form in (
        (torch.bfloat16, f"{act},bfloat16,bfloat16"),
        (torch.float32, f"{act},float32,float32"),
    )
) + (
    (torch.bfloat16, "gelu_tanh_pow,bfloat16,bfloat16,bfloat16"),
    (torch.bfloat16, "relu2,bfloat16,bfloat16,bfloat16"),
    (torch.bfloat16, "gpt_oss,bfloat16,bfloat16,bfloat16"),
    (torch.float16, "gelu_quick,float16,float16,float16"),
)
_SHAPES = ((3, 64), (1, 47), (2, 3, 32))


def _inputs(
    generator: torch.Generator, cases: Iterable[tuple[torch.dtype, str]] = _SILU_CASES
) -> Iterator[tuple[Any, ...]]:
    for (dtype, form), shape in product(cases, _SHAPES):
        # two halves of one packed product: strided, as a packed gate_up linear makes them
        packed = random_activation(generator, *shape[:-1], 2 * shape[-1], dtype=dtype)
        gate, up = packed.chunk(2, -1)
        yield gate, up, form


def _act_inputs(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for (dtype, form), shape in zip(_CASES, cycle(_SHAPES), strict=False):
        for gate, up, _ in _inputs(generator, [(dtype, form)]):
            if tuple(gate.shape) == shape:
                yield gate, up, form
                if not form.startswith("gpt_oss"):
                    yield gate, None, form


def _quant_inputs(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    keep = False
    for gate, up, form in _inputs(generator):
        for quant_form in QUANT_FORMS:
            keep = not keep
            yield gate, up, random_scale(generator, quant_form), form, quant_form, keep


def _act_quant_inputs(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    # the quantise does not ask what made its input: one form of it for each activation
    for i, (gate, up, form) in enumerate(_act_inputs(generator)):
        quant_form = QUANT_FORMS[i % len(QUANT_FORMS)]
        yield gate, up, random_scale(generator, quant_form), form, quant_form, i % 3 != 0


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
ACT_MUL = register(
    OpSpec(
        "act_mul",
        "(Tensor gate, Tensor? up, str form) -> Tensor",
        act_mul,
        fake_act_mul,
        _act_inputs,
        1e-3,
        "exp, erf and tanh differ between math libraries in the last bit",
        kind="activation",
        what="activation",
    )
)
ACT_MUL_QUANT = register(
    OpSpec(
        "act_mul_quant",
        "(Tensor gate, Tensor? up, Tensor? scale, str form, str quant_form, bool keep)"
        " -> (Tensor q, Tensor scale_out, Tensor y)",
        act_mul_quant,
        fake_act_mul_quant,
        _act_quant_inputs,
        1e-3,
        "exp, erf and tanh differ between math libraries in the last bit",
    )
)
