"""e4m3fn to e4m3fnuz: the FP8 of gfx942, whose exponent bias is 8 where the usual one has 7."""

from __future__ import annotations

import torch

from fp8pass.errors import UnsupportedError


def to_fnuz(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same values in e4m3fnuz: the bytes stay, and the dequant scale doubles.

    Every e4m3fn code but two kinds is the same byte in e4m3fnuz with half its value, the largest
    (448, which becomes 224) included. Minus zero, the NaN of e4m3fnuz, becomes plus zero; the NaNs
    of e4m3fn become that NaN.

    Args:
        codes: float8_e4m3fn, any shape.
        scale: dequant scale of the codes, any shape.

    Returns:
        ``(float8_e4m3fnuz of the shape of codes, scale * 2)``, both new.

    Raises:
        UnsupportedError: codes of another dtype.
    """
    if codes.dtype != torch.float8_e4m3fn:
        raise UnsupportedError(f"to_fnuz takes float8_e4m3fn codes, not {codes.dtype}")
    raw = codes.contiguous().view(torch.uint8)
    nan = (raw & 0x7F) == 0x7F
    raw = raw.masked_fill(raw == 0x80, 0).masked_fill(nan, 0x80)
    return raw.view(torch.float8_e4m3fnuz), scale * 2
