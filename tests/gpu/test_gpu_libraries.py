"""Kernels of other libraries on a GPU, each only where its library is there, against float64.

vLLM's compiled libraries are loaded from the folder that FP8PASS_TEST_VLLM_LIBS names, if it does
(``_C_stable_libtorch.abi3.so`` of its wheel is enough). DeepGEMM and FlashInfer: if installed.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

import fp8pass
from fp8pass.lowerings import find
from fp8pass.lowerings.self_check import disabled, forget
from fp8pass.report import reports

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="no Hopper GPU",
)

FP8, I8 = torch.float8_e4m3fn, torch.int8
BF16, F16 = torch.bfloat16, torch.float16
ROWS = (0, 1, 3, 4, 16, 17, 64, 250, 1024)
Operands = tuple[torch.Tensor, ...]
KEYS = "float8_e4m3fn/dynamic/group1x128", "float8_e4m3fn/static/group128x128"


@pytest.fixture(scope="module", autouse=True)
def _libraries() -> None:
    folder = os.environ.get("FP8PASS_TEST_VLLM_LIBS")
    if folder and not hasattr(torch.ops._C, "cutlass_scaled_mm"):
        torch.ops.load_library(str(Path(folder) / "_C_stable_libtorch.abi3.so"))


def needs(library: str) -> None:
    there = (
        hasattr(torch.ops._C, "cutlass_scaled_mm")
        if library == "vllm"
        else importlib.util.find_spec(library) is not None
    )
    if not there:
        pytest.skip(f"{library} is not there")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(*shape, device="cuda", generator=generator)


def blocks(m: int, n: int, k: int) -> tuple[Operands, torch.Tensor, torch.Tensor]:
    """Operands, the product in float64 and the sum of magnitudes."""
    a, w = ((randn(rows, k) * 16).to(FP8) for rows in (m, n))
    sa = randn(m, k // 128, seed=1).abs() * 0.01 + 1e-3
    sb = randn(n // 128, k // 128, seed=2).abs() * 0.01 + 1e-3
    wide_a = a.double() * sa.double().repeat_interleave(128, 1)
    wide_w = w.double() * sb.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (a, w.t(), sa, sb.t()), wide_a @ wide_w.t(), wide_a.abs() @ wide_w.abs().t()


def plain(
    m: int, n: int, k: int, dtype: torch.dtype, rows: bool
) -> tuple[Operands, torch.Tensor, torch.Tensor]:
    size = 40.0 if dtype is I8 else 16.0
    a, w = ((randn(r, k) * size).clamp(-127, 127).to(dtype) for r in (m, n))
    sa = randn(*((m, 1) if rows else (1, 1)), seed=1).abs() * 0.01 + 1e-3
    sb = randn(*((1, n) if rows else (1, 1)), seed=2).abs() * 0.01 + 1e-3
    exact = a.double() @ w.double().t() * sa.double() * sb.double()
    return (a, w.t(), sa, sb), exact, a.double().abs() @ w.double().abs().t() * sa * sb


def close(out: torch.Tensor, exact: torch.Tensor, size: torch.Tensor, bits: int = 10) -> None:
    assert out.shape == exact.shape and out.is_contiguous()
    if out.numel():
        error = (out.double() - exact).abs()
        allowed = 2 * torch.finfo(out.dtype).eps * exact.abs() + size * 2.0**-bits
        assert bool((error <= allowed).all()), float((error / allowed.clamp_min(1e-30)).max())
        assert float(error.mean() / exact.abs().mean().clamp_min(1e-30)) < 0.005


def run(name: str, *args: object) -> torch.Tensor:
    call = find(name).run
    assert call is not None
    return call(*args)  # type: ignore[arg-type]


@pytest.mark.parametrize("out_dtype", [BF16, F16])
@pytest.mark.parametrize(("n", "k"), [(256, 256), (512, 2048), (4096, 4096), (128, 16384)])
def test_vllm_blocks(n: int, k: int, out_dtype: torch.dtype) -> None:
    needs("vllm")
    for m in ROWS:
        args, exact, size = blocks(m, n, k)
        close(run("vllm_cutlass_block", *args, None, out_dtype, False), exact, size)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(("n", "k"), [(48, 32), (512, 2048), (4096, 4096)])
def test_vllm_int8(n: int, k: int, rows: bool) -> None:
    needs("vllm")
    for m in ROWS:
        args, exact, size = plain(m, n, k, I8, rows)
        for bias in (None, randn(n).to(BF16)):
            right = exact if bias is None else exact + bias.double()
            more = size if bias is None else size + bias.double().abs()
            close(run("vllm_cutlass_int8", *args, bias, BF16, False), right, more, bits=20)


@pytest.mark.parametrize(("n", "k"), [(256, 256), (4096, 4096)])
def test_deepgemm(n: int, k: int) -> None:
    needs("deep_gemm")
    for m in ROWS:
        args, exact, size = blocks(m, n, k)
        close(run("deepgemm_block", *args, None, BF16, False), exact, size)


@pytest.mark.parametrize(("n", "k"), [(48, 32), (4096, 4096)])
def test_flashinfer_tensor(n: int, k: int) -> None:
    needs("flashinfer")
    for m in ROWS:
        args, exact, size = plain(m, n, k, FP8, False)
        close(run("flashinfer_tensor", *args, None, BF16, True), exact, size, bits=6)


@pytest.mark.parametrize("dynamic", [False, True])
def test_self_check(dynamic: bool) -> None:
    """What stands in a compiled graph is compared on its first call, and believed or not."""
    needs("vllm")

    def fn(a: torch.Tensor, w: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.fp8pass.scaled_mm(
            a, w.t(), sa, sb.t(), None, BF16, *KEYS, False, None
        )
        return result

    args, exact, size = blocks(17, 512, 1024)
    given = args[0], args[1].t(), args[2], args[3].t()
    forget()
    torch._dynamo.reset()
    if dynamic:
        torch._dynamo.mark_dynamic(given[0], 0)
        torch._dynamo.mark_dynamic(given[2], 0)
    options = {"fp8pass.prefer": "vllm_cutlass_block", "fp8pass.self_check": True}
    with torch.no_grad():
        out = torch.compile(fn, backend=fp8pass.fp8pass_backend, options=options)(*given)
    (site,) = reports()[-1].select("scaled_mm")
    assert (site.status, site.kernel) == ("lowered", "vllm_cutlass_block")
    close(out, exact, size)
    assert not disabled()
