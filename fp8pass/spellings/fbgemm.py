"""Dialect of FBGEMM and of MSLK, which took its operators over: row-wise quantise and product.

Reached from ``FbgemmFp8Linear`` of transformers, and from torchao's ``Float8Tensor`` where the
package mslk is installed. Meanings were read in fbgemm_gpu 1.2 (``quantize.cu``,
``fp8_gemm.py``) and in MSLK's copy; the schemas are those that they register.

Arithmetic of the quantises, in float32 whatever the input is:

- ``fbgemm::quantize_fp8_per_row``: ``scale = max(min(amax, scale_ub) / 448, 1 / (448 * 512))``,
  ``q = x / scale``;
- ``triton::quantize_fp8_row``: ``r = 448 / max(min(amax, scale_ub), 1e-12)``, ``q = x * r``,
  dequant scale ``1 / r``. With a bound below 1e-12 its clamp is not defined.

Both saturate. Where a row has a NaN the library takes the largest of the other values, we take NaN:
the products of that row are NaN either way.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fp8pass.ops.forms import MODEL_DTYPES, QuantForm
from fp8pass.quant_key import dtype_name
from fp8pass.spellings.library_ops import Arguments, LibraryOp, ProductMatch, result
from fp8pass.spellings.quantize import QuantMatch
from fp8pass.spellings.walk import contiguous, one_element, same, tensor

_E4M3 = torch.float8_e4m3fn
_TOP = 448.0

#: ``quantize.cu``: the smallest scale, so that its inverse is finite.
PER_ROW = QuantForm(
    _E4M3, "token", torch.float32, "div", _TOP, "scale", 1 / (_TOP * 512), "div", -_TOP, _TOP
)
#: ``fp8_gemm.py``: the factor, not the scale, is computed first.
ROW_TRITON = QuantForm(
    _E4M3, "token", torch.float32, "inverse", _TOP, "amax", 1e-12, "mul_inverse", -_TOP, _TOP
)


def _quantise(
    node: fx.Node, x: Any, form: QuantForm, dtypes: Collection[torch.dtype], scale_ub: Any
) -> QuantMatch | str:
    """``(codes, scale)`` with one scale for each row and none of the last dim kept."""
    codes, scale = result(node, 0), result(node, 1)
    value, codes_value, scale_value = tensor(x), tensor(codes), tensor(scale)
    if codes is None or scale is None or codes_value is None or scale_value is None:
        return "its codes and its scale are not both read, once each"
    if value is None or value.dtype not in dtypes:
        return f"it quantises {None if value is None else value.dtype} values"
    if codes_value.dtype != form.dtype or scale_value.dtype != torch.float32:
        return f"it gives {codes_value.dtype} codes and {scale_value.dtype} scales"
    rows = value.shape[:-1]
    if len(rows) == 0 or scale_value.dim() != len(rows) or codes_value.dim() != value.dim():
        return f"its scale has the shape {tuple(scale_value.shape)}"
    if not all(map(same, rows, scale_value.shape)) or not contiguous(codes_value):
        return "its results have other strides or sizes than its input"
    if scale_ub is not None:
        bound = tensor(scale_ub)
        if bound is None or bound.dtype != torch.float32 or not one_element(bound):
            shape = None if bound is None else tuple(bound.shape)
            return f"its upper bound scale_ub has the shape {shape}, or is not float32"
        form = replace(form, upper="amax")
    return QuantMatch(codes, x, scale, form, scale_ub=scale_ub)


def _per_row(node: fx.Node, given: Arguments) -> QuantMatch | str:
    if given["stochastic_rounding"]:
        return "it rounds stochastically"
    if given["bs"] is not None or given["output_dtype"] not in (None, _E4M3):
        return "it is given bs, or another dtype than e4m3fn"
    return _quantise(node, given["input"], PER_ROW, (torch.bfloat16,), given["scale_ub"])


def _row_triton(node: fx.Node, given: Arguments) -> QuantMatch | str:
    if given["use_triton"] is not True:
        return "use_triton=False computes its scale in another way"
    return _quantise(node, given["a"], ROW_TRITON, MODEL_DTYPES, given["scale_ub"])


def _rowwise(node: fx.Node, given: Arguments) -> ProductMatch | str:
    a, weight, scale_a, scale_b, bias = (
        given[name] for name in ("XQ", "WQ", "x_scale", "w_scale", "bias")
    )
    va, vw, vsa, vsb, out = (tensor(n) for n in (a, weight, scale_a, scale_b, node))
    if va is None or vw is None or vsa is None or vsb is None or out is None:
        return "the graph does not know its shapes"
    if va.dtype != _E4M3 or vw.dtype != _E4M3 or va.dim() != 2 or vw.dim() != 2:
        return f"its operands are {va.dtype} {tuple(va.shape)} and {vw.dtype} {tuple(vw.shape)}"
    if vsa.dtype != torch.float32 or vsb.dtype != torch.float32:
        return f"its scales are {vsa.dtype} and {vsb.dtype}, not float32"
    if not _vector(vsa, va.shape[0]) or not _vector(vsb, vw.shape[0], row=True):
        return f"its scales have shapes {tuple(vsa.shape)} and {tuple(vsb.shape)}"
    if not same(va.shape[1], vw.shape[1]):
        return "the widths of its operands are not known to be equal"
    vbias = tensor(bias)
    if bias is not None and (vbias is None or vbias.dtype not in MODEL_DTYPES or vbias.dim() != 1):
        return "its bias is not a vector of bf16, fp16 or fp32"
    if out.dtype not in MODEL_DTYPES or out.dim() != 2:
        return f"its result is {out.dtype} of shape {tuple(out.shape)}"
    name = dtype_name(_E4M3)
    return ProductMatch(
        node,
        a,
        weight,
        scale_a,
        scale_b,
        bias,
        out.dtype,
        f"{name}/dynamic/token",
        f"{name}/static/channel",
        bool(given["use_fast_accum"]),
    )


def _vector(scale: torch.Tensor, size: Any, row: bool = False) -> bool:
    """``[size]`` or ``[size, 1]``; with ``row`` also ``[1, size]``."""
    if scale.dim() == 1:
        return same(scale.shape[0], size)
    if scale.dim() != 2:
        return False
    rows, cols = scale.shape
    return (same(rows, size) and same(cols, 1)) or (row and same(rows, 1) and same(cols, size))


_FBGEMM, _MSLK = "fbgemm_gpu 1.2", "MSLK, as torchao 0.18 calls it"
_PRODUCT = ("XQ", "WQ", "x_scale", "w_scale", "bias", "use_fast_accum")

OPS = (
    LibraryOp(
        "(fbgemm|mslk)::quantize_fp8_per_row",
        "quantize",
        ("input", "bs", "scale_ub", "output_dtype", "stochastic_rounding"),
        _per_row,
        _FBGEMM,
    ),
    LibraryOp(
        "triton::quantize_fp8_row",
        "quantize",
        ("a", "scale_ub", "use_triton"),
        _row_triton,
        _MSLK,
    ),
    LibraryOp("(fbgemm|mslk)::f8f8bf16_rowwise", "scaled_mm", _PRODUCT, _rowwise, _FBGEMM),
)
