"""Triton kernels of ``fp8pass::silu_mul_quant`` and ``fp8pass::act_mul_quant``.

- a given scale, and a scale per group: one launch, element-wise over pieces of rows;
- a scale per token: one launch, a row in the registers of one program;
- a scale per tensor: a first launch writes the product and each program's largest value, a second
  one quantises the product (:func:`fp8pass.kernels.triton_quantize.quantize_tensor`); it is half
  the size of the two inputs, so that this moves no more than reading those again.

Without an ``up`` its pointer is None, and "the product" is the activation.
"""
# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from fp8pass.kernels import triton_launch as host
from fp8pass.kernels.triton_act_functions import activated, factor
from fp8pass.kernels.triton_limits import MAX_ROW, why_not_activation, why_not_silu
from fp8pass.kernels.triton_quantize import quantize_tensor
from fp8pass.kernels.triton_rounding import NATIVE, larger, rounded, rounded_pairs
from fp8pass.kernels.triton_rows import (
    amax_of,
    begin,
    load_chunks,
    load_scale,
    prepared,
    store_chunks,
    store_codes,
    store_groups,
)
from fp8pass.kernels.triton_scales import scale_of
from fp8pass.ops.forms import ActForm, QuantForm
from fp8pass.ops.library import nothing
from fp8pass.ops.quantize import empty_scale


@triton.jit
def _products(
    gates,
    ups,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    COMPUTE: tl.constexpr,
    MID: tl.constexpr,
    PRODUCT: tl.constexpr,
    OUT: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """``act(gate) * up`` with every rounding of its form, as float32."""
    results = ()
    for c in tl.static_range(CHUNKS):
        value = rounded(activated(gates[c], ACT, COMPUTE, NATIVE), MID, NATIVE)
        if GATED:
            value = rounded(value * factor(ups[c], ACT, COMPUTE, NATIVE), PRODUCT, NATIVE)
        if OUT != PRODUCT:
            value = rounded_pairs(value, OUT, NATIVE)
        results = results + (value,)
    return results


@triton.jit(do_not_specialize=["rows"])
def _silu_rows(
    gate_ptr,
    up_ptr,
    scale_ptr,
    q_ptr,
    y_ptr,
    rows,
    gate_pitch,
    up_pitch,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    STEP: tl.constexpr,
    MID: tl.constexpr,
    PRODUCT: tl.constexpr,
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    LIMIT: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    FIRST: tl.constexpr,
    FP8: tl.constexpr,
    LO: tl.constexpr,
    HI: tl.constexpr,
    COMPUTE: tl.constexpr,
    QUOTIENT: tl.constexpr,
    APPLY: tl.constexpr,
    ORDINARY: tl.constexpr,
    SCALE: tl.constexpr,
    FACTOR: tl.constexpr,
    FLOOR: tl.constexpr,
    FLOOR_VALUE: tl.constexpr,
    CEILING: tl.constexpr,
    POWER: tl.constexpr,
    WIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A scale for each row, and its codes."""
    begin(OVERLAP)
    index = tl.program_id(0)
    while index < rows:
        row = tl.cast(index, tl.int64)
        if GATED:
            ups = load_chunks(up_ptr + row * up_pitch, 0, CHUNKS, CHUNK, LIMIT, FIRST)
        gates = load_chunks(gate_ptr + row * gate_pitch, 0, CHUNKS, CHUNK, LIMIT, FIRST)
        if not GATED:
            ups = gates
        results = _products(gates, ups, GATED, ACT, STEP, MID, PRODUCT, OUT, CHUNKS)
        if y_ptr is not None:
            store_chunks(y_ptr + row * WIDTH, results, 0, OUT, CHUNKS, CHUNK, LIMIT)
        amax = amax_of(results, CHUNKS)
        scale, used = scale_of(amax, SCALE, FACTOR, FLOOR, FLOOR_VALUE, CEILING, POWER, WIDE)
        tl.store(scale_ptr + row, scale)
        store_codes(
            q_ptr + row * WIDTH, results, 0, prepared(used, APPLY, QUOTIENT, ORDINARY),
            FP8, LO, HI, COMPUTE, QUOTIENT, APPLY, ORDINARY, CHUNKS, CHUNK, LIMIT,
        )  # fmt: skip
        index += tl.num_programs(0)


@triton.jit(do_not_specialize=["pieces", "scale_pitch", "group_stride"])
def _silu_pieces(
    gate_ptr,
    up_ptr,
    scale_ptr,
    q_ptr,
    y_ptr,
    partials_ptr,
    pieces,
    gate_pitch,
    up_pitch,
    scale_pitch,
    group_stride,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    STEP: tl.constexpr,
    MID: tl.constexpr,
    PRODUCT: tl.constexpr,
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_ROW: tl.constexpr,
    LIMIT: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    FIRST: tl.constexpr,
    FP8: tl.constexpr,
    LO: tl.constexpr,
    HI: tl.constexpr,
    COMPUTE: tl.constexpr,
    QUOTIENT: tl.constexpr,
    APPLY: tl.constexpr,
    ORDINARY: tl.constexpr,
    SCALE: tl.constexpr,
    FACTOR: tl.constexpr,
    FLOOR: tl.constexpr,
    FLOOR_VALUE: tl.constexpr,
    CEILING: tl.constexpr,
    POWER: tl.constexpr,
    WIDE: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Codes for a given scale; with ``partials_ptr`` the first pass for one scale.

    With GROUP, a scale for each GROUP neighbours and its codes.
    """
    begin(OVERLAP)
    largest = tl.full((), 0.0, tl.float32)
    piece = tl.program_id(0)
    while piece < pieces:
        row = tl.cast(piece // PER_ROW, tl.int64)
        start = (piece % PER_ROW) * (CHUNKS * CHUNK)
        if partials_ptr is None:  # noqa: SIM102  (Triton drops each branch by itself)
            if GROUP == 0:
                used = load_scale(scale_ptr, row, scale_pitch, FIRST)
        if GATED:
            ups = load_chunks(up_ptr + row * up_pitch, start, CHUNKS, CHUNK, LIMIT, FIRST)
        gates = load_chunks(gate_ptr + row * gate_pitch, start, CHUNKS, CHUNK, LIMIT, FIRST)
        if not GATED:
            ups = gates
        results = _products(gates, ups, GATED, ACT, STEP, MID, PRODUCT, OUT, CHUNKS)
        if y_ptr is not None:
            store_chunks(y_ptr + row * WIDTH, results, start, OUT, CHUNKS, CHUNK, LIMIT)
        if partials_ptr is not None:
            largest = larger(largest, amax_of(results, CHUNKS))
        elif GROUP != 0:
            store_groups(
                q_ptr + row * WIDTH, scale_ptr + row * scale_pitch, group_stride, results, start,
                FP8, LO, HI, COMPUTE, QUOTIENT, APPLY, ORDINARY, SCALE, FACTOR, FLOOR, FLOOR_VALUE,
                CEILING, POWER, WIDE, GROUP, CHUNKS, CHUNK, LIMIT,
            )  # fmt: skip
        else:
            store_codes(
                q_ptr + row * WIDTH, results, start, prepared(used, APPLY, QUOTIENT, ORDINARY),
                FP8, LO, HI, COMPUTE, QUOTIENT, APPLY, ORDINARY, CHUNKS, CHUNK, LIMIT,
            )  # fmt: skip
        piece += tl.num_programs(0)
    if partials_ptr is not None:
        tl.store(partials_ptr + tl.program_id(0), largest)


@cache
def _act_constants(form: str, up_dtype: torch.dtype | None) -> dict[str, Any]:
    act = ActForm.parse(form)
    other = act.compute if act.act == "gpt_oss" else up_dtype
    product = act.mid if up_dtype is None else torch.promote_types(act.mid, other or act.mid)
    return {
        "GATED": up_dtype is not None,
        "ACT": act.act,
        "STEP": host.TL[act.compute],
        "MID": host.TL[act.mid],
        "PRODUCT": host.TL[product],
        "OUT": host.TL[act.out],
    }


def silu_mul_quant(
    gate: torch.Tensor,
    up: torch.Tensor,
    scale: torch.Tensor | None,
    form: str,
    quant_form: str,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``fp8pass::silu_mul_quant`` on a GPU: :func:`act_mul_quant` in a form of SiLU."""
    host.check(why_not_silu(form))
    return act_mul_quant(gate, up, scale, form, quant_form, keep)


def act_mul_quant(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    scale: torch.Tensor | None,
    form: str,
    quant_form: str,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``fp8pass::act_mul_quant`` on a GPU, as :func:`fp8pass.ops.activation.act_mul_quant`.

    Args:
        gate, up: ``[..., I]`` bf16, fp16 or fp32; rows may have any pitch, so that both may be
            halves of one packed ``[..., 2 I]``. ``up`` is None for the activation alone.
        scale: as :func:`fp8pass.kernels.triton_quantize.quantize` takes it.
        form, quant_form: texts of an :class:`ActForm` and a :class:`QuantForm`.
        keep: return the product too.

    Returns:
        ``(q, scale_out, y)`` as the reference.

    Raises:
        UnsupportedError: a value that :mod:`fp8pass.kernels.triton_limits` refuses.
        ValueError: the quantise is static and no scale is given, or the reverse.
    """
    width = host.width_of(gate)
    up_dtype = None if up is None else up.dtype
    why = why_not_activation(form, quant_form, width, gate.dtype, up_dtype)
    host.check(why, gate, *(() if up is None else (up,)))
    assert width is not None
    act, quant = ActForm.parse(form), QuantForm.parse(quant_form)
    scale = host.given_scale(quant, scale, gate)
    gates, rows, gate_pitch = host.rows_of(gate, width)
    ups, _, up_pitch = (None, 0, 0) if up is None else host.rows_of(up, width)
    constants = _act_constants(form, up_dtype)
    device = gate.device
    per_tensor = scale is None and quant.granularity == "tensor"

    if per_tensor and rows and (rows > 1 or width > MAX_ROW):
        y = torch.empty(gate.shape, dtype=act.out, device=device)
        shape = host.piece_shape(width, rows)
        pieces = host.piece_constants(width, shape)
        count = rows * pieces["PER_ROW"]
        programs = min(count, shape.programs, host.PARTIALS)
        partials = torch.empty((programs,), dtype=torch.float32, device=device)
        host.launch(
            _silu_pieces, programs, device,
            gates, ups, None, None, y, partials, count, gate_pitch, up_pitch, None, None,
            WIDTH=width, FIRST=shape.first, **constants, **pieces,
            **host.quant_constants(quant_form, True), GROUP=0,
        )  # fmt: skip
        q, scale_out = quantize_tensor(y, width, quant_form, partials)
        return q, scale_out, y if keep else nothing(y, y.dtype)

    q = torch.empty(gate.shape, dtype=quant.dtype, device=device)
    y = torch.empty(gate.shape if keep else (0,), dtype=act.out, device=device)
    stored, kept = host.as_stored(q), y if keep else None
    if scale is not None or quant.group:
        scale_out = nothing(gate, torch.float32) if scale is not None else empty_scale(gate, quant)
        used = scale_out if scale is None else scale
        if rows:
            shape = host.piece_shape(width, rows)
            pieces = host.piece_constants(width, shape)
            count = rows * pieces["PER_ROW"]
            host.launch(
                _silu_pieces, min(count, shape.programs), device,
                gates, ups, used, stored, kept, None, count, gate_pitch, up_pitch,
                *host.scale_strides(quant, used),
                WIDTH=width, FIRST=shape.first, **constants, **pieces,
                **host.quant_constants(quant_form, not used.dim()), GROUP=quant.group or 0,
            )  # fmt: skip
        return q, scale_out, y
    one = () if per_tensor else (*gate.shape[:-1], 1)
    scale_out = torch.empty(one, dtype=torch.float32, device=device)
    if not rows:
        return q, scale_out.fill_(host.scale_of_nothing(quant)), y
    shape = host.row_shape(width, rows)
    host.launch(
        _silu_rows, min(rows, shape.programs), device,
        gates, ups, scale_out, stored, kept, rows, gate_pitch, up_pitch,
        FIRST=shape.first, **constants, **host.row_constants(width, shape),
        **host.quant_constants(quant_form, not scale_out.dim()),
    )  # fmt: skip
    return q, scale_out, y
