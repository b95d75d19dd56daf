"""Tile shapes of the Triton product by size, as measured on an H200: data, without Triton.

No tuning happens at run time: a launch looks its tile up, by the kind, the number of rows rounded
up to a bucket, N and K. A size that was not measured takes the tile of the nearest that was.

To fill the table, run ``benchmarks/triton_gemm.py --sweep --json FILE`` on the device and
``benchmarks/triton_gemm.py --table FILE``, which prints the lines between the two marks below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log2


@dataclass(frozen=True, slots=True)
class Tile:
    """How one launch cuts the product.

    Attributes:
        swap: weights on the wide side (M) of the tensor core instruction, activations on the
            narrow one, which may be as small as 16.
        bm, bn, bk: tile of rows, columns and depth.
        warps, stages: warps of a program, depth of the software pipeline.
        pack: depths beside each other on the wide side, for fewer than 64 columns of weights.
        splits: programs that share the depth.
        group: row tiles that are walked together, so that their weights are read once into L2.
        prefetch: bytes of each weight row that are asked for before the activations are waited for.
        overlap: let the launch overlap the one before and the one after it.
    """

    swap: bool
    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    pack: int = 1
    splits: int = 1
    group: int = 8
    prefetch: int = 0
    overlap: bool = True

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of the pipeline."""
        return (self.bm + self.bn) * self.pack * self.bk * self.stages

    def fitted(self, shared_memory: int, overlap: bool) -> Tile:
        """This tile with as few stages as ``shared_memory`` bytes ask for (never less than two)."""
        stages = max(2, min(self.stages, self.stages * shared_memory // self.shared_memory))
        return replace(self, stages=stages, overlap=self.overlap and overlap)


#: Rows are rounded up to one of these; more count as :data:`MANY`.
BUCKETS = (16, 32, 64, 128, 256, 512)
MANY = 1024

#: (kind, bucket, N, K) -> Tile.
_MEASURED: dict[tuple[str, int, int, int], Tile] = {
    # begin measured
    ("skinny", 16, 4096, 4096): Tile(True, 16, 32, 256, 4, 5, pack=2, prefetch=512),  # 9.1
    ("skinny", 16, 4096, 14336): Tile(True, 16, 64, 256, 4, 6, splits=2, prefetch=512),  # 23.1
    ("skinny", 16, 6144, 4096): Tile(True, 16, 64, 256, 4, 7, prefetch=512),  # 11.1
    ("skinny", 16, 28672, 4096): Tile(True, 16, 256, 256, 16, 3, prefetch=512),  # 33.9
    ("skinny", 32, 4096, 4096): Tile(True, 32, 128, 128, 8, 6, splits=3, prefetch=512),  # 10.1
    ("skinny", 32, 4096, 14336): Tile(True, 32, 64, 256, 4, 6, splits=2, prefetch=512),  # 23.8
    ("skinny", 32, 6144, 4096): Tile(True, 32, 64, 256, 4, 5, prefetch=512),  # 12.4
    ("skinny", 32, 28672, 4096): Tile(True, 32, 256, 256, 16, 3, prefetch=512),  # 34.5
    ("skinny", 64, 4096, 4096): Tile(True, 64, 64, 128, 4, 6, splits=3, prefetch=512),  # 10.6
    ("skinny", 64, 4096, 14336): Tile(True, 64, 64, 256, 4, 3, splits=4, prefetch=512),  # 26.2
    ("skinny", 64, 6144, 4096): Tile(True, 64, 64, 128, 4, 5, splits=2, prefetch=512),  # 14.3
    ("skinny", 64, 28672, 4096): Tile(True, 64, 64, 128, 4, 6, prefetch=512),  # 37.2
    ("general", 64, 4096, 4096): Tile(True, 64, 64, 128, 4, 6, splits=3, prefetch=512),  # 10.6
    ("general", 64, 4096, 14336): Tile(True, 64, 64, 256, 4, 3, splits=4, prefetch=512),  # 26.2
    ("general", 64, 6144, 4096): Tile(True, 64, 64, 128, 4, 5, splits=2, prefetch=512),  # 14.3
    ("general", 64, 28672, 4096): Tile(True, 64, 64, 128, 4, 6, prefetch=512),  # 37.2
    ("general", 128, 4096, 4096): Tile(False, 64, 128, 128, 4, 7, splits=2, prefetch=512),  # 12.6
    ("general", 128, 4096, 14336): Tile(False, 128, 128, 128, 8, 6, splits=4, prefetch=512),  # 32.5
    ("general", 128, 6144, 4096): Tile(True, 128, 64, 128, 4, 6, prefetch=512),  # 15.8
    ("general", 128, 28672, 4096): Tile(True, 128, 64, 128, 4, 4, prefetch=512),  # 45.4
    ("general", 256, 4096, 4096): Tile(False, 64, 64, 128, 4, 6, prefetch=512),  # 14.9
    ("general", 256, 4096, 14336): Tile(False, 128, 128, 256, 8, 3, splits=2, prefetch=512),  # 47.6
    ("general", 256, 6144, 4096): Tile(
        False, 64, 64, 128, 4, 4, prefetch=512, overlap=False
    ),  # 21.1
    ("general", 256, 28672, 4096): Tile(True, 128, 64, 128, 4, 4, prefetch=512),  # 77.7
    ("general", 1024, 6144, 4096): Tile(False, 128, 128, 128, 8, 4),
    # end measured
}


def measured() -> Mapping[tuple[str, int, int, int], Tile]:
    """The table: (kind, bucket, N, K) to tile."""
    return _MEASURED


@lru_cache(maxsize=4096)
def tile_for(kind: str, rows: int, n: int, k: int) -> Tile:
    """The tile for a product with ``rows`` rows, which is one of :func:`bucket`'s values.

    The bucket measured must be no smaller (for ``skinny``, one tile has to hold all rows), then
    the nearest N and K on a logarithmic scale win.

    Raises:
        ValueError: an unknown kind, or more rows than the kind takes.
    """
    known = [entry for entry in _MEASURED if entry[0] == kind and entry[1] >= rows]
    if not known:
        raise ValueError(f"no tile of kind {kind!r} for {rows} rows")

    def distance(entry: tuple[str, int, int, int]) -> tuple[int, float]:
        _, measured, n_measured, k_measured = entry
        ratios = (max(n, 1) / n_measured, max(k, 1) / k_measured)
        return measured, sum(abs(log2(ratio)) for ratio in ratios)

    return _MEASURED[min(known, key=distance)]


def bucket(m: int) -> int:
    """The number of rows that decides about the tile: ``m`` rounded up to a bucket."""
    for most in BUCKETS:
        if m <= most:
            return most
    return MANY


# ---- tiles that follow a rule, until they are measured ------------------------------------------

#: Programs that give every multiprocessor of a large GPU something to do.
_PROGRAMS = 160


def shared_out(tile: Tile, rows: int, n: int, k: int) -> Tile:
    """``tile`` with the depth shared out while there are fewer programs than multiprocessors."""
    programs = -(-max(rows, 1) // tile.bm) * -(-max(n, 1) // tile.bn)
    steps = -(-max(k, 1) // (tile.bk * tile.pack))
    return replace(tile, splits=max(1, min(_PROGRAMS // programs, 8, steps // 4)))


@lru_cache(maxsize=4096)
def int8_tile(rows: int, n: int, k: int) -> Tile:
    """The tile for a product of int8 codes with ``rows`` rows (one of :func:`bucket`'s values)."""
    if rows <= 64:
        return shared_out(Tile(True, rows, 64, 128, 4, 5 if rows < 64 else 4), rows, n, k)
    if rows <= 256:
        return shared_out(Tile(False, 64, 128, 128, 4, 4), rows, n, k)
    return Tile(False, 128, 128, 128, 8, 3)
