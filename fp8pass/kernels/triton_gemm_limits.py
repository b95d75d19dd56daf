"""What the Triton product takes, as a pure predicate: no Triton, no device, only values.

It answers None ("takes it") or one phrase that names the failing value, which the report prints
after "does not take". The kernel asks it before it launches, too.
"""

from __future__ import annotations

from functools import cache

import torch

from fp8pass.ops.forms import MODEL_DTYPES

KINDS = ("skinny", "general")
#: Rows that the kind ``skinny`` is made for: the narrow side of one tile.
SKINNY_ROWS = 64
#: Codes that the tensor cores of Hopper multiply, in any mix.
CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
#: Sizes and positions along K are 32-bit numbers; a tile may reach beyond the end.
MAX_SIZE = 2**31 - 2**16


@cache
def why_not_gemm(
    kind: str,
    m: int | None,
    n: int | None,
    k: int | None,
    a_dtype: torch.dtype,
    b_dtype: torch.dtype,
    out_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> str | None:
    """Why the kernel refuses a product ``[M, K] @ [K, N]``.

    Any sizes are taken; where K (or the pitch of the weight) is not a multiple of 16 the loads are
    narrow and slow. Scales are float32, each one element or a vector, in any mix.

    Args:
        kind: ``"skinny"`` or ``"general"``.
        m: the largest number of rows, None for no bound.
        n, k: sizes of the weight, None where symbolic.
        a_dtype, b_dtype: of the codes.
        out_dtype: of the result.
        bias_dtype: None without a bias.

    Returns:
        None, or one phrase naming the failing value.
    """
    if kind not in KINDS:
        return f"the kind {kind!r}: it is one of {', '.join(KINDS)}"
    if kind == "skinny" and (m is None or m > SKINNY_ROWS):
        rows = "any number of" if m is None else m
        return f"{rows} rows (skinny: at most {SKINNY_ROWS})"
    for name, size in (("N", n), ("K", k)):
        if size is None:
            return f"{name} that is not known when compiling"
        if size > MAX_SIZE:
            return f"{name} = {size} (at most {MAX_SIZE})"
    for name, dtype in (("a", a_dtype), ("b", b_dtype)):
        if dtype not in CODES:
            return f"{name} of {dtype}"
    if out_dtype not in MODEL_DTYPES:
        return f"a result of {out_dtype}"
    if bias_dtype is not None and bias_dtype not in MODEL_DTYPES:
        return f"a bias of {bias_dtype}"
    return None
