"""torch's product of the codes alone, in float32, and one Triton launch that scales it.

For scales per token or per channel at numbers of rows where cuBLASLt's product without them is so
much faster than the row-wise one that a float32 result, which stays in the L2 cache, and a second
launch cost less than the difference.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from fp8pass.errors import UnsupportedError
from fp8pass.kernels.triton_dispatch import Launcher
from fp8pass.kernels.triton_gemm import combined, combining, machine, vector_of
from fp8pass.kernels.triton_gemm_tiles import Tile
from fp8pass.kernels.triton_rounding import NATIVE

#: The scaling kernel adds up the sums of a divided depth; here there is one sum.
_WHOLE = Tile(True, 1, 1, 1, 1, 1)


@lru_cache(maxsize=1024)
def _launcher(n: int, rows: bool, columns: bool, bias: bool, overlap: bool) -> tuple[Launcher, int]:
    flags = {"ROWS": rows, "COLUMNS": columns, "BIAS": bias, "OVERLAP": overlap}
    block = combined(n)
    return combining(n, block, _WHOLE, True, flags), block


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    """The scaled product of two fp8 matrices.

    Args:
        a: ``[M, K]`` codes as ``torch._scaled_mm`` takes them: rows contiguous, K a multiple of 16.
        b: ``[K, N]`` codes, the ``.t()`` view of a row-major ``[N, K]`` weight; N a multiple of 16.
        scale_a: float32 dequant scale, one element (per-tensor) or ``[M, 1]`` (per-token).
        scale_b: float32 dequant scale, one element or ``[1, N]`` (per-channel).
        bias: ``[N]`` bf16, fp16 or fp32, or None; added in float32.
        out_dtype: bf16, fp16 or fp32.
        fast_accum: the tensor cores' reduced accumulation may be used.

    Returns:
        contiguous ``[M, N]``: product, scales and bias in float32, one rounding.

    Raises:
        UnsupportedError: scales or a bias that do not fit or are not float32; torch raises
            RuntimeError for operands that it does not multiply.
    """
    m, n = a.shape[0], b.shape[1]
    out = torch.empty((m, n), dtype=out_dtype, device=a.device)
    if out.numel() == 0:
        return out
    scale_a, rows = vector_of(scale_a, m, "scale_a")
    scale_b, columns = vector_of(scale_b, n, "scale_b")
    if scale_a.dtype != torch.float32 or scale_b.dtype != torch.float32:
        what = f"scales of {scale_a.dtype} and {scale_b.dtype}"
        raise UnsupportedError(f"fp8pass's scaling kernel does not take {what}")
    offset = scale_b if bias is None else vector_of(bias, n, "bias")[0]  # or any pointer
    # made at each call: what is kept from one to the next may lie in the memory of a CUDA graph
    one = torch.ones((), device=a.device)
    sums = torch._scaled_mm(a, b, one, one, out_dtype=torch.float32, use_fast_accum=fast_accum)
    overlap = bool(NATIVE.value) and machine(a.device)[1]
    launcher, block = _launcher(n, rows, columns, bias is not None, overlap)
    if a.is_cuda and a.device.index != torch.cuda.current_device():
        with torch.cuda.device(a.device):
            launcher(m * -(-n // block), sums, scale_a, scale_b, offset, out, m, n)
    else:
        launcher(m * -(-n // block), sums, scale_a, scale_b, offset, out, m, n)
    return out
