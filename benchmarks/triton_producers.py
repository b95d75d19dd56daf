"""The Triton producers on a GPU beside Inductor and vLLM, or a search for their launch shapes.

    python benchmarks/triton_producers.py --json out.json [--vllm-libs DIR] [--widths 4096,8192]
    python benchmarks/triton_producers.py --sweep --json shapes.json

Microseconds of a call: CUDA graphs over up to 256 sets of inputs, none of which is in L2 when its
turn comes, all candidates of a case in turn, medians. *Inductor* is ``torch.compile`` of the same
arithmetic in plain torch, the number of rows dynamic. *vLLM* is its C++ operators (two launches
where it has no fused one), loaded from ``DIR`` (see fetch_vllm_ops.py). *floor* reads each input
and writes each output once at 4.38 TB/s. *host* is what a call costs the CPU. ``--sweep`` prints
the best shapes of each size and how far that of ``fp8pass.kernels.triton_launch`` is from them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from gpu_timing import COLD_BYTES, Captured, interleaved, table

from fp8pass.ops import dynamic_form, static_form

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
ROWS = (1, 16, 64, 256, 2048, 8192)
RECIPES = {
    "static": str(static_form()),
    "token": str(dynamic_form("token")),
    "tensor": str(dynamic_form("tensor")),
}
NORM, SILU, EPS = "mean,rsqrt,after_cast,bfloat16", "div,bfloat16,bfloat16", 1e-6
BANDWIDTH = 4.38e12  # bytes a second, of an H200


class Case(NamedTuple):
    op: str
    recipe: str
    width: int

    def bytes_of(self, rows: int) -> int:
        """Each input read once, each output written once."""
        inputs = {"rms": 2, "add": 4, "silu": 4, "quant": 2}[self.op]
        outputs = 3 if self.op == "add" else 1
        return rows * self.width * (inputs + outputs)


def make(case: Case, rows: int) -> tuple[torch.Tensor, ...]:
    """``(x, residual or None, weight)``; of SiLU ``x`` is gate and up in one."""
    width = case.width * (2 if case.op == "silu" else 1)
    x = torch.randn(rows, width, device="cuda", dtype=BF16)
    residual = torch.randn_like(x) if case.op == "add" else x
    return x, residual, torch.ones(case.width, device="cuda", dtype=BF16)


# ---- candidates ---------------------------------------------------------------------------------


def ours(case: Case, scale: torch.Tensor) -> Callable[..., Any]:
    from fp8pass.kernels.triton_activation import silu_mul_quant
    from fp8pass.kernels.triton_norm import add_rms_norm_quant, rms_norm_quant
    from fp8pass.kernels.triton_quantize import quantize

    quant = RECIPES[case.recipe]
    given = scale if case.recipe == "static" else None

    def call(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        if case.op == "rms":
            return rms_norm_quant(x, weight, given, EPS, NORM, quant, False)
        if case.op == "add":
            return add_rms_norm_quant(x, residual, weight, given, EPS, NORM, quant, False)
        if case.op == "silu":
            return silu_mul_quant(*x.chunk(2, -1), given, SILU, quant, False)
        return quantize(x, given, quant)

    return call


def plain(case: Case) -> Callable[..., Any]:
    """The arithmetic in torch, as a model writes it."""

    def quantise(y: torch.Tensor, scale: torch.Tensor) -> Any:
        wide = y.float()
        if case.recipe == "token":
            scale = (wide.abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-12)
        elif case.recipe == "tensor":
            scale = (wide.abs().amax() / 448.0).clamp(min=1e-12)
        return (wide / scale).clamp(-448.0, 448.0).to(FP8), scale

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        return wide.to(x.dtype) * weight

    def call(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, s: torch.Tensor) -> Any:
        if case.op == "rms":
            return quantise(norm(x, weight), s)
        if case.op == "add":
            total = x + residual
            return *quantise(norm(total, weight), s), total
        if case.op == "silu":
            gate, up = x.chunk(2, -1)
            return quantise(torch.nn.functional.silu(gate) * up, s)
        return quantise(x, s)

    return call


def inductor(case: Case, scale: torch.Tensor) -> Callable[..., Any]:
    compiled = torch.compile(plain(case))

    def call(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        if x.shape[0] > 1:
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(residual, 0)
        return compiled(x, residual, weight, scale)

    return call


def vllm(case: Case, scale: torch.Tensor) -> Callable[..., Any] | None:
    """Its C++ operators; None where it has none, or its library is not loaded."""
    ops = torch.ops._C
    if case.recipe == "tensor" or not hasattr(ops, "rms_norm_static_fp8_quant"):
        return None

    def call(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        rows = x.shape[0]
        q = torch.empty(rows, case.width, dtype=FP8, device="cuda")
        if case.recipe == "static":
            if case.op == "rms":
                ops.rms_norm_static_fp8_quant(q, x, weight, scale, EPS)
            elif case.op == "add":
                ops.fused_add_rms_norm_static_fp8_quant(q, x, residual, weight, scale, EPS)
            elif case.op == "silu":
                ops.silu_and_mul_quant(q, x, scale)
            else:
                ops.static_scaled_fp8_quant(q, x, scale, None)
            return q
        found = torch.empty(rows, 1, device="cuda")
        if case.op in ("rms", "add"):
            kept = residual if case.op == "add" else None
            ops.rms_norm_dynamic_per_token_quant(q, x, weight, found, EPS, None, kept)
        elif case.op == "silu":
            y = torch.empty(rows, case.width, dtype=BF16, device="cuda")
            ops.silu_and_mul(y, x)
            ops.dynamic_per_token_scaled_fp8_quant(q, y, found, None)
        else:
            ops.dynamic_per_token_scaled_fp8_quant(q, x, found, None)
        return q, found

    return call


class Cold(Captured):
    """Nothing of the inputs is in L2 when a replay begins, and each set is used once in it."""

    flushed: torch.Tensor | None = None

    def microseconds(self) -> float:
        if Cold.flushed is None:
            Cold.flushed = torch.empty(COLD_BYTES, dtype=torch.uint8, device="cuda")
        Cold.flushed.zero_()
        return super().microseconds()


def captured(call: Callable[..., Any], inputs: list[tuple[torch.Tensor, ...]]) -> Captured:
    return Cold(lambda i: call(*inputs[i]), len(inputs))


def sets_of(case: Case, rows: int) -> list[tuple[torch.Tensor, ...]]:
    count = max(8, min(256, -(-COLD_BYTES // case.bytes_of(rows))))
    return [make(case, rows) for _ in range(count)]


def on_the_host(call: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> float:
    """Microseconds of the CPU for one call; few enough that no queue fills."""
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            call(*inputs)
        best = min(best, (time.perf_counter() - start) * 1e4)
    torch.cuda.synchronize()
    return best


# ---- comparison ---------------------------------------------------------------------------------


def cases(widths: list[int], silu_width: int) -> list[Case]:
    named = [
        Case(op, recipe, width)
        for width, op, recipe in itertools.product(widths, ("rms", "add"), ("static", "token"))
    ]
    named += [Case("silu", recipe, silu_width) for recipe in ("static", "token")]
    named += [Case("rms", "tensor", widths[0]), Case("silu", "tensor", silu_width)]
    return [*named, Case("quant", "static", widths[0]), Case("quant", "token", widths[0])]


def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    scale = torch.tensor(0.02, device="cuda")
    results: list[dict[str, Any]] = []
    lines: list[list[Any]] = []
    for case in cases(arguments.widths, arguments.silu_width):
        calls = {"ours": ours(case, scale)}
        if not arguments.no_inductor:
            torch._dynamo.reset()
            calls["inductor"] = inductor(case, scale)
        if (other := vllm(case, scale)) is not None:
            calls["vllm"] = other
        host = on_the_host(calls["ours"], make(case, 1))
        for rows in ROWS:
            inputs = sets_of(case, rows)
            graphs = {name: captured(call, inputs) for name, call in calls.items()}
            times = interleaved(graphs, arguments.rounds)
            floor = case.bytes_of(rows) / BANDWIDTH * 1e6
            results.append({**case._asdict(), "rows": rows, "host": host, "floor": floor, **times})
            peers = [t for name, t in times.items() if name != "ours"]
            ratio = f"{min(peers) / times['ours']:.2f}" if peers else ""
            cells = [f"{times[n]:.2f}" if n in times else "" for n in ("ours", "inductor", "vllm")]
            lines.append([case.op, case.recipe, case.width, rows, *cells, ratio, f"{floor:.2f}"])
            del graphs, inputs
        lines[-1].append(f"{host:.1f}")
    head = [
        "op",
        "recipe",
        "width",
        "rows",
        "ours",
        "inductor",
        "vllm",
        "best peer / ours",
        "floor",
    ]
    print(table([*head, "host"], [[*line, ""][:10] for line in lines]))
    return results


# ---- launch shapes ------------------------------------------------------------------------------


class Trial(NamedTuple):
    case: Case
    warps: int
    chunks: int  # of a piece; 0 for a kernel of whole rows
    programs: int
    first: bool

    @property
    def pieces(self) -> bool:
        return self.chunks > 0

    def shape(self, width: int) -> Any:
        from fp8pass.kernels import triton_launch as host

        if self.pieces:
            made = host.piece_of(width, self.warps, self.chunks, self.first)
        else:
            made = host.shape_of(width, self.warps, self.first)
        return made._replace(programs=self.programs)

    @property
    def text(self) -> str:
        many = "" if self.programs > 10**6 else f" p{self.programs}"
        piece = f" c{self.chunks}" if self.pieces else ""
        return f"w{self.warps}{piece}{many}{' first' if self.first else ''}"


def trials(case: Case, processors: int) -> list[Trial]:
    """What is worth trying for a case."""
    found = []
    ahead = (False, True) if case.op == "silu" else (False,)
    every = 2**31 - 1
    if case.recipe == "static" and case.op in ("silu", "quant"):
        for warps, chunks, first in itertools.product((2, 4, 8), (1, 2, 4), ahead):
            found.append(Trial(case, warps, chunks, every, first))
            if chunks > 1 and not first:
                found.append(Trial(case, warps, chunks, processors * 64 // warps, first))
        return found
    for warps, first in itertools.product((1, 2, 4, 8, 16, 32), ahead):
        values = case.width / (32 * warps)
        if not 4 <= values <= 72:
            continue
        found.append(Trial(case, warps, 0, every, first))
        if values <= 48 and not first:
            for waves in (1, 2):
                # as many programs as fit at once with 64 registers a thread
                found.append(Trial(case, warps, 0, processors * 32 // warps * waves, first))
    return found


def run_trial(trial: Trial, scale: torch.Tensor) -> Callable[..., Any]:
    """The call with a given shape."""
    from fp8pass.kernels import triton_launch as host

    call = ours(trial.case, scale)
    name = "piece_shape" if trial.pieces else "row_shape"
    shape = trial.shape(trial.case.width)

    def shaped(*inputs: torch.Tensor) -> Any:
        with mock.patch.object(host, name, lambda width, rows: shape):
            return call(*inputs)

    return shaped


def compile_trials(share: list[Trial]) -> None:
    scale = torch.tensor(0.02, device="cuda")
    for trial in share:
        run_trial(trial, scale)(*make(trial.case, 2))


def sweep(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    named = [
        Case(op, recipe, width)
        for width, (op, recipe) in itertools.product(
            (576, 1536, 4096, 5120, 8192, 14336),
            (("rms", "token"), ("rms", "static"), ("add", "token")),
        )
        if width < 10000 or op == "rms"
    ]
    for width in (1536, 8192, 14336):
        named += [Case("silu", recipe, width) for recipe in ("token", "static")]
    named += [Case("quant", "static", 4096), Case("quant", "token", 4096)]
    planned = [trial for case in named for trial in trials(case, processors)]
    workers = max(1, min(14, (os.cpu_count() or 1) - 2))
    start = time.perf_counter()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_trials, [planned[i::workers] for i in range(workers)]))
    print(f"compiled {len(planned)} trials in {time.perf_counter() - start:.0f} s", flush=True)

    scale = torch.tensor(0.02, device="cuda")
    results, lines = [], []
    for case, rows in itertools.product(named, ROWS):
        if time.perf_counter() - start > arguments.seconds:
            print("out of time: the rest is left out")
            break
        inputs = sets_of(case, rows)
        graphs = {"table": captured(ours(case, scale), inputs)}
        for trial in trials(case, processors):
            graphs[trial.text] = captured(run_trial(trial, scale), inputs)
        times = interleaved(graphs, max(5, arguments.rounds // 2))
        ours_now = times.pop("table")
        order = sorted(times, key=lambda name: times[name])
        results.append({**case._asdict(), "rows": rows, "table": ours_now, "trials": times})
        best = [f"{name} {times[name]:.2f}" for name in order[:4]]
        ratio = f"{ours_now / times[order[0]]:.2f}"
        lines.append([*case, rows, f"{ours_now:.2f}", ratio, *best])
        del graphs, inputs
    head = ["op", "recipe", "width", "rows", "table", "x best", "best", "second", "third", "4th"]
    print(table(head, [[*line, "", "", "", ""][:10] for line in lines]))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--vllm-libs", type=Path, help="folder of vLLM's compiled libraries")
    parser.add_argument("--widths", default="4096,8192", help="of the norms")
    parser.add_argument("--silu-width", type=int, default=14336)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--no-inductor", action="store_true")
    parser.add_argument("--sweep", action="store_true", help="search for launch shapes")
    parser.add_argument("--seconds", type=float, default=300.0, help="limit of the search")
    arguments = parser.parse_args()
    arguments.widths = [int(width) for width in arguments.widths.split(",")]
    if arguments.vllm_libs is not None:
        for name in ("_C_stable_libtorch.abi3.so", "_C.abi3.so"):
            torch.ops.load_library(arguments.vllm_libs / name)
    start = time.perf_counter()
    with torch.no_grad():
        results = sweep(arguments) if arguments.sweep else compare(arguments)
    print(f"{time.perf_counter() - start:.0f} s on {torch.cuda.get_device_name(0)}")
    if arguments.json is not None:
        versions = {"torch": torch.__version__, "device": torch.cuda.get_device_name(0)}
        arguments.json.write_text(json.dumps({**versions, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
