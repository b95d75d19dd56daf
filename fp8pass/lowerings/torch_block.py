"""Kernel ``torch_block``: ``aten._scaled_mm`` with a scale per block (1x128 beside 128x128).

Of ``a`` one scale for 128 elements of a row, stored with the rows innermost; of the weight one for
128 x 128 elements, row-major beside the row-major weight. Revisions of torch differ in how the
weight's scales are padded; with K a multiple of 512 they agree, so only that is taken. The rules
were read in pytorch's ``aten/src/ATen/native/cuda/ScaledBlas.cpp``.
"""

from __future__ import annotations

import torch
from torch import fx

from fp8pass.lowerings import conditions as need
from fp8pass.lowerings.emit import aten, call, value
from fp8pass.lowerings.registry import EmitSite, Kernel, register
from fp8pass.problem import ScaledMMProblem
from fp8pass.reasons import YES, Verdict, no
from fp8pass.target import Target

NAME = "torch_block"
_BLOCKS = (("group1x128", "group128x128"),)
_E4M3 = (torch.float8_e4m3fn,)


def _requirements(target: Target) -> Verdict:
    return need.architecture(NAME, target, ("sm90",)) and need.torch_at_least(NAME, target, (2, 9))


def _takes(target: Target, problem: ScaledMMProblem) -> Verdict:
    return need.all_of(
        lambda: need.granularity(NAME, problem, _BLOCKS),
        lambda: need.plain_scales(NAME, problem),
        lambda: need.fp8_operands(NAME, problem, _E4M3, _E4M3),
        lambda: need.out_dtype(NAME, problem, (torch.bfloat16,)),
        lambda: need.bias_dtype(NAME, problem, ()),
        lambda: need.layouts(NAME, problem),
        lambda: need.multiples(NAME, problem, 128),
        lambda: _sizes(problem),
    )


def _sizes(problem: ScaledMMProblem) -> Verdict:
    assert problem.k is not None
    if problem.k % 512:
        return no("FP8-L009", kernel=NAME, what="K", wants=512, has=problem.k)
    if not problem.packed:
        return no("FP8-L008", kernel=NAME, what="rows", wants="without padding", has="padded ones")
    return YES


def _inner_first(graph: fx.Graph, scale: fx.Node) -> fx.Node:
    """The same matrix, stored with its first dim innermost."""
    turned = call(graph, aten.permute.default, (scale, [1, 0]))
    memory = {"memory_format": torch.contiguous_format}
    return call(
        graph,
        aten.permute.default,
        (call(graph, aten.clone.default, (turned,), memory), [1, 0]),
    )


def _emit(graph: fx.Graph, site: EmitSite) -> fx.Node:
    scales = [_inner_first(graph, scale) for scale in (site.scale_a, site.scale_b)]
    args = (site.a, site.b, *scales, None, None, site.out_dtype, site.fast_accum)
    node = call(graph, aten._scaled_mm.default, args, val=site.val)
    # the strides of the scales are part of what they mean: Inductor keeps them by this
    node.meta["eager_input_vals"] = (fx.node.map_arg(args, value), {})
    return node


def _run(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    if not a.shape[0]:
        return a.new_empty((0, b.shape[1]), dtype=out_dtype)
    scale_a, scale_b = (scale.t().contiguous().t() for scale in (scale_a, scale_b))
    return torch._scaled_mm(
        a, b, scale_a, scale_b, bias, out_dtype=out_dtype, use_fast_accum=fast_accum
    )


TORCH_BLOCK = register(
    Kernel(
        name=NAME,
        summary="torch._scaled_mm, 1x128 blocks of activations with 128x128 blocks of weights",
        kinds=frozenset({"cuda"}),
        requirements=_requirements,
        can_implement=_takes,
        priority=lambda target, problem: 40,
        emit=_emit,
        provenance="tested on sm90",
        run=_run,
    )
)
