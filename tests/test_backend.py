"""``torch.compile(backend="fp8pass")`` and ``inductor_options()``: right numbers, any call."""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters

import fp8pass
from fp8pass.report import Report, reports
from fp8pass.report.collector import clear
from fp8pass.target import Target

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


@pytest.fixture(autouse=True)
def start() -> Iterator[None]:
    """Nothing compiled before, and no answer from a cache (tests of those are in test_cache)."""
    clear()
    torch._dynamo.reset()
    with inductor_config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def compiled(model: Any, *inputs: Any, **arguments: Any) -> tuple[torch.Tensor, Report]:
    """The result of a compiled model on ``inputs``, and the report of the compile."""
    arguments.setdefault("backend", fp8pass.fp8pass_backend)
    torch._dynamo.reset()
    with torch.no_grad():
        result = torch.compile(model, fullgraph=True, **arguments)(*inputs)
    return result.clone(), (reports() or [Report()])[-1]


def assert_close(model: Any, result: torch.Tensor, *inputs: Any) -> None:
    """Near the reference; another order of a sum may move a code, and that one element a little."""
    wanted = models.reference(model, *inputs)
    assert (result.dtype, result.shape) == (wanted.dtype, wanted.shape)
    assert models.distance(result, wanted) < models.CLOSE


# ---- numbers -------------------------------------------------------------------------------------


@cache
def measured(recipe: str) -> tuple[Any, torch.Tensor, torch.Tensor, float]:
    """A model, its input, its result in float64, and the error that eager and stock torch allow."""
    model, x = models.build(recipe=recipe), models.rows(2, 5)
    stock, _ = compiled(model, x, backend="inductor")
    with torch.no_grad():
        eager = model(x)
    wanted = models.ideal(model, x)
    largest = max(models.distance(eager, wanted), models.distance(stock, wanted))
    assert 0 < largest < 0.1  # the reference is one of this very model
    # one unit in the last place of every element: a relative 2**-8 on average
    return model, x, wanted, 1.1 * largest + torch.finfo(torch.bfloat16).eps / 2


FOUND = {
    ("norm", "fused"): 2,
    ("activation", "fused"): 1,
    ("quantize", "left"): 1,
    ("scaled_mm", "lowered"): 7,
}


@pytest.mark.parametrize("recipe", models.RECIPES)
def test_error_is_no_larger_than_that_of_eager_and_of_stock_inductor(recipe: str) -> None:
    model, x, wanted, allowed = measured(recipe)
    result, report = compiled(model, x)
    assert report.counts() == FOUND
    assert {site.kernel for site in report.select("scaled_mm")} == {"cpu"}
    assert models.distance(result, wanted) <= allowed
    assert_close(model, result, x)


def test_as_an_option_of_plain_inductor() -> None:
    model, x, wanted, allowed = measured("dynamic")
    options = fp8pass.inductor_options({"max_autotune": False})
    result, report = compiled(model, x, backend="inductor", options=options)
    (record,) = report.graphs
    assert (record.hook, record.source) == ("post_grad", "post_joint")
    assert report.counts() == FOUND
    assert models.distance(result, wanted) <= allowed


def test_dynamic_sizes_compile_once_for_all_batches() -> None:
    model = models.build(models.Pair)
    with torch.no_grad():
        function = torch.compile(
            model, backend=fp8pass.fp8pass_backend, fullgraph=True, dynamic=True
        )
        counters.clear()
        for size in (7, 3, 17, 64):
            x = models.rows(size)
            assert_close(model, function(x), x)
        assert counters["stats"]["unique_graphs"] == 1
        # torch always compiles for sizes 0 and 1 by themselves
        for size in (1, 0):
            x = models.rows(size)
            assert_close(model, function(x), x)
    assert counters["stats"]["unique_graphs"] <= 3
    for report in reports():
        assert report.counts() == {("norm", "fused"): 1, ("scaled_mm", "lowered"): 1}


@pytest.mark.parametrize(
    ("mode", "size"), [("reduce-overhead", 1), ("max-autotune-no-cudagraphs", 4)]
)
def test_modes(mode: str, size: int) -> None:
    model, x = models.build(models.Pair, "static"), models.rows(size)
    result, report = compiled(model, x, mode=mode)
    assert_close(model, result, x)
    assert report.counts() == {("norm", "fused"): 1, ("scaled_mm", "lowered"): 1}


@pytest.mark.parametrize("recipe", models.RECIPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 3), (2, 1, 2, 3), (0, 3)])
def test_ranks_and_empty_batches(recipe: str, shape: tuple[int, ...]) -> None:
    model, x = models.build(models.Pair, recipe), models.rows(*shape)
    with models.without_code():
        for arguments in (
            {"backend": fp8pass.fp8pass_backend},
            {"options": fp8pass.inductor_options()},
        ):
            torch._dynamo.reset()
            result = torch.compile(model, fullgraph=True, **arguments)(x)
            assert_close(model, result, x)
            # no amax of an empty tensor can be had, so that such a graph has no FP8 in it
            nothing = recipe == "dynamic_tensor" and x.numel() == 0
            assert len(reports()[-1].select("scaled_mm", "lowered")) == (0 if nothing else 1)


# ---- how it is called ----------------------------------------------------------------------------


def test_the_name_is_an_entry_point() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    wanted = {"fp8pass": "fp8pass.backend:fp8pass_backend"}
    assert project["entry-points"]["torch_dynamo_backends"] == wanted
    module, name = wanted["fp8pass"].split(":")
    assert getattr(__import__(module, fromlist=[name]), name) is fp8pass.fp8pass_backend
    try:
        importlib.metadata.distribution("fp8pass")
    except importlib.metadata.PackageNotFoundError:
        return  # run from a source tree: there is no metadata that torch could find it by
    assert "fp8pass" in torch._dynamo.list_backends()
    assert torch._dynamo.lookup_backend("fp8pass") is fp8pass.fp8pass_backend


def test_options_reach_inductor_and_fp8pass(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, Any]] = []

    def compile_fx(gm: Any, inputs: Any, config_patches: dict[str, Any]) -> Any:
        found.append(config_patches)
        return gm.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    options = {
        "fp8pass.numerics": "fast",
        "fp8pass.disable": ["torch_row"],
        "max-autotune": True,  # torch.compile takes dashes too
        "epilogue_fusion": False,
    }
    compiled(models.build(models.Pair), models.rows(3), options=options)
    compiled(models.build(models.Pair), models.rows(3), mode="max-autotune-no-cudagraphs")
    patches, of_mode = found
    for hook, stage in (("joint_custom_pre_pass", "joint"), ("post_grad_custom_post_pass", "post")):
        assert patches[hook].stage == of_mode[hook].stage == stage
        assert (patches[hook].options.numerics, of_mode[hook].options.numerics) == ("fast", "exact")
        assert patches[hook].options.disable == ("torch_row",)
    assert patches["max_autotune"] is True
    assert patches["epilogue_fusion"] is False
    assert not any(name.startswith("fp8pass") for name in patches)
    stock = torch._inductor.list_mode_options("max-autotune-no-cudagraphs")
    assert stock.items() <= of_mode.items()


def test_environment_and_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8PASS_NUMERICS", "fast")
    monkeypatch.setenv("FP8PASS_FUEL", "1")
    with models.without_code():
        model, x = models.build(models.Pair), models.rows(3)
        torch.compile(model, backend=fp8pass.fp8pass_backend)(x)
        taken = reports()[-1].graphs[-1].options
        torch._dynamo.reset()
        options = {"fp8pass.numerics": "exact", "fp8pass.fuel": 7}
        torch.compile(model, backend=fp8pass.fp8pass_backend, options=options)(x)
        given = reports()[-1].graphs[-1].options
    assert (taken["numerics"], taken["fuel"]) == ("fast", 1)
    assert (given["numerics"], given["fuel"]) == ("exact", 7)
    assert (
        fp8pass.inductor_options(numerics="exact")["post_grad_custom_post_pass"].options.numerics
        == "exact"
    )


# ---- bad input: one error that names the value and what is allowed, as the user sees it ----------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"options": {"fp8pass.numerics": "sloppy"}}, ["numerics", "'sloppy'", "exact", "fast"]),
        ({"options": {"fp8pass.colour": 1}}, ["'colour'", "numerics", "disable"]),
        ({"options": {"no_such_thing": 1}}, ["'no_such_thing'", "fp8pass.numerics"]),
        ({"options": {"fp8pass.target": "sm12345"}}, ["'sm12345'", "sm90", "gfx942", "cpu"]),
        ({"options": {"fp8pass.force": "magic"}}, ["'magic'", "cpu", "torch_row"]),
        ({"options": {"fp8pass.prefer": "magic,cpu"}}, ["'magic'", "cpu", "torch_row"]),
        ({"options": {"fp8pass.fuel": -1}}, ["fuel", "-1", ">= 0"]),
        ({"mode": "warp-speed"}, ["'warp-speed'", "reduce-overhead", "max-autotune"]),
    ],
)
def test_bad_input_is_named(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(Exception) as caught:
        compiled(torch.nn.Identity(), models.rows(1), **arguments)
        compiled(torch.nn.ReLU(), models.rows(1), **arguments)
    text = str(caught.value)
    assert "OptionError" in text
    for word in words:
        assert word in text
    if "options" in arguments:
        ((name, value),) = arguments["options"].items()
        if name.startswith("fp8pass."):
            with pytest.raises(fp8pass.Fp8PassError) as direct:
                fp8pass.inductor_options(**{name.removeprefix("fp8pass."): value})
            for word in words:
                assert word in str(direct.value)


def test_bad_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8PASS_STRICT", "maybe")
    with pytest.raises(Exception, match="FP8PASS_STRICT.*'maybe'"):
        compiled(torch.nn.ReLU(), models.rows(1))


def test_a_forced_kernel_that_cannot_be_had_raises_with_all_reasons() -> None:
    model, x = models.build(models.Pair), models.rows(3)
    with models.without_code():
        for arguments in (
            {"backend": fp8pass.fp8pass_backend, "options": {"fp8pass.force": "cpu_prepared"}},
            {"options": fp8pass.inductor_options(force="cpu_prepared")},
        ):
            torch._dynamo.reset()
            with pytest.raises(Exception) as caught:
                torch.compile(model, **arguments)(x)
            text = str(caught.value)
            assert "NoKernelError" in text
            assert "'cpu_prepared' is forced" in text
            assert "FP8-L004" in text
            assert "kernels that could take it: cpu" in text
            assert "torch_tensor: FP8-L003" in text
    with pytest.raises(fp8pass.NoKernelError, match="torch_tensor"):
        fp8pass.explain(model, x, force="torch_tensor")


row_wise = pytest.mark.skipif(
    Target.parse("cpu").torch_version < (2, 12), reason="no row-wise product on a CPU before 2.12"
)


@row_wise
def test_generated_code_gives_torch_the_strides_that_it_checks() -> None:
    """Inductor may lay out a [3, 1] scale as (1, 3) if nothing forbids it; torch refuses that."""
    model, x = models.build(models.Pair), models.rows(3)
    result, report = compiled(model, x, options={"fp8pass.force": "torch_row"})
    assert report.select("scaled_mm")[0].kernel == "torch_row"
    assert_close(model, result, x)


@row_wise
def test_a_forced_or_preferred_kernel_is_used() -> None:
    model, x = models.build(models.Pair), models.rows(3)
    with models.without_code():
        for options, kernel, why in (
            ({"fp8pass.force": "torch_row"}, "torch_row", "forced"),
            ({"fp8pass.prefer": "cpu_prepared,torch_row"}, "torch_row", "preferred"),
            ({"fp8pass.disable": "cpu"}, "torch_row", "static priority"),
        ):
            torch._dynamo.reset()
            result = torch.compile(model, backend=fp8pass.fp8pass_backend, options=options)(x)
            (site,) = reports()[-1].select("scaled_mm")
            assert (site.kernel, site.status) == (kernel, "lowered")
            assert site.message.startswith(why)
            if "fp8pass.prefer" in options:
                assert "preferred cpu_prepared was not used (FP8-L004)" in site.message
            assert_close(model, result, x)


def test_with_every_kernel_disabled_the_products_stay() -> None:
    from fp8pass.lowerings import kernel_names

    model, x = models.build(models.Pair), models.rows(3)
    with models.without_code(final := []):
        options = {"fp8pass.disable": ",".join(kernel_names())}
        result = torch.compile(model, backend=fp8pass.fp8pass_backend, options=options)(x)
    (site,) = reports()[-1].select("scaled_mm")
    assert (site.status, site.code, site.kernel) == ("left", "FP8-L012", "")
    assert {rejected.code for rejected in site.rejected} == {"FP8-L002"}
    assert "aten._scaled_mm" in final[0]
    assert_close(model, result, x)


def test_an_unknown_recipe_is_named() -> None:
    with pytest.raises(fp8pass.Fp8PassError, match="'int3'.*static.*dynamic"):
        models.build(models.Pair, "int3")
