"""Graphs for tests: traced as AOTAutograd makes them, read, run, and compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from fp8pass import engine
from fp8pass.ops import SPECS
from fp8pass.options import Options
from fp8pass.report import GraphRecord
from fp8pass.report.graph_text import live_module
from fp8pass.site_draft import Draft
from fp8pass.spellings.reader import Reader, anchors
from fp8pass.workbench import Workbench, merge_common

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# ---- making graphs -------------------------------------------------------------------------------


def fake_mode() -> FakeTensorMode:
    """A fake mode that can hold symbolic sizes."""
    return FakeTensorMode(shape_env=ShapeEnv())


def fake(mode: FakeTensorMode, value: torch.Tensor, dynamic: bool = False) -> torch.Tensor:
    """``value`` without data; ``dynamic``: its first size is a symbol."""
    kinds = [DimDynamic.STATIC] * value.dim()
    if dynamic:
        kinds[0] = DimDynamic.DUCK  # equal sizes get one symbol
    context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
    return mode.from_tensor(value, symbolic_context=context)


def trace(
    fn: Callable[..., Any], *inputs: torch.Tensor, dynamic: Iterable[int] = ()
) -> fx.GraphModule:
    """``fn`` as a functional aten graph with Inductor's decompositions, as the joint hook sees it.

    Args:
        inputs: real tensors; only shapes, strides and dtypes are used.
        dynamic: positions of the inputs whose first size is symbolic.
    """
    mode, positions = fake_mode(), set(dynamic)
    fakes = [fake(mode, value, i in positions) for i, value in enumerate(inputs)]

    def flat(*args: torch.Tensor) -> tuple[Any, ...]:
        result = fn(*args)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    with torch.no_grad(), mode:
        traced = aot_export_joint_simple(
            flat, tuple(fakes), trace_joint=False, decompositions=select_decomp_table()
        )
    assert isinstance(traced, fx.GraphModule)
    for node in traced.graph.find_nodes(
        op="call_function", target=torch.ops.aten._assert_tensor_metadata.default
    ):
        traced.graph.erase_node(node)  # only export puts these in
    traced.recompile()
    return traced


def post_grad(traced: fx.GraphModule) -> fx.GraphModule:
    """``traced`` after Inductor's joint and post-grad passes, as a post-grad hook sees it."""
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.virtualized import V

    first = next(iter(traced.graph.nodes)).meta["val"]
    with torch.no_grad(), V.set_fake_mode(first.fake_mode):
        result = joint_graph_passes(traced)
        post_grad_passes(result, True)
    return result


# ---- reading graphs ------------------------------------------------------------------------------


class Reading:
    """What the readers made of a graph.

    Attributes:
        before: the graph, with common subexpressions merged.
        after: a copy with every site read and nothing given back.
        given_back: text of a copy in which everything was read and then given back.
        drafts: the sites that were read.
        unread: (kind, code, message) of the anchors that were not.
    """

    def __init__(self, traced: fx.GraphModule) -> None:
        self.before = live_module(traced.graph)
        merge_common(self.before.graph, anchors(self.before.graph))
        self.after = live_module(self.before.graph)
        bench, reader = _read(self.after.graph)
        _finish(bench)
        self.after.recompile()
        self.drafts: list[Draft] = list(reader.drafts.values())
        self.unread = [(kind, v.code, v.message) for kind, _, v in reader.unread]
        again = live_module(self.before.graph)
        bench, reader = _read(again.graph)
        for draft in reader.drafts.values():
            bench.undo(draft.swaps)
        _finish(bench)
        self.given_back = str(again.graph)

    def forms(self, kind: str) -> list[str]:
        """The forms of the sites of one kind."""
        return [draft.form for draft in self.drafts if draft.kind == kind]

    def check(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        """Reading changed no number and can be taken back; returns the results on ``inputs``."""
        assert self.given_back == str(self.before.graph)
        before, after = run(self.before, *inputs), run(self.after, *inputs)
        assert_same_bits(after, before)
        return before


def _read(graph: fx.Graph) -> tuple[Workbench, Reader]:
    bench = Workbench(graph)
    reader = Reader(bench)
    reader.read_producers()
    reader.read_quantises()
    reader.read_products()
    return bench, reader


def _finish(bench: Workbench) -> None:
    # a residual's readers may stand before the operator that now makes it
    stable_topological_sort(bench.graph)
    bench.finish()


def read(fn: Callable[..., Any], *inputs: torch.Tensor, dynamic: Iterable[int] = ()) -> Reading:
    """Trace ``fn``, read the graph and check it on ``inputs`` (see :meth:`Reading.check`)."""
    reading = Reading(trace(fn, *inputs, dynamic=dynamic))
    reading.check(*inputs)
    return reading


# ---- the whole pass ------------------------------------------------------------------------------


class Passed:
    """What the engine made of a graph.

    Attributes:
        before, fused, after: the graph as received, after the fusing step, and at the end.
        record: the record of the run.
    """

    def __init__(self, traced: fx.GraphModule, stage: Any = "all", **options: Any) -> None:
        self.before = live_module(traced.graph)
        work = live_module(traced.graph)
        self.fused = self.before
        self.record = GraphRecord(name="test", hook="joint", options={}, source="pristine")
        error = engine.run(
            work.graph, Options.resolve({}, **options), stage, self.record, self._observe
        )
        if error is not None:
            raise error
        work.recompile()
        self.after = work

    def _observe(self, step: str, graph: fx.Graph) -> None:
        if step == "fuse":
            self.fused = sorted_copy(graph)

    def sites(self, kind: str, status: str | None = None) -> list[Any]:
        """The sites of a kind (and status) in the record."""
        return [
            site
            for site in self.record.sites
            if site.kind == kind and status in (None, site.status)
        ]

    @property
    def fusions(self) -> int:
        """Number of fused producers, counted in the graph after the fusing step."""
        return sum(str(node.target) in FUSED for node in self.fused.graph.nodes)


#: the fused operators, as ``str(node.target)``
FUSED = (
    "fp8pass.rms_norm_quant.default",
    "fp8pass.add_rms_norm_quant.default",
    "fp8pass.layer_norm_quant.default",
    "fp8pass.silu_mul_quant.default",
    "fp8pass.act_mul_quant.default",
)


def sorted_copy(graph: fx.Graph) -> fx.GraphModule:
    """The live part of a graph in a topological order, which the order of its nodes need not be."""
    if any(node.is_impure() for node in graph.nodes if node.op == "call_function"):
        return live_module(graph)  # the order of writes counts
    copy = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        values[node] = copy.node_copy(node)
    stack = [graph.output_node()]
    while stack:
        node = stack[-1]
        missing = [n for n in node.all_input_nodes if n not in values]
        if missing:
            stack += missing
        else:
            stack.pop()
            if node not in values:
                values[node] = copy.node_copy(node, lambda n: values[n])
    owner = graph.owning_module
    return fx.GraphModule(torch.nn.Module() if owner is None else owner, copy)


# ---- running graphs ------------------------------------------------------------------------------


class Reference(fx.Interpreter):
    """Runs a graph node by node; operators of fp8pass by their reference."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "fp8pass":
            name = target._schema.name.split("::")[1]
            return SPECS[name].reference(*args, **kwargs)
        return super().call_function(target, args, kwargs)


def run(module: fx.GraphModule, *inputs: torch.Tensor) -> tuple[Any, ...]:
    """Results of a graph, by references; the inputs must be as they were afterwards."""
    copies = [value.clone() for value in inputs]
    with torch.no_grad():
        result = Reference(module).run(*inputs)
    assert_same_bits(inputs, copies)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def bits(value: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as integers: 0.0 differs from -0.0, and NaN equals any NaN."""
    raw = value.contiguous().view(_BITS[value.element_size()])
    if not value.is_floating_point():
        return raw
    return raw.masked_fill(value.to(torch.float32).isnan(), 0x7F)


def assert_same_bits(got: Iterable[Any], wanted: Iterable[Any]) -> None:
    """Equal dtypes, shapes and bits of all tensors."""
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"result {i}"
        different = int((bits(a) != bits(b)).sum())
        assert different == 0, f"result {i}: {different} of {a.numel()} elements differ"


def ordered(codes: torch.Tensor) -> torch.Tensor:
    """fp8 codes as integers in the order of their values, so that neighbours differ by one."""
    byte = codes.view(torch.uint8).to(torch.int32)
    return torch.where(byte >= 128, 128 - byte, byte)


def assert_within_contract(got: Iterable[Any], wanted: Iterable[Any]) -> None:
    """The ``exact`` contract: 0.1 % of finite codes by one step, scales 1e-6 relative."""
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"result {i}"
        if a.dtype == torch.float32 and a.numel() == 0:
            continue
        if a.element_size() == 1:
            step = (ordered(a) - ordered(b)).abs()
            assert int(step.max()) <= 1 if step.numel() else True, f"result {i}"
            assert int((step > 0).sum()) <= max(1, a.numel() // 1000), f"result {i}"
        elif a.dtype == torch.float32:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=0.0, equal_nan=True)
        else:
            torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-6, equal_nan=True)


# ---- data ----------------------------------------------------------------------------------------


def values(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Random values over several binades; the first row (if there are several) is zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.rand(shape[-1:], generator=generator) * 8
    if len(shape) > 1 and shape[0] > 1:
        x[0] = 0
    return x.to(dtype)


def vector(size: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> torch.Tensor:
    """A norm's weight."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(size, generator=generator) * 0.3 + 1).to(dtype)


def codes(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn, seed: int = 2) -> torch.Tensor:
    """Whole numbers from -8 to 8 in fp8: sums of their products are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).float().to(dtype)
