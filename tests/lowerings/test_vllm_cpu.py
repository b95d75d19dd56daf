"""vLLM's products for CPUs: which sites they are for, and what stands for them without the library.

tests/lowerings/with_libraries/test_real_vllm_cpu.py runs them where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lowering_sites import operands, problem

from fp8pass.errors import NoKernelError, UnsupportedError
from fp8pass.lowerings import choose, find, vllm_cpu
from fp8pass.lowerings.vllm_names import CLASSES, disabled_kernels
from fp8pass.options import Options
from fp8pass.target import AMX_FP8, AVX512_BF16, Target

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
AMX, WITH_FP8 = Target.parse("x86-amx+vllm"), Target.parse(f"{AMX_FP8}+vllm")
AVX512 = Target.parse("x86-avx512+vllm")
WITH_BF16 = replace(AVX512, features=frozenset({AVX512_BF16}))
ROUNDED = "weight,bfloat16,bfloat16,inside"
SCALED = "product,bfloat16,bfloat16,after"
SIZES = {"n": 256, "k": 512}
INT8 = (torch.int8, torch.int8)


def weight_only(weight: str = "tensor", target: Target = AMX, **more: Any) -> Any:
    given = {"dtypes": (BF16, E4), "form": ROUNDED, **SIZES, **more}
    return problem("tensor", weight, target=target, **given)


def reason(kernel: str, target: Target, p: Any) -> Any:
    """None where it can be chosen."""
    choice = choose(target, p, Options(prefer=(kernel,)))
    if choice.kernel is not None and choice.kernel.name == kernel:
        return None
    return next(r.verdict for r in choice.rejected if r.kernel == kernel)


# ---- the choice ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["", ROUNDED, SCALED, "weight,float32,bfloat16,after"])
@pytest.mark.parametrize("weight", ["tensor", "group128x128", "group128x64"])
def test_weight_only(weight: str, form: str) -> None:
    kernel = "vllm_cpu_tensor" if weight == "tensor" else "vllm_cpu_block"
    for bias in (None, BF16, F32):
        p = weight_only(weight, form=form, bias=bias)
        for target in (AMX, WITH_FP8, WITH_BF16):
            assert reason(kernel, target, p) is None
        for target in (Target.parse("x86-amx"), Target.parse("x86-avx2+vllm"), AVX512):
            verdict = reason(kernel, target, p)
            assert verdict.code == "FP8-L011"
            assert ("library" if target.arch == "x86-amx" else "BF16") in verdict.message


@pytest.mark.parametrize("form", ["", ROUNDED, SCALED])
def test_only_for_those_who_name_it(form: str) -> None:
    """Weights that are zero are read as other numbers."""
    for target in (AMX, WITH_BF16):
        for weight, kernel in (("tensor", "vllm_cpu_tensor"), ("group128x128", "vllm_cpu_block")):
            p = weight_only(weight, form=form)
            for options in (
                Options(), Options(prefer=("w8a16",)), Options(force="w8a16"),
                Options(numerics="fast"), Options(disable=("torch_w8a16",)),
            ):  # fmt: skip
                if options.disable:
                    assert not choose(target, p, options).plan
                    continue
                choice = choose(target, p, options)
                assert choice.kernel is find("torch_w8a16")
                (verdict,) = (r.verdict for r in choice.rejected if r.kernel == kernel)
                assert verdict.code == "FP8-L069" and "zero" in verdict.message
            for options in (Options(prefer=(kernel,)), Options(force=kernel)):
                assert choose(target, p, options).kernel is find(kernel)


def test_a_product_of_codes_is_never_made_weight_only_unasked() -> None:
    for pair in (("token", "channel"), ("tensor", "tensor")):
        choice = choose(WITH_BF16, problem(*pair, target=WITH_BF16, **SIZES), Options())
        assert choice.kernel is find("cpu")


REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "fp16": ("tensor", {"dtypes": (F16, E4), "out_dtype": F16}, "FP8-L007", "float16"),
    "float32": ("tensor", {"dtypes": (F32, E4), "out_dtype": F32}, "FP8-L007", "float32"),
    "e5m2": ("tensor", {"dtypes": (BF16, E5)}, "FP8-L007", "e5m2"),
    "result": ("tensor", {"out_dtype": F32}, "FP8-L007", "float32"),
    "N": ("tensor", {"n": 48}, "FP8-L009", "48"),
    "K": ("tensor", {"k": 160}, "FP8-L009", "160"),
    "unknown N": ("tensor", {"n": None}, "FP8-L009", "not known"),
    "b by rows": ("tensor", {"b_layout": "row"}, "FP8-L008", "row"),
    "float32 product": ("tensor", {"form": "weight,bfloat16,float32,inside"}, "FP8-L017", "float"),
    "channel": ("channel", {}, "FP8-L017", "per channel"),
    "exact channel": ("channel", {"form": ""}, "FP8-L017", "per channel"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_weight_only_refused_beside_what_is_taken(name: str) -> None:
    weight, changes, code, word = REFUSED[name]
    control = {"form": SCALED} if weight == "channel" else {}
    assert reason("vllm_cpu_tensor", AMX, weight_only(weight, **control)) is None
    verdict = reason("vllm_cpu_tensor", AMX, weight_only(weight, **changes))
    assert verdict.code == code and word in verdict.message


def test_blocks_refused() -> None:
    assert reason("vllm_cpu_block", AMX, weight_only("group128x32")) is None
    for weight in ("group64x64", "group128x48", "tensor"):
        assert reason("vllm_cpu_block", AMX, weight_only(weight)).code == "FP8-L003"
    assert reason("vllm_cpu_tensor", AMX, weight_only("group128x128")).code == "FP8-L003"


def test_codes_need_amx_fp8() -> None:
    for pair in (("token", "channel"), ("tensor", "tensor"), ("token", "tensor")):
        for bias, out in ((None, BF16), (F32, F16), (BF16, F32)):
            p = problem(*pair, target=WITH_FP8, n=64, k=96, bias=bias, out_dtype=out)
            assert reason("vllm_cpu_w8a8", WITH_FP8, p) is None
            assert choose(WITH_FP8, p, Options()).kernel is find("cpu"), "it packs in each call"
    for target in (AMX, WITH_BF16, Target.parse(AMX_FP8)):
        assert reason("vllm_cpu_w8a8", target, p).code == "FP8-L011"
    for changes in ({"n": 48}, {"k": 48}):
        p = problem("token", "channel", target=WITH_FP8, **{"n": 64, "k": 96, **changes})
        assert reason("vllm_cpu_w8a8", WITH_FP8, p).code == "FP8-L009"
    p = problem("token", "channel", target=WITH_FP8, n=64, k=96, dtypes=(E4, E5))
    assert reason("vllm_cpu_w8a8", WITH_FP8, p).code == "FP8-L007"


def test_codes_with_blocks() -> None:
    def said(act: str, weight: str = "group128x128", **sizes: int) -> Any:
        p = problem(act, weight, target=WITH_FP8, **{"n": 160, "k": 256, **sizes})
        return reason("vllm_cpu_w8a8_block", WITH_FP8, p)

    assert said("token") is None and said("tensor") is None
    assert said("group1x128").code == "FP8-L003"
    assert said("token", "channel").code == "FP8-L003"
    # groups that do not divide K evenly give wrong numbers, in silence
    assert said("token", k=160).code == "FP8-L009"


def test_int8_is_there_for_those_who_ask() -> None:
    p = problem("token", "channel", target=AVX512, dtypes=INT8, n=33, k=63)
    for name in ("x86-avx2", "x86-avx512", "x86-amx", AMX_FP8):
        where = Target.parse(f"{name}+vllm")
        assert reason("vllm_cpu_int8", where, p) is None
        assert choose(where, p, Options()).kernel is find("torch_int8_cpu")
    assert reason("vllm_cpu_int8", Target.parse("x86-avx512"), p).code == "FP8-L011"
    assert reason("vllm_cpu_int8", Target.parse("aarch64+vllm"), p).code == "FP8-L011"
    zero = problem("token/asym", "channel", dtypes=INT8, zero="int32", zero_dtype=torch.int32)
    assert reason("vllm_cpu_int8", AVX512, zero).code == "FP8-L007"
    with pytest.raises(NoKernelError, match="vLLM"):
        choose(Target.parse("x86-avx2"), p, Options(force="vllm_cpu_int8"))


def test_names_that_vllms_users_know() -> None:
    ours = [name for patterns in CLASSES.values() for name in patterns if "vllm_cpu" in name]
    assert len(ours) == 5
    for name, kernels in (
        ("CPUFp8PerTensorScaledMMLinearKernel", ("vllm_cpu_tensor",)),
        ("CPUFp8BlockScaledMMKernel", ("vllm_cpu_block",)),
        ("CPUFP8W8A8ScaledMMLinearKernel", ("vllm_cpu_w8a8",)),
        ("CPUFp8W8A8BlockScaledMMKernel", ("vllm_cpu_w8a8_block",)),
        ("CPUInt8ScaledMMLinearKernel", ("vllm_cpu_int8",)),
    ):
        assert disabled_kernels({"VLLM_DISABLED_KERNELS": name}) == kernels


# ---- the target ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "operators", "spec", "features"),
    [
        ("x86-avx2", {}, "x86-avx2", ()),
        ("x86-avx2", {"onednn_scaled_mm": 1}, "x86-avx2+vllm", ()),
        ("x86-avx512", {"onednn_scaled_mm": 1}, "x86-avx512+vllm", ()),
        ("x86-avx512", {"fp8": 1}, "x86-avx512+vllm", (AVX512_BF16,)),
        ("x86-amx", {"onednn_scaled_mm": 1}, "x86-amx", ()),
        ("x86-amx", {"fp8": 1}, "x86-amx+vllm", (AVX512_BF16,)),
        ("x86-amx", {"fp8": 1, "amx": 1}, f"{AMX_FP8}+vllm", (AVX512_BF16,)),
    ],
)
def test_detected(
    arch: str,
    operators: dict[str, int],
    spec: str,
    features: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "fp8" in operators:
        operators = {**operators, "onednn_scaled_mm": 1, "fp8_scaled_mm_cpu": 1}
    asked: Callable[[], bool] = lambda: "amx" in operators  # noqa: E731
    fake = SimpleNamespace(**operators, cpu_has_amx_fp8=asked)
    monkeypatch.setattr("fp8pass.target._detect", lambda kind, index: Target.parse(arch))
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setitem(torch.ops.__dict__, "_C", fake)
    found = Target.detect("cpu")
    assert (found.spec, found.features) == (spec, frozenset(features))


# ---- without the library -------------------------------------------------------------------------


def test_without_the_library() -> None:
    if hasattr(torch.ops._C, "onednn_scaled_mm"):
        pytest.skip("vLLM's library is loaded")
    p = problem("token", "channel", n=64, k=96)
    v = operands(p, 3, "cpu")
    given = v["a"], v["b"], v["scale_a"], v["scale_b"], None, BF16
    keys = str(p.activation), str(p.weight)
    with pytest.raises(UnsupportedError, match="vLLM"):
        vllm_cpu.scaled_mm(*given, *keys)
    codes = problem("token", "channel", n=64, k=96, dtypes=INT8)
    with pytest.raises(UnsupportedError, match="vLLM"):
        vllm_cpu.scaled_mm(
            v["a"].view(torch.int8), v["b"].t().view(torch.int8).t(), *given[2:],
            str(codes.activation), str(codes.weight),
        )  # fmt: skip
    x = torch.randn(3, 128).to(BF16)
    w = torch.randn(32, 128).to(E4).t()
    one = torch.tensor(0.1)
    key = "float8_e4m3fn/static/tensor"
    with pytest.raises(UnsupportedError, match="vLLM"):
        vllm_cpu.w8a16_mm(x, w, one, None, BF16, key)
    with pytest.raises(UnsupportedError, match="float16"):
        vllm_cpu.w8a16_mm(x.half(), w, one, None, F16, key)
    # a graph for another CPU is interpreted like one for any absent device
    wanted = torch.ops.fp8pass.scaled_mm(*given, *keys, False, None)
    assert torch.equal(torch.ops.fp8pass.vllm_cpu_scaled_mm(*given, *keys), wanted)
    wanted = torch.ops.fp8pass.w8a16_mm(x, w, one, None, BF16, key)
    assert torch.equal(torch.ops.fp8pass.vllm_cpu_w8a16_mm(x, w, one, None, BF16, key), wanted)
