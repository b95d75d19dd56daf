"""The product with scales per block in Triton: 1x128 of the activations, 128x128 of the weight.

``round(sum over g of (a[:, g] @ b[g]) * scale_a[:, g] * scale_b[g, n // 128] + bias)``, where g is
a group of 128 neighbours along K. As :mod:`fp8pass.kernels.triton_gemm` (weights on the wide side
for few rows, packed depths, splits, overlapping launches), with one difference: what the tensor
cores have summed over a group is scaled before it is added to the float32 sum. So never more than
128 products are accumulated in less than float32, and the depth of a tile is 128.

Scales are read by their strides: row-major, with the rows innermost, or padded. Those of the next
group are asked for before this group's products are waited for, since Triton pipelines only what
the products read.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from fp8pass.errors import UnsupportedError
from fp8pass.kernels.triton_block_tiles import block_tile
from fp8pass.kernels.triton_dispatch import Launcher
from fp8pass.kernels.triton_gemm import (
    Plan,
    combined,
    combining,
    gdc_launch_dependents,
    gdc_wait,
    machine,
    rows_of,
    vector_of,
)
from fp8pass.kernels.triton_gemm_limits import BLOCK, why_not_block
from fp8pass.kernels.triton_gemm_tiles import Tile, bucket
from fp8pass.kernels.triton_rounding import NATIVE, narrow, widen
from fp8pass.kernels.triton_walk import ask_for_weights, tile_of, unpacked

_REFUSED = "fp8pass's Triton product with scales per block does not take"
#: Depth of a group; a global that Triton may read.
_GROUP = tl.constexpr(BLOCK)


@triton.jit(do_not_specialize=["m", "a_row", "a_group", "b_group", "b_block"])
def _block_kernel(
    a, w, scale_a, scale_b, bias, out, m, n, k, stride_a, stride_w, a_row, a_group, b_group,
    b_block,
    BIAS: tl.constexpr, SWAP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PACK: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr, PREFETCH: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, OVERLAP: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One tile of ``out [M, N]``, or with SPLITS > 1 of the float32 sums ``out [SPLITS, M, N]``.

    ``a`` is ``[M, K]``, ``w`` is ``[N, K]``, both with K contiguous; BN divides 128. The strides
    of the scales: ``a_row`` and ``a_group`` of ``scale_a``, ``b_group`` (along K) and ``b_block``
    (along N) of ``scale_b``.
    """
    if OVERLAP:
        gdc_launch_dependents()
    tiles_m = (m + BM - 1) // BM
    tiles_n = (n + BN - 1) // BN
    depth: tl.constexpr = _GROUP * PACK
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
    a_part = packed_m // BM
    w_part = packed_n // BN
    inner = tl.arange(0, _GROUP)
    a_rows = a + a_index.to(tl.int64)[:, None] * stride_a + a_part[:, None] * _GROUP
    w_rows = w + w_index.to(tl.int64)[:, None] * stride_w + w_part[:, None] * _GROUP
    a_ok = a_index[:, None] < m
    w_ok = w_index[:, None] < n
    groups = (k + _GROUP - 1) // _GROUP
    a_scales = scale_a + a_index.to(tl.int64) * a_row + a_part.to(tl.int64) * a_group
    # all columns of a tile lie in one block
    w_scales = scale_b + (tile_n * BN // _GROUP).to(tl.int64) * b_block
    if PACK > 1:
        w_scales = w_scales + w_part.to(tl.int64) * b_group

    rows = tile_m * BM + tl.arange(0, BM)
    columns = tile_n * BN + tl.arange(0, BN)
    if OVERLAP:
        if PREFETCH > 0:
            starts = w + columns.to(tl.int64)[:, None] * stride_w + first * depth
            left = k - first * depth - tl.arange(0, PREFETCH // 128)[None, :] * 128
            ask_for_weights(starts, (columns[:, None] < n) & (left > 0), PREFETCH)
        gdc_wait()
    if SPLITS == 1 and BIAS:
        offset = tl.load(bias + columns, mask=columns < n, other=0.0)

    if SWAP:
        acc = tl.full((PACK * BN, PACK * BM), 0.0, tl.float32)
    else:
        acc = tl.full((PACK * BM, PACK * BN), 0.0, tl.float32)
    at_group = tl.cast(first * PACK, tl.int64)
    a_next = tl.load(
        a_scales + at_group * a_group, mask=(a_index < m) & (at_group + a_part < groups), other=0.0
    )
    if PACK > 1:
        w_next = tl.load(w_scales + at_group * b_group, mask=at_group + w_part < groups, other=0.0)
    else:
        w_next = tl.load(w_scales + at_group * b_group, mask=at_group < groups, other=0.0)
    # the interpreter cannot count to a tensor; STEPS may be too many, which the masks cover
    for step in range(0, steps if NATIVE else STEPS):
        a_scale = a_next
        w_scale = w_next
        at_group = tl.cast((first + step + 1) * PACK, tl.int64)
        a_next = tl.load(
            a_scales + at_group * a_group,
            mask=(a_index < m) & (at_group + a_part < groups),
            other=0.0,
        )
        if PACK > 1:
            w_next = tl.load(
                w_scales + at_group * b_group, mask=at_group + w_part < groups, other=0.0
            )
        else:
            w_next = tl.load(w_scales + at_group * b_group, mask=at_group < groups, other=0.0)
        at = (first + step) * depth + inner[None, :]
        if EVEN_K:
            x = tl.load(a_rows + at, mask=a_ok, other=0.0)
        else:
            x = tl.load(a_rows + at, mask=a_ok & (a_part[:, None] * _GROUP + at < k), other=0.0)
        if EVEN_N and EVEN_K:
            y = tl.load(w_rows + at)
        elif EVEN_K:
            y = tl.load(w_rows + at, mask=w_ok, other=0.0)
        else:
            y = tl.load(w_rows + at, mask=w_ok & (w_part[:, None] * _GROUP + at < k), other=0.0)
        if SWAP:
            products = tl.dot(y, tl.trans(x))
            if PACK > 1:
                acc += products * (w_scale[:, None] * a_scale[None, :])
            else:
                acc += products * (a_scale * w_scale)[None, :]
        else:
            products = tl.dot(x, tl.trans(y))
            if PACK > 1:
                acc += products * (a_scale[:, None] * w_scale[None, :])
            else:
                acc += products * (a_scale * w_scale)[:, None]
    if SWAP:
        acc = tl.trans(acc)
    if PACK > 1:
        acc = unpacked(acc, PACK, BM, BN)

    places = rows.to(tl.int64)[:, None] * n + columns[None, :]
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    if SPLITS > 1:
        tl.store(out + part.to(tl.int64) * m * n + places, acc, mask=inside)
    else:
        if BIAS:
            acc = acc + widen(offset, NATIVE)[None, :]
        tl.store(out + places, narrow(acc, out.dtype.element_ty, NATIVE), mask=inside)


# ---- host ---------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _plan(tile: Tile, n: int, k: int, bias: bool) -> Plan:
    native = bool(NATIVE.value)
    overlap = native and tile.overlap
    depth = BLOCK * tile.pack
    product: dict[str, Any] = {
        "BIAS": bias and tile.splits == 1,
        "SWAP": tile.swap,
        "BM": tile.bm,
        "BN": tile.bn,
        "PACK": tile.pack,
        "SPLITS": tile.splits,
        "GROUP": tile.group,
        "PREFETCH": tile.prefetch,
        "EVEN_N": n % tile.bn == 0,
        "EVEN_K": k % depth == 0 and (native or tile.splits == 1),
        "OVERLAP": overlap,
        "STEPS": None if native else triton.cdiv(k, depth * tile.splits),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    if overlap:
        product["launch_pdl"] = True
    if tile.splits == 1:
        return Plan(Launcher(_block_kernel, product), None)
    block = combined(n)
    flags = {"ROWS": False, "COLUMNS": False, "BIAS": bias, "OVERLAP": overlap}
    return Plan(Launcher(_block_kernel, product), combining(n, block, tile, False, flags), block)


@lru_cache(maxsize=1024)
def _checked(rows: int, n: int, k: int, device: torch.device, *dtypes: torch.dtype | None) -> Tile:
    """The tile for a size, or :class:`UnsupportedError`; once for each bucket of rows."""
    why = why_not_block(n, k, *dtypes)
    if why is not None:
        raise UnsupportedError(f"{_REFUSED} {why}")
    return block_tile(rows, n, k).fitted(*machine(device))


def block_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The product of two fp8 matrices with scales per block.

    Args:
        a: ``[M, K]`` codes, e4m3fn or e5m2; copied first unless its rows are contiguous.
        b: ``[K, N]`` codes, the ``.t()`` view of a row-major ``[N, K]`` weight; likewise.
        scale_a: float32 dequant scale ``[M, ceil(K / 128)]``, with any strides.
        scale_b: float32 dequant scale ``[ceil(K / 128), ceil(N / 128)]``, with any strides.
        bias: ``[N]`` bf16, fp16 or fp32, or None; added in float32.
        out_dtype: bf16, fp16 or fp32.

    Returns:
        contiguous ``[M, N]``: products of 128 scaled and summed in float32, one rounding.

    Raises:
        UnsupportedError: what :func:`why_not_block` refuses, or operands that do not fit together.
    """
    m, k = a.shape
    n = b.shape[1]
    dtypes = (a.dtype, b.dtype, out_dtype, None if bias is None else bias.dtype)
    tile = _checked(bucket(m), n, k, a.device, *dtypes)
    return launch(a, b, scale_a, scale_b, bias, out_dtype, tile)


def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    tile: Tile,
) -> torch.Tensor:
    """:func:`block_mm` with a given tile (depth 128, at most 128 columns); for measuring."""
    m, k = a.shape
    n = b.shape[1]
    if b.shape[0] != k:
        raise UnsupportedError(f"{_REFUSED} depths {k} and {b.shape[0]}")
    if tile.bk != BLOCK or BLOCK % tile.bn:
        raise UnsupportedError(f"{_REFUSED} a tile of {tile.bn} columns and a depth of {tile.bk}")
    groups, blocks = -(-k // BLOCK), -(-n // BLOCK)
    for name, scale, shape in (("a", scale_a, (m, groups)), ("b", scale_b, (groups, blocks))):
        if scale.shape != shape or scale.dtype != torch.float32:
            has = f"{scale.dtype} of shape {tuple(scale.shape)}"
            raise UnsupportedError(f"{_REFUSED} scale_{name} of {has}: it is float32 {shape}")
    out = torch.empty((m, n), dtype=out_dtype, device=a.device)
    if m == 0 or n == 0:
        return out
    if a.is_cuda and a.device.index != torch.cuda.current_device():
        with torch.cuda.device(a.device):
            _launch(a, b, scale_a, scale_b, bias, out, tile)
    else:
        _launch(a, b, scale_a, scale_b, bias, out, tile)
    return out


def _launch(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile,
) -> None:
    m, n = out.shape
    k = a.shape[1]
    a, a_pitch = rows_of(a)
    weight, pitch = rows_of(b.t())
    if bias is None:
        offset = scale_b  # any pointer
    else:
        offset, _ = vector_of(bias, n, "bias")
    plan = _plan(tile, n, k, bias is not None)
    tiles = -(-m // tile.bm) * -(-n // tile.bn)
    strides = (*scale_a.stride(), *scale_b.stride())
    sizes = (m, n, k, a_pitch, pitch)
    if plan.combine is None:
        plan.product(tiles, a, weight, scale_a, scale_b, offset, out, *sizes, *strides)
        return
    sums = torch.empty((tile.splits, m, n), dtype=torch.float32, device=out.device)
    programs = tiles * tile.splits
    plan.product(programs, a, weight, scale_a, scale_b, offset, sums, *sizes, *strides)
    plan.combine(m * -(-n // plan.block), sums, scale_a, scale_b, offset, out, m, n)
