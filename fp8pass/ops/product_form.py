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
        zero: how the zero point of ``a`` is taken from the product, ``none`` without one.
            ``int32`` and ``int64``: ``(a @ b) - zero * sum(b)`` in integers of that width, then
            made float32; ``float32``: both made float32 first; ``codes``: ``(a - zero) @ b``,
            the difference in float32.
    """

    operands: str = "none"
    order: str = "ab"
    zero: str = "none"

    OPERANDS: ClassVar = ("none", "a", "b", "both")
    ORDERS: ClassVar = ("ab", "ba", "joined")
    ZEROS: ClassVar = ("none", "int32", "int64", "float32", "codes")

    def __str__(self) -> str:
        end = "" if self.zero == "none" else f",{self.zero}"
        return f"{self.operands},{self.order}{end}"

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
        if len(parts) not in (2, 3):
            raise OptionError(f"product form {text!r} does not have 2 parts, or 3")
        form = ProductForm(
            pick(parts[0], ProductForm.OPERANDS, "scaled operands"),
            pick(parts[1], ProductForm.ORDERS, "order of scales"),
            pick(parts[2], ProductForm.ZEROS, "zero point") if parts[2:] else "none",
        )
        if form.zero in ("int32", "int64", "float32") and form.operands != "none":
            raise OptionError(f"product form {text!r} corrects a product of scaled operands")
        return form
