"""LayerNormForm: how a LayerNorm rounds (see :mod:`fp8pass.ops.forms`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch

from fp8pass.errors import OptionError
from fp8pass.ops.form_words import DTYPES, MODEL_NAMES, NAMES, pick


@dataclass(frozen=True, slots=True)
class LayerNormForm:
    """How a LayerNorm rounds.

    With ``d = x.f32 - mean``, ``v`` the variance, all in float32, and ``h = d / sqrt(v + eps)``.

    Attributes:
        variance: ``var_mean`` (mean and variance of one reduction, as
            ``torch.nn.functional.layer_norm``), ``var`` (mean and variance of two), ``mean_square``
            (the mean of ``d ** 2``).
        root: ``rsqrt``, ``recip_sqrt`` (``1 / sqrt``, then multiply) or ``div_sqrt`` (divide).
        affine: ``none``; ``before_cast``: ``(h * weight + bias).to(mid)``; ``after_cast``:
            ``h.to(mid) * weight + bias``, each rounded to its promoted dtype. One of the two may be
            missing.
        mid: the dtype of that cast; float32 = no cast.
    """

    variance: str
    root: str
    affine: str
    mid: torch.dtype

    VARIANCES: ClassVar = ("var_mean", "var", "mean_square")
    ROOTS: ClassVar = ("rsqrt", "recip_sqrt", "div_sqrt")
    AFFINES: ClassVar = ("none", "after_cast", "before_cast")

    def __str__(self) -> str:
        return f"{self.variance},{self.root},{self.affine},{NAMES[self.mid]}"

    @staticmethod
    @cache
    def parse(text: str) -> LayerNormForm:
        """Raises :class:`OptionError` for anything that is not in the closed lists."""
        parts = text.split(",")
        if len(parts) != 4:
            raise OptionError(f"layer norm form {text!r} does not have 4 parts")
        return LayerNormForm(
            pick(parts[0], LayerNormForm.VARIANCES, "layer norm variance"),
            pick(parts[1], LayerNormForm.ROOTS, "layer norm root"),
            pick(parts[2], LayerNormForm.AFFINES, "layer norm affine"),
            DTYPES[pick(parts[3], MODEL_NAMES, "layer norm dtype")],
        )
