"""ActForm: how an activation rounds (see :mod:`fp8pass.ops.forms`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch

from fp8pass.errors import OptionError
from fp8pass.ops.form_words import DTYPES, MODEL_NAMES, NAMES, pick


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
        return f"{self.silu},{NAMES[self.mid]},{NAMES[self.out]}"

    @staticmethod
    @cache
    def parse(text: str) -> ActForm:
        """Raises :class:`OptionError` for anything that is not in the closed lists."""
        parts = text.split(",")
        if len(parts) != 3:
            raise OptionError(f"activation form {text!r} does not have 3 parts")
        return ActForm(
            pick(parts[0], ActForm.SILUS, "silu"),
            DTYPES[pick(parts[1], MODEL_NAMES, "activation dtype")],
            DTYPES[pick(parts[2], MODEL_NAMES, "activation dtype")],
        )
