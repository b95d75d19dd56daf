"""How other libraries are called: by stand-ins that hold to their rules, on a CPU.

Each stand-in checks what the real function does (layouts, dtypes, shapes, arguments) and computes
the product from the codes and the scales that it was given, so that a scale in a wrong place shows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from lowering_sites import operands, problem

from fp8pass import target as targets
from fp8pass.errors import UnsupportedError
from fp8pass.lowerings import (
    consider,
    deepgemm,
    emit,
    external,
    find,
    flashinfer,
    vllm_block,
    vllm_int8,
)
from fp8pass.ops.linear import scaled_product
from fp8pass.problem import ScaledMMProblem
from fp8pass.reasons import YES
from fp8pass.target import Target

BF16, F16 = torch.bfloat16, torch.float16
FP8 = torch.float8_e4m3fn
BLOCKS = ("group1x128", "group128x128")
TENSOR = ("tensor", "tensor")
ROWS = (0, 1, 3, 4, 17)


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> Iterator[None]:
    external.function.cache_clear()
    yield
    external.function.cache_clear()


def module(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    made = ModuleType(name)
    made.__dict__.update(functions)
    if "." in name:
        parent = name.partition(".")[0]
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, made)


def blocks(a: Any, w: Any, sa: Any, sb: Any) -> torch.Tensor:
    """From ``w [N, K]`` and ``sb [N / 128, K / 128]``, both row-major in meaning."""
    keys = "float8_e4m3fn/dynamic/group1x128", "float8_e4m3fn/static/group128x128"
    return scaled_product(a, w.t(), sa, sb.t(), None, torch.float32, *keys, "")


def given(p: ScaledMMProblem, m: int) -> tuple[Any, ...]:
    values = operands(p, m, "cpu", seed=m + 1)
    return tuple(values[name] for name in ("a", "b", "scale_a", "scale_b"))


def exact(p: ScaledMMProblem, args: tuple[Any, ...]) -> torch.Tensor:
    return scaled_product(*args, None, p.out_dtype, str(p.activation), str(p.weight), "")


# ---- vLLM ---------------------------------------------------------------------------------------


def cutlass(out: Any, a: Any, b: Any, sa: Any, sb: Any, bias: Any) -> None:
    (m, k), n = a.shape, b.shape[1]
    assert a.stride(1) == 1 and b.stride(0) == 1 and out.stride() == (n, 1)
    assert not out.stride(0) % 16 and not b.stride(1) % 16
    assert bias is None and out.dtype in (BF16, F16)
    assert sa.shape == (m, k // 128) and sb.shape == (k // 128, n // 128)
    assert sa.stride(0) == 1 and sb.stride(0) == 1, "rows and K innermost"
    assert sa.stride(1) == m and sb.stride(1) == k // 128, "without padding"
    out.copy_(blocks(a, b.t(), sa, sb.t()))


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("out_dtype", [BF16, F16])
def test_vllm_blocks(hopper: bool, out_dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def operator(out: Any, a: Any, *rest: Any) -> None:
        seen.append(a.shape[0])
        cutlass(out, a, *rest)

    monkeypatch.setattr(vllm_block, "vllm_operator", lambda name: operator)
    monkeypatch.setattr(vllm_block, "on_hopper", lambda device: hopper)
    p = problem(*BLOCKS, k=256, n=384, out_dtype=out_dtype)
    for m in ROWS:
        args = given(p, m)
        for sa in (args[2], args[2].t().contiguous().t()):
            out = vllm_block.run_operator(args[0], args[1], sa, args[3], None, out_dtype)
            assert out.stride() == (384, 1) and out.dtype is out_dtype
            # more rows are summed in another order
            torch.testing.assert_close(out, exact(p, args), rtol=2**-7, atol=1e-5)
    rows = [m for m in ROWS if m]
    assert seen[::2] == [-(-m // 4) * 4 if hopper else m for m in rows]


def azp(out: Any, a: Any, b: Any, sa: Any, sb: Any, adjustment: Any, zero: Any, bias: Any) -> None:
    m, n = out.shape
    assert adjustment.shape == (n,) and adjustment.dtype == torch.int32
    assert zero is None or (zero.shape == (m,) and zero.dtype == torch.int32)
    assert adjustment.is_contiguous() and (zero is None or zero.is_contiguous())
    off = adjustment if zero is None else adjustment * zero[:, None]
    total = (a.double() @ b.double()).to(torch.int32) - off
    out.copy_(total.float() * sa * sb + (0 if bias is None else bias.float()))


@pytest.mark.parametrize("each", [False, True])
def test_vllm_zero_points(each: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_int8, "vllm_operator", lambda name: azp)
    p = problem("token", "channel", dtypes=(torch.int8, torch.int8))
    for m in ROWS:
        a, b, sa, sb = given(p, m)
        zero = torch.arange(m, dtype=torch.int32)[:, None] - 9 if each else torch.tensor(-7)
        sums = b.sum(0, keepdim=True, dtype=torch.int32)
        out = vllm_int8.run_operator(a, b, sa, sb, None, BF16, zero.to(torch.int32), sums)
        keys = "int8/dynamic/token/asym", "int8/static/channel"
        wanted = scaled_product(a, b, sa, sb, None, BF16, *keys, "none,ab,int32", zero)
        assert torch.equal(out, wanted)


def test_vllm_is_not_loaded() -> None:
    p = problem(*BLOCKS, k=256, n=384)
    if hasattr(torch.ops._C, "cutlass_scaled_mm"):
        pytest.skip("vLLM's library is loaded")
    with pytest.raises(UnsupportedError, match=r"import vllm._custom_ops.*cutlass_scaled_mm"):
        vllm_block.run_operator(*given(p, 3), None, BF16)
    pair = problem("token", "channel", dtypes=(torch.int8, torch.int8))
    run = find("vllm_cutlass_int8").run
    assert run is not None
    with pytest.raises(UnsupportedError, match="vLLM"):
        run(*given(pair, 3), None, BF16, False)


# ---- DeepGEMM -----------------------------------------------------------------------------------


def fp8_gemm_nt(left: Any, right: Any, out: Any, *, disable_ue8m0_cast: bool) -> None:
    (a, sa), (w, sb) = left, right
    assert disable_ue8m0_cast and out.dtype == BF16
    assert a.stride(1) == 1 and w.stride(1) == 1
    assert sa.dtype == sb.dtype == torch.float32
    assert sa.shape == (a.shape[0], a.shape[1] // 128)
    assert sb.shape == (-(-w.shape[0] // 128), w.shape[1] // 128) and sb.is_contiguous()
    out.copy_(blocks(a, w, sa, sb))


@pytest.mark.parametrize("name", ["deep_gemm", "vllm.third_party.deep_gemm"])
def test_deepgemm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name != "deep_gemm":
        monkeypatch.setitem(sys.modules, "deep_gemm", None)
    module(monkeypatch, name, fp8_gemm_nt=fp8_gemm_nt)
    run = find("deepgemm_block").run
    assert run is not None
    for packed in (True, False):
        p = problem(*BLOCKS, k=256, n=192, packed=packed)
        for m in ROWS:
            args = given(p, m)
            assert torch.equal(run(*args, None, BF16, False), exact(p, args))


def test_a_library_that_is_absent_old_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    args = given(problem(*BLOCKS, k=256, n=192), 3)
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    monkeypatch.setitem(sys.modules, "vllm.third_party.deep_gemm", None)
    with pytest.raises(UnsupportedError, match="deep_gemm, which cannot be imported"):
        deepgemm.run_library(*args, None, BF16)
    external.function.cache_clear()
    module(monkeypatch, "deep_gemm", gemm_fp8_fp8_bf16_nt=fp8_gemm_nt)
    with pytest.raises(UnsupportedError, match="fp8_gemm_nt, which the installed version"):
        deepgemm.run_library(*args, None, BF16)
    with pytest.raises(UnsupportedError, match="bias"):
        deepgemm.run_library(*args, torch.ones(192), BF16)
    assert deepgemm.run_library(*given(problem(*BLOCKS, k=256, n=192), 0), None, BF16).shape == (
        0, 192,
    )  # fmt: skip


def test_versions_that_are_known_to_be_old() -> None:
    p = problem(*BLOCKS, k=256, n=192, target=Target.parse("sm90"))
    for version, ok in (("", True), ("2.1.0", True), ("2", True), ("1.0.0", False)):
        target = Target.parse("sm90")
        libraries = (("deepgemm", version),)
        target = Target(target.kind, target.arch, target.fp8_dtype, 132, libraries, target.runtime)
        verdict = consider(find("deepgemm_block"), target, p)
        assert bool(verdict) is ok
        if not ok:
            assert verdict.code == "FP8-L011"
            assert "deepgemm 2 or newer" in verdict.message and "1.0.0" in verdict.message
        else:
            assert verdict == YES


# ---- FlashInfer ---------------------------------------------------------------------------------


def bmm_fp8(a: Any, b: Any, sa: Any, sb: Any, dtype: Any, out: Any, *, backend: str) -> None:
    assert backend == "cublas" and sa.shape == sb.shape == (1,)
    assert a.is_contiguous() and b.transpose(1, 2).is_contiguous() and out.is_contiguous()
    assert out.dtype == dtype
    out.copy_(a.float() @ b.float() * sa * sb)


def test_flashinfer_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    module(monkeypatch, "flashinfer", bmm_fp8=bmm_fp8)
    run = find("flashinfer_tensor").run
    assert run is not None
    for packed, out_dtype, rank in ((True, BF16, 2), (False, F16, 0)):
        p = problem(*TENSOR, packed=packed, out_dtype=out_dtype)
        for m in ROWS:
            a, b, sa, sb = given(p, m)
            scales = (sa, sb) if rank == 2 else (sa.reshape(()), sb.reshape(()))
            out = run(a, b, *scales, None, out_dtype, True)
            assert torch.equal(out, exact(p, (a, b, sa, sb)))
    with pytest.raises(UnsupportedError, match="bias"):
        run(a, b, sa, sb, torch.ones(48), BF16, True)


def blockscale(a: Any, w: Any, sa: Any, sb: Any, out: Any) -> None:
    assert a.is_contiguous() and w.is_contiguous() and sa.is_contiguous() and sb.is_contiguous()
    assert sa.shape == (a.shape[0], a.shape[1] // 128)
    out.copy_(blocks(a, w, sa, sb))


def test_flashinfer_block(monkeypatch: pytest.MonkeyPatch) -> None:
    module(monkeypatch, "flashinfer.gemm", fp8_blockscale_gemm_sm90=blockscale)
    p = problem(*BLOCKS, k=256, n=128)
    for m in ROWS:
        args = given(p, m)
        assert torch.equal(flashinfer.run_block(*args, None, BF16), exact(p, args))


# ---- what is installed --------------------------------------------------------------------------


def test_installed_libraries_are_found_without_importing_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    for name in ("deep_gemm", "flashinfer"):
        package = tmp_path / name
        package.mkdir()
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
    info = tmp_path / "flashinfer_python-0.6.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.6.1")
    targets._installed_libraries.cache_clear()
    assert targets._installed_libraries() == ()
    monkeypatch.syspath_prepend(tmp_path)
    targets._installed_libraries.cache_clear()
    try:
        assert targets._installed_libraries() == (("deepgemm", ""), ("flashinfer", "0.6.1"))
    finally:
        targets._installed_libraries.cache_clear()
    assert "flashinfer" not in sys.modules


def test_helpers() -> None:
    matrix = torch.arange(6.0).reshape(3, 2)
    padded = emit.padded_rows(matrix, 4, 9.0)
    assert torch.equal(padded[:3], matrix) and padded[3].tolist() == [9.0, 9.0]
    assert emit.padded_rows(matrix, 3) is matrix
    for rows, columns in ((1, 4), (3, 2), (5, 1)):
        made = emit.rows_innermost(torch.rand(rows, columns))
        assert made.stride() == (1, rows)
