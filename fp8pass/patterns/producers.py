"""The fusions of a producer with its quantise.

    x ─ rms_norm ─ y ─ quantize ─ (q, scale)        ──►   rms_norm_quant(x) ─ (q, scale[, y])
                   └─ other readers

    x ─┐                                                  add_rms_norm_quant(x, r)
    r ─┴ add_rms_norm ─ y ─ quantize ─ (q, scale)   ──►       ─ (q, scale[, y], total)
                      └ total ─ the residual's readers

    x ─ layer_norm ─ y ─ quantize ─ (q, scale)      ──►   layer_norm_quant(x) ─ (q, scale[, y])

    gate ─┐
    up ───┴ silu_mul ─ y ─ quantize ─ (q, scale)    ──►   silu_mul_quant(gate, up) ─ (q, scale[, y])

    the same for act_mul, which has every other activation, with or without an up

``y`` is an output of the fused operator only if something else reads it. Numerics contract: every
rounding of the source is performed in the same place (docs/numerics.md); both forms travel
unchanged as arguments.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._inductor.pattern_matcher import MULTIPLE, CallFunction, KeywordArg, PatternExpr

import fp8pass.ops  # noqa: F401  (registers the operators that the patterns name)
from fp8pass.patterns.rule import SHARED, Fusion, Rule
from fp8pass.workbench import Swap

_ops = torch.ops.fp8pass


def _quantise(value: PatternExpr) -> CallFunction:
    """``quantize(value)`` in any form, with any number of readers."""
    return CallFunction(
        _ops.quantize.default,
        value,
        KeywordArg("scale"),
        KeywordArg("quant_form"),
        _users=MULTIPLE,
    )


def _producer(op: Any, *names: str) -> CallFunction:
    return CallFunction(op, *(KeywordArg(name) for name in names), _users=MULTIPLE)


def _emit(fusion: Fusion, op: Any, names: tuple[str, ...], total: bool = False) -> list[Swap]:
    """Put ``op(names..., keep)`` in place of the producer and the quantise of ``fusion``."""
    bench, bound = fusion.bench, fusion.bound
    keep = bool(fusion.other_readers())
    quantise, producer = fusion.quantise, fusion.producer
    args = (*(bound[name] for name in names), keep)
    q, scale_out = quantise.node.meta["val"]
    y = fusion.y.meta["val"]
    values = [q, scale_out, y if keep else bench.fresh(y, (0,), y.dtype)]
    if total:
        values.append(producer.outputs["total"].meta["val"])
    node = bench.call(op, args, like=producer.node, value=tuple(values))
    results = bench.items(node, like=quantise.node)
    swaps = [
        bench.swap(quantise.outputs["q"], results[0]),
        bench.swap(quantise.outputs["scale"], results[1]),
    ]
    if total:
        swaps.append(bench.swap(producer.outputs["total"], results[3]))
    if keep:
        swaps.append(bench.swap(fusion.y, results[2]))
        # the quantise itself is now dead; it must go on reading the producer, or undoing the
        # fusion would let it read its own result
        quantise.node.replace_input_with(results[2], fusion.y)
    return swaps


_NORM = ("x", "weight", "eps", "form")
_ADD_NORM = ("x", "residual", "weight", "eps", "form")
_LAYER_NORM = ("x", "weight", "bias", "eps", "form")
_ACT = ("gate", "up", "form")

RMS_NORM_QUANT = Rule(
    name="rms_norm_quant",
    pattern=_quantise(_producer(_ops.rms_norm.default, *_NORM)),
    where=SHARED,
    emit=lambda fusion: _emit(
        fusion,
        _ops.rms_norm_quant.default,
        ("x", "weight", "scale", "eps", "form", "quant_form"),
    ),
)

ADD_RMS_NORM_QUANT = Rule(
    name="add_rms_norm_quant",
    pattern=_quantise(
        CallFunction(
            operator.getitem, _producer(_ops.add_rms_norm.default, *_ADD_NORM), 0, _users=MULTIPLE
        )
    ),
    where=SHARED,
    emit=lambda fusion: _emit(
        fusion,
        _ops.add_rms_norm_quant.default,
        ("x", "residual", "weight", "scale", "eps", "form", "quant_form"),
        total=True,
    ),
    order=10,
)

LAYER_NORM_QUANT = Rule(
    name="layer_norm_quant",
    pattern=_quantise(_producer(_ops.layer_norm.default, *_LAYER_NORM)),
    where=SHARED,
    emit=lambda fusion: _emit(
        fusion,
        _ops.layer_norm_quant.default,
        ("x", "weight", "bias", "scale", "eps", "form", "quant_form"),
    ),
)

SILU_MUL_QUANT = Rule(
    name="silu_mul_quant",
    pattern=_quantise(_producer(_ops.silu_mul.default, *_ACT)),
    where=SHARED,
    emit=lambda fusion: _emit(
        fusion, _ops.silu_mul_quant.default, ("gate", "up", "scale", "form", "quant_form")
    ),
)

ACT_MUL_QUANT = Rule(
    name="act_mul_quant",
    pattern=_quantise(_producer(_ops.act_mul.default, *_ACT)),
    where=SHARED,
    emit=lambda fusion: _emit(
        fusion, _ops.act_mul_quant.default, ("gate", "up", "scale", "form", "quant_form")
    ),
)

RULES: tuple[Rule, ...] = (
    ADD_RMS_NORM_QUANT,
    RMS_NORM_QUANT,
    LAYER_NORM_QUANT,
    SILU_MUL_QUANT,
    ACT_MUL_QUANT,
)
