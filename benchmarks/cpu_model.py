"""Seconds per forward of a SmolLM2-135M-shaped model on a CPU: bf16, FP8 stock, FP8 with fp8pass.

Random weights, plain torch, no download: what is measured is the code, not the text. All variants
are compiled first, then timed in turns (A B C A B C ...), so that a machine that speeds up or slows
down does so for all; the medians and their ratios are printed, and written with ``--json``.

    python benchmarks/cpu_model.py --layers 30 --tokens 256 --recipe dynamic --threads 2
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import fp8pass
from fp8pass.demo.tiny import TinyConfig, TinyLlama
from fp8pass.merging import merge_linears

VARIANTS = ("bf16", "stock", "unprepared", "merged", "prepared", "prepared_fast")


def build(layers: int) -> TinyLlama:
    """A model of SmolLM2-135M's shapes with random weights, bf16."""
    torch.manual_seed(0)
    config = TinyConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
    )
    return TinyLlama(config).to(torch.bfloat16).eval()


def variants(args: argparse.Namespace, ids: torch.Tensor) -> dict[str, Callable[..., Any]]:
    """The compiled callables by name."""
    model = build(args.layers)
    quantised = copy.deepcopy(model)
    calibration = None
    if args.recipe == "static":
        calibration = fp8pass.nn.calibrate(quantised, [ids])
    fp8pass.quantize_(quantised, args.recipe, calibration=calibration, progress=False)
    prepared = copy.deepcopy(quantised)
    print(fp8pass.prepare(prepared, progress=False), file=sys.stderr)
    merged = copy.deepcopy(quantised)
    merge_linears(merged)
    made: dict[str, Callable[[], Callable[..., Any]]] = {
        "bf16": lambda: torch.compile(model),
        "stock": lambda: torch.compile(quantised),
        "unprepared": lambda: torch.compile(quantised, backend=fp8pass.fp8pass_backend),
        "merged": lambda: torch.compile(merged, backend=fp8pass.fp8pass_backend),
        "prepared": lambda: torch.compile(prepared, backend=fp8pass.fp8pass_backend),
        "prepared_fast": lambda: torch.compile(
            prepared, backend=fp8pass.fp8pass_backend, options={"fp8pass.numerics": "fast"}
        ),
    }
    return {name: made[name]() for name in VARIANTS if name in args.variants}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run it; returns what ``--json`` writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--recipe", default="dynamic")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    ids = torch.randint(0, 49152, (1, args.tokens))
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "target": fp8pass.Target.detect("cpu").spec,
        "threads": torch.get_num_threads(),
        "settings": {k: v for k, v in vars(args).items() if k != "json"},
        "variants": {},
    }
    seconds: dict[str, list[float]] = {}
    with torch.no_grad():
        compiled = variants(args, ids)
        for name, function in compiled.items():
            started = time.perf_counter()
            function(ids)
            result["variants"][name] = {"compile_seconds": time.perf_counter() - started}
            print(f"{name}: compiled", result["variants"][name], file=sys.stderr, flush=True)
            function(ids)
            seconds[name] = []
        for _ in range(args.rounds):
            for name, function in compiled.items():
                started = time.perf_counter()
                function(ids)
                seconds[name].append(time.perf_counter() - started)
    base = statistics.median(seconds[next(iter(seconds))])
    for name, values in seconds.items():
        row = result["variants"][name]
        row |= {"median": statistics.median(values), "min": min(values), "max": max(values)}
        row["ratio_to_first"] = row["median"] / base
        print(
            f"{name:14s} {row['median'] * 1e3:9.2f} ms  ({row['min'] * 1e3:.2f} - "
            f"{row['max'] * 1e3:.2f})  x{row['ratio_to_first']:.2f}"
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)
    return result


if __name__ == "__main__":
    main()
