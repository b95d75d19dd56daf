"""QuantKey: how a tensor is quantised (dtype, scale granularity, static or dynamic).

The names follow vLLM (``GroupShape``, ``kFp8StaticTensorSym``, ...), because the people who read a
report of fp8pass read vLLM's as well. A key is a plain value: it travels inside graphs as a string
(``str(key)``), since an operator's schema cannot hold a Python object.

Convention everywhere: *dequant scale*, ``x ~ q * scale``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import torch

from fp8pass.errors import OptionError

#: Dtypes that a key may name. float8 with their largest finite value, int8 for W8A8 INT8.
_DTYPES: dict[str, torch.dtype] = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e5m2fnuz": torch.float8_e5m2fnuz,
    "int8": torch.int8,
}
FP8_DTYPES = frozenset(dtype for dtype in _DTYPES.values() if dtype.is_floating_point)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float8_e4m3fn`` -> ``"float8_e4m3fn"``."""
    return str(dtype).removeprefix("torch.")


@cache
def fp8_max(dtype: torch.dtype) -> float:
    """Largest finite value of an fp8 dtype (448 for e4m3fn, 240 for e4m3fnuz, 57344 for e5m2)."""
    return float(torch.finfo(dtype).max)


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Shape ``(row, col)`` of the block of elements that shares one scale; -1 is "the whole dim".

    Rows are tokens for an activation ``[M, K]`` and input features for a weight seen as ``[K, N]``.
    """

    row: int
    col: int

    @property
    def name(self) -> str:
        """The granularity in one word: tensor, token, channel, or ``group<r>x<c>``."""
        return _GROUP_NAMES.get((self.row, self.col), f"group{self.row}x{self.col}")

    @staticmethod
    def parse(text: str) -> GroupShape:
        """Inverse of :attr:`name`. Raises :class:`OptionError` for an unknown granularity."""
        for (row, col), name in _GROUP_NAMES.items():
            if name == text:
                return GroupShape(row, col)
        block = re.fullmatch(r"group([1-9][0-9]{0,17})x([1-9][0-9]{0,17})", text)
        if block is not None:
            return GroupShape(int(block[1]), int(block[2]))
        allowed = ", ".join(_GROUP_NAMES.values())
        raise OptionError(f"unknown granularity {text!r}; allowed: {allowed}, group<rows>x<cols>")


_GROUP_NAMES = {(-1, -1): "tensor", (1, -1): "token", (-1, 1): "channel"}

PER_TENSOR = GroupShape(-1, -1)
PER_TOKEN = GroupShape(1, -1)
PER_CHANNEL = GroupShape(-1, 1)


@dataclass(frozen=True, slots=True)
class ScaleDesc:
    """How the dequant scale is stored: dtype, known before run time or not, granularity, format."""

    dtype: torch.dtype
    static: bool
    group: GroupShape
    format: str = "fp32"  # "fp32" or "ue8m0" (a power of two in one byte)


@dataclass(frozen=True, slots=True)
class QuantKey:
    """Everything about a quantised tensor that decides which kernel may read it."""

    dtype: torch.dtype
    scale: ScaleDesc
    symmetric: bool = True

    def __str__(self) -> str:
        parts = [
            dtype_name(self.dtype),
            "static" if self.scale.static else "dynamic",
            self.scale.group.name,
        ]
        if self.scale.format != "fp32":
            parts.append(self.scale.format)
        if not self.symmetric:
            parts.append("asym")
        return "/".join(parts)

    @property
    def granularity(self) -> str:
        """``tensor``, ``token``, ``channel`` or ``group<r>x<c>``."""
        return self.scale.group.name

    @staticmethod
    def parse(text: str) -> QuantKey:
        """Inverse of ``str(key)``. Raises :class:`OptionError` naming what was not understood."""
        return _parse(text)


@cache
def _parse(text: str) -> QuantKey:
    parts = text.split("/")
    if len(parts) < 3 or parts[0] not in _DTYPES or parts[1] not in ("static", "dynamic"):
        raise OptionError(
            f"{text!r} is not a quantisation key; the form is dtype/static|dynamic/granularity,"
            f" dtype one of {', '.join(_DTYPES)}"
        )
    rest = parts[3:]
    unknown = [part for part in rest if part not in ("ue8m0", "asym")]
    if unknown:
        raise OptionError(f"{text!r} has unknown parts {unknown}; allowed: 'ue8m0', 'asym'")
    scale = ScaleDesc(
        torch.float32,
        parts[1] == "static",
        GroupShape.parse(parts[2]),
        "ue8m0" if "ue8m0" in rest else "fp32",
    )
    return QuantKey(_DTYPES[parts[0]], scale, "asym" not in rest)


kFp8StaticTensorSym = QuantKey.parse("float8_e4m3fn/static/tensor")
kFp8DynamicTensorSym = QuantKey.parse("float8_e4m3fn/dynamic/tensor")
kFp8DynamicTokenSym = QuantKey.parse("float8_e4m3fn/dynamic/token")
kFp8StaticChannelSym = QuantKey.parse("float8_e4m3fn/static/channel")
