"""Dialect of torchao: its own operators, none of which is read.

What ``Float8Tensor`` and ``Int8Tensor`` do reaches the graph as plain aten (and, where the package
mslk is installed, as the operators of :mod:`fp8pass.spellings.fbgemm`). The operators here are
named so that the report says why a site was left, where it would otherwise say nothing.
"""

from __future__ import annotations

from torch import fx

from fp8pass.spellings.library_ops import Arguments, LibraryOp

_TORCHAO = "torchao 0.18"


def _blockwise(node: fx.Node, given: Arguments) -> str:
    size = given.get("block_size", 128)
    return (
        f"it multiplies with one scale for each 1x{size} block of its activation, which no kernel "
        "of fp8pass takes"
    )


def _integers(node: fx.Node, given: Arguments) -> str:
    return "it multiplies int8, which no kernel of fp8pass takes"


def _opaque(node: fx.Node, given: Arguments) -> str:
    return "its scale comes in from elsewhere, in blocks that its arguments do not tell"


OPS = (
    LibraryOp("ao::blockwise_fp8_gemm", "scaled_mm", None, _blockwise, _TORCHAO),
    LibraryOp("torchao::int(_scaled)?_matmul", "scaled_mm", None, _integers, _TORCHAO),
    LibraryOp(
        "torchao::quantize_affine_float8_non_decomposed", "quantize", None, _opaque, _TORCHAO
    ),
)
