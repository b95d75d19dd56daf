"""fp8pass.nn: numbers against float64, shared input scales, what quantize_ takes and leaves."""

from __future__ import annotations

import copy
import gc
import io
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn

from fp8pass import progress as progress_module
from fp8pass.calibration import _tensor_key
from fp8pass.errors import OptionError, UnsupportedError
from fp8pass.nn import RECIPES, Calibration, Fp8Linear, Recipe, calibrate, quantize_

FP8 = torch.float8_e4m3fn
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Unit roundoff of the output dtype; a float32 result also sums in float32.
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def make(recipe: str, n: int = 48, k: int = 32, bias: bool = True, dtype: Any = torch.bfloat16):
    linear = nn.Linear(k, n, bias=bias).to(dtype)
    scale = 4.0 / 448 if recipe == "static" else None
    return linear, Fp8Linear.from_linear(linear, recipe, scale)


def codes_and_scale(x2: torch.Tensor, layer: Fp8Linear) -> tuple[torch.Tensor, torch.Tensor]:
    """The quantise of the recipe, spelled in float64 where that changes no number."""
    xf = x2.float()
    if layer.recipe == "static":
        scale = layer.input_scale
    elif layer.recipe == "dynamic":
        scale = torch.stack([(row.abs().max() / 448).clamp(min=1e-12) for row in xf])[:, None]
    else:
        scale = (xf.abs().max() / 448).clamp(min=1e-12)
    return (xf / scale).clamp(-448, 448).to(FP8), scale


def reference(x: torch.Tensor, layer: Fp8Linear) -> torch.Tensor:
    """The layer in float64: dequantise both sides, multiply, add the bias."""
    q, scale = codes_and_scale(x.reshape(-1, layer.in_features), layer)
    weight_scale = layer.weight_scale.double()
    out = (q.double() * scale.double()) @ layer.weight.double().t() * weight_scale
    if layer.bias is not None:
        out = out + layer.bias.double()
    return out.reshape(*x.shape[:-1], layer.out_features)


def assert_close_to_reference(x: torch.Tensor, layer: Fp8Linear) -> None:
    out, ref = layer(x), reference(x, layer)
    assert out.dtype == x.dtype and out.shape == ref.shape and out.is_contiguous()
    bound = ROUNDOFF[x.dtype] * ref.abs().max().clamp(min=1e-30)
    assert (out.double() - ref).abs().max() <= bound


# -- the linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_forward_against_float64(recipe: str, dtype: torch.dtype, bias: bool) -> None:
    _, layer = make(recipe, bias=bias, dtype=dtype)
    assert_close_to_reference(torch.randn(5, 32, dtype=dtype), layer)


@pytest.mark.parametrize("shape", [(32,), (1, 32), (3, 32), (2, 3, 32), (2, 1, 3, 32)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_any_batch_rank(recipe: str, shape: tuple[int, ...]) -> None:
    _, layer = make(recipe)
    assert_close_to_reference(torch.randn(shape, dtype=torch.bfloat16), layer)


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32), (0, 3, 32)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_empty_batch(recipe: str, shape: tuple[int, ...]) -> None:
    _, layer = make(recipe)
    out = layer(torch.randn(shape, dtype=torch.bfloat16))
    assert out.shape == (*shape[:-1], 48) and out.dtype == torch.bfloat16


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("n,k", [(5, 7), (16, 1), (1, 16)])
def test_odd_sizes(recipe: str, n: int, k: int) -> None:
    _, layer = make(recipe, n, k)
    assert_close_to_reference(torch.randn(3, k, dtype=torch.bfloat16), layer)


@pytest.mark.parametrize("recipe", RECIPES)
def test_non_contiguous_inputs(recipe: str) -> None:
    _, layer = make(recipe)
    base = torch.randn(2, 4, 64, dtype=torch.bfloat16)
    for x in (
        base[:, :, 16:48],
        base[:, :, ::2],
        base[:, ::2, :32],
        torch.randn(32, 6, dtype=torch.bfloat16).t(),
        torch.randn(4, 2, 32, dtype=torch.bfloat16).transpose(0, 1),
        torch.randn(1, 32, dtype=torch.bfloat16).expand(5, 32),
    ):
        assert_close_to_reference(x, layer)
        assert torch.equal(layer(x), layer(x.contiguous()))


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantised_is_near_the_float_linear(recipe: str) -> None:
    linear, layer = make(recipe, n=64, k=256, dtype=torch.float32)
    x = torch.randn(32, 256).clamp(-4, 4)
    relative = (layer(x) - linear(x)).norm() / linear(x).norm()
    assert relative < 0.06  # two roundings to 3 mantissa bits, 2.6 % each


def test_special_values_saturate_and_nan_stays() -> None:
    _, layer = make("static", bias=False)
    x = torch.zeros(3, 32, dtype=torch.bfloat16)
    x[0, 0], x[1, 0], x[2, 0] = 1e30, float("inf"), float("nan")
    out = layer(x)
    assert torch.equal(out[0], out[1]) and out[:2].isfinite().all() and out[2].isnan().all()


def test_all_zero_rows_give_zero() -> None:
    for recipe in RECIPES:
        _, layer = make(recipe, bias=False)
        assert (layer(torch.zeros(2, 32, dtype=torch.bfloat16)) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_weight_quantisation(recipe: str, dtype: torch.dtype) -> None:
    linear = nn.Linear(32, 48).to(dtype)
    linear.weight[3] = 0
    layer = Fp8Linear.from_linear(linear, recipe, 1.0 if recipe == "static" else None)
    w = linear.weight.float()
    amax = w.abs().amax(1, keepdim=True) if recipe == "dynamic" else w.abs().amax()
    scale = (amax / 448).clamp(min=1e-12)
    assert layer.weight.dtype == FP8 and layer.weight.is_contiguous()
    assert layer.weight_scale.dtype == torch.float32 and layer.weight_scale.is_contiguous()
    assert layer.weight_scale.shape == ((1, 48) if recipe == "dynamic" else ())
    assert torch.equal(layer.weight_scale.flatten(), scale.flatten())
    assert torch.equal(layer.weight.float(), (w / scale).to(FP8).float())
    assert (layer.weight[3].float() == 0).all()
    assert layer.bias is not None and layer.bias.dtype == dtype


def test_from_linear_leaves_the_linear_and_keeps_the_mode() -> None:
    linear, _ = make("dynamic")
    before = linear.weight.clone()
    layer = Fp8Linear.from_linear(linear.eval(), "dynamic")
    assert not layer.training and torch.equal(linear.weight, before)
    assert layer.bias is not None and linear.bias is not None
    assert layer.bias.data_ptr() != linear.bias.data_ptr()


def test_made_in_inference_mode_is_usable_outside() -> None:
    with torch.inference_mode():
        linear = nn.Linear(32, 48)
        layer = Fp8Linear.from_linear(linear, "dynamic")
    assert not any(buffer.is_inference() for buffer in layer.buffers())
    layer(torch.randn(2, 32))


def test_clear_errors() -> None:
    linear, layer = make("dynamic")
    with pytest.raises(OptionError, match="'int4'.*'static', 'dynamic', 'dynamic_tensor'"):
        Fp8Linear.from_linear(linear, "int4")
    with pytest.raises(OptionError, match="needs input_scale"):
        Fp8Linear.from_linear(linear, "static")
    with pytest.raises(OptionError, match="computes its input scale"):
        Fp8Linear.from_linear(linear, "dynamic", 1.0)
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(OptionError, match="finite and greater than 0"):
            Fp8Linear.from_linear(linear, "static", bad)
    with pytest.raises(UnsupportedError, match="meta device"):
        Fp8Linear.from_linear(nn.Linear(4, 4, device="meta"), "dynamic")
    with pytest.raises(UnsupportedError, match="float64"):
        Fp8Linear.from_linear(nn.Linear(4, 4).double(), "dynamic")
    linear.weight[0, 0] = float("nan")
    with pytest.raises(UnsupportedError, match="not finite"):
        Fp8Linear.from_linear(linear, "dynamic")
    with pytest.raises(UnsupportedError, match="float64.*allowed"):
        layer(torch.randn(2, 32, dtype=torch.float64))
    with pytest.raises(UnsupportedError, match=r"\(2, 16\).*32"):
        layer(torch.randn(2, 16))
    with pytest.raises(UnsupportedError, match="last dim"):
        layer(torch.randn(0, 16))  # a reshape would take it


def test_gradient_is_refused_by_torch_not_dropped() -> None:
    _, layer = make("dynamic")
    with torch.enable_grad():
        out = layer(torch.randn(2, 32, requires_grad=True))
        with pytest.raises(RuntimeError, match="derivative for aten::_scaled_mm"):
            out.sum().backward()


def test_recipe_lookup() -> None:
    assert Recipe.get(RECIPES["static"]) is Recipe.get("static")
    assert str(RECIPES["dynamic"].act) == "float8_e4m3fn/dynamic/token"
    assert str(RECIPES["dynamic"].weight) == "float8_e4m3fn/static/channel"
    assert "recipe='dynamic'" in repr(make("dynamic")[1])


# -- converting, copying, loading


@pytest.mark.parametrize("recipe", RECIPES)
def test_to_dtype_changes_the_bias_alone(recipe: str) -> None:
    _, layer = make(recipe)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    for convert in (
        lambda m: m.to(torch.float16),
        lambda m: m.half(),
        lambda m: m.type("torch.HalfTensor"),
    ):
        convert(layer)
        for name, buffer in layer.named_buffers():
            want = torch.float16 if name == "bias" else before[name].dtype
            assert buffer.dtype == want, name
            assert torch.equal(buffer.float(), before[name].to(want).float())
    assert_close_to_reference(torch.randn(3, 32, dtype=torch.float16), layer)
    assert layer.double().weight.dtype == FP8
    assert layer.to("meta").weight.dtype == FP8 and layer.weight_scale.dtype == torch.float32


@pytest.mark.parametrize("recipe", RECIPES)
def test_deepcopy_and_pickle(recipe: str) -> None:
    _, layer = make(recipe)
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(file, weights_only=False),
    ):
        assert torch.equal(other(x), layer(x))
        assert other.weight.data_ptr() != layer.weight.data_ptr()


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_state_dict_into_a_skeleton(recipe: str, assign: bool) -> None:
    _, layer = make(recipe)
    skeleton = Fp8Linear(32, 48, recipe, bias=True, dtype=torch.bfloat16)
    skeleton.load_state_dict(layer.state_dict(), assign=assign)
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    assert torch.equal(skeleton(x), layer(x))


def test_meta_skeleton_is_filled_by_assign() -> None:
    _, layer = make("static")
    skeleton = Fp8Linear(32, 48, "static", bias=True, device="meta")
    state = layer.state_dict()
    state["weight_scale"] = state["weight_scale"].to(torch.bfloat16)
    state["weight"] = state["weight"].t().contiguous().t()
    skeleton.load_state_dict(state, assign=True)
    assert skeleton.weight_scale.dtype == torch.float32 and skeleton.weight.is_contiguous()


def test_float_checkpoint_is_refused() -> None:
    linear, layer = make("dynamic_tensor")
    before = layer.weight.clone()
    with pytest.raises(RuntimeError, match="before quantize_"):
        layer.load_state_dict({**layer.state_dict(), "weight": linear.weight})
    assert torch.equal(layer.weight.float(), before.float())


# -- a model


class Block(nn.Module):
    """Attention and MLP of a Llama layer, without what does not matter here."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, 16, bias=False)
        self.v_proj = nn.Linear(width, 16, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.gate_proj = nn.Linear(width, 48, bias=False)
        self.up_proj = nn.Linear(width, 48, bias=False)
        self.down_proj = nn.Linear(48, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        attention = self.q_proj(h) * torch.cat([self.k_proj(h), self.v_proj(h)], -1)
        x = x + self.o_proj(attention)
        h = self.norm(x)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(h)) * self.up_proj(h))


class Model(nn.Module):
    def __init__(self, tied: bool = True, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.lm_head = nn.Linear(32, 64, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


IDS = torch.arange(10).reshape(2, 5)
SHARED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def static_model(**arguments: Any) -> Model:
    model = Model(**arguments)
    quantize_(model, "static", calibration=calibrate(model, [IDS]))
    return model


def assert_shared(model: Model, shared: bool = True) -> None:
    for block in model.layers:
        for names in SHARED:
            scales = {id(getattr(block, name).input_scale) for name in names}
            assert len(scales) == (1 if shared else len(names))
        assert block.q_proj.input_scale is not block.gate_proj.input_scale
    assert model.layers[0].q_proj.input_scale is not model.layers[1].q_proj.input_scale


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantize_model(recipe: str) -> None:
    model = Model()
    want = model(IDS)
    calibration = calibrate(model, [IDS]) if recipe == "static" else None
    embed = model.embed.weight
    summary = quantize_(model, recipe, calibration=calibration)
    assert summary.layers == 14 == sum(isinstance(m, Fp8Linear) for m in model.modules())
    assert set(summary.skipped) == {"lm_head"} and "skip" in summary.skipped["lm_head"]
    assert model.lm_head.weight is embed is model.embed.weight
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, Fp8Linear))
    saved = summary.bytes_before - summary.bytes_after
    assert 2.7 * weights < saved <= 3 * weights  # the scales are the rest
    assert "14 linears" in str(summary)
    assert (model(IDS) - want).norm() / want.norm() < 0.1
    again = quantize_(model, recipe, calibration=calibration)
    assert again.layers == 0 and again.bytes_before == again.bytes_after == summary.bytes_after
    assert len(again.skipped) == 15 and "already FP8" in again.skipped["layers.0.q_proj"]


def test_calibration_sees_the_maximum_over_batches_and_the_groups() -> None:
    model = Model()
    batches = [IDS, torch.arange(50, 64)]
    seen: list[float] = []
    handle = model.layers[1].down_proj.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].abs().max().item())
    )
    model.train()
    model.layers[0].eval()
    calibration = calibrate(model, batches)
    handle.remove()
    assert calibration.amax["layers.1.down_proj"] == max(seen) and len(seen) == 2
    assert set(calibration.groups) == {
        tuple(f"layers.{i}.{name}" for name in names) for i in (0, 1) for names in SHARED
    }
    assert model.training and not model.layers[0].training  # modes are put back
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert Calibration(**json.loads(json.dumps(asdict(calibration)))).amax == calibration.amax


@pytest.mark.parametrize(
    "inputs",
    [
        IDS,
        [IDS],
        [(IDS,)],
        [{"ids": IDS}],
        {"ids": IDS},
        lambda model: model(IDS),
        (ids for ids in [IDS]),
    ],
    ids=["tensor", "list", "tuples", "mappings", "mapping", "callable", "generator"],
)
def test_calibration_inputs(inputs: Any) -> None:
    torch.manual_seed(1)
    assert len(calibrate(Model(), inputs).groups) == 4


def test_calibration_in_inference_mode_and_of_a_compiled_model() -> None:
    model = Model()
    with torch.inference_mode():
        assert len(calibrate(model, [IDS]).groups) == 4
    assert len(calibrate(torch.compile(model, backend="eager"), [IDS]).groups) == 4


def test_calibration_errors() -> None:
    model = Model()
    with pytest.raises(OptionError, match="int"):
        calibrate(model, 3)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="str"):
        calibrate(model, ["text"])
    with pytest.raises(OptionError, match="no nn.Linear"):
        calibrate(model, [])
    assert not any(m._forward_pre_hooks for m in model.modules())


class TwoReaders(nn.Module):
    """Two linears behind a function that says what each one reads."""

    def __init__(self, feed: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.a, self.b, self.feed = nn.Linear(8, 8), nn.Linear(8, 8), feed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, y = self.feed(x)
        return self.a(x) + self.b(y)


@pytest.mark.parametrize(
    "feed,same",
    [
        (lambda x: (x, x), True),
        (lambda x: (x.view(-1, 8), x.view(-1, 8)), True),  # two views of one tensor
        (lambda x: (x, x.clone()), False),
        (lambda x: (x[:2], x[2:]), False),
        (lambda x: (x, x.view(2, 2, 8)), False),
    ],
    ids=["same", "views", "equal", "parts", "shapes"],
)
def test_only_the_same_tensor_counts(feed: Any, same: bool) -> None:
    model = TwoReaders(feed)
    if model.a(feed(torch.ones(4, 8))[0]).shape != model.b(feed(torch.ones(4, 8))[1]).shape:
        model.forward = lambda x: (model.a(feed(x)[0]), model.b(feed(x)[1]))  # type: ignore
    assert bool(calibrate(model, [torch.randn(4, 8)]).groups) == same


def test_written_in_place_is_another_tensor() -> None:
    class InPlace(TwoReaders):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.a(x)
            return first + self.b(x.mul_(2))

    calibration = calibrate(InPlace(lambda x: (x, x)), [torch.randn(4, 8)])
    assert not calibration.groups and calibration.amax["b"] == 2 * calibration.amax["a"]


def test_same_once_but_not_always_is_not_shared() -> None:
    model = TwoReaders(lambda x: (x, x if x.shape[0] == 4 else x + 0))
    assert calibrate(model, [torch.randn(4, 8)]).groups
    assert not calibrate(model, [torch.randn(4, 8), torch.randn(3, 8)]).groups


def test_memory_that_is_used_again_is_not_the_same_tensor() -> None:
    keys = []
    for _ in range(200):  # freed and allocated again: the data address repeats, the key may not
        x = torch.randn(64, 64)
        keys.append((x.data_ptr(), _tensor_key(x)))
        del x
        gc.collect(0)
    assert len({address for address, _ in keys}) < 200
    assert len({key for _, key in keys}) == 200


def test_static_scales_are_shared_in_the_model() -> None:
    assert_shared(static_model())


def graph_of(model: nn.Module, *inputs: torch.Tensor) -> Any:
    graphs = []

    def backend(gm: Any, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    (graph,) = graphs
    return graph


def test_dynamo_makes_one_graph_input_of_a_shared_scale() -> None:
    graph = graph_of(static_model(layers=1), IDS)
    scales = [n for n in graph.graph.nodes if n.op == "placeholder" and "input_scale" in n.name]
    assert len(scales) == 4, graph.print_readable(print_output=False)  # q/k/v, o, gate/up, down
    products = [n for n in graph.graph.nodes if "_scaled_mm" in str(n.target)]
    readers = [sum(product.args[2] is scale for product in products) for scale in scales]
    assert sorted(readers) == [1, 1, 2, 3]


def test_graph_is_the_generic_one() -> None:
    for recipe in RECIPES:
        _, layer = make(recipe)
        graph = graph_of(layer, torch.randn(2, 3, 32, dtype=torch.bfloat16)).graph
        targets = [str(n.target) for n in graph.nodes if n.op in ("call_function", "call_method")]
        assert not any("fp8pass" in target for target in targets)
        assert sum("_scaled_mm" in target for target in targets) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.to("cpu"),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.half(),
        lambda m: m.to(memory_format=torch.contiguous_format),
        lambda m: m.to("meta"),
        lambda m: m.share_memory(),
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: copy.deepcopy(m).to("meta"),
        lambda m: m._apply(torch.clone),  # stands for a copy to another device
    ],
    ids=["to", "bf16", "half", "layout", "meta", "shm", "copy", "pickle", "2", "clone"],
)
def test_sharing_survives(change: Callable[[Model], Model]) -> None:
    assert_shared(change(static_model()))


def test_sharing_survives_moving_the_modules_one_by_one() -> None:
    model = static_model()
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            module._apply(torch.clone)
    assert_shared(model)


@pytest.mark.parametrize("assign", [False, True])
def test_loading_keeps_sharing_when_the_values_agree(assign: bool) -> None:
    source, model = static_model(), static_model()
    for block in source.layers:
        block.q_proj.input_scale.mul_(2)  # and with it those of k and v
    model.load_state_dict(copy.deepcopy(source.state_dict()), assign=assign)
    assert_shared(model)
    assert torch.equal(model(IDS), source(IDS))
    model.load_state_dict(source.state_dict())
    assert_shared(model)


@pytest.mark.parametrize("assign", [False, True])
def test_loading_different_values_does_not_mix_them(assign: bool) -> None:
    model = static_model()
    state = copy.deepcopy(model.state_dict())
    for i, name in enumerate(SHARED[0] + SHARED[1]):
        for block in ("layers.0.", "layers.1."):
            state[f"{block}{name}.input_scale"] = torch.tensor(1.0 + i)
    model.load_state_dict(state, assign=assign)
    assert_shared(model, shared=False)
    for i, name in enumerate(SHARED[0] + SHARED[1]):
        assert getattr(model.layers[1], name).input_scale.item() == 1.0 + i


def test_loading_a_part_leaves_the_others() -> None:
    model = static_model()
    block = model.layers[0]
    before = block.k_proj.input_scale.item()
    model.load_state_dict({"layers.0.q_proj.input_scale": torch.tensor(9.0)}, strict=False)
    assert block.q_proj.input_scale.item() == 9.0
    assert block.k_proj.input_scale.item() == block.v_proj.input_scale.item() == before


def test_meta_model_filled_by_a_state_dict_is_shared_again() -> None:
    source = static_model()
    model = copy.deepcopy(source).to("meta").to_empty(device="cpu")
    model.load_state_dict(source.state_dict())
    assert_shared(model)
    assert torch.equal(model(IDS), source(IDS))


@pytest.mark.parametrize("recipe", RECIPES)
def test_model_state_dict_round_trip(recipe: str) -> None:
    source, model = Model(), Model()
    for m in (source, model):
        quantize_(m, recipe, calibration=calibrate(m, [IDS]) if recipe == "static" else None)
    model.load_state_dict(source.state_dict())
    assert torch.equal(model(IDS), source(IDS))


# -- what quantize_ leaves


def test_tied_weights_are_left_with_a_reason() -> None:
    model = Model()
    summary = quantize_(model, "dynamic", skip=())
    assert "tied" in summary.skipped["lm_head"] and type(model.lm_head) is nn.Linear
    untied = Model(tied=False)
    assert quantize_(untied, "dynamic", skip=()).skipped == {}


def test_one_module_in_two_places_is_replaced_once() -> None:
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.ReLU()), "b": shared})
    summary = quantize_(model, "dynamic")
    assert summary.layers == 1 and isinstance(model["b"], Fp8Linear)
    assert model["a"][0] is model["b"]  # type: ignore[index]
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": shared})
    assert "'b'" in quantize_(model, "dynamic", skip="b").skipped["a.0"]  # any name counts


@pytest.mark.parametrize(
    "skip,left",
    [
        ("q_proj", 2),
        (("layers.1.*",), 7),
        (["*.0.?_proj"], 4),
        (("layers.0.k_proj", "down*"), 3),
        (("nothing",), 0),
    ],
    ids=str,
)
def test_skip_patterns(skip: Any, left: int) -> None:
    assert quantize_(Model(tied=False), "dynamic", skip=skip).layers == 15 - left


class MyLinear(nn.Linear):
    pass


def test_what_is_left_and_why() -> None:
    model = nn.ModuleDict(
        {
            "ok": nn.Linear(8, 8),
            "subclass": MyLinear(8, 8),
            "meta": nn.Linear(8, 8, device="meta"),
            "no_rows": nn.Linear(8, 0),
            "no_width": nn.Linear(0, 8),
            "doubled": nn.Linear(8, 8).double(),
            "hooked": nn.Linear(8, 8),
            "patched": nn.Linear(8, 8),
            "infinite": nn.Linear(8, 8),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        }
    )
    model["hooked"].register_forward_hook(lambda *_: None)
    model["patched"].forward = lambda x: x  # type: ignore[method-assign]
    model["infinite"].weight[0, 0] = float("inf")  # type: ignore[index]
    summary = quantize_(model, "dynamic")
    assert summary.layers == 1 and isinstance(model["ok"], Fp8Linear)
    for name, word in {
        "subclass": "MyLinear",
        "meta": "meta",
        "no_rows": "empty",
        "no_width": "empty",
        "doubled": "float64",
        "hooked": "hooks",
        "patched": "overridden",
        "infinite": "not finite",
        "normed": "ParametrizedLinear",
    }.items():
        assert word in summary.skipped[name], summary.skipped
    types = (nn.Linear, MyLinear)
    assert quantize_(model, "dynamic", linear_types=types).layers == 1
    assert isinstance(model["subclass"], Fp8Linear)


def test_transformer_encoder_layer_still_runs() -> None:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1, enable_nested_tensor=False
    ).eval()
    summary = quantize_(model, "dynamic")
    assert summary.layers == 0 and len(summary.skipped) == 3
    model(torch.randn(2, 3, 16))


def test_static_needs_a_calibration_and_leaves_what_it_did_not_reach() -> None:
    model = Model()
    with pytest.raises(OptionError, match=r"calibration=fp8pass.nn.calibrate\(model, inputs\)"):
        quantize_(model, "static")
    with pytest.raises(OptionError, match="got dict"):
        quantize_(model, "static", calibration={})  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="takes no calibration"):
        quantize_(model, "dynamic", calibration=Calibration({}))
    with pytest.raises(OptionError, match="'fp4'.*'dynamic'"):
        quantize_(model, "fp4")
    with pytest.raises(UnsupportedError, match="from_linear"):
        quantize_(nn.Linear(8, 8), "dynamic")
    assert not any(isinstance(m, Fp8Linear) for m in model.modules())
    amax = {"layers.0.q_proj": 1.0, "layers.0.k_proj": 0.0, "layers.0.v_proj": float("nan")}
    summary = quantize_(model, "static", calibration=Calibration(amax))
    assert summary.layers == 1
    assert summary.skipped["layers.1.q_proj"] == "not calibrated"
    assert "zeros" in summary.skipped["layers.0.k_proj"]
    assert "not finite" in summary.skipped["layers.0.v_proj"]
    scale = model.layers[0].q_proj.input_scale
    assert scale.dtype == torch.float32 and scale.shape == () and scale == torch.tensor(1 / 448)


def test_quantize_inside_a_compiled_wrapper() -> None:
    model = torch.compile(Model(), backend="eager")
    assert quantize_(model, "dynamic").layers == 14


# -- progress


@pytest.mark.parametrize(
    "missing", [(), ("tqdm",), ("tqdm", "rich.console", "rich.progress")], ids=str
)
def test_progress(missing: tuple[str, ...], monkeypatch: Any, capsys: Any) -> None:
    for name in missing:
        monkeypatch.setitem(progress_module.sys.modules, name, None)
    assert list(progress_module.track(range(3), "working", progress=True)) == [0, 1, 2]
    captured = capsys.readouterr()
    assert "working" in captured.err and captured.out == ""
    assert list(progress_module.track(iter([1]), "working", progress=False)) == [1]
    assert list(progress_module.track([1], "working")) == [1]  # stderr is no terminal here
    assert capsys.readouterr().err == ""
