"""A failing step never breaks a compile: the graph is restored, one warning says so."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import models
import pytest
import torch
from models import codes, count_ours, run
from torch import fx

import fp8pass
from fp8pass import passes
from fp8pass.report import reports
from fp8pass.report.collector import clear


@pytest.fixture(autouse=True)
def start() -> Iterator[None]:
    clear()
    passes._warned.clear()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def fail(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("an accident")


def fail_after(real: Callable[..., Any]) -> Callable[..., Any]:
    """``real``, and then an error: what it did to the graph must be taken back."""

    def function(*args: Any, **kwargs: Any) -> Any:
        real(*args, **kwargs)
        fail()

    return function


#: where it fails, the name of the step, and the hooks of the backend in which it does
STEPS = [
    ("fp8pass.spellings.reader.Reader.read_quantises", "read", {"joint"}),
    ("fp8pass.engine.emit_site", "lower", {"post_grad"}),
    ("fp8pass.workbench.Workbench.finish", "check", {"joint", "post_grad"}),
]
each_step = pytest.mark.parametrize(("place", "step", "hooks"), STEPS, ids=[s[1] for s in STEPS])


def break_at(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, fail_after(pkgutil.resolve_name(place)))


@each_step
def test_a_failing_step_costs_the_rewrites_and_nothing_else(
    place: str, step: str, hooks: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = models.build(models.Twin, "static"), models.rows(3)
    stock, wanted = run(model, x, backend="inductor")
    break_at(place, monkeypatch)
    with models.messages() as said:
        result, text = run(model, x, backend=fp8pass.fp8pass_backend)
    assert torch.equal(result, stock)
    assert count_ours(text) == (0 if "post_grad" in hooks else 2)
    if len(hooks) == 2:
        assert text == wanted
    (report,) = reports()
    assert [record.hook for record in report.graphs] == ["joint", "post_grad"]
    for record in report.graphs:
        assert record.verdict is not None
        if record.hook in hooks:
            assert (record.verdict.code, record.sites) == ("FP8-P003", [])
            assert f"step {step} failed" in record.verdict.message
            assert "ZeroDivisionError: an accident" in record.verdict.message
            assert record.nodes_before == record.nodes_after
        else:
            assert record.verdict
            assert record.sites
    (warning,) = said  # once per process, not once per graph
    assert f"step {step} failed" in warning
    assert "compiled without fp8pass" in warning
    with models.messages() as again:
        run(model, x, backend=fp8pass.fp8pass_backend)
    assert again == []

    with pytest.raises(Exception, match=f"PassError: step {step} failed.*an accident"):
        run(model, x, backend=fp8pass.fp8pass_backend, options={"fp8pass.strict": True})


@each_step
def test_a_failing_step_of_the_inductor_option(
    place: str, step: str, hooks: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = models.build(models.Twin, "dynamic_tensor"), models.rows(3)
    stock, wanted = run(model, x, backend="inductor")
    break_at(place, monkeypatch)
    with models.messages() as said:
        result, text = run(model, x, options=fp8pass.inductor_options())
    assert torch.equal(result, stock)
    assert text == wanted
    assert codes(*reports()) == {"FP8-P003"}
    assert len(said) == 1
    with pytest.raises(Exception, match=f"PassError: step {step} failed.*an accident"):
        run(model, x, options=fp8pass.inductor_options(strict=True))


def test_a_failure_is_raised_by_explain_only_when_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = models.build(models.Pair, "static"), models.rows(3)
    break_at(STEPS[0][0], monkeypatch)
    assert "FP8-P003" in codes(fp8pass.explain(model, x))
    with pytest.raises(fp8pass.PassError, match="step read failed.*an accident"):
        fp8pass.explain(model, x, strict=True)


def test_a_failing_kernel_and_a_changed_output_are_noticed() -> None:
    from fp8pass.lowerings.registry import Kernel, register, unregister
    from fp8pass.reasons import YES

    def emit(graph: fx.Graph, site: Any) -> fx.Node:
        node = graph.call_function(torch.ops.aten.mm.default, (site.a, site.b))
        if broken == "raises":
            fail()
        shape = (*site.val.shape[:-1], site.val.shape[-1] + (broken == "shape"))
        dtype = torch.float16 if broken == "dtype" else site.val.dtype
        value = site.val.new_empty(shape, dtype=dtype)
        node.meta["val"] = value.t().contiguous().t() if broken == "stride" else value
        return node

    kernel = Kernel(
        name="bad_kernel_of_a_test",
        summary="",
        kinds=frozenset({"cpu"}),
        requirements=lambda _: YES,
        can_implement=lambda *_: YES,
        priority=lambda *_: 99,
        emit=emit,
        provenance="",
    )
    model, x = models.build(models.Pair, "static"), models.rows(3)
    stock, wanted = run(model, x, backend="inductor")
    register(kernel)
    try:
        options = {"fp8pass.force": kernel.name}
        for broken in ("raises", "shape", "dtype", "stride"):
            _, text = run(model, x, backend=fp8pass.fp8pass_backend, options=options)
            record = reports()[-1].graphs[-1]
            assert record.verdict is not None
            assert (record.hook, record.verdict.code) == ("post_grad", "FP8-P003")
            assert ("an accident" if broken == "raises" else "output 0") in record.verdict.message
            assert count_ours(text) == 0
    finally:
        unregister(kernel.name)
