"""The whole table: every target x granularity x bias x rows x alignment (FIELD.md R28).

What holds for each cell: the same answer again, a reason for every other kernel, and reasons that
are true. The sentence of a rejection is read here, and checked against the problem and the target
without the code that wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from lowering_sites import problem

from fp8pass.errors import NoKernelError
from fp8pass.lowerings import Choice, choose, find, kernel_names
from fp8pass.lowerings import choice as module
from fp8pass.options import Options
from fp8pass.problem import ScaledMMProblem
from fp8pass.quant_key import dtype_name
from fp8pass.reasons import CATALOGUE
from fp8pass.target import UNKNOWN, Target

TARGETS = (
    "cpu", "sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm120", "gfx90a", "gfx942", "gfx950",
    "gfx1100", "gfx1201", "xpu-bmg", "unknown",
    # and with their libraries
    "sm90+vllm", "gfx942+aiter", "gfx942+vllm", "gfx942+aiter+vllm==0.21", "gfx950+aiter+vllm",
    "gfx1201+vllm==0.21", "sm999", "gfx9999+aiter", "sm80+vllm", "x86-avx512+vllm",
    "x86-amx-fp8+vllm",
)  # fmt: skip
WITHOUT_FP8 = ("sm75", "sm80", "sm86", "gfx90a", "gfx1100")
INT8 = (torch.int8, torch.int8)
#: name -> (granularity of a, of b, dtypes or None = the target's fp8)
GRANULARITIES = {
    "tensor": ("tensor", "tensor", None),
    "token x channel": ("token", "channel", None),
    "tensor x channel": ("tensor", "channel", None),
    "token x tensor": ("token", "tensor", None),
    "block fp32": ("group1x128", "group128x128", None),
    "block ue8m0": ("group1x128/ue8m0", "group128x128/ue8m0", None),
    "int8": ("token", "channel", INT8),
    "int8-azp": ("token/asym", "channel", INT8),
}
#: Kernels that multiply by float32 scales of a symmetric quantisation; what can do more is named
#: otherwise.
PLAIN = frozenset(
    (
        "cpu", "cpu_prepared", "torch_tensor", "torch_row", "torch_channel", "torch_block",
        "torch_dequant", "torch_int8", "torch_int8_cpu", "triton_skinny", "triton_general",
        "vllm_cpu_w8a8", "vllm_cpu_w8a8_block", "vllm_cpu_int8",
        "vllm_cutlass", "vllm_skinny", "aiter_row", "aiter_int8", "aiter_block", "aiter_shuffled",
    )
)  # fmt: skip
#: Of these, those that also take a zero point of the activations.
WITH_ZERO_POINT = frozenset(("torch_dequant", "torch_int8", "torch_int8_cpu"))
WITHOUT_BIAS = frozenset(("torch_block", "aiter_block", "aiter_shuffled"))
#: What a kernel's name may hold on a target without FP8 products: no fp8 is multiplied by fp8.
NOT_NATIVE = ("dequant", "w8a16", "woq", "marlin")
ROWS = (1, 4, 17, None)
BF16 = torch.bfloat16

Cell = tuple[str, Target, ScaledMMProblem]


def cells(name: str) -> Iterator[Cell]:
    target = Target.parse(name)
    for (label, (a, b, dtypes)), bias, m, aligned in product(
        GRANULARITIES.items(), (None, BF16), ROWS, (True, False)
    ):
        n, k = (256, 512) if aligned else (250, 509)
        p = problem(a, b, target=target, m=m, n=n, k=k, dtypes=dtypes, bias=bias)
        yield label, target, p


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fp8pass.target._warn_of", lambda arch: None)
        yield


@pytest.mark.parametrize("name", TARGETS)
def test_table(name: str) -> None:
    for label, target, p in cells(name):
        choice = choose(target, p, Options())
        module._choose.cache_clear()
        assert choose(target, p, Options()) == choice, "same question, same answer"
        chosen = {kernel.name for _, kernel in choice.plan}
        told = [rejection.kernel for rejection in choice.rejected]
        assert told and sorted({*told, *chosen}) == sorted(kernel_names())
        for rejection in choice.rejected:
            where = f"{name} {label} {p}"
            assert rejection.verdict.code in CATALOGUE, where
            untrue = is_untrue(rejection.kernel, choice, target, p)
            assert untrue is None, f"{rejection.verdict.message!r}: {untrue}; {where}"
        check_rules(name, label, target, p, choice, chosen)


def check_rules(
    name: str, label: str, target: Target, p: ScaledMMProblem, choice: Choice, chosen: set[str]
) -> None:
    if target.kind == UNKNOWN:
        assert not chosen and choice.verdict.code == "FP8-L012"
        assert {r.verdict.code for r in choice.rejected} == {"FP8-L061"}
        return
    if "ue8m0" in label:
        assert not chosen & PLAIN, "scales that it does not read"
    if "azp" in label:
        assert not chosen & (PLAIN - WITH_ZERO_POINT), "zero points that it does not read"
    if p.bias is not None:
        assert not chosen & WITHOUT_BIAS
        if target.library_version("vllm") is None:
            assert "vllm_skinny" not in chosen, "the version may have no argument for a bias"
    if name.split("+")[0] in WITHOUT_FP8 and not label.startswith("int8"):
        assert all(any(word in kernel for word in NOT_NATIVE) for kernel in chosen)
        assert "torch_dequant" not in chosen, "its code generator converts no fp8 there"
    if target.kind == "rocm" and not label.startswith("int8") and chosen:
        assert p.activation.dtype == target.fp8_dtype
    for m, kernel in choice.plan:
        assert kernel.rows.covers(m) and target.kind in kernel.kinds
    if p.m.static:
        assert len(choice.plan) <= 1


# ---- is a sentence true? -------------------------------------------------------------------------


def is_untrue(kernel: str, choice: Choice, target: Target, p: ScaledMMProblem) -> str | None:
    """What is wrong with the reason for a kernel; None if it is true, or not read here."""
    (verdict,) = (r.verdict for r in choice.rejected if r.kernel == kernel)
    if kernel not in verdict.message:
        return "it does not name the kernel"
    check = CHECKS.get(verdict.code)
    return None if check is None else check(kernel, verdict.message, choice, target, p)


def _kind(kernel: str, text: str, choice: Choice, target: Target, p: ScaledMMProblem) -> str | None:
    if target.kind in find(kernel).kinds:
        return "it runs on that kind of device"
    return None if target.spec in text else "the target is another"


def _pair(kernel: str, text: str, choice: Choice, target: Target, p: ScaledMMProblem) -> str | None:
    wants, _, has = text.partition(", the site has ")
    real = f"per-{p.activation.granularity} x per-{p.weight.granularity}"
    if has.strip() != real:
        return f"the site has {real}"
    return "it takes just that" if real in wants else None


def _value(
    kernel: str, text: str, choice: Choice, target: Target, p: ScaledMMProblem
) -> str | None:
    """Dtypes: what is refused is there, and is not among what is taken."""
    _, _, rest = text.partition(" does not take ")
    refused, _, wants = rest.partition("; it takes ")
    word = refused.split()[-1]
    keys = (p.activation, p.weight)
    there = {dtype_name(d) for d in (p.out_dtype, *(key.dtype for key in keys))}
    there |= {key.scale.format for key in keys} | {str(key) for key in keys}
    there |= {dtype_name(key.scale.dtype) for key in keys}
    if word not in there:
        return f"{word} is not in the problem"
    return f"{word} is taken" if word in re.split(r"[ ,]+", wants) else None


def _multiple(
    kernel: str, text: str, choice: Choice, target: Target, p: ScaledMMProblem
) -> str | None:
    found = re.search(r"needs (N|K) to be a multiple of (\d+), it is (.+)$", text)
    if found is None:
        return "it names no size"
    size = p.n if found[1] == "N" else p.k
    if found[3] == "not known statically":
        return None if size is None else f"it is {size}"
    if size is None or int(found[3]) != size:
        return f"it is {size}"
    return None if size % int(found[2]) else "it is a multiple"


def _bias(kernel: str, text: str, choice: Choice, target: Target, p: ScaledMMProblem) -> str | None:
    if p.bias is None:
        return "there is no bias"
    return None if text.endswith(f"has {dtype_name(p.bias)}") else "the bias is another"


def _needs(
    kernel: str, text: str, choice: Choice, target: Target, p: ScaledMMProblem
) -> str | None:
    wants = text.partition(" needs ")[2].partition(", the target is ")[0]
    if target.spec not in text:
        return "the target is another"
    if wants.startswith("one of "):
        names = wants.removeprefix("one of ").split(", ")
        return "the architecture is among them" if target.arch in names else None
    if wants.startswith("the library "):
        name = wants.removeprefix("the library ")
        return "the library is there" if target.has_library(name) else None
    return None


def _chosen(
    kernel: str, text: str, choice: Choice, target: Target, p: ScaledMMProblem
) -> str | None:
    names = [k.name for _, k in choice.plan]
    if f"{' and '.join(dict.fromkeys(names))} took precedence ({choice.why})" not in text:
        return "others took precedence"
    return None


def _rows(kernel: str, text: str, choice: Choice, target: Target, p: ScaledMMProblem) -> str | None:
    if find(kernel).rows.covers(p.m):
        return "it takes all of these rows"
    return None if text.endswith(f"has {p.m}") else "the rows are others"


def _accumulation(
    kernel: str, text: str, choice: Choice, target: Target, p: ScaledMMProblem
) -> str | None:
    if p.use_fast_accum:
        return "the source allows it"
    return None if find(kernel).reduced_accumulation else "it does not"


def _fnuz(kernel: str, text: str, choice: Choice, target: Target, p: ScaledMMProblem) -> str | None:
    if target.fp8_dtype != torch.float8_e4m3fnuz:
        return "the target's FP8 is another"
    key = p.activation if "activations" in text else p.weight
    return None if key.dtype == torch.float8_e4m3fn else "the codes are others"


def _version(
    kernel: str, text: str, choice: Choice, target: Target, p: ScaledMMProblem
) -> str | None:
    found = re.search(r"needs (\w+) (\d+)\.(\d+) or newer", text)
    if found is None:
        return "it names no version"
    has = target.library_version(found[1])
    return "it is new enough" if has and has >= (int(found[2]), int(found[3])) else None


def _limit(
    kernel: str, text: str, choice: Choice, target: Target, p: ScaledMMProblem
) -> str | None:
    sizes = {
        int(number) for number in re.findall(r"\b([NK]) = (\d+)", text) for number in number[1:]
    }
    return None if sizes <= {p.n, p.k} else f"the sizes are {p.n} and {p.k}"


Check = Callable[[str, str, Choice, Target, ScaledMMProblem], "str | None"]
CHECKS: dict[str, Check] = {
    "FP8-L001": _kind,
    "FP8-L003": _pair,
    "FP8-L004": lambda kernel, text, choice, target, p: "it is" if p.prepared else None,
    "FP8-L007": _value,
    "FP8-L009": _multiple,
    "FP8-L010": _bias,
    "FP8-L011": _needs,
    "FP8-L013": _chosen,
    "FP8-L014": _rows,
    "FP8-L016": _accumulation,
    "FP8-L017": _limit,
    "FP8-L060": _fnuz,
    "FP8-L062": _version,
}


def test_the_checks_find_what_is_untrue() -> None:
    """Positive control: the sentences of one problem are not true of another."""
    target = Target.parse("gfx942+aiter")
    p = problem("token", "channel", target=target, n=250, k=512)
    choice = choose(target, p, Options())
    codes = {r.verdict.code for r in choice.rejected}
    assert {"FP8-L001", "FP8-L003", "FP8-L009", "FP8-L011"} <= codes
    told = {r.kernel: r.verdict.code for r in choice.rejected}
    other = problem("tensor", "tensor", target=target, n=256, k=512, use_fast_accum=True)
    elsewhere = Target.parse("gfx1100")
    for kernel, code in told.items():
        if code in ("FP8-L003", "FP8-L009"):
            assert is_untrue(kernel, choice, target, other) is not None
        if code in ("FP8-L001", "FP8-L011"):
            assert is_untrue(kernel, choice, elsewhere, p) is not None


# ---- what follows from the table -----------------------------------------------------------------


def test_e4m3fn_on_mi300_is_refused_with_the_way_out() -> None:
    fn = torch.float8_e4m3fn
    for name in ("gfx942", "gfx942+aiter+vllm==0.21"):
        target = Target.parse(name)
        for a, b, _ in list(GRANULARITIES.values())[:5]:
            p = problem(a, b, target=target, m=1, n=256, k=512, dtypes=(fn, fn))
            choice = choose(target, p, Options())
            assert not {k.name for _, k in choice.plan} & PLAIN
            needs = [r.verdict for r in choice.rejected if r.verdict.code == "FP8-L060"]
            assert needs and all("fp8pass.prepare" in verdict.hint for verdict in needs)
    for name in ("gfx950", "gfx1201"):
        p = problem(target=Target.parse(name), dtypes=(fn, fn))
        assert choose(Target.parse(name), p, Options()).plan


@pytest.mark.parametrize("name", TARGETS)
def test_force_of_what_cannot_be_gives_every_reason(name: str) -> None:
    target = Target.parse(name)
    p = problem("token/ue8m0", "channel/ue8m0", target=target, m=1, n=250, k=509)
    could = {k.name for k in map(find, kernel_names())}
    for kernel in sorted(PLAIN):
        with pytest.raises(NoKernelError) as error:
            choose(target, p, Options(force=kernel))
        text = str(error.value)
        assert kernel in text and re.search(r"FP8-L\d{3}", text)
        assert all(other in text for other in could)
