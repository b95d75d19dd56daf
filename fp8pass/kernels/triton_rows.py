"""Pieces of Triton kernels that work on rows: loads, the largest value, a scale, codes.

A row lies in the registers of one program as a tuple of chunks, each ``VECTOR`` values a thread
(:mod:`fp8pass.kernels.triton_launch`): unlike one block of the next power of two, that wastes
little on widths such as 5120 or 14336.

The constants of a quantise (``FP8``, ``LO``, ..., ``FLOOR_VALUE``) are those of
:func:`fp8pass.kernels.triton_launch.quant_constants`.
"""
# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from fp8pass.kernels.triton_rounding import (
    NATIVE,
    divided,
    divisor,
    larger,
    narrow,
    rounded,
    to_fp8,
    to_int8,
    widen,
)
from fp8pass.kernels.triton_scales import scale_of

try:  # absent from builds of Triton without the NVIDIA backend, where only the interpreter runs
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # pragma: no cover
    gdc_launch_dependents = gdc_wait = None


@triton.jit
def begin(OVERLAP: tl.constexpr):
    """First of all in a kernel: let the next one be launched, and wait for the end of the last.

    With programmatic dependent launch (CUDA programming guide) the launches of successive kernels
    overlap. Nothing may be read or written before the wait, and every kernel waits: so the end of
    the last kernel means the end of all before it.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def load_chunk(row, columns, LIMIT: tl.constexpr, FIRST: tl.constexpr = False):
    """The values of a row at ``columns``, in its own dtype; zeros from column LIMIT on.

    LIMIT is 0 where no column can lie beyond the row. FIRST: see :func:`load_chunks`.
    """
    if LIMIT == 0:
        values = tl.load(row + columns, volatile=FIRST)
    else:
        values = tl.load(row + columns, mask=columns < LIMIT, other=0.0, volatile=FIRST)
    return values


@triton.jit
def store_chunk(row, values, columns, LIMIT: tl.constexpr):
    """As :func:`load_chunk`; nothing is written from column LIMIT on."""
    if LIMIT == 0:
        tl.store(row + columns, values)
    else:
        tl.store(row + columns, values, mask=columns < LIMIT)


@triton.jit
def zero_beyond(values, columns, LIMIT: tl.constexpr):
    """``values`` with zeros from column LIMIT on."""
    if LIMIT != 0:
        values = tl.where(columns < LIMIT, values, 0.0)
    return values


@triton.jit
def load_chunks(
    row,
    start,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    LIMIT: tl.constexpr,
    FIRST: tl.constexpr = False,
):
    """Chunks of a row from the column ``start`` on, as float32.

    All are loaded before anything is stored: the compiler cannot know that they are not the same
    memory, and so would not move a load over a store. To save registers ptxas moves loads down to
    their use, which costs a trip to memory where too few programs run to hide each other's waiting.
    Loads with FIRST are volatile, which keeps their order: what is needed last is loaded first.
    """
    chunks = ()
    for c in tl.static_range(CHUNKS):
        columns = start + c * CHUNK + tl.arange(0, CHUNK)
        chunks = chunks + (widen(load_chunk(row, columns, LIMIT, FIRST), NATIVE),)
    return chunks


@triton.jit
def store_chunks(
    row,
    chunks,
    start,
    DTYPE: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Chunks of float32 values that ``DTYPE`` holds exactly."""
    for c in tl.static_range(CHUNKS):
        columns = start + c * CHUNK + tl.arange(0, CHUNK)
        store_chunk(row, narrow(chunks[c], DTYPE, NATIVE), columns, LIMIT)


@triton.jit
def amax_of(chunks, CHUNKS: tl.constexpr):
    """The largest absolute value of a row, NaN if there is one."""
    largest = tl.abs(chunks[0])
    for c in tl.static_range(1, CHUNKS):
        largest = larger(largest, tl.abs(chunks[c]))
    return tl.reduce(largest, 0, larger)


@triton.jit
def amax_of_partials(partials_ptr, count, PARTIALS: tl.constexpr):
    """The largest of the ``count`` maxima that the programs of a first pass left."""
    places = tl.arange(0, PARTIALS)
    return tl.reduce(tl.load(partials_ptr + places, mask=places < count, other=0.0), 0, larger)


@triton.jit
def prepared(scale, APPLY: tl.constexpr, QUOTIENT: tl.constexpr, ORDINARY: tl.constexpr):
    """What :func:`store_codes` needs of a scale; of the inverse scale for ``mul_inverse``."""
    if APPLY == "div":
        # torch rounds a scale without dimensions to the dtype of the division on a GPU, and takes
        # it as it is on a CPU.
        if NATIVE:
            scale = rounded(scale, QUOTIENT, NATIVE)
        first, second, third = divisor(scale, ORDINARY, NATIVE)
    else:
        if APPLY == "mul_inverse":
            first = scale
        else:
            first = tl.div_rn(1.0, scale)
        if NATIVE:
            first = rounded(first, QUOTIENT, NATIVE)
        second = first
        third = first
    return first, second, third


@triton.jit
def store_codes(
    row,
    chunks,
    start,
    prepared_scale,
    FP8: tl.constexpr,
    LO: tl.constexpr,
    HI: tl.constexpr,
    COMPUTE: tl.constexpr,
    QUOTIENT: tl.constexpr,
    APPLY: tl.constexpr,
    ORDINARY: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """The codes of chunks of float32 values for a scale that went through :func:`prepared`."""
    first, second, third = prepared_scale
    for c in tl.static_range(CHUNKS):
        values = rounded(chunks[c], COMPUTE, NATIVE)
        if APPLY == "div":
            values = divided(values, first, second, third, ORDINARY, LO, HI, NATIVE)
        else:
            values = values * first
        values = rounded(values, QUOTIENT, NATIVE)
        if tl.int8 == FP8:
            codes = to_int8(values, LO, HI)
        else:
            codes = to_fp8(values, FP8, LO, HI, NATIVE)
        store_chunk(row, codes, start + c * CHUNK + tl.arange(0, CHUNK), LIMIT)


@triton.jit
def load_scale(scale_ptr, row, scale_pitch, FIRST: tl.constexpr = False):
    """A given scale: the only one (``scale_pitch`` is None), or that of a row."""
    if scale_pitch is None:
        scale = tl.load(scale_ptr, volatile=FIRST)
    else:
        scale = tl.load(scale_ptr + row * scale_pitch, volatile=FIRST)
    return scale


# ---- groups -------------------------------------------------------------------------------------


@triton.jit
def spread(values, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """A value of each group of a chunk, as one of each column."""
    blocks = tl.broadcast_to(tl.expand_dims(values, 1), (CHUNK // GROUP, GROUP))
    return tl.reshape(blocks, (CHUNK,))


@triton.jit
def store_groups(
    row,
    scale_row,
    group_stride,
    chunks,
    start,
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
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """A scale for each GROUP neighbours of a row's chunks, given or not, and the codes for it.

    GROUP is a power of two that divides CHUNK, ``start`` and the row's width, so that every group
    lies in one chunk, and within the row or beyond it. Scales of a row are ``group_stride`` apart.
    """
    for c in tl.static_range(CHUNKS):
        if SCALE != "given":
            blocks = tl.reshape(tl.abs(chunks[c]), (CHUNK // GROUP, GROUP))
            amax = tl.reduce(blocks, 1, larger)
            scale, used = scale_of(amax, SCALE, FACTOR, FLOOR, FLOOR_VALUE, CEILING, POWER, WIDE)
        groups = (start + c * CHUNK) // GROUP + tl.arange(0, CHUNK // GROUP)
        places = scale_row + tl.cast(groups, tl.int64) * group_stride
        if SCALE == "given":
            if LIMIT == 0:
                used = tl.load(places)
            else:
                used = tl.load(places, mask=groups < LIMIT // GROUP, other=1.0)
        elif LIMIT == 0:
            tl.store(places, scale)
        else:
            tl.store(places, scale, mask=groups < LIMIT // GROUP)
        first, second, third = prepared(used, APPLY, QUOTIENT, ORDINARY)
        if APPLY != "div":
            first = spread(first, GROUP, CHUNK)
        else:
            if not ORDINARY:
                first = spread(first, GROUP, CHUNK)
            second = spread(second, GROUP, CHUNK)
            third = spread(third, GROUP, CHUNK)
        store_codes(
            row, (chunks[c],), start + c * CHUNK, (first, second, third),
            FP8, LO, HI, COMPUTE, QUOTIENT, APPLY, ORDINARY, 1, CHUNK, LIMIT,
        )  # fmt: skip
