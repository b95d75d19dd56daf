"""Fp8Pass: its place in a chain, what it leaves untouched, and several at once."""

from __future__ import annotations

import copy
import threading
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import graphs
import models
import pytest
import torch
import torch._inductor.config as inductor_config
from models import codes, count_ours, run
from torch import Tensor

import fp8pass
from fp8pass import passes
from fp8pass.backend import existing_passes, two_hooks
from fp8pass.options import Options
from fp8pass.passes import Fp8Pass, chain, without_ours
from fp8pass.report import Report, reports
from fp8pass.report.collector import clear, collecting
from fp8pass.target import Target

E4 = torch.float8_e4m3fn
POST, JOINT = "post_grad_custom_post_pass", "joint_custom_pre_pass"

#: the ways to have the pass: what to give to torch.compile
WAYS: list[Callable[[], dict[str, Any]]] = [
    lambda: {"backend": fp8pass.fp8pass_backend},
    lambda: {"options": fp8pass.inductor_options()},
]
both_ways = pytest.mark.parametrize("way", WAYS, ids=["backend", "options"])


@pytest.fixture(autouse=True)
def start() -> Iterator[None]:
    clear()
    passes._warned.clear()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def quantise(y: Tensor) -> tuple[Tensor, Tensor]:
    scale = (y.float().abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-12)
    return (y.float() / scale).clamp(-448.0, 448.0).to(E4), scale


# ---- chains --------------------------------------------------------------------------------------


def in_config(hook: str, watch: Any) -> Any:
    return inductor_config.patch({hook: watch})


@pytest.mark.parametrize("hook", [POST, JOINT])
def test_a_pass_in_the_configuration_runs_before_ours(hook: str) -> None:
    watch, model, x = models.Watch(), models.build(models.Pair), models.rows(3)
    with in_config(hook, watch):
        _, text = run(model, x, backend=fp8pass.fp8pass_backend)
        assert inductor_config.get_config_copy()[hook] is watch
    assert count_ours(text) == 1
    (seen,) = watch.texts
    assert count_ours(seen) == 0
    assert getattr(inductor_config, hook) is None


@pytest.mark.parametrize("hook", [POST, JOINT])
def test_a_pass_in_the_options_runs_before_ours(hook: str) -> None:
    model, x = models.build(models.Pair), models.rows(3)
    kept, dropped = models.Watch(), models.Watch()
    with in_config(hook, dropped):  # an option comes before the configuration, as in Inductor
        _, text = run(model, x, backend=fp8pass.fp8pass_backend, options={hook: kept})
    assert (len(kept.texts), len(dropped.texts), count_ours(text)) == (1, 0, 1)
    assert count_ours(kept.texts[0]) == 0


def test_inductor_options_chain_to_both() -> None:
    model, x, log = models.build(models.Pair), models.rows(3), []
    base = {POST: models.Watch("base", log), "max_autotune": False}
    options = fp8pass.inductor_options(base)
    assert set(options) == {POST, "max_autotune"}
    assert isinstance(base[POST], models.Watch)  # what was given is not changed
    _, text = run(model, x, options=options)
    assert log == ["base"]
    with in_config(POST, models.Watch("config", log)):
        options = fp8pass.inductor_options()
        _, again = run(model, x, options=options)
    assert log == ["base", "config"]
    assert count_ours(text) == count_ours(again) == 1


def test_a_list_of_passes_keeps_its_order() -> None:
    if Target.parse("cpu").torch_version < (2, 13):
        return  # older ones have no lists
    model, x, log = models.build(models.Pair), models.rows(3), []
    listed = [models.Watch("one", log), models.Watch("two", log)]
    with in_config(POST, listed):
        _, text = run(model, x, backend=fp8pass.fp8pass_backend)
    assert log == ["one", "two"]
    assert count_ours(text) == 1


def test_asking_twice_runs_once() -> None:
    model, x, watch = models.build(models.Pair), models.rows(3), models.Watch()
    first = fp8pass.inductor_options({POST: watch})
    second = fp8pass.inductor_options(first, numerics="fast")
    assert second[POST].before == (watch,)
    assert second[POST].options.numerics == "fast"
    run(model, x, options=second)
    assert len(reports()) == 1
    assert len(watch.texts) == 1
    with in_config(POST, second[POST]):
        clear()
        run(model, x, backend=fp8pass.fp8pass_backend)
    assert [g.hook for report in reports() for g in report.graphs] == ["joint", "post_grad"]
    assert len(watch.texts) == 2


def test_helpers_of_chains() -> None:
    ours, a, b = Fp8Pass(Options()), models.Watch("a"), models.Watch("b")
    assert chain(None) == ()
    assert chain(a) == (a,)
    assert chain([a, b]) == chain((a, b)) == (a, b)
    assert without_ours((a, ours, b)) == (a, b)
    assert without_ours((Fp8Pass(Options(), "all", (a, Fp8Pass(Options(), "all", (b,)))),)) == (
        a,
        b,
    )
    assert existing_passes(POST, {POST: None}) == ()
    joint, post = two_hooks(Options(), {JOINT: a})
    assert (joint.before, post.before) == ((a,), ())


def _fail(graph: Any) -> None:
    raise ZeroDivisionError("an accident")


def test_what_a_pass_before_ours_raises_is_the_users_to_see() -> None:
    model, x = models.build(models.Pair), models.rows(3)
    with in_config(POST, _fail), pytest.raises(Exception, match="an accident"):
        run(model, x, backend=fp8pass.fp8pass_backend)


# ---- identity ------------------------------------------------------------------------------------


def test_copies_and_equality() -> None:
    watch = models.Watch()
    one = Fp8Pass(Options(fuel=3), "post", (watch,))
    assert copy.deepcopy({"a": [one]})["a"][0] is one
    assert one == Fp8Pass(Options(fuel=3), "post", (watch,))
    assert hash(one) == hash(Fp8Pass(Options(fuel=3), "post", (watch,)))
    for other in (
        Fp8Pass(Options(fuel=4), "post", (watch,)),
        Fp8Pass(Options(fuel=3), "joint", (watch,)),
        Fp8Pass(Options(fuel=3), "post"),
        "something else",
    ):
        assert one != other


# ---- the door ------------------------------------------------------------------------------------


@both_ways
def test_a_model_without_fp8_gets_the_very_same_graph(way: Callable[[], dict[str, Any]]) -> None:
    model, x = models.build(models.Block, None), models.rows(3)
    stock, wanted = run(model, x, backend="inductor")
    result, text = run(model, x, **way())
    assert text == wanted
    assert torch.equal(result, stock)
    (report,) = reports()
    assert codes(report) == {"FP8-P004"}
    assert report.sites == []


def test_a_model_without_fp8_gets_no_setting_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, Any]] = []

    def compile_fx(gm: Any, inputs: Any, config_patches: dict[str, Any]) -> Any:
        found.append(config_patches)
        return gm.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    with torch.no_grad():
        for model in (models.build(models.Pair, None), torch.nn.ReLU()):
            torch.compile(model, backend=fp8pass.fp8pass_backend)(models.rows(3))
    assert [set(patches) for patches in found] == [{JOINT, POST}] * 2


@both_ways
@pytest.mark.parametrize("twice", [False, True])
def test_a_quantise_alone_is_left_as_it_was(way: Callable[[], dict[str, Any]], twice: bool) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        if not twice:
            return quantise(x)
        # two equal quantises, which must not stay merged if nothing is rewritten
        pairs = quantise(x + 1), quantise(x + 1)
        return tuple(codes.float() * scale for codes, scale in pairs)

    x = models.rows(3)
    _, wanted = run(function, x, backend="inductor")
    _, text = run(function, x, **way())
    assert text == wanted
    (report,) = reports()
    (site,) = report.sites
    assert (site.kind, site.status) == ("quantize", "left")
    assert site.code.startswith("FP8-")
    assert site.message


def training_function(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A norm that is trained, with a quantise that has no gradient."""
    h = x.float()
    y = weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
    codes, scale = quantise(y.detach())
    return y, codes.float() * scale


@both_ways
def test_a_graph_for_training_is_left_alone(way: Callable[[], dict[str, Any]]) -> None:
    x = models.rows(4)
    results, texts, grads = [], [], []
    for arguments in ({"backend": "inductor"}, way()):
        weight = torch.ones(64, dtype=torch.bfloat16, requires_grad=True)
        with models.without_code(final := []), torch.enable_grad():
            out, dequantised = torch.compile(training_function, **arguments)(x, weight)
            out.float().sum().backward()
        assert weight.grad is not None
        results.append((out.detach(), dequantised))
        grads.append(weight.grad)
        texts.append(final)
    assert texts[0] == texts[1]
    assert len(texts[1]) == 2  # forward and backward
    assert torch.equal(grads[0], grads[1])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert codes(*reports()) - {"FP8-P004"} == {"FP8-P001"}  # P004: a backward without FP8
    for record in (record for report in reports() for record in report.graphs):
        assert record.sites == []
        assert record.verdict is not None
        if record.verdict.code == "FP8-P001":
            assert "primals_1" in record.verdict.message
            assert "torch.no_grad()" in record.verdict.hint


def test_a_product_under_autograd_fails_as_with_stock_torch_with_a_hint() -> None:
    model, x = models.build(models.Pair), models.rows(3)
    texts = []
    for backend in ("inductor", fp8pass.fp8pass_backend):
        torch._dynamo.reset()
        with models.messages() as said, pytest.raises(Exception) as caught:
            torch.compile(model, backend=backend)(x)
        texts.append(str(caught.value))
    assert all("derivative for aten::_scaled_mm is not implemented" in text for text in texts)
    (hint,) = said
    assert "FP8-P001" in hint
    assert "torch.no_grad()" in hint


class TestAheadOfTime:
    """AOTInductor: refused with a reason; the package is that of stock torch."""

    @staticmethod
    def package(tmp_path: Any, **options: Any) -> str:
        model, x = models.build(models.Pair), models.rows(3)
        with torch.no_grad():
            exported = torch.export.export(model, (x,))
            configs = fp8pass.inductor_options({"aot_inductor.package_cpp_only": True}, **options)
            return torch._inductor.aoti_compile_and_package(
                exported, package_path=str(tmp_path / "model.pt2"), inductor_configs=configs
            )

    def test_left_alone(self, tmp_path: Any) -> None:
        with models.messages() as said:
            path = self.package(tmp_path)
        (report,) = reports()
        (graph,) = report.graphs
        assert graph.verdict is not None
        assert (graph.verdict.code, graph.sites) == ("FP8-P002", [])
        assert graph.nodes_before == graph.nodes_after
        assert ["AOTInductor" in message for message in said] == [True]
        sources = zipfile.ZipFile(path)
        text = b"".join(sources.read(n) for n in sources.namelist() if n.endswith(".cpp"))
        assert b"_scaled_mm" in text
        assert b"fp8pass" not in text

    def test_strict_raises(self, tmp_path: Any) -> None:
        with pytest.raises(Exception, match="UnsupportedError: AOTInductor"):
            self.package(tmp_path, strict=True)


# ---- several at once -----------------------------------------------------------------------------


def test_three_passes_in_one_process_do_the_same() -> None:
    model, x = models.build(), models.rows(3)
    texts = [run(model, x, options=fp8pass.inductor_options())[1] for _ in range(3)]
    assert texts[0] == texts[1] == texts[2]
    assert count_ours(texts[0]) == 7
    assert len(reports()) == 3


def test_reports_of_two_threads_do_not_mix() -> None:
    kinds = {"pair": models.Pair, "block": models.Block}
    traced = {}
    for name, kind in kinds.items():
        model = models.build(kind)
        names = [n for n, _ in [*model.named_parameters(), *model.named_buffers()]]
        tensors = [t for _, t in [*model.named_parameters(), *model.named_buffers()]]

        def function(*values: Any, model: Any = model, names: Any = names) -> Any:
            return torch.func.functional_call(
                model, dict(zip(names, values[1:], strict=True)), values[:1]
            )

        traced[name] = graphs.trace(function, models.rows(3), *tensors)
    found: dict[str, list[Report]] = {name: [] for name in kinds}
    errors: list[BaseException] = []
    barrier = threading.Barrier(2)

    def work(name: str) -> None:
        try:
            for _ in range(5):
                barrier.wait(60)
                copied = copy.deepcopy(traced[name])
                with collecting(None) as report:
                    for hook in two_hooks(Options(), {}):
                        hook(copied.graph)
                found[name].append(report)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(name,)) for name in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for name, products in (("pair", 1), ("block", 7)):
        for report in found[name]:
            assert [graph.hook for graph in report.graphs] == ["joint", "post_grad"]
            assert len(report.select("scaled_mm", "lowered")) == products
    assert len(reports()) == 10


def test_two_threads_may_compile() -> None:
    found: dict[str, Tensor] = {}
    errors: list[BaseException] = []
    built = {"pair": models.build(models.Pair), "block": models.build(models.Block)}
    x = models.rows(3)

    def work(name: str) -> None:
        try:
            with torch.no_grad():
                found[name] = torch.compile(built[name], backend=fp8pass.fp8pass_backend)(x)
        except BaseException as error:
            errors.append(error)

    with models.without_code():
        threads = [threading.Thread(target=work, args=(name,)) for name in built]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    for name, model in built.items():
        assert models.distance(found[name], models.reference(model, x)) < 5e-3
    products = sorted(len(report.select("scaled_mm")) for report in reports())
    assert products == [1, 7]
