"""``torch_block`` and ``torch_int8`` on a Hopper GPU, against float64 with random scales."""

from __future__ import annotations

import pytest
import torch

import fp8pass.ops  # registers the operators
from fp8pass.report import reports

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="no Hopper GPU",
)

BF16 = torch.bfloat16
ROWS = (1, 3, 4, 16, 17, 64, 255, 256)


def check(kernel: str, keys: tuple[str, str], exact: torch.Tensor, *given: torch.Tensor) -> None:
    def fn(*args: torch.Tensor) -> torch.Tensor:
        a, w, sa, sb = args
        result: torch.Tensor = torch.ops.fp8pass.scaled_mm(
            a, w.t(), sa, sb.t(), None, BF16, *keys, False, None
        )
        return result

    torch._dynamo.reset()
    with torch.no_grad():
        out = torch.compile(
            fn, backend=fp8pass.fp8pass_backend, dynamic=False, options={"fp8pass.force": kernel}
        )(*given)
    (site,) = reports()[-1].select("scaled_mm")
    assert (site.status, site.kernel) == ("lowered", kernel)
    error = (out.double() - exact).abs()
    assert float(error.mean() / exact.abs().mean()) < 0.005
    assert float(error.max() / exact.abs().max()) < 0.02


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize(("n", "k"), [(256, 512), (1536, 2048)])
def test_blocks(m: int, n: int, k: int) -> None:
    g = torch.Generator("cuda").manual_seed(m)
    a = torch.randn(m, k, device="cuda", generator=g).to(torch.float8_e4m3fn)
    w = torch.randn(n, k, device="cuda", generator=g).to(torch.float8_e4m3fn)
    sa = torch.rand(m, k // 128, device="cuda", generator=g) + 0.01
    sb = torch.rand(n // 128, k // 128, device="cuda", generator=g) + 0.01
    wide_a = a.double() * sa.double().repeat_interleave(128, 1)
    wide_w = w.double() * sb.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    keys = "float8_e4m3fn/dynamic/group1x128", "float8_e4m3fn/static/group128x128"
    check("torch_block", keys, wide_a @ wide_w.t(), a, w, sa, sb)


@pytest.mark.parametrize("m", ROWS)
def test_int8(m: int) -> None:
    g = torch.Generator("cuda").manual_seed(m)
    a = torch.randint(-128, 128, (m, 512), device="cuda", generator=g).to(torch.int8)
    w = torch.randint(-128, 128, (256, 512), device="cuda", generator=g).to(torch.int8)
    sa = torch.rand(m, 1, device="cuda", generator=g) + 0.01
    sb = torch.rand(256, 1, device="cuda", generator=g) + 0.01
    exact = a.double() @ w.double().t() * sa.double() * sb.double().t()
    keys = "int8/dynamic/token", "int8/static/channel"
    check("torch_int8" if m > 16 else "triton_int8", keys, exact, a, w, sa, sb)
