"""The Triton products with scales per block and of int8 codes on a GPU, against float64.

Random scales in every test: with constant ones a wrong block would not show.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fp8pass
from fp8pass.kernels.triton_gemm_limits import BLOCK
from fp8pass.kernels.triton_gemm_tiles import Tile
from fp8pass.report import reports

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="no GPU with fp8 products",
)

FP8, E5M2, I8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
#: N x K of Llama-3-8B and 70B.
LAYERS = (
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336),
    (10240, 8192), (57344, 8192), (8192, 28672),
)  # fmt: skip
ODD = ((48, 32), (47, 63), (80, 144), (130, 400), (576, 1536), (1000, 2056))
ROWS = (1, 4, 16, 17, 64, 256, 1024, 4096)
ODD_ROWS = (0, 1, 2, 3, 31, 33, 63, 65, 100, 129, 255, 513)
KEYS = "float8_e4m3fn/dynamic/group1x128", "float8_e4m3fn/static/group128x128"
Operands = tuple[torch.Tensor, ...]

#: Tiles beside the ones that are chosen: both orientations, packed depths, splits, no overlap.
TILES = (
    Tile(True, 16, 64, 128, 4, 4),
    Tile(True, 16, 32, 128, 4, 4, pack=2, prefetch=512),
    Tile(True, 16, 16, 128, 4, 3, pack=4, splits=3),
    Tile(True, 64, 64, 128, 4, 4, splits=4, prefetch=1024),
    Tile(True, 64, 128, 128, 8, 4, overlap=False),
    Tile(False, 64, 128, 128, 4, 3, group=4),
    Tile(False, 128, 128, 128, 8, 3, splits=2),
)


def hopper() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)


def generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def codes(rows: int, width: int, g: torch.Generator) -> torch.Tensor:
    """Codes as a quantise gives them; of large matrices any finite ones, by their bytes."""
    if rows * width < 2**24:
        return (torch.randn(rows, width, device="cuda", generator=g) * 16).to(FP8)
    code = torch.randint(0, 0xF0, (rows, width), device="cuda", dtype=torch.uint8, generator=g)
    return torch.where(code < 0x78, code, code + 0x08).view(FP8)


def made(m: int, n: int, k: int, *, pad: int = 0, seed: int = 0) -> Operands:
    g = generator(seed)
    a = codes(m, k + pad, g)[:, :k]
    w = codes(n, k, g)
    groups, blocks = -(-k // BLOCK), -(-n // BLOCK)
    sa = torch.rand(m, groups, device="cuda", generator=g) * 0.01 + 1e-3
    sb = torch.rand(blocks, groups, device="cuda", generator=g) * 0.01 + 1e-3
    return a, w.t(), sa, sb.t()


def exactly(args: Operands, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """The product in float64 for some columns, and the sum of magnitudes."""
    a, b, sa, sb = args
    k, n = b.shape
    wide_a = a.double() * sa.double().repeat_interleave(BLOCK, 1)[:, :k]
    block = torch.arange(n, device="cuda")[columns] // BLOCK
    scale = sb.double()[:, block].repeat_interleave(BLOCK, 0)[:k]
    wide_b = b[:, columns].double() * scale
    return wide_a @ wide_b, wide_a.abs() @ wide_b.abs()


def close(out: torch.Tensor, args: Operands, bias: torch.Tensor | None = None) -> None:
    """2 ulp of the result + 2^-10 of the sum of magnitudes; mean relative error below 0.5 %."""
    n = args[1].shape[1]
    assert out.shape == (args[0].shape[0], n) and out.is_contiguous()
    if not out.numel():
        return
    # float64 of all columns of a large layer takes gigabytes: the first and the last ones
    parts = [slice(0, n)] if n <= 4096 else [slice(0, 1024), slice(n - 1024, n)]
    for columns in parts:
        exact, size = exactly(args, columns)
        if bias is not None:
            exact, size = exact + bias[columns].double(), size + bias[columns].double().abs()
        error = (out[:, columns].double() - exact).abs()
        allowed = 2 * torch.finfo(out.dtype).eps * exact.abs() + size * 2.0**-10
        assert bool((error <= allowed).all()), float((error / allowed.clamp_min(1e-30)).max())
        assert float(error.mean() / exact.abs().mean().clamp_min(1e-30)) < 0.005


# ---- blocks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k"), LAYERS)
def test_layers(n: int, k: int) -> None:
    from fp8pass.kernels.triton_block import block_mm

    for m in ROWS:
        args = made(m, n, k, seed=m)
        close(block_mm(*args, None, BF16), args)


@pytest.mark.parametrize(("n", "k"), ODD)
def test_odd_sizes(n: int, k: int) -> None:
    from fp8pass.kernels.triton_block import block_mm

    for m in ODD_ROWS:
        for pad in (0, 3, 16):
            args = made(m, n, k, pad=pad, seed=m)
            close(block_mm(*args, None, BF16), args)


def test_bias_and_results() -> None:
    from fp8pass.kernels.triton_block import block_mm

    for m, n, k in ((1, 80, 144), (5, 256, 512), (70, 130, 400), (300, 512, 1024)):
        args = made(m, n, k, seed=m)
        for bias, out_dtype in ((None, F16), (None, F32), (BF16, BF16), (F16, F16), (F32, BF16)):
            vector = None if bias is None else torch.randn(n, device="cuda").to(bias)
            out = block_mm(*args, vector, out_dtype)
            assert out.dtype is out_dtype
            close(out, args, vector)


def test_splits_and_bias() -> None:
    """A tile that shares the depth out adds the bias once, where the sums are added up."""
    from fp8pass.kernels.triton_block import launch

    args = made(16, 256, 4096)
    vector = torch.randn(256, device="cuda") * 1000
    for splits in (1, 2, 3, 8):
        tile = Tile(True, 16, 64, 128, 4, 4, splits=splits)
        close(launch(*args, vector, F32, tile), args, vector)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_ways_to_cut(tile: Tile) -> None:
    from fp8pass.kernels.triton_block import launch
    from fp8pass.kernels.triton_gemm import machine

    tile = tile.fitted(*machine(torch.device("cuda", torch.cuda.current_device())))
    for m, n, k in ((13, 576, 1536), (tile.bm + 5, 130, 400), (tile.bm, 512, 4096)):
        args = made(m, n, k, seed=m)
        vector = torch.randn(n, device="cuda")
        close(launch(*args, vector, F32, tile), args, vector)


def test_every_measured_tile() -> None:
    from fp8pass.kernels.triton_block import launch
    from fp8pass.kernels.triton_block_tiles import measured

    if not hopper():
        pytest.skip("measured on Hopper")
    for tile in dict.fromkeys(measured().values()):
        for m, n, k in ((min(tile.bm, 64) - 3, 512, 4096), (tile.bm + 1, 256, 2048)):
            args = made(m, n, k, pad=32)
            close(launch(*args, None, BF16, tile), args)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda s: s.contiguous(),
    "columns": lambda s: s.t().contiguous().t(),
    "padded": lambda s: torch.nn.functional.pad(s.t(), (0, 3)).contiguous()[:, : s.shape[0]].t(),
}


@pytest.mark.parametrize("a_layout", LAYOUTS)
@pytest.mark.parametrize("b_layout", LAYOUTS)
def test_layouts_of_scales(a_layout: str, b_layout: str) -> None:
    """Whatever the strides, the same bits."""
    from fp8pass.kernels.triton_block import block_mm

    for m in (1, 2, 16, 65, 300):
        a, b, sa, sb = made(m, 384, 1024, seed=m)
        expected = block_mm(a, b, sa.contiguous(), sb.contiguous(), None, F32)
        close(expected, (a, b, sa, sb))
        other = block_mm(a, b, LAYOUTS[a_layout](sa), LAYOUTS[b_layout](sb), None, F32)
        assert torch.equal(other, expected)


def test_one_row_with_any_stride() -> None:
    from fp8pass.kernels.triton_block import block_mm

    a, b, sa, sb = made(1, 256, 512)
    for stride in (0, 1, 4, 7):
        scale = torch.empty_strided((1, 4), (stride, 1), device="cuda")
        scale.copy_(sa)
        close(block_mm(a, b, scale, sb, None, BF16), (a, b, sa, sb))
    column = torch.empty_strided((1, 4), (1, 1), device="cuda")  # what a column-major one says
    column.copy_(sa)
    close(block_mm(a, b, column, sb, None, BF16), (a, b, sa, sb))


def test_codes_of_both_kinds() -> None:
    from fp8pass.kernels.triton_block import block_mm

    for m in (5, 100):
        a, b, sa, sb = made(m, 256, 512)
        for left, right in ((E5M2, FP8), (FP8, E5M2), (E5M2, E5M2)):
            args = a.float().to(left), b.float().to(right), sa, sb
            close(block_mm(*args, None, BF16), args)


def test_a_nan_stays_in_its_row_and_block() -> None:
    from fp8pass.kernels.triton_block import launch

    a, b, sa, sb = made(5, 256, 384)
    sa[2, 1] = float("nan")
    sb = sb.clone()
    sb[2, 1] = float("nan")
    for tile in (Tile(True, 16, 64, 128, 4, 3), Tile(True, 16, 32, 128, 4, 3, pack=2)):
        out = launch(a, b, sa, sb, None, BF16, tile)
        wrong = out.isnan()
        assert bool(wrong[2].all()) and bool(wrong[:, 128:].all())
        assert int(wrong.sum()) == 256 + 4 * 128


def test_accumulation_is_in_float32() -> None:
    from fp8pass.kernels.triton_block import block_mm

    k, n = 14336, 256
    for m in (16, 128):
        a, w = (torch.rand(size, k, device="cuda") + 0.5 for size in (m, n))
        ones = torch.ones(m, k // BLOCK, device="cuda"), torch.ones(k // BLOCK, 2, device="cuda")
        args = a.to(FP8), w.to(FP8).t(), *ones
        exact = args[0].double() @ args[1].double()
        out = block_mm(*args, None, F32)
        assert float(((out.double() - exact).abs() / exact).max()) < 2.0**-10


# ---- running ------------------------------------------------------------------------------------


def test_two_runs_are_equal() -> None:
    from fp8pass.kernels.triton_block import block_mm

    for m in (1, 64, 300):
        args = made(m, 4096, 14336)
        first = block_mm(*args, None, BF16)
        for _ in range(10):
            assert torch.equal(block_mm(*args, None, BF16), first)


@pytest.mark.parametrize("splits", [1, 2])
def test_a_graph_is_replayed_with_changed_data(splits: int) -> None:
    from fp8pass.kernels.triton_block import launch

    tile = Tile(True, 16, 64, 128, 4, 3, splits=splits, prefetch=512, overlap=hopper())
    args = made(16, 1536, 1536)
    source = [x.clone() if i % 2 == 0 else x.t().clone().t() for i, x in enumerate(args)]

    def run() -> torch.Tensor:
        for old, new in zip(args, source, strict=True):
            old.copy_(new)  # the weights and scales too: what was prefetched is stale
        result: torch.Tensor = launch(*args, None, BF16, tile)
        return result

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seed in range(1, 6):
        for old, new in zip(source, made(16, 1536, 1536, seed=seed), strict=True):
            old.copy_(new)
        graph.replay()
        close(out, tuple(source))


def test_no_compile_for_another_number_of_rows() -> None:
    from fp8pass.kernels.triton_block import _block_kernel, block_mm
    from fp8pass.kernels.triton_gemm import _combine_kernel, _product_kernel, scaled_mm

    kernels = (_block_kernel, _combine_kernel, _product_kernel)

    def compiled() -> int:
        return sum(len(c[0]) for kernel in kernels for c in kernel.device_caches.values())

    def both(m: int) -> None:
        a, b, sa, sb = made(m, 256, 1152)
        block_mm(a, b, sa, sb, None, BF16)
        block_mm(a, b, sa.t().contiguous().t(), sb, None, BF16)
        scaled_mm(*tokens(m, 192, 576), None, BF16, False, "int8")

    for m in (2, 17, 33, 65, 129, 257, 513):
        both(m)
    known = compiled()
    assert known > 0
    for m in (1, 3, 16, 20, 40, 48, 64, 100, 128, 200, 256, 400, 1000):
        both(m)
    assert compiled() == known


def test_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    from fp8pass.kernels.triton_block import block_mm

    args = tuple(x.to("cuda:1") for x in made(5, 128, 512))
    close(block_mm(*args, None, BF16), args)


# ---- int8 ---------------------------------------------------------------------------------------


def tokens(
    m: int, n: int, k: int, *, rows: bool = True, columns: bool = True, pad: int = 0
) -> Operands:
    g = generator(m + 7 * n + 31 * k)
    a = torch.randint(-128, 128, (m, k + pad), device="cuda", generator=g).to(I8)[:, :k]
    w = torch.randint(-128, 128, (n, k), device="cuda", generator=g).to(I8)
    sa = torch.rand((m, 1) if rows else (), device="cuda", generator=g) * 0.01 + 1e-3
    sb = torch.rand((1, n) if columns else (), device="cuda", generator=g) * 0.01 + 1e-3
    return a, w.t(), sa, sb


def int8_equal(out: torch.Tensor, args: Operands, bias: torch.Tensor | None = None) -> None:
    """The sum is exact; scales and bias in float32, which a GPU may contract: 1 ulp of float32."""
    a, b, sa, sb = args
    n = b.shape[1]
    assert out.shape == (a.shape[0], n) and out.is_contiguous()
    parts = [slice(0, n)] if n <= 4096 else [slice(0, 1024), slice(n - 1024, n)]
    for columns in parts:
        scale = sb if sb.dim() == 0 else sb[:, columns]
        exact = a.double() @ b[:, columns].double() * sa.double() * scale.double()
        size = exact.abs()
        if bias is not None:
            exact, size = exact + bias[columns].double(), size + bias[columns].double().abs()
        error = (out[:, columns].double() - exact).abs()
        half = torch.finfo(out.dtype).eps * exact.abs() / 2
        assert bool((error <= half * 1.001 + size * 2.0**-22).all())


@pytest.mark.parametrize(("n", "k"), (*LAYERS, *ODD))
def test_int8(n: int, k: int) -> None:
    from fp8pass.kernels.triton_gemm import scaled_mm

    large = n * k > 2**20
    for m in ROWS if large else ODD_ROWS:
        args = tokens(m, n, k, pad=0 if large else m % 4)
        int8_equal(scaled_mm(*args, None, BF16, False, "int8"), args)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("columns", [False, True])
def test_int8_scales_bias_and_results(rows: bool, columns: bool) -> None:
    from fp8pass.kernels.triton_gemm import scaled_mm

    for m in (1, 5, 70, 300):
        args = tokens(m, 80, 4096, rows=rows, columns=columns)
        for bias, out_dtype in ((None, BF16), (BF16, BF16), (F16, F16), (F32, F32)):
            vector = None if bias is None else torch.randn(80, device="cuda").to(bias)
            int8_equal(scaled_mm(*args, vector, out_dtype, False, "int8"), args, vector)


def test_int8_sums_are_exact_beyond_float32() -> None:
    from fp8pass.kernels.triton_gemm import scaled_mm

    one = torch.ones((), device="cuda")
    k, n = 14337, 64
    for m in (1, 64, 200, 600):
        a, w = (torch.full((rows, k), 127, dtype=I8, device="cuda") for rows in (m, n))
        a[:, -1] = w[:, -1] = 1
        total = 127**2 * (k - 1) + 1
        out = scaled_mm(a, w.t(), one, one, None, F32, False, "int8")
        wanted = torch.tensor(total, dtype=torch.float64).to(F32).item()
        assert bool((out == wanted).all())


# ---- through the pass ---------------------------------------------------------------------------


def compiled(kernel: str, keys: tuple[str, str], args: Operands, dynamic: bool) -> torch.Tensor:
    def fn(a: torch.Tensor, w: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.fp8pass.scaled_mm(
            a, w.t(), sa, sb.t(), None, BF16, *keys, False, None
        )
        return result

    a, b, sa, sb = args
    given = a, b.t(), sa, sb.t()
    torch._dynamo.reset()
    if dynamic:
        for x in (given[0], given[2]):
            torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        options = {"fp8pass.force": kernel}
        backend = fp8pass.fp8pass_backend
        whole = None if dynamic else False
        made_by = torch.compile(fn, backend=backend, options=options, dynamic=whole)
        out: torch.Tensor = made_by(*given)
    (site,) = reports()[-1].select("scaled_mm")
    assert (site.status, site.kernel) == ("lowered", kernel)
    return out


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("m", [3, 100])
def test_compiled(m: int, dynamic: bool) -> None:
    args = made(m, 256, 1024)
    close(compiled("triton_block", KEYS, args, dynamic), args)
    column = args[0], args[1], args[2].t().contiguous().t(), args[3]
    close(compiled("triton_block", KEYS, column, dynamic), args)
    pair = tokens(m, 256, 1024)
    keys = "int8/dynamic/token", "int8/static/channel"
    int8_equal(compiled("triton_int8", keys, pair, dynamic), pair)


@pytest.mark.parametrize("m", [1, 3, 16, 300])
def test_the_same_as_torchs_own_within_the_contract(m: int) -> None:
    """torch's block product and ours, both against float64, in one plan's way of calling them."""
    if not hopper():
        pytest.skip("torch's block product is for Hopper")
    from fp8pass.lowerings import find

    args = made(m, 512, 1024, seed=m)
    for kernel in ("torch_block", "triton_block"):
        run = find(kernel).run
        assert run is not None
        close(run(*args, None, BF16, False), args)
