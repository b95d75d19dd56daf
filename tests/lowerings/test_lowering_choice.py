"""Which kernel is chosen for which target and problem, and what is said about the others."""

from __future__ import annotations

import dataclasses
from itertools import pairwise, product

import pytest
import torch
from lowering_sites import ASYM, BLOCKS, ROW, ZERO, problem, with_torch

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
