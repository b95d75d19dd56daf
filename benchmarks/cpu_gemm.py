"""The CPU scaled product beside torch's own products: checks against float64, then times.

    python benchmarks/cpu_gemm.py [--json FILE] [--threads N] [--rounds N]

Every kernel that the CPU has is run on its own and as chosen, prepared and not. The candidates of a
shape are timed in turn, round by round, so that a busy neighbour hits all alike; the table holds
the median and, in brackets, the fastest round, in microseconds. Weights stay in the CPU's caches
from round to round, for all candidates.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from fp8pass.kernels import cpu

# Linear layers of a 135M and of an 8B model, decode to prefill.
SHAPES = [
    *[(m, 1536, 576) for m in (1, 4, 8, 16, 64, 256)],
    (256, 576, 1536),
    (256, 576, 576),
    (256, 192, 576),
    (1, 4096, 4096),
    (16, 4096, 4096),
    (512, 4096, 4096),
]
LARGE = 10**9  # multiply-adds from which a shape gets fewer rounds


def candidates(m: int, n: int, k: int) -> tuple[dict[str, Callable[[], torch.Tensor]], float]:
    """The calls to time, and the largest error of ours against float64, relative to sum|a*b|."""
    a = torch.randn(m, k).to(torch.float8_e4m3fn)
    w = torch.randn(n, k).to(torch.float8_e4m3fn)
    b, prepared = w.t(), cpu.pack(w)
    scale_a, scale_b = torch.rand(m, 1), torch.rand(1, n)
    a16, w16, a32, w32 = a.bfloat16(), w.bfloat16(), a.float(), w.float()

    def ours(
        packed: torch.Tensor | None, kernel: str | None, dtype: torch.dtype = torch.bfloat16
    ) -> torch.Tensor:
        return cpu.scaled_mm(a, b, scale_a, scale_b, None, dtype, packed, kernel=kernel)

    calls: dict[str, Callable[[], torch.Tensor]] = {
        "torch f32 mm": lambda: a32 @ w32.t(),
        "torch bf16 mm": lambda: a16 @ w16.t(),
        "chosen": lambda: ours(None, None),
        "chosen, prepared": lambda: ours(prepared, None),
    }
    exact = (a.double() @ b.double()) * scale_a * scale_b
    size = (a.double().abs() @ b.double().abs()) * scale_a * scale_b
    worst = 0.0
    for kernel in (None, *cpu.kernels()):
        if kernel.startswith("gemv") and m > cpu.GEMV_ROWS:
            continue
        result = ours(None, kernel, torch.float32)
        if not torch.equal(result, ours(prepared, kernel, torch.float32)):
            raise AssertionError(f"{kernel}: prepared and unprepared differ at {(m, n, k)}")
        worst = max(worst, ((result - exact).abs() / size).max().item())
        if kernel is not None:
            calls[kernel] = partial(ours, None, kernel)
            calls[f"{kernel}, prepared"] = partial(ours, prepared, kernel)
    if worst > 2.0**-10:
        raise AssertionError(f"error {worst:.1e} of sum|a*b| at {(m, n, k)}")
    return calls, worst


def measure(calls: dict[str, Callable[[], torch.Tensor]], rounds: int) -> dict[str, list[float]]:
    """Seconds per call, by candidate, one number per round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 2):
        for name, call in calls.items():
            call()  # whoever ran before left its own data in the caches
            start = time.perf_counter()
            call()
            elapsed = time.perf_counter() - start
            if i >= 2:
                times[name].append(elapsed)
    return times


def main() -> None:
    """Check and time all shapes; print a table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=50)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    start = time.perf_counter()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; {cpu.describe()}")
    print(f"built or loaded in {time.perf_counter() - start:.1f} s")
    records = []
    for m, n, k in SHAPES:
        calls, error = candidates(m, n, k)
        rounds = args.rounds if m * n * k < LARGE else max(3, args.rounds // 10)
        times = measure(calls, rounds)
        print(f"\nM={m} N={n} K={k}   error {error:.1e} of sum|a*b|")
        for name, seconds in times.items():
            middle, best = statistics.median(seconds) * 1e6, min(seconds) * 1e6
            print(f"  {name:18} {middle:10.1f}  ({best:.1f})")
        records.append({"m": m, "n": n, "k": k, "error": error, "seconds": times})
    if args.json:
        facts = {"torch": torch.__version__, "threads": torch.get_num_threads()}
        args.json.write_text(json.dumps({**facts, "cpu": cpu.describe(), "shapes": records}))


if __name__ == "__main__":
    main()
