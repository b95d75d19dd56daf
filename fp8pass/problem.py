"""ScaledMMProblem: what one scaled product asks of a kernel, as a plain value."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp8pass.quant_key import QuantKey


@dataclass(frozen=True, slots=True)
class MRange:
    """Range of row counts M, both ends included; ``hi`` None = no upper end known."""

    lo: int = 0
    hi: int | None = None

    @property
    def static(self) -> bool:
        """Whether M is one known number."""
        return self.hi == self.lo

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
        activation, weight: the keys of ``a`` and ``b``.
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
    device_type: str = "cpu"
