"""Stand-ins for operators of libraries that are not installed: their schema, their arithmetic.

Schemas are those that the libraries register (see the tables in ``fp8pass/spellings``); each has an
implementation in plain torch of the arithmetic that its source shows, so that a graph which holds
it can be run and compared. Nothing is defined where the real library has done it already.
"""

from __future__ import annotations

from typing import Any

import torch

E4 = torch.float8_e4m3fn
Tensor = torch.Tensor

_kept: list[Any] = []


def _define(name: str, schema: str, run: Any, fake: Any) -> None:
    namespace, op = name.split("::")
    if hasattr(getattr(torch.ops, namespace), op):
        return
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(op + schema)
    library.impl(op, run, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=library)
    _kept.append(library)


# ---- FBGEMM and MSLK ---------------------------------------------------------------------------


def _saturated(value: Tensor) -> Tensor:
    return value.clamp(-448.0, 448.0).to(E4)


def _bounded(x: Tensor, scale_ub: Tensor | None) -> Tensor:
    amax = x.float().abs().amax(-1)
    return amax if scale_ub is None else torch.minimum(amax, scale_ub)


def _per_row(
    input: Tensor,
    bs: Tensor | None = None,
    scale_ub: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    stochastic_rounding: bool = False,
) -> list[Tensor]:
    scale = (_bounded(input, scale_ub) / 448.0).clamp(min=1 / (448 * 512))
    return [_saturated(input.float() / scale.unsqueeze(-1)), scale]


def _fake_per_row(input: Tensor, *rest: Any, **named: Any) -> list[Tensor]:
    rows = input.new_empty(input.shape[:-1], dtype=torch.float32)
    return [torch.empty_like(input, dtype=E4), rows]


def _row_triton(
    a: Tensor,
    scale_ub: Tensor | None = None,
    zero_start_index_M: Tensor | None = None,
    use_triton: bool = True,
    output_device: torch.device | None = None,
) -> tuple[Tensor, Tensor]:
    factor = 448.0 / _bounded(a, scale_ub).clamp(min=1e-12)
    return _saturated(a.float() * factor.unsqueeze(-1)), 1.0 / factor


def _fake_row_triton(a: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
    q, scale = _fake_per_row(a)
    return q, scale


def _rowwise(
    XQ: Tensor,
    WQ: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    use_fast_accum: bool = True,
) -> Tensor:
    value = XQ.float() @ WQ.float().t() * x_scale.reshape(-1, 1) * w_scale.reshape(1, -1)
    return (value if bias is None else value + bias.float()).to(torch.bfloat16)


def _fake_rowwise(XQ: Tensor, WQ: Tensor, *rest: Any, **named: Any) -> Tensor:
    return XQ.new_empty((*XQ.shape[:-1], WQ.shape[0]), dtype=torch.bfloat16)


_PER_ROW = (
    "(Tensor input, Tensor? bs=None, Tensor? scale_ub=None, ScalarType? output_dtype=None,"
    " bool stochastic_rounding=False) -> Tensor[]"
)
_ROW_TRITON = (
    "(Tensor a, Tensor? scale_ub=None, Tensor? zero_start_index_M=None, bool use_triton=True,"
    " Device? output_device=None) -> (Tensor, Tensor)"
)
_ROWWISE = (
    "(Tensor XQ, Tensor WQ, Tensor x_scale, Tensor w_scale, Tensor? bias=None,"
    " bool use_fast_accum=True) -> Tensor"
)


def fbgemm() -> Any:
    """``torch.ops.fbgemm`` with the operators that ``FbgemmFp8Linear`` calls."""
    _define("fbgemm::quantize_fp8_per_row", _PER_ROW, _per_row, _fake_per_row)
    _define("fbgemm::f8f8bf16_rowwise", _ROWWISE, _rowwise, _fake_rowwise)
    return torch.ops.fbgemm


def mslk() -> tuple[Any, Any]:
    """``torch.ops.triton`` and ``torch.ops.mslk`` as torchao calls them."""
    _define("triton::quantize_fp8_row", _ROW_TRITON, _row_triton, _fake_row_triton)
    _define("mslk::f8f8bf16_rowwise", _ROWWISE, _rowwise, _fake_rowwise)
    return torch.ops.triton, torch.ops.mslk


# ---- fine-grained FP8 --------------------------------------------------------------------------


def _block_dynamic(
    A: Tensor, B: Tensor, Bs: Tensor, block_size: list[int], output_dtype: torch.dtype | None = None
) -> Tensor:
    rows, cols = block_size
    groups = A.float().unflatten(-1, (-1, cols))
    scale = groups.abs().amax(-1, keepdim=True) / 448.0
    codes = _saturated(groups / scale.clamp(min=1e-12)).float()
    weight = B.float() * Bs.float().repeat_interleave(rows, 0).repeat_interleave(cols, 1)
    return ((codes * scale).flatten(-2) @ weight.t()).to(output_dtype or A.dtype)


def _tensor_dynamic(
    A: Tensor, B: Tensor, Bs: Tensor, output_dtype: torch.dtype | None = None
) -> Tensor:
    scale = A.float().abs().amax(-1, keepdim=True) / 448.0
    codes = _saturated(A.float() / scale.clamp(min=1e-12)).float()
    return (codes @ B.float().t() * scale * Bs).to(output_dtype or A.dtype)


def _fake_linear(A: Tensor, B: Tensor, *rest: Any, **named: Any) -> Tensor:
    return A.new_empty((*A.shape[:-1], B.shape[0]))


def finegrained() -> Any:
    """The operators of a build of ``kernels-community/finegrained-fp8``, under a hash of one."""
    name = "_finegrained_fp8_cuda_0123abc"
    _define(
        f"{name}::w8a8_block_dynamic_fp8_matmul",
        "(Tensor A, Tensor B, Tensor Bs, SymInt[] block_size, ScalarType? output_dtype=None)"
        " -> Tensor",
        _block_dynamic,
        _fake_linear,
    )
    _define(
        f"{name}::w8a8_tensor_dynamic_fp8_matmul",
        "(Tensor A, Tensor B, Tensor Bs, ScalarType? output_dtype=None) -> Tensor",
        _tensor_dynamic,
        _fake_linear,
    )
    return getattr(torch.ops, name)
