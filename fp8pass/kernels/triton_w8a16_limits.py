"""What the weight-only Triton product takes, as a pure predicate: no Triton, no device.

It answers None ("takes it") or one phrase that names the failing value.
"""

from __future__ import annotations

from functools import cache

import torch

from fp8pass.kernels.triton_gemm_limits import MAX_SIZE
from fp8pass.ops.forms import MODEL_DTYPES
from fp8pass.ops.weight_form import WeightForm
from fp8pass.quant_key import QuantKey

#: Codes that bf16 and fp16 hold, every one of them.
CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
ACTIVATIONS = (torch.bfloat16, torch.float16)
#: Blocks along K are cut into tiles of at least this depth.
SMALLEST_BLOCK = 16


@cache
def why_not_w8a16(
    n: int | None,
    k: int | None,
    a_dtype: torch.dtype,
    b_dtype: torch.dtype,
    out_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    weight_key: str,
    form: str,
) -> str | None:
    """Why the kernel refuses ``[M, K] @ [K, N]``; any number of rows, any N and K.

    Args:
        n, k: sizes of the weight, None where symbolic.
        a_dtype: of the activations.
        b_dtype: of the codes.
        out_dtype: of the result.
        bias_dtype: None without a bias.
        weight_key: text of the weight's :class:`fp8pass.quant_key.QuantKey`.
        form: text of a :class:`fp8pass.ops.weight_form.WeightForm`.

    Returns:
        None, or one phrase naming the failing value.
    """
    for name, size in (("N", n), ("K", k)):
        if size is None:
            return f"{name} that is not known when compiling"
        if size > MAX_SIZE:
            return f"{name} = {size} (at most {MAX_SIZE})"
    if a_dtype not in ACTIVATIONS:
        return f"activations of {a_dtype}"
    if b_dtype not in CODES:
        return f"a weight of {b_dtype}"
    if out_dtype not in MODEL_DTYPES:
        return f"a result of {out_dtype}"
    if bias_dtype is not None and bias_dtype not in MODEL_DTYPES:
        return f"a bias of {bias_dtype}"
    made = WeightForm.parse(form)
    if made.product not in (a_dtype, torch.float32):
        return f"a product in {made.product} of activations of {a_dtype}"
    if made.scaled not in (a_dtype, torch.float32):
        return f"a scaling in {made.scaled} of activations of {a_dtype}"
    group = QuantKey.parse(weight_key).scale.group
    if group.name.startswith("group"):
        for name, block in (("K", group.row), ("N", group.col)):
            if block % SMALLEST_BLOCK or block & (block - 1):
                least = SMALLEST_BLOCK
                return f"blocks of {block} along {name} (a power of two, at least {least})"
    return None
