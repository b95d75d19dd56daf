"""Operators of vLLM's CUDA library with reference code for a CPU: for tests only.

vLLM's CPU library has none of them, so a graph with CUDA's shape can neither be traced nor run on a
CPU, and vLLM's own fusion passes cannot even be imported. :func:`install` defines those that are
missing, with the schemas of the CUDA library and plain code whose numbers are those of the kernels
up to the order of a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
#: Smallest dynamic scale of vLLM's kernels.
FLOOR = 1.0 / (FP8_MAX * 512.0)

_NORM = "Tensor! result, Tensor input, Tensor weight"
_library: Any = None


def quantise(x: Tensor, scale: Tensor) -> Tensor:
    """fp8 codes of ``x`` for a dequantising scale that broadcasts."""
    return (x.float() * scale.float().reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def token_scale(x: Tensor) -> Tensor:
    """float32 scales ``[..., 1]`` of the rows of ``x``."""
    return (x.abs().amax(-1, keepdim=True).float() / FP8_MAX).clamp(min=FLOOR)


def tensor_scale(x: Tensor) -> Tensor:
    """float32 scale ``[1]`` of all of ``x``."""
    return (x.abs().amax().float().reshape(1) / FP8_MAX).clamp(min=FLOOR)


def _groups(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    parts = torch.nn.functional.pad(x.float(), (0, -width % size)).unflatten(-1, (-1, size))
    scale = (parts.abs().amax(-1) / FP8_MAX).clamp(min=FLOOR)
    codes = (parts / scale[..., None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return codes.flatten(-2)[..., :width], scale


def _normalise(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return wide.to(weight.dtype) * weight


def _add(x: Tensor, residual: Tensor | None) -> Tensor:
    """The input of a norm; the residual, if any, is updated in place as the kernels do."""
    if residual is None:
        return x
    residual.copy_(x.float() + residual.float())
    return residual


def _silu_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _rms_norm(result: Tensor, input: Tensor, weight: Tensor, epsilon: float) -> None:
    result.copy_(_normalise(input, weight, epsilon))


def _fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    input.copy_(_normalise(_add(input, residual), weight, epsilon))


def _silu_and_mul(result: Tensor, input: Tensor) -> None:
    result.copy_(_silu_mul(input))


def _silu_and_mul_quant(result: Tensor, input: Tensor, scale: Tensor) -> None:
    result.copy_(quantise(_silu_mul(input), scale))


def _silu_and_mul_per_block_quant(
    out: Tensor,
    input: Tensor,
    scales: Tensor,
    group_size: int,
    scale_ub: Tensor | None = None,
    is_scale_transposed: bool = False,
) -> None:
    codes, found = _groups(_silu_mul(input), group_size)
    out.copy_(codes)
    scales.copy_(found)


def _static_norm(
    result: Tensor, input: Tensor, weight: Tensor, scale: Tensor, epsilon: float
) -> None:
    result.copy_(quantise(_normalise(input, weight, epsilon), scale))


def _static_add_norm(
    result: Tensor,
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    scale: Tensor,
    epsilon: float,
) -> None:
    _static_norm(result, _add(input, residual), weight, scale, epsilon)


def _token_norm(
    result: Tensor,
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    epsilon: float,
    scale_ub: Tensor | None,
    residual: Tensor | None,
) -> None:
    normed = _normalise(_add(input, residual), weight, epsilon)
    scale.copy_(token_scale(normed))
    result.copy_(quantise(normed, scale))


def _block_norm(
    result: Tensor,
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    epsilon: float,
    scale_ub: Tensor | None,
    residual: Tensor | None,
    group_size: int,
    is_scale_transposed: bool,
) -> None:
    codes, found = _groups(_normalise(_add(input, residual), weight, epsilon), group_size)
    result.copy_(codes)
    scale.copy_(found)


def _group_quant(
    input: Tensor,
    output_q: Tensor,
    output_s: Tensor,
    group_size: int,
    eps: float,
    fp8_min: float,
    fp8_max: float,
    scale_ue8m0: bool,
    dummy_is_scale_transposed: bool,
    dummy_is_tma_aligned: bool,
) -> None:
    codes, found = _groups(input, group_size)
    output_q.copy_(codes)
    output_s.copy_(found)


def _product(
    out: Tensor, a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, bias: Tensor | None
) -> None:
    wide_a, wide_b = a.float(), b.float()
    groups = a_scales.shape[1] if a_scales.dim() == 2 else 1
    if groups not in (1, a.shape[1]):  # blocks: scales of a per group, of b per block
        size = _size(a.shape[1], groups)
        wide_a = wide_a * a_scales.repeat_interleave(size, 1)[:, : a.shape[1]]
        columns = _size(b.shape[1], b_scales.shape[1])
        spread = b_scales.repeat_interleave(size, 0).repeat_interleave(columns, 1)
        found = wide_a @ (wide_b * spread[: b.shape[0], : b.shape[1]])
    else:
        of_b = b_scales.reshape(1, -1) if b_scales.numel() > 1 else b_scales.reshape(1)
        found = (wide_a @ wide_b) * a_scales.float() * of_b.float()
    out.copy_(found if bias is None else found + bias.float())


def _named_only(*args: object) -> None:
    raise NotImplementedError("this operator of CUDA's library is only named here")


def _size(length: int, parts: int) -> int:
    """Size of the parts that ``length`` is in, the last of which may be smaller: a power of two."""
    return 1 << (-(-length // parts) - 1).bit_length()


#: name -> (schema, code).
OPERATORS: dict[str, tuple[str, Callable[..., None]]] = {
    "rms_norm": (f"({_NORM}, float epsilon) -> ()", _rms_norm),
    "fused_add_rms_norm": (
        "(Tensor! input, Tensor! residual, Tensor weight, float epsilon) -> ()",
        _fused_add_rms_norm,
    ),
    "silu_and_mul": ("(Tensor! result, Tensor input) -> ()", _silu_and_mul),
    "silu_and_mul_quant": (
        "(Tensor! result, Tensor input, Tensor scale) -> ()",
        _silu_and_mul_quant,
    ),
    "silu_and_mul_per_block_quant": (
        "(Tensor! out, Tensor input, Tensor! scales, int group_size, Tensor? scale_ub=None, "
        "bool is_scale_transposed=False) -> ()",
        _silu_and_mul_per_block_quant,
    ),
    "rms_norm_static_fp8_quant": (f"({_NORM}, Tensor scale, float epsilon) -> ()", _static_norm),
    "fused_add_rms_norm_static_fp8_quant": (
        "(Tensor! result, Tensor input, Tensor! residual, Tensor weight, Tensor scale, "
        "float epsilon) -> ()",
        _static_add_norm,
    ),
    "rms_norm_dynamic_per_token_quant": (
        f"({_NORM}, Tensor! scale, float epsilon, Tensor? scale_ub, Tensor!? residual) -> ()",
        _token_norm,
    ),
    "rms_norm_per_block_quant": (
        f"({_NORM}, Tensor! scale, float epsilon, Tensor? scale_ub, Tensor!? residual, "
        "int group_size, bool is_scale_transposed) -> ()",
        _block_norm,
    ),
    "per_token_group_fp8_quant": (
        "(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, float eps, "
        "float fp8_min, float fp8_max, bool scale_ue8m0, bool dummy_is_scale_transposed, "
        "bool dummy_is_tma_aligned) -> ()",
        _group_quant,
    ),
    # a pass of vLLM's names it whatever the model
    "fused_qk_norm_rope": (
        "(Tensor! qkv, int num_heads_q, int num_heads_k, int num_heads_v, int head_dim, float eps, "
        "Tensor q_weight, Tensor k_weight, Tensor cos_sin_cache, bool is_neox, "
        "Tensor position_ids, int forced_token_heads_per_warp) -> ()",
        _named_only,
    ),
    "cutlass_scaled_mm": (
        "(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()",
        _product,
    ),
}


def install() -> list[str]:
    """Define what ``torch.ops._C`` lacks; the names. A second call defines nothing.

    Load vLLM's CPU library first: a name that it defines later would clash.
    """
    global _library
    defined = []
    for name, (schema, code) in OPERATORS.items():
        if hasattr(torch.ops._C, name):
            continue
        if _library is None:
            _library = torch.library.Library("_C", "FRAGMENT")
        _library.define(name + schema)
        _library.impl(name, code, "CPU")
        _library.impl(name, _nothing, "Meta")
        defined.append(name)
    return defined


def uninstall() -> None:
    """Take back what :func:`install` defined: where these operators are, fp8pass takes vLLM's
    library for loaded."""
    global _library
    if _library is not None:
        _library._destroy()
        _library = None


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What every one of them does with shapes: it writes into its arguments and returns nothing."""
