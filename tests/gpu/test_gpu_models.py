"""Whole models on a GPU: numbers, sites, CUDA graphs, batches of any size.

Random weights in the shapes of SmolLM2-135M (fewer layers) and Llama-3-8B (two layers), built by
the demo's Llama, so that nothing has to be downloaded.
"""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fp8pass
from fp8pass.demo.tiny import MLP, RMSNorm, TinyConfig, TinyLlama
from fp8pass.nn import Fp8Linear, calibrate, quantize_
from fp8pass.report import Report, reports
from fp8pass.report.collector import clear

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: these tests check hardware"
)

DEVICE = "cuda"
SHAPES = {
    "smollm2": TinyConfig(576, 1536, 4, 9, 3, 4096),
    "llama-3-8b": TinyConfig(4096, 14336, 2, 32, 8, 1024),
}
RECIPES = ("dynamic", "static")
#: A relative distance of one unit in the last place of every element, on average.
ULP = torch.finfo(torch.bfloat16).eps / 2
#: Two right ways to run a model are as far apart as its quantisation errors; wrong or old data
#: give distances about 1.
SAME = 0.2
PRODUCERS = {"triton"}
PRODUCTS = {"triton_skinny", "triton_general", "torch_tensor", "torch_row", "torch_channel"}


@pytest.fixture(scope="module", autouse=True)
def own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is compiled here is compiled now, but each graph only once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(autouse=True)
def start() -> Iterator[None]:
    """Nothing compiled before, no gradients."""
    clear()
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


# ---- models --------------------------------------------------------------------------------------


def initialised(model: nn.Module) -> Any:
    """``model`` in bf16 with weights that keep activations near 1."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            else:
                parameter.uniform_(0.5, 1.5)
    return model.to(torch.bfloat16).eval()


def llama(shape: str, recipe: str) -> TinyLlama:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model: TinyLlama = initialised(TinyLlama(SHAPES[shape]))
    quantised(model, recipe, tokens(4, 64, SHAPES[shape].vocab_size, seed=5))
    return model


def quantised(model: nn.Module, recipe: str, sample: Tensor) -> None:
    calibration = None
    if recipe == "static":
        calibration = calibrate(model, [sample], progress=False)
    summary = quantize_(model, recipe, calibration=calibration, progress=False)
    assert summary.layers and set(summary.skipped) <= {"lm_head"}


def tokens(batch: int, length: int, vocabulary: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (batch, length), generator=generator).to(DEVICE)


def ideal(model: nn.Module, value: Tensor) -> Tensor:
    """The model in float64 with its quantises, but no rounding to bf16."""
    wide = copy.deepcopy(model).double()
    for module in wide.modules():
        if isinstance(module, Fp8Linear):
            module.forward = models._forward64.__get__(module)  # type: ignore[method-assign]
        elif isinstance(module, RMSNorm):
            module.forward = models._norm64.__get__(module)  # type: ignore[method-assign]
    with torch.no_grad():
        result: Tensor = wide(value.double() if value.is_floating_point() else value)
    return result


@dataclass
class Case:
    """A model, an input, and the distance from float64 that eager and stock Inductor allow."""

    model: TinyLlama
    ids: Tensor
    wanted: Tensor
    allowed: float

    def counts(self) -> dict[tuple[str, str], int]:
        layers = self.model.config.num_hidden_layers
        return {
            ("norm", "fused"): 2 * layers,
            ("norm", "left"): 1,  # before the head, which is not FP8
            ("activation", "fused"): layers,
            ("quantize", "left"): layers,  # of what attention returns
            ("scaled_mm", "lowered"): 7 * layers,
        }

    def check_sites(self, report: Report) -> None:
        assert report.counts() == self.counts(), report.table()
        fused = report.select(status="fused")
        assert {site.kernel for site in fused} == PRODUCERS, report.table()
        assert {site.kernel for site in report.select("scaled_mm")} <= PRODUCTS, report.table()
        norms = [site for site in fused if site.kind == "norm"]
        layers = self.model.config.num_hidden_layers
        assert Counter(site.readers for site in norms) == {3: layers, 2: layers}  # qkv; gate, up


@pytest.fixture(scope="module", params=[(s, r) for s in SHAPES for r in RECIPES], ids="-".join)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    shape, recipe = request.param
    model = llama(shape, recipe)
    ids = tokens(3, 40, model.config.vocab_size)
    torch._dynamo.reset()
    with torch.no_grad():
        eager = model(ids)
        stock = torch.compile(model, fullgraph=True)(ids)
        wanted = ideal(model, ids)
    largest = max(models.distance(eager, wanted), models.distance(stock, wanted))
    assert 0 < largest < SAME  # the reference is one of this very model
    yield Case(model, ids, wanted, 1.1 * largest + ULP)
    del model, eager, stock
    gc.collect()
    torch.cuda.empty_cache()


def ours(model: Any, numerics: str = "exact") -> Any:
    """``model`` compiled by the backend, any failure of the pass raised."""
    options = {"fp8pass.strict": True, "fp8pass.numerics": numerics}
    return torch.compile(model, backend=fp8pass.fp8pass_backend, fullgraph=True, options=options)


# ---- numbers and sites ---------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_numbers_and_sites(case: Case, numerics: str, record_property: Any) -> None:
    function = ours(case.model, numerics)
    result = function(case.ids)
    case.check_sites(reports()[-1])
    assert (result.dtype, result.shape) == (torch.bfloat16, case.wanted.shape)
    error = models.distance(result, case.wanted)
    record_property("distance, allowed", f"{error:.4f}, {case.allowed:.4f}")
    assert error <= case.allowed
    for _ in range(3):
        assert torch.equal(function(case.ids), result)


def test_as_an_option_of_inductor(case: Case) -> None:
    options = fp8pass.inductor_options(strict=True)
    result = torch.compile(case.model, fullgraph=True, options=options)(case.ids)
    report = reports()[-1]
    (record,) = report.graphs
    assert (record.hook, record.source) == ("post_grad", "post_joint")
    case.check_sites(report)
    assert models.distance(result, case.wanted) <= case.allowed


def test_explain_says_what_a_compile_does(case: Case) -> None:
    case.check_sites(fp8pass.explain(case.model, case.ids, strict=True))


# ---- CUDA graphs ---------------------------------------------------------------------------------


def changed(case: Case) -> Iterator[tuple[Tensor, Tensor]]:
    """Other inputs of the same shape, with what the uncompiled model makes of them."""
    for seed in (11, 12, 13):
        ids = tokens(*case.ids.shape, case.model.config.vocab_size, seed=seed)
        yield ids, case.model(ids)


def test_a_captured_graph_replays_with_changed_data(case: Case) -> None:
    function = ours(case.model)
    ids = case.ids.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            before = function(ids)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(ids)
    for new, wanted in changed(case):
        ids.copy_(new)
        out.fill_(float("nan"))
        graph.replay()
        assert models.distance(out, wanted) < SAME
        assert models.distance(before, wanted) > 2 * SAME
        first = out.clone()
        graph.replay()
        assert torch.equal(out, first)


@pytest.mark.parametrize("hook", ["backend", "option"])
def test_reduce_overhead_replays_with_changed_data(
    case: Case, hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.cudagraph_trees import get_manager

    counters.clear()
    if hook == "backend":  # torch takes mode= or options=, not both
        monkeypatch.setenv("FP8PASS_STRICT", "1")
        function = torch.compile(
            case.model, backend=fp8pass.fp8pass_backend, fullgraph=True, mode="reduce-overhead"
        )
    else:
        options = fp8pass.inductor_options({"triton.cudagraphs": True}, strict=True)
        function = torch.compile(case.model, fullgraph=True, options=options)
    for _ in range(3):  # warm up, record, replay
        torch.compiler.cudagraph_mark_step_begin()
        function(case.ids)
    for new, wanted in changed(case):
        torch.compiler.cudagraph_mark_step_begin()
        assert models.distance(function(new), wanted) < SAME
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert get_manager(torch.cuda.current_device(), create_if_none_exists=False) is not None
    case.check_sites(reports()[-1])


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_compile_for_all_batches(recipe: str) -> None:
    model = llama("smollm2", recipe)
    function = ours(model)
    counters.clear()
    first = tokens(3, 16, 4096)
    torch._dynamo.mark_dynamic(first, 0)
    function(first)
    for batch in (2, 5, 8, 7, 19, 3):  # 32 to 304 rows
        ids = tokens(batch, 16, 4096, seed=batch)
        wanted = ideal(model, ids)
        allowed = 1.5 * models.distance(model(ids), wanted) + ULP
        assert models.distance(function(ids), wanted) <= allowed
    assert counters["stats"]["unique_graphs"] == 1
    # a size of 1 is a constant to torch: it compiles for that by itself
    ids = tokens(1, 16, 4096)
    assert models.distance(function(ids), model(ids)) < SAME
    assert counters["stats"]["unique_graphs"] == 2
    for report in reports():
        assert report.counts()["scaled_mm", "lowered"] == 28
        assert {site.kernel for site in report.select(status="fused")} == PRODUCERS


class Rows(nn.Module):
    """Norms and MLPs on ``[M, hidden]``, without attention."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.norms = nn.ModuleList(
            RMSNorm(config.hidden_size, config.rms_norm_eps)
            for _ in range(config.num_hidden_layers)
        )
        self.mlps = nn.ModuleList(MLP(config) for _ in self.norms)

    def forward(self, x: Tensor) -> Tensor:
        for norm, mlp in zip(self.norms, self.mlps, strict=True):
            x = x + mlp(norm(x))
        return x


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_1_to_300_rows_in_one_function(recipe: str, numerics: str) -> None:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = initialised(Rows(TinyConfig(1024, 2816, 2)))
        x = torch.randn(300, 1024).to(torch.bfloat16)
    quantised(model, recipe, x)
    wanted, eager = ideal(model, x), model(x)
    function = ours(model, numerics)
    counters.clear()
    first = x[:17].clone()
    torch._dynamo.mark_dynamic(first, 0)
    function(first)
    usual = models.distance(eager, wanted)
    numbers = (2, 3, 8, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 200, 255, 257, 300)
    results = {m: function(x[:m].clone()) for m in numbers}
    assert counters["stats"]["unique_graphs"] == 1
    results[1] = function(x[:1].clone())
    assert counters["stats"]["unique_graphs"] <= 2
    for m, result in results.items():
        assert result.shape == (m, 1024)
        # few rows scatter more than many
        assert models.distance(result, wanted[:m]) <= 2 * usual + 0.02, m
    assert models.distance(results[300], wanted) <= 1.1 * usual + ULP
    expected = {("norm", "fused"): 2, ("activation", "fused"): 2, ("scaled_mm", "lowered"): 6}
    for report in reports():
        assert report.counts() == expected, report.table()
