"""Spellings of quantises beyond the usual ones, with the form that each must be read as.

Groups, powers of two, bounds, layouts, INT8 and other FP8; widths are a multiple of 16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from spell_common import E4, Tensor
from spell_quantises import _RECIP, Quant

U4, E5, U5, I8 = (
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.int8,
)
G = 16


def saturated(value: Tensor, top: float = 448.0, dtype: torch.dtype = E4) -> Tensor:
    return value.clamp(-top, top).to(dtype)


def _token(scale: Callable[[Tensor], Tensor]) -> Quant:
    """Per token in float32, with ``scale(amax)``."""

    def fn(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        made = scale(y.float().abs().amax(-1, keepdim=True))
        return saturated(y.float() / made), made

    return fn


def token_no_keepdim(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    scale = (y.abs().amax(-1).float() / 448).clamp(min=1e-12)
    return saturated(y.float() / scale[..., None]), scale


def token_aminmax(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    low, high = y.float().aminmax(dim=-1, keepdim=True)
    scale = (torch.maximum(high, -low) / 448).clamp(min=1e-12)
    return saturated(y.float() / scale), scale


def token_narrow_scale(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    scale = (y.bfloat16().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-6).float()
    return saturated(y.bfloat16().float() / scale), scale


def token_inverse(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    r = 448.0 / y.float().abs().amax(-1, keepdim=True).clamp(min=1e-12)
    return saturated(y.float() * r), r.reciprocal()


def token_inverse_double(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    amax = y.abs().amax(-1, keepdim=True).to(torch.float64)
    r = (448.0 / torch.clamp(amax, min=1e-12)).to(torch.float32)
    return saturated(y.float() * r), 1.0 / r


def tensor_inverse_power(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    r = (448.0 / y.abs().amax().double().clamp(min=1e-12)).float()
    r = torch.exp2(torch.floor(torch.log2(r)))
    return saturated(y.float() * r), r.reciprocal()


def group(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    parts = y.float().unflatten(-1, (y.shape[-1] // G, G))
    scale = (parts.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-10)
    return saturated(parts / scale).flatten(-2), scale.squeeze(-1)


def group_deepseek(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    """Split in the model dtype; the codes are reshaped back before the cast."""
    parts = y.view(*y.shape[:-1], y.shape[-1] // G, G)
    amax = parts.abs().float().amax(dim=-1).clamp(1e-4)
    scale = amax / 448.0
    wide = (parts.float() * (1.0 / scale.unsqueeze(-1))).reshape(y.shape)
    return saturated(wide), scale


def group_power(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    parts = y.reshape(*y.shape[:-1], y.shape[-1] // G, G)
    scale = parts.float().abs().amax(-1).clamp(min=1e-4) / 448
    scale = torch.pow(2.0, torch.ceil(torch.log2(scale)))
    return saturated(parts.float() / scale[..., None]).view(y.shape), scale


def laid_out(layout: Callable[[Tensor], Tensor]) -> Quant:
    """Scales ``[M, G]``, copied into another layout."""

    def fn(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        q, scale = group(y, s)
        return q, layout(scale.reshape(-1, scale.shape[-1]))

    return fn


def aligned(rows: int) -> int:
    """TMA takes columns that are a multiple of 16 bytes apart."""
    return (rows + 3) // 4 * 4


def column_major(scale: Tensor) -> Tensor:
    return scale.t().contiguous().t()


def column_major_copy(scale: Tensor) -> Tensor:
    made = torch.empty((scale.shape[1], scale.shape[0]), dtype=torch.float32).t()
    made.copy_(scale)
    return made


def tma_padded(scale: Tensor) -> Tensor:
    rows = scale.shape[0]
    return F.pad(scale, (0, 0, 0, aligned(rows) - rows)).t().contiguous().t()[:rows]


def tma_strided(scale: Tensor) -> Tensor:
    rows, groups = scale.shape
    made = torch.empty_strided((rows, groups), (1, aligned(rows)), dtype=torch.float32)
    made.copy_(scale)
    return made


def tma_sliced(scale: Tensor) -> Tensor:
    """As DeepGEMM: a batch of one, copied into a part of what is larger."""
    rows, groups = scale.shape
    made = torch.empty((1, groups, aligned(rows)), dtype=torch.float32).transpose(1, 2)
    made[:, :rows, :] = scale.unsqueeze(0)
    return made[:, :rows, :].squeeze(0)


#: name -> (what copies the scales, layout)
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "column_major": (column_major, "col"),
    "column_major_copy": (column_major_copy, "col"),
    "tma_padded": (tma_padded, "tma"),
    "tma_strided": (tma_strided, "tma"),
    "tma_sliced": (tma_sliced, "tma"),
}


def int8_token(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    scale = (y.float().abs().amax(-1, keepdim=True) / 127).clamp(min=1e-7)
    return (y.float() / scale).round().clamp(-128, 127).to(I8), scale


def int8_tensor(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    scale = (y.float().abs().amax() / 127).clamp(min=1e-7)
    return torch.round((y.float() / scale).clamp(-127, 127)).to(I8), scale


def int8_static(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    return (torch.clamp(torch.round(y.float() / s), -128, 127).to(I8),)


def fnuz(top: float) -> Quant:
    def fn(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        scale = (y.float().abs().amax(-1, keepdim=True) / top).clamp(min=1e-12)
        return saturated(y.float() / scale, top, U4), scale

    return fn


def _static_as(dtype: torch.dtype) -> Quant:
    top = float(torch.finfo(dtype).max)
    return lambda y, s: (saturated(y.float() / s, top, dtype),)


def bounded(scale: Callable[[Tensor, Tensor], Tensor]) -> Quant:
    """Per token, with ``scale(amax, bound)`` where the bound is a tensor of one element."""

    def fn(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        made = scale(y.float().abs().amax(-1, keepdim=True), s)
        return saturated(y.float() / made), made

    return fn


def group_bounded(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    parts = y.float().unflatten(-1, (y.shape[-1] // G, G))
    scale = torch.minimum((parts.abs().amax(-1) / 448), s).clamp(min=1e-10)
    return saturated(parts / scale[..., None]).flatten(-2), scale


def token_inverse_bounded(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    r = 448.0 / torch.clamp(y.float().abs().amax(-1, keepdim=True), max=s * 200).clamp(min=1e-12)
    return saturated(y.float() * r), r.reciprocal()


def tensor_bounded(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    scale = (torch.minimum(s * 300, y.float().abs().amax()) / 448).clamp(min=1e-12)
    return saturated(y.float() / scale), scale


E8 = torch.float8_e8m0fnu


def group_stored(power: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Quant:
    """``power(scale)`` gives the scale that divides, and the one that is stored."""

    def fn(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        parts = y.float().unflatten(-1, (y.shape[-1] // G, G))
        scale, stored = power((parts.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-10))
        return saturated(parts / scale).flatten(-2), stored.squeeze(-1)

    return fn


def e8m0(scale: Tensor) -> tuple[Tensor, Tensor]:
    stored = scale.to(E8)
    return stored.float(), stored


def ceil_then_e8m0(scale: Tensor) -> tuple[Tensor, Tensor]:
    return e8m0(torch.exp2(torch.ceil(torch.log2(scale))))


def ceil_stored(scale: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return scale, scale.to(E8)


def ceil_bits(scale: Tensor) -> tuple[Tensor, Tensor]:
    """As DeepGEMM: the exponent's bits, which are those of e8m0."""
    scale = torch.pow(2.0, torch.ceil(torch.log2(scale.abs())))
    return scale, (scale.view(torch.int32) >> 23).to(torch.uint8)


def ceil_bits_as_e8m0(scale: Tensor) -> tuple[Tensor, Tensor]:
    scale, stored = ceil_bits(scale)
    return scale, stored.view(E8)


#: name -> (what a scale is made, power of the form)
STORED: dict[str, tuple[Callable[[Tensor], tuple[Tensor, Tensor]], str]] = {
    "e8m0": (e8m0, "e8m0"),
    "ceil_then_e8m0": (ceil_then_e8m0, "ceil_e8m0"),
    "ceil_stored": (ceil_stored, "ceil"),
    "ceil_bits": (ceil_bits, "ceil"),
    "ceil_bits_as_e8m0": (ceil_bits_as_e8m0, "ceil"),
}

_E4 = "float8_e4m3fn,"
_END = "div,-448.0,448.0"
_LOW = float(torch.tensor(1e-4))  # a tensor of float32 holds another number

#: name -> (function, form)
MORE_QUANTS: dict[str, tuple[Quant, str]] = {
    "no_floor": (_token(lambda a: a / 448), f"{_E4}token,float32,div,448.0,none,0.0,{_END}"),
    "eps_added": (
        _token(lambda a: a / 448 + 1e-12),
        f"{_E4}token,float32,div,448.0,scale_add,1e-12,{_END}",
    ),
    "eps_added_to_amax": (
        _token(lambda a: (a + 1e-4) / 448),
        f"{_E4}token,float32,div,448.0,amax_add,0.0001,{_END}",
    ),
    "floor_by_maximum": (
        _token(lambda a: torch.maximum(a, torch.full((), 1e-4)) / 448),
        f"{_E4}token,float32,div,448.0,amax,{_LOW},{_END}",
    ),
    "upper_bound": (
        _token(lambda a: (a.clamp(max=3.0) / 448).clamp(min=1e-6)),
        f"{_E4}token,float32,div,448.0,scale,1e-06,{_END},ceiling=3.0",
    ),
    "tensor_bound": (
        bounded(lambda a, s: (a.clamp(max=s * 200) / 448).clamp(min=1e-12)),
        f"{_E4}token,float32,div,448.0,scale,1e-12,{_END},upper=amax",
    ),
    "tensor_bound_last": (
        bounded(lambda a, s: torch.minimum(a.clamp(min=1e-4), s * 200) * (1 / 448)),
        f"{_E4}token,float32,mul,{_RECIP},amax,0.0001,{_END},upper=amax_last",
    ),
    "tensor_bound_of_scale": (
        bounded(lambda a, s: torch.minimum(s, a / 448)),
        f"{_E4}token,float32,div,448.0,none,0.0,{_END},upper=scale",
    ),
    "tensor_bound_of_scale_last": (
        bounded(lambda a, s: torch.minimum((a / 448).clamp(min=1e-4), s)),
        f"{_E4}token,float32,div,448.0,scale,0.0001,{_END},upper=scale_last",
    ),
    "group_bounded": (
        group_bounded,
        f"{_E4}group16,float32,div,448.0,scale,1e-10,{_END},upper=scale",
    ),
    "token_inverse_bounded": (
        token_inverse_bounded,
        f"{_E4}token,float32,inverse,448.0,amax,1e-12,mul_inverse,-448.0,448.0,upper=amax",
    ),
    "tensor_bounded": (
        tensor_bounded,
        f"{_E4}tensor,float32,div,448.0,scale,1e-12,{_END},upper=amax",
    ),
    **{
        f"group_{name}": (
            group_stored(power),
            f"{_E4}group16,float32,div,448.0,scale,1e-10,{_END},power={word}",
        )
        for name, (power, word) in STORED.items()
    },
    "token_e8m0": (
        _token(lambda a: e8m0((a / 448).clamp(min=1e-12))[0]),
        f"{_E4}token,float32,div,448.0,scale,1e-12,{_END},power=e8m0",
    ),
    "both_bounds": (
        _token(lambda a: a.clamp(1e-3, 3.0) / 448),
        f"{_E4}token,float32,div,448.0,amax,0.001,{_END},ceiling=3.0",
    ),
    "power": (
        _token(lambda a: torch.exp2(torch.ceil(torch.log2((a / 448).clamp(min=1e-12))))),
        f"{_E4}token,float32,div,448.0,scale,1e-12,{_END},power=ceil",
    ),
    "double": (
        _token(lambda a: (a.double() / 448).clamp(min=1e-12).float()),
        f"{_E4}token,float32,div,448.0,scale,1e-12,{_END},scale_dtype=float64",
    ),
    "token_no_keepdim": (
        token_no_keepdim,
        f"{_E4}token,float32,div,448.0,scale,1e-12,{_END}",
    ),
    "token_aminmax": (token_aminmax, f"{_E4}token,float32,div,448.0,scale,1e-12,{_END}"),
    "token_inverse": (
        token_inverse,
        f"{_E4}token,float32,inverse,448.0,amax,1e-12,mul_inverse,-448.0,448.0",
    ),
    "token_inverse_double": (
        token_inverse_double,
        f"{_E4}token,float32,inverse,448.0,amax,1e-12,mul_inverse,-448.0,448.0,scale_dtype=float64",
    ),
    "tensor_inverse_power": (
        tensor_inverse_power,
        f"{_E4}tensor,float32,inverse,448.0,amax,1e-12,mul_inverse,-448.0,448.0,"
        "scale_dtype=float64,power=floor",
    ),
    "group": (group, f"{_E4}group16,float32,div,448.0,scale,1e-10,{_END}"),
    "group_deepseek": (
        group_deepseek,
        f"{_E4}group16,float32,div,448.0,amax,0.0001,mul_recip,-448.0,448.0",
    ),
    "group_power": (
        group_power,
        f"{_E4}group16,float32,div,448.0,amax,0.0001,{_END},power=ceil",
    ),
    **{
        f"group_{name}": (
            laid_out(copy),
            f"{_E4}group16,float32,div,448.0,scale,1e-10,{_END},layout={layout}",
        )
        for name, (copy, layout) in LAYOUTS.items()
    },
    "int8_token": (int8_token, "int8,token,float32,div,127.0,scale,1e-07,div,-128.0,127.0"),
    "int8_tensor": (int8_tensor, "int8,tensor,float32,div,127.0,scale,1e-07,div,-127.0,127.0"),
    "int8_static": (int8_static, "int8,tensor,float32,given,127.0,none,0.0,div,-128.0,127.0"),
    "fnuz_240": (
        fnuz(240.0),
        "float8_e4m3fnuz,token,float32,div,240.0,scale,1e-12,div,-240.0,240.0",
    ),
    "fnuz_224": (
        fnuz(224.0),
        "float8_e4m3fnuz,token,float32,div,224.0,scale,1e-12,div,-224.0,224.0",
    ),
    "e5m2": (
        _static_as(E5),
        "float8_e5m2,tensor,float32,given,57344.0,none,0.0,div,-57344.0,57344.0",
    ),
    "e5m2fnuz": (
        _static_as(U5),
        "float8_e5m2fnuz,tensor,float32,given,57344.0,none,0.0,div,-57344.0,57344.0",
    ),
}
