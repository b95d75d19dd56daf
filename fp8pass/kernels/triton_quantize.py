"""Triton kernels of ``fp8pass::quantize``.

- a scale per token: one launch, a row to a program, read once;
- a given scale: one launch, element-wise over pieces of rows;
- a scale per tensor: two launches. In the first each program leaves the largest value of its
  pieces; in the second each program takes the largest of those and quantises. The maximum does not
  depend on an order, so the result is the same in every run. A single row is quantised as a token.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import cache

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
    prepared,
    scale_of,
    store_codes,
)
from fp8pass.ops.forms import QuantForm


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
    OVERLAP: tl.constexpr,
):
    """A scale for each row, and its codes."""
    begin(OVERLAP)
    index = tl.program_id(0)
    while index < rows:
        row = tl.cast(index, tl.int64)
        chunks = load_chunks(x_ptr + row * pitch, 0, CHUNKS, CHUNK, LIMIT)
        scale = scale_of(amax_of(chunks, CHUNKS), SCALE, FACTOR, FLOOR, FLOOR_VALUE)
        tl.store(scale_ptr + row, scale)
        store_codes(
            q_ptr + row * WIDTH, chunks, 0, prepared(scale, APPLY, QUOTIENT, ORDINARY),
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


@triton.jit(do_not_specialize=["pieces", "partials"])
def _quantize_pieces(
    x_ptr,
    q_ptr,
    scale_ptr,
    partials_ptr,
    pieces,
    partials,
    pitch,
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
    OVERLAP: tl.constexpr,
):
    """Codes for one scale: a given one, or the one that follows from a first pass's maxima."""
    begin(OVERLAP)
    if SCALE != "given":
        amax = amax_of_partials(partials_ptr, partials, PARTIALS)
        scale = scale_of(amax, SCALE, FACTOR, FLOOR, FLOOR_VALUE)
        if tl.program_id(0) == 0:
            tl.store(scale_ptr, scale)
    piece = tl.program_id(0)
    while piece < pieces:
        row = tl.cast(piece // PER_ROW, tl.int64)
        start = (piece % PER_ROW) * (CHUNKS * CHUNK)
        chunks = load_chunks(x_ptr + row * pitch, start, CHUNKS, CHUNK, LIMIT)
        if SCALE == "given":
            scale = tl.load(scale_ptr)  # here, so that what it takes is not waited for first
        store_codes(
            q_ptr + row * WIDTH, chunks, start, prepared(scale, APPLY, QUOTIENT, ORDINARY),
            FP8, LO, HI, COMPUTE, QUOTIENT, APPLY, ORDINARY, CHUNKS, CHUNK, LIMIT,
        )  # fmt: skip
        piece += tl.num_programs(0)


@cache
def _row_call(
    form: str, width: int, scalar_scale: bool, shape: host.Shape, device: torch.device
) -> host.Call:
    return host.call_of(
        _quantize_rows,
        device,
        host.row_constants(width, shape),
        host.quant_constants(form, scalar_scale),
    )


@cache
def _amax_call(width: int, shape: host.Shape, device: torch.device) -> host.Call:
    return host.call_of(_amax_pieces, device, host.piece_constants(width, shape))


@cache
def _piece_call(
    form: str, width: int, scalar_scale: bool, shape: host.Shape, device: torch.device
) -> host.Call:
    return host.call_of(
        _quantize_pieces,
        device,
        {"WIDTH": width, "PARTIALS": host.PARTIALS},
        host.piece_constants(width, shape),
        host.quant_constants(form, scalar_scale),
    )


def quantize(
    x: torch.Tensor, scale: torch.Tensor | None, form: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """``fp8pass::quantize`` on a GPU, as :func:`fp8pass.ops.quantize.reference`.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32; rows may have any pitch.
        scale: one float32 on the device of ``x`` if ``form`` is static, else None.
        form: ``str`` of a :class:`fp8pass.ops.forms.QuantForm`.

    Returns:
        ``(q, scale_out)`` as the reference; the scale of a tensor without rows is that of zeros.

    Raises:
        UnsupportedError: a value that :mod:`fp8pass.kernels.triton_limits` refuses.
        ValueError: the form is static and no scale is given, or the reverse.
    """
    width = host.width_of(x)
    if why := why_not_quantize(form, width, x.dtype):
        host.refuse(why)
    assert width is not None
    quant, device = QuantForm.parse(form), x.device
    host.check_scale(quant, scale, device)
    if scale is None and quant.granularity == "tensor":
        return quantize_tensor(x, width, form, None)

    source, rows, pitch = host.rows_of(x, width)
    q = torch.empty(x.shape, dtype=quant.dtype, device=device)
    scale_out = host.empty_scale(x, quant)
    if scale is None:
        if rows:
            _one_pass(source, rows, pitch, q, scale_out, width, form)
    elif rows:
        shape = host.piece_shape(width, rows)
        call = _piece_call(form, width, not scale.dim(), shape, device)
        pieces = rows * call.constants["PER_ROW"]
        args = (source, host.as_stored(q), scale, None, pieces, 0, pitch)
        host.launch(call, min(pieces, shape.programs), device, *args)
    return q, scale_out


def _one_pass(
    x: torch.Tensor,
    rows: int,
    pitch: int,
    q: torch.Tensor,
    scale_out: torch.Tensor,
    width: int,
    form: str,
) -> None:
    """A scale for each row; ``scale_out`` without dimensions is that of a single row."""
    shape = host.row_shape(width, rows)
    call = _row_call(form, width, not scale_out.dim(), shape, q.device)
    args = (x, host.as_stored(q), scale_out, rows, pitch)
    host.launch(call, min(rows, shape.programs), q.device, *args)


def quantize_tensor(
    x: torch.Tensor, width: int, form: str, partials: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale for the whole of ``x``.

    ``partials``: float32 maxima that together are the largest absolute value of ``x``, at most
    ``PARTIALS``; None if they are still to be found.
    """
    quant, device = QuantForm.parse(form), x.device
    source, rows, pitch = host.rows_of(x, width)
    q = torch.empty(x.shape, dtype=quant.dtype, device=device)
    scale_out = host.empty_scale(x, quant)
    if not rows:
        return q, scale_out.fill_(host.scale_of_nothing(quant))
    if rows == 1 and partials is None and width <= MAX_ROW:
        _one_pass(source, rows, pitch, q, scale_out, width, form)
        return q, scale_out
    shape = host.piece_shape(width, rows)
    call = _piece_call(form, width, True, shape, device)
    pieces = rows * call.constants["PER_ROW"]
    programs = min(pieces, shape.programs, host.PARTIALS)
    if partials is None:
        partials = torch.empty((programs,), dtype=torch.float32, device=device)
        first = _amax_call(width, shape, device)
        host.launch(first, programs, device, source, partials, pieces, pitch)
    args = (source, host.as_stored(q), scale_out, partials, pieces, partials.numel(), pitch)
    host.launch(call, programs, device, *args)
    return q, scale_out
