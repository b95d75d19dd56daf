"""A small Llama-shaped model for the tests of fp8pass.nn, and a backend that keeps its graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fp8pass.nn import calibrate, quantize_


class Block(nn.Module):
    """Attention and MLP of a Llama layer, without what does not matter here."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, 16, bias=False)
        self.v_proj = nn.Linear(width, 16, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.gate_proj = nn.Linear(width, 48, bias=False)
        self.up_proj = nn.Linear(width, 48, bias=False)
        self.down_proj = nn.Linear(48, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        attention = self.q_proj(h) * torch.cat([self.k_proj(h), self.v_proj(h)], -1)
        x = x + self.o_proj(attention)
        h = self.norm(x)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(h)) * self.up_proj(h))


class Model(nn.Module):
    def __init__(self, tied: bool = True, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.lm_head = nn.Linear(32, 64, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


IDS = torch.arange(10).reshape(2, 5)
SHARED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def static_model(**arguments: Any) -> Model:
    model = Model(**arguments)
    quantize_(model, "static", calibration=calibrate(model, [IDS]))
    return model


def capture(graphs: list[Any]) -> Any:
    """A backend that appends each graph to ``graphs`` and runs it as it is."""

    def backend(gm: Any, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    return backend


def graph_of(model: nn.Module, *inputs: torch.Tensor) -> Any:
    """The one graph that Dynamo makes of ``model``."""
    graphs: list[Any] = []
    torch.compile(model, backend=capture(graphs), fullgraph=True)(*inputs)
    (graph,) = graphs
    return graph


def assert_shared(model: Model, shared: bool = True) -> None:
    for block in model.layers:
        for names in SHARED:
            scales = {id(getattr(block, name).input_scale) for name in names}
            assert len(scales) == (1 if shared else len(names))
        assert block.q_proj.input_scale is not block.gate_proj.input_scale
    assert model.layers[0].q_proj.input_scale is not model.layers[1].q_proj.input_scale
