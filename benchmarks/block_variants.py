"""The ways to run the block of ``block.py``: eager, Inductor, vLLM's kernels, fp8pass."""

from __future__ import annotations

import os
import time
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import block_model as model
import torch
from block_model import Block, Sizes

import fp8pass

#: Switches fp8pass's use of vLLM's library off, which is loaded for its peers.
_WITHOUT_VLLM = {"fp8pass.disable": "vllm_cutlass"}
_FAST = {"fp8pass.numerics": "fast"}
#: A quantise that no rule fuses goes to a kernel too, not to Inductor.
_QUANTISE = {"fp8pass.prefer": "triton"}


@dataclass(frozen=True)
class Variant:
    """One column of the table.

    Attributes:
        note: one line for people.
        product: ``torch`` (accumulates in float32), ``torch_fast``, ``vllm``, or ``fused`` for a
            block composed of vLLM's kernels.
        backend: None (not compiled), ``inductor`` or ``fp8pass``.
        options: for the backend.
        reduced: whether products may be accumulated in less than float32.
    """

    note: str
    product: str
    backend: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    reduced: bool = False

    @property
    def needs_vllm(self) -> bool:
        """Whether it cannot run without vLLM's libraries."""
        mine = self.backend == "fp8pass" and "fp8pass.disable" not in self.options
        return mine or self.product in ("vllm", "fused")

    @property
    def peer(self) -> bool:
        """Whether it is somebody else's compiled or hand-written code."""
        return self.backend != "fp8pass" and (self.backend is not None or self.product == "fused")


VARIANTS: dict[str, Variant] = {
    "eager": Variant("the model as written", "torch"),
    "inductor": Variant("stock torch.compile", "torch", "inductor"),
    "inductor_fast": Variant(
        "the same, use_fast_accum=True in the model", "torch_fast", "inductor", reduced=True
    ),
    "vllm_default": Variant(
        "stock torch.compile, products by vLLM's CUTLASS operator", "vllm", "inductor", reduced=True
    ),
    "vllm_fused": Variant("vLLM's fused kernels, composed by hand", "fused", reduced=True),
    "fp8pass": Variant('backend="fp8pass"', "torch", "fp8pass", _WITHOUT_VLLM),
    "fp8pass_quantise": Variant(
        'the same, prefer="triton"', "torch", "fp8pass", {**_WITHOUT_VLLM, **_QUANTISE}
    ),
    "fp8pass_reduced": Variant(
        "fp8pass, use_fast_accum=True in the model",
        "torch_fast",
        "fp8pass",
        {**_WITHOUT_VLLM, **_QUANTISE},
        True,
    ),
    "fp8pass_reduced_vllm": Variant(
        "the same, with vLLM's library at hand", "torch_fast", "fp8pass", _QUANTISE, True
    ),
    "fp8pass_fast": Variant(
        'fp8pass, numerics="fast"', "torch", "fp8pass", {**_WITHOUT_VLLM, **_FAST}, True
    ),
    "fp8pass_fast_vllm": Variant(
        "the same, with vLLM's library at hand", "torch", "fp8pass", _FAST, True
    ),
}


def build(name: str, recipe: str, dynamic: bool | None) -> Block:
    """The callable of a variant; ``dynamic`` is that of ``torch.compile``."""
    variant = VARIANTS[name]
    if variant.product == "fused":
        import vllm_ops

        return vllm_ops.fused_block(recipe)
    block = _with_own_code(model.make_block(_product(variant.product)), name)
    if variant.backend is None:
        return block
    arguments: dict[str, Any] = {"fullgraph": True, "dynamic": dynamic}
    if variant.backend == "fp8pass":
        arguments |= {"backend": fp8pass.fp8pass_backend, "options": dict(variant.options)}
    return torch.compile(block, **arguments)


def _product(name: str) -> model.Product:
    if name == "vllm":
        import vllm_ops

        return vllm_ops.product
    return model.torch_product if name == "torch" else model.torch_product_fast


def _with_own_code(function: Any, name: str) -> Any:
    """``function`` with a code object of its own: Dynamo keeps what it compiled by code object, and
    counts the recompiles of all variants together if they share one."""
    code = function.__code__.replace(co_name=f"{function.__code__.co_name}_{name}")
    return types.FunctionType(
        code, function.__globals__, name, function.__defaults__, function.__closure__
    )


def chosen() -> dict[str, list[str]]:
    """What fp8pass did in its latest compile: the kernel of each site, in the graph's order."""
    found = fp8pass.reports()
    if not found:
        return {}
    report = found[-1]
    producers = [
        f"{site.kind} {site.kernel or site.status}"
        for site in report.sites
        if site.kind != "scaled_mm"
    ]
    products = [
        site.plan if ";" in site.plan else site.kernel or site.status
        for site in report.select("scaled_mm")
    ]
    problems = [str(g.verdict) for g in report.graphs if g.verdict is not None and not g.verdict]
    return {"producers": producers, "products": products, "problems": problems}


# ---- compiling beforehand ------------------------------------------------------------------------


def compile_cell(
    recipe: str, rows: int, names: Sequence[str], libs: Path | None, sizes: Sizes, device: str
) -> dict[str, float | str]:
    """Compile variants for one number of rows in a process of its own, into Inductor's cache.

    Returns:
        variant -> seconds of its first call, or the error, which the main process will meet too.
    """
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # as many processes as cores do this at once
    if libs is not None:
        import vllm_ops

        vllm_ops.load(libs)
    (weights,) = model.make_weights(sizes, recipe, device, blocks=1)
    hidden, residual = model.make_inputs(sizes, rows, device)
    seconds: dict[str, float | str] = {}
    with torch.no_grad():
        for name in names:
            started = time.perf_counter()
            try:
                build(name, recipe, False)(hidden, residual, weights)
            except Exception as error:
                seconds[name] = f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            if device == "cuda":
                torch.cuda.synchronize()
            seconds[name] = time.perf_counter() - started
    return seconds


def compile_all(
    cells: Sequence[tuple[str, int]],
    names: Sequence[str],
    libs: Path | None,
    processes: int,
    sizes: Sizes,
    device: str,
) -> dict[tuple[str, int], dict[str, float | str]]:
    """:func:`compile_cell` for all cells, several at a time, after :func:`fresh_caches`."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # this process finds all in the cache: no pool of compilers
    workers = min(processes, len(cells))
    found: dict[tuple[str, int], dict[str, float | str]] = {}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = {
            cell: pool.submit(compile_cell, *cell, names, libs, sizes, device) for cell in cells
        }
        for cell, job in jobs.items():
            try:
                found[cell] = job.result()
            except Exception as error:  # the main process compiles what is not in the cache
                print(f"compiling {cell} beforehand: {type(error).__name__}: {error}")
    for path in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.best_config"):
        path.unlink()  # Inductor chose it by timing, while the other processes used the GPU too
    return found


def fresh_caches(folder: Path) -> None:
    """Let this process and its children compile into ``folder``, which is empty."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
