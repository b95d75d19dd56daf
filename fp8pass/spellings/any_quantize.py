"""Every reader of a quantise that ends in a cast to fp8 or int8: of libraries, then the usual."""

from __future__ import annotations

from torch import fx

from fp8pass.reasons import Verdict, no
from fp8pass.spellings.by_place import read_by_place
from fp8pass.spellings.compressed_tensors import match_row_without_zeros
from fp8pass.spellings.quantize import QuantMatch, match_quantize
from fp8pass.spellings.torchao import match_float8_tensor
from fp8pass.spellings.walk import cast_to
from fp8pass.spellings.zero_point import match_zero_point


def match_any_quantize(root: fx.Node) -> QuantMatch | Verdict:
    """The quantise whose codes are ``root``, or why it is not read.

    A library's scale, where it is not understood, would be taken for a given one: so its readers
    come first.
    """
    found = (
        match_zero_point(root)
        or match_float8_tensor(root)
        or match_row_without_zeros(root)
        or match_quantize(root)
    )
    if isinstance(found, QuantMatch):
        why = read_by_place((found.root,))
        if not why and not found.form.static:
            # a scale and its zero point become columns of one tensor
            why = read_by_place((found.scale, found.zero), whole=found.zero is None)
        if why:
            return no("FP8-R001", dtype=cast_to(root), node=root.name, why=why)
    return found
