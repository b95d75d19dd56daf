"""``torch_dequant`` of int8 codes: sums that float32 would round are exact, whatever K is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lowering_sites import build, check_values, operands, problem
from torch import fx

from fp8pass.lowerings import EmitSite, find
from fp8pass.ops.linear import scaled_product
from fp8pass.target import Target

F32 = torch.float32
ROW, ASYM = ("token", "channel"), ("token/asym", "channel")
INT8 = (torch.int8, torch.int8)


@pytest.mark.parametrize(
    "zero",
    [None, ("int32", torch.int32), ("float32", torch.int8), ("codes", torch.int8),
     ("codes", torch.int32)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("k", [16, 514, 2100, 8192])
def test_sums_of_int8_codes_are_exact_at_any_depth(k: int, zero: Any) -> None:
    """Codes so large that a float32 sum rounds from K = 1041 on; the control is that sum."""
    g = torch.Generator().manual_seed(k)
    changes = {} if zero is None else {"zero": zero[0], "zero_dtype": zero[1]}
    pair = ROW if zero is None else ASYM
    p = problem(*pair, dtypes=INT8, k=k, n=64, out_dtype=F32, **changes)
    values = operands(p, 5, "cpu")
    for name in ("a", "b"):
        values[name].copy_(torch.randint(90, 128, values[name].shape, generator=g))
    if zero is not None:  # leaves q - zero as large as it gets
        values["zero"].fill_(-128)
    target = Target.parse("sm90")
    assert find("torch_dequant").can_implement(target, p)
    built = build(find("torch_dequant").emit, target, p, device="cpu")
    check_values(built)
    (got,) = built.module(*(values[name] for name in built.names))
    scales = values["scale_a"], values["scale_b"]
    form = "" if zero is None else f"none,ab,{zero[0]}"
    wanted = scaled_product(
        values["a"], values["b"], *scales, None, F32, str(p.activation), str(p.weight), form,
        values.get("zero"),
    )  # fmt: skip
    assert torch.equal(got, wanted)
    wide = values["a"].float() - values["zero"].float() if zero else values["a"].float()
    rounded = wide @ values["b"].float() * scales[0] * scales[1]
    assert torch.equal(rounded, wanted) == (k <= 514), "the control"


def test_a_depth_that_is_not_known_is_added_up_in_float64() -> None:
    given = problem(*ROW, dtypes=INT8, k=8192, out_dtype=F32)
    values = operands(given, 5, "cpu")
    p = problem(*ROW, dtypes=INT8, k=None, out_dtype=F32)
    graph = fx.Graph()
    names = ("a", "b", "scale_a", "scale_b")
    nodes = [graph.placeholder(name) for name in names]
    for node in nodes:
        node.meta["val"] = values[node.name].to("meta")
    val = torch.empty(5, 48, device="meta")
    site = EmitSite(*nodes, None, None, F32, p, Target.parse("cpu"), "exact", val)
    graph.output((find("torch_dequant").emit(graph, site),))
    (got,) = fx.GraphModule(torch.nn.Module(), graph)(*(values[name] for name in names))
    total = (values["a"].double() @ values["b"].double()).float()
    assert torch.equal(got, total * values["scale_a"] * values["scale_b"])
