"""A process that measures products on the GPU, or times again what an earlier one chose.

    python tests/gpu/tuning_process.py tune   FOLDER OUT.json [LAYER ...]
    python tests/gpu/tuning_process.py verify FOLDER OUT.json [LAYER ...]

vLLM's CUTLASS is among the candidates where its two libraries lie in build/vllm_ops
(benchmarks/fetch_vllm_ops.py), or in the folder that FP8PASS_TEST_VLLM_LIBS names.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fp8pass.lowerings import choose, consider, kernels
from fp8pass.options import Options
from fp8pass.problem import MRange, ScaledMMProblem
from fp8pass.problem_spec import parse_problem, with_rows
from fp8pass.target import Target
from fp8pass.tuning import session
from fp8pass.tuning.live import live_device
from fp8pass.tuning.measure import measure
from fp8pass.tuning.measured import Record

#: The layers of Llama-3-8B, and those of Llama-3-70B that differ in kind, as (N, K).
LAYERS = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "70b.qkv": (10240, 8192),
    "70b.gate_up": (57344, 8192),
    "70b.down": (8192, 28672),
}
SCALES = ("row", "static", "block")
ROWS = (1, 4, 16, 17, 64, 256, 1024, 4096, 16384)


def load_vllm() -> bool:
    folder = Path(os.environ.get("FP8PASS_TEST_VLLM_LIBS", "build/vllm_ops"))
    files = [folder / name for name in ("_C_stable_libtorch.abi3.so", "_C.abi3.so")]
    if not all(file.exists() for file in files):
        return False
    for file in files:
        torch.ops.load_library(str(file))
    return True


def problems(target: Target, layers: list[str]) -> list[tuple[str, str, ScaledMMProblem]]:
    """(layer, scales, product of any number of rows); those per token and per tensor also where
    the source allows reduced accumulation, without which vLLM's CUTLASS is no candidate."""
    found = []
    for layer in layers:
        n, k = LAYERS[layer]
        for scales in SCALES:
            found.append((layer, scales, parse_problem(f"{scales}, n={n}, k={k}", target)))
        for scales in ("row", "static"):
            fast = parse_problem(f"{scales}, n={n}, k={k}, fast_accum", target)
            found.append((layer, f"{scales} fast_accum", fast))
    return found


def tune(folder: str, layers: list[str]) -> list[dict[str, Any]]:
    target = Target.detect("cuda")
    options = Options(tune="measure", tune_cache=folder)
    rows = []
    for layer, scales, problem in problems(target, layers):
        session.ensure(target, problem, options)
        choice = choose(target, problem, options)
        rows.append({"layer": layer, "scales": scales, "plan": choice.text, "why": choice.why})
        print(layer, scales, choice.text, f"({choice.why})", flush=True)
    return rows


def verify(folder: str, layers: list[str]) -> list[dict[str, Any]]:
    """The chosen kernel beside all candidates, timed anew on other data."""
    target = Target.detect("cuda")
    device = live_device(target)
    assert device is not None
    options = Options(tune="cached", tune_cache=folder)
    rows = []
    for layer, scales, problem in problems(target, layers):
        plan = choose(target, problem, options).plan
        for m in ROWS:
            chosen = next(k.name for r, k in plan if r.covers(MRange(m, m)))
            made = Record()
            for part in measure(target, with_rows(problem, m), device, seed=1000, rounds=21):
                made = made.merged(part)
            us = made.points[0].us
            best = min(us, key=us.__getitem__)
            not_run = {
                kernel.name: verdict.message
                for kernel in kernels()
                if not (verdict := consider(kernel, target, replace(problem, m=MRange(m, m))))
                and "cuda" in kernel.kinds
            }
            row = {
                "layer": layer, "scales": scales, "m": m, "chosen": chosen, "best": best,
                "us": us, "refused": made.refused, "not_run": not_run,
                "behind_us": us.get(chosen, float("inf")) - us[best],
                "behind": us.get(chosen, float("inf")) / us[best] - 1,
            }  # fmt: skip
            rows.append(row)
            times = ", ".join(f"{name} {value:.1f}" for name, value in sorted(us.items()))
            print(f"{layer} {scales} M={m}: {chosen} {100 * row['behind']:+.1f} %  [{times}]",
                  flush=True)  # fmt: skip
    return rows


def main() -> None:
    what, folder, out, *layers = sys.argv[1:]
    found: dict[str, Any] = {"vllm": load_vllm(), "device": torch.cuda.get_device_name()}
    work = {"tune": tune, "verify": verify}[what]
    found["rows"] = work(folder, layers or list(LAYERS))
    Path(out).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
