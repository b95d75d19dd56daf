"""Kernel ``aiter`` for fused producers: AITER's norm + quantise and SiLU·mul + quantise.

What they compute was read in AITER's ``aiter/ops/rmsnorm.py``, its kernel ``rmsnorm_quant_opus``
and the Triton kernels of ``aiter/ops/triton`` (revisions of 2026):

- RMSNorm per token: ``n = x.f32 * rsqrt(mean + eps) * weight`` in float32, where a form with a
  product after the cast asks for the cast (``model_sensitive``); the product itself is not rounded;
  ``scale = amax / max`` without a floor, codes are ``n * (1 / scale)``; a row of zeros has scale 0
  and codes 0, and a NaN in a row does not reach its scale.
- RMSNorm and SiLU·mul per group of 128: the same in float32, ``scale = max(amax, 1e-10) / max``.
- With a residual the norm reads the sum before its rounding, or (``model_sensitive``) after it.

So they drop roundings that the source has and treat rows of zeros and NaN in another way: that is
what ``numerics="fast"`` allows, and ``exact`` does not. They are taken under ``fast``, or where the
user prefers ``aiter`` by name. The largest value is the dtype's own: 240 for e4m3fnuz, and a
quantise by 224 is another one, which is refused.

Not used: ``scaled_silu_and_mul`` (static scales), which reads the scale on the host when it is
launched, so that a captured graph keeps the first one.
"""

from __future__ import annotations

from functools import partial

import torch

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.lowerings import aiter
from fp8pass.lowerings.emit import side_by_side
from fp8pass.lowerings.producers import ProducerKernel, ProducerProblem, register_producer
from fp8pass.ops.act_form import ActForm
from fp8pass.ops.norm_form import NormForm
from fp8pass.ops.quant_form import QuantForm
from fp8pass.reasons import YES, Verdict, no
from fp8pass.target import Target

NAME = "aiter"
_HALF = (torch.bfloat16, torch.float16)
_GROUP = 128
#: The widest row that the norms per group take.
_WIDEST = 8192
#: Where a floor is too small to matter, apart from rows of zeros.
_SMALL_FLOOR = 1e-9
_FLOORS = ("none", "scale", "amax", "divisor")


def _takes(target: Target, problem: ProducerProblem) -> Verdict:
    why = _why_not(target, problem)
    return YES if why is None else no("FP8-L017", kernel=NAME, what=why)


def _why_not(target: Target, problem: ProducerProblem) -> str | None:
    """What the kernel does not take of a site, or None."""
    if problem.op not in ("rms_norm_quant", "add_rms_norm_quant", "silu_mul_quant"):
        return f"the operator {problem.op}"
    if problem.width is None:
        return "a width that is not known statically"
    first = problem.dtypes[0]
    if first not in _HALF:
        return f"values of {first}"
    if any(dtype != first for dtype in problem.dtypes):
        words = ", ".join(str(dtype) for dtype in problem.dtypes)
        return f"operands of different dtypes or none: {words}"
    why = _quantise(target, QuantForm.parse(problem.quant_form), problem)
    if why is not None:
        return why
    if problem.op == "silu_mul_quant":
        form = ActForm.parse(problem.form)
        return None if form.compute == torch.float32 else f"SiLU computed in {form.compute}"
    norm = NormForm.parse(problem.form)
    if norm.eps != "inside":
        return f"epsilon {norm.eps} of the root"
    return None if norm.weight != "none" else "a norm without a weight"


def _quantise(target: Target, form: QuantForm, problem: ProducerProblem) -> str | None:
    if form.dtype != target.fp8_dtype:
        return f"codes of {form.dtype}"
    top = float(torch.finfo(form.dtype).max)
    if (form.qmax, form.lo, form.hi) != (top, -top, top):
        return f"a largest value of {form.qmax:g} within [{form.lo:g}, {form.hi:g}], not {top:g}"
    if form.scale != "div" or form.floor not in _FLOORS or form.floor_value > _SMALL_FLOOR:
        return f"the scale recipe {form}"
    if not form.plain or form.compute != torch.float32:
        return f"the scale recipe {form}"
    if form.granularity == "token":
        silu = problem.op == "silu_mul_quant"
        return "SiLU·mul with a scale per token" if silu else None
    if form.group != _GROUP:
        return f"one scale per {form.granularity}"
    assert problem.width is not None
    if problem.width % _GROUP:
        return f"a width of {problem.width}, no multiple of {_GROUP}"
    wide = problem.width > _WIDEST and problem.op != "silu_mul_quant"
    return f"groups in a row of {problem.width}, more than {_WIDEST}" if wide else None


def _operator(op: str) -> torch._ops.OpOverload:
    overload: torch._ops.OpOverload = getattr(torch.ops.fp8pass, f"aiter_{op}").default
    return overload


AITER = register_producer(
    ProducerKernel(
        name=NAME,
        summary="AITER's fused norms and SiLU·mul with a quantise (fast numerics)",
        kinds=frozenset({"rocm"}),
        requirements=partial(aiter.requirements, NAME),
        can_implement=_takes,
        replaces=_operator,
        provenance=aiter.PROVENANCE,
        inexact="it drops roundings to the model's dtype and has no floor for a row of zeros",
        keeps_value=False,
    )
)


# ---- the calls -----------------------------------------------------------------------------------

_Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Two dims, contiguous: what the norms read."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _group_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype, residual: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    fused = aiter.find(
        "fused_rms_fp8_group_quant",
        "aiter.ops.triton.quant.fused_fp8_quant",
        "aiter.ops.triton.fused_fp8_quant",
    )
    (q, scale), _, _, total = fused(
        x, weight, eps, None, None, None, group_size=_GROUP, dtype_quant=dtype, res1=residual
    )
    return q, scale, total


def rms_norm_quant(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    eps: float,
    form: str,
    quant_form: str,
    keep: bool,
) -> _Result:
    """As ``fp8pass::rms_norm_quant``; ``y`` is empty."""
    norm, quant = NormForm.parse(form), QuantForm.parse(quant_form)
    rows = _rows(x)
    shape = quant.scale_shape(tuple(x.shape))
    if not rows.numel():
        q, scale_out = (
            rows.new_empty(x.shape, dtype=quant.dtype),
            rows.new_empty(shape, dtype=torch.float32),
        )
    elif quant.group is not None:
        q, scale_out, _ = _group_norm(rows, weight, eps, quant.dtype, None)
    else:
        q = torch.empty_like(rows, dtype=quant.dtype)
        scale_out = rows.new_empty((rows.shape[0], 1), dtype=torch.float32)
        fused = aiter.find("rmsnorm2d_fwd_with_dynamicquant", "aiter.ops.rmsnorm", "aiter")
        fused(q, rows, scale_out, weight, eps, int(norm.weight == "after_cast"))
    return q.view(x.shape), scale_out.view(shape), x.new_empty((0,), dtype=_y_dtype(x, norm))


def add_rms_norm_quant(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    eps: float,
    form: str,
    quant_form: str,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``fp8pass::add_rms_norm_quant``; ``y`` is empty, and no input is written to."""
    norm, quant = NormForm.parse(form), QuantForm.parse(quant_form)
    rows, others = _rows(x), _rows(residual)
    shape = quant.scale_shape(tuple(x.shape))
    if not rows.numel():
        q = rows.new_empty(x.shape, dtype=quant.dtype)
        scale_out, total = rows.new_empty(shape, dtype=torch.float32), torch.empty_like(rows)
    elif quant.group is not None:
        q, scale_out, total = _group_norm(rows, weight, eps, quant.dtype, others)
    else:
        q, total = torch.empty_like(rows, dtype=quant.dtype), torch.empty_like(rows)
        scale_out = rows.new_empty((rows.shape[0], 1), dtype=torch.float32)
        fused = aiter.find("rmsnorm2d_fwd_with_add_dynamicquant", "aiter.ops.rmsnorm", "aiter")
        rounded = norm.sum == "rounded" and norm.weight == "after_cast"
        fused(q, rows, others, total, scale_out, weight, eps, int(rounded))
    y = x.new_empty((0,), dtype=_y_dtype(x, norm))
    return q.view(x.shape), scale_out.view(shape), y, total.view(x.shape)


def silu_mul_quant(
    gate: torch.Tensor,
    up: torch.Tensor,
    scale: torch.Tensor | None,
    form: str,
    quant_form: str,
    keep: bool,
) -> _Result:
    """As ``fp8pass::silu_mul_quant``, a scale per group of 128; ``y`` is empty."""
    quant = QuantForm.parse(quant_form)
    shape = quant.scale_shape(tuple(gate.shape))
    y = gate.new_empty((0,), dtype=ActForm.parse(form).out)
    if not gate.numel():
        q = gate.new_empty(gate.shape, dtype=quant.dtype)
        return q, gate.new_empty(shape, dtype=torch.float32), y
    fused = aiter.find("act_mul_and_fp8_group_quant", "aiter.ops.triton.activation")
    both = side_by_side(gate, up)
    q, scale_out = fused(both, activation="silu", group_size=_GROUP, dtype_quant=quant.dtype)
    return q.view(gate.shape), scale_out.view(shape), y


def _y_dtype(x: torch.Tensor, norm: NormForm) -> torch.dtype:
    """Of the value that is not returned: the weight has the dtype of ``x``."""
    if norm.weight == "after_cast":
        return norm.out or torch.promote_types(norm.mid, x.dtype)
    return norm.mid
