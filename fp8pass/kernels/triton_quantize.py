"""Triton kernels of ``fp8pass::quantize``.

- a scale per token: one launch, a row to a program, read once;
- a given scale, and a scale per group: one launch, element-wise over pieces of rows;
- a scale per tensor: two launches. In the first each program leaves the largest value of its
  pieces; in the second each program takes the largest of those and quantises. The maximum does not
  depend on an order, so the result is the same in every run. A single row is quantised as a token.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8pass.kernels import triton_launch as host
from fp8pass.kernels.triton_limits import MAX_ROW, why_not_quantize
from fp8pass.kernels.triton_rounding import larger
from fp8pass.kernels.triton_rows import (
    amax_of,
    amax_of_partials,
    begin,
    load_chunks,
    load_scale,
    prepared,
    store_codes,
    store_groups,
)
from fp8pass.kernels.triton_scales import scale_of
from fp8pass.ops.forms import QuantForm
from fp8pass.ops.library import nothing
from fp8pass.ops.quantize import empty_scale


@triton.jit(do_not_specialize=["rows"])
def _quantize_rows(
    x_ptr,
    q_ptr,
    scale_ptr,
    rows,
    pitch,
    WIDTH: tl.constexpr,
    LIMIT: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
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
        chunks = load_chunks(x_ptr + row * pitch, 0, CHUNKS, CHUNK, LIMIT)
        amax = amax_of(chunks, CHUNKS)
        scale, used = scale_of(amax, SCALE, FACTOR, FLOOR, FLOOR_VALUE, CEILING, POWER, WIDE)
        tl.store(scale_ptr + row, scale)
        store_codes(
            q_ptr + row * WIDTH, chunks, 0, prepared(used, APPLY, QUOTIENT, ORDINARY),
            FP8, LO, HI, COMPUTE, QUOTIENT, APPLY, ORDINARY, CHUNKS, CHUNK, LIMIT,
        )  # fmt: skip
        index += tl.num_programs(0)


@triton.jit(do_not_specialize=["pieces"])
def _amax_pieces(
    x_ptr,
    partials_ptr,
    pieces,
    pitch,
    PER_ROW: tl.constexpr,
    LIMIT: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The largest absolute value of each program's pieces."""
    begin(OVERLAP)
    largest = tl.full((), 0.0, tl.float32)
    piece = tl.program_id(0)
    while piece < pieces:
        row = tl.cast(piece // PER_ROW, tl.int64)
        start = (piece % PER_ROW) * (CHUNKS * CHUNK)
        chunks = load_chunks(x_ptr + row * pitch, start, CHUNKS, CHUNK, LIMIT)
        largest = larger(largest, amax_of(chunks, CHUNKS))
        piece += tl.num_programs(0)
    tl.store(partials_ptr + tl.program_id(0), largest)


@triton.jit(do_not_specialize=["pieces", "partials", "scale_pitch", "group_stride"])
def _quantize_pieces(
    x_ptr,
    q_ptr,
    scale_ptr,
    partials_ptr,
    pieces,
    partials,
    pitch,
    scale_pitch,
    group_stride,
    WIDTH: tl.constexpr,
    PARTIALS: tl.constexpr,
    PER_ROW: tl.constexpr,
    LIMIT: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
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
    """Codes for one scale: a given one, or the one that follows from a first pass's maxima.

    With GROUP, a scale for each GROUP neighbours and its codes.
    """
    begin(OVERLAP)
    if GROUP == 0:  # noqa: SIM102  (Triton drops each branch by itself)
        if SCALE != "given":
            amax = amax_of_partials(partials_ptr, partials, PARTIALS)
            scale, used = scale_of(amax, SCALE, FACTOR, FLOOR, FLOOR_VALUE, CEILING, POWER, WIDE)
            if tl.program_id(0) == 0:
                tl.store(scale_ptr, scale)
    piece = tl.program_id(0)
    while piece < pieces:
        row = tl.cast(piece // PER_ROW, tl.int64)
        start = (piece % PER_ROW) * (CHUNKS * CHUNK)
        chunks = load_chunks(x_ptr + row * pitch, start, CHUNKS, CHUNK, LIMIT)
        if GROUP != 0:
            store_groups(
                q_ptr + row * WIDTH, scale_ptr + row * scale_pitch, group_stride, chunks, start,
                FP8, LO, HI, COMPUTE, QUOTIENT, APPLY, ORDINARY, SCALE, FACTOR, FLOOR, FLOOR_VALUE,
                CEILING, POWER, WIDE, GROUP, CHUNKS, CHUNK, LIMIT,
            )  # fmt: skip
        else:
            if SCALE == "given":
                # here, so that what it takes is not waited for first
                used = load_scale(scale_ptr, row, scale_pitch)
            store_codes(
                q_ptr + row * WIDTH, chunks, start, prepared(used, APPLY, QUOTIENT, ORDINARY),
                FP8, LO, HI, COMPUTE, QUOTIENT, APPLY, ORDINARY, CHUNKS, CHUNK, LIMIT,
            )  # fmt: skip
        piece += tl.num_programs(0)


def quantize(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    form: str,
    scale_ub: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``fp8pass::quantize`` on a GPU, as :func:`fp8pass.ops.quantize.reference`.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32; rows may have any pitch.
        scale: float32 on the device of ``x`` if ``form`` is static, else None: one element,
            ``[..., 1]`` per token or ``[..., K / n]`` per group, of any strides.
        form: ``str`` of a :class:`fp8pass.ops.forms.QuantForm`.
        scale_ub: None: a form that has one is refused.

    Returns:
        ``(q, scale_out)`` as the reference; the scale of a tensor without rows is that of zeros.
        Scales per group have the strides of the form's layout.

    Raises:
        UnsupportedError: a value that :mod:`fp8pass.kernels.triton_limits` refuses.
        ValueError: the form is static and no scale is given, or the reverse.
    """
    quant = QuantForm.parse(form)
    width = host.width_of(x)
    host.check(why_not_quantize(form, width, x.dtype))
    scale = host.given_scale(quant, scale, x)
    if scale_ub is not None:
        raise ValueError(f"the form {form} has no upper bound, but scale_ub is given")
    assert width is not None
    if scale is None and quant.granularity == "tensor":
        return quantize_tensor(x, width, form, None)
    q = host.codes_like(x, quant.dtype)
    source, rows, pitch = host.rows_of(x, width)
    if scale is not None or quant.group:
        scale_out = nothing(x, torch.float32) if scale is not None else empty_scale(x, quant)
        used = scale_out if scale is None else scale
        if rows:
            shape = host.piece_shape(width, rows)
            constants = host.piece_constants(width, shape)
            pieces = rows * constants["PER_ROW"]
            host.launch(
                _quantize_pieces, min(pieces, shape.programs), x.device,
                source, host.as_stored(q), used, None, pieces, 0, pitch,
                *host.scale_strides(quant, used), width, host.PARTIALS,
                **constants, **host.quant_constants(form, not used.dim()),
                GROUP=quant.group or 0,
            )  # fmt: skip
        return q, scale_out
    scale_out = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    if rows:
        _rows(host.Rows(source, rows, pitch), q, scale_out, width, form)
    return q, scale_out


def _rows(x: host.Rows, q: torch.Tensor, scale_out: torch.Tensor, width: int, form: str) -> None:
    """A scale for each row; ``scale_out`` without dimensions is that of a single row."""
    shape = host.row_shape(width, x.rows)
    host.launch(
        _quantize_rows, min(x.rows, shape.programs), q.device,
        x.tensor, host.as_stored(q), scale_out, x.rows, x.pitch,
        **host.row_constants(width, shape),
        **host.quant_constants(form, not scale_out.dim()),
    )  # fmt: skip


def quantize_tensor(
    x: torch.Tensor, width: int, form: str, partials: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale for the whole of ``x``.

    ``partials``: float32 maxima that together are the largest absolute value of ``x``, at most
    ``PARTIALS``; None if they are still to be found.
    """
    quant = QuantForm.parse(form)
    q = host.codes_like(x, quant.dtype)
    source, rows, pitch = host.rows_of(x, width)
    if not rows:
        return q, x.new_full((), host.scale_of_nothing(quant), dtype=torch.float32)
    scale_out = x.new_empty((), dtype=torch.float32)
    if rows == 1 and partials is None and width <= MAX_ROW:
        _rows(host.Rows(source, rows, pitch), q, scale_out, width, form)
        return q, scale_out
    shape = host.piece_shape(width, rows)
    constants = host.piece_constants(width, shape)
    pieces = rows * constants["PER_ROW"]
    programs = min(pieces, shape.programs, host.PARTIALS)
    if partials is None:
        partials = x.new_empty((programs,), dtype=torch.float32)
        host.launch(_amax_pieces, programs, x.device, source, partials, pieces, pitch, **constants)
    host.launch(
        _quantize_pieces, programs, x.device,
        source, host.as_stored(q), scale_out, partials, pieces, partials.numel(), pitch,
        None, None, width, host.PARTIALS,
        **constants, **host.quant_constants(form, True), GROUP=0,
    )  # fmt: skip
    return q, scale_out
