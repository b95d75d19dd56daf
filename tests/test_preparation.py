"""fp8pass.prepare: the packed copy is there, reported, used, never stale and easily dropped."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fp8pass.errors import OptionError, UnsupportedError
from fp8pass.kernels import cpu
from fp8pass.nn import RECIPES, Fp8Linear, calibrate, quantize_
from fp8pass.preparation import prepare, unprepare
from fp8pass.survey import targets
from fp8pass.target import Target


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def make(recipe: str = "dynamic", dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 64, bias=False)).to(dtype)
    model.eval()
    batch = torch.randn(8, 32, dtype=dtype)
    calibration = calibrate(model, [batch]) if recipe == "static" else None
    quantize_(model, recipe, calibration=calibration)
    return model


def assert_fresh(model: nn.Module) -> None:
    """Every linear is prepared, with the copy of the weight it has now."""
    for linear in (m for m in model.modules() if isinstance(m, Fp8Linear)):
        assert linear.weight_prepared is not None
        assert torch.equal(linear.weight_prepared, cpu.pack(linear.weight))


def prepared_layers(model: nn.Module) -> int:
    linears = [m for m in model.modules() if isinstance(m, Fp8Linear)]
    return sum(m.weight_prepared is not None for m in linears)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_same_numbers_as_unprepared(recipe: str, dtype: torch.dtype) -> None:
    model = make(recipe, dtype)
    first = model[0]
    for shape in ((32,), (5, 32), (2, 3, 32), (0, 32), (2, 0, 32)):
        x = torch.randn(shape, dtype=dtype)
        want = first(x)
        prepare(model)
        got = first(x)
        unprepare(model)
        assert got.dtype == want.dtype and got.shape == want.shape == (*shape[:-1], 48)
        # Both sum in float32, in another order, and round once.
        ulp = torch.finfo(dtype).eps * 4
        torch.testing.assert_close(got, want, rtol=ulp, atol=ulp)


def test_report_counts_the_added_memory() -> None:
    model = make()
    before = sum(b.numel() * b.element_size() for b in model.buffers())
    report = prepare(model, "cpu")
    after = sum(b.numel() * b.element_size() for b in model.buffers())
    assert report.layers == 2 and report.bytes == after - before > 0
    assert report.target == Target.parse("cpu").spec and report.skipped == {}
    assert "2 linears" in str(report)
    again = prepare(model)
    assert (again.layers, again.bytes) == (0, 0)
    assert again.skipped == dict.fromkeys(("0", "2"), "already prepared")
    assert sum(b.numel() * b.element_size() for b in model.buffers()) == after
    assert unprepare(model) == 2 and unprepare(model) == 0
    assert sum(b.numel() * b.element_size() for b in model.buffers()) == before


def test_the_public_name_works_whatever_was_imported_before() -> None:
    import fp8pass

    assert fp8pass.prepare(make()).layers == 2
    importlib.import_module("fp8pass.preparation")
    assert fp8pass.prepare(make()).layers == 2


def test_the_copy_is_not_in_the_state_dict() -> None:
    model = make()
    keys = set(model.state_dict())
    prepare(model)
    assert set(model.state_dict()) == keys
    assert "weight_prepared" in dict(model[0].named_buffers())
    assert "prepared" in repr(model[0])


@pytest.mark.parametrize("target", ["sm90", "gfx950", Target.parse("sm120+cutlass")], ids=str)
def test_targets_that_need_nothing(target: Target | str) -> None:
    model = make()
    report = prepare(model, target)
    assert (report.layers, report.bytes, prepared_layers(model)) == (0, 0, 0)
    assert "no preparation" in report.message


@pytest.mark.filterwarnings("ignore:fp8pass does not know")
@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("sm90a", "fp8pass does not know sm90a, and has no kernel for it"),
        ("gfx9999", "fp8pass does not know gfx9999"),
        ("xpu-pvc", "fp8pass has no kernel for xpu-pvc"),
        ("sm75", "sm75"),
    ],
)
def test_targets_without_a_kernel_say_so(target: str, words: str) -> None:
    report = prepare(make(), target)
    assert report.layers == 0 and words in report.message
    has = any(row["name"] == target and row["kernels"] for row in targets())
    assert ("no preparation" in report.message) == has


def test_errors_and_skips() -> None:
    with pytest.raises(OptionError, match="'toaster'"):
        prepare(make(), "toaster")
    with pytest.raises(UnsupportedError, match="quantize_"):
        prepare(nn.Linear(4, 4))
    model = make()
    model[0].to("meta")
    report = prepare(model, "cpu")
    assert report.layers == 1 and "meta" in report.skipped["0"]
    assert prepare(nn.Linear(4, 4), "cpu").layers == 0
    assert prepare(torch.compile(make(), backend="eager")).layers == 2


@pytest.mark.parametrize("assign", [False, True])
def test_loading_packs_again(assign: bool) -> None:
    model, source = make(seed=1), make(seed=2)
    prepare(model)
    model.load_state_dict(source.state_dict(), assign=assign)
    assert_fresh(model)
    x = torch.randn(4, 32, dtype=torch.bfloat16)
    want = source(x)
    torch.testing.assert_close(model(x), want, rtol=0.02, atol=0.02)
    old = model[2].weight_prepared
    part = {k: v for k, v in make(seed=3).state_dict().items() if k.startswith("0.")}
    model.load_state_dict(part, strict=False)
    assert_fresh(model)
    assert model[2].weight_prepared is old  # not touched


def test_loading_into_an_unprepared_model_packs_nothing() -> None:
    model = make(seed=1)
    model.load_state_dict(make(seed=2).state_dict())
    assert prepared_layers(model) == 0


def test_refused_checkpoint_leaves_the_copy_as_it_was() -> None:
    model = make()
    prepare(model)
    state = model.state_dict()
    state["0.weight"] = torch.randn(48, 32)
    with pytest.raises(RuntimeError, match="before quantize_"):
        model.load_state_dict(state)
    assert_fresh(model)


def test_prepare_again_after_writing_by_hand() -> None:
    model, other = make(seed=1), make(seed=2)
    prepare(model)
    model[0].weight.copy_(other[0].weight)
    model[2].weight = other[2].weight.clone()
    assert prepare(model).layers == 2
    assert_fresh(model)


def test_converting_keeps_the_copy_and_its_dtype() -> None:
    model = make()
    prepare(model)
    for convert in (lambda m: m.half(), lambda m: m.float(), lambda m: m.to("cpu", torch.bfloat16)):
        convert(model)
        assert_fresh(model)
    assert model[0].weight_prepared.dtype == torch.bfloat16
    model._apply(torch.clone)
    assert_fresh(model)
    report = prepare(model)
    assert report.layers == 0 and report.bytes == 0  # nothing was stale


def test_leaving_the_cpu_drops_the_copy() -> None:
    model = make()
    prepare(model)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    model.to("meta")
    assert prepared_layers(model) == 0
    model.to_empty(device="cpu").load_state_dict(state)
    assert prepared_layers(model) == 0
    assert prepare(model).layers == 2
    assert_fresh(model)


def test_deepcopy_and_pickle_pack_their_own() -> None:
    model = make()
    size = len(pickle.dumps(model))
    prepare(model)
    assert len(pickle.dumps(model)) < size + 256  # the copy does not travel
    x = torch.randn(4, 32, dtype=torch.bfloat16)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_fresh(other)
        assert other[0].weight_prepared is not model[0].weight_prepared
        assert torch.equal(other(x), model(x))
        assert prepare(other).layers == 0
    assert_fresh(model)


def test_prepared_in_inference_mode_is_usable_outside() -> None:
    model = make()
    with torch.inference_mode():
        prepare(model)
    assert not any(buffer.is_inference() for buffer in model.buffers())


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_prepared_graph_calls_our_operator(recipe: str) -> None:
    model = make(recipe)
    prepare(model)
    graphs = []

    def backend(gm: Any, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    x = torch.randn(4, 32, dtype=torch.bfloat16)
    got = torch.compile(model, backend=backend, fullgraph=True)(x)
    (graph,) = graphs
    calls = [n for n in graph.graph.nodes if "fp8pass.scaled_mm" in str(n.target)]
    assert len(calls) == 2
    assert not any("_scaled_mm" in str(n.target) for n in graph.graph.nodes if n not in calls)
    found = RECIPES[recipe]
    for call in calls:
        assert call.args[5:9] == (torch.bfloat16, str(found.act), str(found.weight), False)
        assert "weight_prepared" in call.args[9].name
    assert torch.equal(got, model(x))


def test_preparing_after_compiling_is_noticed() -> None:
    model = make()
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(4, 32, dtype=torch.bfloat16)
    want = compiled(x)
    prepare(model)
    torch.testing.assert_close(compiled(x), want, rtol=0.02, atol=0.02)
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Log():
        model(x)
    assert seen.count("fp8pass.scaled_mm.default") == 2


def test_gradient_is_refused() -> None:
    model = make()
    prepare(model)
    with torch.enable_grad():
        model(torch.randn(2, 32, dtype=torch.bfloat16))
        with pytest.raises(UnsupportedError, match="no gradient"):
            model(torch.randn(2, 32, dtype=torch.bfloat16, requires_grad=True))
