"""NormForm: how a norm rounds (see :mod:`fp8pass.ops.forms`)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar

import torch

from fp8pass.errors import OptionError
from fp8pass.ops.form_words import DTYPES, MODEL_NAMES, NAMES, pick


@dataclass(frozen=True, slots=True)
class NormForm:
    """How an RMSNorm rounds.

    With ``m`` the mean of squares of ``x.f32``, ``r`` its root and ``inv = 1 / r``, all in float32,
    ``h = x.f32 * inv``. The text is ``mean,root,weight,mid``, then ``name=value`` for each of the
    other parts that is not at its default.

    Attributes:
        mean: ``mean``; ``sum_div`` (sum divided by the width), ``sum_mul`` (sum times ``1 /
            width``); ``norm_div`` (the 2-norm squared again, divided by the width).
        root: ``rsqrt``, ``recip_sqrt`` (``1 / sqrt``, then multiply) or ``div_sqrt`` (divide).
        weight: ``none``; ``after_cast``: ``h.to(mid) * weight`` (Llama, Qwen); ``before_cast``:
            ``(h * weight).to(mid)`` (Gemma, GPT-OSS, ``torch.nn.functional.rms_norm``); the weight
            folded first, ``x_first``: ``((x.f32 * weight) * inv).to(mid)``, or ``root_first``:
            ``(x.f32 * (inv * weight)).to(mid)``.
        mid: the dtype of that cast; float32 = no cast.
        eps: where epsilon goes. ``inside``: ``r = sqrt(m + eps)``; ``max``: ``r = sqrt(max(m,
            eps))``; ``outside``: ``r = sqrt(m) + eps``; ``outside_max``: ``r = max(sqrt(m), eps)``.
        sum: of a residual add. ``rounded``: the norm reads the sum in its own dtype; ``float32``:
            the norm reads ``x.f32 + residual.f32``, and only the sum that is returned is rounded.
        out: for ``after_cast`` with a float32 product: the dtype to which it is cast in the end.
            None = no such cast.
    """

    mean: str
    root: str
    weight: str
    mid: torch.dtype
    eps: str = "inside"
    sum: str = "rounded"
    out: torch.dtype | None = None

    MEANS: ClassVar = ("mean", "sum_div", "sum_mul", "norm_div")
    ROOTS: ClassVar = ("rsqrt", "recip_sqrt", "div_sqrt")
    WEIGHTS: ClassVar = ("none", "after_cast", "before_cast", "x_first", "root_first")
    EPSILONS: ClassVar = ("inside", "max", "outside", "outside_max")
    SUMS: ClassVar = ("rounded", "float32")

    def _extras(self) -> dict[str, str]:
        extras = {}
        for field in fields(self)[4:]:
            value = getattr(self, field.name)
            if value != field.default:
                extras[field.name] = NAMES.get(value) or str(value)
        return extras

    def __str__(self) -> str:
        parts = (self.mean, self.root, self.weight, NAMES[self.mid])
        return ",".join((*parts, *(f"{name}={value}" for name, value in self._extras().items())))

    @staticmethod
    @cache
    def parse(text: str) -> NormForm:
        """Raises :class:`OptionError` for anything that is not in the closed lists."""
        parts = text.split(",")
        if len(parts) < 4:
            raise OptionError(f"norm form {text!r} has fewer than 4 parts")
        form = NormForm(
            pick(parts[0], NormForm.MEANS, "norm mean"),
            pick(parts[1], NormForm.ROOTS, "norm root"),
            pick(parts[2], NormForm.WEIGHTS, "norm weight"),
            DTYPES[pick(parts[3], MODEL_NAMES, "norm dtype")],
            **_parse_extras(text, parts[4:]),
        )
        if form.root == "rsqrt" and form.eps.startswith("outside"):
            raise OptionError(f"norm form {text!r} has epsilon outside of an inverse root")
        if form.out is not None and form.weight != "after_cast":
            raise OptionError(f"norm form {text!r} has a last cast without a weight before it")
        return form


def _parse_extras(text: str, parts: list[str]) -> dict[str, Any]:
    """The parts after the fourth, each ``name=value``."""
    found: dict[str, Any] = {}
    for part in parts:
        name, _, value = part.partition("=")
        if name in found:
            raise OptionError(f"norm form {text!r} has {name!r} twice")
        if name == "eps":
            found[name] = pick(value, NormForm.EPSILONS, "norm eps")
        elif name == "sum":
            found[name] = pick(value, NormForm.SUMS, "norm sum")
        elif name == "out":
            found[name] = DTYPES[pick(value, MODEL_NAMES[1:], "norm out")]
        else:
            raise OptionError(f"norm form {text!r} has the unknown part {part!r}")
    return found
