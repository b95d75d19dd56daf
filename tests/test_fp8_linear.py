"""Fp8Linear: numbers against float64, its graph, converting, copying and loading it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_models import capture, graph_of
from torch import nn

from fp8pass.errors import OptionError, UnsupportedError
from fp8pass.nn import RECIPES, Fp8Linear, Recipe

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


def test_graph_is_the_generic_one() -> None:
    for recipe in RECIPES:
        _, layer = make(recipe)
        graph = graph_of(layer, torch.randn(2, 3, 32, dtype=torch.bfloat16)).graph
        targets = [str(n.target) for n in graph.nodes if n.op in ("call_function", "call_method")]
        assert not any("fp8pass" in target for target in targets)
        assert sum("_scaled_mm" in target for target in targets) == 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_graph_serves_every_batch(recipe: str) -> None:
    _, layer = make(recipe)
    graphs: list[Any] = []
    compiled = torch.compile(layer, backend=capture(graphs), fullgraph=True, dynamic=True)
    for rows in (3, 7, 2):
        x = torch.randn(2, rows, 32, dtype=torch.bfloat16)
        assert torch.equal(compiled(x), layer(x))
    assert len(graphs) == 1
    x = torch.randn(0, 4, 32, dtype=torch.bfloat16)
    assert compiled(x).shape == (0, 4, 48)
