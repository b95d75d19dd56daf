"""Writing an operator of fp8pass out as aten, for Inductor to generate code from."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8pass.ops.library import SPECS
from fp8pass.site_draft import Draft
from fp8pass.workbench import Workbench


def write_out(bench: Workbench, draft: Draft) -> bool:
    """Write an operator that the model emitted itself out as aten, from its reference.

    Left as it is where that is not possible (it is correct, only slower): symbolic sizes that the
    reference asks for, or a product, which has kernels of its own. Returns whether it was written.
    """
    node = draft.node
    if draft.kind == "scaled_mm":
        return False
    traced = _trace(bench, node)
    if traced is None:
        return False
    inputs = [arg for arg in node.args if isinstance(arg, fx.Node)]
    holders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    mapping: dict[fx.Node, fx.Node] = dict(zip(holders, inputs, strict=True))
    with bench.graph.inserting_before(node):
        copied = bench.graph.graph_copy(traced.graph, mapping)
    results = copied if isinstance(copied, (tuple, list)) else (copied,)
    for output, result in zip(draft.outputs.values(), results, strict=True):
        assert isinstance(result, fx.Node)
        draft.swaps.append(bench.swap(output, result))
    return True


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
