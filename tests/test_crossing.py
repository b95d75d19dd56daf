"""``fp8pass.graphs_for``: its graphs are those of a real compile, and nothing is left behind."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import golden_graphs
import models
import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch._inductor.fx_passes.joint_graph as joint_graph
import torch.nn.functional as F
from torch import Tensor, nn

import fp8pass
from fp8pass import graphs_for
from fp8pass.target import Target

PAIR = {("norm", "fused"): 1, ("scaled_mm", "lowered"): 1}
HOST = Target.detect("cpu").spec
ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


@pytest.fixture(autouse=True)
def start() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def pair() -> Any:
    return models.build(models.Pair)


# ---- the same as a real compile ------------------------------------------------------------------


class Attention(nn.Module):
    """Attention and a norm with a linear; constants that Inductor folds."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = models.Pair()

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(1, x.shape[0], 4, 16).transpose(1, 2)
        h = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        h = h.transpose(1, 2).reshape(x.shape) + torch.zeros_like(x)
        return self.pair(h) * torch.ones(32, dtype=x.dtype, device=x.device)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "any M"])
@pytest.mark.parametrize("recipe", models.RECIPES)
@pytest.mark.parametrize("kind", [models.Block, golden_graphs.Packed, Attention])
def test_the_graph_is_that_of_a_real_compile(
    kind: type[nn.Module], recipe: str, dynamic: bool
) -> None:
    """For the machine's own CPU, where a real compile can be watched: node for node."""
    model, x = models.build(kind, recipe), models.rows(5)
    marked = models.rows(5)
    if dynamic:
        torch._dynamo.mark_dynamic(marked, 0)
    with models.without_code(final := []):
        torch.compile(model, backend="fp8pass", fullgraph=True)(marked)
    crossed = graphs_for(model, x, target=HOST, dynamic=[0] if dynamic else None)
    assert [models.text_of(crossed.graph.after.graph)] == final


def test_the_report_is_that_of_explain(pair: Any) -> None:
    x = models.rows(3)
    crossed = graphs_for(pair, x, target=HOST).report.to_dict()
    explained = fp8pass.explain(pair, x, target=HOST).to_dict()
    for report in (crossed, explained):
        for graph in report["graphs"]:
            graph.pop("seconds")
    assert crossed == explained


# ---- an absent device ----------------------------------------------------------------------------

#: one for each device type, each unlike this machine
ABSENT = ("sm90", "gfx950", "xpu-bmg")


@pytest.mark.parametrize("target", ABSENT)
def test_everything_is_on_the_target(target: str) -> None:
    result = graphs_for(models.build(Attention), models.rows(5), target=target)
    kinds = set()
    for module in (result.graph.before, result.graph.after):
        for node in module.graph.nodes:
            values, _ = torch.utils._pytree.tree_flatten((node.meta.get("val"), node.kwargs))
            kinds |= {v.device.type for v in values if isinstance(v, Tensor)}
            kinds |= {v.type for v in values if isinstance(v, torch.device)}
    assert kinds == {Target.parse(target).device_type}
    assert result.report.counts()[("norm", "fused")] == 1
    assert result.report.graphs[0].target == result.target.spec == target
    flash = "aten._scaled_dot_product_flash_attention.default"
    assert result.calls().count(flash) == 1


def test_attention_beyond_flash_is_written_out(pair: Any) -> None:
    q = torch.randn(1, 4, 8, 16, dtype=torch.bfloat16)
    mask = torch.ones(8, 8, dtype=torch.bool)

    def masked(q: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q[:, :2], q[:, :2], mask, enable_gqa=True)

    calls = graphs_for(masked, q, mask, target="sm90").calls()
    assert not [name for name in calls if "flash" in name]
    assert calls.count("aten.bmm.default") == 2
    wide = torch.randn(1, 2, 8, 264, dtype=torch.bfloat16)
    calls = graphs_for(F.scaled_dot_product_attention, wide, wide, wide, target="sm90").calls()
    assert not [name for name in calls if "flash" in name]


@pytest.mark.parametrize("target", ABSENT)
def test_what_needs_a_device_guard(target: str) -> None:
    """Indexing, inverting, copying and random numbers, on fake tensors of a type torch lacks."""

    def function(x: Tensor, picked: Tensor) -> Tensor:
        y = x[1:, ::2].t().contiguous().t()
        y = torch.where(~(y > 0), y[picked], y)
        y = y.clone()
        y[0] = 1.0
        z = torch.randperm(4, device=x.device) + torch.rand(4, device=x.device)
        return y.index_put((picked,), y[:4] * z[:, None])

    x, picked = torch.randn(5, 8), torch.tensor([0, 1, 2, 3])
    for dynamic in (None, True):
        result = graphs_for(function, x, picked, target=target, dynamic=dynamic)
        assert result.calls()


def test_a_model_sees_the_device_of_the_target(pair: Any) -> None:
    """What a model asks of its tensors is answered as on the target."""
    seen: list[Any] = []

    def function(x: Tensor) -> Tensor:
        seen.append((x.device.type, x.is_cuda, pair.linear.weight.device.type))
        if x.is_cuda:
            return pair(x)
        return x

    assert graphs_for(function, models.rows(3), target="sm90").report.counts() == PAIR
    assert graphs_for(function, models.rows(3), target=HOST).graphs == ()


def test_products_are_decomposed_as_on_the_target() -> None:
    """Inductor decomposes a product of two vectors for a CPU, not for a GPU."""
    a, b = torch.randn(1, 32), torch.randn(32, 1)
    assert graphs_for(torch.mm, a, b, target="sm90").calls() == ["aten.mm.default"]
    assert "aten.mm.default" not in graphs_for(torch.mm, a, b, target=HOST).calls()


def test_constants_are_folded_as_on_a_present_device() -> None:
    def function(x: Tensor) -> Tensor:
        one = torch.full((8,), 2.0, device=x.device) * 0.5
        return (x * one + torch.zeros(8, device=x.device)) * 3

    here = graphs_for(function, torch.randn(4, 8), target=HOST).calls()
    for target in ABSENT:
        assert graphs_for(function, torch.randn(4, 8), target=target).calls() == here
    assert here == ["aten.mul.Tensor"]


# ---- what can be compiled ------------------------------------------------------------------------

GLOBAL = models.build(models.Pair)


def through_a_global(x: Tensor) -> Tensor:
    return through_another(x) + 1


def through_another(x: Tensor) -> Tensor:
    return GLOBAL(x)


class Holder:
    """No module itself, but it has one."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def method(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out

    __call__ = method


def forms(pair: nn.Module) -> dict[str, Callable[..., Any]]:
    """Callables that use the model, each in its own way."""

    def default(x: Tensor, model: nn.Module = pair) -> Tensor:
        return model(x)

    def listed(models: list[nn.Module], x: Tensor) -> Tensor:
        return models[0](x)

    return {
        "module": pair,
        "closure": lambda x: pair(x),
        "nested": lambda x: (lambda y: pair(y))(x),
        "global": through_a_global,
        "default": default,
        "partial": functools.partial(listed, [pair]),
        "method": Holder(pair).method,
        "object": Holder(pair),
        "compiled module": torch.compile(pair),
        "compiled function": torch.compile(through_a_global),
        "forward": pair.forward,
    }


@pytest.mark.parametrize("form", forms(nn.Identity()))
def test_modules_and_functions(form: str, pair: Any) -> None:
    result = graphs_for(forms(pair)[form], models.rows(3), target="sm90")
    assert result.report.counts() == PAIR
    assert type(pair.linear.weight) is type(GLOBAL.linear.weight) is Tensor


def test_inputs_of_any_structure(pair: Any) -> None:
    def function(inputs: dict[str, list[Tensor]], *, shift: float, other: Tensor) -> Tensor:
        return pair(inputs["x"][0]) * shift + other

    other = torch.ones(32, dtype=torch.bfloat16)
    result = graphs_for(
        function, {"x": [models.rows(3)]}, target="sm90", kwargs={"shift": 2.0, "other": other}
    )
    assert result.report.counts() == PAIR


def test_views_keep_strides_and_offset() -> None:
    base = torch.randn(8, 32)
    x = base[1:, 3:19]

    def function(x: Tensor) -> Tensor:
        return x + 1

    (node,) = graphs_for(function, x, target="sm90").graph.before.graph.find_nodes(op="placeholder")
    value = node.meta["val"]
    assert (tuple(value.stride()), value.storage_offset()) == (x.stride(), x.storage_offset())


def test_tied_parameters_stay_one_input() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    graph = graphs_for(Tied(), torch.randn(2, 8), target="sm90").graph
    assert sorted(graph.inputs.values()) == ["a.weight", "x"]


def test_graph_breaks_give_several_graphs(pair: Any) -> None:
    def broken(x: Tensor) -> Tensor:
        y = pair(x)
        torch._dynamo.graph_break()
        y = y + torch.zeros(32, device=x.device)
        torch._dynamo.graph_break()
        return y * pair(x + 1)

    result = graphs_for(broken, models.rows(3), target="sm90")
    assert len(result.graphs) == 3
    assert result.report.counts() == {("norm", "fused"): 2, ("scaled_mm", "lowered"): 2}
    assert len({graph.name for graph in result.graphs}) == 3
    assert result.calls() == [name for graph in result.graphs for name in graph.calls()]
    assert all(
        f"{graph.name} after fp8pass, for sm90\n" in result.text() for graph in result.graphs
    )
    with pytest.raises(fp8pass.Fp8PassError, match="3 graphs, not one"):
        result.graph  # noqa: B018


def test_nothing_to_capture() -> None:
    result = graphs_for(lambda x: 3, models.rows(3), target="sm90")
    assert result.graphs == () and result.report.sites == []
    assert "no graph was captured" in result.report.note


def test_sites_know_their_modules(pair: Any) -> None:
    block = models.build()
    sites = graphs_for(block, models.rows(3), target="sm90").report.select("scaled_mm")
    assert {site.where.split()[0] for site in sites} == {
        f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")
    }


# ---- sizes ---------------------------------------------------------------------------------------


def test_dynamic_sizes(pair: Any) -> None:
    x = models.rows(3)
    for dynamic in (True, [0], [-2]):
        result = graphs_for(pair, x, target="sm90", dynamic=dynamic)
        (site,) = result.report.select("scaled_mm")
        assert site.shape == "2-x32x64"
        assert "bfloat16[s0, 64]" in result.text()
    (site,) = graphs_for(pair, x, target="sm90").report.select("scaled_mm")
    assert site.shape == "3x32x64"


def test_a_dim_that_cannot_be_dynamic(pair: Any) -> None:
    with pytest.raises(fp8pass.OptionError, match="dynamic dim 2: no input has it"):
        graphs_for(pair, models.rows(3), target="sm90", dynamic=[2])
    with pytest.raises(fp8pass.Fp8PassError, match=r"symbolic is not:.*size\(\)\[1\]"):
        graphs_for(pair, models.rows(3), target="sm90", dynamic=[1])


# ---- what cannot be had --------------------------------------------------------------------------


def test_the_value_of_a_tensor(pair: Any) -> None:
    def item(x: Tensor) -> Tensor:
        return pair(x) * float(x.sum())

    def branch(x: Tensor) -> Tensor:
        return pair(x) if x.sum() > 0 else x

    for function in (item, branch):
        with pytest.raises(fp8pass.Fp8PassError, match="asks for the value of a tensor"):
            graphs_for(function, models.rows(3), target="sm90")


def test_a_tensor_that_does_not_move_with_the_model(pair: Any) -> None:
    constant = torch.ones(32, dtype=torch.bfloat16)
    with pytest.raises(fp8pass.Fp8PassError, match=r"mixes devices.*test_crossing.py:\d+.*cuda"):
        graphs_for(lambda x: pair(x) + constant, models.rows(3), target="sm90")
    assert graphs_for(lambda x: pair(x) + constant, models.rows(3), target=HOST).graphs


def test_tensors_that_are_not_plain() -> None:
    class Sub(Tensor):
        pass

    model = nn.Linear(8, 8)
    model.weight = nn.Parameter(torch.randn(8, 8).as_subclass(Sub))
    with pytest.raises(fp8pass.Fp8PassError, match=r"Linear.weight is a .*only plain tensors"):
        graphs_for(model, torch.randn(2, 8), target="sm90")
    assert isinstance(model.bias, nn.Parameter) and model.bias.device.type == "cpu"
    with pytest.raises(fp8pass.Fp8PassError, match="an input is a torch.sparse_coo tensor"):
        graphs_for(lambda x: x + 1, torch.eye(3).to_sparse(), target="sm90")


def test_bad_targets_and_options(pair: Any) -> None:
    x = models.rows(3)
    with pytest.raises(fp8pass.OptionError, match="'sn90'.*sm90"):
        graphs_for(pair, x, target="sn90")
    with pytest.raises(fp8pass.OptionError, match="'colour'"):
        graphs_for(pair, x, target="sm90", colour=1)
    with pytest.raises(fp8pass.NoKernelError, match="cpu"):
        graphs_for(pair, x, target="sm90", force="cpu")
    assert graphs_for(pair, x, target=Target.parse("sm90"), disable="triton_skinny").graphs


def test_without_a_compiler_for_the_guard(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's device type has no guard in any torch that runs here, unless it is made."""
    from fp8pass import absent_device

    if torch.xpu._is_compiled():
        pytest.skip("this torch has a guard for it")
    monkeypatch.setattr(absent_device, "_guard_library", lambda: (None, "no C++ compiler found"))
    with pytest.raises(fp8pass.Fp8PassError, match=r"nothing of xpu devices.*no C\+\+ compiler"):
        graphs_for(pair, models.rows(3), target="xpu-bmg")
    assert graphs_for(pair, models.rows(3), target=HOST).graphs, "where it is not needed"


# ---- nothing is left behind ----------------------------------------------------------------------


def state() -> list[Any]:
    """What a trace changes for its duration."""
    return [
        *(dict(c.get_config_copy()) for c in (inductor_config, functorch_config)),
        torch.is_grad_enabled(),
        joint_graph.constant_fold_uniform_value,
        dict(ATTENTION.py_kernels),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
    ]


@pytest.mark.parametrize("way", ["done", "an error of the model", "an error of fp8pass"])
@pytest.mark.parametrize("target", ["xpu-bmg", "sm90", HOST])
def test_nothing_is_left_behind(target: str, way: str, pair: Any) -> None:
    def model(x: Tensor) -> Tensor:
        return pair(x) @ x if way == "an error of the model" else pair(x[:])

    options = {"force": "cpu_prepared"} if way == "an error of fp8pass" else {}
    before, x = state(), models.rows(3)
    modules = list(pair.modules())
    tensors = [(dict(m._parameters), dict(m._buffers)) for m in modules]
    values = copy.deepcopy(pair.state_dict())
    if way == "done":
        graphs_for(model, x, target=target, **options)
    else:
        with pytest.raises(Exception):  # noqa: B017
            graphs_for(model, x, target=target, **options)
    assert state() == before
    for module, (parameters, buffers) in zip(modules, tensors, strict=True):
        for now, then in ((module._parameters, parameters), (module._buffers, buffers)):
            assert list(now) == list(then) and all(now[name] is then[name] for name in then)
    for name, value in pair.state_dict().items():
        assert torch.equal(value.float(), values[name].float())
    if target == "xpu-bmg" and not torch.xpu._is_compiled():
        from torch._subclasses import FakeTensorMode

        from fp8pass.absent_device import fake_like

        fake = fake_like(FakeTensorMode(), torch.empty(2), torch.device("xpu"))
        with pytest.raises(RuntimeError, match="not linked with support for xpu"):
            fake[0:1]


def test_the_model_compiles_and_runs_here_afterwards(pair: Any) -> None:
    x = models.rows(4)
    graphs_for(pair, x, target="sm90")
    result, _ = models.run(pair, x, backend="fp8pass")
    assert models.distance(result, models.reference(pair, x)) < models.CLOSE


def test_the_same_every_time(pair: Any) -> None:
    block = models.build()
    texts = {graphs_for(block, models.rows(3), target="sm90").text("before") for _ in range(2)}
    graphs_for(pair, models.rows(4), target="gfx950", dynamic=True)
    texts.add(graphs_for(block, models.rows(3), target="sm90").text("before"))
    assert len(texts) == 1


def test_two_threads(pair: Any) -> None:
    targets = ["sm90", "xpu-bmg", "gfx950", HOST] * 2
    found: dict[int, Any] = {}

    def work(i: int) -> None:
        found[i] = graphs_for(pair, models.rows(3), target=targets[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(targets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i].target.spec for i in range(len(targets))] == targets
    assert found[0].calls() == found[4].calls() and found[3].calls() == found[7].calls()


def test_a_pass_of_the_user_is_chained_and_kept(pair: Any) -> None:
    joint, post = models.Watch(), models.Watch()
    with inductor_config.patch(joint_custom_pre_pass=joint, post_grad_custom_post_pass=post):
        assert graphs_for(pair, models.rows(3), target="sm90").report.counts() == PAIR
    assert len(joint.texts) == len(post.texts) == 1
