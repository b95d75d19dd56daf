"""Kernels ``torch_w8a16`` and ``triton_w8a16``: unquantised activations, fp8 weights (W8A16).

What they lower is ``fp8pass::w8a16_mm``: a weight-only product of the model, or a product of two
quantised operands of which the user asked that its activations stay as they are (``force`` or
``prefer`` with ``w8a16`` or the name of a kernel here). That is never made unasked, not even for a
device that has no fp8 product: it is another function of the inputs.

- ``torch_w8a16``: the weight made wide and the product, as aten, for Inductor. A product that the
  model wrote that way keeps its own nodes.
- ``triton_w8a16``: own kernel, codes converted in registers. It needs no fp8 of the device: where
  its compiler converts none, the bits are converted with integer arithmetic.
"""

from __future__ import annotations

import torch
from torch import fx

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.kernels.triton_w8a16_limits import why_not_w8a16
from fp8pass.lowerings import conditions as need
from fp8pass.lowerings.emit import aten, call, matrix_like, value
from fp8pass.lowerings.registry import EmitSite, Kernel, register
from fp8pass.lowerings.torch_dequant import spread_scale
from fp8pass.ops.weight_form import WeightForm
from fp8pass.problem import ScaledMMProblem
from fp8pass.quant_key import FP8_DTYPES, dtype_name
from fp8pass.reasons import YES, Verdict, no
from fp8pass.target import Target

_CONVERT = torch.ops.prims.convert_element_type.default


def weight_scales(kernel: str, problem: ScaledMMProblem) -> Verdict:
    """The weight is fp8 with plain scales per tensor, channel or block, which needs known sizes."""
    weight = problem.weight
    plain = need.plain_scales(kernel, problem)
    if not plain:
        return plain
    if weight.dtype not in FP8_DTYPES:
        wants = "fp8 codes"
        has = dtype_name(weight.dtype)
        return no("FP8-L007", kernel=kernel, what="weights of dtype", has=has, wants=wants)
    group = weight.scale.group
    if group.name in ("tensor", "channel"):
        return YES
    if min(group.row, group.col) < 1:
        wants = "one scale per tensor, channel or block of the weight"
        return no("FP8-L003", kernel=kernel, wants=wants, has=group.name)
    return need.multiples(kernel, problem, 1)


# ---- torch_w8a16 --------------------------------------------------------------------------------


def _takes_torch(target: Target, problem: ScaledMMProblem) -> Verdict:
    name = "torch_w8a16"
    return need.all_of(
        lambda: weight_scales(name, problem),
        lambda: need.converts(name, target, problem),
        lambda: need.out_dtype(name, problem, need.MODEL_DTYPES),
        lambda: need.bias_dtype(name, problem, need.MODEL_DTYPES),
    )


def _emit_torch(graph: fx.Graph, site: EmitSite) -> fx.Node:
    """The reference, :func:`fp8pass.ops.weight_only.weight_only_product`, as nodes."""
    form = WeightForm.parse(site.problem.form)
    group = site.problem.weight.scale.group
    blocks = group.name.startswith("group")

    def cast(node: fx.Node, dtype: torch.dtype) -> fx.Node:
        held = value(node)
        if held.dtype == dtype:
            return node
        return call(graph, _CONVERT, (node, dtype), val=torch.empty_like(held, dtype=dtype))

    scale = site.scale_b
    if group.name == "channel" and value(scale).dim() != 2:
        scale = call(graph, aten.reshape.default, (scale, [1, -1]))
    if value(scale).dim():
        scale = cast(scale, form.scaled)
    if blocks:
        scale = spread_scale(graph, scale, group, value(site.b))
    at_weight = blocks or form.at == "weight"
    if at_weight:
        weight = call(graph, aten.mul.Tensor, (cast(site.b, form.scaled), scale))
        weight = cast(weight, form.product)
    else:
        weight = cast(site.b, form.product)
    left = cast(site.a, form.product)
    made = matrix_like(site.val, form.product)
    inside = site.bias is not None and form.bias == "inside"
    if inside:
        assert site.bias is not None
        operands = (cast(site.bias, form.product), left, weight)
        out = call(graph, aten.addmm.default, operands, val=made)
    else:
        out = call(graph, aten.mm.default, (left, weight), val=made)
    if not at_weight:
        out = call(graph, aten.mul.Tensor, (cast(out, form.scaled), scale))
    if site.bias is not None and not inside:
        out = call(graph, aten.add.Tensor, (out, site.bias))
    return cast(out, site.out_dtype)


TORCH_W8A16 = register(
    Kernel(
        name="torch_w8a16",
        summary="weight made wide, then a product of unquantised activations, by Inductor",
        kinds=frozenset({"cpu", "cuda", "rocm"}),
        requirements=need.always,
        can_implement=_takes_torch,
        priority=lambda target, problem: 60,
        emit=_emit_torch,
        provenance="tested on x86-avx2 and sm90; others not run on hardware",
        weight_only=True,
    )
)


# ---- triton_w8a16 -------------------------------------------------------------------------------

#: Devices whose Triton has the tensor core products of bf16 that the kernel is made of.
_ARCHITECTURES = (
    "sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121",
    "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1200", "gfx1201",
)  # fmt: skip


def _takes_triton(target: Target, problem: ScaledMMProblem) -> Verdict:
    name = "triton_w8a16"
    return need.all_of(
        lambda: weight_scales(name, problem),
        lambda: _limits(problem),
    )


def _limits(problem: ScaledMMProblem) -> Verdict:
    why = why_not_w8a16(
        problem.n, problem.k, problem.activation.dtype, problem.weight.dtype, problem.out_dtype,
        problem.bias, str(problem.weight), problem.form,
    )  # fmt: skip
    return YES if why is None else no("FP8-L017", kernel="triton_w8a16", what=why)


def _emit_triton(graph: fx.Graph, site: EmitSite) -> fx.Node:
    args = (
        site.a, site.b, site.scale_b, site.bias, site.out_dtype, str(site.problem.weight),
        site.problem.form,
    )  # fmt: skip
    return call(graph, torch.ops.fp8pass.triton_w8a16_mm.default, args, val=site.val)


TRITON_W8A16 = register(
    Kernel(
        name="triton_w8a16",
        summary="own Triton product: fp8 weights made wide in registers, float32 accumulation",
        kinds=frozenset({"cuda", "rocm"}),
        requirements=lambda target: need.with_triton("triton_w8a16", target, _ARCHITECTURES),
        can_implement=_takes_triton,
        # behind torch_w8a16 until it was measured: with few rows it reads one byte of a weight
        # where a copy made wide is one byte read, two written and two read again
        priority=lambda target, problem: 70,
        emit=_emit_triton,
        provenance="tested on sm90 and in Triton's interpreter; others not run on hardware",
        weight_only=True,
    )
)
