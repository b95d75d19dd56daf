"""merge_linears: linears laid into one buffer, and the one product that the pass makes of them."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from models import Block, build, rows
from torch import nn

import fp8pass
from fp8pass.errors import OptionError, UnsupportedError
from fp8pass.fp8_linear import Fp8Linear
from fp8pass.merging import merge_linears
from fp8pass.nn import quantize_
from fp8pass.preparation import unprepare

QKV, MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(x)
    return result


def products(model: nn.Module, x: torch.Tensor) -> list[Any]:
    with torch.no_grad():
        report = fp8pass.explain(model, x)
    return [site for site in report.sites if site.kind == "scaled_mm"]


class Biased(Block):
    """As Qwen2: a bias in q, k and v."""

    def __init__(self) -> None:
        super().__init__()
        for name in QKV:
            setattr(self, name, nn.Linear(64, 64 if name == "q_proj" else 32, bias=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.input_norm(x)
        k, v = self.k_proj(h).repeat(1, 2), self.v_proj(h).repeat(1, 2)
        return x + self.o_proj(torch.sigmoid(self.q_proj(h) + k) * v)


@pytest.mark.parametrize("recipe", ["static", "dynamic", "dynamic_tensor"])
def test_the_same_numbers_from_fewer_products(recipe: str) -> None:
    model = build(Block, recipe)
    x = rows(5)
    wanted = run(model, x)
    report = fp8pass.prepare(model, merge_linears=True)
    assert report.merged == (QKV, MLP) and "5 linears merged into 2" in report.message
    torch.testing.assert_close(run(model, x), wanted, rtol=2**-7, atol=2**-7)
    sites = products(model, x)
    assert [site.status for site in sites] == ["lowered"] * 7
    assert sorted(site.shape for site in sites) == sorted(
        ["5x192x64"] * 3 + ["5x256x64"] * 2 + ["5x64x64", "5x64x128"]
    )
    compiled = torch.compile(model, backend=fp8pass.fp8pass_backend)
    torch.testing.assert_close(run(compiled, x), wanted, rtol=2**-6, atol=2**-5)


def test_no_memory_on_top() -> None:
    model = build(Block, "dynamic")
    before = sum(m.weight.untyped_storage().nbytes() for m in model.modules() if is_fp8(m))
    fp8pass.prepare(model, merge_linears=True)
    storages = {
        m.weight.untyped_storage().data_ptr(): m.weight.untyped_storage().nbytes()
        for m in model.modules()
        if is_fp8(m)
    }
    assert sum(storages.values()) == before


def is_fp8(module: nn.Module) -> bool:
    return isinstance(module, Fp8Linear)


def test_biases_are_merged() -> None:
    model = build(Biased, "dynamic")
    x = rows(3)
    wanted = run(model, x)
    assert fp8pass.prepare(model, merge_linears=True).merged == (QKV, MLP)
    torch.testing.assert_close(run(model, x), wanted, rtol=2**-7, atol=2**-7)
    assert sorted(site.shape for site in products(model, x)) == ["3x128x64"] * 3 + ["3x64x64"]


def test_different_inputs_stay_apart() -> None:
    class Apart(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q_proj(x) + self.k_proj(self.input_norm(x)) + self.v_proj(x * 2)

    model = build(Apart, "dynamic")
    wanted = run(model, rows(3))
    fp8pass.prepare(model, merge_linears=True)
    sites = products(model, rows(3))
    assert [site.shape for site in sites] == ["3x64x64"] * 3
    compiled = torch.compile(model, backend=fp8pass.fp8pass_backend)
    torch.testing.assert_close(run(compiled, rows(3)), wanted, rtol=2**-6, atol=2**-6)


def test_only_neighbours_are_merged() -> None:
    class Gap(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q_proj(x) + self.k_proj(x * 2) + self.v_proj(x)

    model = build(Gap, "dynamic")
    fp8pass.prepare(model, merge_linears=True)
    assert [site.shape for site in products(model, rows(3))] == ["3x64x64"] * 3


def test_groups_of_the_user() -> None:
    model = build(Block, "dynamic")
    report = fp8pass.prepare(model, merge_linears=[("v_proj", "q_proj")])
    assert report.merged == (("v_proj", "q_proj"),)
    shapes = [site.shape for site in products(model, rows(3))]
    assert shapes.count("3x128x64") == 4  # v and q as one, gate and up by their own size


@pytest.mark.parametrize("bad", [["q_proj"], [("q_proj",)], [("q_proj", "q_proj")], [("a", 1)]])
def test_a_bad_group_is_named(bad: Any) -> None:
    with pytest.raises(OptionError, match="merge_linears"):
        fp8pass.prepare(build(Block, "dynamic"), merge_linears=bad)


def test_what_cannot_be_merged_says_why() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(64, 32, bias=True), nn.Linear(64, 32, bias=False)
            self.v_proj = nn.Linear(64, 32, bias=False)

    model = Mixed()
    quantize_(model, "dynamic")
    merged, left = merge_linears(model)
    assert not merged and set(left.values()) == {"only some have a bias"} and len(left) == 3
    model.k_proj = model.v_proj
    assert set(merge_linears(model)[1].values()) == {"one of them is used in several places"}


def test_it_is_undone_by_moves_and_loads() -> None:
    model = build(Block, "dynamic")
    x = rows(4)
    fp8pass.prepare(model, merge_linears=True)
    merged = run(model, x)
    state = model.state_dict()
    assert not [name for name in state if "merged" in name]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(m.weight_merged is None for m in other.modules() if isinstance(m, Fp8Linear))
        torch.testing.assert_close(run(other, x), merged, rtol=2**-7, atol=2**-7)
    other = build(Block, "dynamic", seed=5)
    wanted = run(other, x)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(run(model, x), wanted, rtol=2**-7, atol=2**-7)
    assert fp8pass.prepare(model, merge_linears=True).merged == (QKV, MLP)
    torch.testing.assert_close(run(model, x), wanted, rtol=2**-7, atol=2**-7)
    model.to(torch.float32)
    assert all(m.weight_merged is None for m in model.modules() if isinstance(m, Fp8Linear))


def test_a_saved_linear_is_no_larger() -> None:
    model = build(Block, "dynamic")
    size = len(pickle.dumps(model.q_proj))
    fp8pass.prepare(model, merge_linears=True)
    assert len(pickle.dumps(model.q_proj)) < size + 1000
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    again = build(Block, "dynamic", seed=3)
    again.load_state_dict(torch.load(stream))
    torch.testing.assert_close(run(again, rows(2)), run(model, rows(2)), rtol=2**-7, atol=2**-7)


def test_twice_and_back() -> None:
    model = build(Block, "dynamic")
    wanted = run(model, rows(2))
    assert fp8pass.prepare(model, merge_linears=True).merged
    assert not fp8pass.prepare(model, merge_linears=True).merged
    assert unprepare(model) == 7
    assert torch.equal(run(model, rows(2)), wanted)


def test_a_gradient_is_refused() -> None:
    model = build(Block, "dynamic")
    fp8pass.prepare(model, merge_linears=True)
    with pytest.raises(UnsupportedError, match="no gradient"):
        model(rows(2).requires_grad_())


def test_a_part_that_is_returned_keeps_its_strides() -> None:
    class Returned(Block):
        def forward(self, x: torch.Tensor) -> Any:
            h = self.input_norm(x)
            return self.q_proj(h), self.k_proj(h), self.v_proj(h)

    model = build(Returned, "dynamic")
    x = rows(3)
    with torch.no_grad():
        wanted = model(x)
        fp8pass.prepare(model, merge_linears=True)
        got = torch.compile(model, backend=fp8pass.fp8pass_backend)(x)
    for a, b in zip(got, wanted, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6)
    assert [site.shape for site in products(model, x)] == ["3x192x64"] * 3
