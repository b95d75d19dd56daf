"""Forms of a quantise beyond the usual ones, for the tests of kernels on any device."""

from __future__ import annotations

from dataclasses import replace

import torch

from fp8pass.ops import QuantForm, dynamic_form, static_form

BF16, F16, F64 = torch.bfloat16, torch.float16, torch.float64
TOKEN, TENSOR, STATIC = dynamic_form("token"), dynamic_form("tensor"), static_form()


def int8(form: QuantForm, low: float = -128.0) -> QuantForm:
    """The same quantise to symmetric int8 codes."""
    return replace(form, dtype=torch.int8, qmax=127.0, lo=low, hi=127.0)


def inverse(form: QuantForm, **rest: object) -> QuantForm:
    """The same quantise by the inverse scale ``qmax / amax``."""
    form = replace(form, scale="inverse", apply="mul_inverse", floor="amax", floor_value=1e-12)
    return replace(form, **rest)  # type: ignore[arg-type]


def forms(group: str) -> dict[str, QuantForm]:
    """By name; groups in ``group``."""
    groups = dynamic_form(group)
    amax = {"floor": "amax", "floor_value": 1e-4}
    return {
        "int8 token": int8(TOKEN),
        "int8 token, reciprocal": int8(replace(TOKEN, apply="mul_recip"), -127.0),
        "int8 tensor": int8(TENSOR),
        "int8 static": int8(STATIC),
        "int8 group": int8(groups),
        "int8 given token": int8(replace(STATIC, granularity="token")),
        "int8 inverse": int8(inverse(TOKEN)),
        "power token": replace(TOKEN, power="ceil", **amax),
        "power tensor": replace(TENSOR, power="ceil"),
        "power group": replace(groups, power="ceil", **amax),
        "power group, column-major": replace(groups, power="ceil", layout="col", **amax),
        "power group, no floor": replace(groups, power="ceil", floor="none", layout="tma"),
        "power, inverse": inverse(groups, power="floor"),
        "inverse token": inverse(TOKEN),
        "inverse tensor": inverse(TENSOR, floor="none"),
        "inverse float64": inverse(TOKEN, scale_dtype=F64),
        "inverse tensor, float64": inverse(TENSOR, scale_dtype=F64),
        "inverse group": inverse(groups, layout="tma", scale_dtype=BF16),
        "given token": replace(STATIC, granularity="token"),
        "given group": replace(STATIC, granularity=group),
        "given group, reciprocal": replace(STATIC, granularity=group, apply="mul_recip"),
        "ceiling token": replace(TOKEN, ceiling=3.0),
        "ceiling group": replace(groups, ceiling=1.0, layout="col"),
        "float64": replace(TOKEN, scale_dtype=F64, floor="scale_add"),
        "float64 tensor": replace(TENSOR, scale_dtype=F64, ceiling=100.0, power="ceil"),
        "bf16 scale": replace(TOKEN, scale_dtype=BF16, apply="mul_recip"),
        "fp16 scale": replace(groups, scale_dtype=F16, floor="scale", floor_value=1e-6),
        "added to amax": replace(groups, floor="amax_add", floor_value=1e-4),
        "added to the scale": replace(TENSOR, floor="scale_add", floor_value=1e-6),
        "zero replaced": replace(TOKEN, floor="amax_zero", floor_value=1.0),
        "divisor": replace(TOKEN, floor="divisor", floor_value=1e-3),
        "divisor of groups": replace(groups, floor="divisor", floor_value=1e-3),
        "bf16 groups": replace(groups, compute=BF16),
    }  # fmt: skip


FORMS = forms("group16")


def random_given(
    form: QuantForm, shape: tuple[int, ...], device: str = "cpu", seed: int = 0
) -> torch.Tensor | None:
    """A given scale of a value of ``shape`` for a static form, column-major per group."""
    if not form.static:
        return None
    generator = torch.Generator(device).manual_seed(seed)
    wanted = form.scale_shape(shape)
    scale = torch.rand(wanted, generator=generator, device=device) * 0.05 + 0.01
    if form.group is not None and len(wanted) > 1:
        scale = scale.transpose(-1, -2).contiguous().transpose(-1, -2)
    return scale


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """The same bits; of NaN the sign is free, as is that of an int8 zero."""
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    a, b = got.float(), want.float()
    assert torch.equal(a.nan_to_num(999.0), b.nan_to_num(999.0))
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a.signbit()[~a.isnan()], b.signbit()[~b.isnan()])


def dequantised(q: torch.Tensor, scale: torch.Tensor, form: QuantForm) -> torch.Tensor:
    """``q * scale`` in float64."""
    wide = scale.double()
    if form.group is not None:
        wide = wide.repeat_interleave(form.group, -1)
    return q.double() * wide


def slack(form: QuantForm, want: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """How far codes times scales may be from ``want``: half a step of a code and some roundings."""
    wide = scale.double()
    if form.group is not None:
        wide = wide.repeat_interleave(form.group, -1)
    rounding = 2.0**-8 if form.compute != torch.float32 else 2.0**-20
    if form.dtype == torch.int8:
        return wide * (0.5 + 128 * rounding) + want.abs() * rounding
    half, least = (2.0**-4, 2.0**-10) if form.dtype == torch.float8_e4m3fn else (2.0**-3, 2.0**-17)
    return want.abs() * (half + 2 * rounding) + wide * least * 1.01


def inside(form: QuantForm, want: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Where nothing is cut off by the clamp of the codes; only finite values."""
    wide = scale.double()
    if form.group is not None:
        wide = wide.repeat_interleave(form.group, -1)
    return want.isfinite() & (want <= form.hi * wide) & (want >= form.lo * wide)
