"""The CPU scaled product against float64: shapes, scales, dtypes, layouts, kernels, failures."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8pass.errors import UnsupportedError
from fp8pass.kernels import cpu

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
SHAPES = [(1, 1), (47, 63), (64, 32), (192, 576), (1536, 576)]
ROWS = [0, 1, 2, 3, 5, 16, 17, 64]
# (scale_a, scale_b): per-tensor x per-tensor, per-token x per-channel, static tensor x channel, ...
GRANULARITIES = ["tensor-tensor", "token-channel", "tensor-channel", "token-tensor"]
# Every kernel this CPU has, the choice among them, and the torch ops.
PATHS = [None, *cpu.KERNELS, "torch"]


def codes(*shape: int, dtype: torch.dtype = E4, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=g) * 4).to(dtype)


def scales(m: int, n: int, granularity: str) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(m + n)
    of_a, of_b = granularity.split("-")
    sa = torch.rand((m, 1) if of_a == "token" else (), generator=g) * 0.02 + 0.001
    sb = torch.rand((1, n) if of_b == "channel" else (1,), generator=g) * 0.02 + 0.001
    return sa, sb


def check(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    sa: torch.Tensor,
    sb: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    """2 ulp(out) + 2**-10 * sum|a b| * scales from float64, and 0.5 % on average."""
    exact = (a.double() @ b.double()) * sa.double() * sb.double()
    size = (a.double().abs() @ b.double().abs()) * sa.double() * sb.double()
    if bias is not None:
        exact = exact + bias.double()
    exponent = torch.frexp(exact).exponent - 1  # ulp of the result's binade, floor: fp16's smallest
    ulp = torch.ldexp(torch.full_like(exact, ULP[out.dtype]), exponent.clamp(min=-14))
    error = (out.double() - exact).abs()
    assert out.is_contiguous() and out.shape == exact.shape
    assert (error <= 2 * ulp + 2.0**-10 * size).all()
    if exact.numel():
        assert error.mean() <= 0.005 * exact.abs().mean() + 2.0**-24


def run(path: str | None, *args: torch.Tensor | torch.dtype | None) -> torch.Tensor:
    if path == "torch":
        return cpu._with_torch_ops(*args[:6])  # type: ignore[arg-type]
    return cpu.scaled_mm(*args, kernel=path)  # type: ignore[arg-type]


def runnable(path: str | None, m: int) -> bool:
    return path in (None, "torch") or (
        path in cpu.kernels() and not (path.startswith("gemv") and m > 4)
    )


def need(path: str | None) -> None:
    """Skip without the instructions: x86-64 with AVX2 has fp32 and gemv, some have the others."""
    if path in ("bf16", "amx", "gemv_bf16") and path not in cpu.kernels():
        pytest.skip(f"this CPU has no {path} instructions")


def test_this_machine_builds_the_kernels() -> None:
    # The reference machines of this suite are x86-64 with AVX2 and a compiler.
    assert cpu.available(), cpu.why_unavailable()
    assert cpu.why_unavailable() == ""
    assert {"fp32", "gemv"} <= set(cpu.kernels())
    assert "torch threads" in cpu.describe()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n, k", SHAPES)
def test_against_float64(path: str | None, n: int, k: int) -> None:
    need(path)
    w = codes(n, k)
    prepared = cpu.pack(w)
    for m in ROWS:
        if not runnable(path, m):
            continue
        a = codes(m, k, seed=1)
        for i, granularity in enumerate(GRANULARITIES):
            sa, sb = scales(m, n, granularity)
            out_dtype = FLOATS[i % 3]
            out = run(path, a, w.t(), sa, sb, None, out_dtype)
            check(out, a, w.t(), sa, sb)
            if path != "torch":
                assert torch.equal(out, run(path, a, w.t(), sa, sb, None, out_dtype, prepared))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("bias_dtype", FLOATS)
def test_dtypes_of_result_and_bias(
    path: str | None, out_dtype: torch.dtype, bias_dtype: torch.dtype
) -> None:
    need(path)
    for m in (1, 4, 37):
        if runnable(path, m):
            a, w, bias = codes(m, 100), codes(70, 100), torch.randn(70).to(bias_dtype)
            sa, sb = scales(m, 70, "token-channel")
            check(run(path, a, w.t(), sa, sb, bias, out_dtype), a, w.t(), sa, sb, bias)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kinds", [(E4, E5), (E5, E4), (E5, E5)])
def test_e5m2(path: str | None, kinds: tuple[torch.dtype, torch.dtype]) -> None:
    need(path)
    for m in (1, 3, 40):
        if runnable(path, m):
            a, w = codes(m, 65, dtype=kinds[0]), codes(50, 65, dtype=kinds[1])
            sa, sb = scales(m, 50, "token-channel")
            out = run(path, a, w.t(), sa, sb, None, torch.float32)
            check(out, a, w.t(), sa, sb)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [E4, E5])
@pytest.mark.parametrize("flush", [False, True])
def test_every_code_is_converted_exactly(path: str | None, dtype: torch.dtype, flush: bool) -> None:
    # K = 1: the product is the code itself, on either side, in every kernel's conversion. The
    # smallest codes must survive flush-denormals mode too.
    need(path)
    every = torch.arange(256, dtype=torch.uint8).view(dtype).view(256, 1)
    value, one, unit = every.float(), torch.ones(1, 1).to(dtype), torch.ones(())
    if flush and not torch.set_flush_denormal(True):
        raise AssertionError("x86-64 has a flush-denormals mode")
    try:
        for a, b in ((every, one), (one, every.t())):
            if runnable(path, a.shape[0]):
                want = (value @ torch.ones(1, 1)).view(a.shape[0], b.shape[1])
                for prepared in (None, cpu.pack(b.t())):
                    out = run(path, a, b, unit, unit, None, torch.float32, prepared)
                    assert torch.equal(out.nan_to_num(7e30), want.nan_to_num(7e30))
                    assert torch.equal(out.isnan(), want.isnan())
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("path", PATHS)
def test_nan_stays_in_its_row_and_column(path: str | None) -> None:
    need(path)
    for m in (3, 33):
        if runnable(path, m):
            a, w, unit = codes(m, 100), codes(40, 100), torch.ones(())
            a.view(torch.uint8)[1, 99] = 0xFF
            w.view(torch.uint8)[35, 17] = 0x7F
            for prepared in (None, cpu.pack(w)):
                for out_dtype in FLOATS:
                    nan = run(path, a, w.t(), unit, unit, None, out_dtype, prepared).isnan()
                    want = torch.zeros(m, 40, dtype=torch.bool)
                    want[1], want[:, 35] = True, True
                    assert torch.equal(nan, want)


@pytest.mark.parametrize("path", PATHS)
def test_large_values_and_overflow(path: str | None) -> None:
    need(path)
    for m in (2, 20):
        if runnable(path, m):
            a, w = torch.full((m, 64), 448.0).to(E4), torch.full((8, 64), -448.0).to(E4)
            one = torch.ones(())
            assert (run(path, a, w.t(), one, one, None, torch.float32) == -64 * 448.0**2).all()
            assert (run(path, a, w.t(), one, one, None, torch.float16) == -math.inf).all()
            big = torch.tensor(1e30)
            assert (run(path, a, w.t(), big, big, None, torch.bfloat16) == -math.inf).all()


@pytest.mark.parametrize("out_dtype", FLOATS)
def test_scaling_and_rounding_are_those_of_torch_ops_bit_for_bit(out_dtype: torch.dtype) -> None:
    # Products of two codes are exact, so with K = 1 the order of a sum plays no part: only the
    # scales, the bias and the one rounding do, ties and subnormal results included.
    every = torch.arange(256, dtype=torch.uint8).view(E4).view(256, 1)
    sa = torch.rand(256, 1) * torch.logspace(-9, 3, 256).view(256, 1)
    sb = torch.rand(1, 256)
    for bias in (None, torch.randn(256)):
        out = cpu.scaled_mm(every, every.t(), sa, sb, bias, out_dtype)
        want = cpu._with_torch_ops(every, every.t(), sa, sb, bias, out_dtype)
        assert torch.equal(out.isnan(), want.isnan())
        assert torch.equal(out.nan_to_num(3.0), want.nan_to_num(3.0))
    out = cpu.scaled_mm(every, every.t(), torch.ones(()), torch.ones(()), None, out_dtype)
    want = (every.float() @ every.float().t()).to(out_dtype)  # many exact ties in bf16
    assert torch.equal(out.nan_to_num(3.0), want.nan_to_num(3.0))
    zero = torch.zeros(1, 1).to(E4)
    negative = torch.full((1, 1), -1.0).to(E4)
    signed = cpu.scaled_mm(negative, zero, -torch.ones(()), torch.ones(()), None, out_dtype)
    assert signed.item() == 0


@pytest.mark.parametrize("m", [2, 19])
def test_layouts(m: int) -> None:
    n, k = 40, 72
    wide, w = codes(m, 3 * k), codes(n, k)
    sa, sb = scales(m, n, "token-channel")
    a = wide[:, 5 : 5 + k]
    want = cpu.scaled_mm(a.contiguous(), w.t(), sa, sb, None, torch.bfloat16)
    prepared = cpu.pack(w)
    sliced = torch.cat([w, w], 1)[:, :k]  # a weight that is part of a wider one
    layouts = [
        (a, w.t()),
        (a.t().contiguous().t(), w.t()),
        (a, w.t().contiguous()),
        (a, sliced.t()),
    ]
    for left, right in layouts:
        for p in (None, prepared):
            assert torch.equal(cpu.scaled_mm(left, right, sa, sb, None, torch.bfloat16, p), want)
    every_other = wide[:, : 2 * k : 2]
    got = cpu.scaled_mm(every_other, w.t(), sa, sb, None, torch.bfloat16)
    check(got, every_other, w.t(), sa, sb)
    same = torch.full((), 0.5)
    assert torch.equal(  # a scale that was expanded, a bias with a stride
        cpu.scaled_mm(
            a, w.t(), same.expand(m, 1), same.expand(1, n), sb[0].repeat(2)[::2], torch.float32
        ),
        cpu.scaled_mm(a, w.t(), same, same, sb[0].repeat(2)[::2].contiguous(), torch.float32),
    )


def test_long_sums_and_many_blocks() -> None:
    # K beyond one block of k of the fp32 kernel; M beyond one chunk of rows.
    for m, n, k in ((6, 33, 2500), (700, 40, 70)):
        a, w = codes(m, k), codes(n, k)
        sa, sb = scales(m, n, "token-channel")
        prepared = cpu.pack(w)
        for name in cpu.kernels():
            if runnable(name, m):
                out = cpu.scaled_mm(a, w.t(), sa, sb, None, torch.float32, kernel=name)
                check(out, a, w.t(), sa, sb)
                again = cpu.scaled_mm(a, w.t(), sa, sb, None, torch.float32, prepared, kernel=name)
                assert torch.equal(out, again)


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(0, 70),
    n=st.integers(0, 100),
    k=st.integers(0, 130),
    granularity=st.sampled_from(GRANULARITIES),
    out_dtype=st.sampled_from(FLOATS),
    with_bias=st.booleans(),
    seed=st.integers(0, 10),
)
def test_any_shape(
    m: int, n: int, k: int, granularity: str, out_dtype: torch.dtype, with_bias: bool, seed: int
) -> None:
    a, w = codes(m, k, seed=seed), codes(n, k, seed=seed + 1)
    sa, sb = scales(m, n, granularity)
    bias = torch.randn(n) if with_bias else None
    prepared = cpu.pack(w)
    assert prepared.numel() == cpu.packed_numel(n, k)
    for path in PATHS:
        if runnable(path, m):
            out = run(path, a, w.t(), sa, sb, bias, out_dtype)
            check(out, a, w.t(), sa, sb, bias)
            if path != "torch":
                assert torch.equal(out, run(path, a, w.t(), sa, sb, bias, out_dtype, prepared))


def test_same_bits_for_any_number_of_threads() -> None:
    a, w = codes(200, 300), codes(150, 300)
    sa, sb = scales(200, 150, "token-channel")
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(cpu.scaled_mm(a, w.t(), sa, sb, None, torch.float32))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_two_threads_at_once() -> None:
    problems = []
    for i, (m, n, k) in enumerate([(130, 200, 96), (3, 512, 640)]):
        a, w = codes(m, k, seed=i), codes(n, k, seed=i)
        sa, sb = scales(m, n, "token-channel")
        args = (a, w.t(), sa, sb, None, torch.float32)
        problems.append((args, cpu.scaled_mm(*args)))
    wrong: list[int] = []

    def work(i: int) -> None:
        args, want = problems[i]
        for _ in range(50):
            if not torch.equal(cpu.scaled_mm(*args), want):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_pack_is_the_documented_layout() -> None:
    w = codes(40, 70)
    packed = cpu.pack(w).view(2, 48, 32, 2)
    assert packed[1, 34, 3, 1] == w[35, 69].to(torch.bfloat16)
    assert (packed[1, :, 8:] == 0).all() and (packed[:, 35:] == 0).all()
    assert torch.equal(packed[0, 0, :, 0], w[:32, 0].to(torch.bfloat16))


def test_one_openmp_runtime() -> None:
    # A second pool of threads would spin against torch's.
    cpu.scaled_mm(
        codes(64, 64), codes(512, 64).t(), torch.ones(()), torch.ones(()), None, torch.bfloat16
    )
    maps = Path("/proc/self/maps").read_text().split()
    runtimes = {p for p in maps if p.startswith("/") and "omp" in os.path.basename(p)}
    assert len({p for p in runtimes if ".so" in p}) == 1


def test_autocast_does_not_reach_the_torch_ops() -> None:
    a, w, one = codes(4, 64), codes(8, 64), torch.tensor(0.37)
    want = cpu._with_torch_ops(a, w.t(), one, one, None, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(cpu._with_torch_ops(a, w.t(), one, one, None, torch.float32), want)


BAD = {
    "inner sizes": (dict(b=codes(16, 8)), r"\(3, 32\) by \(16, 8\)"),
    "a's dtype": (dict(a=torch.zeros(3, 32)), "float32: matrices are float8_e4m3fn"),
    "out dtype": (dict(out_dtype=torch.float64), "float64: .* result and bias are"),
    "bias dtype": (dict(bias=torch.zeros(8, dtype=torch.float64)), "float64"),
    "bias shape": (dict(bias=torch.zeros(9)), r"bias of shape \(9,\)"),
    "scale_a's shape": (dict(scale_a=torch.ones(3)), r"scale_a of shape \(3,\)"),
    "scale_b's shape": (dict(scale_b=torch.ones(8, 1)), r"scale_b of shape \(8, 1\)"),
    "scale dtype": (dict(scale_a=torch.ones((), dtype=torch.float64)), "scales are float32"),
    "prepared": (dict(prepared=torch.zeros(7, dtype=torch.bfloat16)), "prepared weight of 7"),
    "kernel": (dict(kernel="nope"), "kernel 'nope'"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_named(what: str) -> None:
    one = torch.ones(())
    good = dict(
        a=codes(3, 32),
        b=codes(8, 32).t(),
        scale_a=one,
        scale_b=one,
        bias=None,
        out_dtype=torch.bfloat16,
    )
    assert cpu.scaled_mm(**good).shape == (3, 8)  # type: ignore[arg-type]
    change, message = BAD[what]
    with pytest.raises(UnsupportedError, match=message):
        cpu.scaled_mm(**{**good, **change})  # type: ignore[arg-type]


def test_pack_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(UnsupportedError, match="float32"):
        cpu.pack(torch.zeros(2, 2))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """A process that has not loaded the library yet, with an empty cache."""
    monkeypatch.setattr(cpu, "_library", None)
    monkeypatch.setattr(cpu, "_cache_folder", lambda: tmp_path / "cache")
    yield monkeypatch


def falls_back(reason: str) -> None:
    a, w = codes(17, 63), codes(47, 63)
    sa, sb = scales(17, 47, "token-channel")
    bias = torch.randn(47)
    out = cpu.scaled_mm(a, w.t(), sa, sb, bias, torch.bfloat16, cpu.pack(w))
    check(out, a, w.t(), sa, sb, bias)
    assert not cpu.available() and cpu.kernels() == ()
    assert reason in cpu.why_unavailable() and reason in cpu.describe()
    with pytest.raises(UnsupportedError, match="fp32"):
        cpu.scaled_mm(a, w.t(), sa, sb, bias, torch.bfloat16, kernel="fp32")


def test_no_compiler(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(cpu, "_compilers", lambda: [])
    falls_back("no C++ compiler found")


def test_compiler_that_fails(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(cpu, "_compilers", lambda: ["/bin/false", "/does/not/exist"])
    falls_back("the compiler failed: /bin/false")


def test_cpu_without_avx2(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(cpu, "NEEDED_CPU_FLAGS", ("avx2", "quantum"))
    falls_back("the CPU lacks quantum")


def test_library_of_an_earlier_process_is_reused(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cpu.available(), cpu.why_unavailable()
    (built,) = (tmp_path / "cache").iterdir()
    stamp = built.stat().st_mtime_ns
    fresh.setattr(cpu, "_library", None)
    assert cpu.available()
    assert [p.stat().st_mtime_ns for p in (tmp_path / "cache").iterdir()] == [stamp]


def test_import_builds_nothing() -> None:
    code = (
        "import sys, fp8pass.kernels.cpu as c;"
        "sys.exit(c._library is not None or 'torch._inductor' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
