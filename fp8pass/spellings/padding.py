"""Reads rows that are padded before a scaled product and cut off again behind it.

    codes [M, K] ─ pad to [M + n, K] ─ _scaled_mm ─ slice of the first M rows

vLLM pads to 17 rows what it compiles in one piece, since torch had slow products of fewer. With one
scale for all rows, each row of the product comes from its own row of codes alone, so that the
product of the codes is the same numbers. Padding around products that are scaled afterwards is read
in :mod:`fp8pass.spellings.dequantised`.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fp8pass.spellings.walk import argument, aten, is_call, one_element, only_user, same, tensor


def without_padding(root: fx.Node, codes: Any, scale: Any) -> tuple[fx.Node, Any]:
    """``(slice, codes that are padded)`` of a product, ``(root, codes)`` where nothing is padded.

    Args:
        root: the product.
        codes: its first operand.
        scale: the dequant scale of that.
    """
    held, padded, cut = tensor(scale), tensor(codes), only_user(root)
    if held is None or padded is None or cut is None or not one_element(held):
        return root, codes
    if not is_call(codes, aten.constant_pad_nd.default) or not is_call(cut, aten.slice.Tensor):
        return root, codes
    inside, sizes = codes.args[0], codes.args[1]
    value, end = tensor(inside), tensor(cut)
    if value is None or end is None or value.dim() != 2 or len(sizes) != 4:
        return root, codes
    if not all(isinstance(size, int) and size == 0 for size in sizes[:3]):
        return root, codes
    first, step = argument(cut, 2, "start", 0), argument(cut, 4, "step", 1)
    if argument(cut, 1, "dim", 0) != 0 or first not in (0, None) or step != 1:
        return root, codes
    return (cut, inside) if same(end.shape[0], value.shape[0]) else (root, codes)
