"""INT8 with a zero point on a GPU: compiled spellings against float64, and torch's product."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
    reason="no GPU with INT8 tensor cores",
)

BF16, I8, I32 = torch.bfloat16, torch.int8, torch.int32
K, N = 512, 256
Tensor = torch.Tensor


class Linear(torch.nn.Module):
    """A norm and two linears of its output: per token, with a zero point."""

    def __init__(self, how: str) -> None:
        super().__init__()
        g = torch.Generator("cuda").manual_seed(1)
        self.how = how
        self.norm = torch.nn.RMSNorm(K, eps=1e-6, dtype=BF16, device="cuda")
        for i in range(2):
            codes = torch.randint(-128, 128, (N, K), device="cuda", generator=g).to(I8)
            self.register_buffer(f"w{i}", codes)
            scale = torch.rand(1, N, device="cuda", generator=g) * 0.01 + 1e-3
            self.register_buffer(f"s{i}", scale)

    def quantised(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = y.float()
        low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
        scale = ((high - low) / 255).clamp(min=1e-7)
        zero = torch.round(-128 - low / scale).clamp(-128, 127).to(I32)
        return (torch.round(wide / scale) + zero).clamp(-128, 127).to(I8), scale, zero

    def product(self, q: Tensor, s: Tensor, z: Tensor, w: Tensor, sw: Tensor) -> Tensor:
        if self.how == "codes":
            return (torch.mm(q.float() - z, w.float().t()) * s * sw).to(BF16)
        total = torch._int_mm(q, w.t())
        if self.how == "float32":
            return ((total.float() - z.float() * w.float().sum(1)) * s * sw).to(BF16)
        return ((total - z * w.sum(1, dtype=I32)).float() * s * sw).to(BF16)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        q, s, z = self.quantised(self.norm(x) + 0.5)
        outs = tuple(
            self.product(q, s, z, getattr(self, f"w{i}"), getattr(self, f"s{i}")) for i in range(2)
        )
        return q, s, z, *outs


@pytest.mark.parametrize("m", [17, 32, 255, 1024])
@pytest.mark.parametrize("how", ["int32", "float32", "codes"])
def test_compiled(how: str, m: int) -> None:
    import fp8pass
    from fp8pass.report import reports

    model: Any = Linear(how)
    x = torch.randn(m, K, device="cuda", generator=torch.Generator("cuda").manual_seed(m))
    x = x.to(BF16)
    torch._dynamo.reset()
    with torch.no_grad():
        q, s, z, *outs = torch.compile(model, backend="fp8pass")(x)
    assert fp8pass.__version__
    sites = reports()[-1].select("scaled_mm")
    assert [site.kernel for site in sites] == ["torch_int8"] * 2
    assert all("/asym" in site.key for site in sites)
    for i, out in enumerate(outs):
        w, sw = getattr(model, f"w{i}").double(), getattr(model, f"s{i}").double()
        less = q.double() - z
        wanted = (less @ w.t()) * s.double() * sw
        size = (less.abs() @ w.abs().t()) * s.double() * sw
        limit = 2 * torch.finfo(BF16).eps * wanted.abs() + 2.0**-10 * size
        assert bool(((out.double() - wanted).abs() <= limit).all())
        wrong = ((less + 1) @ w.t()) * s.double() * sw
        assert not bool(((out.double() - wrong).abs() <= limit).all())


@pytest.mark.parametrize("m", [1, 16])
def test_few_rows_take_the_product_of_floats(m: int) -> None:
    """``torch._int_mm`` wants more than 16 rows on CUDA; fewer have another kernel."""
    from fp8pass.report import reports

    class Alone(Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            q, s, z = self.quantised(self.norm(x) + 0.5)
            return q, s, z, (torch.mm(q.float() - z, self.w0.float().t()) * s * self.s0).to(BF16)

    model = Alone("codes")
    x = torch.randn(m, K, device="cuda", generator=torch.Generator("cuda").manual_seed(m))
    torch._dynamo.reset()
    with torch.no_grad():
        q, s, z, out = torch.compile(model, backend="fp8pass")(x.to(BF16))
    (site,) = reports()[-1].select("scaled_mm")
    assert site.kernel == "torch_dequant"
    w, sw = model.w0.double(), model.s0.double()
    less = q.double() - z
    wanted, size = (less @ w.t()) * s * sw, (less.abs() @ w.abs().t()) * s * sw
    limit = 2 * torch.finfo(BF16).eps * wanted.abs() + 2.0**-10 * size
    assert bool(((out.double() - wanted).abs() <= limit).all())
