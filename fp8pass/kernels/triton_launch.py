"""Host side of the Triton producer kernels: rows of a tensor, constants of a form, launch shapes.

A call costs the host little: everything that follows from the texts of the forms, the width and the
dtypes is looked up in a cache; nothing is measured at run time.

What makes Triton compile once more: a form, a width, a dtype, which operands are there, whether a
pointer or a row pitch is a multiple of 16, and the launch shape (:func:`row_shape` knows two for a
width, by the number of rows). The number of rows itself and epsilon do not.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
import triton.language as tl

from fp8pass.errors import UnsupportedError
from fp8pass.kernels.triton_dispatch import launcher
from fp8pass.kernels.triton_rounding import NATIVE
from fp8pass.ops.forms import QuantForm
from fp8pass.ops.quantize import dynamic_scale

TL = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
    torch.int8: tl.int8,
    torch.float64: tl.float64,
}
#: Values of one row that a thread loads at once: 16 bytes of a 16-bit dtype. With the same number
#: for every operand no value changes its thread between a load and a store.
VECTOR = 8
#: Programs of the first of two passes, each of which leaves one maximum for the second.
PARTIALS = 1024


# ---- tensors ------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """A tensor as rows: element ``(i, j)`` is at ``i * pitch + j``."""

    tensor: torch.Tensor
    rows: int
    pitch: int


def rows_of(x: torch.Tensor, width: int) -> Rows:
    """``x [..., width]`` as rows; copied only where no single pitch leads from row to row."""
    if not x.is_contiguous():
        if x.dim() == 2 and x.stride(1) == 1:
            return Rows(x, x.shape[0], x.stride(0))
        if x.stride(-1) == 1 or width == 1:
            try:
                flat = x.view(-1, width)
            except RuntimeError:
                pass
            else:
                return Rows(flat, flat.shape[0], flat.stride(0))
        x = x.contiguous()
    return Rows(x, x.numel() // width, width)


def width_of(x: torch.Tensor) -> int | None:
    """The last size; None (which no kernel takes) for a tensor without dimensions."""
    return x.shape[-1] if x.dim() else None


def codes_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor for the codes of ``x``."""
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def as_stored(q: torch.Tensor) -> torch.Tensor:
    """Codes as the kernels write them: the interpreter has no fp8 of its own."""
    return q if NATIVE.value or q.dtype == torch.int8 else q.view(torch.uint8)


def check(why: str | None, *same_shape: torch.Tensor) -> None:
    """Refuse a call in the words of :mod:`fp8pass.kernels.triton_limits`.

    Raises:
        UnsupportedError: ``why`` is a reason, or two tensors differ in shape or device.
    """
    if len(same_shape) == 2 and why is None:
        first, second = same_shape
        if first.shape != second.shape:
            why = f"operands of shapes {tuple(first.shape)} and {tuple(second.shape)}"
        elif first.device != second.device:
            why = f"operands on {first.device} and {second.device}"
    if why is not None:
        raise UnsupportedError(f"fp8pass's Triton kernels do not take {why}")


def given_scale(
    quant: QuantForm, scale: torch.Tensor | None, x: torch.Tensor
) -> torch.Tensor | None:
    """A scale as the kernels read it, or None; one that the form does not say is refused.

    Returns:
        Per tensor ``scale`` itself; per token ``[rows]`` and per group ``[rows, K / n]`` with any
        strides (a copy only where the leading dims have no single pitch).

    Raises:
        ValueError: the form is static and no scale is given, or the reverse.
        UnsupportedError: the scale is not float32 on the device of ``x``, or its shape not one
            element, ``[..., 1]`` or ``[..., K / n]`` as the form says.
    """
    if quant.static != (scale is not None):
        raise ValueError(f"form {quant} and scale {None if scale is None else 'given'} disagree")
    if scale is None:
        return None
    wanted = quant.scale_shape(tuple(x.shape))
    shaped = scale.numel() == 1 if not wanted else scale.shape == wanted
    if scale.dtype != torch.float32 or not shaped or scale.device != x.device:
        raise UnsupportedError(
            "fp8pass's Triton kernels do not take a scale of shape "
            f"{tuple(scale.shape)}, {scale.dtype}, on {scale.device}"
        )
    if not wanted:
        return scale
    rows = math.prod(wanted[:-1])
    return scale.reshape(rows) if quant.group is None else scale.reshape(rows, wanted[-1])


# ---- forms --------------------------------------------------------------------------------------


def reciprocal(value: float) -> float:
    """``1 / value`` in float32."""
    return float((1.0 / torch.tensor(value, dtype=torch.float32)).item())


@cache
def quant_constants(text: str, scalar_scale: bool) -> dict[str, Any]:
    """The constants of a kernel that quantises by the form ``text``.

    ``scalar_scale``: the scale has no dimension. Then torch's promotion leaves the quotient in the
    dtype of the division, else the scale makes it float32.
    """
    form = QuantForm.parse(text)
    return {
        "FP8": TL[form.dtype],
        "LO": form.lo,
        "HI": form.hi,
        "COMPUTE": TL[form.compute],
        "QUOTIENT": TL[form.compute if scalar_scale else torch.float32],
        "APPLY": form.apply,
        "ORDINARY": ordinary(form),
        "SCALE": form.scale,
        "FACTOR": factor(form),
        "FLOOR": form.floor,
        "FLOOR_VALUE": form.floor_value,
        "CEILING": 0.0 if form.ceiling == math.inf else form.ceiling,
        "POWER": form.power,
        "WIDE": TL[form.scale_dtype],
    }


def scale_strides(form: QuantForm, scale: torch.Tensor) -> tuple[int | None, int | None]:
    """Values from row to row and from group to group of the scales of a ``group<n>``.

    The same of given scales that :func:`check_scale` has shaped; None for what a form does not
    have: kernels then compile without it.
    """
    if form.granularity == "tensor" or (form.group is None and not form.static):
        return None, None
    if form.group is None:
        return scale.stride(0), None
    # leading dims are one in effect: in every layout the rows of a scale have one pitch
    return scale.stride(-2) if scale.dim() > 1 else 0, scale.stride(-1)


def factor(form: QuantForm) -> float:
    """What the kernels multiply amax by (in the interpreter: divide, if the form says so).

    On a GPU torch divides a tensor by a Python number by multiplying with the number's float32
    reciprocal; on a CPU it divides. The kernels do what eager does on their device.
    """
    if form.scale == "div" and NATIVE.value:
        return 1.0 / form.qmax if form.scale_dtype == torch.float64 else reciprocal(form.qmax)
    return form.qmax


def ordinary(form: QuantForm) -> bool:
    """Whether no scale that the form can give is extreme, except inf and NaN.

    See :func:`fp8pass.kernels.triton_rounding.divisor`. A floor bounds it from below, the largest
    float32 over the constant from above; nothing is known of a given scale.
    """
    if form.static or form.scale == "inverse" or form.compute != torch.float32:
        return False
    if form.floor not in ("scale", "amax") or form.ceiling != math.inf:
        return False
    if form.scale_dtype != torch.float32:
        return False
    per_amax = 1.0 / form.qmax if form.scale == "div" else form.qmax
    floor = form.floor_value * (per_amax if form.floor == "amax" else 1.0)
    largest = float(torch.finfo(torch.float32).max) * per_amax
    if form.power != "none":
        largest *= 2
    return floor >= 2.0**-80 and 0.0 < largest <= 2.0**120


def scale_of_nothing(form: QuantForm) -> float:
    """The scale of a tensor without values, as if all of them were zero."""
    if form.scale == "inverse" or not form.plain or form.floor not in ("none", "scale", "amax"):
        return float(dynamic_scale(torch.zeros(1, 1), replace(form, granularity="tensor")).item())
    amax = max(0.0, form.floor_value) if form.floor == "amax" else 0.0
    scale = amax / form.qmax if form.scale == "div" else amax * form.qmax
    return max(scale, form.floor_value) if form.floor == "scale" else scale


# ---- launch shapes ------------------------------------------------------------------------------


class Shape(NamedTuple):
    """How values are laid over the threads of one program: ``chunks`` pieces of ``chunk``.

    ``programs``: at most so many, each of which then takes several rows or pieces in turn.
    ``first``: see :func:`fp8pass.kernels.triton_rows.load_chunks`; only for kernels that have it.
    """

    warps: int
    chunk: int
    chunks: int
    programs: int = 2**31 - 1
    first: bool = False


#: Up to so many rows there is less than one program for each multiprocessor of a large GPU, and a
#: row is spread over more warps.
FEW_ROWS = 128
#: (widest row, warps for few rows, warps for many rows).
ROW_WARPS = (
    (512, 1, 1),
    (1024, 2, 1),
    (2048, 4, 2),
    (4096, 8, 4),
    (6144, 8, 4),
    (8192, 16, 8),
    (16384, 16, 8),
    (32768, 16, 16),
)
#: Warps of an element-wise program, and chunks of one piece for few and for many values.
PIECE_WARPS, PIECE_CHUNKS = 4, (1, 2)
#: Values of a tensor from which on it counts as many: about one wave of the smaller pieces.
MANY_VALUES = 1 << 21


def row_shape(width: int, rows: int) -> Shape:
    """The shape for kernels that keep a row of ``width`` values in one program."""
    few = rows <= FEW_ROWS
    for widest, warps_few, warps_many in ROW_WARPS:
        if width <= widest:
            return shape_of(width, warps_few if few else warps_many, few)
    raise AssertionError(f"no launch shape for rows of {width}")  # refused by triton_limits


@cache
def shape_of(width: int, warps: int, first: bool) -> Shape:
    """``width`` values over ``warps`` warps."""
    chunk = min(32 * VECTOR * warps, max(16, power_of_two(width)))
    return Shape(warps, chunk, -(-width // chunk), first=first)


def piece_shape(width: int, rows: int) -> Shape:
    """The shape for element-wise kernels; a piece lies within one row."""
    many = width * rows >= MANY_VALUES
    return piece_of(width, PIECE_WARPS, PIECE_CHUNKS[many], not many)


@cache
def piece_of(width: int, warps: int, chunks: int, first: bool) -> Shape:
    """Pieces of at most ``chunks`` chunks of ``warps`` warps; smaller ones for narrow rows."""
    while warps > 1 and 32 * VECTOR * (warps // 2) >= width:
        warps //= 2
    chunk = min(32 * VECTOR * warps, max(16, power_of_two(width)))
    return Shape(warps, chunk, min(chunks, -(-width // chunk)), first=first)


@cache
def row_constants(width: int, shape: Shape) -> dict[str, Any]:
    """The constants that a shape is for a kernel of whole rows."""
    limit = 0 if width == shape.chunk * shape.chunks else width
    return {
        "WIDTH": width,
        "LIMIT": limit,
        "CHUNKS": shape.chunks,
        "CHUNK": shape.chunk,
        "num_warps": shape.warps,
    }


@cache
def piece_constants(width: int, shape: Shape) -> dict[str, Any]:
    """The constants that a shape is for an element-wise kernel."""
    piece = shape.chunk * shape.chunks
    return {
        "PER_ROW": -(-width // piece),
        "LIMIT": width if width % piece else 0,
        "CHUNKS": shape.chunks,
        "CHUNK": shape.chunk,
        "num_warps": shape.warps,
    }


def power_of_two(value: int) -> int:
    """The next power of two."""
    return 1 << (value - 1).bit_length()


# ---- launching ----------------------------------------------------------------------------------

_OVERLAP = {"OVERLAP": True, "launch_pdl": True}
_PLAIN = {"OVERLAP": False}


@cache
def launch_options(index: int | None) -> dict[str, Any]:
    """Whether the launches on a device overlap: from Hopper (sm90) on GPUs can do that."""
    if index is None or torch.version.hip or torch.cuda.get_device_capability(index) < (9, 0):
        return _PLAIN
    return _OVERLAP


def launch(kernel: Any, programs: int, device: torch.device, *args: Any, **constants: Any) -> None:
    """Run ``programs`` programs on the current stream of ``device``."""
    index = device.index
    found = launcher(kernel, **constants, **launch_options(index))
    if index is None or index == torch.cuda.current_device():
        found(programs, *args)
    else:
        with torch.cuda.device(index):
            found(programs, *args)
