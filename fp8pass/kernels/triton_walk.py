"""What the Triton products share: which tile a program computes, how packed depths are added."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from fp8pass.kernels.triton_rounding import plus


@triton.jit
def tile_of(pid, tiles_m, tiles_n, GROUP: tl.constexpr):
    """The tile of program ``pid``, as (row, column).

    Programs that run together share weights: up to GROUP row tiles, then the next columns.
    """
    top = pid // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - top, GROUP)
    return top + pid % (GROUP * tiles_n) % height, pid % (GROUP * tiles_n) // height


@triton.jit
def unpacked(acc, PACK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """``[PACK * BM, PACK * BN]`` products of PACK depths with PACK depths as their sum.

    Only those of a depth with itself count.
    """
    blocks = tl.reshape(acc, (PACK, BM, PACK, BN))
    number = tl.arange(0, PACK)
    same = number[:, None, None, None] == number[None, None, :, None]
    blocks = tl.where(same, blocks, 0)
    return tl.reduce(tl.reduce(blocks, 2, plus), 0, plus)


@triton.jit
def ask_for_weights(starts, valid, BYTES: tl.constexpr):
    """Ask ``BYTES`` from each of ``starts`` on into L2, by cache lines."""
    lines = tl.arange(0, BYTES // 128)[None, :] * 128
    tl.inline_asm_elementwise(
        "{ .reg .pred valid; setp.ne.s32 valid, $2, 0;"
        " @valid prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [starts + lines, valid.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
