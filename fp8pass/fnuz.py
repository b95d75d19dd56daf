"""e4m3fn and e4m3fnuz: the FP8 of gfx942, whose exponent bias is 8 where the usual one has 7.

Every e4m3fn code but two kinds is the same byte in e4m3fnuz with half its value. So a scale that
doubles, here and in the quantise of the input, gives the same numbers: with 224 in place of 448 as
the largest value, every quotient halves and every code keeps its byte, down to the smallest
subnormal. (e4m3fnuz goes up to 240, a code that e4m3fn does not have; using it would be another
quantisation.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from fp8pass.errors import UnsupportedError

if TYPE_CHECKING:
    from fp8pass.fp8_linear import Fp8Linear

E4M3FN, E4M3FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
_MINUS_ZERO = 0x80


def to_fnuz(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same values in e4m3fnuz: the bytes stay, and the dequant scale doubles.

    The largest value (448, which becomes 224) is included. Minus zero, the NaN of e4m3fnuz, becomes
    plus zero; the NaNs of e4m3fn become that NaN.

    Args:
        codes: float8_e4m3fn, any shape.
        scale: dequant scale of the codes, any shape.

    Returns:
        ``(float8_e4m3fnuz of the shape of codes, scale * 2)``, both new.

    Raises:
        UnsupportedError: codes of another dtype.
    """
    if codes.dtype != E4M3FN:
        raise UnsupportedError(f"to_fnuz takes float8_e4m3fn codes, not {codes.dtype}")
    raw = codes.contiguous().view(torch.uint8)
    nan = (raw & 0x7F) == 0x7F
    raw = raw.masked_fill(raw == _MINUS_ZERO, 0).masked_fill(nan, _MINUS_ZERO)
    return raw.view(E4M3FNUZ), scale * 2


def from_fnuz(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of :func:`to_fnuz`; the sign of a zero is lost.

    Raises:
        UnsupportedError: codes of another dtype, or among them +-240, which e4m3fn cannot hold at
            half the scale.
    """
    if codes.dtype != E4M3FNUZ:
        raise UnsupportedError(f"from_fnuz takes float8_e4m3fnuz codes, not {codes.dtype}")
    raw = codes.contiguous().view(torch.uint8)
    if bool(((raw & 0x7F) == 0x7F).any()):
        raise UnsupportedError("from_fnuz: a code of 240 has no counterpart in float8_e4m3fn")
    return raw.masked_fill(raw == _MINUS_ZERO, 0x7F).view(E4M3FN), scale / 2


def why_not_loaded(held: torch.dtype, prefix: str, state: Mapping[str, torch.Tensor]) -> str | None:
    """Why a state dict cannot be loaded into an ``Fp8Linear`` with codes of ``held``, or None.

    Codes of ``held`` are loaded as they are, and those of e4m3fn converted; scales that come
    without codes are taken for e4m3fn's.
    """
    new = state.get(prefix + "weight")
    if new is not None and new.dtype == E4M3FNUZ != held:
        return (
            f"{prefix}weight is {new.dtype}: this state dict was saved after "
            "fp8pass.prepare(model, ...) for a target of that FP8 (gfx942). Load it into a model "
            "that is prepared for it too, or save it after fp8pass.preparation.unprepare(model)"
        )
    if new is not None and new.dtype not in (E4M3FN, held):
        return (
            f"{prefix}weight is {new.dtype}, and an Fp8Linear holds {held} codes: load such a "
            "checkpoint before quantize_, not after"
        )
    scales = [prefix + name for name in ("weight_scale", "input_scale")]
    if new is None and held != E4M3FN and any(name in state for name in scales):
        return f"{prefix}weight is missing beside its scales, and those of {held} codes are others"
    return None


def convert_linear(linear: Fp8Linear, dtype: torch.dtype) -> bool:
    """Give an ``Fp8Linear`` codes of ``dtype``, in place, with the scales that keep its values.

    Its input is quantised to that dtype from then on. A prepared copy is dropped, and it leaves the
    tensors that it was merged into; an input scale that several linears share stays shared.

    Returns:
        Whether anything had to be done.

    Raises:
        UnsupportedError: codes that the other dtype does not have.
    """
    had = linear.weight.dtype
    if had == dtype:
        return False
    import fp8pass.ops  # noqa: F401  registers the operator that the forward may call now

    convert, factor = (to_fnuz, 2.0) if dtype == E4M3FNUZ else (from_fnuz, 0.5)
    with torch.inference_mode(False), torch.no_grad():
        codes, scale = convert(linear.weight, linear.weight_scale)
        shared = linear.input_scale
        linear.unprepare_weight()
        linear.unmerge()
        linear._buffers.update(weight=codes, weight_scale=scale)
        if shared is not None:
            linear._buffers["input_scale"] = shared * factor
            linear._rejoin_scale(shared)
    linear._fnuz = dtype == E4M3FNUZ
    before, after = (str(d).removeprefix("torch.") for d in (had, dtype))
    for name in ("_act_key", "_weight_key"):
        key = getattr(linear, name)
        setattr(linear, name, key.replace(f"{before}/", f"{after}/"))
    return True
