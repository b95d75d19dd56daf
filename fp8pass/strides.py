"""Strides of contiguous tensors for sizes that may be symbolic, without asking them anything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def contiguous_strides(shape: Iterable[Any]) -> list[Any]:
    """As torch gives them: a size that is known to be 0 counts as 1. Adds no guard."""
    strides: list[Any] = []
    stride: Any = 1
    for size in reversed(list(shape)):
        strides.append(stride)
        stride = stride * (1 if type(size) is int and size == 0 else size)
    return strides[::-1]
