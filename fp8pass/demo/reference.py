"""The reference for numbers: every ``_scaled_mm`` of the eager model done in float32.

Both operands are dequantised to float32 and multiplied by ``mm``, and the result is rounded once:
what ``torch._scaled_mm`` means, on any CPU and any torch, and much faster than its per-tensor form.
:func:`compare` shows first that it is the same to the bit. What products in the model's dtype are
left (the head) are done likewise, float32 and one rounding: that is how bf16 products accumulate
anyway, and a CPU without bf16 instructions is eight times faster so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

#: M, N, K of the products that :func:`compare` makes.
SHAPES = ((4, 16, 32), (8, 32, 64), (17, 48, 96))
_FP8 = torch.float8_e4m3fn
_HALF = (torch.bfloat16, torch.float16)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """``(a * scale_a) @ (b * scale_b) + bias`` in float32, rounded once; arguments as torch's.

    Raises:
        NotImplementedError: a result in fp8, which no model here asks for.
    """
    if scale_result is not None or out_dtype is None or out_dtype.itemsize == 1:
        raise NotImplementedError(f"the reference has no result in {out_dtype}")
    product = torch.mm(a.float() * scale_a, b.float() * scale_b)
    if bias is not None:
        product += bias.float()
    return product.to(out_dtype)


class _Mode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._scaled_mm.default:
            self.calls += 1
            return scaled_mm(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and args[0].dtype in _HALF:
            return torch.mm(args[0].float(), args[1].float()).to(args[0].dtype)
        return func(*args, **(kwargs or {}))


@contextmanager
def reference_products() -> Iterator[_Mode]:
    """Within, every ``_scaled_mm`` that runs eagerly is :func:`scaled_mm`; ``.calls`` counts."""
    with _Mode() as mode:
        yield mode


@dataclass(frozen=True)
class Comparison:
    """One product by torch and by the reference.

    Attributes:
        shape: M, N, K.
        differing: elements of the bf16 result that differ in any bit; None if torch raised.
        error: what torch raised, or "".
    """

    shape: tuple[int, int, int]
    differing: int | None
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "shape": list(self.shape)}


def compare(per_channel: bool) -> list[Comparison]:
    """The reference against ``torch._scaled_mm`` on :data:`SHAPES`, with per-token × per-channel or
    per-tensor × per-tensor scales, result in bf16.

    Codes are small whole numbers and scales eighths, so that every sum is exact in float32 in any
    order: which order a CPU's library takes must not decide whether the two agree. What is left to
    differ is what matters, the scales, where they go and how often the result is rounded.
    """
    generator = torch.Generator().manual_seed(0)
    found = []
    for m, n, k in SHAPES:
        codes_x = torch.randint(-8, 9, (m, k), generator=generator)
        codes_w = torch.randint(-8, 9, (n, k), generator=generator)
        a, b = codes_x.float().to(_FP8), codes_w.float().to(_FP8).t()
        scale_x, scale_w = (
            torch.randint(1, 16, (rows, 1) if per_channel else (), generator=generator) / 8
            for rows in (m, n)
        )
        scale_b = scale_w.t() if per_channel else scale_w
        expected = scaled_mm(a, b, scale_x, scale_b, out_dtype=torch.bfloat16)
        try:
            result = torch._scaled_mm(a, b, scale_x, scale_b, out_dtype=torch.bfloat16)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else ""
            found.append(Comparison((m, n, k), None, f"{type(error).__name__}: {first}"))
            continue
        differing = (expected.view(torch.int16) != result.view(torch.int16)).sum().item()
        found.append(Comparison((m, n, k), int(differing)))
    return found
