"""vLLM's Marlin product on a GPU, where its library is there, against float64.

FP8PASS_TEST_VLLM_LIBS names the folder of vLLM's compiled libraries, as for
tests/gpu/test_gpu_vllm_producers.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fp8pass.lowerings import vllm_marlin

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
    reason="no GPU that Marlin is for",
)

BF16, F16, E4 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
ROWS = (0, 1, 3, 16, 17, 64, 250, 1024)


@pytest.fixture(scope="module", autouse=True)
def _libraries() -> None:
    folder = os.environ.get("FP8PASS_TEST_VLLM_LIBS")
    if folder and not hasattr(torch.ops._C, "marlin_gemm"):
        for name in ("_C.abi3.so", "_C_stable_libtorch.abi3.so"):
            if (Path(folder) / name).exists():
                torch.ops.load_library(str(Path(folder) / name))
    if not hasattr(torch.ops._C, "marlin_gemm"):
        pytest.skip("set FP8PASS_TEST_VLLM_LIBS to the folder of vLLM's compiled libraries")


def randn(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("weight", ["tensor", "channel", "group128x128"])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (128, 192), (512, 2048), (4096, 4096)])
def test_product(n: int, k: int, weight: str, dtype: torch.dtype) -> None:
    blocks = weight.startswith("group")
    if blocks and k % 128:
        pytest.skip("no whole blocks")
    w = (randn(n, k, seed=1) * 60).clamp(-448, 448).to(E4)
    sizes = {"tensor": (1,), "channel": (1, n)}.get(weight, (k // 128, -(-n // 128)))
    scale = randn(*sizes, seed=2).abs() * 0.01 + 1e-3
    wide = scale.double()
    if blocks:
        wide = wide.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :n]
    name = str(dtype).removeprefix("torch.")
    form = f"weight,{name},{name},after"
    for m in ROWS:
        a = randn(m, k, seed=3).to(dtype)
        out = vllm_marlin.w8a16_mm(
            a, w.t(), scale, None, dtype, f"float8_e4m3fn/static/{weight}", form
        )
        exact = a.double() @ (w.t().double() * wide)
        size = a.double().abs() @ (w.t().double().abs() * wide)
        assert out.shape == exact.shape and out.is_contiguous()
        if m:
            error = (out.double() - exact).abs()
            bits = 8 if blocks else 10  # a scaled weight is rounded
            allowed = 2 * torch.finfo(dtype).eps * exact.abs() + size * 2.0**-bits
            assert bool((error <= allowed).all())
            assert float(error.mean() / exact.abs().mean()) < 0.005
