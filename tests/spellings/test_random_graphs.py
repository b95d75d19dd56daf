"""Random small models out of the known spellings, through the whole engine.

The fused graph, run by reference, keeps the numerics contract against the graph as received; the
graph at the end, where producers are written out as aten, is the same bit for bit; and what the
report counts is what stands in the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from graphs import (
    FUSED,
    Passed,
    Reference,
    assert_same_bits,
    assert_within_contract,
    codes,
    run,
    trace,
    values,
    vector,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from models import distance
from spell import ACTIVATIONS, LAYER_NORMS, MORE_QUANTS, NORMS, QUANTS, Quant
from spell_zero_point import ZERO_PRODUCTS, ZERO_QUANTS
from torch import fx

import fp8pass
from fp8pass.spellings.quantize import is_quantise_cast

Tensor = torch.Tensor
H = 32
ALL_QUANTS: dict[str, tuple[Quant, str]] = {**QUANTS, **MORE_QUANTS, **ZERO_QUANTS}
TOKEN = tuple(name for name, (_, form) in ALL_QUANTS.items() if "token,float32" in form)
#: quantises whose codes and scale a product of e4m3fn takes
MULTIPLIED = (*QUANTS, *(n for n in TOKEN if not n.startswith(("fnuz", "int8", "zero"))))
GEMMS = ("scaled_mm", "bias", "dequantised", "dequantised_first")
#: the product of codes with a zero point in the place of each
WITH_ZERO = dict(zip(GEMMS, ("int32", "float32", "codes", "int64"), strict=True))
EXTRAS = ("value", "router", "float", "sum")
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "flat": lambda y: y.view(-1, H),
    "front": lambda y: y.unsqueeze(0),
    "half": lambda y: y.reshape(-1, H // 2),
}


@dataclass(frozen=True)
class Block:
    """A producer, its residual, its quantises (spelling, scale, view) and its other readers."""

    producer: str
    residual: bool
    eps: float
    quants: tuple[tuple[str, int, str], ...]
    extras: tuple[str, ...]
    product: str


blocks = st.builds(
    Block,
    producer=st.sampled_from([*NORMS, *ACTIVATIONS, *(f"ln_{name}" for name in LAYER_NORMS)]),
    residual=st.booleans(),
    eps=st.sampled_from([1e-5, 1e-6, 3e-5]),
    quants=st.lists(
        st.tuples(
            st.sampled_from([*sorted(QUANTS), *sorted(MORE_QUANTS), *sorted(ZERO_QUANTS)]),
            st.integers(0, 1),
            st.sampled_from(list(VIEWS)),
        ),
        max_size=3,
    ).map(tuple),
    extras=st.lists(st.sampled_from(EXTRAS), max_size=2, unique=True).map(tuple),
    product=st.sampled_from(["", *GEMMS]),
)


@dataclass(frozen=True)
class Model:
    blocks: tuple[Block, ...]
    dtype: torch.dtype
    rank: int
    dynamic: bool

    def inputs(self, rows: int, seed: int) -> list[Tensor]:
        shape = (rows, H) if self.rank == 2 else (rows, 2, H)
        x, r = (values(*shape, dtype=self.dtype, seed=seed + i) for i in range(2))
        scales = (torch.tensor(0.017), torch.tensor(0.3))
        weights = codes(H, H), torch.tensor(0.125), codes(H, H, dtype=torch.int8, seed=3)
        return [x, r, vector(H, self.dtype), *scales, *weights]

    def __call__(
        self,
        x: Tensor,
        r: Tensor,
        w: Tensor,
        s0: Tensor,
        s1: Tensor,
        weight: Tensor,
        sw: Tensor,
        whole: Tensor,
    ) -> tuple[Tensor, ...]:
        outputs: list[Tensor] = []
        for block in self.blocks:
            if block.residual:
                r = x + r
                x = r
            if block.producer in NORMS:
                y = NORMS[block.producer][0](x, w, block.eps)
            elif block.producer.startswith("ln_"):
                y = LAYER_NORMS[block.producer[3:]][0](x, w, w * 0.5, block.eps)
            else:
                y = ACTIVATIONS[block.producer](x, r)
            for name, scale, view in block.quants:
                quant: Quant = ALL_QUANTS[name][0]
                seen = VIEWS[view](y)
                made = quant(seen, (s0, s1)[scale])
                outputs += made
                if block.product and view != "half" and name in MULTIPLIED:
                    given = (s0, s1)[scale]
                    outputs.append(self.product(block.product, name, made, given, weight, sw, w))
                if block.product and view != "half" and name in ZERO_QUANTS:
                    outputs.append(self.with_zero(block.product, made, whole, sw, w))
            for extra in block.extras:
                if extra == "value":
                    outputs.append(y)
                elif extra == "router":
                    outputs.append(y.flatten(0, -2) @ y.flatten(0, -2)[:1].t())
                elif extra == "float":
                    outputs.append(y.float() * 0.5)
                else:
                    outputs.append(y.float().sum(-1))
            x = y * 0.5
        return tuple(outputs) or (x,)

    def with_zero(
        self, spelling: str, made: tuple[Tensor, ...], weight: Tensor, sw: Tensor, bias: Tensor
    ) -> Tensor:
        q, scale, zero = made
        shape = () if scale.numel() == 1 and scale.dim() != 2 else (-1, 1)
        scale, zero = scale.reshape(shape), zero.reshape(shape)
        product = ZERO_PRODUCTS[WITH_ZERO[spelling]][0]
        return product(q.reshape(-1, H), scale, zero, weight, sw.expand(1, H), bias.bfloat16())

    def product(
        self,
        spelling: str,
        name: str,
        made: tuple[Tensor, ...],
        s: Tensor,
        weight: Tensor,
        sw: Tensor,
        bias: Tensor,
    ) -> Tensor:
        scale = made[1] if len(made) > 1 else s
        codes = made[0].reshape(-1, H)
        if name in TOKEN:
            scale, sw = scale.reshape(-1, 1), sw.expand(1, H).contiguous()
        else:
            scale = scale.reshape(())
        if spelling.startswith("dequantised"):
            wide = codes.float() @ weight.t().float()
            wide = wide * scale * sw if spelling == "dequantised" else (sw * wide) * scale
            return wide.to(torch.bfloat16)
        return torch._scaled_mm(
            codes,
            weight.t(),
            scale,
            sw,
            bias=bias.bfloat16() if spelling == "bias" else None,
            out_dtype=torch.bfloat16,
        )


models = st.builds(
    Model,
    blocks=st.lists(blocks, min_size=1, max_size=3).map(tuple),
    dtype=st.sampled_from([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]),
    rank=st.sampled_from([2, 2, 3]),
    dynamic=st.sampled_from([False, False, False, True]),
)


_EPILOGUE = (
    "aten.view.default",
    "aten.mul.Tensor",
    "aten.sub.Tensor",
    "aten.add.Tensor",
    "prims.convert_element_type.default",
)


def is_product(node: Any) -> bool:
    """A product of codes: ``_scaled_mm``, or ``mm`` of codes that were made wide."""
    if "scaled_mm" in str(node.target):
        return True
    if str(node.target) == "aten._int_mm.default":
        return True
    if str(node.target) != "aten.mm.default":
        return False
    source = node.args[0]
    if str(source.target) == "aten.sub.Tensor":  # codes less a zero point
        source = source.args[0]
    source = source.args[0] if source.args else None
    return isinstance(source, fx.Node) and source.meta["val"].dtype.itemsize == 1


def from_products(module: fx.GraphModule) -> list[bool]:
    """For each output whether a scaled product made it; no output is computed from another one."""
    made = []
    for output in module.graph.output_node().args[0]:
        waiting, seen = [output], 0
        while waiting and seen < 12:
            node, seen = waiting.pop(), seen + 1
            if is_product(node):
                break
            if str(node.target) in _EPILOGUE and node.meta["val"].dtype.itemsize > 1:
                waiting += node.all_input_nodes
        else:
            node = None
        made.append(node is not None and is_product(node))
    return made


def check_numbers(model: Model, passed: Passed, rows: int, seed: int) -> None:
    inputs = model.inputs(rows, seed)
    before = run(passed.before, *inputs)
    after, fused = run(passed.after, *inputs), run(passed.fused, *inputs)
    products = from_products(passed.before)
    plain = [i for i, product in enumerate(products) if not product]
    assert_within_contract([fused[i] for i in plain], [before[i] for i in plain])
    assert_same_bits([after[i] for i in plain], [before[i] for i in plain])
    for i in (i for i, product in enumerate(products) if product):
        limit = (
            float(before[i].float().nan_to_num().abs().max()) * 2.0**-8
            if before[i].numel()
            else 0.0
        )
        for got in (after[i], fused[i]):
            torch.testing.assert_close(got, before[i], rtol=2.0**-7, atol=limit, equal_nan=True)


def calls(module: fx.GraphModule, wanted: Callable[[fx.Node], bool]) -> int:
    return sum(node.op == "call_function" and wanted(node) for node in module.graph.nodes)


def named(*parts: str) -> Callable[[fx.Node], bool]:
    return lambda node: str(node.target) in parts


def check_record(passed: Passed, stage: str) -> None:
    """Every count of the record, against the graphs."""
    for rule in FUSED:
        name = rule.split(".")[1]
        sites = [s for s in passed.record.sites if s.status == "fused" and s.rule == name]
        assert len(sites) == calls(passed.fused, named(rule)), name
    left = len(passed.sites("quantize", "left"))
    # a quantise that no rule took stands in the fused graph as generic operator or as it came
    generic = calls(passed.fused, named("fp8pass.quantize.default"))
    assert left == generic + calls(passed.fused, is_quantise_cast)
    # all that were there are there at the end: written out as aten, each once
    fused = len([s for s in passed.record.sites if s.status == "fused"])
    if passed.record.nodes_before != passed.record.nodes_after or fused:
        assert fused + left == calls(passed.after, is_quantise_cast)
    assert calls(passed.after, lambda n: "_quant.default" in str(n.target)) == 0
    ours = calls(passed.after, lambda n: "fp8pass.cpu_scaled_mm" in str(n.target))
    remaining, received = (calls(m, is_product) for m in (passed.after, passed.before))
    if stage == "joint":
        assert not passed.sites("scaled_mm") and remaining == received
    else:  # every product of the source is accounted for, and all of them have a kernel
        lowered = passed.sites("scaled_mm", "lowered")
        assert len(lowered) == received == remaining
        assert len([s for s in lowered if not s.kernel.startswith("torch_")]) == ours
        assert len(passed.sites("scaled_mm")) == received
    for site in passed.record.sites:
        assert site.code or site.status != "left", site
        assert site.kernel or site.status == "left", site


def fusible(model: Model) -> int:
    """How many producers have a quantise that a rule must take; counted from the description."""
    return sum(
        any(
            (view != "half" or name.startswith("static")) and "upper=" not in ALL_QUANTS[name][1]
            for name, _, view in block.quants
        )
        for block in model.blocks
    )


def guards(module: fx.GraphModule) -> list[str]:
    """What is assumed of symbolic sizes."""
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.fake_mode.shape_env is not None:
            env = value.fake_mode.shape_env
            return [*map(str, env.guards), *map(str, env.replacements.items())]
    return []


def check_model(model: Model, stage: Literal["all", "joint"], seed: int) -> bool:
    """One example; whether a rewrite fired in it."""
    traced = trace(model, *model.inputs(6, seed), dynamic=(0, 1) if model.dynamic else ())
    assumed = guards(traced)
    passed = Passed(traced, stage)
    assert guards(passed.after) == assumed
    if any(block.quants for block in model.blocks):
        assert passed.record.verdict, passed.record.verdict
    else:
        assert not passed.record.sites
    check_numbers(model, passed, 6, seed)
    if model.dynamic:
        for rows in (1, 3):
            check_numbers(model, passed, rows, seed + rows)
    check_record(passed, stage)
    assert passed.fusions >= fusible(model)
    return any(site.status != "left" for site in passed.record.sites)


def test_random_models(pytestconfig: pytest.Config) -> None:
    """At least 300 of them, the same ones every time (``--long``: 5000)."""
    fired: list[bool] = []

    @settings(
        max_examples=5000 if pytestconfig.getoption("--long") else 320,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(model=models, stage=st.sampled_from(["all", "joint"]), seed=st.integers(0, 100))
    def check(model: Model, stage: Literal["all", "joint"], seed: int) -> None:
        fired.append(check_model(model, stage, seed))

    check()
    assert len(fired) >= 300
    assert sum(fired) >= 0.6 * len(fired), f"{sum(fired)} of {len(fired)} examples were rewritten"


class InFloat64(fx.Interpreter):
    """A traced model in float64: codes are rounded to fp8, nothing else is rounded at all."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        return result.double() if isinstance(result, Tensor) else result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.prims.convert_element_type.default:
            value, dtype = args
            return value.float().to(dtype) if dtype.itemsize == 1 else value
        if target is torch.ops.aten._scaled_mm.default:
            a, b, scale_a, scale_b = args[:4]
            bias = args[4] if len(args) > 4 else None
            return (a @ b) * scale_a * scale_b + (0 if bias is None else bias)
        return super().call_function(target, args, kwargs)


def test_compiled_models_are_as_near_to_float64_as_eager_or_stock() -> None:
    """Some of them through the whole of torch.compile: the error is at most 1.1 times theirs."""
    quants = (("token", 0, "none"), ("static", 1, "flat"))
    for i, (producer, activation) in enumerate(
        [("llama", "silu_two"), ("gemma", "silu_wide"), ("functional", "silu_sigmoid")]
    ):
        blocks = (
            Block(producer, True, 1e-5, quants, ("value",), "scaled_mm"),
            Block(activation, False, 1e-5, quants[i % 2 :], (), "dequantised"),
        )
        model = Model(blocks, torch.bfloat16, 2 + i % 2, False)
        inputs = model.inputs(6, i)
        wanted = InFloat64(trace(model, *inputs)).run(*inputs)
        with torch.no_grad():
            eager = model(*inputs)
            stock = torch.compile(model, fullgraph=True)(*inputs)
            ours = torch.compile(model, backend=fp8pass.fp8pass_backend, fullgraph=True)(*inputs)
        for a, b, c, d in zip(ours, eager, stock, wanted, strict=True):
            largest = max(distance(b, d), distance(c, d))
            ulp = torch.finfo(torch.bfloat16).eps / 2 if a.dtype == torch.bfloat16 else 1e-6
            assert distance(a, d) <= 1.1 * largest + ulp, (i, a.dtype, tuple(a.shape))


def test_all_of_a_block_at_once() -> None:
    """Two equal quantises, one of another scale, a bf16 reader, a router, the residual returned."""
    quants = (("static", 0, "none"), ("static", 0, "flat"), ("static", 1, "none"))
    block = Block("llama", True, 1e-6, quants, ("value", "router"), "scaled_mm")
    model = Model((block, block), torch.bfloat16, 3, False)
    passed = Passed(trace(model, *model.inputs(6, 0)), "all")
    check_numbers(model, passed, 6, 0)
    check_record(passed, "all")
    assert passed.fusions == 2
    assert [s.rule for s in passed.sites("norm", "fused")] == ["add_rms_norm_quant"] * 2


def test_the_reference_run_uses_references() -> None:
    """So that a bug in a kernel cannot hide one in the pass."""
    block = Block("llama", False, 1e-6, (("token", 0, "none"),), (), "scaled_mm")
    model = Model((block,), torch.bfloat16, 2, False)
    passed = Passed(trace(model, *model.inputs(6, 0)))
    seen: list[Any] = []

    class Watch(Reference):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            seen.append(str(target))
            return super().call_function(target, args, kwargs)

    Watch(passed.fused).run(*model.inputs(6, 0))
    assert "fp8pass.rms_norm_quant.default" in seen and "fp8pass.scaled_mm.default" in seen
