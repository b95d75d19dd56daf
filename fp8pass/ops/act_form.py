"""ActForm: how an activation rounds (see :mod:`fp8pass.ops.forms`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch

from fp8pass.errors import OptionError
from fp8pass.ops.form_words import DTYPES, MODEL_NAMES, NAMES, pick

#: Constants of the closed forms, as torch's decompositions write them.
SQRT_HALF = 0.7071067811865476
SQRT_TWO = 1.4142135623730951
SQRT_2_OVER_PI = 0.7978845608028654
CUBIC = 0.044715
QUICK = 1.702
#: What GPT-OSS clamps gate and up to.
GPT_OSS_LIMIT = 7.0


@dataclass(frozen=True, slots=True)
class ActForm:
    """How ``act(gate) * up``, or ``act(gate)`` alone, rounds.

    Attributes:
        act: the closed form of the activation, one of :attr:`ACTS`:

            - ``div``: SiLU as ``g / (1 + exp(-g))``; ``sigmoid``: SiLU as ``g * sigmoid(g)``;
            - ``gelu_erf``: ``(g * 0.5) * (1 + erf(g * sqrt(1/2)))``; ``gelu_erf_div`` the same with
              ``erf(g / sqrt(2))``;
            - ``gelu_tanh``: ``(g * 0.5) * (1 + tanh(sqrt(2/pi) * (g + 0.044715 * (g * g * g))))``;
              ``gelu_tanh_pow`` the same with ``pow(g, 3)``;
            - ``gelu_quick``: ``g * sigmoid(1.702 * g)``;
            - ``gpt_oss``: ``gelu_quick`` of ``min(g, 7)``, times ``clamp(up, -7, 7) + 1``;
            - ``relu`` and ``relu2``: ``max(g, 0)`` and its square.
        mid: dtype that the activation is rounded to before the product with ``up``.
        out: dtype of the product; of the activation where there is no ``up``.
        compute: dtype that the gate is cast to and every step of the activation is rounded to.
    """

    act: str
    mid: torch.dtype
    out: torch.dtype
    compute: torch.dtype = torch.float32

    SILUS: ClassVar = ("div", "sigmoid")
    ACTS: ClassVar = (
        *SILUS,
        "gelu_erf",
        "gelu_erf_div",
        "gelu_tanh",
        "gelu_tanh_pow",
        "gelu_quick",
        "gpt_oss",
        "relu",
        "relu2",
    )

    def __str__(self) -> str:
        text = f"{self.act},{NAMES[self.mid]},{NAMES[self.out]}"
        return text if self.compute == torch.float32 else f"{text},{NAMES[self.compute]}"

    @staticmethod
    @cache
    def parse(text: str) -> ActForm:
        """Raises :class:`OptionError` for anything that is not in the closed lists."""
        parts = text.split(",")
        if len(parts) not in (3, 4):
            raise OptionError(f"activation form {text!r} does not have 3 parts, or 4")
        act = pick(parts[0], ActForm.ACTS, "activation")
        dtypes = [DTYPES[pick(part, MODEL_NAMES, "activation dtype")] for part in parts[1:]]
        form = ActForm(act, *dtypes)
        if str(form) != text:  # one form, one text
            raise OptionError(f"activation form {text!r} is written {str(form)!r}")
        return form
