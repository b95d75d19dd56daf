"""What the benchmarks share: the timing of :mod:`fp8pass.tuning.timing`, and tables as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fp8pass.tuning.timing import COLD_BYTES, Captured, interleaved, sets_for

__all__ = ["COLD_BYTES", "Captured", "interleaved", "sets_for", "table"]


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Text with columns; numbers with one decimal."""
    cells = [[f"{c:.1f}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    widths = [max(len(str(h)), *(len(r[i]) for r in cells), 1) for i, h in enumerate(head)]
    lines = ["  ".join(str(h).rjust(w) for h, w in zip(head, widths, strict=True))]
    lines += ["  ".join(c.rjust(w) for c, w in zip(r, widths, strict=True)) for r in cells]
    return "\n".join(lines)
