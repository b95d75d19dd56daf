"""The Triton scaled product in Triton's interpreter, its table of tiles, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from fp8pass.errors import UnsupportedError
from fp8pass.kernels.triton_gemm_limits import SKINNY_ROWS, why_not_gemm
from fp8pass.kernels.triton_gemm_tiles import BUCKETS, MANY, Tile, bucket, measured, tile_for
from fp8pass.ops.linear import dequantised_product

triton_gemm: ModuleType


@pytest.fixture(scope="module", autouse=True)
def _interpreted_kernels(interpreted: Callable[[str], ModuleType]) -> None:
    global triton_gemm
    triton_gemm = interpreted("gemm")


FP8, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
#: Every way to cut: both orientations, packed depths, splits, and both together.
TILES = (
    Tile(True, 16, 64, 128, 4, 2),
    Tile(True, 16, 32, 64, 4, 2, pack=2),
    Tile(True, 16, 16, 32, 4, 2, pack=4, splits=2),
    Tile(True, 32, 64, 64, 4, 2, splits=3),
    Tile(False, 64, 64, 128, 4, 2, group=2),
)


def made(
    m: int, n: int, k: int, rows: bool = True, columns: bool = True, pad: int = 0
) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(m * 7919 + n * 31 + k)
    a = (torch.randn(m, k + pad, generator=g) * 16).to(FP8)[:, :k]
    w = (torch.randn(n, k, generator=g) * 16).to(FP8)
    sa = torch.rand((m, 1) if rows else (), generator=g) + 0.01
    sb = torch.rand((1, n) if columns else (), generator=g) + 0.01
    return a, w.t(), sa, sb


def check(out: torch.Tensor, *args: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """One rounding of the exact result, up to the order of a float32 sum."""
    expected = dequantised_product(*args, bias, F32)  # type: ignore[call-arg]
    assert out.shape == expected.shape and out.is_contiguous()
    if out.numel():
        size = args[0].float().abs() @ args[1].float().abs() * args[2] * args[3] + 1
        half_ulp = torch.finfo(out.dtype).eps * expected.abs() / 2
        assert bool(((out.float() - expected).abs() <= half_ulp + size * 2.0**-19).all())


@settings(max_examples=25, deadline=None)
@given(
    m=st.sampled_from((0, 1, 3, 16, 17, 65)),
    n=st.sampled_from((1, 16, 47, 80)),
    k=st.sampled_from((0, 16, 63, 128, 144)),
    rows=st.booleans(),
    columns=st.booleans(),
    pad=st.sampled_from((0, 3, 16)),
    bias=st.sampled_from((None, BF16, F16, F32)),
    out_dtype=st.sampled_from((BF16, F16, F32)),
    tile=st.sampled_from(TILES),
)
def test_numbers(m, n, k, rows, columns, pad, bias, out_dtype, tile) -> None:  # type: ignore[no-untyped-def]
    args = made(m, n, k, rows, columns, pad)
    vector = None if bias is None else torch.linspace(-9, 9, n).to(bias)
    out = triton_gemm.launch(*args, vector, out_dtype, False, tile)
    assert out.dtype is out_dtype
    check(out, *args, bias=vector)


def test_the_choice_by_kind_and_the_reference_agree_bit_for_bit_on_small_integers() -> None:
    """Sums of integers are exact in any order, so that nothing may differ."""
    g = torch.Generator().manual_seed(0)
    a = torch.randint(-4, 5, (5, 96), generator=g).float().to(FP8)
    b = torch.randint(-4, 5, (48, 96), generator=g).float().to(FP8).t()
    for sa, sb in ((torch.tensor(0.37), torch.tensor(0.11)), made(5, 48, 96)[2:]):
        expected = dequantised_product(a, b, sa, sb, None, BF16)
        for kind in ("skinny", "general"):
            assert torch.equal(
                triton_gemm.scaled_mm(a, b, sa, sb, None, BF16, False, kind), expected
            )


@pytest.mark.parametrize("tile", [TILES[1], TILES[4]])
def test_a_nan_stays_in_its_row_and_column(tile: Tile) -> None:
    a, b, sa, sb = made(5, 48, 128)
    sa[2] = float("nan")
    sb[0, 7] = float("inf")
    out = triton_gemm.launch(a, b, sa, sb, None, BF16, False, tile)
    wrong = ~out.isfinite()
    assert bool(wrong[2].all()) and bool(wrong[:, 7].all())
    assert int(wrong.sum()) == 48 + 5 - 1


def test_codes_of_both_kinds() -> None:
    a, b, sa, sb = made(5, 48, 128)
    for left, right in ((E5M2, FP8), (FP8, E5M2), (E5M2, E5M2)):
        codes = a.float().to(left), b.float().to(right)
        check(triton_gemm.launch(*codes, sa, sb, None, F32, False, TILES[0]), *codes, sa, sb)


@pytest.mark.parametrize(
    "change",
    [
        lambda a, b, sa, sb: (a.t().contiguous().t(), b, sa, sb),
        lambda a, b, sa, sb: (a, b.contiguous(), sa, sb),
        lambda a, b, sa, sb: (a[:1].expand(5, -1), b, sa, sb),
        lambda a, b, sa, sb: (a, b, sa.expand(5, 3)[:, :1], sb.t().contiguous().t()),
        lambda a, b, sa, sb: (a, b, sa.repeat(1, 3)[:, 1:2], sb.repeat(3, 1)[1:2]),
        lambda a, b, sa, sb: (a, b, sa[:1], sb[:, :1]),
        lambda a, b, sa, sb: (a[:1], b, sa[0, 0], sb[0, :1]),
    ],
    ids=["a by columns", "b by rows", "a repeated", "scales", "strided", "[1, 1]", "one row"],
)
def test_layouts(change: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    args = change(*made(5, 48, 128))
    check(triton_gemm.launch(*args, None, F32, False, TILES[0]), *args)


def test_what_does_not_fit_together() -> None:
    a, b, sa, sb = made(5, 48, 128)
    bias = torch.ones(48)
    for wrong, message in (
        ((a[:, :96], b, sa, sb, None), "depths 96 and 128"),
        ((a, b, sa[:4], sb, None), "scale_a of shape .4, 1."),
        ((a, b, sa, sb[:, :7], None), "scale_b of shape .1, 7."),
        ((a, b, sa, sb, bias[:1]), "bias of shape .1,."),
        ((a, b, sa.double(), sb, None), "scales of torch.float64"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            triton_gemm.scaled_mm(*wrong, BF16, False, "skinny")
    with pytest.raises(UnsupportedError, match="65 rows|128 rows"):
        triton_gemm.scaled_mm(*made(65, 48, 128), None, BF16, False, "skinny")
    with pytest.raises(UnsupportedError, match="int8"):
        triton_gemm.scaled_mm(a.to(torch.int8), b, sa, sb, None, BF16, False, "skinny")


def test_limits() -> None:
    def why(kind="general", m=None, n=64, k=64, a=FP8, b=FP8, out=BF16, bias=None):  # type: ignore[no-untyped-def]
        return why_not_gemm(kind, m, n, k, a, b, out, bias)

    assert why() is None and why("skinny", SKINNY_ROWS) is None and why(n=47, k=63) is None
    for answer, named in (
        (why("wide"), "'wide'"),
        (why("skinny", SKINNY_ROWS + 1), "65 rows"),
        (why("skinny"), "any number of rows"),
        (why(n=None), "N that is not known"),
        (why(k=2**31), "K = 2147483648"),
        (why(a=torch.int8), "a of torch.int8"),
        (why(b=torch.float8_e4m3fnuz), "b of torch.float8_e4m3fnuz"),
        (why(out=FP8), "a result of torch.float8_e4m3fn"),
        (why(bias=torch.float64), "a bias of torch.float64"),
    ):
        assert answer is not None and named in answer


# ---- tiles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["skinny", "general"])
def test_every_size_has_a_tile_that_holds_it(kind: str) -> None:
    for rows in (*BUCKETS, MANY):
        if kind == "skinny" and rows > SKINNY_ROWS:
            continue
        for n, k in ((1, 1), (576, 1536), (4096, 14336), (57344, 8192), (2**20, 16)):
            tile = tile_for(kind, rows, n, k)
            assert kind == "general" or (tile.swap and tile.bm >= rows)


def test_every_tile_fits_the_machine() -> None:
    for (kind, rows, _, _), tile in measured().items():
        assert kind in ("skinny", "general") and rows in (*BUCKETS, MANY)
        for size in (tile.bm, tile.bn, tile.bk, tile.pack, tile.warps):
            assert size & (size - 1) == 0
        wide, narrow = (tile.bn, tile.bm) if tile.swap else (tile.bm, tile.bn)
        # one 64-row instruction for each group of four warps: two would wait for each other
        assert wide * tile.pack == 16 * tile.warps and narrow * tile.pack >= 16
        assert 32 <= tile.bk <= 256
        assert tile.shared_memory <= 227 * 1024
        assert tile.prefetch % 128 == 0 and tile.splits >= 1 and tile.stages >= 2


def test_buckets() -> None:
    assert [bucket(m) for m in (0, 1, 16, 17, 64, 65, 512, 513, 10**6)] == [
        16, 16, 16, 32, 64, 128, 512, MANY, MANY,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="skinny.*128"):
        tile_for("skinny", bucket(65), 64, 64)
    with pytest.raises(ValueError, match="nonsense"):
        tile_for("nonsense", 16, 64, 64)


def test_an_unmeasured_size_takes_the_nearest_tile() -> None:
    for (kind, rows, n, k), tile in measured().items():
        assert tile_for(kind, rows, n, k) == tile
        assert tile_for(kind, rows, n + 16, k - 16) == tile
