"""Which kernel AMD's GPUs get, with their libraries and without, and why not another."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from lowering_sites import problem

from fp8pass.lowerings import choose, consider, find
from fp8pass.options import Options
from fp8pass.reasons import YES
from fp8pass.target import Target

F8, E5, FNUZ = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
INT8 = torch.int8
ROW, BLOCK = ("token", "channel"), ("group1x128", "group128x128")
TILES = {"prepared": True, "prepared_dtype": FNUZ}

# kernel, target, (granularities, changes) that fail, code (None: one of several), words of the
# message, the control
CONDITIONS = [
    ("torch_channel", "gfx942", ROW, {"dtypes": (F8, F8)}, "FP8-L060", ["activations"], (ROW, {})),
    ("vllm_skinny", "gfx942", (), {}, "FP8-L011", ["vllm"], None),
    ("vllm_skinny", "gfx1100+vllm", (), {}, "FP8-L011", ["gfx942", "gfx1100"], None),
    ("vllm_skinny", "gfx1201+vllm", (), {}, "FP8-L062", ["0.21", "unknown version"], None),
    ("vllm_skinny", "gfx1201+vllm==0.20", (), {}, "FP8-L062", ["0.21", "0.20"], None),
    ("vllm_skinny", "gfx1201+vllm==0.21", (), {"k": 4112}, "FP8-L017", ["4112", "4096"],
     ((), {"m": 4, "k": 4096})),
    ("vllm_skinny", "gfx942+vllm", (), {"bias": BF16}, "FP8-L062", ["bias", "unknown version"],
     ((), {"m": 4})),
    ("vllm_skinny", "gfx942+vllm==0.12", (), {"bias": F32}, "FP8-L010", ["float32"],
     ((), {"m": 1, "bias": BF16})),
    ("vllm_skinny", "gfx942+vllm", ROW, {}, "FP8-L003", ["per-token"], ((), {"m": 1})),
    ("vllm_skinny", "gfx942+vllm", (), {"m": 5}, "FP8-L014", ["0-4", "5"], ((), {"m": 4})),
    ("vllm_skinny", "gfx942+vllm", (), {"n": 40}, "FP8-L009", ["N", "40"], ((), {"m": 4, "n": 64})),
    ("vllm_skinny", "gfx942+vllm", (), {"dtypes": (F8, F8)}, "FP8-L060", ["e4m3fnuz"],
     ((), {"m": 4})),
    ("vllm_skinny", "gfx950+vllm", (), {"dtypes": (E5, F8)}, "FP8-L007", ["float8_e5m2"],
     ((), {"m": 4})),
    ("vllm_skinny", "gfx942+vllm", (), {"out_dtype": F32}, "FP8-L007", ["float32"],
     ((), {"m": 4, "out_dtype": F16})),
    ("vllm_skinny", "gfx942+vllm", (), {"b_layout": "row"}, "FP8-L008", ["row"], ((), {"m": 4})),
    ("vllm_skinny", "gfx942+vllm", ("tensor/ue8m0", "tensor"), {}, "FP8-L007", ["ue8m0"], None),
    *(
        (kernel, target, pair, changes, code, words, None if code == "FP8-L011" else control)
        for kernel, pair, good in (
            ("aiter_row", ROW, {}),
            ("aiter_int8", ROW, {"dtypes": (torch.int8, torch.int8)}),
            ("aiter_block", ("group1x128", "group128x128"), {"k": 256, "n": 128}),
        )
        for control in [(pair, good)]
        for target, changes, code, words in (
            ("gfx942", good, "FP8-L011", ["aiter"]),
            ("gfx1201+aiter", good, "FP8-L011", ["gfx942", "gfx1201"]),
            ("gfx90a+aiter", good, "FP8-L011", ["gfx942", "gfx90a"]),
            ("gfx942+aiter", {**good, "out_dtype": F32}, "FP8-L007", ["float32"]),
            ("gfx942+aiter", {**good, "bias": F32}, "FP8-L010", ["float32"]),
            ("gfx942+aiter", {**good, "n": 24}, "FP8-L009", ["N", "24"]),
            ("gfx942+aiter", {**good, "k": None}, None, ["K", "not known"]),
            ("gfx942+aiter", {**good, "dtypes": (E5, E5)}, "FP8-L007", ["e5m2"]),
            ("gfx942+aiter", {**good, "a_layout": "col"}, "FP8-L008", ["operand a"]),
        )
    ),
    ("aiter_row", "gfx942+aiter", ROW, {"dtypes": (F8, F8)}, "FP8-L060", ["activations"],
     (ROW, {"out_dtype": F16, "bias": F16})),
    ("aiter_block", "gfx942+aiter", ("group1x128", "group128x128"),
     {"k": 256, "n": 128, "dtypes": (F8, F8)}, "FP8-L060", ["activations"], None),
    ("aiter_block", "gfx942+aiter", ("group1x128/ue8m0", "group128x128/ue8m0"),
     {"k": 256, "n": 128}, "FP8-L007", ["ue8m0"], None),
    ("aiter_block", "gfx942+aiter", ("group1x128", "group128x128"), {"k": 384, "n": 128},
     "FP8-L009", ["K", "256", "384"], (("group1x128", "group128x128"), {"k": 512, "n": 128})),
    ("aiter_block", "gfx942+aiter", ("group1x64", "group64x64"), {"k": 256, "n": 128}, "FP8-L003",
     ["group1x64"], None),
    ("aiter_int8", "gfx942+aiter", ("token/asym", "channel"), {"dtypes": (torch.int8, torch.int8)},
     "FP8-L007", ["asym"], None),
    ("aiter_shuffled", "gfx942+aiter", ROW, {"use_fast_accum": True}, "FP8-L064",
     ["tiles", "gfx942"], (ROW, {"use_fast_accum": True, **TILES})),
    ("aiter_shuffled", "gfx942+aiter", ROW, TILES, "FP8-L016", ["accumulates"],
     (ROW, {"use_fast_accum": True, **TILES})),
    ("aiter_shuffled", "gfx942+aiter", ROW, {"bias": BF16, **TILES}, "FP8-L010", ["bfloat16"],
     None),
    ("aiter_shuffled", "gfx942+aiter", ROW, {"k": 48, **TILES}, "FP8-L009", ["K", "32", "48"],
     None),
    ("aiter_shuffled", "gfx942+aiter", ROW, {"prepared": True, "prepared_dtype": BF16},
     "FP8-L064", ["tiles"], None),
    ("cpu_prepared", "cpu", ROW, TILES, "FP8-L004", ["prepared"],
     (ROW, {"prepared": True, "prepared_dtype": BF16})),
    ("torch_tensor", "unknown", (), {}, "FP8-L061", ["unknown"], None),
    ("aiter_row", "gfx1299+aiter", ROW, {}, "FP8-L061", ["gfx1299"], None),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:fp8pass does not know")
@pytest.mark.parametrize(
    ("kernel", "name", "pair", "changes", "code", "words", "control"),
    CONDITIONS,
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_condition(kernel, name, pair, changes, code, words, control) -> None:  # type: ignore[no-untyped-def]
    target = Target.parse(name)
    verdict = consider(find(kernel), target, problem(*pair, target=target, **changes))
    assert not verdict
    assert code is None or verdict.code == code
    for word in (kernel, *words):
        assert word in verdict.message
    if control is not None:
        pair, changes = control
        assert consider(find(kernel), target, problem(*pair, target=target, **changes)) == YES


def test_versions_of_rocm() -> None:
    """torch refuses FP8 on an architecture before a version of ROCm that is known."""
    for arch, hip, ok in (
        ("gfx1201", "6.2.41133", False),
        ("gfx1201", "6.3.0", True),
        ("gfx950", "6.4.4", False),
        ("gfx950", "7.0.0", True),
        ("gfx942", "6.0.0", True),
        ("gfx950", "", True),
        ("gfx950", "unknown", True),
    ):
        target = dataclasses.replace(
            Target.parse(arch), runtime=(("torch", "2.12.0"), ("hip", hip))
        )
        for name, pair in (("torch_tensor", ()), ("torch_row", ROW), ("torch_channel", ROW)):
            verdict = consider(find(name), target, problem(*pair, target=target))
            assert bool(verdict) == ok
            if not ok:
                assert verdict.code == "FP8-L062"
                assert "ROCm" in verdict.message and hip[:3] in verdict.message


def chosen(target: str, *pair: str, fast: bool = False, **more: Any) -> str:
    parsed = Target.parse(target)
    options = Options(numerics="fast" if fast else "exact")
    return choose(parsed, problem(*pair, target=parsed, **more), options).text


def test_skinny_for_few_rows() -> None:
    assert chosen("gfx942+vllm", "tensor", "tensor", m=None) == "0-4=vllm_skinny;5-=torch_tensor"
    assert chosen("gfx950+vllm", "tensor", "tensor", m=4) == "4=vllm_skinny"
    assert chosen("gfx942+vllm", "tensor", "tensor", m=5) == "5=torch_tensor"
    assert chosen("gfx942+vllm", *ROW, m=1) == "1=torch_row"
    assert chosen("gfx942", "tensor", "tensor", m=1) == "1=torch_tensor"
    # RDNA4: a version that has it, and not too wide
    assert chosen("gfx1201+vllm", "tensor", "tensor", m=1) == "1=torch_tensor"
    assert chosen("gfx1201+vllm==0.21", "tensor", "tensor", m=1) == "1=vllm_skinny"
    assert chosen("gfx1201+vllm==0.21", "tensor", "tensor", m=1, k=4096) == "1=vllm_skinny"
    assert chosen("gfx1201+vllm==0.21", "tensor", "tensor", m=1, k=4112) == "1=torch_tensor"
    assert chosen("gfx942+vllm", "tensor", "tensor", m=1, k=8192) == "1=vllm_skinny"


@pytest.mark.parametrize("version", ["", "==0.10", "==0.11"])
def test_a_bias_never_goes_to_a_kernel_that_may_lose_it(version: str) -> None:
    """vllm#24895: the first versions have no argument for it."""
    for m in (1, 4, None):
        plan = chosen(f"gfx942+vllm{version}", "tensor", "tensor", m=m, bias=BF16)
        assert "vllm_skinny" not in plan and "torch_tensor" in plan
    assert chosen("gfx942+vllm==0.12", "tensor", "tensor", m=1, bias=BF16) == "1=vllm_skinny"
    other = chosen("gfx942+vllm==0.12", "tensor", "tensor", m=1, bias=F32)
    assert other == "1=torch_channel"


def test_aiter() -> None:
    for arch in ("gfx942+aiter", "gfx950+aiter"):
        assert chosen(arch, *ROW) == "5=torch_row"
        assert chosen(arch, *ROW, out_dtype=F16) == "5=aiter_row"
        assert chosen(arch, *ROW, out_dtype=F32) == "5=torch_channel"
        assert chosen(arch, "token", "tensor") == "5=aiter_row"
        assert chosen(arch, *BLOCK, k=256, n=128) == "5=aiter_block"
        assert chosen(arch, *BLOCK, k=256, n=128, bias=BF16) == "5=torch_dequant"
        assert chosen(arch, *BLOCK, k=256, n=64) == "5=torch_dequant"
        assert chosen(arch, *ROW, dtypes=(INT8, INT8), m=1, bias=BF16) == "1=aiter_int8"
        assert chosen(arch, *ROW, dtypes=(INT8, INT8), n=40) == "5=torch_dequant"
        native = Target.parse(arch).fp8_dtype
        tiles = {"prepared": True, "prepared_dtype": native}
        assert chosen(arch, *ROW, **tiles) == "5=torch_row"
        assert chosen(arch, *ROW, fast=True, **tiles) == "5=aiter_shuffled"
        assert chosen(arch, *ROW, fast=True, prepared=True, prepared_dtype=BF16) == "5=torch_row"
    # where it is not built for, and without it
    assert chosen("gfx1201+aiter", *BLOCK, k=256, n=128) == "5=torch_dequant"
    assert chosen("gfx942", *ROW, out_dtype=F16) == "5=torch_channel"
