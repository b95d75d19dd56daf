"""The linear path of a Llama-3-8B decoder block in FP8 on a GPU: Inductor, vLLM's kernels, fp8pass.

    python benchmarks/fetch_vllm_ops.py build/vllm_ops
    python benchmarks/block.py --vllm-libs build/vllm_ops --json build/block.json

Four blocks without attention (``block_model.py``), so that their 872 MB of weights do not stay in
the cache, in one CUDA graph for each variant (``block_variants.py``). For each recipe and number of
rows, variants take turns with a rotating order; medians of microseconds per block are printed.
Before it is timed, the replay of each graph is compared with the blocks in float64. One that is
much further off than eager is not timed, and the run fails at its end.

Unless ``--processes 0`` is given, all variants are first compiled in several processes at once,
into a cache of this run. ``--dynamic`` compiles each variant once per recipe for any number of rows
instead.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import block_model as model
import block_variants as variants
import torch
from block_model import RECIPES, Sizes
from block_tables import failures, kernel_lines, render, times_table
from block_timing import Replay, interleaved, kernels_of
from block_variants import VARIANTS

import fp8pass.report

ROWS = (1, 16, 64, 256, 1024, 4096)
#: Ceilings that the same card reached (a large sum; a product of 8192 cubed): bytes/s, FLOP/s.
BANDWIDTH, FP8_RATE = 4.38e12, 1.5e15
#: Distance from float64 above which a variant is wrong: 2 x eager's + this; and of any single row.
#: Eager's is 5 to 10 %: a bf16 rounding that moves a code moves it by up to 12 %, and after a few
#: quantises two right ways are as far apart as their quantisation errors are large.
ALLOWED, ALLOWED_ROW = 0.01, 0.5
LLAMA_3_8B = Sizes()


def floor_us(sizes: Sizes, rows: int) -> float:
    """Least microseconds of one block: its weights read once, or its products at full rate."""
    flops = 2 * rows * sizes.weight_bytes  # one byte a weight
    return 1e6 * max(sizes.weight_bytes / BANDWIDTH, flops / FP8_RATE)


def wrong(error: float, worst: float, eager: float | None) -> str | None:
    """Why distances from float64 (as a whole, of the worst row) are not those of a right variant.

    Args:
        eager: that of the eager block as a whole, if it was run.
    """
    limit = ALLOWED + 2 * (0.1 if eager is None else eager)
    if error <= limit and worst <= ALLOWED_ROW:  # never for NaN
        return None
    return (
        f"relative L2 distance from float64 {error:.4f} (allowed {limit:.4f}), of the worst row "
        f"{worst:.4f} (allowed {ALLOWED_ROW})"
    )


class Bench:
    """All cells of one recipe: its weights, inputs, reference, and what is compiled for any rows.

    Args:
        names: variants to run.
        rows: numbers of rows, for the largest of which inputs are made.
        replay: how a forward is captured; :class:`Replay` on a GPU.
    """

    def __init__(
        self,
        recipe: str,
        names: Sequence[str],
        rows: Sequence[int],
        *,
        sizes: Sizes = LLAMA_3_8B,
        device: str = "cuda",
        dynamic: bool = False,
        replay: Callable[..., Any] = Replay,
    ) -> None:
        self.recipe, self.names, self.sizes, self.dynamic = recipe, names, sizes, dynamic
        self.device, self.replay = device, replay
        self.stack = model.make_weights(sizes, recipe, device)
        self.inputs = model.make_inputs(sizes, max(rows), device)
        self.wanted = model.reference(self.stack, *self.inputs)
        self.built: dict[str, model.Block] = {}
        self.chosen: dict[str, Any] = {}

    def start(self, name: str, rows: int) -> tuple[Any, dict[str, Any]]:
        """Compile, capture and compare one variant: (its replay, what is known so far)."""
        hidden, residual, scratch = (
            value[:rows].clone() for value in (*self.inputs, self.inputs[1])
        )
        if not self.dynamic or name not in self.built:
            self.built[name] = variants.build(name, self.recipe, None if self.dynamic else False)
            if self.dynamic and rows > 1:
                torch._dynamo.mark_dynamic(hidden, 0)
                torch._dynamo.mark_dynamic(scratch, 0)
        block = self.built[name]
        fp8pass.report.clear()
        started = time.perf_counter()
        block(hidden, scratch, self.stack[0])
        if self.device == "cuda":
            torch.cuda.synchronize()
        entry: dict[str, Any] = {"first_call_s": time.perf_counter() - started}
        if VARIANTS[name].backend == "fp8pass":
            self.chosen[name] = variants.chosen() or self.chosen.get(name, {})
            entry["chosen"] = self.chosen[name]
        replay = self.replay(lambda r: model.run_blocks(block, self.stack, hidden, r), residual)
        wanted = [value[:rows] for value in self.wanted]
        entry["error"], entry["worst_row"] = model.distances(replay.run(), wanted)
        return replay, entry

    def cell(self, rows: int, seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
        """One number of rows: every variant compared, then all timed in turns for ``seconds``.

        Returns:
            what was found, and the replays. A variant that raised or computes something else has
            ``failed`` in the former and no replay.
        """
        if not self.dynamic:
            torch._dynamo.reset()
        entries: dict[str, Any] = {}
        replays: dict[str, Any] = {}
        for name in self.names:
            try:
                replay, entry = self.start(name, rows)
            except Exception as error:  # the others are worth measuring all the same
                text = " ".join(f"{type(error).__name__}: {error}".split())
                entries[name] = {"failed": text[:600]}
                continue
            eager = entries.get("eager", {}).get("error")
            why = wrong(entry["error"], entry["worst_row"], eager)
            entries[name] = entry
            if why is None:
                replays[name] = replay
            else:
                entry["failed"] = why
        for name, found in interleaved(replays, seconds).items():
            entries[name] |= {k: v / self.sizes.blocks for k, v in found.items()}
        cell = {
            "recipe": self.recipe,
            "rows": rows,
            "floor_us": floor_us(self.sizes, rows),
            "variants": entries,
        }
        return cell, replays


def add_kernels(cell: dict[str, Any], replays: dict[str, Any], blocks: int) -> None:
    """Note the kernels of each variant in ``cell``."""
    for name, kernels in kernels_of(replays).items():
        cell["variants"][name]["kernels"] = len(kernels) / blocks
        cell["variants"][name]["by_kernel"] = _by_kernel(kernels, blocks)


def _by_kernel(kernels: Sequence[tuple[str, float]], blocks: int) -> list[dict[str, Any]]:
    """Kernels of the same name added up, per block, the longest first."""
    total: dict[str, list[float]] = {}
    for name, microseconds in kernels:
        total.setdefault(name, []).append(microseconds)
    found = [
        {"name": name, "calls": len(times) / blocks, "us": sum(times) / blocks}
        for name, times in total.items()
    ]
    return sorted(found, key=lambda item: -item["us"])


# ---- the run -------------------------------------------------------------------------------------


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--vllm-libs", type=Path, help="folder of its two libraries")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing for each cell")
    parser.add_argument("--deadline", type=float, default=540.0, help="start no cell after this")
    parser.add_argument("--processes", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument(
        "--dynamic", action="store_true", help="compile once for any number of rows"
    )
    parser.add_argument("--profile", action="store_true", help="print the time of each kernel")
    parser.add_argument("--no-kernels", action="store_true", help="do not count kernels")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    args = arguments(argv)
    if not torch.cuda.is_available():
        raise SystemExit("block.py measures a GPU, and torch finds none here")
    started = time.monotonic()
    if args.vllm_libs is not None:
        import vllm_ops

        vllm_ops.load(args.vllm_libs)
    names = [n for n in VARIANTS if n in args.variants]
    missing = [n for n in names if VARIANTS[n].needs_vllm and args.vllm_libs is None]
    names = [n for n in names if n not in missing]
    head = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "left_out": missing,
        "settings": {k: str(v) for k, v in vars(args).items()},
        "notes": {name: VARIANTS[name].note for name in names},
    }
    print(f"{head['device']}, torch {head['torch']}")
    for name in names:
        reduced = "; may accumulate in less than float32" if VARIANTS[name].reduced else ""
        print(f"  {name}: {VARIANTS[name].note}{reduced}")
    if missing:
        print(f"  left out for want of --vllm-libs: {', '.join(missing)}")
    cells: list[dict[str, Any]] = []
    kept: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches, torch.no_grad():
        variants.fresh_caches(Path(caches))
        compiled = _compile(args, names)
        print(f"[{time.monotonic() - started:.0f} s] compiled beforehand", flush=True)
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        for recipe in args.recipes:
            # a size of 1 is a constant to Dynamo, so that nothing dynamic comes of it
            rows = sorted(args.rows, key=lambda m: m < 2) if args.dynamic else args.rows
            bench = Bench(recipe, names, rows, dynamic=args.dynamic)
            for m in rows:
                if time.monotonic() - started > args.deadline:
                    print(f"out of time before {recipe} M {m}")
                    break
                cell, replays = bench.cell(m, args.seconds)
                for name, seconds in compiled.get((recipe, m), {}).items():
                    cell["variants"][name]["compile_s"] = seconds
                cells.append(cell)
                kept.append(replays)
                print(f"[{time.monotonic() - started:.0f} s] {recipe}")
                print("\n".join([times_table([cell], names), *failures([cell])]), flush=True)
                _write(args.json, head, cells)
        # at the end, since a profiler that has once been on may slow down what follows
        if args.profile or not args.no_kernels:
            for cell, replays in zip(cells, kept, strict=True):
                add_kernels(cell, replays, LLAMA_3_8B.blocks)
            _write(args.json, head, cells)
    if args.profile:
        print("\n".join(line for cell in cells for line in kernel_lines(cell)))
    print(render(cells))
    print(f"[{time.monotonic() - started:.0f} s]")
    if failures(cells):
        raise SystemExit("\n".join(["failed:", *failures(cells)]))


def _write(path: Path | None, head: dict[str, Any], cells: list[dict[str, Any]]) -> None:
    if path is not None:
        path.write_text(json.dumps({**head, "cells": cells}, indent=1))


def _compile(args: argparse.Namespace, names: Sequence[str]) -> dict[Any, dict[str, Any]]:
    """Compile what has to be compiled in several processes; what they say of their first calls."""
    to_compile = [name for name in names if VARIANTS[name].backend is not None]
    if args.dynamic or not args.processes or not to_compile:
        return {}
    cells = [(recipe, m) for recipe in args.recipes for m in args.rows]
    return variants.compile_all(cells, to_compile, args.vllm_libs, args.processes, Sizes(), "cuda")


if __name__ == "__main__":
    main()
