"""What each kernel cannot take, with the reason that it gives, beside what it can take."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from lowering_sites import ASYM, BLOCKS, INT8, ROW, ZERO, problem, with_torch

from fp8pass.lowerings import consider, find
from fp8pass.reasons import YES
from fp8pass.target import Target

F8, E5, FNUZ = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

# kernel, target, (granularities, changes) that fail, code, words of the message, the control
CONDITIONS = [
    ("torch_tensor", "sm90", ROW, {}, "FP8-L003", ["per-token x per-channel"], ((), {})),
    ("torch_tensor", "sm90", (), {"n": 60}, "FP8-L009", ["N", "16", "60"], ((), {"n": 64})),
    ("torch_tensor", "sm90", (), {"k": 17}, "FP8-L009", ["K", "16", "17"], ((), {"k": 32})),
    ("torch_tensor", "sm90", (), {"n": None}, "FP8-L009", ["N", "not known"], ((), {})),
    ("torch_tensor", "sm90", (), {"k": None}, "FP8-L009", ["K", "not known"], ((), {})),
    ("torch_tensor", "sm90", (), {"a_layout": "col"}, "FP8-L008", ["operand a", "col"], ((), {})),
    ("torch_tensor", "sm90", (), {"a_layout": "strided"}, "FP8-L008", ["strided"], ((), {})),
    ("torch_tensor", "sm90", (), {"b_layout": "row"}, "FP8-L008", ["operand b", "row"], ((), {})),
    ("torch_tensor", "sm90", (), {"dtypes": (E5, E5)}, "FP8-L007", ["float8_e5m2 x float8_e5m2"],
     ((), {"dtypes": (E5, F8)})),
    ("torch_tensor", "sm90", (), {"dtypes": (FNUZ, FNUZ)}, "FP8-L007", ["e4m3fnuz"], ((), {})),
    ("torch_tensor", "sm90", (), {"dtypes": (torch.int8, torch.int8)}, "FP8-L007", ["int8"],
     ((), {})),
    ("torch_tensor", "gfx942", (), {"dtypes": (FNUZ, F8)}, "FP8-L060", ["weights", "e4m3fnuz"],
     ((), {})),
    ("torch_tensor", "gfx950", (), {"dtypes": (E5, F8)}, "FP8-L007", ["float8_e5m2"], ((), {})),
    ("torch_tensor", "sm90", (), {"out_dtype": F8}, "FP8-L007", ["results", "e4m3fn"],
     ((), {"out_dtype": F16})),
    ("torch_tensor", "sm90", (), {"bias": F32}, "FP8-L010", ["float32", "bfloat16"],
     ((), {"bias": BF16})),
    ("torch_tensor", "sm90", (), {"bias": F16}, "FP8-L010", ["float16"],
     ((), {"bias": F16, "out_dtype": F16})),
    ("torch_tensor", "sm90", (), {"bias": BF16, "out_dtype": F32}, "FP8-L010", ["float32"],
     ((), {"out_dtype": F32})),
    ("torch_tensor", "sm90", ("tensor/ue8m0", "tensor"), {}, "FP8-L007", ["ue8m0"], ((), {})),
    *(
        (kernel, target, ("group1x128", "group128x128"), {"k": 512, "n": 128}, "FP8-L003",
         ["group128x128"], None)
        for kernel, target in (
            ("cpu", "cpu"), ("torch_tensor", "sm90"), ("torch_row", "sm90"),
            ("torch_channel", "sm90"), ("triton_skinny", "sm90"), ("triton_general", "sm90"),
            ("vllm_cutlass", "sm90+vllm"), ("torch_int8", "sm90"), ("torch_int8_cpu", "cpu"),
        )
    ),
    *(
        (kernel, target, pair, {"dtypes": (torch.int8, torch.int8)}, "FP8-L007", ["int8"], None)
        for kernel, target, pair in (
            ("cpu", "cpu", ROW), ("torch_row", "sm90", ROW), ("torch_channel", "sm90", ROW),
            ("triton_skinny", "sm90", ROW), ("triton_general", "sm90", ROW),
            ("vllm_cutlass", "sm90+vllm", ROW),
        )
    ),
    ("torch_dequant", "cpu", ("token", "token"), {}, "FP8-L003", ["token"], (ROW, {})),
    ("torch_dequant", "cpu", ("tensor/ue8m0", "tensor"), {}, "FP8-L007", ["ue8m0"], ((), {})),
    ("torch_dequant", "cpu", ("tensor", "tensor/asym"), {}, "FP8-L007", ["asym"], ((), {})),
    ("torch_dequant", "sm86", (), {"dtypes": (F8, F8)}, "FP8-L011", ["sm90"],
     ((), {"dtypes": (torch.int8, torch.int8)})),
    ("torch_dequant", "sm90", (), {"dtypes": (FNUZ, FNUZ)}, "FP8-L007", ["fnuz"],
     ((), {"dtypes": (E5, E5)})),
    ("torch_dequant", "gfx942", (), {"dtypes": (F8, F8)}, "FP8-L060", ["e4m3fn"], ((), {})),
    ("torch_dequant", "cpu", ("group1x16", "group16x16"), {"n": None}, "FP8-L009", ["not known"],
     (("group1x16", "group16x16"), {})),
    ("torch_dequant", "cpu", (), {"out_dtype": F8}, "FP8-L007", ["results"],
     ((), {"dtypes": (FNUZ, FNUZ)})),
    ("torch_int8_cpu", "cpu", ROW, {}, "FP8-L007", ["e4m3fn"],
     (ROW, {"dtypes": (torch.int8, torch.int8)})),
    ("torch_int8_cpu", "cpu", ROW, {"dtypes": (torch.int8, torch.int8), "k": 2**17}, "FP8-L017",
     ["overflow"], (ROW, {"dtypes": (torch.int8, torch.int8), "k": 2**17 - 1})),
    ("torch_int8_cpu", "cpu", ROW, {"dtypes": (torch.int8, torch.int8), "k": None}, "FP8-L017",
     ["not known"], None),
    *(
        (kernel, target, ASYM, {**ZERO, "dtypes": dtypes}, "FP8-L007", ["asym", "symmetric"], None)
        for kernel, target, dtypes in (
            ("cpu", "cpu", (F8, F8)), ("torch_row", "sm90", (F8, F8)),
            ("torch_channel", "sm90", (F8, F8)), ("triton_skinny", "sm90", (F8, F8)),
            ("triton_general", "sm90", (F8, F8)), ("vllm_cutlass", "sm90+vllm", (F8, F8)),
        )
    ),
    ("torch_int8_cpu", "cpu", ("token", "channel/asym"), ZERO, "FP8-L007", ["asym"], (ASYM, ZERO)),
    ("torch_int8_cpu", "cpu", ASYM, {**ZERO, "zero": "codes", "zero_dtype": F32}, "FP8-L007",
     ["codes float32"], (ASYM, {**ZERO, "zero": "codes"})),
    ("torch_int8_cpu", "cpu", ASYM, {**ZERO, "k": 2**16 + 2**9}, "FP8-L017", ["zero point"],
     (ASYM, {**ZERO, "k": 2**16})),
    ("torch_dequant", "cpu", ("group1x16/asym", "channel"), ZERO, "FP8-L007", ["int32 int32"],
     (ASYM, ZERO)),
    ("torch_dequant", "cpu", ("token/asym", "group16x16"), {**ZERO, "zero": "float32"}, "FP8-L007",
     ["float32 int32"], (("token/asym", "group16x16"), {**ZERO, "zero": "codes"})),
    ("torch_int8", "sm80", ROW, {"dtypes": (torch.int8, torch.int8), "m": 16}, "FP8-L014",
     ["17-", "16"], (ROW, {"dtypes": (torch.int8, torch.int8), "m": 17})),
    ("torch_int8", "sm80", ROW, {"dtypes": (torch.int8, torch.int8), "m": 17, "n": 12}, "FP8-L009",
     ["N", "8", "12"], (ROW, {"dtypes": (torch.int8, torch.int8), "m": 17, "n": 24})),
    *(
        ("torch_block", "sm90", ("group1x128", "group128x128"), {"k": 512, "n": 256, **changes},
         code, words, (("group1x128", "group128x128"), {"k": 1024, "n": 256}))
        for changes, code, words in (
            ({"k": 256}, "FP8-L009", ["K", "512", "256"]),
            ({"n": 72}, "FP8-L009", ["N", "128", "72"]),
            ({"bias": BF16}, "FP8-L010", ["bfloat16"]),
            ({"out_dtype": F32}, "FP8-L007", ["float32"]),
            ({"b_layout": "row"}, "FP8-L008", ["operand b"]),
        )
    ),
    ("torch_block", "sm100", ("group1x128", "group128x128"), {"k": 512, "n": 128}, "FP8-L011",
     ["sm90"], None),
    *(
        ("triton_block", "sm90", pair, changes, code, words,
         (BLOCKS, {"k": 200, "n": 72, "m": None, "bias": F32, "out_dtype": F16}))
        for pair, changes, code, words in (
            (ROW, {}, "FP8-L003", ["per-token x per-channel"]),
            (("group1x64", "group128x128"), {}, "FP8-L003", ["group1x64"]),
            (("group1x128/ue8m0", "group128x128/ue8m0"), {}, "FP8-L007", ["ue8m0"]),
            (BLOCKS, {"dtypes": (FNUZ, FNUZ)}, "FP8-L007", ["fnuz"]),
            (BLOCKS, {"dtypes": (torch.int8, torch.int8)}, "FP8-L007", ["int8"]),
            (BLOCKS, {"out_dtype": F8}, "FP8-L007", ["results"]),
            (BLOCKS, {"bias": torch.int32}, "FP8-L010", ["int32"]),
            (BLOCKS, {"b_layout": "row"}, "FP8-L008", ["operand b"]),
            (BLOCKS, {"n": None}, "FP8-L017", ["N that is not known"]),
            (BLOCKS, {"k": None}, "FP8-L017", ["K that is not known"]),
        )
    ),
    ("triton_block", "sm86", BLOCKS, {}, "FP8-L011", ["sm89", "sm86"], None),
    ("triton_block", "gfx942", BLOCKS, {}, "FP8-L001", ["cuda"], None),
    *(
        ("triton_int8", "sm80", pair, {"dtypes": INT8, **changes}, code, words,
         (ROW, {"dtypes": INT8, "k": 2**17 - 1, "n": 47, "m": None, "bias": F32}))
        for pair, changes, code, words in (
            (BLOCKS, {}, "FP8-L003", ["group128x128"]),
            (("token/asym", "channel"), {}, "FP8-L007", ["asym"]),
            (ROW, {"dtypes": (F8, F8)}, "FP8-L007", ["float8_e4m3fn"]),
            (ROW, {"k": 2**17}, "FP8-L017", ["overflow"]),
            (ROW, {"k": None}, "FP8-L017", ["not known"]),
            (ROW, {"n": None}, "FP8-L017", ["N that is not known"]),
            (ROW, {"out_dtype": F8}, "FP8-L007", ["results"]),
            (ROW, {"bias": torch.int32}, "FP8-L010", ["int32"]),
            (ROW, {"a_layout": "col"}, "FP8-L008", ["operand a"]),
        )
    ),
    ("triton_int8", "gfx950", ROW, {"dtypes": INT8}, "FP8-L001", ["cuda"], None),
    ("torch_tensor", "sm90", ("tensor", "tensor/asym"), {}, "FP8-L007", ["asym"], ((), {})),
    ("torch_tensor", "sm90", (), {"device_type": "cpu"}, "FP8-L015", ["cpu", "cuda"], ((), {})),
    ("torch_tensor", "sm80", (), {}, "FP8-L011", ["sm80"], None),
    ("torch_tensor", "cpu", (), {}, "FP8-L006", ["0.02 GMAC/s"], None),
    ("torch_tensor", "xpu-bmg", (), {}, "FP8-L001", ["xpu-bmg"], None),
    ("torch_row", "sm90", (), {}, "FP8-L003", ["per-tensor x per-tensor"], (ROW, {})),
    ("torch_row", "sm90", ("tensor", "channel"), {}, "FP8-L003", ["per-tensor x per-channel"],
     (ROW, {})),
    ("torch_row", "sm90", ROW, {"out_dtype": F16}, "FP8-L007", ["float16"], (ROW, {})),
    ("torch_row", "sm90", ROW, {"out_dtype": F32}, "FP8-L007", ["float32"], (ROW, {})),
    ("torch_row", "sm90", ROW, {"dtypes": (F8, E5)}, "FP8-L007", ["weights", "e5m2"],
     (ROW, {"dtypes": (E5, F8)})),
    ("torch_row", "sm90", ROW, {"bias": F32}, "FP8-L010", ["float32"], (ROW, {"bias": BF16})),
    ("torch_row", "sm90", ROW, {"n": 17}, "FP8-L009", ["17"], (ROW, {})),
    ("torch_row", "sm121", ROW, {}, "FP8-L011", ["sm121"], None),
    ("torch_row", "sm103", ROW, {}, "FP8-L011", ["sm103"], None),
    ("torch_channel", "sm90", ("group1x128", "channel"), {}, "FP8-L003", ["per-group1x128"],
     (ROW, {})),
    ("torch_channel", "sm90", ROW, {"out_dtype": F8}, "FP8-L007", ["results"],
     (ROW, {"out_dtype": F32, "bias": F16})),
    ("torch_channel", "sm90", ROW, {"bias": torch.float64}, "FP8-L010", ["float64"],
     (ROW, {"bias": F32})),
    ("torch_channel", "sm90", ROW, {"k": 24}, "FP8-L009", ["K", "24"], (ROW, {})),
    ("torch_channel", "gfx1100", ROW, {}, "FP8-L011", ["gfx1100"], None),
    ("torch_channel", "cpu", ROW, {}, "FP8-L006", ["0.02 GMAC/s"], None),
    ("cpu", "cpu", ("group1x128", "tensor"), {}, "FP8-L003", ["group1x128"],
     (ROW, {"n": 63, "k": 47, "a_layout": "strided", "b_layout": "row", "m": None})),
    ("cpu", "cpu", ROW, {"dtypes": (FNUZ, FNUZ)}, "FP8-L007", ["fnuz"],
     (ROW, {"dtypes": (E5, E5)})),
    ("cpu", "cpu", ROW, {"out_dtype": F8}, "FP8-L007", ["results"], (ROW, {"out_dtype": F32})),
    ("cpu", "cpu", ROW, {"bias": torch.int32}, "FP8-L010", ["int32"], (ROW, {"bias": F16})),
    ("cpu", "cpu", ("token/ue8m0", "channel"), {}, "FP8-L007", ["ue8m0"], (ROW, {})),
    ("cpu", "sm90", ROW, {}, "FP8-L001", ["sm90"], None),
    ("cpu_prepared", "cpu", ROW, {}, "FP8-L004", ["prepared"], (ROW, {"prepared": True})),
    ("triton_skinny", "sm90", ROW, {"m": 65}, "FP8-L014", ["0-64", "65"], (ROW, {"m": 64})),
    ("triton_skinny", "sm90", ROW, {"n": None}, "FP8-L017", ["N"], (ROW, {"n": 63, "k": 47})),
    ("triton_skinny", "sm90", ROW, {"dtypes": (FNUZ, F8)}, "FP8-L007", ["fnuz"],
     (ROW, {"dtypes": (E5, E5)})),
    ("triton_skinny", "sm90", ROW, {"b_layout": "row"}, "FP8-L008", ["row"], (ROW, {})),
    ("triton_skinny", "sm100", ROW, {}, "FP8-L011", ["sm90", "sm100"], None),
    ("triton_skinny", "gfx942", ROW, {}, "FP8-L001", ["cuda", "gfx942"], None),
    ("triton_general", "sm90", ("group1x128", "channel"), {}, "FP8-L003", ["group1x128"],
     (ROW, {"m": None, "bias": F32, "out_dtype": F16})),
    ("triton_general", "cpu", ROW, {}, "FP8-L001", ["cuda"], None),
    ("vllm_cutlass", "sm90", ROW, {"use_fast_accum": True}, "FP8-L011", ["library"], None),
    ("vllm_cutlass", "sm90+vllm", ROW, {}, "FP8-L016", ["accumulates"],
     (ROW, {"use_fast_accum": True})),
    ("vllm_cutlass", "sm90+vllm", ROW, {"use_fast_accum": True, "out_dtype": F32}, "FP8-L007",
     ["float32"], (ROW, {"use_fast_accum": True, "out_dtype": F16})),
    ("vllm_cutlass", "sm90+vllm", ROW, {"use_fast_accum": True, "bias": F16}, "FP8-L010",
     ["float16"], (ROW, {"use_fast_accum": True, "bias": BF16})),
    ("vllm_cutlass", "sm80+vllm", ROW, {"use_fast_accum": True}, "FP8-L011", ["sm80"], None),
    ("vllm_cutlass", "sm120+vllm", ROW, {}, "FP8-L016", ["accumulates"],
     (ROW, {"use_fast_accum": True})),
    ("vllm_cutlass", "sm100+vllm", ROW, {"n": 24}, "FP8-L009", ["24"], (ROW, {})),
    *(
        ("vllm_cutlass_block", "sm90+vllm", pair, {"k": 256, "n": 256, **changes}, code, words,
         (BLOCKS, {"k": 256, "n": 128, "m": None, "out_dtype": F16}))
        for pair, changes, code, words in (
            (ROW, {}, "FP8-L003", ["per-token"]),
            (("group1x128/ue8m0", "group128x128/ue8m0"), {}, "FP8-L007", ["ue8m0"]),
            (BLOCKS, {"dtypes": (E5, F8)}, "FP8-L007", ["e5m2"]),
            (BLOCKS, {"out_dtype": F32}, "FP8-L007", ["float32"]),
            (BLOCKS, {"bias": BF16}, "FP8-L010", ["bfloat16"]),
            (BLOCKS, {"n": 200}, "FP8-L009", ["N", "128", "200"]),
            (BLOCKS, {"k": 192}, "FP8-L009", ["K", "128", "192"]),
            (BLOCKS, {"k": 128}, "FP8-L017", ["K = 128", "per-token"]),
            (BLOCKS, {"b_layout": "row"}, "FP8-L008", ["operand b"]),
        )
    ),
    ("vllm_cutlass_block", "sm89+vllm", BLOCKS, {"k": 256, "n": 128}, "FP8-L011", ["sm89"], None),
    ("vllm_cutlass_block", "sm90", BLOCKS, {"k": 256, "n": 128}, "FP8-L011", ["library"], None),
    *(
        ("vllm_cutlass_int8", "sm80+vllm", pair, {"dtypes": INT8, **changes}, code, words,
         (ROW, {"dtypes": INT8, "m": None, "bias": F16, "out_dtype": F16}))
        for pair, changes, code, words in (
            (BLOCKS, {}, "FP8-L003", ["group128x128"]),
            (ASYM, {**ZERO, "zero": "float32"}, "FP8-L007", ["float32 int32", "int32 int32"]),
            (ASYM, {**ZERO, "zero": "int64", "zero_dtype": torch.int64}, "FP8-L007", ["int64"]),
            (ASYM, {**ZERO, "k": 2**16 + 2**10}, "FP8-L017", ["overflow"]),
            (("token", "channel/asym"), {}, "FP8-L007", ["asym"]),
            (ROW, {"dtypes": (F8, F8)}, "FP8-L007", ["e4m3fn"]),
            (ROW, {"k": 2**17}, "FP8-L017", ["overflow"]),
            (ROW, {"out_dtype": F32}, "FP8-L007", ["float32"]),
            (ROW, {"bias": F16}, "FP8-L010", ["float16"]),
            (ROW, {"n": 24}, "FP8-L009", ["N", "24"]),
            (ROW, {"a_layout": "col"}, "FP8-L008", ["operand a"]),
        )
    ),
    ("vllm_cutlass_int8", "sm100+vllm", ROW, {"dtypes": INT8}, "FP8-L011", ["sm100"], None),
    ("vllm_cutlass_int8", "sm80", ROW, {"dtypes": INT8}, "FP8-L011", ["library"], None),
    *(
        ("deepgemm_block", "sm90+deepgemm", pair, {"k": 256, "n": 192, **changes}, code, words,
         (BLOCKS, {"k": 128, "n": 64, "m": None}))
        for pair, changes, code, words in (
            (ROW, {}, "FP8-L003", ["per-token"]),
            (("group1x128/ue8m0", "group128x128/ue8m0"), {}, "FP8-L007", ["ue8m0"]),
            (BLOCKS, {"dtypes": (F8, E5)}, "FP8-L007", ["e5m2"]),
            (BLOCKS, {"out_dtype": F16}, "FP8-L007", ["float16"]),
            (BLOCKS, {"bias": BF16}, "FP8-L010", ["bfloat16"]),
            (BLOCKS, {"n": 32}, "FP8-L009", ["N", "64", "32"]),
            (BLOCKS, {"k": 192}, "FP8-L009", ["K", "128", "192"]),
            (BLOCKS, {"b_layout": "row"}, "FP8-L008", ["operand b"]),
        )
    ),
    ("deepgemm_block", "sm100+deepgemm", BLOCKS, {"k": 256, "n": 128}, "FP8-L011", ["sm90"], None),
    ("deepgemm_block", "sm90", BLOCKS, {"k": 256, "n": 128}, "FP8-L011", ["deepgemm"], None),
    *(
        ("flashinfer_tensor", "sm100+flashinfer", pair, {"use_fast_accum": True, **changes}, code,
         words, ((), {"use_fast_accum": True, "m": None, "out_dtype": F16, "packed": False}))
        for pair, changes, code, words in (
            (ROW, {}, "FP8-L003", ["per-token"]),
            (("tensor", "channel"), {}, "FP8-L003", ["per-channel"]),
            ((), {"use_fast_accum": False}, "FP8-L016", ["accumulates"]),
            ((), {"dtypes": (E5, E5)}, "FP8-L007", ["e5m2"]),
            ((), {"out_dtype": F32}, "FP8-L007", ["float32"]),
            ((), {"bias": BF16}, "FP8-L010", ["bfloat16"]),
            ((), {"k": 24}, "FP8-L009", ["K", "24"]),
            ((), {"b_layout": "row"}, "FP8-L008", ["operand b"]),
        )
    ),
    ("flashinfer_tensor", "sm120+flashinfer", (), {"use_fast_accum": True}, "FP8-L011", ["sm120"],
     None),
    ("flashinfer_tensor", "sm100", (), {"use_fast_accum": True}, "FP8-L011", ["flashinfer"], None),
    *(
        ("flashinfer_block", "sm90+flashinfer", BLOCKS, {"k": 256, "n": 128, **changes}, code,
         words, None)
        for changes, code, words in (
            ({}, "FP8-L080", ["3 %", "contract"]),
            ({"out_dtype": F16}, "FP8-L007", ["float16"]),
            ({"bias": BF16}, "FP8-L010", ["bfloat16"]),
            ({"n": 64}, "FP8-L009", ["N", "128", "64"]),
        )
    ),
    ("flashinfer_block", "sm90", BLOCKS, {"k": 256, "n": 128}, "FP8-L011", ["flashinfer"], None),
    ("cpu_prepared", "cpu", ("token", "token"), {"prepared": True}, "FP8-L003", ["per-token"],
     (ROW, {"prepared": True})),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "name", "pair", "changes", "code", "words", "control"),
    CONDITIONS,
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_condition(kernel, name, pair, changes, code, words, control) -> None:  # type: ignore[no-untyped-def]
    target = Target.parse(name)
    verdict = consider(find(kernel), target, problem(*pair, target=target, **changes))
    assert not verdict
    assert verdict.code == code
    for word in (kernel, *words):
        assert word in verdict.message
    if control is not None:
        pair, changes = control
        assert consider(find(kernel), target, problem(*pair, target=target, **changes)) == YES


def test_scales_in_another_dtype() -> None:
    target = with_torch("x86-avx2", "2.13.0")  # before 2.12 torch has no row-wise product there
    p = problem(*ROW)
    half = dataclasses.replace(p.activation.scale, dtype=torch.bfloat16)
    p = dataclasses.replace(p, activation=dataclasses.replace(p.activation, scale=half))
    for name in ("cpu", "torch_row"):
        verdict = consider(find(name), target, p)
        assert verdict.code == "FP8-L007" and "bfloat16" in verdict.message
