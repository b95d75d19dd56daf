"""The path of a site is that of its module, whatever ``forward`` calls the module it belongs to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fp8pass
from fp8pass.nn import quantize_
from fp8pass.site_draft import Draft
from fp8pass.spellings.walk import module_path

K = 64
PATHS = ["layers.0.fc", "layers.1.fc", "by_name.one.fc", "up"]


class Inner(nn.Module):
    def __init__(me) -> None:  # noqa: N805
        super().__init__()
        me.fc = nn.Linear(K, K)

    def forward(me, x: Tensor) -> Tensor:  # noqa: N805
        return me.fc(x)


class Usual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Inner(), Inner()])
        self.by_name = nn.ModuleDict({"one": Inner()})
        self.up = nn.Linear(K, K)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        other = self.by_name["one"]
        return self.up(other(x))


class Short(Usual):
    def forward(s, x: Tensor) -> Tensor:  # noqa: N805
        for layer in s.layers:
            x = layer(x)
        self = s.by_name["one"]  # another module under the usual name
        return s.up(self(x))


class Me(Usual):
    def forward(me, x: Tensor) -> Tensor:  # noqa: N805
        a, b = me.layers
        return me.up(me.by_name["one"](b(a(x))))


class Decorated(Usual):
    @torch.no_grad()
    def forward(this, x: Tensor) -> Tensor:  # noqa: N805
        return Usual.forward(this, x)


class Method(Usual):
    def run(fn, x: Tensor) -> Tensor:  # noqa: N805
        return Usual.forward(fn, x)


def _in_a_function(model: nn.Module) -> Callable[..., Any]:
    return lambda x: model(x)


def _given(x: Tensor, net: nn.Module) -> Tensor:
    return net(x)


WAYS: dict[str, tuple[type[nn.Module], Callable[[Any], Callable[..., Any]]]] = {
    "self": (Usual, lambda m: m),
    "s": (Short, lambda m: m),
    "me": (Me, lambda m: m),
    "decorated": (Decorated, lambda m: m),
    "method": (Method, lambda m: m.run),
    "closure": (Usual, _in_a_function),
    "partial": (Short, lambda m: functools.partial(_given, net=m)),
}


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = kind().to(torch.bfloat16).eval()
    quantize_(model, "dynamic")
    return model


@pytest.mark.parametrize("name", WAYS)
def test_paths_and_inputs_are_those_of_named_modules(name: str) -> None:
    kind, way = WAYS[name]
    model, x = made(kind), torch.randn(4, K, dtype=torch.bfloat16)
    result = fp8pass.graphs_for(way(model), x, target="sm90")
    sites = result.report.select("scaled_mm")
    assert [site.where.split(" ")[0] for site in sites] == PATHS
    assert set(PATHS) <= {path for path, _ in model.named_modules()}
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    graph = result.graph
    names = [graph.inputs[node.name] for node in graph.after.graph.find_nodes(op="placeholder")]
    assert len([name for name in names if name in held]) == len(names) - 1
    (got,) = fx.Interpreter(graph.after).run(*(held.get(name, x) for name in names))
    wanted = model(x)
    assert ((got - wanted).norm() / wanted.norm()).item() < 0.02


@pytest.mark.parametrize("name", ["self", "s", "me"])
@pytest.mark.parametrize("pattern", ["layers.*", "layers.0.fc", "up"])
def test_a_selector_finds_the_same_sites(name: str, pattern: str) -> None:
    kind, way = WAYS[name]
    model, x = made(kind), torch.randn(4, K, dtype=torch.bfloat16)
    report = fp8pass.graphs_for(
        way(model), x, target="sm90", force=f"{pattern}=torch_dequant"
    ).report
    kernels = {s.where.split(" ")[0]: s.kernel for s in report.select("scaled_mm")}
    wanted = {path for path in PATHS if path.startswith(pattern.rstrip("*"))}
    assert {path for path, kernel in kernels.items() if kernel == "torch_dequant"} == wanted


def test_two_modules_of_a_function_keep_their_inputs_apart() -> None:
    first, second = made(Inner), made(Inner)
    x = torch.randn(4, K, dtype=torch.bfloat16)
    result = fp8pass.graphs_for(lambda x: second(first(x)), x, target="sm90")
    labels = set(result.graph.inputs.values())
    assert {"first.fc.weight", "second.fc.weight"} <= labels
    sites = result.report.select("scaled_mm")
    assert [site.where.split(" ")[0] for site in sites] == ["fc", "fc"]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("L['self'].model.layers[0].attn", "model.layers.0.attn"),
        ("L['s']._modules['model']._modules['0']", "model.0"),
        ("L['args'][0].mlp", "mlp"),
        ("L['fn'].keywords['net'].mlp.up", "mlp.up"),
        ("L['fn'].__self__.up", "up"),
        ("G['net'].up", "up"),
        ("L['s'].s.self", "s.self"),
        ("L['s'].selfish", "selfish"),
        ("L['me'].d.a b", "d.a_b"),
        ("L['self']", ""),
        ("L['args'][0]", ""),
        ("L['net']", "net"),
        ("model.layers.0", "model.layers.0"),
        ("self.up", "up"),
    ],
)
def test_names_of_dynamo(name: str, path: str) -> None:
    assert module_path(name) == path


def test_a_place_in_the_source_is_no_path() -> None:
    node = fx.Graph().placeholder("x")
    paths = {"model.py:3": "", "up model.py:3": "up", "layers.0.fc": "layers.0.fc", "": ""}
    for where, path in paths.items():
        assert Draft("norm", "norm", node, {}, [], "", "", where=where).path == path
