"""Kernels for fused producers (norm + quantise, activation + quantise), and the way back to aten.

One kernel exists so far, on every kind of device: ``inductor``, which writes the site out as aten
operators, once, with one quantise for all its readers, for Inductor to generate code from. On a CPU
that is the usual choice, since Triton has none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8pass.ops.library import SPECS
from fp8pass.options import Options
from fp8pass.site_draft import Draft
from fp8pass.target import Target
from fp8pass.workbench import Workbench

INDUCTOR = "inductor"


def lower_producer(bench: Workbench, draft: Draft, target: Target, options: Options) -> None:
    """Choose the kernel of a fused site and write it: so far always :data:`INDUCTOR`.

    A site that was read from aten goes back to the nodes it was read from: they are that code, with
    every rounding where it was, and the quantises of its other readers were merged into this one.
    """
    draft.kernel = INDUCTOR
    bench.undo(draft.swaps)
    for part in (draft, draft.readers_of):
        if part is not None and part.source == "fp8pass":
            write_out(bench, part)


def write_out(bench: Workbench, draft: Draft) -> None:
    """Write an operator that the model emitted itself out as aten, from its reference.

    Left as it is where that is not possible (it is correct, only slower): symbolic sizes that the
    reference asks for, or a product, which has kernels of its own.
    """
    node = draft.node
    if draft.kind == "scaled_mm":
        return
    traced = _trace(bench, node)
    if traced is None:
        return
    inputs = [arg for arg in node.args if isinstance(arg, fx.Node)]
    holders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    mapping: dict[fx.Node, fx.Node] = dict(zip(holders, inputs, strict=True))
    with bench.graph.inserting_before(node):
        copied = bench.graph.graph_copy(traced.graph, mapping)
    results = copied if isinstance(copied, (tuple, list)) else (copied,)
    for output, result in zip(draft.outputs.values(), results, strict=True):
        assert isinstance(result, fx.Node)
        draft.swaps.append(bench.swap(output, result))


def _trace(bench: Workbench, node: fx.Node) -> torch.fx.GraphModule | None:
    """The reference of an operator as a graph of aten calls, None if it cannot be had."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    name = str(node.target._schema.name).split("::")[1]  # type: ignore[union-attr]
    spec = SPECS[name]
    inputs = [arg.meta["val"] for arg in node.args if isinstance(arg, fx.Node)]
    if any(not isinstance(size, int) for value in inputs for size in value.shape):
        return None

    def reference(*tensors: torch.Tensor) -> Any:
        remaining = iter(tensors)
        args = [next(remaining) if isinstance(a, fx.Node) else a for a in node.args]
        return spec.reference(*args)

    traced = make_fx(reference, decomposition_table=select_decomp_table())(*inputs)
    traced.graph.eliminate_dead_code()
    for inner in traced.graph.nodes:
        if inner.op not in ("placeholder", "output", "call_function"):
            return None
    return traced


def inductor_patches(target: Target, options: Options) -> dict[str, Any]:
    """Settings of Inductor under which the code it generates for a site keeps the contract.

    Inductor keeps intermediate values of a fused loop in float32, so its code for norm + quantise
    differs from eager in 2 to 3 % of the codes; with ``emulate_precision_casts`` it rounds where
    the graph does (on CPUs since torch 2.13; before that the setting changes nothing there).
    """
    if target.kind == "cpu" and options.numerics == "exact":
        return {"emulate_precision_casts": True}
    return {}
