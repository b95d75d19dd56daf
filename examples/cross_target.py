"""The graph that an H100 would get, on a machine that has none.

Prints the graph of a small decoder layer for target sm90 with every call it would make, and what
was done at every site. The operators in it have a reference for every device, so that the graph
made for the GPU is then run here, and compared with the layer before it was quantised.

The same on the command line, in this folder:

    fp8pass compile --target sm90 --dynamic-dim 0 cross_target:example
"""

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fp8pass
from fp8pass.nn import quantize_

HIDDEN, INTERMEDIATE, TOKENS = 128, 256, 16


class RMSNorm(nn.Module):
    """The norm of Hugging Face's Llama: float32 inside, rounded before the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


class Layer(nn.Module):
    """A decoder layer of Llama that attends to its own token only; [tokens, HIDDEN] in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.mlp_norm = RMSNorm(), RMSNorm()
        self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
        self.gate = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(self.v(self.input_norm(x)))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def layer() -> nn.Module:
    """The layer in bf16, always with the same weights."""
    torch.manual_seed(0)
    return Layer().to(torch.bfloat16).eval()


def example() -> tuple[nn.Module, tuple[Tensor]]:
    """The layer in FP8 and its input: what the command takes."""
    model = layer()
    quantize_(model, "dynamic")
    return model, (torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16),)


@torch.no_grad()
def main() -> None:
    model, (x,) = example()

    # Any number of rows: products then carry a plan, a kernel for each range of M.
    result = fp8pass.graphs_for(model, x, target="sm90", dynamic=[0])
    print(result.text())
    print(result.report.table())

    # Run the graph here. Its inputs are parameters, buffers and arguments, each under its name.
    values = {**dict(model.named_parameters()), **dict(model.named_buffers()), "x": x}
    graph = result.graph
    placeholders = graph.after.graph.find_nodes(op="placeholder")
    names = [graph.inputs[node.name] for node in placeholders]
    inputs = [x.shape[0] if name == "x.size()[0]" else values[name] for name in names]
    (actual,) = fx.Interpreter(graph.after).run(*inputs)

    # Relative to what the layer adds to its input, which the residual would otherwise hide.
    expected = layer()(x).float()
    error = ((actual.float() - expected).norm() / (expected - x.float()).norm()).item()
    print(f"relative L2 error of the sm90 graph against the layer in bf16: {error:.2e}")
    assert error < 0.08, error  # that of FP8 itself

    calls = graph.calls()
    fused = [name for name in calls if name.startswith("fp8pass.triton") and "quant" in name]
    products = [name for name in calls if "scaled_mm" in name]
    print(f"{len(fused)} fused producers, {len(products)} products")
    assert (len(fused), len(products)) == (3, 5), calls


if __name__ == "__main__":
    main()
