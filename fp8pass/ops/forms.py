"""Forms: what differs in *numbers* between two spellings of one operator.

A generic operator stands for many spellings. What changes its result - where a value is rounded
and to what, divide or multiply by the reciprocal, the scale's floor, the largest code - is recorded
in a form. The lists are closed: a reader that meets anything else does not read. A form travels in
the graph as a string, since a schema cannot hold a Python object; ``parse`` is its inverse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch

from fp8pass.errors import OptionError

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
    )
}
MODEL_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def _pick(value: str, allowed: tuple[str, ...], what: str) -> str:
    if value not in allowed:
        raise OptionError(f"{what} {value!r} is not one of {', '.join(allowed)}")
    return value


@dataclass(frozen=True, slots=True)
class NormForm:
    """How an RMSNorm rounds.  With ``h = x.f32 * inv``, ``inv = 1/sqrt(mean(x.f32 ** 2) + eps)``:

    Attributes:
        mean: ``mean`` or ``sum_div`` (sum divided by the width).
        root: ``rsqrt``, ``recip_sqrt`` (``1 / sqrt``, then multiply) or ``div_sqrt`` (divide).
        weight: ``none``; ``after_cast``: ``h.to(mid) * weight`` (Llama, Qwen); ``before_cast``:
            ``(h * weight).to(mid)`` (Gemma, GPT-OSS, ``torch.nn.functional.rms_norm``).
        mid: the dtype of that cast; float32 = no cast.
    """

    mean: str
    root: str
    weight: str
    mid: torch.dtype

    MEANS: ClassVar = ("mean", "sum_div")
    ROOTS: ClassVar = ("rsqrt", "recip_sqrt", "div_sqrt")
    WEIGHTS: ClassVar = ("none", "after_cast", "before_cast")

    def __str__(self) -> str:
        return f"{self.mean},{self.root},{self.weight},{_NAMES[self.mid]}"

    @staticmethod
    @cache
    def parse(text: str) -> NormForm:
        """Raises :class:`OptionError` for anything that is not in the closed lists."""
        parts = text.split(",")
        if len(parts) != 4:
            raise OptionError(f"norm form {text!r} does not have 4 parts")
        return NormForm(
            _pick(parts[0], NormForm.MEANS, "norm mean"),
            _pick(parts[1], NormForm.ROOTS, "norm root"),
            _pick(parts[2], NormForm.WEIGHTS, "norm weight"),
            _DTYPES[_pick(parts[3], ("float32", "bfloat16", "float16"), "norm dtype")],
        )


@dataclass(frozen=True, slots=True)
class ActForm:
    """How SiLU(gate) * up rounds.  SiLU is evaluated in float32.

    Attributes:
        silu: ``div``: ``g / (1 + exp(-g))``; ``sigmoid``: ``g * sigmoid(g)``.
        mid: dtype that SiLU is rounded to before the product with ``up``; float32 = not rounded.
        out: dtype of the product.
    """

    silu: str
    mid: torch.dtype
    out: torch.dtype

    SILUS: ClassVar = ("div", "sigmoid")

    def __str__(self) -> str:
        return f"{self.silu},{_NAMES[self.mid]},{_NAMES[self.out]}"

    @staticmethod
    @cache
    def parse(text: str) -> ActForm:
        """Raises :class:`OptionError` for anything that is not in the closed lists."""
        parts = text.split(",")
        if len(parts) != 3:
            raise OptionError(f"activation form {text!r} does not have 3 parts")
        names = ("float32", "bfloat16", "float16")
        return ActForm(
            _pick(parts[0], ActForm.SILUS, "silu"),
            _DTYPES[_pick(parts[1], names, "activation dtype")],
            _DTYPES[_pick(parts[2], names, "activation dtype")],
        )


@dataclass(frozen=True, slots=True)
class QuantForm:
    """How a tensor is quantised to fp8.

    ``q = clamp(x.to(compute) / scale, lo, hi).to(dtype)``.

    Attributes:
        dtype: the fp8 dtype.
        granularity: ``tensor`` or ``token`` (one scale per row, over the last dim).
        compute: dtype in which ``x`` is divided; float32, or a model dtype where the source divides
            without an upcast (and so rounds once more).
        scale: ``given`` (static), ``div`` (``amax / qmax``) or ``mul`` (``amax * (1 / qmax)``);
            always in float32.
        qmax: the constant of that expression; for ``mul`` the factor itself.
        floor: ``none``, ``scale`` (the scale is clamped from below) or ``amax`` (amax is).
        floor_value: that lower bound.
        apply: ``div`` or ``mul_recip`` (multiply by the reciprocal of the scale).
        lo, hi: the clamp before the cast.
    """

    dtype: torch.dtype
    granularity: str
    compute: torch.dtype
    scale: str
    qmax: float
    floor: str
    floor_value: float
    apply: str
    lo: float
    hi: float

    GRANULARITIES: ClassVar = ("tensor", "token")
    SCALES: ClassVar = ("given", "div", "mul")
    FLOORS: ClassVar = ("none", "scale", "amax")
    APPLIES: ClassVar = ("div", "mul_recip")

    @property
    def static(self) -> bool:
        """Whether the scale is an input of the quantisation."""
        return self.scale == "given"

    @property
    def key(self) -> str:
        """The text of this tensor's :class:`fp8pass.quant_key.QuantKey`."""
        when = "static" if self.static else "dynamic"
        return f"{_NAMES[self.dtype]}/{when}/{self.granularity}"

    def __str__(self) -> str:
        return ",".join(
            (
                _NAMES[self.dtype],
                self.granularity,
                _NAMES[self.compute],
                self.scale,
                repr(self.qmax),
                self.floor,
                repr(self.floor_value),
                self.apply,
                repr(self.lo),
                repr(self.hi),
            )
        )

    @staticmethod
    @cache
    def parse(text: str) -> QuantForm:
        """Raises :class:`OptionError` for anything that is not in the closed lists."""
        parts = text.split(",")
        if len(parts) != 10:
            raise OptionError(f"quantise form {text!r} does not have 10 parts")
        fp8 = tuple(name for name in _DTYPES if name.startswith("float8"))
        try:
            qmax, floor_value, lo, hi = (float(parts[i]) for i in (4, 6, 8, 9))
        except ValueError:
            raise OptionError(f"quantise form {text!r} has a part that is not a number") from None
        if not all(map(math.isfinite, (qmax, floor_value, lo, hi))):
            raise OptionError(f"quantise form {text!r} has a part that is not finite")
        return QuantForm(
            dtype=_DTYPES[_pick(parts[0], fp8, "fp8 dtype")],
            granularity=_pick(parts[1], QuantForm.GRANULARITIES, "granularity"),
            compute=_DTYPES[_pick(parts[2], ("float32", "bfloat16", "float16"), "compute dtype")],
            scale=_pick(parts[3], QuantForm.SCALES, "scale"),
            qmax=qmax,
            floor=_pick(parts[5], QuantForm.FLOORS, "floor"),
            floor_value=floor_value,
            apply=_pick(parts[7], QuantForm.APPLIES, "apply"),
            lo=lo,
            hi=hi,
        )


def static_form(dtype: torch.dtype = torch.float8_e4m3fn) -> QuantForm:
    """The usual static per-tensor quantise: float32 division, saturating."""
    top = float(torch.finfo(dtype).max)
    return QuantForm(dtype, "tensor", torch.float32, "given", top, "none", 0.0, "div", -top, top)


def dynamic_form(granularity: str, dtype: torch.dtype = torch.float8_e4m3fn) -> QuantForm:
    """The usual dynamic quantise: ``scale = max(amax / max, 1e-12)``, float32, saturating."""
    top = float(torch.finfo(dtype).max)
    return QuantForm(
        dtype, granularity, torch.float32, "div", top, "scale", 1e-12, "div", -top, top
    )
