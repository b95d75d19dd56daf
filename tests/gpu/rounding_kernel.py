"""A kernel that casts, by the hardware and on the bits: only imported where there is a GPU."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8pass.kernels.triton_rounding import narrow, rounded_pairs, to_fp8


@triton.jit
def _casts(x_ptr, bf16_ptr, fp16_ptr, e4_ptr, e5_ptr, N: tl.constexpr, NATIVE: tl.constexpr):
    places = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(x_ptr + places)
    tl.store(bf16_ptr + places, narrow(x, tl.bfloat16, NATIVE))
    tl.store(fp16_ptr + places, rounded_pairs(x, tl.float16, NATIVE).to(tl.float16))
    tl.store(e4_ptr + places, to_fp8(x, tl.float8e4nv, -448.0, 448.0, NATIVE))
    tl.store(e5_ptr + places, to_fp8(x, tl.float8e5, -57344.0, 57344.0, NATIVE))


def casts(x: torch.Tensor, native: bool) -> tuple[torch.Tensor, ...]:
    """float32 ``x`` (a multiple of 1024 values) as bf16, fp16, e4m3fn and e5m2."""
    fp8 = (torch.float8_e4m3fn, torch.float8_e5m2)
    out = [torch.empty_like(x, dtype=d) for d in (torch.bfloat16, torch.float16, *fp8)]
    stored = [o if native or o.element_size() > 1 else o.view(torch.uint8) for o in out]
    _casts[(x.numel() // 1024,)](x, *stored, 1024, native)
    return tuple(out)
