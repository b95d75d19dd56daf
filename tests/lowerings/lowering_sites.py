"""Problems and small graphs for the tests of the lowerings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8pass.lowerings import EmitSite
from fp8pass.problem import MRange, ScaledMMProblem, unquantised
from fp8pass.quant_key import QuantKey, dtype_name
from fp8pass.target import Target

ROW = ("token", "channel")
BLOCKS = ("group1x128", "group128x128")
INT8 = (torch.int8, torch.int8)
#: INT8 with a zero point
ASYM = ("token/asym", "channel")
ZERO: dict[str, object] = {
    "dtypes": (torch.int8, torch.int8), "zero": "int32", "zero_dtype": torch.int32,
}  # fmt: skip


def with_torch(name: str, version: str) -> Target:
    return replace(Target.parse(name), runtime=(("torch", version),))


def problem(
    activation: str = "tensor",
    weight: str = "tensor",
    *,
    target: Target | None = None,
    m: int | None = 5,
    n: int | None = 48,
    k: int | None = 32,
    dtypes: tuple[torch.dtype, torch.dtype] | None = None,
    **more: Any,
) -> ScaledMMProblem:
    """A problem with the target's own fp8 dtype and device; granularities may carry "/ue8m0"."""
    fp8 = torch.float8_e4m3fn if target is None else (target.fp8_dtype or torch.float8_e4m3fn)
    a_dtype, b_dtype = dtypes or (fp8, fp8)
    more.setdefault("out_dtype", torch.bfloat16)
    more.setdefault("device_type", "cpu" if target is None else target.device_type)
    codes = a_dtype not in (torch.bfloat16, torch.float16, torch.float32)
    key = f"{dtype_name(a_dtype)}/dynamic/{activation}"
    return ScaledMMProblem(
        QuantKey.parse(key) if codes else unquantised(a_dtype),
        QuantKey.parse(f"{dtype_name(b_dtype)}/static/{weight}"),
        MRange() if m is None else MRange(m, m),
        n,
        k,
        **more,
    )


@dataclass
class Built:
    """A graph with one emitted site, and how to run it."""

    module: fx.GraphModule
    names: list[str]
    fake: FakeTensorMode
    result: fx.Node
    val: torch.Tensor


def operands(
    p: ScaledMMProblem, m: int, device: str, *, seed: int = 0, scale_rank: int = 2
) -> dict[str, torch.Tensor]:
    """Random operands of the problem on ``device`` (fake if called under a fake mode)."""
    assert p.n is not None and p.k is not None
    g = torch.Generator().manual_seed(seed) if device == "cpu" else None

    def randn(*shape: int) -> torch.Tensor:
        if g is None:
            return torch.empty(shape, device=device)
        return torch.randn(shape, generator=g)

    def scale(shape: tuple[int, ...]) -> torch.Tensor:
        return randn(*shape).abs() * 0.01 + 0.001 if g is not None else randn(*shape)

    def made(rows: int, dtype: torch.dtype) -> torch.Tensor:
        size = 40.0 if dtype == torch.int8 else 1.0
        return (randn(rows, p.k + pad) * size).to(dtype)[:, : p.k]  # type: ignore[operator]

    def shape(key: QuantKey, rows: int, cols: int) -> tuple[int, ...]:
        group = key.scale.group
        if key.granularity == "tensor":
            return scalar
        sizes = ((rows, group.row), (cols, group.col))
        return tuple(1 if block == -1 else -(-size // block) for size, block in sizes)

    pad = 0 if p.packed else 3  # an odd pitch
    a = made(m, p.activation.dtype)
    w = made(p.n, p.weight.dtype)
    scalar = (1,) * scale_rank
    out = {
        "a": a,
        "b": w.t(),
        "scale_a": scale(shape(p.activation, m, p.k)),
        "scale_b": scale(shape(p.weight, p.k, p.n)),
    }
    if p.bias is not None:
        out["bias"] = randn(p.n).to(p.bias)
    if p.zero_dtype is not None:
        zero = torch.arange(m, device=device)[:, None] * 7 % 200 - 100
        out["zero"] = zero.to(p.zero_dtype)
    if p.prepared:
        out["prepared"] = randn(p.n, p.k).to(torch.bfloat16)
    return out


def build(
    emit: Any,
    target: Target,
    p: ScaledMMProblem,
    *,
    m: int = 5,
    device: str | None = None,
    numerics: str = "exact",
    copies: int = 1,
    change: Any = None,
) -> Built:
    """A graph whose only work is ``copies`` emitted sites, on fake operands of ``device``."""
    device = device or target.device_type
    graph = fx.Graph()
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    with mode:
        values = operands(p, m, "cpu")
        values = {k: (v if device == "cpu" else _moved(v, device)) for k, v in values.items()}
        if change is not None:
            values = change(values)
        val = torch.empty(m, p.n or 0, dtype=p.out_dtype, device=device)
    nodes = {}
    for name, value in values.items():
        nodes[name] = graph.placeholder(name)
        nodes[name].meta["val"] = value
    output = graph.output(())
    results = []
    for _ in range(copies):
        site = EmitSite(
            nodes["a"], nodes["b"], nodes["scale_a"], nodes["scale_b"], nodes.get("bias"),
            nodes.get("prepared"), p.out_dtype, p, target, numerics, val, nodes.get("zero"),
        )  # fmt: skip
        with graph.inserting_before(output):
            results.append(emit(graph, site))
    output.args = (tuple(results),)
    graph.lint()
    module = fx.GraphModule(torch.nn.Module(), graph)
    return Built(module, list(values), mode, results[0], val)


def _moved(value: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def render(graph: fx.Graph) -> str:
    """The graph as text: name, call, and dtype, shape, strides and device of every value."""
    lines = []
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {node.args[0]}")
            continue
        val = node.meta["val"]
        kind = f"{dtype_name(val.dtype)}{list(val.shape)} strides {list(val.stride())} {val.device}"
        call = ""
        if node.op == "call_function":
            words = [repr(arg) for arg in node.args]
            words += [f"{name}={arg!r}" for name, arg in node.kwargs.items()]
            call = f" = {node.target}({', '.join(words)})"
        lines.append(f"{node.name}: {kind}{call}")
    return "\n".join(lines)


_aten = torch.ops.aten
#: Operators that share a storage with their input.
VIEWS = (
    _aten.permute.default,
    _aten.unsqueeze.default,
    _aten.expand.default,
    _aten.reshape.default,
    _aten.slice.Tensor,
)


def meta(val: torch.Tensor) -> tuple[Any, ...]:
    return val.dtype, tuple(val.shape), tuple(val.stride()), val.device


def check_values(built: Built) -> None:
    """Each ``meta["val"]`` is what the operator makes of its arguments' values, by itself."""
    calls = [node for node in built.module.graph.nodes if node.op == "call_function"]
    storages = set()
    for node in calls:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with built.fake:
            expected = node.target(*args, **kwargs)
        assert meta(node.meta["val"]) == meta(expected), node.format_node()
        storages.add(node.meta["val"].untyped_storage()._cdata)
    views = sum(node.target in VIEWS for node in calls)
    assert len(storages) >= len(calls) - views, "two nodes share a storage"
    assert meta(built.result.meta["val"]) == meta(built.val)
