"""Small models whose graphs are kept as golden texts, and how such a graph is judged.

The same models are compiled on real devices by the scripts in ``tests/gpu``, which record what they
saw; sizes are multiples of 16, so that every kernel may take them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import graphs
import models
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fp8pass.absent_device import absent_device
from fp8pass.coverage.recipes import GROUP, GroupLinear
from fp8pass.crossing import TargetGraph, TargetGraphs, graphs_for
from fp8pass.fnuz import to_fnuz
from fp8pass.nn import calibrate, quantize_
from fp8pass.preparation import prepare
from fp8pass.target import HOST

WIDTH = models.WIDTH
ROWS = 5


class Packed(nn.Module):
    """A decoder layer with q, k, v in one linear and gate, up in another, as vLLM stores them."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.mlp_norm = models.Norm(WIDTH), models.Norm(WIDTH)
        self.qkv_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up_proj = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(self.input_norm(x)).split((WIDTH, WIDTH // 2, WIDTH // 2), -1)
        x = x + self.o_proj(torch.sigmoid(q) * torch.cat((k, v), -1))
        gate, up = self.gate_up_proj(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down_proj(F.silu(gate) * up)


class Biased(models.Block):
    """A decoder layer whose linears all have a bias."""

    def __init__(self) -> None:
        super().__init__()
        for name, linear in list(self.named_children()):
            if isinstance(linear, nn.Linear):
                setattr(self, name, nn.Linear(linear.in_features, linear.out_features, bias=True))


#: Of the demo block: a multiple of what every block-scaled product asks of K.
DEMO_WIDTH = 512


class Demo(nn.Module):
    """One decoder layer as served: norm, packed qkv, o, norm, packed gate_up, SiLU·mul, down."""

    def __init__(self) -> None:
        super().__init__()
        w = DEMO_WIDTH
        self.input_norm, self.mlp_norm = models.Norm(w), models.Norm(w)
        self.qkv_proj = nn.Linear(w, 3 * w, bias=False)
        self.o_proj = nn.Linear(w, w, bias=False)
        self.gate_up_proj = nn.Linear(w, 4 * w, bias=False)
        self.down_proj = nn.Linear(2 * w, w, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(self.input_norm(x)).chunk(3, -1)
        x = x + self.o_proj(torch.sigmoid(q + k) * v)
        gate, up = self.gate_up_proj(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down_proj(F.silu(gate) * up)


class FnuzGroupLinear(GroupLinear):
    """The same values in the fp8 of MI300: each half as large, beside a doubled scale."""

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return to_fnuz(*super().quantize(weight))

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, GROUP)).float()
        scale = (groups.abs().amax(-1, keepdim=True) / 224.0).clamp(min=2e-12)
        q = (groups / scale).clamp(-224.0, 224.0).to(self.weight.dtype)
        a = (q.float() * scale).flatten(-2)
        wide = self.scale.repeat_interleave(GROUP, 0)[: self.out_features]
        w = self.weight.float() * wide.repeat_interleave(GROUP, 1)
        return (a @ w.t()).to(x.dtype)


class StaticFnuz(nn.Module):
    """A norm and a linear in the fp8 of MI300, static and per-tensor, as one writes it by hand."""

    def __init__(self) -> None:
        super().__init__()
        fp8 = torch.float8_e4m3fnuz
        self.norm = models.Norm(WIDTH).to(torch.bfloat16)
        self.register_buffer("weight", torch.randn(32, WIDTH).to(fp8))
        self.register_buffer("weight_scale", torch.tensor(0.02))
        self.register_buffer("input_scale", torch.tensor(0.015))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x).float() / self.input_scale
        q = h.clamp(-240.0, 240.0).to(self.weight.dtype)
        return torch._scaled_mm(
            q, self.weight.t(), self.input_scale, self.weight_scale, out_dtype=x.dtype
        )


class ZeroPoint(nn.Module):
    """A norm and two linears in INT8: per token with a zero point, corrected in integers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = models.Norm(WIDTH).to(torch.bfloat16)
        for name in ("first", "second"):
            self.register_buffer(name, torch.randint(-127, 128, (32, WIDTH), dtype=torch.int8))
            self.register_buffer(f"{name}_scale", torch.rand(1, 32) * 0.01 + 1e-3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        return self.linear(y, self.first, self.first_scale), self.linear(
            y, self.second, self.second_scale
        )

    def linear(self, y: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
        wide = y.float()
        low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
        scale = ((high - low) / 255).clamp(min=1e-7)
        zero = torch.round(-128 - low / scale).clamp(-128, 127).to(torch.int32)
        q = (torch.round(wide / scale) + zero).clamp(-128, 127).to(torch.int8)
        total = torch._int_mm(q, weight.t()) - zero * weight.sum(1, dtype=torch.int32)
        return (total.float() * scale * weight_scale).to(y.dtype)


@dataclass(frozen=True)
class GoldenModel:
    """A model and how it is compiled.

    Attributes:
        recipe: None = it is in FP8 as it is; ``group128`` and ``group128-fnuz``: blocks of scales.
        dynamic: whether the number of rows is open.
        dtype: of the model.
        prepared: the target that :func:`fp8pass.prepare` was called for, with ``shuffle``.
        options: of the pass.
        rows: of its input; a product of INT8 on CUDA needs more than 16.
        width: of the input.
    """

    kind: type[nn.Module]
    recipe: str | None
    dynamic: bool = False
    dtype: torch.dtype = torch.bfloat16
    prepared: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    rows: int = ROWS
    width: int = WIDTH

    def build(self) -> nn.Module:
        if self.recipe is not None:
            model = self._quantised()
            if self.prepared:
                prepare(model, self.prepared, shuffle=True)
            return model
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.kind().eval()

    def _quantised(self) -> nn.Module:
        assert self.recipe is not None
        if self.width == WIDTH:
            quantised: nn.Module = models.build(self.kind, self.recipe).to(self.dtype)
            return quantised
        model: nn.Module = models.build(self.kind, None).to(self.dtype)
        if self.recipe.startswith("group128"):
            kind = FnuzGroupLinear if self.recipe.endswith("fnuz") else GroupLinear
            for name, linear in list(model.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(model, name, kind(linear))
            return model
        seen = calibrate(model, [self.inputs()]) if self.recipe == "static" else None
        quantize_(model, self.recipe, calibration=seen)
        return model

    def inputs(self) -> Tensor:
        if self.width == WIDTH:
            return models.rows(self.rows).to(self.dtype)
        g = torch.Generator().manual_seed(5)
        return torch.randn(ROWS, self.width, generator=g).to(self.dtype)


_DEMO: dict[str, Any] = {"dynamic": True, "width": DEMO_WIDTH}
_FAST = {"numerics": "fast"}

MODELS = {
    "block-dynamic": GoldenModel(models.Block, "dynamic"),
    "block-dynamic-any-m": GoldenModel(models.Block, "dynamic", dynamic=True),
    "block-static": GoldenModel(models.Block, "static"),
    "block-static-any-m": GoldenModel(models.Block, "static", dynamic=True),
    "block-dynamic-tensor": GoldenModel(models.Block, "dynamic_tensor"),
    "packed-dynamic": GoldenModel(Packed, "dynamic"),
    "packed-static-any-m": GoldenModel(Packed, "static", dynamic=True),
    "biased-dynamic-any-m": GoldenModel(Biased, "dynamic", dynamic=True),
    "biased-static": GoldenModel(Biased, "static"),
    "block-dynamic-general": GoldenModel(
        models.Block, "dynamic", options={"prefer": "triton_general"}
    ),
    "block-dynamic-rescaled": GoldenModel(
        models.Block, "dynamic", dynamic=True, options={"prefer": "torch_rescaled,triton"}
    ),
    "half-dynamic": GoldenModel(models.Block, "dynamic", dtype=torch.float16),
    "block-prepared": GoldenModel(models.Block, "dynamic", prepared=HOST),
    "static-fnuz": GoldenModel(StaticFnuz, None),
    "int8-zero-point": GoldenModel(ZeroPoint, None, rows=32),
    "demo-dynamic": GoldenModel(Demo, "dynamic", **_DEMO),
    "demo-static": GoldenModel(Demo, "static", **_DEMO),
    "demo-group": GoldenModel(Demo, "group128", **_DEMO),
    "demo-dynamic-fnuz": GoldenModel(Demo, "dynamic", prepared="gfx942", **_DEMO),
    "demo-static-fnuz": GoldenModel(Demo, "static", prepared="gfx942", **_DEMO),
    "demo-group-fnuz": GoldenModel(Demo, "group128-fnuz", **_DEMO),
    "demo-dynamic-fast": GoldenModel(Demo, "dynamic", options=_FAST, **_DEMO),
    "demo-group-fast": GoldenModel(Demo, "group128", options=_FAST, **_DEMO),
    "demo-dynamic-tiles": GoldenModel(
        Demo, "dynamic", prepared="gfx942+aiter", options=_FAST, **_DEMO
    ),
}
#: The demo block in the recipes that every target is shown with, and in MI300's fp8.
_DEMOS = ("demo-dynamic", "demo-static", "demo-group")
_FNUZ = ("demo-dynamic-fnuz", "demo-static-fnuz", "demo-group-fnuz")
#: Both recipes, any M, packed, biased: enough where no kernel is the target's own.
_SOME = ("block-dynamic", "block-static-any-m", "packed-dynamic", "biased-static")
#: Models that sm90 is not shown with.
_OTHERS = ("static-", "block-prep", "demo", "block-dynamic-rescaled")
#: target -> names of the models that are traced for it
CASES: dict[str, tuple[str, ...]] = {
    "sm90": (*(n for n in MODELS if not n.startswith(_OTHERS)), *_DEMOS),
    "sm90+vllm": (
        "block-dynamic", "block-dynamic-any-m", "block-static", "biased-static", *_DEMOS,
    ),
    "sm75": _DEMOS,
    "sm80": _DEMOS,
    "sm86": _DEMOS,
    "sm89": (*_SOME, *_DEMOS),
    "sm100": (*_SOME, "half-dynamic", "block-dynamic-rescaled", *_DEMOS),
    "sm120": (*_SOME, *_DEMOS),
    "sm120+vllm": _DEMOS,
    "gfx90a": _DEMOS,
    "gfx942": ("block-dynamic", "static-fnuz", *_DEMOS, *_FNUZ),
    "gfx942+aiter": (*_FNUZ, "demo-dynamic-tiles"),
    "gfx942+vllm": _FNUZ,
    "gfx950": (*_SOME, *_DEMOS),
    "gfx950+aiter": ("half-dynamic", *_DEMOS, "demo-dynamic-fast", "demo-group-fast"),
    "gfx950+vllm==0.21": ("biased-static", *_DEMOS),
    "gfx1100": _DEMOS,
    "gfx1201": _DEMOS,
    "gfx1201+vllm==0.21": _DEMOS,
    "xpu-bmg": ("block-dynamic", "block-static-any-m", *_DEMOS),
    "x86-amx": (*_SOME, "block-prepared"),
    "cpu": (*_SOME, "int8-zero-point", *_DEMOS),
    "unknown": _DEMOS,
}  # fmt: skip
#: Those of sm90 that tests/gpu/record_h200.py compiles on the device.
#: What tests/gpu/record_h200.py recorded; a zero point runs in tests/gpu/test_gpu_zero_point.py.
RECORDED = tuple(n for n in CASES["sm90"] if n not in (*_DEMOS, "int8-zero-point"))
#: target -> options of the pass. vLLM's product accumulates in less than float32, which only
#: ``fast`` allows, and others come before it where they were measured to be faster.
OPTIONS: dict[str, dict[str, Any]] = {
    "sm90+vllm": {"numerics": "fast", "prefer": "vllm_cutlass"},
    "sm120+vllm": {"prefer": "vllm"},  # its producers, which round in their own ways
}


@cache
def built(name: str) -> nn.Module:
    """A model by name; never altered."""
    return MODELS[name].build()


@cache
def found(target: str, name: str) -> TargetGraphs:
    """The graphs of a model for a target; traced once."""
    dynamic = [0] if MODELS[name].dynamic else None
    model, x = MODELS[name], MODELS[name].inputs()
    options = {**model.options, **OPTIONS.get(target, {})}
    return graphs_for(built(name), x, target=target, dynamic=dynamic, **options)


def golden_text(result: TargetGraphs) -> str:
    """What is kept: the graph after fp8pass, and one line per site."""
    lines = [result.graph.text(), "", "sites"]
    for site in result.report.sites:
        where = re.sub(r" ?\S+\.py:\d+$", "", site.where)  # a line moves with every edit
        words = [site.kind, site.status, site.rule or site.code, site.kernel, site.plan, where]
        lines.append("  " + "  ".join(word for word in words if word))
    return f"torch {torch_version()}\n" + "\n".join(lines)


def torch_version() -> str:
    """Major and minor version: graphs may differ between these."""
    return ".".join(torch.__version__.split(".")[:2])


# ---- judging a graph -----------------------------------------------------------------------------


def check_fakes(graph: TargetGraph, device_type: str) -> None:
    """Each call, run by itself on fake tensors, gives what the graph says, and adds no guard."""
    module = graph.after
    with absent_device(device_type):
        for node in module.graph.nodes:
            if node.op != "call_function":
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            value = next(_tensors((node.meta["val"], args)), None)
            if value is None:
                continue
            env = value.fake_mode.shape_env
            guards = len(env.guards) if env is not None else 0
            with value.fake_mode:
                again = node.target(*args, **kwargs)
            assert _facts(again) == _facts(node.meta["val"]), node.format_node()
            assert (len(env.guards) if env is not None else 0) == guards, node.format_node()


def _tensors(value: Any) -> Iterator[Any]:
    leaves, _ = torch.utils._pytree.tree_flatten(value)
    return (leaf for leaf in leaves if isinstance(leaf, Tensor))


def _facts(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.dtype, str(tuple(value.shape)), str(tuple(value.stride())), value.device)
    if isinstance(value, (tuple, list)):
        return [_facts(item) for item in value]
    return str(value)


class OnHost(graphs.Reference):
    """Runs a graph of any device on this machine: fp8pass's operators by their references, and
    ``_scaled_mm`` by what it means, since not every torch has every form of it on a CPU."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.aten._scaled_mm.default:
            return scaled_mm(*args, **kwargs)
        kwargs = {k: HOST if isinstance(v, torch.device) else v for k, v in kwargs.items()}
        return super().call_function(target, args, kwargs)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """``aten._scaled_mm`` in float32, rounded once; scales after the product, those of blocks
    before it."""
    assert scale_result is None and out_dtype is not None
    if scale_a.dim() == 2 and scale_a.shape[1] > 1:
        wide_b = scale_b.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
        value = torch.mm(a.float() * scale_a.repeat_interleave(GROUP, 1), b.float() * wide_b)
        return (value if bias is None else value + bias.float()).to(out_dtype)
    value = torch.mm(a.float(), b.float()) * scale_a * scale_b
    return (value if bias is None else value + bias.float()).to(out_dtype)


def values_of(graph: TargetGraph, model: nn.Module, x: Tensor) -> list[Any]:
    """The graph's inputs as real values."""
    named: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    named |= {"x": x, "x.size()[0]": x.shape[0]}
    placeholders = graph.after.graph.find_nodes(op="placeholder")
    return [named[graph.inputs[node.name]] for node in placeholders]


def interpreted(module: fx.GraphModule, inputs: list[Any]) -> tuple[Any, ...]:
    """The results of a graph on real tensors."""
    with torch.no_grad():
        result = OnHost(module).run(*inputs)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)
