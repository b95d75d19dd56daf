"""``torch.nn.functional.scaled_mm``: granularity from the recipe, never from a shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import Passed, Reading, codes, run, trace, vector

SCALING = getattr(torch.nn.functional, "ScalingType", None)
pytestmark = pytest.mark.skipif(SCALING is None, reason="scaled_mm came with torch 2.10")


def product(kind_a: str, kind_b: str, bias: bool = False, **named: Any) -> Any:
    def fn(q: torch.Tensor, w: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, *rest: Any) -> Any:
        return torch.nn.functional.scaled_mm(
            q,
            w.t(),
            sa,
            getattr(SCALING, kind_a),
            sb,
            getattr(SCALING, kind_b),
            bias=rest[0] if bias else None,
            output_dtype=torch.bfloat16,
            **named,
        )

    return fn


def inputs(rows: int, kind: str) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    row = kind == "RowWise"
    sa = torch.rand((rows, 1) if row else (), generator=generator) + 0.01
    sb = torch.rand((1, 48) if row else (), generator=generator) + 0.01
    return codes(rows, 64), codes(48, 64), sa, sb, vector(48)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    ("kind", "act", "weight"), [("RowWise", "token", "channel"), ("TensorWise", "tensor", "tensor")]
)
def test_read(kind: str, act: str, weight: str, rows: int, bias: bool) -> None:
    given = inputs(rows, kind)
    reading = Reading(trace(product(kind, kind, bias), *given))
    (draft,) = reading.drafts
    when = "static" if act == "tensor" else "dynamic"  # the codes are inputs of the graph
    assert draft.key == f"float8_e4m3fn/{when}/{act} x float8_e4m3fn/static/{weight}"
    assert reading.given_back == str(reading.before.graph)
    (got,) = run(reading.after, *given)
    a, w, sa, sb, b = (t.double() for t in given)
    exact = a @ w.t() * sa * sb + (b if bias else 0.0)
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=0.0)


@pytest.mark.parametrize("fast", [False, True])
def test_lowered(fast: bool) -> None:
    """Fast accumulation is handed on; the product gets a kernel."""
    passed = Passed(
        trace(product("RowWise", "RowWise", use_fast_accum=fast), *inputs(5, "RowWise"))
    )
    (site,) = passed.sites("scaled_mm")
    assert site.status == "lowered"
    assert "aten._scaled_mm_v2.default" not in {str(n.target) for n in passed.after.graph.nodes}
    (generic,) = Reading(
        trace(product("RowWise", "RowWise", use_fast_accum=fast), *inputs(5, "RowWise"))
    ).drafts
    assert generic.node.args[8] is fast


def changed(position: int, value: Any) -> Reading:
    """The reading of a row-wise product with one argument of the call put in place of another."""
    traced = trace(product("RowWise", "RowWise"), *inputs(5, "RowWise")[:4])
    target = torch.ops.aten._scaled_mm_v2.default
    (node,) = traced.graph.find_nodes(op="call_function", target=target)
    args = [*node.args, *([[], False][len(node.args) - 10 :])]
    args[position] = value(args[position]) if callable(value) else value
    node.args = tuple(args)
    return Reading(traced)


REFUSED: dict[str, tuple[int, Any, str]] = {
    "microscaling": (6, [3], "per 16 or 32 elements (MX, NVFP4)"),
    "unknown": (3, [9], "recipes 9 and 1"),
    "one_for_all": (3, [0], "its scales have shapes (5, 1) and (1, 48)"),
    "swizzle": (4, [1], "swizzled"),
    "contraction": (10, [1, 0], "it does not contract the inner dims"),
    "two_levels": (2, lambda scales: [*scales, *scales], "scales on several levels"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    """What the generic product has no word for."""
    position, value, why = REFUSED[case]
    reading = changed(position, value)
    ((kind, code, message),) = reading.unread
    assert (kind, code) == ("scaled_mm", "FP8-R002") and why in message
    assert len(changed(11, True).drafts) == 1  # the control: another argument, and it is read
