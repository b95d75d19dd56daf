"""WeightForm: where a weight-only product is scaled and rounded (see :mod:`fp8pass.ops.forms`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch

from fp8pass.errors import OptionError
from fp8pass.ops.form_words import DTYPES, MODEL_NAMES, NAMES, pick


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How ``a @ b`` of activations ``a`` and codes ``b`` is scaled by the scale of ``b``.

    Attributes:
        at: what is scaled: the ``weight`` before the product, or the ``product``. A weight with a
            scale per block always is scaled itself.
        scaled: dtype in which it is multiplied by the scale; the result is rounded to it.
        product: dtype of both operands of the product, to which its result is rounded.
        bias: ``inside`` (added before the product is rounded) or ``after`` (behind the scale, in
            the wider of both dtypes).
    """

    at: str = "product"
    scaled: torch.dtype = torch.float32
    product: torch.dtype = torch.float32
    bias: str = "after"

    PLACES: ClassVar = ("weight", "product")
    BIASES: ClassVar = ("inside", "after")

    def __str__(self) -> str:
        return f"{self.at},{NAMES[self.scaled]},{NAMES[self.product]},{self.bias}"

    @property
    def one_rounding(self) -> bool:
        """Whether everything before the result is float32."""
        return self.scaled == self.product == torch.float32

    @staticmethod
    @cache
    def parse(text: str) -> WeightForm:
        """``""`` is the exact product: float32 throughout, rounded once at the end.

        Raises:
            OptionError: anything that is not in the closed lists.
        """
        if not text:
            return WeightForm()
        parts = text.split(",")
        if len(parts) != 4:
            raise OptionError(f"weight form {text!r} does not have 4 parts")
        return WeightForm(
            pick(parts[0], WeightForm.PLACES, "what is scaled"),
            DTYPES[pick(parts[1], MODEL_NAMES, "dtype of the scaling")],
            DTYPES[pick(parts[2], MODEL_NAMES, "dtype of the product")],
            pick(parts[3], WeightForm.BIASES, "place of the bias"),
        )
