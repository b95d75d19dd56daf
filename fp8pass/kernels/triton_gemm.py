"""The scaled product in Triton: ``round((a @ b) * scale_a * scale_b + bias)``, fp8 or int8 codes.

One kernel, of which :class:`~fp8pass.kernels.triton_gemm_tiles.Tile` says how it cuts the product.

*Few rows.* A Hopper tensor core instruction takes 64 rows of one operand and as few as 16 of the
other. With few rows of activations the weights therefore stand on the wide side (``swap``). Reading
the weights is all that takes time; what is tuned is how many bytes are on their way at any moment:

* ``pack``: the 64 rows are ``64 / pack`` weight rows at ``pack`` depths, so that narrow slices of a
  small weight still occupy every multiprocessor. Products of one depth's weights with another
  depth's activations are computed too, and dropped; the rest is added up at the end.
* ``splits``: the depth is divided among programs, which leave float32 sums; a second kernel adds
  them up in a fixed order, so that results do not depend on who came first. (The last program to
  arrive could do it, but needs counters that are zero before every call and shared by no two.)
* ``prefetch``: bytes of each weight row asked into L2 before anything is waited for.

*Launches overlap* (programmatic dependent launch, see the CUDA programming guide): the next kernel
may start before this one has ended, and this one starts before the one ahead has. Until
``griddepcontrol.wait`` it reads no operand: a prefetch into L2, where all writes go, has no effect
on what is read later, even if the kernel ahead is still writing the weights.

*Accumulation.* The fp8 instructions of Hopper align 32 products and the sum so far to the largest
of them and keep 13 bits behind its leading one ("DeepSeek-V3 Technical Report", 2024, section
3.5.2). Unless the source allows that for the whole depth, what they have accumulated over 128
products is added to a float32 sum, as CUTLASS does by default: where no sign cancels, 128 products
lose up to 2^-10 of their sum in that model of the hardware, and 256 three times as much. Products
of int8 codes are summed in int32, exactly.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fp8pass.errors import UnsupportedError
from fp8pass.kernels.triton_dispatch import Launcher
from fp8pass.kernels.triton_gemm_limits import INT8, why_not_gemm
from fp8pass.kernels.triton_gemm_tiles import Tile, bucket, int8_tile, tile_for
from fp8pass.kernels.triton_rounding import NATIVE, narrow, widen
from fp8pass.kernels.triton_walk import ask_for_weights, tile_of, unpacked

try:  # absent from builds of Triton without the NVIDIA backend, where only the interpreter runs
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # pragma: no cover
    gdc_wait = gdc_launch_dependents = None

#: Products accumulated in the tensor core before they are added to the float32 sum.
_PROMOTED = 128
#: Columns of one program that adds up the sums of ``splits``.
_COMBINED = 512
_REFUSED = "fp8pass's Triton product does not take"


@triton.jit
def _scale(pointer, index, valid, VECTOR: tl.constexpr):
    """The scales of ``index``, or the only one."""
    if VECTOR:
        scale = tl.load(pointer + index, mask=valid, other=0.0)
    else:
        scale = tl.load(pointer + index * 0)
    return scale


@triton.jit(do_not_specialize=["m"])
def _product_kernel(
    a, w, scale_a, scale_b, bias, out, m, n, k, stride_a, stride_w,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BIAS: tl.constexpr,
    SWAP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PACK: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr, PREFETCH: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, IMPRECISE: tl.constexpr, SUM: tl.constexpr,
    OVERLAP: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One tile of ``out [M, N]``, or with SPLITS > 1 of the sums ``out [SPLITS, M, N]`` in SUM.

    ``a`` is ``[M, K]``, ``w`` is ``[N, K]``, both with K contiguous.
    """
    if OVERLAP:
        gdc_launch_dependents()
    tiles_m = (m + BM - 1) // BM
    tiles_n = (n + BN - 1) // BN
    depth: tl.constexpr = BK * PACK
    pid = tl.program_id(0)
    first = 0
    steps = (k + depth - 1) // depth
    part = pid // (tiles_m * tiles_n)
    if SPLITS > 1:
        pid = pid % (tiles_m * tiles_n)
        each = (steps + SPLITS - 1) // SPLITS
        first = part * each
        steps = tl.minimum(steps - first, each)
    tile_m, tile_n = tile_of(pid, tiles_m, tiles_n, GROUP)

    # operand row r holds matrix row r % BM (or BN) at the depth of its part, r // BM
    packed_m = tl.arange(0, PACK * BM)
    packed_n = tl.arange(0, PACK * BN)
    a_index = tile_m * BM + packed_m % BM
    w_index = tile_n * BN + packed_n % BN
    a_shift = packed_m // BM * BK
    w_shift = packed_n // BN * BK
    inner = tl.arange(0, BK)
    a_rows = a + a_index.to(tl.int64)[:, None] * stride_a + a_shift[:, None]
    w_rows = w + w_index.to(tl.int64)[:, None] * stride_w + w_shift[:, None]
    a_ok = a_index[:, None] < m
    w_ok = w_index[:, None] < n

    rows = tile_m * BM + tl.arange(0, BM)
    columns = tile_n * BN + tl.arange(0, BN)
    if OVERLAP:
        if PREFETCH > 0:
            starts = w + columns.to(tl.int64)[:, None] * stride_w + first * depth
            left = k - first * depth - tl.arange(0, PREFETCH // 128)[None, :] * 128
            ask_for_weights(starts, (columns[:, None] < n) & (left > 0), PREFETCH)
        gdc_wait()
    if SPLITS == 1:
        # early, since nothing of this is in L2 and the products take as long as the loads
        row_scale = _scale(scale_a, rows, rows < m, ROWS)
        column_scale = _scale(scale_b, columns, columns < n, COLUMNS)
        if BIAS:
            offset = tl.load(bias + columns, mask=columns < n, other=0.0)

    if SWAP:
        acc = tl.full((PACK * BN, PACK * BM), 0, SUM)
    else:
        acc = tl.full((PACK * BM, PACK * BN), 0, SUM)
    # the interpreter cannot count to a tensor; STEPS may be too many, which the masks cover
    for step in range(0, steps if NATIVE else STEPS):
        at = (first + step) * depth + inner[None, :]
        if EVEN_K:
            x = tl.load(a_rows + at, mask=a_ok, other=0.0)
        else:
            x = tl.load(a_rows + at, mask=a_ok & (a_shift[:, None] + at < k), other=0.0)
        if EVEN_N and EVEN_K:
            y = tl.load(w_rows + at)
        elif EVEN_K:
            y = tl.load(w_rows + at, mask=w_ok, other=0.0)
        else:
            y = tl.load(w_rows + at, mask=w_ok & (w_shift[:, None] + at < k), other=0.0)
        if SWAP:
            acc = tl.dot(y, tl.trans(x), acc, max_num_imprecise_acc=IMPRECISE, out_dtype=SUM)
        else:
            acc = tl.dot(x, tl.trans(y), acc, max_num_imprecise_acc=IMPRECISE, out_dtype=SUM)
    if SWAP:
        acc = tl.trans(acc)
    if PACK > 1:
        acc = unpacked(acc, PACK, BM, BN)

    places = rows.to(tl.int64)[:, None] * n + columns[None, :]
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    if SPLITS > 1:
        tl.store(out + part.to(tl.int64) * m * n + places, acc, mask=inside)
    else:
        acc = acc.to(tl.float32) * row_scale[:, None] * column_scale[None, :]
        if BIAS:
            acc = acc + widen(offset, NATIVE)[None, :]
        tl.store(out + places, narrow(acc, out.dtype.element_ty, NATIVE), mask=inside)


@triton.jit(do_not_specialize=["m"])
def _combine_kernel(
    sums, scale_a, scale_b, bias, out, m, n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """``out [M, N]`` from ``sums [SPLITS, M, N]``, added up in their order."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    blocks = (n + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // blocks
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    places = row.to(tl.int64) * n + columns
    if SCALED:
        row_scale = _scale(scale_a, row, row < m, ROWS)
        column_scale = _scale(scale_b, columns, inside, COLUMNS)
    acc = tl.load(sums + places, mask=inside, other=0.0)
    for part in tl.static_range(1, SPLITS):
        acc = acc + tl.load(sums + places + tl.cast(m, tl.int64) * n * part, mask=inside, other=0.0)
    acc = acc.to(tl.float32)
    if SCALED:
        acc = acc * row_scale * column_scale
    if BIAS:
        acc = acc + widen(tl.load(bias + columns, mask=inside, other=0.0), NATIVE)
    tl.store(out + places, narrow(acc, out.dtype.element_ty, NATIVE), mask=inside)


# ---- host ---------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """The launches of a tile: the product, and the kernel that adds up its splits."""

    product: Launcher
    combine: Launcher | None
    block: int = 0


def combined(n: int) -> int:
    """Columns of one program that adds up splits."""
    return min(_COMBINED, max(32, 1 << (n - 1).bit_length()))


@lru_cache(maxsize=4096)
def _plan(
    tile: Tile, n: int, k: int, rows: bool, columns: bool, bias: bool, fast: bool, integer: bool
) -> Plan:
    native = bool(NATIVE.value)
    overlap = native and tile.overlap
    launch: dict[str, Any] = {"launch_pdl": True} if overlap else {}
    flags = {"ROWS": rows, "COLUMNS": columns, "BIAS": bias, "OVERLAP": overlap}
    product = {
        **flags,
        "SWAP": tile.swap,
        "BM": tile.bm,
        "BN": tile.bn,
        "BK": tile.bk,
        "PACK": tile.pack,
        "SPLITS": tile.splits,
        "GROUP": tile.group,
        "PREFETCH": tile.prefetch,
        "EVEN_N": n % tile.bn == 0,
        "EVEN_K": k % (tile.bk * tile.pack) == 0 and (native or tile.splits == 1),
        "IMPRECISE": None if fast or integer else min(_PROMOTED, tile.bk),
        "SUM": tl.int32 if integer else tl.float32,
        "STEPS": None if native else triton.cdiv(k, tile.bk * tile.pack * tile.splits),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **launch,
    }
    if tile.splits == 1:
        return Plan(Launcher(_product_kernel, product), None)
    # the sums need no scales
    product.update(ROWS=False, COLUMNS=False, BIAS=False)
    block = combined(n)
    return Plan(Launcher(_product_kernel, product), combining(n, block, tile, True, flags), block)


def combining(n: int, block: int, tile: Tile, scaled: bool, flags: dict[str, Any]) -> Launcher:
    """The launch that adds up the sums of ``tile.splits``, and scales them unless they are."""
    launch: dict[str, Any] = {"launch_pdl": True} if flags["OVERLAP"] else {}
    constants = {"SCALED": scaled, "SPLITS": tile.splits, "BLOCK": block, "num_warps": 4}
    return Launcher(_combine_kernel, {**flags, **constants, **launch})


@cache
def machine(device: torch.device) -> tuple[int, bool]:
    """Shared memory that a program may have on ``device``, and whether launches may overlap."""
    if device.type != "cuda":  # interpreted
        return 2**20, False
    number = torch.cuda.current_device() if device.index is None else device.index
    known = triton.runtime.driver.active.utils.get_device_properties(number)
    # a little is left for what a program exchanges; overlapping launches were only seen on sm90
    overlap = torch.cuda.get_device_capability(number) == (9, 0)
    return int(known["max_shared_mem"]) - 1024, overlap


@lru_cache(maxsize=1024)
def _checked(
    kind: str, rows: int, n: int, k: int, device: torch.device, *dtypes: torch.dtype | None
) -> Tile:
    """The tile for a size, or :class:`UnsupportedError`; once for each bucket of rows."""
    why = why_not_gemm(kind, rows, n, k, *dtypes)
    if why is not None:
        raise UnsupportedError(f"{_REFUSED} {why}")
    if kind == INT8:
        return int8_tile(rows, n, k).fitted(*machine(device))
    return tile_for(kind, rows, n, k)


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    kind: str,
) -> torch.Tensor:
    """The scaled product of two fp8 matrices, or of two int8 ones.

    Args:
        a: ``[M, K]`` codes, e4m3fn or e5m2 (int8 beside int8); copied first unless its rows are
            contiguous.
        b: ``[K, N]`` codes, the ``.t()`` view of a row-major ``[N, K]`` weight; likewise.
        scale_a: float32 dequant scale, one element (per-tensor) or ``[M, 1]`` (per-token).
        scale_b: float32 dequant scale, one element or ``[1, N]`` (per-channel).
        bias: ``[N]`` bf16, fp16 or fp32, or None; added in float32.
        out_dtype: bf16, fp16 or fp32.
        fast_accum: the tensor cores' reduced accumulation may be used for the whole sum. That of
            int8 codes is exact in any case.
        kind: ``"skinny"`` (up to 64 rows), ``"general"``, or ``"int8"`` (any rows of int8 codes).

    Returns:
        contiguous ``[M, N]``: product, scales and bias in float32, one rounding.

    Raises:
        UnsupportedError: what :func:`why_not_gemm` refuses, or operands that do not fit together.
    """
    m, k = a.shape
    n = b.shape[1]
    dtypes = (a.dtype, b.dtype, out_dtype, None if bias is None else bias.dtype)
    tile = _checked(kind, bucket(m), n, k, a.device, *dtypes)
    return launch(a, b, scale_a, scale_b, bias, out_dtype, fast_accum, tile)


def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    tile: Tile,
) -> torch.Tensor:
    """:func:`scaled_mm` with a given tile; for measuring."""
    m, k = a.shape
    n = b.shape[1]
    if b.shape[0] != k:
        raise UnsupportedError(f"{_REFUSED} depths {k} and {b.shape[0]}")
    out = torch.empty((m, n), dtype=out_dtype, device=a.device)
    if m == 0 or n == 0:
        return out
    if a.is_cuda and a.device.index != torch.cuda.current_device():
        with torch.cuda.device(a.device):
            _launch(a, b, scale_a, scale_b, bias, out, fast_accum, tile)
    else:
        _launch(a, b, scale_a, scale_b, bias, out, fast_accum, tile)
    return out


def _launch(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    fast_accum: bool,
    tile: Tile,
) -> None:
    m, n = out.shape
    k = a.shape[1]
    a, a_pitch = rows_of(a)
    weight, pitch = rows_of(b.t())
    scale_a, rows = vector_of(scale_a, m, "scale_a")
    scale_b, columns = vector_of(scale_b, n, "scale_b")
    if scale_a.dtype != torch.float32 or scale_b.dtype != torch.float32:
        raise UnsupportedError(f"{_REFUSED} scales of {scale_a.dtype} and {scale_b.dtype}")
    if bias is None:
        offset = scale_b  # any pointer
    else:
        offset, _ = vector_of(bias, n, "bias")
    integer = a.dtype == torch.int8
    plan = _plan(tile, n, k, rows, columns, bias is not None, fast_accum and not integer, integer)
    tiles = -(-m // tile.bm) * -(-n // tile.bn)
    if plan.combine is None:
        plan.product(tiles, a, weight, scale_a, scale_b, offset, out, m, n, k, a_pitch, pitch)
        return
    dtype = torch.int32 if integer else torch.float32
    sums = torch.empty((tile.splits, m, n), dtype=dtype, device=out.device)
    programs = tiles * tile.splits
    plan.product(programs, a, weight, scale_a, scale_b, offset, sums, m, n, k, a_pitch, pitch)
    programs = m * -(-n // plan.block)
    plan.combine(programs, sums, scale_a, scale_b, offset, out, m, n)


def rows_of(matrix: torch.Tensor) -> tuple[torch.Tensor, int]:
    """``matrix`` with contiguous rows, and their distance (of one row: what is usual)."""
    rows, width = matrix.shape
    if width > 1 and matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    return matrix, width if rows == 1 else matrix.stride(0)


def vector_of(values: torch.Tensor, size: int, name: str) -> tuple[torch.Tensor, bool]:
    """``values`` with unit stride, and whether there is one for each of ``size`` rows or columns.

    One value for a size of one is both; it counts as a vector unless it has no dimension, so that
    one row runs the code that the next larger number of rows has compiled.
    """
    count = values.numel()
    vector = count == size and values.dim() > 0
    if not vector and (count != 1 or name == "bias"):
        shape = tuple(values.shape)
        raise UnsupportedError(f"{_REFUSED} {name} of shape {shape} for a size of {size}")
    if count > 1 and not values.is_contiguous():
        values = values.reshape(-1)
        values = values if values.stride(0) == 1 else values.contiguous()
    return values, vector
