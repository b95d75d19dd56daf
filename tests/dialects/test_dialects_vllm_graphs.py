"""Graphs that vLLM handed to a pass, rebuilt and run through the pass for their target.

Whatever quantises, normalises, activates or multiplies is a site of the report, fused or lowered
where it can be, and the numbers stay what they were.
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import golden_graphs
import pytest
import torch
import vllm_graphs
from graphs import Passed, values, vector
from vllm_graphs import ROWS, hint, names, rebuild

from fp8pass.absent_device import absent_device

CPU = [f"cpu_real/{name}" for name in names("cpu_real")]
H200 = [f"h200_sim/{name}" for name in names("h200_sim")]
BF16 = [name for name in CPU if "/bf16." in name]

_COUNTED = {
    "norm": (r"vllm_ir\.\w*rms_norm\.", r"aten\.rsqrt\.", r"_C\.\w*rms_norm\w*_quant\."),
    "activation": (r"aten\.exp\.", r"_C\.silu_and_mul_\w*quant\."),
    "quantize": (r"convert_element_type\.default\(\w+, torch\.float8_e4m3fn\)",
                 r"_C\.per_token_group_fp8_quant\."),
    "scaled_mm": (r"aten\._scaled_mm\.", r"_C\.cutlass_scaled_mm\.", r"_C\.fp8_scaled_mm_cpu\."),
}  # fmt: skip


def device_of(name: str) -> tuple[str, str]:
    """torch's device type and the target of a graph."""
    return ("cuda", "sm90") if name.startswith("h200") else ("cpu", "cpu")


def on(device: str) -> AbstractContextManager[Any]:
    return nullcontext() if device == "cpu" else absent_device(device)


@cache
def passed(name: str) -> Passed:
    device, target = device_of(name)
    with on(device):
        return Passed(rebuild(name, device), target=target)


def in_the_text(name: str) -> Counter[str]:
    """How many of each kind a graph has, counted in its text."""
    text = (vllm_graphs.DATA / f"{name}.txt").read_text()
    return Counter(
        {
            kind: sum(len(re.findall(pattern, text)) for pattern in patterns)
            for kind, patterns in _COUNTED.items()
        }
    )


def in_the_report(made: Passed) -> Counter[str]:
    found = Counter(site.kind for site in made.record.sites)
    found["quantize"] += sum(site.status == "fused" for site in made.record.sites)
    return found


@pytest.mark.parametrize("name", [name for name in CPU + H200 if name not in BF16])
def test_everything_is_a_site(name: str) -> None:
    made = passed(name)
    assert in_the_report(made) == in_the_text(name)
    assert {site.status for site in made.sites("scaled_mm")} <= {"lowered", "left"}
    for site in made.record.sites:
        if site.status == "left":
            assert site.code in LEFT[site.kind], (site.node, site.code, site.message)
    if "_amx" not in name:
        assert {site.status for site in made.sites("scaled_mm")} == {"lowered"}


#: Why a site may be left: no quantise reads it (the last norm; what a W8A16 kernel reads), vLLM has
#: fused it, attention made what is quantised, vLLM has chosen a kernel that is kept.
LEFT = {
    "norm": {"FP8-F001", "FP8-R011"},
    "activation": {"FP8-F001", "FP8-R011"},
    "quantize": {"FP8-F002"},
    "scaled_mm": {"FP8-R012"},
}


@pytest.mark.parametrize("name", BF16)
def test_nothing_to_do(name: str) -> None:
    made = passed(name)
    assert made.record.verdict is not None and made.record.verdict.code == "FP8-P004"
    assert str(made.after.graph) == str(made.before.graph)


# ---- what is fused -------------------------------------------------------------------------------


def test_what_attention_made_is_all_that_is_left_of_the_quantises() -> None:
    made = re.compile(r"graph input arg0_1|vllm\.unified_attention_with_output")
    for name in CPU + H200:
        for site in passed(name).sites("quantize"):
            assert made.search(site.message), (name, site.message)


FUSED = {
    # per token, per tensor, static: vLLM by its default flags fuses none of these
    "i_online.h200_default.post": (1, 3, 2),
    "ii_fp8static.h200_default.post": (None, 3, 2),
    "iii_ctdyn.h200_default.post": (1, 3, 2),
    # with its fusions forced on, what it leaves: the activation per token
    "iii_ctdyn.fuse_forced.post": (0, 1, 1),
    # before its fusions: all
    "iv_block_cutlass.h200.pre": (1, 3, 2),
    "iv_block_cutlass.h200.post": (0, 0, 0),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_on_an_h200(name: str) -> None:
    for piece, wanted in enumerate(FUSED[name]):
        if wanted is None:  # equal to that of another variant
            continue
        made = passed(f"h200_sim/{name}.g{piece}")
        fused = [site for site in made.record.sites if site.status == "fused"]
        assert len(fused) == wanted
        assert {site.kernel for site in fused} <= {"triton"}
        assert {site.source for site in made.sites("scaled_mm")} == {"vllm"}


# ---- the numbers ---------------------------------------------------------------------------------


class OnHost(golden_graphs.OnHost):
    """Runs a graph of any device on this machine, on memory that is zero when it is allocated: some
    graphs return an ``empty``, which is for attention to write to."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = super().call_function(target, args, kwargs)
        return made.zero_() if target is torch.ops.aten.empty.memory_format else made


def value_of(node: Any, seed: int) -> Any:
    """A value for an input of a graph."""
    fake = node.meta["val"]
    if isinstance(fake, str):
        return fake
    if not isinstance(fake, torch.Tensor):
        return ROWS
    sizes = [hint(size) for size in fake.shape]
    strides = [hint(size) for size in fake.stride()]
    generator = torch.Generator().manual_seed(seed)
    if not fake.dtype.is_floating_point:
        made = torch.randint(0, 200, sizes, generator=generator)
    elif fake.dtype == torch.float32:  # a scale
        made = torch.rand(sizes, generator=generator) * 0.02 + 0.01
    elif fake.dtype == torch.float8_e4m3fn:
        made = torch.randn(sizes, generator=generator) * 8
    elif len(sizes) == 1:
        made = vector(sizes[0], seed=seed)
    else:
        made = values(*sizes, seed=seed) + 0.01
    held = torch.empty_strided(sizes, strides, dtype=fake.dtype)
    return held.copy_(made.to(fake.dtype))


def results(module: Any, seed: int) -> tuple[Any, ...]:
    placeholders = module.graph.find_nodes(op="placeholder")
    inputs = [value_of(node, seed + i) for i, node in enumerate(placeholders)]
    with torch.no_grad():
        return tuple(OnHost(module).run(*inputs))


@pytest.mark.parametrize("name", [name for name in CPU + H200 if name not in BF16])
def test_same_numbers(name: str) -> None:
    """Before and after, on a CPU, each operator by its reference: products differ in the order of
    their sums alone, so that a code may lie one step apart."""
    made = passed(name)
    before = results(made.before, seed=0)
    for module in (made.fused, made.after):
        for a, b in zip(results(module, seed=0), before, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            error = (a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-9)
            assert float(error) < 2e-3, (name, float(error))
