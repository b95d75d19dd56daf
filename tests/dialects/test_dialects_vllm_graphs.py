"""Graphs that vLLM handed to a pass, rebuilt and run through the pass for their target.

Whatever quantises, normalises, activates or multiplies is a site of the report, fused or lowered
where it can be, and the numbers stay what they were.
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import golden_graphs
import pytest
import torch
import vllm_graphs
from graphs import Passed, run, values, vector
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
