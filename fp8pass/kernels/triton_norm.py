"""Triton kernels of ``fp8pass::rms_norm_quant`` and ``fp8pass::add_rms_norm_quant``.

A row lies in the registers of one program from its load to its codes. A given scale and a scale
per token or per group take one launch. A scale per tensor takes two: the first finds each row's
``1 / rms`` and each program's largest value, the second normalises once more, element-wise, and
quantises. That reads the rows twice, which moves less than writing the normalised ones and reading
them back.
"""
# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from fp8pass.kernels import triton_launch as host
from fp8pass.kernels.triton_limits import why_not_norm
from fp8pass.kernels.triton_rounding import (
    NATIVE,
    inverse_root,
    larger,
    plus,
    rounded,
    rounded_pairs,
    times,
    widen,
)
from fp8pass.kernels.triton_rows import (
    amax_of,
    amax_of_partials,
    begin,
    load_chunk,
    load_chunks,
    load_scale,
    prepared,
    store_chunks,
    store_codes,
    store_groups,
    zero_beyond,
)
from fp8pass.kernels.triton_scales import scale_of
from fp8pass.ops.forms import NormForm, QuantForm
from fp8pass.ops.library import nothing
from fp8pass.ops.quantize import empty_scale


@triton.jit
def _load_weights(
    weight_ptr, start, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, LIMIT: tl.constexpr
):
    """Chunks of the weight in its own dtype, so that they take half the registers."""
    chunks = ()
    for c in tl.static_range(CHUNKS):
        if weight_ptr is None:
            chunks = chunks + (0.0,)
        else:
            columns = start + c * CHUNK + tl.arange(0, CHUNK)
            chunks = chunks + (load_chunk(weight_ptr, columns, LIMIT),)
    return chunks


@triton.jit
def _inverse_rms(
    chunks,
    eps,
    MEAN: tl.constexpr,
    EPS: tl.constexpr,
    ROOT: tl.constexpr,
    WIDTH: tl.constexpr,
    INVERSE_WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """``1 / sqrt(mean(x^2) + eps)``; the root itself if the form divides by it.

    torch's mean and its division by a Python number (the form's ``sum_div``) are one thing: on a
    GPU a multiplication by ``1 / width``, on a CPU a division. The result is rounded before epsilon
    is added, as in the source.
    """
    squares = chunks[0] * chunks[0]
    for c in tl.static_range(1, CHUNKS):
        squares += chunks[c] * chunks[c]
    total = tl.reduce(squares, 0, plus)
    if MEAN == "norm_div":
        norm = tl.sqrt_rn(total)
        total = times(norm, norm, NATIVE)
    if NATIVE or MEAN == "sum_mul":
        mean = times(total, INVERSE_WIDTH, NATIVE)
    else:
        mean = tl.div_rn(total, WIDTH * 1.0)
    if EPS == "inside":
        mean = mean + eps
    elif EPS == "max":
        mean = larger(mean, eps)
    if ROOT == "rsqrt":
        inverse = inverse_root(mean)
    else:
        inverse = tl.sqrt_rn(mean)
        if EPS == "outside":
            inverse = inverse + eps
        elif EPS == "outside_max":
            inverse = larger(inverse, eps)
        if ROOT == "recip_sqrt":
            inverse = tl.div_rn(1.0, inverse)
    return inverse


@triton.jit
def _normalised(
    chunks,
    weights,
    start,
    inverse,
    ROOT: tl.constexpr,
    WEIGHT: tl.constexpr,
    MID: tl.constexpr,
    OUT: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """The normalised row with every rounding of its form, as float32."""
    results = ()
    for c in tl.static_range(CHUNKS):
        value = chunks[c]
        by = inverse
        if WEIGHT == "x_first":
            value = value * widen(weights[c], NATIVE)
        elif WEIGHT == "root_first":
            by = widen(weights[c], NATIVE)
            by = (
                tl.div_rn(by, tl.full(by.shape, 0.0, tl.float32) + inverse)
                if ROOT == "div_sqrt"
                else by * inverse
            )
        if ROOT == "div_sqrt" and WEIGHT != "root_first":
            value = tl.div_rn(value, tl.full(value.shape, 0.0, tl.float32) + by)
        else:
            value = value * by
        if WEIGHT == "after_cast":
            value = rounded(value, MID, NATIVE)
            value = rounded(value * widen(weights[c], NATIVE), OUT, NATIVE)
        else:
            if WEIGHT == "before_cast":
                value = value * widen(weights[c], NATIVE)
            value = rounded_pairs(value, MID, NATIVE)
        # beyond the row it is 0 * inverse, which is NaN for a row of zeros without epsilon
        columns = start + c * CHUNK + tl.arange(0, CHUNK)
        results = results + (zero_beyond(value, columns, LIMIT),)
    return results


@triton.jit
def _sums(values, residual, TOTAL: tl.constexpr, CHUNKS: tl.constexpr):
    """Two rows added and rounded to ``TOTAL``."""
    sums = ()
    for c in tl.static_range(CHUNKS):
        sums = sums + (rounded(values[c] + residual[c], TOTAL, NATIVE),)
    return sums


@triton.jit
def _rounded_to(values, TOTAL: tl.constexpr, CHUNKS: tl.constexpr):
    """A row rounded to ``TOTAL``."""
    results = ()
    for c in tl.static_range(CHUNKS):
        results = results + (rounded(values[c], TOTAL, NATIVE),)
    return results


@triton.jit(do_not_specialize=["rows", "scale_pitch", "group_stride"])
def _norm_rows(
    x_ptr,
    residual_ptr,
    weight_ptr,
    scale_ptr,
    q_ptr,
    y_ptr,
    total_ptr,
    inverse_ptr,
    partials_ptr,
    rows,
    x_pitch,
    residual_pitch,
    scale_pitch,
    group_stride,
    eps,
    MEAN: tl.constexpr,
    EPS: tl.constexpr,
    ROOT: tl.constexpr,
    WEIGHT: tl.constexpr,
    MID: tl.constexpr,
    OUT: tl.constexpr,
    SUM: tl.constexpr,
    TOTAL: tl.constexpr,
    INVERSE_WIDTH: tl.constexpr,
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
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Norm and quantise of whole rows; with ``partials_ptr`` the first pass for one scale."""
    begin(OVERLAP)
    weights = _load_weights(weight_ptr, 0, CHUNKS, CHUNK, LIMIT)
    largest = tl.full((), 0.0, tl.float32)
    index = tl.program_id(0)
    while index < rows:
        row = tl.cast(index, tl.int64)
        values = load_chunks(x_ptr + row * x_pitch, 0, CHUNKS, CHUNK, LIMIT)
        if residual_ptr is not None:
            residual_row = residual_ptr + row * residual_pitch
            residual = load_chunks(residual_row, 0, CHUNKS, CHUNK, LIMIT)
        if SCALE == "given":  # noqa: SIM102  (Triton drops each branch by itself)
            if GROUP == 0:
                used = load_scale(scale_ptr, row, scale_pitch)
        if residual_ptr is not None:
            values = _sums(values, residual, SUM, CHUNKS)
        if total_ptr is not None:
            totals = _rounded_to(values, TOTAL, CHUNKS) if SUM != TOTAL else values
            store_chunks(total_ptr + row * WIDTH, totals, 0, TOTAL, CHUNKS, CHUNK, LIMIT)
        inverse = _inverse_rms(values, eps, MEAN, EPS, ROOT, WIDTH, INVERSE_WIDTH, CHUNKS)
        results = _normalised(
            values, weights, 0, inverse, ROOT, WEIGHT, MID, OUT, CHUNKS, CHUNK, LIMIT
        )
        if y_ptr is not None:
            store_chunks(y_ptr + row * WIDTH, results, 0, OUT, CHUNKS, CHUNK, LIMIT)
        if partials_ptr is not None:
            tl.store(inverse_ptr + row, inverse)
            largest = larger(largest, amax_of(results, CHUNKS))
        elif GROUP != 0:
            store_groups(
                q_ptr + row * WIDTH, scale_ptr + row * scale_pitch, group_stride, results, 0,
                FP8, LO, HI, COMPUTE, QUOTIENT, APPLY, ORDINARY, SCALE, FACTOR, FLOOR, FLOOR_VALUE,
                CEILING, POWER, WIDE, GROUP, CHUNKS, CHUNK, LIMIT,
            )  # fmt: skip
        else:
            if SCALE != "given":
                amax = amax_of(results, CHUNKS)
                scale, used = scale_of(
                    amax, SCALE, FACTOR, FLOOR, FLOOR_VALUE, CEILING, POWER, WIDE
                )
                tl.store(scale_ptr + row, scale)
            store_codes(
                q_ptr + row * WIDTH, results, 0, prepared(used, APPLY, QUOTIENT, ORDINARY),
                FP8, LO, HI, COMPUTE, QUOTIENT, APPLY, ORDINARY, CHUNKS, CHUNK, LIMIT,
            )  # fmt: skip
        index += tl.num_programs(0)
    if partials_ptr is not None:
        tl.store(partials_ptr + tl.program_id(0), largest)


@triton.jit(do_not_specialize=["pieces", "partials"])
def _norm_pieces(
    x_ptr,
    weight_ptr,
    inverse_ptr,
    partials_ptr,
    scale_ptr,
    q_ptr,
    pieces,
    partials,
    pitch,
    PARTIALS: tl.constexpr,
    ROOT: tl.constexpr,
    WEIGHT: tl.constexpr,
    MID: tl.constexpr,
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
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
    OVERLAP: tl.constexpr,
):
    """The second pass for one scale: normalise with the first one's ``1 / rms``, and quantise."""
    begin(OVERLAP)
    amax = amax_of_partials(partials_ptr, partials, PARTIALS)
    scale, used = scale_of(amax, SCALE, FACTOR, FLOOR, FLOOR_VALUE, CEILING, POWER, WIDE)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)
    ready = prepared(used, APPLY, QUOTIENT, ORDINARY)
    piece = tl.program_id(0)
    while piece < pieces:
        row = tl.cast(piece // PER_ROW, tl.int64)
        start = (piece % PER_ROW) * (CHUNKS * CHUNK)
        values = load_chunks(x_ptr + row * pitch, start, CHUNKS, CHUNK, LIMIT)
        weights = _load_weights(weight_ptr, start, CHUNKS, CHUNK, LIMIT)
        inverse = tl.load(inverse_ptr + row)
        results = _normalised(
            values, weights, start, inverse, ROOT, WEIGHT, MID, OUT, CHUNKS, CHUNK, LIMIT
        )
        store_codes(
            q_ptr + row * WIDTH, results, start, ready,
            FP8, LO, HI, COMPUTE, QUOTIENT, APPLY, ORDINARY, CHUNKS, CHUNK, LIMIT,
        )  # fmt: skip
        piece += tl.num_programs(0)


@cache
def _norm_constants(form: str, weight_dtype: torch.dtype | None) -> tuple[dict[str, Any], Any]:
    """The constants of a norm's form that both kernels have, and the dtype of its result."""
    norm = NormForm.parse(form)
    out = norm.mid
    if norm.weight == "after_cast" and weight_dtype is not None:
        # a last cast comes after a float32 product only, so it is the product's one rounding
        out = norm.out or torch.promote_types(norm.mid, weight_dtype)
    constants = {
        "ROOT": norm.root,
        "WEIGHT": norm.weight,
        "MID": host.TL[norm.mid],
        "OUT": host.TL[out],
    }
    return constants, out


def _check(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    scale: torch.Tensor | None,
    form: str,
    quant_form: str,
) -> tuple[QuantForm, int, torch.Tensor | None]:
    width = host.width_of(x)
    residual_dtype = None if residual is None else residual.dtype
    weight_dtype = None if weight is None else weight.dtype
    why = why_not_norm(form, quant_form, width, x.dtype, residual_dtype, weight_dtype)
    host.check(why, x, *(() if residual is None else (residual,)))
    assert width is not None
    if weight is not None and (weight.shape != (width,) or weight.device != x.device):
        host.check(f"a weight of shape {tuple(weight.shape)} on {weight.device}")
    quant = QuantForm.parse(quant_form)
    return quant, width, host.given_scale(quant, scale, x)


def _run(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    scale: torch.Tensor | None,
    eps: float,
    form: str,
    quant_form: str,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    quant, width, scale = _check(x, residual, weight, scale, form, quant_form)
    norm, out = _norm_constants(form, None if weight is None else weight.dtype)
    if weight is not None and weight.stride(0) != 1:
        weight = weight.contiguous()
    source, rows, pitch = host.rows_of(x, width)
    total, other, other_pitch, total_dtype = None, None, 0, x.dtype
    parsed = NormForm.parse(form)
    per_tensor = scale is None and quant.granularity == "tensor"
    wide_sum = residual is not None and parsed.sum == "float32"
    if residual is not None and wide_sum and per_tensor and rows > 1:
        # the second pass would need the sum before its rounding, which the first does not store
        wide = x.to(torch.float32) + residual.to(torch.float32)
        rest = (weight, scale, eps, form, quant_form, keep)
        q, scale_out, y = rms_norm_quant(wide, *rest)
        total_dtype = torch.promote_types(x.dtype, residual.dtype)
        return q, scale_out, y, wide.to(total_dtype, memory_format=torch.contiguous_format)
    if residual is not None:
        other, _, other_pitch = host.rows_of(residual, width)
        total_dtype = torch.promote_types(x.dtype, residual.dtype)
        total = torch.empty(x.shape, dtype=total_dtype, device=x.device)
    q = torch.empty(x.shape, dtype=quant.dtype, device=x.device)
    y = torch.empty(x.shape if keep else (0,), dtype=out, device=x.device)

    if scale is not None:
        scale_out = nothing(x, torch.float32)
    else:
        scale_out = empty_scale(x, quant)
    if not rows:
        return q, scale_out.fill_(host.scale_of_nothing(quant)), y, total

    two_passes = per_tensor and rows > 1
    inverse = partials = None
    shape = host.row_shape(width, rows)
    programs = min(rows, shape.programs)
    if two_passes:
        programs = min(programs, host.PARTIALS)
        inverse = torch.empty((rows,), dtype=torch.float32, device=x.device)
        partials = torch.empty((programs,), dtype=torch.float32, device=x.device)
    used = scale_out if scale is None else scale
    quantise = host.quant_constants(quant_form, not used.dim())
    stored = host.as_stored(q)
    host.launch(
        _norm_rows, programs, x.device,
        source, other, weight, used, stored, y if keep else None, total, inverse, partials,
        rows, pitch, other_pitch, *host.scale_strides(quant, used), eps,
        MEAN=parsed.mean, EPS=parsed.eps, INVERSE_WIDTH=host.reciprocal(width),
        SUM=host.TL[torch.float32 if wide_sum else total_dtype], TOTAL=host.TL[total_dtype],
        **norm, **host.row_constants(width, shape), **quantise, GROUP=quant.group or 0,
    )  # fmt: skip
    if two_passes:
        assert partials is not None
        pieces = host.piece_constants(width, host.piece_shape(width, rows))
        count = rows * pieces["PER_ROW"]
        if total is not None:
            source, pitch = total, width
        host.launch(
            _norm_pieces, min(count, host.PARTIALS), x.device,
            source, weight, inverse, partials, scale_out, stored,
            count, partials.numel(), pitch, host.PARTIALS, WIDTH=width,
            **norm, **pieces, **quantise,
        )  # fmt: skip
    return q, scale_out, y, total


def rms_norm_quant(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    scale: torch.Tensor | None,
    eps: float,
    form: str,
    quant_form: str,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``fp8pass::rms_norm_quant`` on a GPU, as :func:`fp8pass.ops.norm.rms_norm_quant`.

    Args:
        x: ``[..., H]`` bf16, fp16 or fp32; rows may have any pitch.
        weight: ``[H]`` of any of these dtypes, or None.
        scale: as :func:`fp8pass.kernels.triton_quantize.quantize` takes it.
        eps: added to the mean of squares.
        form, quant_form: texts of a :class:`NormForm` and a :class:`QuantForm`.
        keep: return the normalised value too.

    Returns:
        ``(q, scale_out, y)`` as the reference.

    Raises:
        UnsupportedError: a value that :mod:`fp8pass.kernels.triton_limits` refuses.
        ValueError: the quantise is static and no scale is given, or the reverse.
    """
    q, scale_out, y, _ = _run(x, None, weight, scale, eps, form, quant_form, keep)
    return q, scale_out, y


def add_rms_norm_quant(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    scale: torch.Tensor | None,
    eps: float,
    form: str,
    quant_form: str,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``fp8pass::add_rms_norm_quant`` on a GPU; as :func:`rms_norm_quant` of ``x + residual``.

    Returns:
        ``(q, scale_out, y, total)``; nothing is changed in place.
    """
    q, scale_out, y, total = _run(x, residual, weight, scale, eps, form, quant_form, keep)
    assert total is not None
    return q, scale_out, y, total
