"""What the Triton producer kernels take, as pure predicates: no Triton, no device, only values.

Each answers None ("takes it") or one phrase that names the failing value, which the report prints
after "does not take". The kernels ask the same predicates before they launch, so that an operator
called by hand is refused with the same words.
"""

from __future__ import annotations

from functools import cache

import torch

from fp8pass.errors import OptionError
from fp8pass.ops.forms import MODEL_DTYPES, ActForm, LayerNormForm, NormForm, QuantForm

#: fp8 dtypes that the casts of NVIDIA GPUs produce, and int8.
CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
#: A row that has to be seen twice (for its sum of squares, or its largest value) is kept in the
#: registers of one program: 16 warps of 64 values a thread.
MAX_ROW = 32768
#: Element-wise kernels index columns with 32 bits.
MAX_WIDTH = 2**31 - 2**16
#: Values that share a scale of a ``group<n>``.
GROUPS = (16, 32, 64, 128, 256)


def _why_not_dtype(name: str, dtype: torch.dtype) -> str | None:
    return None if dtype in MODEL_DTYPES else f"{name} of {dtype}"


def _exact(value: float, dtype: torch.dtype) -> bool:
    return torch.tensor(value, dtype=dtype).item() == value


def _why_not_group(form: QuantForm, width: int | None) -> str | None:
    """Of a ``group<n>``: a group lies within one chunk of a row, and is reduced there."""
    group = form.group
    assert group is not None
    if group not in GROUPS:
        return f"groups of {group} values (a power of two from {GROUPS[0]} to {GROUPS[-1]})"
    if width is not None and width % group:
        return f"groups of {group} values in rows of {width}"
    return None


def _why_not_quant(form: QuantForm, width: int | None) -> str | None:
    if form.dtype not in CODES:
        return f"codes of {form.dtype}: the GPU's casts make {', '.join(map(str, CODES))}"
    if form.zero != "none":
        return f"codes with a zero point (the form {form})"
    if form.upper != "none":
        return f"a scale bounded by a tensor (the form {form})"
    if form.power not in ("none", "ceil", "floor"):
        return f"scales rounded by a cast to float8_e8m0fnu (the form {form})"
    if form.layout != "row" and form.group is None:
        return f"the form {form}"  # a layout of scales that are no matrix
    if form.power == ("ceil" if form.scale == "inverse" else "floor"):
        return f"the form {form}"  # its reference knows no such rounding
    if form.group is not None and (why := _why_not_group(form, width)):
        return why
    if form.scale == "div" and form.qmax == 0.0:
        return "a division by the constant 0"
    whole = form.dtype == torch.int8
    info = torch.iinfo(torch.int8) if whole else torch.finfo(form.dtype)
    if not info.min <= form.lo <= form.hi <= info.max:
        return f"clamp bounds [{form.lo}, {form.hi}] that {form.dtype} cannot hold"
    if whole and not (form.lo.is_integer() and form.hi.is_integer()):
        return f"clamp bounds [{form.lo}, {form.hi}] that are no integers"
    for bound in (form.lo, form.hi):
        # Both are compared in the dtype of the division, where torch first rounds them.
        if not _exact(bound, form.compute):
            return f"the clamp bound {bound}, which {form.compute} rounds"
    return None


def _why_not_width(width: int | None, limit: int) -> str | None:
    if width is None:
        return "a width that is not known when compiling"
    if width < 1:
        return f"rows of {width} values"
    if width > limit:
        return f"rows of {width} values (at most {limit})"
    return None


@cache
def why_not_norm(
    form: str,
    quant_form: str,
    width: int | None,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
    weight_dtype: torch.dtype | None,
) -> str | None:
    """Why the kernels for ``rms_norm_quant`` and ``add_rms_norm_quant`` refuse a site.

    Args:
        form, quant_form: texts of its :class:`NormForm` and :class:`QuantForm`.
        width: size of the last dim, None where symbolic.
        x_dtype, residual_dtype, weight_dtype: dtypes of the operands, None for a missing one.

    Returns:
        None, or one phrase naming the failing value.
    """
    try:
        norm, quant = NormForm.parse(form), QuantForm.parse(quant_form)
    except OptionError as error:
        return str(error)
    if (norm.weight == "none") != (weight_dtype is None):
        return f"the form {form} {'without' if weight_dtype is None else 'with'} a weight"
    dtypes = {"an input": x_dtype, "a residual": residual_dtype, "a weight": weight_dtype}
    for name, dtype in dtypes.items():
        if dtype is not None and (why := _why_not_dtype(name, dtype)):
            return why
    if norm.out is not None and weight_dtype is not None:
        product = torch.promote_types(norm.mid, weight_dtype)
        if product != torch.float32:
            return f"a cast to {norm.out} after a product that is rounded to {product}"
    return _why_not_width(width, MAX_ROW) or _why_not_quant(quant, width)


@cache
def why_not_layer_norm(
    form: str,
    quant_form: str,
    width: int | None,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> str | None:
    """Why the kernel for ``layer_norm_quant`` refuses a site; as :func:`why_not_norm`."""
    try:
        norm, quant = LayerNormForm.parse(form), QuantForm.parse(quant_form)
    except OptionError as error:
        return str(error)
    if (norm.affine == "none") != (weight_dtype is None and bias_dtype is None):
        return f"the form {form} {'with' if norm.affine == 'none' else 'without'} weight or bias"
    dtypes = {"an input": x_dtype, "a weight": weight_dtype, "a bias": bias_dtype}
    for name, dtype in dtypes.items():
        if dtype is not None and (why := _why_not_dtype(name, dtype)):
            return why
    return _why_not_width(width, MAX_ROW) or _why_not_quant(quant, width)


@cache
def why_not_activation(
    form: str,
    quant_form: str,
    width: int | None,
    gate_dtype: torch.dtype,
    up_dtype: torch.dtype | None,
) -> str | None:
    """Why the kernels for ``act_mul_quant`` refuse a site; as :func:`why_not_norm`.

    Only a scale per token needs a whole row in one program; the others take any width.
    ``up_dtype`` is None for an activation alone.
    """
    try:
        act = ActForm.parse(form)
        quant = QuantForm.parse(quant_form)
    except OptionError as error:
        return str(error)
    if act.act == "gpt_oss" and up_dtype is None:
        return f"the form {form} without an up"
    for name, dtype in (("a gate", gate_dtype), ("an input", up_dtype)):
        if dtype is not None and (why := _why_not_dtype(name, dtype)):
            return why
    return _why_not_width(width, _longest(quant)) or _why_not_quant(quant, width)


@cache
def why_not_silu(form: str) -> str | None:
    """Why ``silu_mul_quant`` refuses a form that ``act_mul_quant`` takes."""
    try:
        act = ActForm.parse(form).act
    except OptionError as error:
        return str(error)
    return None if act in ActForm.SILUS else f"the form {form} as one of SiLU"


@cache
def why_not_quantize(quant_form: str, width: int | None, x_dtype: torch.dtype) -> str | None:
    """Why the kernels for ``quantize`` refuse a site; as :func:`why_not_activation`."""
    try:
        quant = QuantForm.parse(quant_form)
    except OptionError as error:
        return str(error)
    return (
        _why_not_dtype("an input", x_dtype)
        or _why_not_width(width, _longest(quant))
        or _why_not_quant(quant, width)
    )


def _longest(quant: QuantForm) -> int:
    whole_rows = not quant.static and quant.granularity == "token"
    return MAX_ROW if whole_rows else MAX_WIDTH
