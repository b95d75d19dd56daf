"""Which kernel is chosen for which target and problem, and what is said about the others."""

from __future__ import annotations

import dataclasses
from itertools import pairwise, product

import pytest
import torch
from lowering_sites import problem

from fp8pass.errors import NoKernelError, OptionError
from fp8pass.lowerings import (
    Choice,
    Kernel,
    choose,
    consider,
    find,
    kernel_names,
    kernels,
    register,
    unregister,
)
from fp8pass.lowerings.self_check import checked_plan
from fp8pass.options import Options
from fp8pass.problem import MRange
from fp8pass.reasons import CATALOGUE, YES
from fp8pass.target import Target

TARGETS = (
    "cpu", "x86-amx", "sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121",
    "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1200", "gfx1201", "xpu-bmg",
)  # fmt: skip
WITHOUT_FP8 = ("sm75", "sm80", "sm86", "gfx90a", "gfx1100")
GRANULARITIES = (
    ("tensor", "tensor"),
    ("token", "channel"),
    ("tensor", "channel"),
    ("token", "tensor"),
    ("group1x128", "group128x128"),
    ("group1x128/ue8m0", "group128x128/ue8m0"),
    ("tensor/ue8m0", "tensor"),
    ("token", "token"),
)
DEFAULTS = Options()


def with_torch(name: str, version: str) -> Target:
    return dataclasses.replace(Target.parse(name), runtime=(("torch", version),))


def winner(choice: Choice) -> str | None:
    return None if choice.kernel is None else choice.kernel.name


def pick(target: str | Target, *args: str, **more: object) -> str | None:
    target = Target.parse(target) if isinstance(target, str) else target
    return winner(choose(target, problem(*args, target=target, **more), DEFAULTS))  # type: ignore[arg-type]


def covers_without_gap(choice: Choice, m: MRange) -> None:
    ranges = [part for part, _ in choice.plan]
    assert ranges[0].lo == m.lo and ranges[-1].hi == m.hi
    for before, after in pairwise(ranges):
        assert before.hi is not None and after.lo == before.hi + 1
    for (_, one), (_, other) in pairwise(choice.plan):
        assert one is not other
    if len(ranges) > 1:
        assert all(kernel.run is not None for _, kernel in choice.plan)
    for part, kernel in choice.plan:
        assert kernel.rows.covers(part)


@pytest.mark.parametrize("name", TARGETS)
def test_table(name: str) -> None:
    target = Target.parse(name)
    for granularity, bias, m, n, out in product(
        GRANULARITIES,
        (None, torch.bfloat16),
        (1, 4, 17, None),
        (64, 65, None),
        (torch.bfloat16, torch.float32),
    ):
        p = problem(*granularity, target=target, m=m, n=n, k=64, bias=bias, out_dtype=out)
        choice = choose(target, p, DEFAULTS)
        assert choice == choose(target, p, Options()), "same question, same answer"
        names = [r.kernel for r in choice.rejected]
        assert names and winner(choice) not in names
        assert sorted({*names, *(k.name for _, k in choice.plan)}) == sorted(kernel_names())
        for rejection in choice.rejected:
            verdict = rejection.verdict
            assert not verdict and verdict.code in CATALOGUE
            assert rejection.kernel in verdict.message
            assert "{" not in verdict.message
        if choice.plan:
            assert choice.verdict == YES
            assert choice.why in ("static priority", "measured table")
            covers_without_gap(choice, p.m)
            assert all(target.kind in kernel.kinds for _, kernel in choice.plan)
        else:
            assert choice.verdict.code == "FP8-L012" and choice.why == ""
            assert target.spec in choice.verdict.message
        if name in WITHOUT_FP8 or target.kind == "xpu":
            assert not choice.plan
        if "ue8m0" in granularity[0] or granularity[1] == "token":
            assert not choice.plan
        if "group" in granularity[0]:
            allowed = ("torch_dequant", "triton_block", None)
            assert winner(choice) in allowed and (n or not choice.plan)
        if target.kind in ("cuda", "rocm") and (n is None or n % 16):
            for _, kernel in choice.plan:
                assert kernel.name == "torch_dequant" or kernel.name.startswith("triton")
            assert n is not None or winner(choice) in ("torch_dequant", None)


@pytest.mark.parametrize("name", WITHOUT_FP8)
def test_old_architectures_blame_the_architecture(name: str) -> None:
    target = Target.parse(name)
    choice = choose(target, problem(target=target), DEFAULTS)
    codes = {r.kernel: r.verdict for r in choice.rejected}
    assert codes["torch_tensor"].code == "FP8-L011"
    assert (
        name in codes["torch_tensor"].message
        and "sm90" in codes["torch_tensor"].message
        or ("gfx942" in codes["torch_tensor"].message)
    )


def test_expected_winners() -> None:
    for name in ("cpu", "x86-amx"):
        for pair in GRANULARITIES[:4]:
            assert pick(name, *pair) == "cpu"
            assert pick(name, *pair, prepared=True) == "cpu_prepared"
    for name in ("sm89", "sm100", "sm103", "sm120", "sm121", "gfx942", "gfx950"):
        assert pick(name) == "torch_tensor"
        assert pick(name, "tensor", "channel") == "torch_channel"
        assert pick(name, "token", "tensor") == "torch_channel"
    for name in ("sm100", "sm120", "gfx942", "gfx950"):
        assert pick(name, "token", "channel") == "torch_row"
        assert pick(name, "token", "channel", out_dtype=torch.float16) == "torch_channel"
    # no row-wise kernel that can be shown, or a slower one
    for name in ("sm103", "sm121", "gfx1200", "gfx1201"):
        assert pick(name, "token", "channel") == "torch_channel"
    # a bias beside a float32 result is added outside
    assert pick("sm100", out_dtype=torch.float32) == "torch_tensor"
    assert pick("sm100", out_dtype=torch.float32, bias=torch.float32) == "torch_channel"


def test_versions_of_torch() -> None:
    assert pick(with_torch("sm89", "2.11.0"), "token", "channel") == "torch_channel"
    assert pick(with_torch("sm89", "2.12.0"), "token", "channel") == "torch_row"
    assert pick(with_torch("sm100", "2.11.0"), "token", "channel") == "torch_row"
    row = find("torch_row")
    p = problem("token", "channel")
    for version, ok in (("2.11.0", False), ("2.12.1", True), ("2.13.0", True)):
        verdict = consider(row, with_torch("x86-avx2", version), p)
        assert bool(verdict) == ok
        if not ok:
            assert verdict.code == "FP8-L005"
            assert "2.12" in verdict.message and "2.11" in verdict.message


def test_rocm_numbers_are_not_cuda_numbers() -> None:
    """gfx1100 is "capability 11.0", which is more than 8.9, and has no FP8."""
    assert pick("gfx1100") is None
    # fnuz on gfx942, OCP on gfx950: never the other one
    fn, fnuz = torch.float8_e4m3fn, torch.float8_e4m3fnuz
    assert pick("gfx942", dtypes=(fnuz, fnuz)) == "torch_tensor"
    assert pick("gfx942", dtypes=(fn, fn)) is None
    assert pick("gfx950", dtypes=(fn, fn)) == "torch_tensor"
    assert pick("gfx950", dtypes=(fnuz, fnuz)) is None


F8, E5, FNUZ = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ROW = ("token", "channel")
BLOCKS = ("group1x128", "group128x128")
INT8 = (torch.int8, torch.int8)
#: INT8 with a zero point
ASYM = ("token/asym", "channel")
ZERO: dict[str, object] = {
    "dtypes": (torch.int8, torch.int8), "zero": "int32", "zero_dtype": torch.int32,
}  # fmt: skip

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


def test_row_wise_on_cpu_is_a_fallback() -> None:
    target = with_torch("x86-avx2", "2.13.0")
    p = problem(*ROW, target=target)
    off = Options(disable=("cpu", "cpu_prepared"))
    assert winner(choose(target, p, off)) == "torch_row"
    assert winner(choose(target, p, DEFAULTS)) == "cpu"


def test_losers_are_told_who_won() -> None:
    target = with_torch("x86-avx2", "2.13.0")
    choice = choose(target, problem(*ROW, prepared=True), DEFAULTS)
    told = {r.kernel: r.verdict for r in choice.rejected}
    assert winner(choice) == "cpu_prepared"
    for name in ("cpu", "torch_row"):
        assert told[name].code == "FP8-L013"
        assert "cpu_prepared" in told[name].message and "static priority" in told[name].message
    assert told["torch_channel"].code == "FP8-L006"


def test_force() -> None:
    target = Target.parse("sm100")
    p = problem(*ROW, target=target)
    choice = choose(target, p, Options(force="torch_channel"))
    assert winner(choice) == "torch_channel" and choice.why == "forced"
    told = {r.kernel: r.verdict for r in choice.rejected}
    assert told["torch_row"].code == "FP8-L013" and "forced" in told["torch_row"].message
    with pytest.raises(NoKernelError) as error:
        choose(target, p, Options(force="torch_tensor"))
    text = str(error.value)
    assert "FP8-L003" in text and "torch_tensor" in text
    assert "could take it: torch_row, torch_channel" in text
    assert "cpu: FP8-L001" in text
    with pytest.raises(NoKernelError, match="FP8-L004"):
        choose(Target.parse("cpu"), problem(*ROW), Options(force="cpu_prepared"))
    with pytest.raises(NoKernelError, match="none"):
        choose(Target.parse("sm80"), problem(target=Target.parse("sm80")), Options(force="cpu"))


def test_force_overrules_slowness_only() -> None:
    target = Target.parse("cpu")
    assert winner(choose(target, problem(), Options(force="torch_tensor"))) == "torch_tensor"
    assert winner(choose(target, problem(), Options(prefer=("torch_tensor",)))) == "cpu"
    with pytest.raises(NoKernelError, match="FP8-L008"):
        choose(target, problem(b_layout="row"), Options(force="torch_tensor"))


def test_force_overrules_what_was_not_shown() -> None:
    target = Target.parse("sm90+flashinfer")
    p = problem(*BLOCKS, target=target, k=256, n=128)
    assert winner(choose(target, p, Options(force="flashinfer_block"))) == "flashinfer_block"
    assert winner(choose(target, p, Options(prefer=("flashinfer_block",)))) != "flashinfer_block"
    many = problem(*BLOCKS, target=target, k=256, n=128, m=64)
    with pytest.raises(NoKernelError, match="0-31"):
        choose(target, many, Options(force="flashinfer_block"))


def test_what_was_not_run_on_hardware_is_not_in_front() -> None:
    every = "sm{}+vllm+deepgemm+flashinfer"
    for number, pair, expected in (
        (90, BLOCKS, "triton_block"),
        (100, BLOCKS, "triton_block"),
        (100, ROW, "torch_row"),
        (120, ("tensor", "tensor"), "torch_tensor"),
    ):
        target = Target.parse(every.format(number))
        p = problem(*pair, target=target, k=256, n=128, use_fast_accum=True)
        assert winner(choose(target, p, DEFAULTS)) == expected


def test_a_zero_point_is_never_part_of_a_plan_of_several_ranges() -> None:
    """The operator of a plan has no operand for it; and a kernel that takes it is found."""
    target = Target.parse("sm90+vllm")
    p = problem(*ASYM, target=target, m=None, **ZERO)  # type: ignore[arg-type]
    for options in (DEFAULTS, Options(prefer=("vllm_cutlass_int8",)), Options(self_check=True)):
        choice = choose(target, p, options)
        assert len(choice.plan) == 1 and choice.plan[0][0] == p.m
        assert checked_plan(target, p, choice, options) == ""
    assert winner(choose(target, p, Options(prefer=("vllm_cutlass_int8",)))) == "vllm_cutlass_int8"


def test_prefer_falls_back_and_says_so() -> None:
    target = Target.parse("sm100")
    p = problem(*ROW, target=target)
    choice = choose(target, p, Options(prefer=("torch_channel", "torch_row")))
    assert (winner(choice), choice.why, choice.note) == ("torch_channel", "preferred", "")
    choice = choose(target, p, Options(prefer=("torch_tensor", "torch_channel")))
    assert (winner(choice), choice.why) == ("torch_channel", "preferred")
    assert "torch_tensor" in choice.note and "FP8-L003" in choice.note
    choice = choose(target, p, Options(prefer=("cpu",)))
    assert (winner(choice), choice.why) == ("torch_row", "static priority")
    assert "cpu" in choice.note and "FP8-L001" in choice.note


def test_disable() -> None:
    target = Target.parse("sm100")
    p = problem(*ROW, target=target)
    choice = choose(target, p, Options(disable=("torch_row",)))
    assert winner(choice) == "torch_channel"
    assert {r.kernel: r.verdict.code for r in choice.rejected}["torch_row"] == "FP8-L002"
    choice = choose(target, p, Options(disable=kernel_names()))
    assert not choice.plan and choice.verdict.code == "FP8-L012"


@pytest.mark.parametrize("option", ["force", "prefer", "disable"])
def test_unknown_kernel_name(option: str) -> None:
    value = "nonsense" if option == "force" else ("nonsense",)
    with pytest.raises(OptionError, match=r"nonsense.*torch_row"):
        Options.resolve({}, **{option: value})
    with pytest.raises(OptionError, match=r"nonsense.*torch_row"):
        choose(Target.parse("cpu"), problem(), Options(**{option: value}))  # type: ignore[arg-type]


def test_one_token_is_not_per_tensor() -> None:
    """Granularity comes from the key: [1, 1] per-token scales are still per-token."""
    assert pick("sm100", *ROW, m=1) == "torch_row"
    assert pick("sm90", m=1) == "torch_tensor"


def test_register_and_memory() -> None:
    target = Target.parse("sm100")
    p = problem(target=target)
    before = choose(target, p, DEFAULTS)
    assert choose(target, p, DEFAULTS) is before, "equal sites share one answer"
    with pytest.raises(OptionError, match="torch_row"):
        register(find("torch_row"))
    extra = Kernel(
        "extra", "a test", frozenset({"cuda"}), lambda t: YES, lambda t, p: YES, lambda t, p: 0,
        find("torch_tensor").emit, "none",
    )  # fmt: skip
    register(extra)
    try:
        assert winner(choose(target, p, DEFAULTS)) == "extra", "the answer is not a stale one"
    finally:
        unregister("extra")
    assert winner(choose(target, p, DEFAULTS)) == "torch_tensor"
    with pytest.raises(OptionError, match="identifier"):
        register(dataclasses.replace(extra, name="a,b"))


def test_every_kernel_says_where_it_was_tested() -> None:
    for kernel in kernels():
        assert kernel.summary and kernel.provenance
        if "rocm" in kernel.kinds:
            assert "not run on hardware" in kernel.provenance
        else:
            assert "tested on" in kernel.provenance or "not run on" in kernel.provenance


def test_plan_covers_the_range_of_m() -> None:
    choice = choose(Target.parse("cpu"), problem(*ROW, m=None), DEFAULTS)
    assert [r for r, _ in choice.plan] == [MRange()]
