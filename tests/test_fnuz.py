"""e4m3fnuz: codes and models that are converted to it keep every number."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import models
import pytest
import torch
from torch import nn

from fp8pass.crossing import graphs_for
from fp8pass.errors import UnsupportedError
from fp8pass.fnuz import from_fnuz, to_fnuz
from fp8pass.fp8_linear import Fp8Linear
from fp8pass.kernels.rocm_operators import shuffle, unshuffle
from fp8pass.preparation import prepare, unprepare


def test_every_code_keeps_its_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.tensor(0.25)
    converted, doubled = to_fnuz(codes, scale)
    assert converted.dtype == torch.float8_e4m3fnuz and float(doubled) == 0.5
    wanted, got = codes.float() * scale, converted.float() * doubled
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
    assert int(got.isnan().sum()) == 2  # and minus zero is not one of them


def test_known_codes_in_any_shape() -> None:
    values = torch.tensor([[1.0, -0.0, 448.0], [-448.0, 0.0625, 240.0]])
    converted, scale = to_fnuz(values.to(torch.float8_e4m3fn).t(), torch.ones(3, 1))
    assert torch.equal(converted.float() * scale, values.t().abs() * values.t().sign())
    # neither the bytes by themselves nor a conversion of the values would do
    raw = values.to(torch.float8_e4m3fn).view(torch.float8_e4m3fnuz).float()
    assert raw[0, 0] == 0.5 and raw[0, 1].isnan()


def test_other_codes_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="float8_e5m2"):
        to_fnuz(torch.zeros(2).to(torch.float8_e5m2), torch.ones(()))


def test_and_back() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.rand(())
    back, same = from_fnuz(*to_fnuz(codes, scale))
    assert torch.equal(same, scale)
    torch.testing.assert_close(back.float(), codes.float(), rtol=0, atol=0, equal_nan=True)
    with pytest.raises(UnsupportedError, match="240"):
        from_fnuz(torch.tensor([240.0]).to(torch.float8_e4m3fnuz), scale)
    with pytest.raises(UnsupportedError, match="float8_e4m3fn"):
        from_fnuz(codes, scale)


# ---- a model -------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
SCALES = ("weight_scale", "input_scale")


def made(recipe: str, kind: type[nn.Module] = models.Block) -> nn.Module:
    return models.build(kind, recipe)


def linears(model: nn.Module) -> list[Fp8Linear]:
    return [m for m in model.modules() if isinstance(m, Fp8Linear)]


def rows() -> torch.Tensor:
    """Of several sizes, among them rows that overflow a static scale and one of zeros."""
    x = models.rows(9) * torch.logspace(-3, 3, 9).unsqueeze(-1)
    x[3] = 0
    return x.to(torch.bfloat16)


@pytest.mark.parametrize("recipe", models.RECIPES)
def test_every_number_of_a_model_stays(recipe: str) -> None:
    model, x = made(recipe).to(torch.bfloat16), rows()
    reference = copy.deepcopy(model)
    before = [{n: getattr(m, n) for n in SCALES} for m in linears(model)]
    report = prepare(model, "gfx942")
    assert report.converted == len(linears(model)) > 0 and "e4m3fnuz" in str(report)
    assert (report.layers, report.bytes) == (0, 0)
    for linear, was in zip(linears(model), before, strict=True):
        assert linear.weight.dtype == FNUZ
        for name, scale in was.items():
            assert scale is None or torch.equal(getattr(linear, name), 2 * scale)
    # as the generic operator computes it: not torch's own sum, whose order is another
    with generic():
        wanted = reference(x)
    assert torch.equal(model(x), wanted)
    assert "e4m3fnuz" in repr(model)
    assert prepare(model, "gfx942").converted == 0
    assert unprepare(model) == len(linears(model))
    for linear, was in zip(linears(model), before, strict=True):
        assert linear.weight.dtype == FN
        for name, scale in was.items():
            assert scale is None or torch.equal(getattr(linear, name), scale)


@contextlib.contextmanager
def generic() -> Iterator[None]:
    """Within, the products of e4m3fn linears are those of ``fp8pass::scaled_mm``'s reference."""

    def product(q, weight, sa, sb, bias=None, out_dtype=None):  # type: ignore[no-untyped-def]
        value = torch.mm(q.float(), weight.float()) * sa * sb
        return (value if bias is None else value + bias.float()).to(out_dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_scaled_mm", product)
        yield


def test_shared_input_scales_stay_shared() -> None:
    model = made("static")
    q, k, v = (getattr(model, f"{n}_proj") for n in "qkv")
    assert q.input_scale is k.input_scale is v.input_scale
    prepare(model, "gfx942")
    assert q.input_scale is k.input_scale is v.input_scale


def test_merged_linears() -> None:
    model, x = made("dynamic").to(torch.bfloat16), rows()
    plain = copy.deepcopy(model)
    prepare(plain, "gfx942")
    for again in range(2):
        report = prepare(model, "gfx942", merge_linears=True)
        assert report.converted == (0 if again else len(linears(model)))
    assert model.q_proj.weight_merged.dtype == FNUZ
    assert torch.equal(model(x), plain(x))
    prepare(model, "sm90")  # another target: back to e4m3fn, no longer merged
    assert model.q_proj.weight.dtype == FN and model.q_proj.weight_merged is None


@pytest.mark.parametrize("recipe", ["static", "dynamic"])
def test_state_dicts(recipe: str) -> None:
    model, x = made(recipe, models.Pair), rows()
    original = {name: value.clone() for name, value in model.state_dict().items()}
    prepare(model, "gfx942")
    converted = {name: value.clone() for name, value in model.state_dict().items()}
    wanted = model(x.float())
    other = made(recipe, models.Pair)
    prepare(other, "gfx942")
    for state in (original, converted):  # of either kind, into a converted model
        other.linear.weight_scale.zero_()
        other.load_state_dict(state)
        assert other.linear.weight.dtype == FNUZ
        assert torch.equal(other(x.float()), wanted)
    fresh = made(recipe, models.Pair)
    with pytest.raises(RuntimeError, match=r"prepared for it too") as info:
        fresh.load_state_dict(converted)
    assert "before quantize_" not in str(info.value) and "gfx942" in str(info.value)
    prepare(fresh, "gfx942")  # as it says
    fresh.load_state_dict(converted)
    assert torch.equal(fresh(x.float()), wanted)
    unprepare(other)
    saved = other.state_dict()  # or as it says
    again = made(recipe, models.Pair)
    again.load_state_dict(saved)
    assert again.linear.weight.dtype == torch.float8_e4m3fn
    prepare(other, "gfx942")
    wide = {name: value.to(torch.bfloat16) for name, value in original.items()}
    with pytest.raises(RuntimeError, match="before quantize_"):
        again.load_state_dict(wide)
    partial = {name: value for name, value in original.items() if not name.endswith(".weight")}
    with pytest.raises(RuntimeError, match="beside its scales"):
        other.load_state_dict(partial, strict=False)


def test_copies_pickles_and_moves() -> None:
    model, x = made("static", models.Pair), rows().float()
    prepare(model, "gfx942")
    wanted = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.float()):
        assert other.linear.weight.dtype == FNUZ
        assert torch.equal(other(x), wanted)
    assert model.to("meta").linear.weight.dtype == FNUZ


def test_in_a_fresh_process(tmp_path: Path) -> None:
    """The forward calls an operator, which must be registered by then."""
    program = f"""
import pickle, sys, torch, models
from fp8pass.preparation import prepare
if len(sys.argv) > 1:
    model = pickle.load(open({str(tmp_path / "model")!r}, "rb"))
else:
    model = models.build(models.Pair, "static")
    prepare(model, "gfx942")
    pickle.dump(model, open({str(tmp_path / "model")!r}, "wb"))
with torch.no_grad():
    model(models.rows(2).to(torch.bfloat16))
"""
    for argument in ([], ["load"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *argument],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        )
        assert done.returncode == 0, done.stderr


def test_a_converted_model_is_read_and_lowered() -> None:
    """And one that was not is refused by every kernel, with the way out."""
    model = made("static").to(torch.bfloat16)
    left = graphs_for(model, rows(), target="gfx942").report.select("scaled_mm")
    assert left and all(site.code == "FP8-L012" for site in left)
    told = {r.kernel: r.code for site in left for r in site.rejected}
    assert told["torch_tensor"] == told["torch_channel"] == told["torch_dequant"] == "FP8-L060"
    prepare(model, "gfx942")
    found = graphs_for(model, rows(), target="gfx942")
    products = found.report.select("scaled_mm")
    assert {site.kernel for site in products} == {"torch_tensor"}
    assert len(found.report.select(status="fused")) == 3
    quantised = [
        n for n in found.graph.after.graph.nodes if "convert_element_type" in str(n.target)
    ]
    assert FNUZ in {node.args[1] for node in quantised} and FN not in {n.args[1] for n in quantised}


def test_on_a_cpu_it_compiles_too() -> None:
    model, x = made("dynamic", models.Pair).to(torch.bfloat16), rows()
    prepare(model, "gfx942")
    found = graphs_for(model, x, target="cpu")
    (site,) = found.report.select("scaled_mm")
    assert site.kernel == "torch_dequant"


# ---- a copy in tiles -----------------------------------------------------------------------------


def test_tiles() -> None:
    codes = torch.arange(32 * 64, dtype=torch.int32).remainder(251).to(torch.uint8)
    weight = codes.view(torch.float8_e4m3fnuz).view(32, 64)
    tiled = shuffle(weight)
    assert torch.equal(unshuffle(tiled).view(torch.uint8), weight.view(torch.uint8))
    flat = tiled.view(torch.uint8).flatten()
    # 16 rows by 16 columns at a time, the second half of a tile's 32 columns behind the first
    first, second = weight[:16, :16], weight[:16, 16:32]
    assert torch.equal(flat[:256], first.view(torch.uint8).flatten())
    assert torch.equal(flat[256:512], second.reshape(-1).view(torch.uint8))
    for shape in ((24, 64), (32, 48)):
        with pytest.raises(ValueError, match="tiles"):
            shuffle(torch.zeros(shape).to(torch.float8_e4m3fn))


def test_prepare_with_tiles() -> None:
    model, x = made("dynamic").to(torch.bfloat16), rows()
    target = "gfx942+aiter"
    assert prepare(copy.deepcopy(model), target).layers == 0, "only when asked for"
    report = prepare(model, target, shuffle=True)
    assert "o_proj" in report.skipped and report.layers == 6  # it has a bias
    assert report.bytes == sum(m.weight.numel() for m in linears(model)) - 64 * 64
    plain = copy.deepcopy(model)
    assert plain.q_proj.weight_prepared is not None
    unprepare(plain)
    prepare(plain, "gfx942")
    assert torch.equal(model(x), plain(x))
    # of either kind, a state dict that is loaded makes the copy anew
    original = made("dynamic").to(torch.bfloat16).state_dict()
    for state in (original, dict(model.state_dict())):
        with torch.no_grad():
            model.q_proj.weight_prepared.view(torch.uint8).zero_()
        model.load_state_dict(state)
        tiles = model.q_proj.weight_prepared
        assert torch.equal(unshuffle(tiles).float(), model.q_proj.weight.float())
    exact = graphs_for(model, x, target=target).report
    assert "aiter_shuffled" not in {site.kernel for site in exact.sites}
    fast = graphs_for(model, x, target=target, numerics="fast")
    kernels = [site.kernel for site in fast.report.select("scaled_mm")]
    assert kernels.count("aiter_shuffled") == 6
    assert prepare(model, "gfx950", shuffle=True).layers == 0, "no AITER there"
