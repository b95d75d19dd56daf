"""The Triton scaled product on a GPU: against torch's and vLLM's, and the search for its tiles.

    python benchmarks/triton_gemm.py --json out.json [--vllm-libs DIR]
    python benchmarks/triton_gemm.py --sweep --json tiles.json --seconds 300
    python benchmarks/triton_gemm.py --table tiles.json

Microseconds per call, medians of CUDA graph replays that rotate over more than 200 MB of weights.
Three ways, since our launches overlap their neighbours: *chain*, one product after another;
*writer*, each behind an element-wise kernel of torch that writes its activations, the time of both;
*producer*, each behind the kernel of fp8pass that a decoder block has there (residual + norm,
quantise, SiLU·mul), which lets the product start, and ask for weights, before it has ended. Tiles
are chosen by what ``--behind`` says.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from gpu_timing import Captured, interleaved, sets_for, table

from fp8pass.kernels.triton_gemm_limits import SKINNY_ROWS
from fp8pass.kernels.triton_gemm_tiles import BUCKETS, Tile, bucket

#: Layers as (N, K): Llama-3's 8B and 70B, the latter also as one of 8 tensor-parallel shards.
LAYERS = {
    "8b.qkv": (6144, 4096),
    "8b.o": (4096, 4096),
    "8b.gate_up": (28672, 4096),
    "8b.down": (4096, 14336),
    "70b.qkv": (10240, 8192),
    "70b.o": (8192, 8192),
    "70b.gate_up": (57344, 8192),
    "70b.down": (8192, 28672),
    "70b/8.qkv": (1280, 8192),
    "70b/8.o": (8192, 1024),
    "70b/8.gate_up": (7168, 8192),
    "70b/8.down": (8192, 3584),
}
ROWS = (1, 16, 32, 64, 128, 256, 512, 1024)
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
#: Shared memory that one program may have.
SHARED = 226 * 1024
Operands = tuple[Any, ...]
#: What stands in front of each product that is timed.
BEHIND = ("chain", "writer", "producer")


def operands(n: int, k: int, m: int, sets: int) -> list[Operands]:
    """Random codes and scales: ``(a, b, rows' scales, columns' scales, one scale, one scale)``."""
    made = []
    for _ in range(sets):
        a = (torch.randn(m, k, device="cuda") * 8).to(FP8)
        # any code but NaN; as bytes, since filling gigabytes by randn takes long
        code = torch.randint(0, 0xDF, (n, k), device="cuda", dtype=torch.uint8)
        w = torch.where(code < 0x70, code, code + 0x10).view(FP8)
        sa = torch.rand(m, 1, device="cuda") + 0.1
        sb = torch.rand(1, n, device="cuda") + 0.1
        made.append((a, w.t(), sa, sb, sa[0, 0].clone(), sb[0, 0].clone()))
    return made


def produce(s: Operands) -> None:
    """Stand in for the kernel before a product: write the activations, with the same values."""
    s[0].view(torch.uint8).bitwise_xor_(0)


def producer(layer: str, m: int, k: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """The kernel in front of a layer of a decoder block, as a function: (codes, rows' scales)."""
    import fp8pass.ops as ops

    generic = torch.ops.fp8pass
    quant = str(ops.dynamic_form("token"))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=BF16)

    kind = layer.rpartition(".")[2]
    if kind == "o":
        x = random(m, k)
        return lambda: generic.triton_quantize(x, None, quant)[:2]
    if kind == "down":
        gate, up = random(m, 2 * k).chunk(2, -1)
        act = "div,bfloat16,bfloat16"
        return lambda: generic.triton_silu_mul_quant(gate, up, None, act, quant, False)[:2]
    x, residual, weight = random(m, k), random(m, k), random(k)
    norm = "mean,rsqrt,after_cast,bfloat16"
    return lambda: generic.triton_add_rms_norm_quant(
        x, residual, weight, None, 1e-5, norm, quant, False
    )[:2]


def captured(
    call: Callable[[Operands], Any], sets: list[Operands], behind: str, layer: str
) -> Captured:
    """One call for each set in a CUDA graph, each behind a kernel (:data:`BEHIND`)."""
    made = producer(layer, *sets[0][0].shape) if behind == "producer" else None

    def both(i: int) -> Any:
        s = sets[i]
        if made is not None:
            codes, scales = made()
            s = (codes, s[1], scales, *s[3:])
        elif behind == "writer":
            produce(s)
        return call(s)

    return Captured(both, len(sets))


# ---- the search ---------------------------------------------------------------------------------


def shapes(m: int) -> Iterator[tuple[bool, int, int, int, int]]:
    """(swap, bm, bn, pack, warps), one 64-row instruction for each group of four warps."""
    if m <= SKINNY_ROWS:
        bm = bucket(m)
        for rows, pack in itertools.product((64, 128, 256), (1, 2, 4)):
            bn = rows // pack
            if pack * bm <= 128:
                yield True, bm, bn, pack, bn * pack // 16
        return
    for wide, narrow in ((64, 64), (64, 128), (128, 64), (128, 128), (256, 64), (128, 256)):
        for swap in (True, False):
            bm, bn = (narrow, wide) if swap else (wide, narrow)
            if bm < 2 * m:
                yield swap, bm, bn, 1, wide // 16


def programs(tile: Tile, m: int, n: int) -> int:
    return -(-m // tile.bm) * -(-n // tile.bn) * tile.splits


def sensible(tile: Tile, m: int, n: int, k: int) -> bool:
    """Whether a tile can run, and is not sure to lose."""
    weights = tile.bn * tile.pack * tile.bk * (tile.stages - 1)
    return (
        tile.shared_memory <= SHARED
        and tile.stages >= 2
        and weights >= 24 * 1024
        and tile.bk * tile.pack * tile.splits <= k
        and (tile.splits == 1 or programs(tile, m, n) <= 600)
    )


def first_tiles(m: int, n: int, k: int) -> list[Tile]:
    """Where the search starts: every shape, with few values of the rest."""
    ahead = 1024 if m <= SKINNY_ROWS else 0
    found = [
        Tile(swap, bm, bn, bk, warps, stages, pack, splits, prefetch=ahead)
        for (swap, bm, bn, pack, warps), bk, stages, splits in itertools.product(
            shapes(m), (128, 256), (3, 4, 6), (1, 2, 4)
        )
    ]
    return [tile for tile in found if sensible(tile, m, n, k)]


def neighbours(tile: Tile, m: int, n: int, k: int) -> Iterator[Tile]:
    """Tiles that differ in one value."""
    values: dict[str, Iterable[int]] = {
        "stages": (tile.stages - 1, tile.stages + 1),
        "splits": (tile.splits - 1, tile.splits + 1, tile.splits + 2),
        "prefetch": (0, 512, 1024, 2048, 4096, 8192),
        "bk": (128, 256),
    }
    for name, choices in values.items():
        for value in choices:
            changed = replace(tile, **{name: value})
            if value >= 0 and changed.splits >= 1 and sensible(changed, m, n, k):
                yield changed


def compile_tile(job: tuple[Tile, int, int, int, bool]) -> str:
    """Compile one tile in a process of its own (the result is in Triton's cache); "" or why not."""
    tile, m, n, k, fast = job
    from fp8pass.kernels.triton_gemm import launch

    try:
        a = torch.empty(m, k, device="cuda", dtype=FP8)
        w = torch.empty(n, k, device="cuda", dtype=FP8)
        scales = torch.ones(m, 1, device="cuda"), torch.ones(1, n, device="cuda")
        launch(a, w.t(), *scales, None, BF16, fast, tile)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:90]}"
    return ""


class Problem:
    """One layer at one number of rows, and the times of the tiles tried on it."""

    def __init__(self, layer: str, m: int, behind: str) -> None:
        self.layer, self.m, self.behind = layer, m, behind
        self.n, self.k = LAYERS[layer]
        self.todo = first_tiles(m, self.n, self.k)
        self.times: dict[Tile, float] = {}
        self.final: list[dict[str, Any]] = []

    def best(self, count: int) -> list[Tile]:
        return sorted(self.times, key=self.times.__getitem__)[:count]

    def measure(self, tiles: list[Tile], fast: bool) -> None:
        """Quick times of ``tiles``; wrong results are not kept."""
        from fp8pass.kernels.triton_gemm import launch

        sets = operands(self.n, self.k, self.m, sets_for(self.n * self.k, most=12))
        a, b, sa, sb, *_ = sets[0]
        exact = (a.float() @ b.float()) * sa * sb
        for tile in tiles:
            out = launch(a, b, sa, sb, None, BF16, fast, tile)
            if float((out - exact).abs().max() / exact.abs().max()) > 0.01:
                print("WRONG", self.layer, self.m, tile, flush=True)
                continue

            def call(s: Operands, tile: Tile = tile) -> Any:
                return launch(*s[:4], None, BF16, fast, tile)

            graph = captured(call, sets, self.behind, self.layer)
            self.times[tile] = min(graph.microseconds() for _ in range(6))

    def finish(self, fast: bool) -> None:
        """Careful times of the best tiles, and of the very best without overlapping launches."""
        from fp8pass.kernels.triton_gemm import launch

        sets = operands(self.n, self.k, self.m, sets_for(self.n * self.k, most=12))
        tiles = self.best(5)
        tiles.append(replace(tiles[0], overlap=False))
        found: dict[str, dict[str, float]] = {}
        for behind in dict.fromkeys((self.behind, "chain")):
            calls = {
                str(i): captured(
                    lambda s, tile=tile: launch(*s[:4], None, BF16, fast, tile),
                    sets, behind, self.layer,
                )
                for i, tile in enumerate(tiles)
            }  # fmt: skip
            found[behind] = interleaved(calls, 15)
        for i, tile in enumerate(tiles):
            self.final.append(
                {
                    "layer": self.layer, "n": self.n, "k": self.k, "m": self.m,
                    "pair_us": found[self.behind][str(i)], "chain_us": found["chain"][str(i)],
                    "tile": asdict(tile),
                }
            )  # fmt: skip
        self.final.sort(key=lambda row: row["pair_us"])
        print(self.layer, self.m)
        for row in self.final:
            values = list(row["tile"].values())
            print(f"    pair {row['pair_us']:.1f} chain {row['chain_us']:.1f}", *values, flush=True)


def sweep(args: argparse.Namespace) -> dict[str, Any]:
    """Try the first tiles of every problem, then what is near the best ones, while time lasts."""
    started = time.monotonic()

    def left() -> float:
        return args.seconds - (time.monotonic() - started)

    sizes = itertools.product(args.layers, args.rows)
    problems = [Problem(layer, m, args.behind) for layer, m in sizes]
    bad: dict[Tile, str] = {}
    known: set[Tile] = set()
    print("tile:", *Tile.__slots__)
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        for turn in range(args.turns):
            # what is compiled does not depend on N and K as long as the tile divides them
            work = {tile: (tile, p.m, p.n, p.k, args.fast) for p in problems for tile in p.todo}
            fresh = [job for tile, job in work.items() if tile not in known]
            for job, why in zip(fresh, pool.map(compile_tile, fresh, chunksize=2), strict=True):
                known.add(job[0])
                if why:
                    bad[job[0]] = why
            tried = sum(len(p.todo) for p in problems)
            print(f"turn {turn}: {tried} tries, {len(fresh)} compiled, {left():.0f} s left")
            for p in problems:
                if left() > 0.15 * args.seconds:
                    p.measure([tile for tile in p.todo if tile not in bad], args.fast)
                near = {t: None for b in p.best(4) for t in neighbours(b, p.m, p.n, p.k)}
                p.todo = [tile for tile in near if tile not in p.times and tile not in bad]
            if left() < 0.4 * args.seconds:
                break
        for text in sorted(set(bad.values())):
            print("refused:", text)
    for p in problems:
        if p.times:
            p.finish(args.fast)
    return {
        "best": [p.final[0] for p in problems if p.final],
        "final": [row for p in problems for row in p.final],
        "tried": [
            {"layer": p.layer, "m": p.m, "pair_us": us, "tile": list(asdict(t).values())}
            for p in problems
            for t, us in sorted(p.times.items(), key=lambda pair: pair[1])
        ],
    }


def print_table(path: Path) -> None:
    """The lines of ``triton_gemm_tiles.py`` that a search found."""
    lines: dict[tuple[str, int, int, int], str] = {}
    for row in json.loads(path.read_text())["best"]:
        m, (n, k), tile = row["m"], (row["n"], row["k"]), Tile(**row["tile"])
        default = Tile(True, 1, 1, 1, 1, 1)
        names = ("swap", "bm", "bn", "bk", "warps", "stages")
        values = [str(getattr(tile, name)) for name in names]
        values += [
            f"{name}={getattr(tile, name)}"
            for name in ("pack", "splits", "group", "prefetch", "overlap")
            if getattr(tile, name) != getattr(default, name)
        ]
        text = f"Tile({', '.join(values)}),  # {row['pair_us']:.1f}"
        kinds = ["skinny"] if m <= SKINNY_ROWS else ["general"]
        if m == SKINNY_ROWS:
            kinds.append("general")
        for kind in kinds:
            lines[kind, bucket(m), n, k] = text
    for key in sorted(lines, key=lambda key: (key[0] == "general", key)):
        print(f'    ("{key[0]}", {", ".join(map(str, key[1:]))}): {lines[key]}')


# ---- the comparison -----------------------------------------------------------------------------


def variants(m: int, vllm: bool) -> dict[str, Callable[[Operands], Any]]:
    """Everything that multiplies, by name; row: per-token x per-channel, tensor: one scale each."""
    from fp8pass.kernels.triton_gemm import scaled_mm

    calls: dict[str, Callable[[Operands], Any]] = {}
    for fast in (False, True):
        word = " fast" if fast else ""
        for kind in ("skinny", "general"):
            if kind == "general" or m <= SKINNY_ROWS:
                calls[kind + word] = lambda s, fast=fast, kind=kind: scaled_mm(
                    *s[:4], None, BF16, fast, kind
                )
        calls["torch row" + word] = lambda s, fast=fast: torch._scaled_mm(
            *s[:4], out_dtype=BF16, use_fast_accum=fast
        )
        calls["torch tensor" + word] = lambda s, fast=fast: torch._scaled_mm(
            *s[:2], *s[4:6], out_dtype=BF16, use_fast_accum=fast
        )
    if vllm:

        def cutlass(s: Operands) -> Any:
            out = torch.empty((s[0].shape[0], s[1].shape[1]), dtype=BF16, device="cuda")
            torch.ops._C.cutlass_scaled_mm(out, *s[:4], None)
            return out

        calls["vllm row"] = cutlass
    return calls


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Every variant at every size, in turns."""
    results = []
    for behind in dict.fromkeys(("chain", args.behind)):
        names = list(variants(1, bool(args.vllm_libs)))
        print(behind, flush=True)
        for layer, m in itertools.product(args.layers, args.rows):
            n, k = LAYERS[layer]
            sets = operands(n, k, m, sets_for(n * k, most=12))
            calls = variants(m, bool(args.vllm_libs))
            graphs = {n: captured(call, sets, behind, layer) for n, call in calls.items()}
            found = interleaved(graphs, args.rounds)
            del graphs, sets
            results.append({"behind": behind, "layer": layer, "n": n, "k": k, "m": m, **found})
            row = [layer, m, *(found.get(name, "") for name in names)]
            print(table(["layer", "M", *names], [row]), flush=True)
    return {"results": results, "host_us": host_time(), "accuracy": accuracy()}


def host_time(calls: int = 500) -> dict[str, float]:
    """Microseconds of Python for a launch, by kernels too small for the device to fall behind."""
    (s,) = operands(64, 256, 1, 1)
    found = {}
    for name, call in variants(1, False).items():
        call(s)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call(s)
        found[name] = (time.perf_counter() - start) * 1e6 / calls
        torch.cuda.synchronize()
    print("host", {name: round(value, 1) for name, value in found.items()}, flush=True)
    return found


def accuracy(n: int = 1024, k: int = 14336) -> dict[str, Any]:
    """Errors against float64, results in float32: mean relative, and worst by sum of magnitudes.

    ``cancels``: codes of random sign; ``grows``: positive codes, whose sum only grows.
    """
    from fp8pass.kernels.triton_gemm import scaled_mm

    found: dict[str, Any] = {}
    one = torch.ones((), device="cuda")
    for m, data in itertools.product((16, 256), ("cancels", "grows")):
        a, w = (torch.randn(rows, k, device="cuda") * 8 for rows in (m, n))
        if data == "grows":
            a, w = a.abs(), w.abs()
        s = (a.to(FP8), w.to(FP8).t(), one, one)
        exact = s[0].double() @ s[1].double()
        size = s[0].double().abs() @ s[1].double().abs()
        kind = "skinny" if m <= SKINNY_ROWS else "general"
        for fast in (False, True):
            for name, out in (
                (kind, scaled_mm(*s, None, torch.float32, fast, kind)),
                (
                    "torch",
                    torch._scaled_mm(*s, out_dtype=torch.float32, use_fast_accum=fast),
                ),
            ):
                error = (out.double() - exact).abs()
                worst = float((error / size).max()) * 2**10
                mean = float(error.mean() / exact.abs().mean())
                key = f"M={m} {data} {name}{' fast' if fast else ''}"
                found[key] = {"mean_relative": mean, "worst_of_sum_times_2^10": worst}
                print(f"{key}: mean {mean:.1e}, worst {worst:.3f} x 2^-10 of the magnitudes")
    return found


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sweep", action="store_true", help="search for tiles")
    parser.add_argument("--table", type=Path, help="print the table that a search found")
    parser.add_argument("--fast", action="store_true", help="search with reduced accumulation")
    parser.add_argument("--behind", default="producer", choices=BEHIND)
    parser.add_argument("--layers", nargs="+", default=list(LAYERS)[:4], choices=LAYERS)
    parser.add_argument("--rows", nargs="+", type=int)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--turns", type=int, default=3, help="of the search")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--vllm-libs", type=Path, help="folder of vLLM's compiled libraries")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.table:
        print_table(args.table)
        return
    args.rows = args.rows or ([*BUCKETS, 1024] if args.sweep else ROWS)
    if args.vllm_libs:
        for name in ("_C_stable_libtorch.abi3.so", "_C.abi3.so"):
            torch.ops.load_library(str(args.vllm_libs / name))
    found = sweep(args) if args.sweep else compare(args)
    if args.json:
        device = torch.cuda.get_device_name()
        args.json.write_text(json.dumps({"torch": torch.__version__, "device": device, **found}))


if __name__ == "__main__":
    main()
