"""Kernel ``vllm`` for fused producers: vLLM's norms, SiLU·mul and quantises on CUDA.

Where vLLM's compiled library is loaded. What its kernels compute was read in ``csrc/`` of vLLM
(``layernorm_quant_kernels.cu``, ``quantization/fused_kernels``, ``quantization/w8a8/fp8``,
``quantization/activation_kernels.cu``; revisions of 2025 and 2026):

- RMSNorm: ``h = round(x.f32 * rsqrt(sum / width + eps))``, then ``round(h * weight)``, both in the
  dtype of ``x``: a weight behind the cast. With a residual and a given scale the norm reads the
  rounded sum, with a dynamic scale the sum in float32; the sum that is returned is rounded.
- SiLU·mul with a given scale: older versions round SiLU and the product, newer ones round nothing;
  per group of 64 or 128 none of them rounds.
- a given scale, and one per tensor: ``x * (1 / scale)``; per token and per group: ``x / scale``.
- a dynamic scale is ``amax / 448``, at least ``1 / (448 * 512)`` per token and behind a norm; per
  tensor it has no floor; SiLU·mul per group had one of 1e-10 before that one. A quantise per group
  alone takes a floor of amax, and one per token an upper bound of amax, as operands.
- maxima and clamps are ``fmaxf`` and ``fminf``: a NaN becomes the largest code, and does not reach
  a scale.

The last point alone breaks the contract of ``numerics="exact"``, so that they are taken under
``fast``, or where the user prefers ``vllm`` by name. A floor of the source below vLLM's is then
vLLM's (4.4e-6, far below what a row after a norm has), one above it is another quantise.

Every operator writes into buffers that its caller gives; here they are allocated, and a residual is
copied first, since vLLM's kernel overwrites it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.lowerings.emit import side_by_side
from fp8pass.lowerings.external import requirements, vllm_operator
from fp8pass.lowerings.producers import ProducerKernel, ProducerProblem, register_producer
from fp8pass.ops.act_form import ActForm
from fp8pass.ops.activation import silu_mul_quant as silu_mul_reference
from fp8pass.ops.norm import add_rms_norm_quant as add_reference
from fp8pass.ops.norm import rms_norm_quant as norm_reference
from fp8pass.ops.norm_form import NormForm
from fp8pass.ops.quant_form import QuantForm
from fp8pass.reasons import YES, Verdict, no
from fp8pass.target import NO_VLLM_PRODUCERS, Target

NAME = "vllm"
_ARCHITECTURES = ("sm89", "sm90", "sm100", "sm103", "sm120", "sm121")
_HALF = (torch.bfloat16, torch.float16)
_E4M3 = torch.float8_e4m3fn
_TOP = 448.0
#: vLLM's floor of a dynamic scale.
FLOOR = 1.0 / (448.0 * 512.0)
_GROUPS = (64, 128)
#: Threads of a block are shared out to the groups of a row, at least one to each of at most 256.
_WIDEST_IN_GROUPS = 256 * 64
#: A row of gate, up and codes is read and written in pieces of 16 bytes.
_PIECE = 16
_OPS = ("rms_norm_quant", "add_rms_norm_quant", "silu_mul_quant", "quantize")


def _requirements(target: Target) -> Verdict:
    if NO_VLLM_PRODUCERS in target.features:
        wants = "vLLM's library with its producers"
        has = f"{target.spec} with another part of it"
        return no("FP8-L011", kernel=NAME, wants=wants, target=has)
    return requirements(NAME, target, _ARCHITECTURES, "vllm", "vLLM's compiled library")


def _takes(target: Target, problem: ProducerProblem) -> Verdict:
    why = _why_not(problem)
    return YES if why is None else no("FP8-L017", kernel=NAME, what=why)


def _why_not(problem: ProducerProblem) -> str | None:
    """What the kernel does not take of a site, or None."""
    if problem.op not in _OPS:
        return f"the operator {problem.op}"
    if problem.width is None:
        return "a width that is not known statically"
    first = problem.dtypes[0]
    if first not in _HALF:
        return f"values of {first}"
    if any(dtype != first for dtype in problem.dtypes):
        words = ", ".join(str(dtype) for dtype in problem.dtypes)
        return f"operands of different dtypes or none: {words}"
    form = QuantForm.parse(problem.quant_form)
    why = _quantise(form, problem)
    if why is not None or problem.op == "quantize":
        return why
    if problem.op == "silu_mul_quant":
        return _silu(ActForm.parse(problem.form), form, first, problem.width)
    return _norm(NormForm.parse(problem.form), form, first)


def _silu(act: ActForm, form: QuantForm, dtype: torch.dtype, width: int) -> str | None:
    if act.compute != torch.float32:
        return f"SiLU computed in {act.compute}"
    if form.static and (act.mid, act.out) != (dtype, dtype):
        return f"SiLU and a product that are not both rounded to {dtype}, as some versions do"
    if width % _PIECE:
        return f"a width of {width}, no multiple of {_PIECE}"
    return None


def _norm(norm: NormForm, form: QuantForm, dtype: torch.dtype) -> str | None:
    if norm.eps != "inside":
        return f"epsilon {norm.eps} of the root"
    if norm.weight != "after_cast" or norm.mid != dtype or norm.out not in (None, dtype):
        return f"a norm whose weight is not behind a cast to {dtype}: {norm}"
    if form.static and norm.sum != "rounded":
        return "a norm of a residual sum in float32 with a given scale"
    return None


def _quantise(form: QuantForm, problem: ProducerProblem) -> str | None:
    if form.dtype != _E4M3:
        return f"codes of {form.dtype}"
    top = _TOP if form.static else form.qmax  # of a given scale it says nothing
    if (top, form.lo, form.hi) != (_TOP, -_TOP, _TOP):
        return f"a largest value of {form.qmax:g} within [{form.lo:g}, {form.hi:g}], not {_TOP:g}"
    bounded = problem.op == "quantize" and form.granularity == "token" and form.upper == "amax"
    usual = replace(form, upper="none") if bounded else form
    if not usual.plain or form.compute != torch.float32:
        return f"the scale recipe {form}"
    if form.static:
        return None if form.granularity == "tensor" else f"given scales per {form.granularity}"
    if form.scale != "div" or form.apply not in ("div", "mul_recip"):
        return f"the scale recipe {form}"
    return _granularity(form, problem)


def _granularity(form: QuantForm, problem: ProducerProblem) -> str | None:
    assert problem.width is not None
    name, alone = form.granularity, problem.op == "quantize"
    floor = f"a floor {form.floor} of {form.floor_value:g}"
    if name == "tensor" and not alone:
        return "a norm or SiLU·mul with a dynamic scale per tensor"
    if name == "token" and problem.op == "silu_mul_quant":
        return "SiLU·mul with a scale per token"
    if form.group is None:
        return None if _low_floor(form) else floor
    if form.group not in _GROUPS:
        return f"one scale per {name}"
    if problem.width % form.group:
        return f"a width of {problem.width}, no multiple of {form.group}"
    if alone:  # its floor is an operand
        return None if form.floor == "amax" else floor
    if not _low_floor(form):
        return floor
    if problem.op != "silu_mul_quant" and problem.width > _WIDEST_IN_GROUPS:
        return f"groups in a row of {problem.width}, more than {_WIDEST_IN_GROUPS}"
    return None


def _low_floor(form: QuantForm) -> bool:
    """Whether the form's floor is at or below vLLM's own, which then takes its place."""
    if form.floor == "none":
        return True
    as_scale = {"scale": form.floor_value, "amax": form.floor_value / form.qmax}.get(form.floor)
    # as float32 writes the same number
    return as_scale is not None and as_scale <= FLOOR * (1 + 2.0**-20)


def _operator(op: str) -> torch._ops.OpOverload:
    overload: torch._ops.OpOverload = getattr(torch.ops.fp8pass, f"vllm_{op}").default
    return overload


VLLM = register_producer(
    ProducerKernel(
        name=NAME,
        summary="vLLM's fused norms, SiLU·mul and quantises (fast numerics)",
        kinds=frozenset({"cuda"}),
        requirements=_requirements,
        can_implement=_takes,
        replaces=_operator,
        provenance="tested on sm90 with vLLM 0.21's library; others not run on hardware",
        inexact="a NaN becomes its largest code, it has a floor of its own for scales, multiplies "
        "by 1 / scale and drops roundings of SiLU and of a residual sum",
        keeps_value=False,
    )
)


# ---- the calls -----------------------------------------------------------------------------------

_Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _packed(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, from an address that is a multiple of 16 bytes."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _PIECE else x


def _rows(x: torch.Tensor) -> torch.Tensor:
    """The same, of two dims."""
    return _packed(x.reshape(-1, x.shape[-1]))


def _given(scale: torch.Tensor | None) -> torch.Tensor:
    assert scale is not None
    return scale.to(torch.float32).reshape(1)


def _buffers(rows: torch.Tensor, width: int, form: QuantForm) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and scales if they are computed, that are to be written."""
    count = rows.shape[0]
    q = rows.new_empty((count, width), dtype=form.dtype)
    shape: tuple[int, ...] = (count, 1 if form.group is None else width // form.group)
    if form.granularity == "tensor":
        shape = (0,) if form.static else (1,)
    return q, rows.new_empty(shape, dtype=torch.float32)


def _shaped(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, form: QuantForm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in the shapes of ``fp8pass::quantize``, where a given scale is not returned."""
    shape = tuple(x.shape)
    return q.view(shape), scale if form.static else scale.view(form.scale_shape(shape))


def quantize(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    form: str,
    scale_ub: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``fp8pass::quantize``.

    Raises:
        UnsupportedError: vLLM's library is not loaded in this process; so of the others here.
    """
    quant = QuantForm.parse(form)
    rows = _rows(x)
    q, made = _buffers(rows, rows.shape[1], quant)
    if not x.numel():
        made.fill_(FLOOR)  # per tensor there is one, of no values
    elif quant.static:
        vllm_operator("static_scaled_fp8_quant")(q, rows, _given(scale))
    elif quant.granularity == "tensor":
        vllm_operator("dynamic_scaled_fp8_quant")(q, rows, made)
    elif quant.group is None:
        bound = None if scale_ub is None else _given(scale_ub)
        vllm_operator("dynamic_per_token_scaled_fp8_quant")(q, rows, made, bound)
    else:
        op = vllm_operator("per_token_group_fp8_quant")
        arguments = (rows, q, made, quant.group, quant.floor_value, -_TOP, _TOP, False)
        flags = len(op.default._schema.arguments) - len(arguments)  # that newer versions have
        op(*arguments, *(False,) * flags)
    return _shaped(x, q, made, quant)


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
    if not x.numel():
        return norm_reference(x, weight, scale, eps, form, quant_form, False)
    quant, rows = QuantForm.parse(quant_form), _rows(x)
    q, made = _buffers(rows, rows.shape[1], quant)
    if quant.static:
        op = vllm_operator("rms_norm_static_fp8_quant")
        op(q, rows, _packed(weight), _given(scale), eps)
    else:
        _dynamic_norm(q, rows, weight, made, eps, None, quant)
    return *_shaped(x, q, made, quant), x.new_empty((0,))


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
    if not x.numel():
        return add_reference(x, residual, weight, scale, eps, form, quant_form, False)
    quant, rows = QuantForm.parse(quant_form), _rows(x)
    total = residual.clone(memory_format=torch.contiguous_format).view(rows.shape)
    q, made = _buffers(rows, rows.shape[1], quant)
    if quant.static:
        op = vllm_operator("fused_add_rms_norm_static_fp8_quant")
        op(q, rows, total, _packed(weight), _given(scale), eps)
    else:
        _dynamic_norm(q, rows, weight, made, eps, total, quant)
    return *_shaped(x, q, made, quant), x.new_empty((0,)), total.view(x.shape)


def _dynamic_norm(
    q: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    total: torch.Tensor | None,
    quant: QuantForm,
) -> None:
    """Write ``q`` and ``scale``; ``total`` is a residual, and the sum afterwards."""
    given = (q, rows, _packed(weight), scale, eps, None, total)
    if quant.group is None:
        vllm_operator("rms_norm_dynamic_per_token_quant")(*given)
    else:
        vllm_operator("rms_norm_per_block_quant")(*given, quant.group, False)


def silu_mul_quant(
    gate: torch.Tensor,
    up: torch.Tensor,
    scale: torch.Tensor | None,
    form: str,
    quant_form: str,
    keep: bool,
) -> _Result:
    """As ``fp8pass::silu_mul_quant``; ``y`` is empty."""
    if not gate.numel():
        return silu_mul_reference(gate, up, scale, form, quant_form, False)
    quant, both = QuantForm.parse(quant_form), _packed(side_by_side(gate, up))
    q, made = _buffers(both, gate.shape[-1], quant)
    if quant.static:
        vllm_operator("silu_and_mul_quant")(q, both, _given(scale))
    else:
        op = vllm_operator("silu_and_mul_per_block_quant")
        op(q, both, made, quant.group, None, False)
    y = gate.new_empty((0,), dtype=ActForm.parse(form).out)
    return *_shaped(gate, q, made, quant), y
