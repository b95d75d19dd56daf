"""ScaledMMProblem: what one scaled product asks of a kernel, as a plain value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fp8pass.outside import whole_number
from fp8pass.quant_key import PER_TENSOR, QuantKey, ScaleDesc
from fp8pass.target import HOST


@dataclass(frozen=True, slots=True)
class MRange:
    """Range of row counts M, both ends included; ``hi`` None = no upper end known."""

    lo: int = 0
    hi: int | None = None

    @property
    def static(self) -> bool:
        """Whether M is one known number."""
        return self.hi == self.lo

    def covers(self, other: MRange) -> bool:
        """Whether every number of ``other`` is in this range."""
        if other.lo < self.lo:
            return False
        return self.hi is None or (other.hi is not None and other.hi <= self.hi)

    def overlaps(self, other: MRange) -> bool:
        """Whether some number is in both ranges."""
        return (other.hi is None or self.lo <= other.hi) and (
            self.hi is None or other.lo <= self.hi
        )

    def split(self, starts: Iterable[int]) -> tuple[MRange, ...]:
        """This range cut so that a part begins at each of ``starts`` that lies inside it."""
        inside = sorted({s for s in starts if self.lo < s and (self.hi is None or s <= self.hi)})
        lows = [self.lo, *inside]
        highs: list[int | None] = [*(start - 1 for start in inside), self.hi]
        return tuple(MRange(lo, hi) for lo, hi in zip(lows, highs, strict=True))

    @staticmethod
    def parse(text: str) -> MRange:
        """The inverse of ``str``. Raises ValueError for anything else, also for ``9-2``."""
        lo, dash, hi = text.partition("-")
        first = whole_number(lo)
        if not dash:
            return MRange(first, first)
        last = whole_number(hi) if hi else None
        if last is not None and last < first:
            raise ValueError(f"the range {text} ends before it begins")
        return MRange(first, last)

    def __str__(self) -> str:
        if self.static:
            return str(self.lo)
        return f"{self.lo}-{'' if self.hi is None else self.hi}"


@dataclass(frozen=True, slots=True)
class ScaledMMProblem:
    """``out[M, N] = round((a[M, K] @ b[K, N]) * scale_a * scale_b + bias)``.

    Granularity comes from the keys that were recorded when the graph was read, never from
    ``numel()`` or ``dim()`` of a scale: with one token a per-token scale has one element too.

    Attributes:
        activation, weight: the keys of ``a`` and ``b``; see :func:`unquantised` for activations of
            a weight-only product.
        m: range of the number of rows.
        n, k: sizes, None where symbolic.
        out_dtype: dtype of the result.
        bias: dtype of a 1-D bias of length N, or None.
        use_fast_accum: the source allows reduced-precision accumulation.
        a_layout: ``"row"`` (last dim contiguous), ``"col"`` or ``"strided"``.
        b_layout: ``"col"`` (a ``.t()`` view of a row-major ``[N, K]`` weight), ``"row"`` or
            ``"strided"``.
        packed: leading strides equal the row lengths (no padding between rows).
        prepared: the site carries a weight copy made by :func:`fp8pass.prepare`.
        device_type: torch's device type of the operands.
        zero: how a zero point of ``a`` is taken off (the ``zero`` of the product's form), or
            ``none``; ``zero_dtype``: its dtype.
        prepared_dtype: dtype of that copy, None where it is not known: which copy it is.
        form: of a weight-only product, text of a :class:`fp8pass.ops.weight_form.WeightForm`.
    """

    activation: QuantKey
    weight: QuantKey
    m: MRange
    n: int | None
    k: int | None
    out_dtype: torch.dtype
    bias: torch.dtype | None = None
    use_fast_accum: bool = False
    a_layout: str = "row"
    b_layout: str = "col"
    packed: bool = True
    prepared: bool = False
    device_type: str = HOST
    zero: str = "none"
    zero_dtype: torch.dtype | None = None
    prepared_dtype: torch.dtype | None = None
    form: str = ""

    @property
    def weight_only(self) -> bool:
        """Whether the activations are not quantised (W8A16)."""
        return self.activation.dtype in (torch.bfloat16, torch.float16, torch.float32)


def unquantised(dtype: torch.dtype) -> QuantKey:
    """The key of activations that are not quantised: their dtype, and a scale of one."""
    return QuantKey(dtype, ScaleDesc(torch.float32, False, PER_TENSOR))
