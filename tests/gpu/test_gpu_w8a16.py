"""``triton_w8a16`` and ``torch_w8a16`` on a GPU, against float64, and the conversion of codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fp8pass
import fp8pass.ops  # registers the operators
from fp8pass.report import reports

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
    reason="no GPU with tensor cores for bf16",
)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
#: Decode, prefill, and odd numbers of both.
ROWS = (1, 3, 16, 17, 33, 64, 65, 129, 300, 1024)
SIZES = ((47, 63), (96, 200), (4096, 4096), (1536, 8960))
#: Ways of the conversion: by the hardware, where it can, and by the bits.
WAYS = (False, True)


def ways() -> tuple[bool, ...]:
    return WAYS if torch.cuda.get_device_capability() >= (8, 9) else WAYS[:1]


def made(m: int, n: int, k: int, kind: str, dtype: Any, codes: Any = E4) -> tuple[Any, ...]:
    g = torch.Generator("cuda").manual_seed(m * 7919 + n)
    a = torch.randn(m, k, device="cuda", generator=g).to(dtype)
    w = (torch.randn(n, k, device="cuda", generator=g) * 16).to(codes)
    sizes: tuple[int, ...] = {"tensor": (), "channel": (1, n)}.get(
        kind, (-(-k // 128), -(-n // 128))
    )
    scale = torch.rand(sizes, device="cuda", generator=g) * 0.02 + 0.001
    return a, w.t(), scale, f"{str(codes).removeprefix('torch.')}/static/{kind}"


def exact(a: Any, b: Any, scale: Any, bias: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in float64 and the sum of magnitudes."""
    wide = scale.double()
    if wide.dim() and wide.shape[0] != 1 or wide.numel() > 1 and wide.shape[1] != b.shape[1]:
        wide = wide.repeat_interleave(128, 0)[: b.shape[0]]
        wide = wide.repeat_interleave(128, 1)[:, : b.shape[1]]
    weight = b.double() * wide
    out, size = a.double() @ weight, a.double().abs() @ weight.abs()
    if bias is not None:
        out, size = out + bias.double(), size + bias.double().abs()
    return out, size


def close(result: torch.Tensor, out: torch.Tensor, size: torch.Tensor, roundings: int = 1) -> None:
    """2 ulp and 2^-10 of the sum of magnitudes; more for a source that rounds in between."""
    ulp = out.abs() * torch.finfo(result.dtype).eps
    error = (result.double() - out).abs()
    assert bool((error <= 2 * roundings * ulp + size * roundings * 2.0**-9).all())
    assert float(error.mean() / out.abs().mean().clamp_min(1e-30)) < 0.005 * roundings


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("kind", ["tensor", "channel", "group128x128"])
def test_one_rounding(m: int, n: int, k: int, kind: str) -> None:
    from fp8pass.kernels.triton_w8a16 import w8a16_mm

    for dtype, biased, hardware in ((BF16, False, False), (F16, True, False), (BF16, True, True)):
        if hardware not in ways():
            continue
        a, b, scale, key = made(m, n, k, kind, dtype)
        bias = torch.linspace(-1, 1, n, device="cuda").to(dtype) if biased else None
        result = w8a16_mm(a, b, scale, bias, dtype, key, hardware=hardware)
        assert result.shape == (m, n) and result.is_contiguous()
        close(result, *exact(a, b, scale, bias))


@pytest.mark.parametrize("m", [1, 17, 65, 300])
@pytest.mark.parametrize("kind", ["tensor", "channel", "group128x128"])
@pytest.mark.parametrize(
    "form",
    [
        "weight,bfloat16,bfloat16,inside",
        "weight,float32,bfloat16,after",
        "product,bfloat16,bfloat16,after",
        "weight,float32,float32,inside",
    ],
)
def test_forms(m: int, kind: str, form: str) -> None:
    """With the roundings of the source: as its reference, up to the order of the sum."""
    from fp8pass.kernels.triton_w8a16 import w8a16_mm

    a, b, scale, key = made(m, 192, 384, kind, BF16)
    bias = torch.linspace(-1, 1, 192, device="cuda").to(BF16)
    for hardware in ways():
        result = w8a16_mm(a, b, scale, bias, BF16, key, form, hardware=hardware)
        close(result, *exact(a, b, scale, bias), roundings=2)


@pytest.mark.parametrize("codes", [E4, E5])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_all_256_codes(codes: Any, dtype: Any) -> None:
    """A product with a one picks a code: subnormals, NaN and infinities arrive as they are."""
    from fp8pass.kernels.triton_w8a16 import w8a16_mm

    w = torch.arange(256, dtype=torch.uint8, device="cuda").view(codes).reshape(256, 1)
    key = f"{str(codes).removeprefix('torch.')}/static/tensor"
    one, scale = torch.ones(1, 1, dtype=dtype, device="cuda"), torch.ones((), device="cuda")
    for hardware in ways():
        out = w8a16_mm(one, w.t(), scale, None, F32, key, hardware=hardware)
        wanted = w.float().t()
        assert torch.equal(out.nan_to_num(7e9, 8e9, 9e9), wanted.nan_to_num(7e9, 8e9, 9e9))


@pytest.mark.parametrize("m", [0, 1, 17, 300])
def test_integers_are_exact(m: int) -> None:
    """Sums of integers are exact in any order: both ways of converting give the same bits."""
    from fp8pass.kernels.triton_w8a16 import w8a16_mm
    from fp8pass.ops.weight_only import weight_only_product

    g = torch.Generator("cuda").manual_seed(m)
    a = torch.randint(-4, 5, (m, 256), device="cuda", generator=g).to(BF16)
    b = torch.randint(-4, 5, (96, 256), device="cuda", generator=g).float().to(E4).t()
    scale = torch.full((1, 96), 0.25, device="cuda")
    key = "float8_e4m3fn/static/channel"
    wanted = weight_only_product(a, b, scale, None, BF16, key)
    for hardware in ways():
        assert torch.equal(w8a16_mm(a, b, scale, None, BF16, key, hardware=hardware), wanted)


@pytest.mark.parametrize("kernel", ["triton_w8a16", "torch_w8a16"])
@pytest.mark.parametrize("m", [1, 17, 300])
def test_products_of_codes_made_weight_only(kernel: str, m: int) -> None:
    """On request the activations are not quantised: the compiled result is that of the weights."""
    a, b, scale, _ = made(m, 256, 512, "channel", BF16)
    weight = b.t()

    def fn(x: torch.Tensor) -> torch.Tensor:
        own = (x.float().abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-12)
        q = (x.float() / own).clamp(-448.0, 448.0).to(E4)
        return torch._scaled_mm(q, weight.t(), own, scale, out_dtype=BF16)

    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(
            fn, backend=fp8pass.fp8pass_backend, options={"fp8pass.force": kernel}, dynamic=False
        )
        result = compiled(a)
    (site,) = reports()[-1].select("scaled_mm")
    assert (site.status, site.kernel) == ("lowered", kernel)
    close(result, *exact(a, b, scale, None))


@pytest.mark.parametrize("kernel", ["triton_w8a16", "torch_w8a16"])
def test_a_product_that_the_model_wrote(kernel: str) -> None:
    a, b, scale, _ = made(5, 256, 512, "channel", BF16)
    weight, bias = b.t(), torch.linspace(-1, 1, 256, device="cuda").to(BF16)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, (weight.float() * scale.t()).to(BF16), bias)

    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(
            fn, backend=fp8pass.fp8pass_backend, options={"fp8pass.prefer": kernel}, dynamic=False
        )
        result = compiled(a)
    (site,) = reports()[-1].select("scaled_mm")
    assert (site.status, site.kernel) == ("lowered", kernel)
    close(result, *exact(a, b, scale, bias), roundings=2)
