"""What the Triton product takes, as a pure predicate: no Triton, no device, only values.

It answers None ("takes it") or one phrase that names the failing value, which the report prints
after "does not take". The kernel asks it before it launches, too.
"""

from __future__ import annotations

from functools import cache

import torch

from fp8pass.ops.forms import MODEL_DTYPES

#: The kind for int8 codes; the others are for fp8.
INT8 = "int8"
KINDS = ("skinny", "general", INT8)
#: Rows that the kind ``skinny`` is made for: the narrow side of one tile.
SKINNY_ROWS = 64
#: Codes that the tensor cores of Hopper multiply, in any mix.
CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
#: Sizes and positions along K are 32-bit numbers; a tile may reach beyond the end.
MAX_SIZE = 2**31 - 2**16
#: Most products of two int8 codes whose sum is sure to fit in int32.
MAX_INT8_DEPTH = 2**31 // 128**2 - 1
#: Sizes of a block of scales: of a row of activations, and both of a weight.
BLOCK = 128


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
        kind: ``"skinny"``, ``"general"`` or ``"int8"``.
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
    why = _why_not_sizes(n, k, MAX_INT8_DEPTH if kind == INT8 else MAX_SIZE)
    if why is not None:
        return why
    for name, dtype in (("a", a_dtype), ("b", b_dtype)):
        if dtype not in ((torch.int8,) if kind == INT8 else CODES):
            return f"{name} of {dtype}"
    return _why_not_result(out_dtype, bias_dtype)


@cache
def why_not_block(
    n: int | None,
    k: int | None,
    a_dtype: torch.dtype,
    b_dtype: torch.dtype,
    out_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> str | None:
    """Why the kernel for scales per block refuses a product; arguments and answer as above.

    Any sizes are taken, the last block may be cut short, and the scales may have any strides.
    """
    why = _why_not_sizes(n, k, MAX_SIZE)
    if why is not None:
        return why
    for name, dtype in (("a", a_dtype), ("b", b_dtype)):
        if dtype not in CODES:
            return f"{name} of {dtype}"
    return _why_not_result(out_dtype, bias_dtype)


def _why_not_sizes(n: int | None, k: int | None, deepest: int) -> str | None:
    for name, size, most in (("N", n, MAX_SIZE), ("K", k, deepest)):
        if size is None:
            return f"{name} that is not known when compiling"
        if size > most:
            return f"{name} = {size} (at most {most})"
    return None


def _why_not_result(out_dtype: torch.dtype, bias_dtype: torch.dtype | None) -> str | None:
    if out_dtype not in MODEL_DTYPES:
        return f"a result of {out_dtype}"
    if bias_dtype is not None and bias_dtype not in MODEL_DTYPES:
        return f"a bias of {bias_dtype}"
    return None
