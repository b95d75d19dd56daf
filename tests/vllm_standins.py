"""Stand-ins for vLLM's operators: its schemas, and the arithmetic of its kernels in plain torch.

Each writes into what its caller allocated, as vLLM's do, or returns new tensors (``vllm_ir``).
Nothing is defined where vLLM itself has done it already. The arithmetic was read in vLLM 0.21's
sources (``csrc``); see the readers in ``fp8pass/spellings/vllm_*.py`` for what each part is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fp8pass.testing import vllm_operators

E4 = torch.float8_e4m3fn
F32 = torch.float32
Tensor = torch.Tensor

#: What :func:`define` was called with, and the libraries that hold it while it is defined.
_WANTED: list[tuple[str, str, Any, Any]] = []
_libraries: list[torch.library.Library] = []


def define(name: str, schema: str, run: Any = None, fake: Any = None) -> None:
    """Define ``namespace::name`` inside of :func:`defined`, unless it is there.

    ``fake`` may be left out where nothing returns.
    """
    if _libraries:
        _define(name, schema, run, fake)
    else:
        _WANTED.append((name, schema, run, fake))


def _define(name: str, schema: str, run: Any, fake: Any) -> None:
    namespace, op = name.split("::")
    if hasattr(getattr(torch.ops, namespace), op):
        return
    library = torch.library.Library(namespace, "FRAGMENT")
    _libraries.append(library)
    library.define(op + schema)
    if run is not None:
        library.impl(op, run, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake or (lambda *given, **named: None), lib=library)


def of_cuda(name: str) -> str:
    """The schema of an operator of vLLM's CUDA library."""
    return vllm_operators.OPERATORS[name][0]


@contextmanager
def defined() -> Iterator[None]:
    """The operators, for as long as this is open: fp8pass takes a library for loaded where they
    are, and so would every other test of the process."""
    assert not _libraries
    try:
        for wanted in _WANTED:
            _define(*wanted)
        yield
    finally:
        for library in _libraries:
            library._destroy()
        _libraries.clear()


# ---- norms and activations -----------------------------------------------------------------------


def _normed(x: Tensor, weight: Tensor | None, epsilon: float, dtype: torch.dtype) -> Tensor:
    value = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    return (value if weight is None else value.to(weight.dtype) * weight).to(dtype)


def _ir_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: Any = None) -> Tensor:
    assert variance_size is None
    return _normed(x.to(F32), weight, epsilon, x.dtype)


def _ir_add_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: Any = None
) -> tuple[Tensor, Tensor]:
    assert variance_size is None
    total = x.to(F32) + x_residual.to(F32)
    return _normed(total, weight, epsilon, x.dtype), total.to(x.dtype)


define(
    "vllm_ir::rms_norm",
    "(Tensor x, Tensor? weight, float epsilon, SymInt? variance_size=None) -> Tensor",
    _ir_norm,
    lambda x, *rest: torch.empty_like(x),
)
define(
    "vllm_ir::fused_add_rms_norm",
    "(Tensor x, Tensor x_residual, Tensor? weight, float epsilon, SymInt? variance_size=None)"
    " -> (Tensor, Tensor)",
    _ir_add_norm,
    lambda x, r, *rest: (torch.empty_like(x), torch.empty_like(x)),
)


def _rms_norm(result: Tensor, input: Tensor, weight: Tensor, epsilon: float) -> None:
    result.copy_(_ir_norm(input, weight, epsilon))


def _add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    residual.copy_(input + residual)
    input.copy_(_ir_norm(residual, weight, epsilon))


define("_C::rms_norm", of_cuda("rms_norm"), _rms_norm)
define("_C::fused_add_rms_norm", of_cuda("fused_add_rms_norm"), _add_rms_norm)


def _gated(act: Any) -> Any:
    def run(result: Tensor, input: Tensor) -> None:
        gate, up = input.chunk(2, -1)
        result.copy_(act(gate.to(F32)).to(input.dtype) * up)

    return run


def silu(gate: Tensor) -> Tensor:
    return gate / (1 + torch.exp(-gate))


def gelu(gate: Tensor) -> Tensor:
    return (gate * 0.5) * (1 + torch.erf(gate * 0.7071067811865476))


def gelu_tanh(gate: Tensor) -> Tensor:
    cube = gate * gate * gate
    inner = 0.7978845608028654 * (gate + 0.044715 * cube)
    return (0.5 * gate) * (1 + torch.tanh(inner))


for _name, _act in (
    ("silu_and_mul", silu), ("gelu_and_mul", gelu), ("gelu_tanh_and_mul", gelu_tanh)
):  # fmt: skip
    define(f"_C::{_name}", of_cuda("silu_and_mul"), _gated(_act))


# ---- quantises -----------------------------------------------------------------------------------


def codes(value: Tensor) -> Tensor:
    return value.clamp(-448.0, 448.0).to(E4)


def _static(result: Tensor, input: Tensor, scale: Tensor, group_shape: Any = None) -> None:
    assert group_shape is None
    result.copy_(codes(input.to(F32) * (1 / scale)))


def _per_tensor(result: Tensor, input: Tensor, scale: Tensor) -> None:
    scale.copy_(input.abs().max().to(F32) / 448)
    result.copy_(codes(input.to(F32) * (1 / scale)))


def _row_scale(value: Tensor) -> Tensor:
    return (value.abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512))


def _per_token(result: Tensor, input: Tensor, scale: Tensor, scale_ub: Tensor | None) -> None:
    scale.copy_(_row_scale(input.to(F32)))
    result.copy_(codes(input.to(F32) / scale))


def _groups(value: Tensor, size: int) -> Tensor:
    return value.unflatten(-1, (-1, size))


def _per_group(
    input: Tensor,
    output_q: Tensor,
    output_s: Tensor,
    group_size: int,
    eps: float,
    fp8_min: float,
    fp8_max: float,
    scale_ue8m0: bool,
    dummy_is_scale_transposed: bool = False,
    dummy_is_tma_aligned: bool = False,
) -> None:
    value = _groups(input.to(F32), group_size)
    scale = value.abs().amax(-1).clamp(min=eps) / fp8_max
    output_s.copy_(scale)
    output_q.copy_((value / scale.unsqueeze(-1)).clamp(fp8_min, fp8_max).flatten(-2).to(E4))


define(
    "_C::static_scaled_fp8_quant",
    "(Tensor! result, Tensor input, Tensor scale, (int, int)? group_shape=None) -> ()",
    _static,
)
define(
    "_C::dynamic_scaled_fp8_quant",
    "(Tensor! result, Tensor input, Tensor! scale) -> ()",
    _per_tensor,
)
define(
    "_C::dynamic_per_token_scaled_fp8_quant",
    "(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()",
    _per_token,
)
define("_C::per_token_group_fp8_quant", of_cuda("per_token_group_fp8_quant"), _per_group)


def _int8(result: Tensor, input: Tensor, scale: Tensor, azp: Tensor | None) -> None:
    assert azp is None
    result.copy_((input.to(F32) / scale).round().clamp(-128, 127).to(torch.int8))


define(
    "_C::static_scaled_int8_quant",
    "(Tensor! result, Tensor input, Tensor scale, Tensor? azp) -> ()",
    _int8,
)
define(
    "_C::dynamic_scaled_int8_quant",
    "(Tensor! result, Tensor input, Tensor! scale, Tensor!? azp) -> ()",
)


def _vec(input: Tensor, channelwise: bool, scale_opt: Tensor | None) -> tuple[Tensor, Tensor]:
    assert channelwise and scale_opt is None
    scale = (input.to(F32).abs().amax(-1) / 448).clamp(min=2.0**-23)
    return codes(input.to(F32) * (1 / scale).unsqueeze(-1)), scale


define(
    "_C::quantize_fp8e4m3_vec",
    "(Tensor input, bool channelwise, Tensor? scale_opt) -> (Tensor, Tensor)",
    _vec,
    lambda x, rows, s: (torch.empty_like(x, dtype=E4), x.new_empty(x.shape[:-1], dtype=F32)),
)


# ---- vLLM's own fusions --------------------------------------------------------------------------


def _norm_static(
    result: Tensor, input: Tensor, weight: Tensor, scale: Tensor, epsilon: float
) -> None:
    _static(result, _ir_norm(input, weight, epsilon), scale)


def _add_norm_static(
    result: Tensor, input: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, epsilon: float
) -> None:
    residual.copy_(input + residual)
    _norm_static(result, residual, weight, scale, epsilon)


def _norm_per_token(
    result: Tensor,
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    epsilon: float,
    scale_ub: Tensor | None,
    residual: Tensor | None,
) -> None:
    if residual is not None:
        residual.copy_(input + residual)
        input = residual
    _per_token(result, _ir_norm(input, weight, epsilon), scale, scale_ub)


def _norm_per_block(
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
    if residual is not None:
        residual.copy_(input + residual)
        input = residual
    y = _ir_norm(input, weight, epsilon)
    _per_group(y, result, scale, group_size, 1e-10, -448.0, 448.0, False)


def _silu_static(result: Tensor, input: Tensor, scale: Tensor) -> None:
    gate, up = input.chunk(2, -1)
    _static(result, silu(gate.to(F32)).to(input.dtype) * up, scale)


def _silu_per_block(
    out: Tensor,
    input: Tensor,
    scales: Tensor,
    group_size: int,
    scale_ub: Tensor | None = None,
    is_scale_transposed: bool = False,
) -> None:
    gate, up = input.chunk(2, -1)
    y = silu(gate.to(F32)).to(input.dtype) * up
    _per_group(y, out, scales, group_size, 1e-10, -448.0, 448.0, False)


define("_C::rms_norm_static_fp8_quant", of_cuda("rms_norm_static_fp8_quant"), _norm_static)
define(
    "_C::fused_add_rms_norm_static_fp8_quant",
    of_cuda("fused_add_rms_norm_static_fp8_quant"),
    _add_norm_static,
)
define(
    "_C::rms_norm_dynamic_per_token_quant",
    of_cuda("rms_norm_dynamic_per_token_quant"),
    _norm_per_token,
)
define("_C::rms_norm_per_block_quant", of_cuda("rms_norm_per_block_quant"), _norm_per_block)
define("_C::silu_and_mul_quant", of_cuda("silu_and_mul_quant"), _silu_static)
define("_C::silu_and_mul_per_block_quant", of_cuda("silu_and_mul_per_block_quant"), _silu_per_block)


# ---- products ------------------------------------------------------------------------------------


def _spread(scale: Tensor, shape: torch.Size) -> Tensor:
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    for dim, size in enumerate(shape):
        if scale.shape[dim] not in (1, size):
            scale = scale.repeat_interleave(128, dim).narrow(dim, 0, size)
    return scale


def _cutlass(
    out: Tensor, a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, bias: Tensor | None
) -> None:
    blocks = b_scales.dim() == 2 and 1 not in b_scales.shape
    if blocks:
        value = (a.to(F32) * _spread(a_scales, a.shape)) @ (b.to(F32) * _spread(b_scales, b.shape))
    else:
        row = a_scales if a_scales.numel() == 1 else a_scales.reshape(-1, 1)
        value = (a.to(F32) @ b.to(F32)) * row * b_scales.reshape(1, -1)
    out.copy_(value if bias is None else value + bias.to(F32))


def _gemm_nt(
    q_input: Tensor,
    input_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    output: Tensor,
    use_deep_gemm_e8m0: bool,
) -> None:
    _cutlass(output, q_input, weight.t(), input_scale, weight_scale.t(), None)


def _weight_only(
    mat1: Tensor,
    mat2: Tensor,
    scales2: Tensor,
    block_size: list[int],
    bias: Tensor | None,
    out_dtype: torch.dtype,
    is_vnni: bool,
) -> Tensor:
    rows, cols = block_size
    scale = scales2.repeat_interleave(rows, 0).repeat_interleave(cols, 1)
    weight = mat2.to(F32) * scale[: mat2.shape[0], : mat2.shape[1]]
    return (mat1.to(F32) @ weight.t()).to(out_dtype)


define("_C::cutlass_scaled_mm", of_cuda("cutlass_scaled_mm"), _cutlass)
define(
    "vllm::fp8_gemm_nt_op",
    "(Tensor q_input, Tensor input_scale, Tensor weight, Tensor weight_scale, Tensor! output,"
    " bool use_deep_gemm_e8m0) -> ()",
    _gemm_nt,
)
define(
    "vllm::dynamic_flashinfer_deepgemm_blockscale_gemm",
    "(Tensor input, Tensor weight, Tensor weight_scale, int group_size, bool use_deep_gemm_e8m0)"
    " -> Tensor",
    None,
    lambda x, w, *rest: x.new_empty((x.shape[0], w.shape[0]), dtype=torch.bfloat16),
)
define(
    "_C::fp8_scaled_mm_cpu",
    "(Tensor! mat1, Tensor! mat2, Tensor! scales2, SymInt[] block_size, Tensor? bias,"
    " ScalarType out_dtype, bool is_vnni) -> Tensor",
    _weight_only,
    lambda a, b, s, block, bias, dtype, vnni: a.new_empty((*a.shape[:-1], b.shape[0]), dtype=dtype),
)
define(
    "_C::onednn_scaled_mm",
    "(Tensor! c, Tensor a, Tensor a_scales, Tensor? azp, Tensor? azp_adj, Tensor? bias,"
    " Tensor handler_tensor) -> ()",
)
define(
    "_C::weight_packed_linear",
    "(Tensor! out, Tensor mat1, Tensor mat2, Tensor? bias, bool is_vnni) -> ()",
    lambda out, a, b, bias, vnni: out.copy_(a @ b.t()),
)


# ---- the rest of a model -------------------------------------------------------------------------


def _attention(query: Tensor, key: Tensor, value: Tensor, output: Tensor, *rest: Any) -> None:
    output.copy_(query)


define(
    "vllm::unified_kv_cache_update",
    "(Tensor key, Tensor value, str layer_name) -> Tensor",
    lambda key, value, name: key.new_empty(0),
    lambda key, value, name: key.new_empty(0),
)
define(
    "vllm::unified_attention_with_output",
    "(Tensor query, Tensor key, Tensor value, Tensor! output, str layer_name, Tensor? output_scale,"
    " Tensor? output_block_scale, Tensor? kv_cache_dummy_dep) -> ()",
    _attention,
)
