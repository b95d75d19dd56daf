"""calibrate: maxima and groups; the scales that are shared because of it, and stay shared."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
from small_models import IDS, SHARED, Model, assert_shared, graph_of, static_model
from torch import nn

from fp8pass.calibration import _tensor_key
from fp8pass.errors import OptionError
from fp8pass.nn import Calibration, Fp8Linear, calibrate


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    with torch.no_grad():
        yield


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
        calibrate(model, 3)
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
        model.forward = lambda x: (model.a(feed(x)[0]), model.b(feed(x)[1]))
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
    memory = bytearray(64)
    keys, addresses = [], set()
    for _ in range(50):  # each tensor is gone before the next one is made at its address
        x = torch.frombuffer(memory, dtype=torch.float32)
        keys.append(_tensor_key(x))
        addresses.add(x.data_ptr())
        del x
    assert len(addresses) == 1
    assert len(set(keys)) == 50


def test_static_scales_are_shared_in_the_model() -> None:
    assert_shared(static_model())


def test_dynamo_makes_one_graph_input_of_a_shared_scale() -> None:
    graph = graph_of(static_model(layers=1), IDS)
    scales = [n for n in graph.graph.nodes if n.op == "placeholder" and "input_scale" in n.name]
    assert len(scales) == 4, graph.print_readable(print_output=False)  # q/k/v, o, gate/up, down
    products = [n for n in graph.graph.nodes if "_scaled_mm" in str(n.target)]
    readers = [sum(product.args[2] is scale for product in products) for scale in scales]
    assert sorted(readers) == [1, 1, 2, 3]


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
