"""A stand-in for the operators of vllm-xpu-kernels: their schemas, checks and reading of scales.

Written after ``csrc/xpu/onednn`` of that library: it tells granularities by the shapes of scales
alone, as the library does, so that a scale of a wrong shape gives wrong numbers here as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

SCHEMAS = json.loads((Path(__file__).parents[1] / "golden/schemas.json").read_text())
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_HALVES = (torch.bfloat16, torch.float16)
#: Columns of a block are a multiple of this for oneDNN.
_COLUMNS = 16


def _spread(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A scale per block as one per element of ``[rows, columns]``, which it divides evenly."""
    assert rows % scale.shape[0] == 0 and columns % scale.shape[1] == 0
    tall = scale.repeat_interleave(rows // scale.shape[0], 0)
    return tall.repeat_interleave(columns // scale.shape[1], 1)


def _memory(*tensors: torch.Tensor | None) -> None:
    """Scales and biases are read from their first byte on, as if they were contiguous."""
    for tensor in tensors:
        assert tensor is None or tensor.is_contiguous()


def fp8_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype | None,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """W8A8: ``a [m, k]``, ``b [k, n]``."""
    assert a.dim() == b.dim() == 2 and a.dtype == b.dtype and a.dtype in _FP8
    assert a.is_contiguous() and 1 in b.stride() and a.numel()
    assert out_dtype in _HALVES and a_scale is not None and b_scale is not None
    assert a_scale.dtype == b_scale.dtype == torch.float32
    _memory(a_scale, b_scale, bias)
    (m, k), n = a.shape, b.shape[1]
    first, second = a.float(), b.float()
    blocks = a_scale.dim() == 2 and a_scale.shape[1] > 1
    if blocks:
        assert a_scale.shape[1] == b_scale.shape[0]
        assert n // b_scale.shape[1] % _COLUMNS == 0
        first = first * _spread(a_scale, m, k)
        second = second * _spread(b_scale, k, n)
        value = first @ second
    else:
        value = first @ second
        assert a_scale.numel() in (1, m) and b_scale.numel() in (1, n)
        value = value * (a_scale.reshape(()) if a_scale.numel() == 1 else a_scale.reshape(m, 1))
        value = value * (b_scale.reshape(()) if b_scale.numel() == 1 else b_scale.reshape(1, n))
    return _finished(value, bias, n, out_dtype)


def fp8_gemm_w8a16(
    a: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """W8A16: ``a [m, k]``, ``b [k, n]``; the result has the dtype of ``a``."""
    assert a.dim() == b.dim() == 2 and a.dtype in _HALVES and b.dtype in _FP8
    assert a.is_contiguous() and 1 in b.stride() and a.numel()
    assert b_scale is not None and b_scale.dtype == torch.float32
    _memory(b_scale, bias)
    k, n = b.shape
    if b_scale.dim() == 2 and b_scale.shape[0] > 1:
        assert k // b_scale.shape[0] == n // b_scale.shape[1], "one size for both sides of a block"
        value = a.float() @ (b.float() * _spread(b_scale, k, n))
    else:
        assert b_scale.numel() in (1, n)
        one = b_scale.numel() == 1
        value = a.float() @ b.float() * (b_scale.reshape(()) if one else b_scale.reshape(1, n))
    return _finished(value, bias, n, a.dtype)


def _finished(value: torch.Tensor, bias: Any, n: int, dtype: Any) -> torch.Tensor:
    if bias is not None:
        assert bias.dtype == dtype and bias.shape == (n,)
        value = value + bias.float()
    return value.to(dtype)


@contextmanager
def loaded() -> Iterator[list[tuple[Any, ...]]]:
    """The operators in ``torch.ops._xpu_C``, on a CPU; yields the arguments of every call."""
    library = torch.library.Library("_xpu_C", "FRAGMENT")
    seen: list[tuple[Any, ...]] = []
    for name, kernel in (("fp8_gemm", fp8_gemm), ("fp8_gemm_w8a16", fp8_gemm_w8a16)):
        library.define(SCHEMAS[f"_xpu_C::{name}"]["schema"].removeprefix("_xpu_C::"))

        def call(*args: Any, _kernel: Any = kernel) -> torch.Tensor:
            seen.append(args)
            result: torch.Tensor = _kernel(*args)
            return result

        library.impl(name, call, "CPU")
    try:
        yield seen
    finally:
        library._destroy()
        for name in ("fp8_gemm", "fp8_gemm_w8a16"):
            torch.ops._xpu_C.__dict__.pop(name, None)
