"""NormForm: how a norm rounds (see :mod:`fp8pass.ops.forms`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch

from fp8pass.errors import OptionError
from fp8pass.ops.form_words import DTYPES, MODEL_NAMES, NAMES, pick


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
        return f"{self.mean},{self.root},{self.weight},{NAMES[self.mid]}"

    @staticmethod
    @cache
    def parse(text: str) -> NormForm:
        """Raises :class:`OptionError` for anything that is not in the closed lists."""
        parts = text.split(",")
        if len(parts) != 4:
            raise OptionError(f"norm form {text!r} does not have 4 parts")
        return NormForm(
            pick(parts[0], NormForm.MEANS, "norm mean"),
            pick(parts[1], NormForm.ROOTS, "norm root"),
            pick(parts[2], NormForm.WEIGHTS, "norm weight"),
            DTYPES[pick(parts[3], MODEL_NAMES, "norm dtype")],
        )
