"""Every reader of a quantise that ends in a cast to fp8 or int8: of libraries, then the usual."""

from __future__ import annotations

from torch import fx

from fp8pass.reasons import Verdict
from fp8pass.spellings.compressed_tensors import match_row_without_zeros
from fp8pass.spellings.quantize import QuantMatch, match_quantize
from fp8pass.spellings.torchao import match_float8_tensor
from fp8pass.spellings.zero_point import match_zero_point


def match_any_quantize(root: fx.Node) -> QuantMatch | Verdict:
    """The quantise whose codes are ``root``, or why it is not read.

    A library's scale, where it is not understood, would be taken for a given one: so its readers
    come first.
    """
    affine = match_zero_point(root)
    if affine is not None:
        return affine
    return match_float8_tensor(root) or match_row_without_zeros(root) or match_quantize(root)
