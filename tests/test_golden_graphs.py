"""The whole graph that each target would get, against texts that are reviewed when they change.

A golden text must not merely record what the code did. So each graph also has to pass what does not
depend on it: every call gives what its fake says, the interpreted graph computes the same bits as
the one that was received, and calls of other libraries agree with a schema recorded from them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import golden_graphs
import graphs
import pytest
import torch
from golden_graphs import CASES, MODELS, OPTIONS, check_fakes, found, interpreted, values_of

from fp8pass.lowerings import kernels, producer_kernel_names, weight_only_names
from fp8pass.report import count_ops

GOLDEN = Path(__file__).parent / "golden"
SCHEMAS = json.loads((GOLDEN / "schemas.json").read_text())
ALL = [(target, name) for target, names in CASES.items() for name in names]
#: Without FP8 products, with another FP8 than some models have, or not known.
NOT_ALL_LOWERED = ("sm75", "sm80", "sm86", "gfx90a", "gfx942", "gfx1100", "xpu-bmg", "unknown")
case = pytest.mark.parametrize(("target", "name"), ALL, ids=lambda value: value)


@case
def test_golden(target: str, name: str, golden: Callable[[str, str], None]) -> None:
    path = GOLDEN / f"graphs/{target}/{name}.txt"
    made_by = path.read_text().splitlines()[0] if path.exists() else "torch 2.13"
    if made_by != f"torch {golden_graphs.torch_version()}":
        pytest.skip(f"the text is of {made_by}, whose graphs may differ from this torch's")
    golden(f"graphs/{target}/{name}", golden_graphs.golden_text(found(target, name)))


def test_no_golden_text_is_left_over() -> None:
    kept = {str(path.relative_to(GOLDEN / "graphs")) for path in GOLDEN.glob("graphs/*/*.txt")}
    assert kept == {f"{target}/{name}.txt" for target, name in ALL}


@case
def test_every_call_gives_what_its_fake_says(target: str, name: str) -> None:
    result = found(target, name)
    check_fakes(result.graph, result.target.device_type)


@case
def test_same_bits_before_and_after(target: str, name: str) -> None:
    graph, x = found(target, name).graph, MODELS[name].inputs()
    inputs = values_of(graph, golden_graphs.built(name), x)
    before, after = (interpreted(module, inputs) for module in (graph.before, graph.after))
    assert all(bool(value.isfinite().all()) and bool(value.any()) for value in before)
    graphs.assert_same_bits(after, before)


@case
def test_report_and_graph_tell_the_same(target: str, name: str) -> None:
    """Sites with a kernel of their own are calls in the graph, one for one."""
    result = found(target, name)
    counts = count_ops(result.graph.after)
    fused = [site for site in result.report.sites if site.status == "fused"]
    ours = sum(n for op, n in counts.items() if op.endswith("_quant.default"))
    assert ours == sum(site.kernel != "inductor" for site in fused)
    lowered = [site for site in result.report.sites if site.status == "lowered"]
    assert len(lowered) == len(result.report.select("scaled_mm")) or target in NOT_ALL_LOWERED
    products = {name: n for name, n in counts.items() if "scaled_mm" in name or "_int_mm" in name}
    if "demo-group" not in name:  # spelled, and written out where no kernel takes it, as aten.mm
        assert sum(products.values()) == len(result.report.select("scaled_mm"))
    assert products.get("fp8pass.scaled_mm_planned.default", 0) == sum(
        ";" in site.plan for site in lowered
    )


# ---- calls of other libraries --------------------------------------------------------------------


def test_recorded_schema_is_that_of_this_torch() -> None:
    recorded = torch._C.parse_schema(SCHEMAS["aten::_scaled_mm"]["schema"])
    assert str(torch.ops.aten._scaled_mm.default._schema) == str(recorded)


@case
def test_products_of_torch_agree_with_the_recorded_schema(target: str, name: str) -> None:
    schema = torch._C.parse_schema(SCHEMAS["aten::_scaled_mm"]["schema"])
    kinds = {"Tensor": torch.Tensor, "ScalarType": torch.dtype, "bool": bool}
    graph = found(target, name).graph.after.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._scaled_mm.default):
        given = dict(zip((a.name for a in schema.arguments), node.args, strict=False))
        assert not set(given) & set(node.kwargs)
        given |= node.kwargs
        for argument in schema.arguments:
            value = given.pop(argument.name, argument.default_value)
            value = value.meta["val"] if isinstance(value, torch.fx.Node) else value
            word = str(argument.real_type).removeprefix("Optional[").removesuffix("]")
            allowed = isinstance(value, kinds[word])
            assert allowed or (value is None and str(argument.real_type) != word), argument.name
        assert not given


def test_call_of_vllm_agrees_with_the_recorded_schema() -> None:
    """The adapter on an operator made from that schema, which writes into what it is given."""
    program = f"""
import torch
library = torch.library.Library("_C", "DEF")
schema = {SCHEMAS["_C::cutlass_scaled_mm"]["schema"]!r}
library.define(schema.removeprefix("_C::"))
seen = []
def kernel(out, a, b, a_scales, b_scales, bias):
    seen.append((b.stride(), bias is None))
    out.copy_((a.float() @ b.float() * a_scales * b_scales + (0 if bias is None else bias)))
library.impl("cutlass_scaled_mm", kernel, "CPU")
from fp8pass.lowerings.vllm_cutlass import run_operator
from fp8pass.ops.linear import dequantised_product
fp8 = torch.float8_e4m3fn
a, b = torch.randn(5, 32).to(fp8), torch.randn(16, 32).to(fp8).t()
scales = torch.rand(5, 1) + 0.1, torch.rand(1, 16) + 0.1
for bias in (None, torch.randn(16).bfloat16()):
    wanted = dequantised_product(a, b, *scales, bias, torch.bfloat16)
    assert torch.equal(run_operator(a, b, *scales, bias, torch.bfloat16), wanted)
assert run_operator(a[:0], b, scales[0][:0], scales[1], None, torch.bfloat16).shape == (0, 16)
assert seen == [((1, 32), True), ((1, 32), False)], seen
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_golden_graph_has_each_call_that_can_be_emitted() -> None:
    """A kernel that no golden graph shows would be emitted unseen."""
    plans = {site.plan for t, n in ALL for site in found(t, n).report.sites if site.plan}
    shown = {part.partition("=")[2] for plan in plans for part in plan.split(";")}
    # for products that no golden model has: shown in golden/lowerings
    others = {
        "triton_int8",
        "vllm_cutlass_block", "vllm_cutlass_int8", "deepgemm_block", "flashinfer_tensor",
        "flashinfer_block", "aiter_int8",
        "vllm_cpu_w8a8", "vllm_cpu_w8a8_block", "vllm_cpu_int8",
        *weight_only_names(), "xpu",  # and in test_weight_only.py, test_xpu.py
    }  # fmt: skip
    assert {kernel.name for kernel in kernels()} - others == shown
    producers = {site.kernel for t, n in ALL for site in found(t, n).report.select(status="fused")}
    assert set(producer_kernel_names()) == producers


def test_options_belong_to_targets_that_are_traced() -> None:
    assert set(OPTIONS) <= set(CASES)
