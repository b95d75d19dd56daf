"""Tiles of the Triton product with scales per block, by size: data and a rule, without Triton.

As :mod:`fp8pass.kernels.triton_gemm_tiles`. What was not measured takes the tile of the nearest
size that was; while nothing was, a rule answers. To fill the table, run
``benchmarks/block_scaled.py --sweep --json FILE`` on the device and
``benchmarks/block_scaled.py --table FILE``, which prints the lines between the two marks below.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import log2

from fp8pass.kernels.triton_gemm_tiles import Tile, shared_out

#: (bucket of rows, N, K) -> Tile; depth 128 and at most 128 columns.
_MEASURED: dict[tuple[int, int, int], Tile] = {
    # begin measured
    # H200, torch 2.11, Triton 3.6, 2026-12-02: microseconds, with the kernel that writes A
    (16, 4096, 4096): Tile(True, 16, 64, 128, 4, 4, splits=4),  # 10.1
    (16, 4096, 14336): Tile(True, 16, 64, 128, 4, 6, splits=4, group=16, prefetch=512),  # 22.0
    (16, 6144, 4096): Tile(True, 16, 64, 128, 4, 4, splits=4),  # 12.2
    (16, 28672, 4096): Tile(True, 16, 64, 128, 4, 4, prefetch=512, overlap=False),  # 33.9
    (32, 4096, 4096): Tile(True, 32, 64, 128, 4, 4, splits=4),  # 10.9
    (32, 4096, 14336): Tile(True, 32, 64, 128, 4, 4, splits=4),  # 23.2
    (32, 6144, 4096): Tile(True, 32, 64, 128, 4, 3, splits=4),  # 13.4
    (32, 28672, 4096): Tile(True, 32, 64, 128, 4, 4),  # 35.8
    (64, 4096, 4096): Tile(True, 64, 64, 128, 4, 3, splits=4),  # 13.2
    (64, 4096, 14336): Tile(True, 64, 64, 128, 4, 4, splits=4),  # 29.2
    (64, 6144, 4096): Tile(True, 64, 64, 128, 4, 3, splits=4),  # 16.4
    (64, 28672, 4096): Tile(True, 64, 64, 128, 4, 7, prefetch=512),  # 51.0
    (128, 4096, 4096): Tile(False, 64, 64, 128, 4, 4, splits=2),  # 14.4
    (128, 4096, 14336): Tile(False, 64, 128, 128, 4, 4, splits=4, group=4),  # 30.6
    (128, 6144, 4096): Tile(False, 64, 128, 128, 4, 4, splits=2),  # 17.8
    (128, 28672, 4096): Tile(False, 64, 128, 128, 4, 4, prefetch=512),  # 48.0
    (256, 4096, 4096): Tile(False, 64, 128, 128, 4, 4, splits=2),  # 18.1
    (256, 4096, 14336): Tile(False, 64, 128, 128, 4, 4, splits=2, group=16),  # 43.5
    (256, 6144, 4096): Tile(False, 64, 64, 128, 4, 3, overlap=False),  # 23.8
    (256, 28672, 4096): Tile(False, 64, 128, 128, 4, 4, prefetch=512),  # 84.9
    (512, 4096, 4096): Tile(False, 64, 128, 128, 4, 4, prefetch=512),  # 23.9
    (512, 4096, 14336): Tile(False, 64, 128, 128, 4, 4, prefetch=512),  # 71.6
    (512, 6144, 4096): Tile(False, 64, 128, 128, 4, 3, prefetch=512),  # 42.8
    (512, 28672, 4096): Tile(False, 64, 128, 128, 4, 3, prefetch=512),  # 149.4
    (1024, 4096, 4096): Tile(False, 64, 128, 128, 4, 3, prefetch=512),  # 168.2
    (1024, 4096, 14336): Tile(False, 64, 128, 128, 4, 3, prefetch=512),  # 576.2
    (1024, 6144, 4096): Tile(False, 64, 128, 128, 4, 3, prefetch=512),  # 254.5
    (1024, 28672, 4096): Tile(False, 64, 128, 128, 4, 3, prefetch=512),  # 1162.0
    # end measured
}


def measured() -> Mapping[tuple[int, int, int], Tile]:
    """The table: (bucket, N, K) to tile."""
    return _MEASURED


@lru_cache(maxsize=4096)
def block_tile(rows: int, n: int, k: int) -> Tile:
    """The tile for a product with ``rows`` rows, one of :func:`triton_gemm_tiles.bucket`'s values.

    The smallest bucket measured that is no smaller, then the nearest N and K on a logarithmic
    scale; for more rows than were measured, and without a table, :func:`unmeasured`.
    """
    known = [entry for entry in _MEASURED if entry[0] >= rows]
    if not known:
        return unmeasured(rows, n, k)

    def distance(entry: tuple[int, int, int]) -> tuple[int, float]:
        bucket, n_measured, k_measured = entry
        ratios = (max(n, 1) / n_measured, max(k, 1) / k_measured)
        return bucket, sum(abs(log2(ratio)) for ratio in ratios)

    return _MEASURED[min(known, key=distance)]


def unmeasured(rows: int, n: int, k: int) -> Tile:
    """A tile by rule: weights on the wide side for up to 64 rows, small tiles of many warps above.

    Above, several programs share a multiprocessor, so that one scales while another multiplies.
    """
    if rows <= 64:
        wide = 128 if n >= 16384 and rows < 64 else 64
        tile = Tile(True, rows, wide, 128, wide // 16, 6 if rows < 64 else 5, prefetch=512)
        return shared_out(tile, rows, n, k)
    if rows <= 256:
        return shared_out(Tile(True, 64, 64, 128, 4, 4), rows, n, k)
    return Tile(False, 64, 128, 128, 4, 3)
