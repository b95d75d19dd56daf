"""Small sites, records and graphs that the report tests share."""

from __future__ import annotations

import torch
from torch import fx

from fp8pass.reasons import no
from fp8pass.report import GraphRecord, Rejected, Report, Site

REJECTED = (
    Rejected(
        "torch_row", "FP8-L003", "kernel torch_row takes row-wise scales, the site has tensor"
    ),
    Rejected("cpu_prepared", "FP8-L004", "kernel cpu_prepared needs weights prepared for it"),
)


def norm(layer: int, which: str = "input_layernorm") -> Site:
    return Site(
        "norm", "fused", rule="rms_norm_quant", kernel="inductor", readers=3, node=f"mul_{layer}",
        where=f"model.layers.{layer}.{which}", shape="[256, 576]",
        key="float8_e4m3fn/dynamic/token",
    )  # fmt: skip


def product(layer: int) -> Site:
    return Site(
        "scaled_mm", "lowered", kernel="cpu", readers=1, node=f"_scaled_mm_{layer}", plan="0-=cpu",
        where=f"model.layers.{layer}.mlp.down_proj", shape="256x1536x576", rejected=REJECTED,
        key="float8_e4m3fn/dynamic/token x float8_e4m3fn/static/channel",
    )  # fmt: skip


def left(layer: int) -> Site:
    verdict = no("FP8-F002", producer=f"view_{layer}")
    return Site(
        "quantize", "left", rule="rms_norm_quant", code=verdict.code, message=verdict.message,
        hint=verdict.hint, node=f"clamp_{layer}", readers=1, shape="[256, 576]",
        where=f"model.layers.{layer}.self_attn.o_proj", key="float8_e4m3fn/dynamic/token",
    )  # fmt: skip


def joint(layers: int = 3) -> GraphRecord:
    return GraphRecord(
        "graph_0", "joint", target="x86-avx2", nodes_before=120, nodes_after=60,
        options={"numerics": "exact", "disable": ("a", "b")}, seconds={"read": 0.25, "fuse": 0.25},
        sites=[norm(i) for i in range(layers)] + [left(i) for i in range(layers)],
    )  # fmt: skip


def post_grad(layers: int = 3) -> GraphRecord:
    return GraphRecord(
        "graph_0", "post_grad", target="x86-avx2", nodes_before=60, nodes_after=60,
        options={"numerics": "exact"}, seconds={"lower": 0.125},
        sites=[product(i) for i in range(layers)],
    )  # fmt: skip


def report() -> Report:
    versions = {"fp8pass": "0.1.0", "torch": "2.13.0"}
    return Report([joint(), post_grad()], uuid="abc", versions=versions)


def small_graph() -> fx.GraphModule:
    """y = relu(x * w + x), with a dead chain and a constant attribute."""

    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    constant = graph.get_attr("constant")
    product = graph.call_function(torch.ops.aten.mul.Tensor, (x, w))
    dead = graph.call_function(torch.ops.aten.neg.default, (product,))
    graph.call_function(torch.ops.aten.exp.default, (dead,))
    total = graph.call_function(torch.ops.aten.add.Tensor, (product, constant))
    graph.output(graph.call_function(torch.ops.aten.relu.default, (total,)))
    root = torch.nn.Module()
    root.register_buffer("constant", torch.tensor([1.0, -2.0, 3.0]))
    module = fx.GraphModule(root, graph)
    for node in module.graph.nodes:
        node.meta["val"] = torch.empty(2, 3, device="meta")
    return module
