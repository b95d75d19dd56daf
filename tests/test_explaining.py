"""``fp8pass.explain``: what it says, and that it leaves nothing behind."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._dynamo.utils import counters

import fp8pass

PAIR = {("norm", "fused"): 1, ("scaled_mm", "lowered"): 1}


@pytest.fixture(autouse=True)
def start() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def pair() -> Any:
    return models.build(models.Pair)


def test_modules_functions_and_keywords(pair: Any) -> None:
    x = models.rows(3)

    def function(x: Tensor, *, shift: float, twice: bool = False) -> Tensor:
        return pair(pair.norm(x) if twice else x) + shift

    assert fp8pass.explain(pair, x).counts() == PAIR
    assert fp8pass.explain(function, x, kwargs={"shift": 1.0}).counts() == PAIR
    found = fp8pass.explain(function, x, kwargs={"shift": 1.0, "twice": True}).counts()
    assert found == {**PAIR, ("norm", "left"): 1}
    assert fp8pass.explain(torch.compile(pair), x).counts() == PAIR


def test_options_and_sizes(pair: Any) -> None:
    x = models.rows(3)
    static = fp8pass.explain(pair, x, disable=["cpu"])
    (site,) = static.select("scaled_mm")
    assert (site.kernel, site.shape, site.plan) == ("torch_row", "3x32x64", "3=torch_row")
    dynamic = fp8pass.explain(pair, x, dynamic=True)
    (site,) = dynamic.select("scaled_mm")
    assert (site.shape, site.plan) == ("2-x32x64", "2-=cpu")
    assert dynamic.counts() == PAIR
    marked = models.rows(3)
    torch._dynamo.mark_dynamic(marked, 0)
    assert fp8pass.explain(pair, marked).counts() == PAIR
    for name in ("numerics", "colour", "force"):
        with pytest.raises(fp8pass.Fp8PassError, match="'nonsense'|'colour'"):
            fp8pass.explain(pair, x, **{name: "nonsense"})


def test_a_model_in_several_graphs_is_one_report(pair: Any) -> None:
    def broken(x: Tensor) -> Tensor:
        y = pair(x)
        torch._dynamo.graph_break()
        return y * pair(x + 1)

    report = fp8pass.explain(broken, models.rows(3))
    assert report.counts() == {("norm", "fused"): 2, ("scaled_mm", "lowered"): 2}
    assert [graph.hook for graph in report.graphs] == ["joint", "post_grad"] * 2
    assert len({graph.name for graph in report.graphs}) == 2


def test_nothing_to_capture() -> None:
    report = fp8pass.explain(lambda x: 3, models.rows(3))
    assert report.sites == []
    assert "no graph was captured" in report.note
    assert "no graph was captured" in report.table()


def test_the_same_every_time_and_for_a_second_model(pair: Any) -> None:
    x = models.rows(3)
    first = fp8pass.explain(pair, x).to_dict()
    other = fp8pass.explain(models.build(models.Twin, "static"), x)
    assert other.counts() == {("norm", "fused"): 1, ("scaled_mm", "lowered"): 2}
    second = fp8pass.explain(pair, x).to_dict()
    for report in (first, second):
        assert report["from_cache"] is False
        for graph in report["graphs"]:
            graph.pop("seconds")
    assert first == second


@pytest.mark.parametrize("way", ["done", "an error of the model", "an error of fp8pass"])
def test_nothing_is_left_behind(way: str, pair: Any) -> None:
    x = models.rows(3)

    def model(x: Tensor) -> Tensor:
        if way == "an error of the model":
            return pair(x) @ x
        return pair(x)

    state = copy.deepcopy(pair.state_dict())
    configs = [dict(c.get_config_copy()) for c in (inductor_config, functorch_config)]
    grad = torch.is_grad_enabled()
    inputs = x.clone()
    options = {"force": "torch_tensor"} if way == "an error of fp8pass" else {}
    counters.clear()
    if way == "done":
        fp8pass.explain(model, x, **options)
    else:
        kind = RuntimeError if way == "an error of the model" else fp8pass.NoKernelError
        with pytest.raises(kind):
            fp8pass.explain(model, x, **options)
    assert [dict(c.get_config_copy()) for c in (inductor_config, functorch_config)] == configs
    assert torch.is_grad_enabled() is grad
    assert torch.equal(x, inputs)
    for name, value in pair.state_dict().items():
        assert torch.equal(value.float(), state[name].float())
    # nothing compiled is left: the next call captures anew, and nothing came from a cache
    for table in ("inductor", "aot_autograd"):
        assert not [name for name in counters[table] if name.endswith(("cache_hit", "cache_miss"))]
    captured: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        captured.append(gm)
        return gm.forward

    with torch.no_grad():
        torch.compile(pair, backend=backend)(x)
    assert len(captured) == 1


def test_with_gradients_on_and_a_model_that_wants_them(pair: Any) -> None:
    assert torch.is_grad_enabled()
    assert any(p.requires_grad for p in pair.parameters())
    assert fp8pass.explain(pair, models.rows(3)).counts() == PAIR


def test_a_pass_of_the_user_is_chained_and_kept(pair: Any) -> None:
    watch = models.Watch()
    with inductor_config.patch(post_grad_custom_post_pass=watch):
        assert fp8pass.explain(pair, models.rows(3)).counts() == PAIR
        assert inductor_config.post_grad_custom_post_pass is watch
    assert len(watch.texts) == 1


def test_an_epsilon_that_dynamic_makes_an_input() -> None:
    """Under ``dynamic=True`` Dynamo makes an input of every float attribute, epsilons too, unless
    it is told to specialise them. Then the norm is not read, but nothing else is lost."""

    class Attribute(models.Norm):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.eps = 1e-5

        def forward(self, x: Tensor) -> Tensor:
            h = x.float()
            h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
            return self.weight * h.to(x.dtype)

    model, x = models.build(models.Pair), models.rows(3)
    model.norm = Attribute(models.WIDTH).to(torch.bfloat16)
    assert fp8pass.explain(model, x).counts() == PAIR
    report = fp8pass.explain(model, x, dynamic=True)
    assert len(report.select("scaled_mm", "lowered")) == 1
    (site,) = report.select("quantize")
    assert site.status == "left" and site.code
    with torch._dynamo.config.patch(specialize_float=True):
        assert fp8pass.explain(model, x, dynamic=True).counts() == PAIR
