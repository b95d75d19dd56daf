"""The Triton products with scales per block and of int8 codes, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from fp8pass.errors import UnsupportedError
from fp8pass.kernels.triton_block_tiles import block_tile, measured, unmeasured
from fp8pass.kernels.triton_gemm_limits import MAX_INT8_DEPTH, why_not_block, why_not_gemm
from fp8pass.kernels.triton_gemm_tiles import BUCKETS, MANY, Tile, int8_tile
from fp8pass.ops.linear import scaled_product

triton_block: ModuleType
triton_gemm: ModuleType


@pytest.fixture(scope="module", autouse=True)
def _interpreted_kernels(interpreted: Callable[[str], ModuleType]) -> None:
    global triton_block, triton_gemm
    triton_block, triton_gemm = interpreted("block"), interpreted("gemm")


FP8, E5M2, I8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
KEYS = "float8_e4m3fn/dynamic/group1x128", "float8_e4m3fn/static/group128x128"
#: Every way to cut: both orientations, packed depths, splits, and both together.
TILES = (
    Tile(True, 16, 64, 128, 4, 2),
    Tile(True, 16, 32, 128, 4, 2, pack=2),
    Tile(True, 16, 16, 128, 4, 2, pack=4, splits=2),
    Tile(True, 32, 64, 128, 4, 2, splits=3),
    Tile(False, 64, 64, 128, 4, 2, group=2),
    Tile(False, 16, 128, 128, 4, 2, splits=2),
)
#: As they come: row-major, rows innermost, padded rows, every second.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda s: s.contiguous(),
    "columns": lambda s: s.t().contiguous().t(),
    "padded": lambda s: torch.nn.functional.pad(s.t(), (0, 3)).contiguous()[:, : s.shape[0]].t(),
    "strided": lambda s: s.repeat_interleave(2, 1)[:, ::2],
}


def made(m: int, n: int, k: int, pad: int = 0) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(m * 7919 + n * 31 + k)
    a = (torch.randn(m, k + pad, generator=g) * 16).to(FP8)[:, :k]
    w = (torch.randn(n, k, generator=g) * 16).to(FP8)
    groups, blocks = -(-k // 128), -(-n // 128)
    sa = torch.rand(m, groups, generator=g) + 0.01
    sb = torch.rand(blocks, groups, generator=g) + 0.01
    return a, w.t(), sa, sb.t()


def reference(args: tuple[torch.Tensor, ...], bias: torch.Tensor | None) -> torch.Tensor:
    wide = [x.double() for x in args]
    a = wide[0] * wide[2].repeat_interleave(128, 1)[:, : wide[0].shape[1]]
    k, n = wide[1].shape
    scale = wide[3].repeat_interleave(128, 0)[:k].repeat_interleave(128, 1)[:, :n]
    out = a @ (wide[1] * scale)
    return out if bias is None else out + bias.double()


def check(
    out: torch.Tensor, args: tuple[torch.Tensor, ...], bias: torch.Tensor | None = None
) -> None:
    """One rounding of the exact result, up to the order of a float32 sum."""
    exact = reference(args, bias)
    assert out.shape == exact.shape and out.is_contiguous()
    if out.numel():
        a, b, sa, sb = args
        size = reference((a.float().abs(), b.float().abs(), sa, sb), None) + 1
        half_ulp = torch.finfo(out.dtype).eps * exact.abs() / 2
        assert bool(((out.double() - exact).abs() <= half_ulp + size * 2.0**-19).all())


@settings(max_examples=25, deadline=None)
@given(
    m=st.sampled_from((0, 1, 3, 16, 17, 65)),
    n=st.sampled_from((1, 16, 47, 128, 144)),
    k=st.sampled_from((0, 16, 63, 128, 144, 400)),
    pad=st.sampled_from((0, 3, 16)),
    bias=st.sampled_from((None, BF16, F16, F32)),
    out_dtype=st.sampled_from((BF16, F16, F32)),
    tile=st.sampled_from(TILES),
    a_layout=st.sampled_from(sorted(LAYOUTS)),
    b_layout=st.sampled_from(sorted(LAYOUTS)),
)
def test_numbers(m, n, k, pad, bias, out_dtype, tile, a_layout, b_layout) -> None:  # type: ignore[no-untyped-def]
    a, b, sa, sb = made(m, n, k, pad)
    args = a, b, LAYOUTS[a_layout](sa), LAYOUTS[b_layout](sb)
    vector = None if bias is None else torch.linspace(-9, 9, n).to(bias)
    out = triton_block.launch(*args, vector, out_dtype, tile)
    assert out.dtype is out_dtype
    check(out, args, vector)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_row_with_any_stride(layout: str) -> None:
    """A dim of size one has a stride that means nothing."""
    a, b, sa, sb = made(1, 256, 512)
    for stride in (1, 0, 7):
        scale = torch.empty_strided((1, 4), (stride, 1))
        scale.copy_(sa)
        out = triton_block.block_mm(a, b, scale, LAYOUTS[layout](sb), None, F32)
        check(out, (a, b, sa, sb))


def test_small_integers_are_exact() -> None:
    g = torch.Generator().manual_seed(0)
    a = torch.randint(-4, 5, (5, 384), generator=g).float().to(FP8)
    b = torch.randint(-4, 5, (200, 384), generator=g).float().to(FP8).t()
    sa = 2.0 ** torch.randint(-3, 4, (5, 3), generator=g).float()
    sb = 2.0 ** torch.randint(-3, 4, (3, 2), generator=g).float()
    expected = scaled_product(a, b, sa, sb, None, BF16, *KEYS, "")
    assert torch.equal(triton_block.block_mm(a, b, sa, sb, None, BF16), expected)
    for tile in TILES:
        assert torch.equal(triton_block.launch(a, b, sa, sb, None, BF16, tile), expected)


@pytest.mark.parametrize("tile", [TILES[2], TILES[4]])
def test_a_nan_stays_in_its_row_and_block(tile: Tile) -> None:
    a, b, sa, sb = made(5, 256, 384)
    sa[2, 1] = float("nan")
    sb[2, 1] = float("inf")
    out = triton_block.launch(a, b, sa, sb, None, BF16, tile)
    wrong = ~out.isfinite()
    assert bool(wrong[2].all()) and bool(wrong[:, 128:].all())
    assert int(wrong.sum()) == 256 + 4 * 128


def test_codes_of_both_kinds_and_other_layouts() -> None:
    a, b, sa, sb = made(5, 144, 400)
    for left, right in ((E5M2, FP8), (FP8, E5M2), (E5M2, E5M2)):
        args = a.float().to(left), b.float().to(right), sa, sb
        check(triton_block.launch(*args, None, F32, TILES[0]), args)
    for args in (
        (a.t().contiguous().t(), b, sa, sb),
        (a, b.contiguous(), sa, sb),
        (a[:1].expand(5, -1), b, sa, sb),
        (a, b, sa[:1].expand(5, -1), sb),
    ):
        check(triton_block.block_mm(*args, None, F32), args)


def test_what_does_not_fit_together() -> None:
    a, b, sa, sb = made(5, 144, 400)
    for wrong, message in (
        ((a[:, :256], b, sa, sb, None), "depths 256 and 400"),
        ((a, b, sa[:, :3], sb, None), r"scale_a of torch.float32 of shape \(5, 3\).*\(5, 4\)"),
        ((a, b, sa, sb.t(), None), r"scale_b of torch.float32 of shape \(2, 4\).*\(4, 2\)"),
        ((a, b, sa, sb.double(), None), "scale_b of torch.float64"),
        ((a, b, sa, sb, torch.ones(1)), r"bias of shape \(1,\)"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            triton_block.block_mm(*wrong, BF16)
    for tile in (Tile(True, 16, 64, 64, 4, 2), Tile(True, 16, 256, 128, 16, 2)):
        with pytest.raises(UnsupportedError, match="tile of"):
            triton_block.launch(a, b, sa, sb, None, BF16, tile)
    with pytest.raises(UnsupportedError, match="a result of torch.float64"):
        triton_block.block_mm(a, b, sa, sb, None, torch.float64)


def test_limits() -> None:
    def why(n=64, k=64, a=FP8, b=FP8, out=BF16, bias=None):  # type: ignore[no-untyped-def]
        return why_not_block(n, k, a, b, out, bias)

    assert why() is None and why(n=47, k=63, a=E5M2, bias=F32, out=F16) is None
    for answer, named in (
        (why(n=None), "N that is not known"),
        (why(k=2**31), "K = 2147483648"),
        (why(a=I8), "a of torch.int8"),
        (why(out=FP8), "a result of torch.float8_e4m3fn"),
        (why(bias=torch.float64), "a bias of torch.float64"),
        (why_not_gemm("int8", None, 8, 8, FP8, FP8, BF16, None), "a of torch.float8_e4m3fn"),
        (why_not_gemm("int8", None, 8, MAX_INT8_DEPTH + 1, I8, I8, BF16, None), "K = 131072"),
        (why_not_gemm("general", None, 8, 8, I8, I8, BF16, None), "a of torch.int8"),
    ):
        assert answer is not None and named in answer
    assert why_not_gemm("int8", None, 8, MAX_INT8_DEPTH, I8, I8, F16, F32) is None


# ---- tiles --------------------------------------------------------------------------------------

SIZES = ((1, 1), (576, 1536), (4096, 14336), (57344, 8192), (2**20, 16))


def sound(tile: Tile) -> bool:
    wide, narrow = (tile.bn, tile.bm) if tile.swap else (tile.bm, tile.bn)
    return wide * tile.pack == 16 * tile.warps and narrow * tile.pack >= 16 and tile.stages >= 2


def test_every_size_has_a_tile() -> None:
    for rows in (*BUCKETS, MANY):
        for n, k in SIZES:
            for tile in (block_tile(rows, n, k), unmeasured(rows, n, k)):
                assert sound(tile) and tile.bk == 128 and 128 % tile.bn == 0
                assert tile.shared_memory <= 227 * 1024
            assert sound(int8_tile(rows, n, k))
    for tile in measured().values():
        assert sound(tile) and tile.bk == 128 and 128 % tile.bn == 0


def test_tiles_fit_smaller_machines() -> None:
    for rows in (*BUCKETS, MANY):
        for n, k in SIZES:
            for tile in (block_tile(rows, n, k), int8_tile(rows, n, k)):
                small = tile.fitted(98 * 1024, False)
                assert small.shared_memory <= 98 * 1024 and not small.overlap
                assert (small.bm, small.bn, small.splits) == (tile.bm, tile.bn, tile.splits)
                assert tile.fitted(226 * 1024, True).stages == tile.stages


# ---- int8 ---------------------------------------------------------------------------------------

INT8_TILES = (
    Tile(True, 16, 16, 32, 4, 2, pack=4, splits=2),
    Tile(True, 32, 64, 64, 4, 2, splits=3),
    Tile(False, 64, 64, 128, 4, 2),
)


@settings(max_examples=20, deadline=None)
@given(
    m=st.sampled_from((0, 1, 3, 16, 17, 65)),
    n=st.sampled_from((1, 16, 47, 80)),
    k=st.sampled_from((0, 16, 63, 128, 200)),
    rows=st.booleans(),
    columns=st.booleans(),
    bias=st.sampled_from((None, BF16, F16, F32)),
    out_dtype=st.sampled_from((BF16, F16, F32)),
    tile=st.sampled_from((*INT8_TILES, None)),
)
def test_int8(m, n, k, rows, columns, bias, out_dtype, tile) -> None:  # type: ignore[no-untyped-def]
    """The sum is exact, so that every way to cut gives the reference, bit for bit."""
    g = torch.Generator().manual_seed(m * 7919 + n * 31 + k)
    a = torch.randint(-128, 128, (m, k), generator=g).to(I8)
    w = torch.randint(-128, 128, (n, k), generator=g).to(I8)
    sa = torch.rand((m, 1) if rows else (), generator=g) + 0.01
    sb = torch.rand((1, n) if columns else (), generator=g) + 0.01
    vector = None if bias is None else torch.linspace(-9, 9, n).to(bias)
    keys = (
        f"int8/dynamic/{'token' if rows else 'tensor'}",
        f"int8/static/{'channel' if columns else 'tensor'}",
    )
    expected = scaled_product(a, w.t(), sa, sb, vector, out_dtype, *keys, "")
    if tile is None:
        out = triton_gemm.scaled_mm(a, w.t(), sa, sb, vector, out_dtype, False, "int8")
    else:
        out = triton_gemm.launch(a, w.t(), sa, sb, vector, out_dtype, True, tile)
    assert torch.equal(out, expected)


def test_int8_sums_are_exact_beyond_float32() -> None:
    """127 * 127 * 4096 has 26 bits: a float32 sum would drop the last product."""
    a = torch.full((1, 4097), 127, dtype=I8)
    a[0, -1] = 1
    w = torch.full((16, 4097), 127, dtype=I8)
    w[:, -1] = 1
    one = torch.ones(())
    for tile in INT8_TILES[1:]:
        out = triton_gemm.launch(a, w.t(), one, one, None, F32, False, tile)
        assert torch.equal(out, torch.full((1, 16), float(127**2 * 4096 + 1)))
