"""The graph that a compiled model hands to the first hook of fp8pass, without generating code."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from fp8pass.report.graph_text import live_module


def captured(
    model: nn.Module, *inputs: torch.Tensor, dynamic: bool | None = None
) -> fx.GraphModule:
    """The only graph of ``model``, functional and decomposed, on the device that its tensors have.

    Tensor subclasses, such as those of torchao, are taken apart on the way as in any compile.
    """
    import torch._inductor.compile_fx as inductor
    import torch._inductor.config as config
    from torch._functorch.aot_autograd import make_boxed_func

    found: list[fx.GraphModule] = []

    def first(graph: fx.Graph) -> None:
        found.append(live_module(graph))

    def without_code(gm: fx.GraphModule, example: Any, **how: Any) -> Any:
        return make_boxed_func(gm.forward)

    def backend(gm: fx.GraphModule, example: Any) -> Any:
        with config.patch({"joint_custom_pre_pass": first, "force_disable_caches": True}):
            return inductor.compile_fx(gm, example, inner_compile=without_code)

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend, dynamic=dynamic)(*inputs)
    torch._dynamo.reset()
    (graph,) = found
    return graph


def calls(graph: fx.GraphModule) -> list[str]:
    """The operators of a graph in order, reshapes that change nothing left out."""
    names = []
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        value = node.meta.get("val")
        source = node.args[0] if node.args else None
        before = source.meta.get("val") if isinstance(source, fx.Node) else None
        same = isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor)
        if str(node.target) == "aten.view.default" and same and value.shape == before.shape:
            continue
        names.append(str(node.target))
    return names


class Block(nn.Module):
    """Norm, gate and up, SiLU and multiply, down, and a second linear on the norm."""

    def __init__(self, width: int = 64, hidden: int = 128, bias: bool = False) -> None:
        super().__init__()
        dtype = torch.bfloat16
        self.norm = nn.RMSNorm(width, eps=1e-6, dtype=dtype)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=bias, dtype=dtype)
        self.down = nn.Linear(hidden, width, bias=bias, dtype=dtype)
        self.out = nn.Linear(width, width, bias=bias, dtype=dtype)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.norm(x)
        gate, up = self.gate_up(y).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up), self.out(y)
