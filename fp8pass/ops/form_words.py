"""What the forms share: the names of dtypes, and the check that a word is in a closed list."""

from __future__ import annotations

import torch

from fp8pass.errors import OptionError

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.int8,
        torch.int32,
    )
}
MODEL_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: Names of the dtypes that activations have.
MODEL_NAMES = ("float32", "bfloat16", "float16")


def pick(value: str, allowed: tuple[str, ...], what: str) -> str:
    """``value`` if it is in the list. Raises :class:`OptionError` naming it and the list if not."""
    if value not in allowed:
        raise OptionError(f"{what} {value!r} is not one of {', '.join(allowed)}")
    return value
