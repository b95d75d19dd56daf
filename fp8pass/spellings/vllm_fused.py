"""Dialect of vLLM: its own fusions of a norm or an activation with a quantise, as sites done.

vLLM's passes and, since 0.32, its models put these in. Their arithmetic is that of kernels which
round in their own places (a norm in float32 up to the codes, say), so they are not taken apart: the
report names them, and what they were made of. Operators of vLLM's that quantise or multiply and
that no table knows are named as well.
"""

from __future__ import annotations

from torch import fx

from fp8pass.reasons import Verdict, no
from fp8pass.spellings.library_ops import Arguments, LibraryOp, Read, name_of

_TESTED = "vLLM's sources of 2026"


def _fused(what: str) -> Read:
    def read(node: fx.Node, given: Arguments) -> Verdict:
        return no("FP8-R011", op=name_of(node), node=node.name, dialect="vLLM", what=what)

    return read


def _op(name: str, kind: str, what: str) -> LibraryOp:
    return LibraryOp(name, kind, None, _fused(what), _TESTED, dialect="vllm")


def _unknown(node: fx.Node, given: Arguments) -> str:
    return "fp8pass does not know what it computes"


OPS = (
    _op("_C::rms_norm_static_fp8_quant", "norm", "norm and static quantise"),
    _op("_C::fused_add_rms_norm_static_fp8_quant", "norm", "residual, norm and static quantise"),
    _op("_C::rms_norm_dynamic_per_token_quant", "norm", "norm and quantise per token"),
    _op("_C::rms_norm_per_block_quant", "norm", "norm and quantise per group"),
    _op("_C::silu_and_mul_quant", "activation", "SiLU·mul and static quantise"),
    _op("_C::silu_and_mul_per_block_quant", "activation", "SiLU·mul and quantise per group"),
    _op(
        r"vllm::\w*aiter_(rms|fused_rms)\w*_quant", "norm", "norm and quantise (AITER)"
    ),
    _op(
        r"vllm::\w*aiter_act_mul_\w*quant", "activation", "activation and quantise (AITER)"
    ),
    LibraryOp(
        r"(_C|vllm)::\w*(scaled_mm|w8a8|blockscale)\w*", "scaled_mm", None, _unknown, _TESTED,
        dialect="vllm", order=200,
    ),
    LibraryOp(
        r"_C::\w*(fp8|int8)\w*quant\w*", "quantize", None, _unknown, _TESTED,
        dialect="vllm", order=200,
    ),
)  # fmt: skip
