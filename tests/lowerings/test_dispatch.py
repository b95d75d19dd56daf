"""One graph with symbolic rows runs another kernel at each number of them, from none on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import fp8pass.ops  # noqa: F401  (registers the operators)
from fp8pass.lowerings import find, kernel_names, register, unregister
from fp8pass.lowerings.planned import parse_plan
from fp8pass.nn import quantize_
from fp8pass.problem import MRange
from fp8pass.reasons import YES
from fp8pass.report import reports
from fp8pass.report.collector import clear
from fp8pass.target import HOST

ROWS = (0, 1, 2, 17, 255, 4096)
PLAN = "0-1=few;2-16=some;17-255=many;256-=most"
EXPECTED = ("few", "few", "some", "many", "many", "most")


@pytest.fixture
def calls() -> Iterator[list[str]]:
    """Four kernels for this processor, each for its range, that note that they ran."""
    made: list[str] = []
    parse_plan.cache_clear()

    def add(name: str, rows: MRange) -> None:
        def run(a: Any, b: Any, sa: Any, sb: Any, bias: Any, out: Any, fast: bool) -> Any:
            made.append(name)
            product = a.float() @ b.float() * sa * sb
            return (product if bias is None else product + bias.float()).to(out)

        register(
            dataclasses.replace(
                find("torch_row"), name=name, rows=rows, run=run, priority=lambda t, p: 1,
                can_implement=lambda t, p: YES, requirements=lambda t: YES,
                kinds=frozenset({"cpu"}),
            )
        )  # fmt: skip

    parts = [part.split("=") for part in PLAN.split(";")]
    for span, name in parts:
        add(name, MRange.parse(span))
    yield made
    for _, name in parts:
        unregister(name)
    parse_plan.cache_clear()


def operands(m: int, n: int = 48, k: int = 64) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(m)
    fp8 = torch.float8_e4m3fn
    a, w = ((torch.randn(rows, k, generator=g) * 8).to(fp8) for rows in (m, n))
    return a, w.t(), torch.rand(m, 1, generator=g) + 0.01, torch.rand(1, n, generator=g) + 0.01


def planned(*args: torch.Tensor, plan: str = PLAN) -> torch.Tensor:
    return torch.ops.fp8pass.scaled_mm_planned(*args, None, torch.bfloat16, False, plan)


def exact(a: Any, b: Any, sa: Any, sb: Any) -> torch.Tensor:
    return (a.float() @ b.float() * sa * sb).to(torch.bfloat16)


def test_the_operator(calls: list[str]) -> None:
    for m, name in zip(ROWS, EXPECTED, strict=True):
        args = operands(m)
        out = planned(*args)
        assert calls.pop() == name and not calls
        assert out.shape == (m, 48) and torch.equal(out, exact(*args))


def test_every_border(calls: list[str]) -> None:
    for m, name in (
        (1, "few"),
        (2, "some"),
        (16, "some"),
        (17, "many"),
        (255, "many"),
        (256, "most"),
    ):
        planned(*operands(m))
        assert calls.pop() == name


def test_one_compiled_graph_for_all_rows(calls: list[str]) -> None:
    """Sizes of which nothing is known, not even that they are not 0 or 1: no guard, one graph."""
    counter = CompileCounter()
    torch._dynamo.reset()

    def product(a: Any, b: Any, sa: Any, sb: Any) -> torch.Tensor:
        return planned(a, b, sa.unsqueeze(1), sb)

    compiled = torch.compile(product, backend=counter, fullgraph=True)
    for m, name in zip(ROWS, EXPECTED, strict=True):
        args = operands(m)
        vector = args[2].reshape(-1)  # of [M, 1] Dynamo guards strides that mean nothing
        torch._dynamo.decorators.mark_unbacked(args[0], 0)
        torch._dynamo.decorators.mark_unbacked(vector, 0)
        assert torch.equal(compiled(*args[:2], vector, args[3]), exact(*args))
        assert calls.pop() == name
    assert counter.frame_count == 1


def test_a_model_with_symbolic_rows(calls: list[str]) -> None:
    """The choice makes the plan by itself; the graph for many rows serves every number from 2."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48)).to(torch.bfloat16).eval()
    quantize_(model, "dynamic", progress=False)
    torch._dynamo.reset()
    clear()
    options = {"fp8pass.tune": "off"}
    compiled = torch.compile(model, backend="fp8pass", dynamic=True, options=options)
    with torch.no_grad():
        for m in (17, 2, 255, 4096, 16):
            x = torch.randn(m, 64, dtype=torch.bfloat16)
            found, expected = compiled(x).double(), model(x).double()
            assert float((found - expected).abs().mean() / expected.abs().mean()) < 0.01
    sites = [s for r in reports() for s in r.sites if s.kind == "scaled_mm"]
    assert {s.plan for s in sites} == {"2-16=some;17-255=many;256-=most"}
    assert calls == ["many", "some", "many", "most", "some"]


def test_no_rows_at_all_in_every_kernel_that_a_plan_may_have() -> None:
    """Each kernel of one call that runs on this processor gives an empty result for no rows."""
    a, b, sa, sb = operands(0)
    for name in kernel_names():
        kernel = find(name)
        if HOST not in kernel.kinds or kernel.run is None:
            continue
        tensor = name == "torch_tensor"
        scales = (torch.ones(()), torch.ones(())) if tensor else (sa, sb)
        out = kernel.run(a, b, *scales, None, torch.bfloat16, False)
        assert out.shape == (0, 48) and out.dtype == torch.bfloat16, name


def test_a_plan_for_another_device_is_computed_by_the_reference() -> None:
    args = operands(5)
    assert torch.equal(planned(*args, plan="0-64=triton_skinny;65-=torch_row"), exact(*args))
