"""Products with scales per block, and of int8 codes: torch's and our own on one GPU.

    python benchmarks/block_scaled.py --json out.json
    python benchmarks/block_scaled.py --int8
    python benchmarks/block_scaled.py --sweep --json tiles.json --seconds 240
    python benchmarks/block_scaled.py --table tiles.json

Microseconds per call, medians of CUDA graph replays that rotate over more than 200 MB of weights,
the variants in turns. Each call stands behind an element-wise kernel that writes its activations,
as in a model; the time is that of both. *torch* is ``torch._scaled_mm`` with scales as it asks for
them, *torch_block* what fp8pass lowers to, which lays them out first; the ratio is ours to
torch_block. Of int8 codes *int_mm* is ``torch._int_mm`` alone, without the scales.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from gpu_timing import Captured, interleaved, sets_for, table

from fp8pass.kernels.triton_block_tiles import block_tile
from fp8pass.kernels.triton_gemm_tiles import BUCKETS, Tile, bucket

#: Layers of Llama-3's 8B and 70B as (N, K).
LAYERS = {
    "8b.qkv": (6144, 4096),
    "8b.o": (4096, 4096),
    "8b.gate_up": (28672, 4096),
    "8b.down": (4096, 14336),
    "70b.qkv": (10240, 8192),
    "70b.gate_up": (57344, 8192),
    "70b.down": (8192, 28672),
}
ROWS = (1, 4, 16, 17, 64, 256, 1024, 4096)
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
#: Shared memory that one program may have.
SHARED = 226 * 1024
Operands = tuple[torch.Tensor, ...]
Calls = dict[str, Callable[[Operands], Any]]


def operands(n: int, k: int, m: int, sets: int) -> list[Operands]:
    """``(a, b, scales of a, scales of b, both laid out as torch asks)``, random."""
    made = []
    for _ in range(sets):
        a = (torch.randn(m, k, device="cuda") * 8).to(FP8)
        code = torch.randint(0, 0xDF, (n, k), device="cuda", dtype=torch.uint8)
        w = torch.where(code < 0x70, code, code + 0x10).view(FP8)  # any code but NaN
        sa = torch.rand(m, k // 128, device="cuda") + 0.1
        sb = (torch.rand(n // 128, k // 128, device="cuda") + 0.1).t()
        made.append((a, w.t(), sa, sb, sa.t().contiguous().t(), sb.t().contiguous().t()))
    return made


def int8_operands(n: int, k: int, m: int, sets: int) -> list[Operands]:
    """``(a, b, scales of rows, scales of columns)``, random."""
    made = []
    for _ in range(sets):
        a = torch.randint(-128, 128, (m, k), device="cuda", dtype=torch.int8)
        w = torch.randint(-128, 128, (n, k), device="cuda", dtype=torch.int8)
        made.append((a, w.t(), torch.rand(m, 1, device="cuda"), torch.rand(1, n, device="cuda")))
    return made


def captured(call: Callable[[Operands], Any], sets: list[Operands]) -> Captured:
    """One call for each set in a CUDA graph, each behind a kernel that writes its activations."""

    def both(i: int) -> Any:
        sets[i][0].view(torch.uint8).bitwise_xor_(0)
        return call(sets[i])

    return Captured(both, len(sets))


def exact(s: Operands) -> torch.Tensor:
    """The product in float32."""
    a, b, sa, sb = s[:4]
    wide = b.float() * sb.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (a.float() * sa.repeat_interleave(128, 1)) @ wide


def error(out: torch.Tensor, right: torch.Tensor) -> float:
    return float((out.float() - right).abs().max() / right.abs().max())


# ---- the comparison -----------------------------------------------------------------------------


def variants(m: int) -> Calls:
    """Everything that multiplies with scales per block, by name."""
    from fp8pass.kernels.triton_block import block_mm
    from fp8pass.lowerings import find

    torch_block = find("torch_block").run
    assert torch_block is not None
    return {
        "torch": lambda s: torch._scaled_mm(*s[:2], *s[4:6], out_dtype=BF16),
        "torch_block": lambda s: torch_block(*s[:4], None, BF16, False),
        "triton_block": lambda s: block_mm(*s[:4], None, BF16),
    }


def int8_variants(m: int) -> Calls:
    """Everything that multiplies int8 codes, by name."""
    from fp8pass.kernels.triton_gemm import scaled_mm

    calls: Calls = {"triton_int8": lambda s: scaled_mm(*s[:4], None, BF16, False, "int8")}
    if m > 16:
        calls["int_mm"] = lambda s: torch._int_mm(*s[:2])
    return calls


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every variant at every size, in turns."""
    results = []
    names = ["int_mm", "triton_int8"] if args.int8 else list(variants(1))
    for layer, m in itertools.product(args.layers, args.rows):
        n, k = LAYERS[layer]
        make, calls = (int8_operands, int8_variants(m)) if args.int8 else (operands, variants(m))
        sets = make(n, k, m, sets_for(n * k, most=12))
        if not args.int8:
            right = exact(sets[0])
            for name, call in list(calls.items()):
                try:
                    wrong = error(call(sets[0]), right)
                except RuntimeError as why:  # a size that torch does not take
                    print(layer, m, name, "refused:", str(why).splitlines()[0][:120])
                    del calls[name]
                    continue
                if wrong > 0.02:
                    print("WRONG", layer, m, name, wrong, flush=True)
            del right
        graphs = {name: captured(call, sets) for name, call in calls.items()}
        found = interleaved(graphs, args.rounds)
        del graphs, sets
        ours, other = found[names[-1]], found.get(names[-2])
        ratio = "" if other is None else f"{ours / other:.2f}"
        results.append({"layer": layer, "n": n, "k": k, "m": m, **found})
        row = [layer, m, *(found.get(name, "") for name in names), ratio]
        print(table(["layer", "M", *names, "ratio"], [row]), flush=True)
    return results


# ---- the search ---------------------------------------------------------------------------------


def first_tiles(m: int, n: int, k: int) -> list[Tile]:
    """Every shape with few values of the rest, and what the rule says."""
    found = [block_tile(bucket(m), n, k)]
    shapes: list[tuple[bool, int, int, int, int]] = []  # swap, bm, bn, pack, warps
    if m <= 64:
        bm = bucket(m)
        shapes += [(True, bm, 64 // pack, pack, 4) for pack in (1, 2, 4) if pack * bm <= 64]
        shapes += [(True, bm, 128, 1, 8)]
    else:
        shapes += [(True, bm, bn, 1, bn // 16) for bm in (32, 64, 128) for bn in (64, 128)]
        shapes += [(False, bm, bn, 1, bm // 16) for bm in (64, 128) for bn in (32, 64, 128)]
    for (swap, bm, bn, pack, warps), stages, splits in itertools.product(
        shapes, (3, 4, 6), (1, 2, 4)
    ):
        ahead = 512 if m <= 64 else 0
        found.append(Tile(swap, bm, bn, 128, warps, stages, pack, splits, prefetch=ahead))
    return [tile for tile in dict.fromkeys(found) if sensible(tile, m, n, k)]


def neighbours(tile: Tile) -> Iterator[Tile]:
    """Tiles that differ in one value."""
    values = {
        "stages": (tile.stages - 1, tile.stages + 1),
        "splits": (tile.splits - 1, tile.splits + 1),
        "prefetch": (0, 512, 2048),
        "group": (4, 8, 16),
        "overlap": (not tile.overlap,),
    }
    for name, choices in values.items():
        for value in choices:
            yield replace(tile, **{name: value})


def sensible(tile: Tile, m: int, n: int, k: int) -> bool:
    """Whether a tile can run, and is not sure to lose."""
    programs = -(-m // tile.bm) * -(-n // tile.bn) * tile.splits
    return (
        tile.stages >= 2
        and tile.splits >= 1
        and tile.shared_memory <= SHARED
        and tile.bn * tile.pack * 128 * (tile.stages - 1) >= 16 * 1024
        and 128 * tile.pack * tile.splits <= k
        and (tile.splits == 1 or programs <= 800)
    )


def compile_tile(job: tuple[Tile, int, int, int]) -> str:
    """Compile one tile in a process of its own (Triton caches the result); "" or why not."""
    tile, m, n, k = job
    from fp8pass.kernels.triton_block import launch

    try:
        a, w = (torch.empty(rows, k, device="cuda", dtype=FP8) for rows in (m, n))
        sa = torch.ones(m, k // 128, device="cuda")
        sb = torch.ones(n // 128, k // 128, device="cuda")
        launch(a, w.t(), sa, sb.t(), None, BF16, tile)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:90]}"
    return ""


def sweep(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Try the first tiles of every size, then what is near the best ones, while time lasts."""
    from fp8pass.kernels.triton_block import launch

    started = time.monotonic()
    sizes = [(layer, m, *LAYERS[layer]) for layer in args.layers for m in args.rows]
    times: dict[tuple[str, int], dict[Tile, float]] = {(s[0], s[1]): {} for s in sizes}
    known: dict[Tile, str] = {}
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        for turn in range(args.turns):
            todo: dict[tuple[str, int], list[Tile]] = {}
            for layer, m, n, k in sizes:
                had = times[layer, m]
                best = sorted(had, key=had.__getitem__)[:2]
                near = [t for b in best for t in neighbours(b) if sensible(t, m, n, k)]
                tries = first_tiles(m, n, k) if turn == 0 else near
                todo[layer, m] = [t for t in dict.fromkeys(tries) if t not in had]
            jobs = {t: (t, m, n, k) for layer, m, n, k in sizes for t in todo[layer, m]}
            fresh = [job for t, job in jobs.items() if t not in known]
            for job, why in zip(fresh, pool.map(compile_tile, fresh, chunksize=2), strict=True):
                known[job[0]] = why
            spent = time.monotonic() - started
            print(f"turn {turn}: {sum(map(len, todo.values()))} tries, {spent:.0f} s", flush=True)
            for layer, m, n, k in sizes:
                if time.monotonic() - started > args.seconds * 0.9:
                    break
                sets = operands(n, k, m, sets_for(n * k, most=8))
                right = exact(sets[0])
                for tile in todo[layer, m]:
                    if known[tile]:
                        continue
                    if error(launch(*sets[0][:4], None, BF16, tile), right) > 0.02:
                        print("WRONG", layer, m, tile, flush=True)
                        continue
                    graph = captured(lambda s, tile=tile: launch(*s[:4], None, BF16, tile), sets)
                    times[layer, m][tile] = min(graph.microseconds() for _ in range(5))
    for text in sorted({why for why in known.values() if why}):
        print("refused:", text)
    best_of = []
    for layer, m, n, k in sizes:
        ranked = sorted(times[layer, m].items(), key=lambda pair: pair[1])
        for tile, us in ranked[:3]:
            print(layer, m, f"{us:.1f}", *asdict(tile).values(), flush=True)
        if ranked:
            tile, us = ranked[0]
            row = {"layer": layer, "m": m, "n": n, "k": k, "us": us, "tile": asdict(tile)}
            best_of.append(row)
    return best_of


def print_table(path: Path) -> None:
    """The lines of ``triton_block_tiles.py`` that a search found."""
    plain = asdict(Tile(True, 1, 1, 1, 1, 1))
    first = ("swap", "bm", "bn", "bk", "warps", "stages")
    lines: dict[str, str] = {}  # of two numbers of rows in one bucket the larger counts
    for row in sorted(json.loads(path.read_text())["results"], key=lambda r: (r["m"], r["n"])):
        tile = row["tile"]
        values = [str(tile[name]) for name in first]
        values += [f"{k}={v}" for k, v in tile.items() if k not in first and v != plain[k]]
        key = f"({bucket(row['m'])}, {row['n']}, {row['k']})"
        lines[key] = f"Tile({', '.join(values)}),  # {row['us']:.1f}"
    for key, text in lines.items():
        print(f"    {key}: {text}")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--int8", action="store_true", help="compare products of int8 codes")
    parser.add_argument("--sweep", action="store_true", help="search for tiles")
    parser.add_argument("--table", type=Path, help="print the table that a search found")
    parser.add_argument("--layers", nargs="+", default=list(LAYERS)[:4], choices=LAYERS)
    parser.add_argument("--rows", nargs="+", type=int)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--turns", type=int, default=2, help="of the search")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.table:
        print_table(args.table)
        return
    args.rows = args.rows or ([*BUCKETS, 1024, 4096] if args.sweep else ROWS)
    found = sweep(args) if args.sweep else compare(args)
    if args.json:
        device = torch.cuda.get_device_name()
        facts = {"torch": torch.__version__, "device": device, "results": found}
        args.json.write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
