"""The weight-only Triton product in Triton's interpreter, against its reference."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from fp8pass.errors import UnsupportedError
from fp8pass.kernels.triton_w8a16_limits import why_not_w8a16
from fp8pass.ops.weight_only import weight_only_product

triton_w8a16: ModuleType


@pytest.fixture(scope="module", autouse=True)
def _interpreted_kernels(interpreted: Callable[[str], ModuleType]) -> None:
    global triton_w8a16
    triton_w8a16 = interpreted("w8a16")


E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FORMS = (
    "",
    "weight,float32,float32,inside",
    "weight,{},{},inside",
    "weight,float32,{},after",
    "product,{},{},after",
    "product,float32,{},inside",
)


def made(
    m: int, n: int, k: int, kind: str, dtype: torch.dtype = BF16, codes: torch.dtype = E4
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, str]:
    g = torch.Generator().manual_seed(m * 7919 + n * 31 + k)
    a = torch.randn(m, k + 3, generator=g).to(dtype)[:, :k]
    w = (torch.randn(n, k, generator=g) * 4).to(codes)
    sizes: tuple[int, ...] = {"tensor": (), "channel": (1, n)}.get(kind, ())
    if kind.startswith("group"):
        rows, cols = map(int, kind[5:].split("x"))
        sizes = (-(-k // rows), -(-n // cols))
    scale = torch.rand(sizes, generator=g) + 0.01
    return a, w.t(), scale, f"{str(codes).removeprefix('torch.')}/static/{kind}"


def check(out: torch.Tensor, *args: object) -> None:
    """The same roundings, up to the order of a float32 sum, which may turn any of them."""
    a, b, scale, bias, out_dtype, key, form = args
    expected = weight_only_product(*args)  # type: ignore[arg-type]
    assert out.dtype is out_dtype and out.shape == expected.shape and out.is_contiguous()
    if not out.numel():
        return
    narrow = max(torch.finfo(d).eps for d in _dtypes(args))
    # an intermediate rounding is relative to the product or to the bias, not to their sum
    whole = weight_only_product(a, b, scale, None, F32, key).abs()  # type: ignore[arg-type]
    whole = whole if bias is None else whole + bias.float().abs()  # type: ignore[attr-defined]
    sizes = b.float().abs().to(b.dtype)  # type: ignore[attr-defined]
    summands = weight_only_product(a.abs(), sizes, scale, None, F32, key)  # type: ignore[attr-defined, arg-type]
    allowed = 2 * narrow * whole + 2.0**-18 * summands
    assert bool(((out.float() - expected.float()).abs() <= allowed).all())
    if narrow > torch.finfo(F32).eps and out.numel() > 200:
        assert float((out.float() != expected.float()).float().mean()) < 0.05


def _dtypes(args: tuple[object, ...]) -> set[torch.dtype]:
    form = str(args[6])
    found = {args[4], *(d for d in (BF16, F16) if str(d).removeprefix("torch.") in form)}
    return {d for d in found if isinstance(d, torch.dtype)}


@settings(max_examples=30, deadline=None)
@given(
    m=st.sampled_from((0, 1, 3, 17, 65)),
    n=st.sampled_from((1, 16, 47, 80)),
    k=st.sampled_from((16, 63, 128, 300)),
    kind=st.sampled_from(("tensor", "channel", "group128x128", "group64x32")),
    dtype=st.sampled_from((BF16, F16)),
    codes=st.sampled_from((E4, E5)),
    bias=st.booleans(),
    out_dtype=st.sampled_from((None, F32)),
    form=st.sampled_from(FORMS),
)
def test_numbers(m, n, k, kind, dtype, codes, bias, out_dtype, form) -> None:  # type: ignore[no-untyped-def]
    a, b, scale, key = made(m, n, k, kind, dtype, codes)
    name = str(dtype).removeprefix("torch.")
    form = form.format(*[name] * 2)
    vector = torch.linspace(-9, 9, n).to(dtype) if bias else None
    args = (a, b, scale, vector, out_dtype or dtype, key, form)
    check(triton_w8a16.w8a16_mm(*args), *args)


@pytest.mark.parametrize("codes", [E4, E5])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_all_256_codes(codes: torch.dtype, dtype: torch.dtype) -> None:
    """A product with a one picks a code: subnormals, NaN and infinities arrive as they are."""
    every = torch.arange(256, dtype=torch.uint8).view(codes)
    for i in range(0, 256, 16):
        w = every[i : i + 16].reshape(16, 1)
        a = torch.ones(1, 1, dtype=dtype)
        out = triton_w8a16.w8a16_mm(
            a, w.t(), torch.tensor(1.0), None, F32, f"{str(codes)[6:]}/static/tensor"
        )
        wanted = w.float().t()
        assert torch.equal(out.nan_to_num(7e9, 8e9, 9e9), wanted.nan_to_num(7e9, 8e9, 9e9))


def test_integers_agree_bit_for_bit() -> None:
    """Sums of integers are exact in any order, so that nothing may differ."""
    g = torch.Generator().manual_seed(0)
    a = torch.randint(-4, 5, (5, 256), generator=g).to(BF16)
    b = torch.randint(-4, 5, (48, 256), generator=g).float().to(E4).t()
    bias = torch.randint(-9, 9, (48,), generator=g).to(BF16)
    for kind in ("tensor", "channel"):
        scale, key = made(5, 48, 256, kind)[2:]
        for form in ("", "product,bfloat16,bfloat16,after", "product,float32,bfloat16,inside"):
            args = (a, b, scale, bias, BF16, key, form)
            assert torch.equal(triton_w8a16.w8a16_mm(*args), weight_only_product(*args))


@pytest.mark.parametrize(
    "change",
    [
        lambda a, b, s: (a.t().contiguous().t(), b, s),
        lambda a, b, s: (a, b.contiguous(), s),
        lambda a, b, s: (a[:1].expand(5, -1), b, s),
        lambda a, b, s: (a, b, s.repeat(1, 2)[:, ::2]),
    ],
    ids=["a by columns", "b by rows", "a repeated", "strided scales"],
)
def test_layouts(change: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    a, b, scale, key = made(5, 48, 128, "channel")
    args = (*change(a, b, scale), None, F32, key, "")
    check(triton_w8a16.w8a16_mm(*args), *args)


def test_what_does_not_fit_together() -> None:
    a, b, scale, key = made(5, 48, 128, "channel")
    for wrong, message in (
        ((a[:, :96], b, scale, None), "depths 96 and 128"),
        ((a, b, scale[:, :7], None), "channel scale of shape"),
        ((a, b, scale, torch.ones(1)), "bias of shape"),
        ((a.float(), b, scale, None), "activations of torch.float32"),
        ((b.t()[:5], b, scale, None), "activations of torch.float8_e4m3fn"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            triton_w8a16.w8a16_mm(*wrong, BF16, key)


def test_limits() -> None:
    def why(  # type: ignore[no-untyped-def]
        n=64, k=64, a=BF16, b=E4, out=BF16, bias=None, kind="channel", form=""
    ):
        return why_not_w8a16(n, k, a, b, out, bias, f"float8_e4m3fn/static/{kind}", form)

    assert why() is None and why(n=47, k=63) is None and why(kind="group128x128") is None
    for answer, named in (
        (why(n=None), "N that is not known"),
        (why(k=2**31), "K = 2147483648"),
        (why(a=F32), "activations of torch.float32"),
        (why(b=torch.float8_e4m3fnuz), "a weight of torch.float8_e4m3fnuz"),
        (why(b=torch.int8), "a weight of torch.int8"),
        (why(out=E4), "a result of torch.float8_e4m3fn"),
        (why(bias=torch.float64), "a bias of torch.float64"),
        (why(form="weight,float16,float32,after"), "a scaling in torch.float16"),
        (why(form="weight,float32,float16,after"), "a product in torch.float16"),
        (why(kind="group96x128"), "blocks of 96 along K"),
    ):
        assert answer is not None and named in answer
