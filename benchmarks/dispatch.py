"""What branching on the number of rows costs: an operator with a plan of several kernels, beside it
with a plan of one, and beside the kernel called directly.

    python benchmarks/dispatch.py [--json out.json]

*host*: microseconds of Python and dispatch for a call, with a product so small that the device
never falls behind; eagerly and in a compiled graph with symbolic rows. *graph*: device time of a
replayed CUDA graph, in which each captured size has frozen its branch. All variants take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_timing import Captured, interleaved, sets_for, table

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.lowerings import find

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
#: Which kernel runs: the first of its plan, one in the middle, and the last.
CASES = {
    "first": (4, "triton_skinny"),
    "middle": (48, "triton_general"),
    "last": (512, "torch_row"),
}
PLAN = (
    "0-16=triton_skinny;17-32=torch_row;33-64=triton_general;65-128=triton_general;129-=torch_row"
)
Operands = tuple[torch.Tensor, ...]
Call = Callable[[Operands], Any]


def operands(m: int, n: int, k: int) -> Operands:
    a = (torch.randn(m, k, device="cuda") * 8).to(FP8)
    w = (torch.randn(n, k, device="cuda") * 8).to(FP8)
    scales = torch.rand(m, 1, device="cuda") + 0.1, torch.rand(1, n, device="cuda") + 0.1
    return a, w.t(), *scales


def planned(plan: str) -> Call:
    op = torch.ops.fp8pass.scaled_mm_planned.default
    return lambda s: op(s[0], s[1], s[2], s[3], None, BF16, False, plan)


def variants(kernel: str) -> dict[str, Call]:
    run = find(kernel).run
    assert run is not None
    found: dict[str, Call] = {
        "plan of five": planned(PLAN),
        "plan of one": planned(f"0-={kernel}"),
        "kernel": lambda s: run(s[0], s[1], s[2], s[3], None, BF16, False),
    }
    found["_scaled_mm"] = lambda s: torch._scaled_mm(*s, out_dtype=BF16)
    return found


def compiled(call: Call) -> Call:
    """The call in a graph with symbolic rows."""
    made = torch.compile(lambda a, b, sa, sb: call((a, b, sa, sb)), dynamic=True)
    return lambda s: made(*s)


class Host:
    """Microseconds of the host for a call."""

    def __init__(self, call: Call, s: Operands, calls: int = 200) -> None:
        self.call, self.s, self.calls = call, s, calls
        for _ in range(20):
            call(s)

    def microseconds(self) -> float:
        torch.cuda.synchronize()
        times = []
        for _ in range(self.calls):
            start = time.perf_counter_ns()
            self.call(self.s)
            times.append(time.perf_counter_ns() - start)
        torch.cuda.synchronize()
        return statistics.median(times) / 1e3


def measure(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for case, (m, kernel) in CASES.items():
        calls = variants(kernel)
        small = operands(m, 256, 256)
        right = calls["kernel"](small)
        for name in ("plan of five", "plan of one"):
            assert torch.equal(calls[name](small), right), name
        torch._dynamo.reset()
        other = operands(m + 3, 256, 256)
        in_graph = {name: compiled(call) for name, call in calls.items()}
        for call in in_graph.values():  # rows are symbolic from the first call on
            call(other)
        large = [operands(m, 4096, 4096) for _ in range(sets_for(4096 * 4096, most=16))]
        ways: dict[str, dict[str, Any]] = {
            "host, eager": {name: Host(call, small) for name, call in calls.items()},
            "host, compiled": {name: Host(call, small) for name, call in in_graph.items()},
            "CUDA graph": {
                name: Captured(lambda i, call=call, sets=large: call(sets[i]), len(large))
                for name, call in calls.items()
            },
        }
        for way, timed in ways.items():
            us = interleaved(timed, rounds)
            five, one, direct = us["plan of five"], us["plan of one"], us["_scaled_mm"]
            rows.append(
                {
                    "case": case, "m": m, "kernel": kernel, "way": way, "us": us,
                    "added_us": five - one, "added_percent": 100 * (five / one - 1),
                    "over_scaled_mm_us": five - direct,
                }
            )  # fmt: skip
    return rows


def main() -> None:
    """Ends with 1 if a plan costs more than 1 % in a CUDA graph or 3 us on the host."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = measure(args.rounds)
    head = ["rows", "kernel", "way", "five", "one", "kernel's", "_scaled_mm", "+us", "+%"]
    cells = [
        [r["m"], r["kernel"], r["way"], *(f"{us:.2f}" for us in r["us"].values()),
         f"{r['added_us']:+.2f}", f"{r['added_percent']:+.2f}"]
        for r in rows
    ]  # fmt: skip
    print(table(head, cells))
    graph = max(r["added_percent"] for r in rows if r["way"] == "CUDA graph")
    host = max(r["added_us"] for r in rows if r["way"] != "CUDA graph")
    over = max(r["over_scaled_mm_us"] for r in rows if r["way"] == "host, compiled")
    print(f"a plan of five over a plan of one: CUDA graph at most {graph:+.2f} % (allowed 1 %), "
          f"host at most {host:+.2f} us (allowed 3 us)")  # fmt: skip
    print(f"a plan of five over a direct _scaled_mm, compiled: host at most {over:+.2f} us")
    if args.json:
        device = torch.cuda.get_device_name()
        found = {"torch": torch.__version__, "device": device, "rows": rows}
        args.json.write_text(json.dumps(found, indent=1))
    raise SystemExit(int(graph > 1 or host > 3))


if __name__ == "__main__":
    main()
