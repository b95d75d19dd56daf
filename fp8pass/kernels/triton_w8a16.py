"""The weight-only product in Triton: unquantised activations times an fp8 weight, made wide here.

Each program streams tiles of codes, one byte an element, and makes them bf16 or fp16 in registers:
every code is such a number, so nothing is rounded. What is multiplied by the scale, and where a
value is rounded, is said by a :class:`fp8pass.ops.weight_form.WeightForm`:

* a weight that the source rounds after scaling is scaled and rounded in registers, code by code;
* a scale per tensor or channel of a float32 product is applied to the float32 sum, once;
* a scale per block of a float32 product is applied to the sum over each block of K.

Where the compiler converts no fp8 (before sm89, and not the same dtypes on each ROCm device), the
conversion is integer arithmetic on the bits, exact for all 256 codes.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fp8pass.errors import UnsupportedError
from fp8pass.kernels.triton_dispatch import launcher
from fp8pass.kernels.triton_launch import TL
from fp8pass.kernels.triton_rounding import NATIVE, narrow, rounded, widen
from fp8pass.kernels.triton_w8a16_limits import why_not_w8a16
from fp8pass.ops.weight_form import WeightForm
from fp8pass.quant_key import QuantKey

_REFUSED = "fp8pass's weight-only Triton product does not take"


@triton.jit
def wide_codes(codes, E5M2: tl.constexpr):
    """uint8 codes of e4m3fn or e5m2 as float32, by their bits: exact, NaN and subnormals too."""
    bits = codes.to(tl.int32)
    sign = (bits & 0x80) << 24
    size = bits & 0x7F
    if E5M2:
        # exponent of 5 bits, bias 15; the top one is inf and NaN
        normal = (size << 21) + ((127 - 15) << 23)
        low = (size.to(tl.float32) * 1.52587890625e-05).to(tl.int32, bitcast=True)  # 2^-16
        wide = tl.where(size < 4, low, normal)
        wide = tl.where(size >= 0x7C, 0x7F800000 | ((size & 3) << 21), wide)
    else:
        # exponent of 4 bits, bias 7; the very last code is NaN, none is inf
        normal = (size << 20) + ((127 - 7) << 23)
        low = (size.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)  # 2^-9
        wide = tl.where(size < 8, low, normal)
        wide = tl.where(size == 0x7F, 0x7FC00000, wide)
    return (wide | sign).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["m"])
def _product_kernel(
    a, weight, scale, bias, out,
    m, n, k, a_pitch, pitch, scale_rows, scale_columns,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    E5M2: tl.constexpr, HARDWARE: tl.constexpr,
    SCALE_AT: tl.constexpr, SCALED: tl.constexpr, SUM: tl.constexpr,
    GROUP_K: tl.constexpr, GROUP_N: tl.constexpr,
    BIAS: tl.constexpr, ADDED: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One tile ``[BM, BN]`` of ``out``.

    ``SCALE_AT``: ``weight`` (each code is scaled, and rounded to ``SCALED`` and to the dtype of
    ``a``), ``block`` (the sum over each block of K), ``sum`` (the whole sum, before anything is
    added) or ``product`` (the sum after its rounding to ``SUM``, and rounded to ``SCALED``).
    ``BIAS``: ``none``, ``inside`` or ``after``, then rounded to ``ADDED``.
    """
    DTYPE: tl.constexpr = a.dtype.element_ty
    tiles = (m + BM - 1) // BM
    rows = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    columns = tl.program_id(0) // tiles * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    a_rows = a + rows.to(tl.int64)[:, None] * a_pitch
    w_rows = weight + columns.to(tl.int64)[:, None] * pitch
    a_ok = rows[:, None] < m
    w_ok = columns[:, None] < n
    places = scale + (columns // GROUP_N).to(tl.int64) * scale_columns
    factor = tl.load(places, mask=columns < n, other=0.0)

    acc = tl.full((BM, BN), 0.0, tl.float32)
    steps = (k + BK - 1) // BK
    # the interpreter cannot count to a tensor
    for step in range(0, steps if NATIVE else STEPS):
        at = step * BK + inner[None, :]
        if EVEN_K:
            x = tl.load(a_rows + at, mask=a_ok, other=0.0)
        else:
            x = tl.load(a_rows + at, mask=a_ok & (at < k), other=0.0)
        if EVEN_N and EVEN_K:
            codes = tl.load(w_rows + at)
        elif EVEN_K:
            codes = tl.load(w_rows + at, mask=w_ok, other=0)
        else:
            codes = tl.load(w_rows + at, mask=w_ok & (at < k), other=0)
        if GROUP_K > 0:
            block = (
                (step * BK // GROUP_K).to(tl.int64) * scale_rows
                if NATIVE
                else (step * BK // GROUP_K * scale_rows)
            )
            factor = tl.load(places + block, mask=columns < n, other=0.0)
        if HARDWARE:
            if E5M2:
                # by way of float16: the cast to bfloat16 makes finite numbers of inf and NaN
                y = codes.to(tl.float8e5, bitcast=True).to(tl.float16).to(DTYPE)
            else:
                y = codes.to(tl.float8e4nv, bitcast=True).to(DTYPE)
        else:
            y = narrow(wide_codes(codes, E5M2), DTYPE, NATIVE)
        if SCALE_AT == "weight":
            scaled = widen(y, NATIVE) * widen(factor, NATIVE)[:, None]
            y = narrow(rounded(scaled, SCALED, NATIVE), DTYPE, NATIVE)
        if not NATIVE:
            x = widen(x, NATIVE).to(tl.float32)
            y = widen(y, NATIVE).to(tl.float32)
        if SCALE_AT == "block":
            part = tl.dot(x, tl.trans(y), input_precision="ieee")
            acc = acc + part * widen(factor, NATIVE)[None, :]
        else:
            acc = tl.dot(x, tl.trans(y), acc, input_precision="ieee")

    column_scale = widen(factor, NATIVE)[None, :]
    if SCALE_AT == "sum":
        acc = acc * column_scale
    if BIAS != "none":
        offset = widen(tl.load(bias + columns, mask=columns < n, other=0.0), NATIVE)[None, :]
    if BIAS == "inside":
        acc = acc + offset
    acc = rounded(acc, SUM, NATIVE)
    if SCALE_AT == "product":
        acc = rounded(acc * column_scale, SCALED, NATIVE)
    if BIAS == "after":
        acc = rounded(acc + offset, ADDED, NATIVE)
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    at_out = out + rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(at_out, narrow(acc, out.dtype.element_ty, NATIVE), mask=inside)


# ---- host ---------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """How one launch cuts the product: rows, columns, depth, warps, stages of the pipeline."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int


#: (most rows, tile): few rows stream narrow slices of the weight, so that every multiprocessor has
#: one; not measured yet.
_TILES = (
    (16, Tile(16, 32, 256, 4, 4)),
    (32, Tile(32, 32, 128, 4, 4)),
    (64, Tile(64, 64, 128, 4, 3)),
    (256, Tile(64, 128, 64, 4, 3)),
)
_MANY = Tile(128, 128, 64, 8, 3)
#: Local memory of RDNA holds less.
_SMALL = Tile(32, 64, 64, 4, 1)


def tile_for(rows: int, rocm: bool) -> Tile:
    """The tile for a number of rows."""
    if rocm:
        return Tile(16, 32, 128, 4, 1) if rows <= 16 else _SMALL
    return next((tile for most, tile in _TILES if rows <= most), _MANY)


@cache
def _converts(index: int | None) -> bool:
    """Whether Triton converts both fp8 dtypes on the device."""
    if index is None or not NATIVE.value or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(index) >= (8, 9)


@cache
def _constants(
    form: str,
    key: str,
    a_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    n: int,
    k: int,
    tile: Tile,
    hardware: bool,
) -> dict[str, Any]:
    made = WeightForm.parse(form)
    group = QuantKey.parse(key).scale.group
    blocks = group.name.startswith("group")
    at_weight = blocks or made.at == "weight"
    where = "product"
    if at_weight:
        where = "weight" if made.product != torch.float32 or made.scaled != torch.float32 else "sum"
        where = "block" if where == "sum" and blocks else where
    bk = min(tile.bk, group.row) if blocks else tile.bk
    here = made.product if at_weight else made.scaled
    added = torch.float32 if bias_dtype is None else torch.promote_types(here, bias_dtype)
    return {
        "BM": tile.bm,
        "BN": tile.bn,
        "BK": bk,
        "E5M2": key.startswith("float8_e5m2"),
        "HARDWARE": hardware,
        "SCALE_AT": where,
        "SCALED": TL[made.scaled],
        "SUM": TL[made.product],
        "GROUP_K": group.row if blocks else 0,
        "GROUP_N": group.col if blocks else 1,
        "BIAS": "none" if bias_dtype is None else made.bias,
        "ADDED": TL[added],
        "EVEN_N": n % tile.bn == 0,
        "EVEN_K": k % bk == 0,
        "STEPS": None if NATIVE.value else -(-k // bk),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def w8a16_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    weight_key: str,
    form: str = "",
    hardware: bool | None = None,
) -> torch.Tensor:
    """The weight-only product; see :func:`fp8pass.ops.weight_only.w8a16_mm`.

    Args:
        a: ``[M, K]`` bf16 or fp16; copied first unless its rows are contiguous.
        b: ``[K, N]`` codes, the ``.t()`` view of a row-major ``[N, K]`` weight; likewise.
        scale_b, bias, out_dtype, weight_key, form: as there.
        hardware: whether the hardware converts the codes; None: if it can. For tests.

    Returns:
        contiguous ``[M, N]``.

    Raises:
        UnsupportedError: what :func:`why_not_w8a16` refuses, or operands that do not fit together.
    """
    m, k = a.shape
    n = b.shape[1]
    why = why_not_w8a16(
        n, k, a.dtype, b.dtype, out_dtype, None if bias is None else bias.dtype, weight_key, form
    )
    if why is None and b.shape[0] != k:
        why = f"depths {k} and {b.shape[0]}"
    if why is not None:
        raise UnsupportedError(f"{_REFUSED} {why}")
    out = torch.empty((m, n), dtype=out_dtype, device=a.device)
    if m == 0 or n == 0:
        return out
    scale, scale_rows, scale_columns = _scale(scale_b, weight_key, form, k, n)
    index = a.device.index
    if hardware is None:
        hardware = _converts(index)
    tile = tile_for(m, bool(torch.version.hip))
    constants = _constants(
        form, weight_key, a.dtype, None if bias is None else bias.dtype, n, k, tile, hardware
    )
    a, a_pitch = _rows(a)
    weight, pitch = _rows(b.t())
    if bias is None:
        offset = scale  # any pointer
    elif bias.shape != (n,):
        raise UnsupportedError(f"{_REFUSED} a bias of shape {tuple(bias.shape)} for N = {n}")
    else:
        offset = bias.contiguous()
    programs = -(-m // tile.bm) * -(-n // tile.bn)
    args = (
        a, weight.view(torch.uint8), scale, offset, out, m, n, k, a_pitch, pitch, scale_rows,
        scale_columns,
    )  # fmt: skip
    run = launcher(_product_kernel, **constants)
    if index is None or index == torch.cuda.current_device():
        run(programs, *args)
    else:
        with torch.cuda.device(index):
            run(programs, *args)
    return out


def _scale(
    scale: torch.Tensor, key: str, form: str, k: int, n: int
) -> tuple[torch.Tensor, int, int]:
    """The scale, and its steps from block to block along K and along N."""
    made = WeightForm.parse(form)
    group = QuantKey.parse(key).scale.group
    if scale.dim():  # one without dimensions is multiplied as it is
        scale = scale.to(made.scaled)
    if group.name == "tensor":
        fits = scale.numel() == 1
        steps = 0, 0
    elif group.name == "channel":
        fits = scale.numel() == n
        scale = scale.reshape(-1)
        steps = 0, scale.stride(0)
    else:
        fits = scale.shape == (-(-k // group.row), -(-n // group.col))
        steps = (scale.stride(0), scale.stride(1)) if fits else (0, 0)
    if not fits:
        shape = tuple(scale.shape)
        raise UnsupportedError(f"{_REFUSED} a {group.name} scale of shape {shape} for [{k}, {n}]")
    return scale, *steps


def _rows(matrix: torch.Tensor) -> tuple[torch.Tensor, int]:
    """``matrix`` with contiguous rows, and their distance (of one row: what is usual)."""
    rows, width = matrix.shape
    if width > 1 and matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    return matrix, width if rows == 1 else matrix.stride(0)
