"""The Triton scaled product on a GPU, against float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="no Hopper GPU: the tiles are for its tensor cores and shared memory",
)

FP8, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = ((48, 32), (47, 63), (80, 144), (576, 1536), (6144, 4096), (4096, 14336))
ROWS = (0, 1, 3, 16, 64, 65, 255, 2048)
Operands = tuple[torch.Tensor, ...]


def made(
    m: int, n: int, k: int, *, rows: bool = True, columns: bool = True, pad: int = 0, seed: int = 0
) -> Operands:
    g = torch.Generator("cuda").manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=g)

    a = (randn(m, k + pad) * 16).to(FP8)[:, :k]
    w = (randn(n, k) * 16).to(FP8)
    sa = randn(m, 1).abs() * 0.01 + 1e-3 if rows else randn(()).abs() * 0.01 + 1e-3
    sb = randn(1, n).abs() * 0.01 + 1e-3 if columns else randn(()).abs() * 0.01 + 1e-3
    return a, w.t(), sa, sb


def close(
    out: torch.Tensor, *args: torch.Tensor, bias: torch.Tensor | None = None, bits: int = 10
) -> None:
    """2 ulp of the result + 2^-10 of the sum of magnitudes; mean relative error below 0.5 %."""
    a, b, sa, sb = (x.double() for x in args)
    exact, size = a @ b * sa * sb, a.abs() @ b.abs() * sa * sb
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    assert out.shape == exact.shape and out.is_contiguous()
    if out.numel():
        error = (out.double() - exact).abs()
        allowed = 2 * torch.finfo(out.dtype).eps * exact.abs() + size * 2.0**-bits
        assert bool((error <= allowed).all()), float((error / allowed.clamp_min(1e-30)).max())
        assert float(error.mean() / exact.abs().mean().clamp_min(1e-30)) < 0.005


def kinds(m: int) -> tuple[str, ...]:
    return ("skinny", "general") if m <= 64 else ("general",)


# ---- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_sizes(n: int, k: int) -> None:
    from fp8pass.kernels.triton_gemm import scaled_mm

    for m in ROWS:
        args = made(m, n, k)
        for kind in kinds(m):
            close(scaled_mm(*args, None, BF16, False, kind), *args)


@pytest.mark.parametrize(("n", "k"), SHAPES[2:])
def test_reduced_accumulation(n: int, k: int) -> None:
    """Allowed to be worse; it still has to be a product, which 2^-6 of the magnitudes shows."""
    from fp8pass.kernels.triton_gemm import scaled_mm

    for m in (3, 64, 255):
        args = made(m, n, k)
        for kind in kinds(m):
            close(scaled_mm(*args, None, BF16, True, kind), *args, bits=6)


@pytest.mark.parametrize(("rows", "columns"), product((False, True), repeat=2))
def test_scales_bias_and_results(rows: bool, columns: bool) -> None:
    from fp8pass.kernels.triton_gemm import scaled_mm

    for m in (1, 5, 70):
        args = made(m, 80, 144, rows=rows, columns=columns, pad=16)
        for bias, out_dtype in ((None, BF16), (BF16, BF16), (F16, F16), (F32, F32), (BF16, F32)):
            if bias is not BF16 and m == 70:
                continue
            vector = None if bias is None else torch.randn(80, device="cuda").to(bias)
            out = scaled_mm(*args, vector, out_dtype, False, "skinny" if m <= 64 else "general")
            assert out.dtype is out_dtype
            close(out, *args, bias=vector)


def test_every_measured_tile() -> None:
    from fp8pass.kernels.triton_gemm import launch
    from fp8pass.kernels.triton_gemm_tiles import measured

    for tile in dict.fromkeys(measured().values()):
        for m, n, k in ((min(tile.bm, 64) - 3, 512, 4096), (tile.bm + 1, 256, 2048)):
            args = made(m, n, k, pad=32)
            close(launch(*args, None, BF16, False, tile), *args)


def test_ways_to_cut_that_no_table_may_use() -> None:
    from fp8pass.kernels.triton_gemm import launch
    from fp8pass.kernels.triton_gemm_tiles import Tile

    for tile in (
        Tile(True, 16, 16, 128, 4, 3, pack=4, splits=3, prefetch=512),
        Tile(True, 32, 32, 128, 4, 3, pack=2, prefetch=4096),
        Tile(True, 16, 64, 256, 8, 2, pack=2, splits=2, overlap=False),
        Tile(False, 64, 128, 128, 4, 3, splits=5),
    ):
        for m, n, k in ((13, 576, 1536), (13, 80, 1040), (tile.bm + 5, 47, 63)):
            args = made(m, n, k)
            vector = torch.randn(n, device="cuda")
            close(launch(*args, vector, F32, False, tile), *args, bias=vector)


def test_codes_of_both_kinds() -> None:
    from fp8pass.kernels.triton_gemm import scaled_mm

    a, b, sa, sb = made(16, 128, 512)
    for left, right in ((E5M2, FP8), (FP8, E5M2), (E5M2, E5M2)):
        codes = a.float().to(left), b.float().to(right)
        for kind in kinds(16):
            close(scaled_mm(*codes, sa, sb, None, BF16, False, kind), *codes, sa, sb)


def test_accumulation_is_in_float32() -> None:
    """What the tensor cores' own accumulation would lose: small products beside a large sum."""
    from fp8pass.kernels.triton_gemm import scaled_mm

    k, n = 14336, 256
    one = torch.ones((), device="cuda")
    for m in (16, 128):
        a, w = (torch.full((size, k), 0.0625, device="cuda") for size in (m, n))
        a[:, 0] = w[:, 0] = 448  # as much as all others together, times 3600
        large = a.to(FP8), w.to(FP8).t(), one, one
        a, w = (torch.rand(size, k, device="cuda") + 0.5 for size in (m, n))
        growing = a.to(FP8), w.to(FP8).t(), one, one  # no sign cancels: the sum only grows
        for kind in kinds(m):
            for args, bound in ((large, 2.0**-12), (growing, 2.0**-10)):
                exact = args[0].double() @ args[1].double()
                out = scaled_mm(*args, None, F32, False, kind)
                assert float(((out.double() - exact).abs() / exact).max()) < bound, kind


def test_a_nan_stays_in_its_row_and_column() -> None:
    from fp8pass.kernels.triton_gemm import launch
    from fp8pass.kernels.triton_gemm_tiles import Tile

    a, b, sa, sb = made(5, 64, 512)
    codes = a.view(torch.uint8).clone()
    codes[2, 300] = 0x7F
    for tile in (Tile(True, 16, 64, 128, 4, 3), Tile(True, 16, 32, 128, 4, 3, pack=2)):
        out = launch(codes.view(FP8), b, sa, sb, None, BF16, False, tile)
        assert bool(out[2].isnan().all()) and int(out.isnan().sum()) == 64


# ---- running ------------------------------------------------------------------------------------


def test_two_runs_are_equal() -> None:
    from fp8pass.kernels.triton_gemm import launch, scaled_mm
    from fp8pass.kernels.triton_gemm_tiles import Tile

    for m in (1, 64, 300):
        args = made(m, 4096, 14336)
        for kind in kinds(m):
            one, two = (scaled_mm(*args, None, BF16, False, kind) for _ in range(2))
            assert torch.equal(one, two)
    args = made(16, 4096, 14336)
    tile = Tile(True, 16, 64, 256, 4, 3, splits=4)
    first = launch(*args, None, BF16, False, tile)
    for _ in range(20):
        assert torch.equal(launch(*args, None, BF16, False, tile), first)


def test_two_streams_do_not_meet() -> None:
    """Splits leave sums in memory: each call has its own."""
    from fp8pass.kernels.triton_gemm import launch
    from fp8pass.kernels.triton_gemm_tiles import Tile

    tile = Tile(True, 16, 64, 256, 4, 3, splits=4)
    both = [made(16, 4096, 4096, seed=seed) for seed in (0, 1)]
    expected = [launch(*args, None, BF16, False, tile) for args in both]
    streams = [torch.cuda.Stream() for _ in both]
    torch.cuda.synchronize()
    for _ in range(30):
        for stream, args, right in zip(streams, both, expected, strict=True):
            with torch.cuda.stream(stream):
                assert torch.equal(launch(*args, None, BF16, False, tile), right)
    torch.cuda.synchronize()


@pytest.mark.parametrize("splits", [1, 2])
def test_a_graph_is_replayed_with_changed_data(splits: int) -> None:
    """Behind another kernel, behind a copy, and behind a product, all in one graph."""
    from fp8pass.kernels.triton_gemm import launch
    from fp8pass.kernels.triton_gemm_tiles import Tile

    tile = Tile(True, 16, 64, 128, 4, 3, splits=splits, prefetch=512)
    n = k = 1536
    args = made(16, n, k)
    source = [x.clone() for x in args]
    source[1] = args[1].t().clone().t()
    one = torch.ones((), device="cuda")

    def run() -> tuple[torch.Tensor, ...]:
        for old, new in zip(args, source, strict=True):
            old.copy_(new)  # the weights too: whatever was prefetched is stale
        first = launch(*args, None, BF16, False, tile)
        codes = (first * 1e-3).clamp(-448, 448).to(FP8)
        second = launch(codes, args[1], one, args[3], None, BF16, False, tile)
        third = launch(codes, args[1], one, args[3], None, BF16, False, tile)
        return first, codes, second, third

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, codes, second, third = run()
    for seed in range(1, 9):
        for old, new in zip(source, made(16, n, k, seed=seed), strict=True):
            old.copy_(new)
        graph.replay()
        close(first, *source)
        close(second, codes, source[1], one, source[3])
        assert torch.equal(second, third)


def test_what_is_written_just_before_is_waited_for() -> None:
    """Launches overlap: a long chain without a pause gives what one with pauses gives."""
    from fp8pass.kernels.triton_gemm import scaled_mm

    n = k = 4096
    _, b, _, sb = made(1, n, k)
    one = torch.ones((), device="cuda")
    for m, kind in ((16, "skinny"), (64, "skinny"), (300, "general")):
        x = (torch.randn(m, k, device="cuda") * 4).to(FP8)
        ends = []
        for pause in (True, False, False):
            codes = x
            for _ in range(12):
                out = scaled_mm(codes, b, one, sb, None, BF16, False, kind)
                codes = (out / out.float().std() * 4).clamp(-448, 448).to(FP8)
                if pause:
                    torch.cuda.synchronize()
            ends.append(codes.view(torch.uint8))
        assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])


def test_no_compile_for_another_number_of_rows() -> None:
    from fp8pass.kernels.triton_gemm import _combine_kernel, _product_kernel, scaled_mm

    def compiled() -> int:
        kernels = (_product_kernel, _combine_kernel)
        return sum(len(c[0]) for kernel in kernels for c in kernel.device_caches.values())

    n, k = 192, 576
    for m in (2, 17, 33, 65, 129, 257, 513):
        for kind in kinds(m):
            scaled_mm(*made(m, n, k), None, BF16, False, kind)
    known = compiled()
    assert known > 0
    for m in (1, 3, 16, 20, 40, 48, 64, 100, 128, 200, 256, 400, 1000):
        for kind in kinds(m):
            scaled_mm(*made(m, n, k), None, BF16, False, kind)
    assert compiled() == known


def test_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    from fp8pass.kernels.triton_gemm import scaled_mm

    args = tuple(x.to("cuda:1") for x in made(5, 128, 512))
    close(scaled_mm(*args, None, BF16, False, "skinny"), *args)
