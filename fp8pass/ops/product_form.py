"""ProductForm: where a scaled product is scaled (see :mod:`fp8pass.ops.forms`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from fp8pass.errors import OptionError
from fp8pass.ops.form_words import pick


@dataclass(frozen=True, slots=True)
class ProductForm:
    """How ``round(a @ b scaled + bias)`` is scaled. Everything before the one rounding is float32.

    Attributes:
        operands: which operands are multiplied by their scale before the product: ``none``,
            ``a``, ``b`` or ``both``. An operand with a scale per block always is.
        order: how the product is multiplied by the scales that are left: ``ab`` (that of ``a``
            first), ``ba``, or ``joined`` (by the product of both scales).
    """

    operands: str = "none"
    order: str = "ab"

    OPERANDS: ClassVar = ("none", "a", "b", "both")
    ORDERS: ClassVar = ("ab", "ba", "joined")

    def __str__(self) -> str:
        return f"{self.operands},{self.order}"

    def scales(self, operand: str) -> bool:
        """Whether ``operand`` (``"a"`` or ``"b"``) is scaled before the product."""
        return self.operands in (operand, "both")

    @staticmethod
    @cache
    def parse(text: str) -> ProductForm:
        """``""`` is the form of ``aten._scaled_mm``.

        Raises:
            OptionError: anything that is not in the closed lists.
        """
        if not text:
            return ProductForm()
        parts = text.split(",")
        if len(parts) != 2:
            raise OptionError(f"product form {text!r} does not have 2 parts")
        return ProductForm(
            pick(parts[0], ProductForm.OPERANDS, "scaled operands"),
            pick(parts[1], ProductForm.ORDERS, "order of scales"),
        )
