"""Triton kernel of ``fp8pass::layer_norm_quant``.

A row lies in the registers of one program from its load to its codes; mean and variance are two
reductions over them, the second of squared differences, so that nothing cancels. A given scale and
a scale per token or per group take one launch. A scale per tensor takes two: the first writes the
normalised rows and each program's largest value, the second one quantises them
(:func:`fp8pass.kernels.triton_quantize.quantize_tensor`).
"""
# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from fp8pass.kernels import triton_launch as host
from fp8pass.kernels.triton_limits import why_not_layer_norm
from fp8pass.kernels.triton_quantize import quantize_tensor
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
from fp8pass.ops.forms import LayerNormForm, QuantForm
from fp8pass.ops.library import nothing
from fp8pass.ops.quantize import empty_scale


@triton.jit
def _average(total, EXACT: tl.constexpr, WIDTH: tl.constexpr, INVERSE_WIDTH: tl.constexpr):
    """A sum over the row by its width: divided, or multiplied as torch's mean does on a GPU."""
    if NATIVE and not EXACT:
        mean = times(total, INVERSE_WIDTH, NATIVE)
    else:
        mean = tl.div_rn(total, WIDTH * 1.0)
    return mean


@triton.jit
def _differences(
    chunks,
    VARIANCE: tl.constexpr,
    WIDTH: tl.constexpr,
    INVERSE_WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """``x - mean`` in float32, with zeros beyond the row."""
    sums = chunks[0]
    for c in tl.static_range(1, CHUNKS):
        sums += chunks[c]
    total = tl.reduce(sums, 0, plus)
    mean = _average(total, VARIANCE == "var_mean", WIDTH, INVERSE_WIDTH)
    results = ()
    for c in tl.static_range(CHUNKS):
        columns = c * CHUNK + tl.arange(0, CHUNK)
        results = results + (zero_beyond(chunks[c] - mean, columns, LIMIT),)
    return results


@triton.jit
def _root(
    differences,
    eps,
    VARIANCE: tl.constexpr,
    ROOT: tl.constexpr,
    WIDTH: tl.constexpr,
    INVERSE_WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """``1 / sqrt(variance + eps)``; the root itself if the form divides by it."""
    squares = differences[0] * differences[0]
    for c in tl.static_range(1, CHUNKS):
        squares += differences[c] * differences[c]
    total = tl.reduce(squares, 0, plus)
    shifted = _average(total, VARIANCE != "mean_square", WIDTH, INVERSE_WIDTH) + eps
    if ROOT == "rsqrt":
        root = inverse_root(shifted)
    else:
        root = tl.sqrt_rn(shifted)
        if ROOT == "recip_sqrt":
            root = tl.div_rn(1.0, root)
    return root


@triton.jit
def _normalised(
    differences,
    weight_ptr,
    bias_ptr,
    root,
    ROOT: tl.constexpr,
    AFFINE: tl.constexpr,
    MID: tl.constexpr,
    PRODUCT: tl.constexpr,
    OUT: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """The normalised row with every rounding of its form, as float32; zeros beyond the row."""
    results = ()
    for c in tl.static_range(CHUNKS):
        columns = c * CHUNK + tl.arange(0, CHUNK)
        value = differences[c]
        spread_root = tl.full(value.shape, 0.0, tl.float32) + root
        # a product is rounded by itself, not with the sum that follows
        if ROOT == "div_sqrt":
            value = tl.div_rn(value, spread_root)
        elif weight_ptr is None and bias_ptr is not None:
            value = times(value, spread_root, NATIVE)
        else:
            value = value * root
        if AFFINE == "after_cast":
            value = rounded(value, MID, NATIVE)
        if weight_ptr is not None:
            weight = widen(load_chunk(weight_ptr, columns, LIMIT), NATIVE)
            if bias_ptr is not None:
                value = times(value, weight, NATIVE)
            else:
                value = value * weight
            value = rounded(value, PRODUCT, NATIVE)
        if bias_ptr is not None:
            value = value + widen(load_chunk(bias_ptr, columns, LIMIT), NATIVE)
        value = rounded_pairs(value, OUT, NATIVE)
        # 0 * root is NaN for a root of infinity
        results = results + (zero_beyond(value, columns, LIMIT),)
    return results


@triton.jit(do_not_specialize=["rows", "scale_pitch", "group_stride"])
def _layer_norm_rows(
    x_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    q_ptr,
    y_ptr,
    partials_ptr,
    rows,
    x_pitch,
    scale_pitch,
    group_stride,
    eps,
    VARIANCE: tl.constexpr,
    ROOT: tl.constexpr,
    AFFINE: tl.constexpr,
    MID: tl.constexpr,
    PRODUCT: tl.constexpr,
    OUT: tl.constexpr,
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
    """LayerNorm and quantise of whole rows; with ``partials_ptr`` the first pass for one scale."""
    begin(OVERLAP)
    largest = tl.full((), 0.0, tl.float32)
    index = tl.program_id(0)
    while index < rows:
        row = tl.cast(index, tl.int64)
        values = load_chunks(x_ptr + row * x_pitch, 0, CHUNKS, CHUNK, LIMIT)
        if SCALE == "given":  # noqa: SIM102  (Triton drops each branch by itself)
            if GROUP == 0:
                used = load_scale(scale_ptr, row, scale_pitch)
        values = _differences(values, VARIANCE, WIDTH, INVERSE_WIDTH, CHUNKS, CHUNK, LIMIT)
        root = _root(values, eps, VARIANCE, ROOT, WIDTH, INVERSE_WIDTH, CHUNKS)
        results = _normalised(
            values, weight_ptr, bias_ptr, root, ROOT, AFFINE, MID, PRODUCT, OUT,
            CHUNKS, CHUNK, LIMIT,
        )  # fmt: skip
        if y_ptr is not None:
            store_chunks(y_ptr + row * WIDTH, results, 0, OUT, CHUNKS, CHUNK, LIMIT)
        if partials_ptr is not None:
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


@cache
def _constants(
    text: str, weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None
) -> tuple[dict[str, Any], torch.dtype]:
    """The constants of a form and of the operands' dtypes, and the dtype of the result."""
    form = LayerNormForm.parse(text)
    product = out = form.mid
    if form.affine == "after_cast":
        if weight_dtype is not None:
            product = torch.promote_types(form.mid, weight_dtype)
        out = product if bias_dtype is None else torch.promote_types(product, bias_dtype)
    else:
        product = torch.float32
    constants = {
        "VARIANCE": form.variance,
        "ROOT": form.root,
        "AFFINE": form.affine,
        "MID": host.TL[form.mid],
        "PRODUCT": host.TL[product],
        "OUT": host.TL[out],
    }
    return constants, out


def layer_norm_quant(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    eps: float,
    form: str,
    quant_form: str,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``fp8pass::layer_norm_quant`` on a GPU, as the reference in :mod:`fp8pass.ops.layer_norm`.

    Args:
        x: ``[..., H]`` bf16, fp16 or fp32; rows may have any pitch.
        weight, bias: ``[H]`` of any of these dtypes, or None.
        scale: as :func:`fp8pass.kernels.triton_quantize.quantize` takes it.
        eps: added to the variance.
        form, quant_form: texts of a :class:`LayerNormForm` and a :class:`QuantForm`.
        keep: return the normalised value too.

    Returns:
        ``(q, scale_out, y)`` as the reference.

    Raises:
        UnsupportedError: a value that :mod:`fp8pass.kernels.triton_limits` refuses.
        ValueError: the quantise is static and no scale is given, or the reverse.
    """
    width = host.width_of(x)
    dtypes = [None if t is None else t.dtype for t in (weight, bias)]
    host.check(why_not_layer_norm(form, quant_form, width, x.dtype, *dtypes))
    assert width is not None
    for name, operand in (("weight", weight), ("bias", bias)):
        if operand is not None and (operand.shape != (width,) or operand.device != x.device):
            host.check(f"a {name} of shape {tuple(operand.shape)} on {operand.device}")
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    quant = QuantForm.parse(quant_form)
    scale = host.given_scale(quant, scale, x)
    constants, out = _constants(form, *dtypes)
    source, rows, pitch = host.rows_of(x, width)
    two_passes = scale is None and quant.granularity == "tensor" and rows > 1
    y = torch.empty(x.shape if keep or two_passes else (0,), dtype=out, device=x.device)
    q = torch.empty((0,) if two_passes else x.shape, dtype=quant.dtype, device=x.device)
    scale_out = empty_scale(x, quant) if scale is None else nothing(x, torch.float32)
    if not rows:
        return q, scale_out.fill_(host.scale_of_nothing(quant)), y

    shape = host.row_shape(width, rows)
    programs = min(rows, shape.programs)
    partials = None
    if two_passes:
        programs = min(programs, host.PARTIALS)
        partials = torch.empty((programs,), dtype=torch.float32, device=x.device)
    used = scale_out if scale is None else scale
    host.launch(
        _layer_norm_rows, programs, x.device,
        source, weight, bias, used, host.as_stored(q), y if keep or two_passes else None, partials,
        rows, pitch, *host.scale_strides(quant, used), eps,
        **constants, INVERSE_WIDTH=host.reciprocal(width), **host.row_constants(width, shape),
        **host.quant_constants(quant_form, not used.dim()), GROUP=quant.group or 0,
    )  # fmt: skip
    if two_passes:
        q, scale_out = quantize_tensor(y, width, quant_form, partials)
        return q, scale_out, y if keep else nothing(y, y.dtype)
    return q, scale_out, y
