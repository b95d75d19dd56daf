"""Products of codes made weight-only on request: for which sites, at what cost of fuel, and that
what a quantise cuts off stays cut off."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from graphs import Passed, Reading, post_grad, run, trace, values
from torch import fx

import fp8pass
from fp8pass import engine
from fp8pass.crossing import graphs_for
from fp8pass.errors import NoKernelError
from fp8pass.lowerings import choose
from fp8pass.lowerings.choice import narrowed
from fp8pass.lowerings.site import weight_only_problem
from fp8pass.ops.forms import QuantForm, dynamic_form, static_form
from fp8pass.ops.quantize import MORE_QUANT_FORMS, UPPER_QUANT_FORMS, quantize_with
from fp8pass.options import Options
from fp8pass.reasons import no
from fp8pass.spellings.before_quantise import _dynamic_cut
from fp8pass.target import Target
from fp8pass.tuning.store import _told

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4 = torch.float8_e4m3fn
KEY = "float8_e4m3fn/static/channel"
Tensor = torch.Tensor


def dynamic(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = (x.float().abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-12)
    return (x.float() / scale).clamp(-448.0, 448.0).to(E4), scale


def weights(n: int = 48, k: int = 256, seed: int = 3) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    w = (torch.randn(n, k, generator=g) * 32).clamp(-448, 448).to(E4)
    return w, torch.rand(1, n, generator=g) * 0.01 + 0.001


def one(x: Tensor, w: Tensor, sb: Tensor) -> Tensor:
    q, s = dynamic(x)
    return torch._scaled_mm(q, w.t(), s, sb, out_dtype=BF16)


def two(x: Tensor, w: Tensor, sb: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    q, s = dynamic(x)
    first = torch._scaled_mm(q, w.t(), s, sb, out_dtype=BF16)
    return first, torch._scaled_mm(q, v.t(), s, sb, out_dtype=BF16)


def distance(passed: Passed, *data: Tensor) -> float:
    """Relative L2 of what was made of a graph and the graph."""
    before, after = run(passed.before, *data)[0].double(), run(passed.after, *data)[0].double()
    return float((after - before).norm() / before.norm())


def has_codes(graph: fx.Graph) -> bool:
    """Whether something is made fp8."""
    return any(node.op == "call_function" and node.meta["val"].dtype == E4
               and "convert" in str(node.target) for node in graph.nodes)  # fmt: skip


# ---- selectors -----------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        w, sb = weights(256, 256)
        self.register_buffer("w", w)
        self.register_buffer("sb", sb)

    def forward(self, x: Tensor) -> Tensor:
        return one(x, self.w, self.sb)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = Layer()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(x)
        return y


@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        ({"force": "triton_w8a16"}, "triton_w8a16"),  # control
        ({"force": "fp8-token=triton_w8a16"}, "triton_w8a16"),
        ({"force": "fp8-token:up=triton_w8a16"}, "triton_w8a16"),
        ({"prefer": "fp8=triton_w8a16"}, "triton_w8a16"),
        ({"force": "fp8=w8a16"}, "torch_w8a16"),
        ({"force": "fp8=w8a16", "disable": "w8a16=torch_w8a16"}, "triton_w8a16"),
        ({"force": "fp8=w8a16", "disable": "fp8-token=torch_w8a16"}, "triton_w8a16"),
        # asked for by one scheme, which kernel by the other
        ({"force": "w8a16=triton_w8a16, fp8-token=w8a16"}, "triton_w8a16"),
        ({"force": "w8a16=torch_row, fp8-token=triton_w8a16"}, "triton_w8a16"),
        ({"prefer": "fp8=w8a16", "linear_backend": "fp8-token=triton"}, "torch_w8a16"),
        # about other sites: stays W8A8
        ({"force": "fp8-tensor=triton_w8a16"}, "triton_skinny"),
        ({"force": "int8=triton_w8a16"}, "triton_skinny"),
        ({"force": "w8a16=triton_w8a16"}, "triton_skinny"),
        ({"force": "fp8-token:down=triton_w8a16"}, "triton_skinny"),
    ],
    ids=str,
)
def test_a_selector_holds_through_the_rewrite(options: dict[str, str], kernel: str) -> None:
    made = graphs_for(Model(), values(5, 256), target="sm90", **options)
    (site,) = made.report.select("scaled_mm")
    assert site.kernel == kernel
    assert ("W8A16 in place of" in site.message) == ("w8a16" in kernel)
    assert bool(made.report.select("quantize", "lowered")) == ("w8a16" in kernel)


def test_schemes_of_what_was_codes() -> None:
    target = Target.parse("sm90")
    a, b = torch.empty(5, 256, dtype=BF16), torch.empty(256, 48, dtype=E4)
    problem = replace(weight_only_problem(a, b, None, BF16, KEY), device_type="cuda")
    options = Options.resolve({}, force="fp8-token=triton_w8a16", disable="fp8=torch_w8a16")
    here = narrowed(options, problem, "", "float8_e4m3fn/dynamic/token")
    assert (here.force, here.disable) == ("triton_w8a16", ("torch_w8a16",))
    assert choose(target, problem, here).why == "forced"
    own = narrowed(options, problem, "")  # one that the model wrote
    assert (own.force, own.disable) == (None, ())
    other = narrowed(options, problem, "", "float8_e4m3fn/dynamic/tensor")
    assert (other.force, other.disable) == (None, ("torch_w8a16",))


@pytest.mark.parametrize("stage", ["all", "two hooks"])
@pytest.mark.parametrize("disable", ["w8a16=w8a16", "fp8-token=w8a16", "torch_w8a16"])
def test_disabled_by_either_scheme(disable: str, stage: str) -> None:
    w, sb = weights()
    x, options = values(5, 256), {"prefer": "w8a16", "disable": disable}
    if stage == "all":
        passed = Passed(trace(one, x, w, sb), **options)
        sites = passed.record.sites
        assert distance(passed, x, w, sb) < 2**-7
    else:
        sites = fp8pass.explain(one, x, w, sb, **options).sites
    quantise, product = sorted(sites, key=lambda site: site.kind)
    assert (quantise.kind, quantise.status) == ("quantize", "left")
    assert product.kernel == "cpu" and "w8a16 was not used (FP8-L002)" in product.message
    with pytest.raises(NoKernelError, match="FP8-L002"):
        Passed(trace(one, x, w, sb), force="w8a16", disable=disable)


# ---- fuel ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hooks", ["one", "two"])
@pytest.mark.parametrize("option", ["force=w8a16", "force=torch_w8a16", "prefer=w8a16"])
@pytest.mark.parametrize("fuel", [0, 1, 2, 3, None])
def test_a_product_costs_one_unit(fuel: int | None, option: str, hooks: str) -> None:
    w, sb = weights()
    data = values(5, 256), w, sb, weights(seed=4)[0]
    how, name = option.split("=")
    options: dict[str, Any] = {how: name, "fuel": fuel}
    if hooks == "one":
        passed = Passed(trace(two, *data), **options)
        sites = passed.record.sites
        old, new = run(passed.before, *data), run(passed.after, *data)
        changed = sum(not torch.allclose(a, b, 2**-6, 1e-2) for a, b in zip(old, new, strict=True))
    else:
        sites = fp8pass.explain(two, *data, **options).sites
        changed = None
    wanted = 2 if fuel is None else min(fuel, 2)
    products = [site for site in sites if site.kind == "scaled_mm"]
    made = [site for site in products if site.kernel == "torch_w8a16"]
    left = [site for site in products if site.status == "left"]
    assert (len(made), len(left)) == (wanted, 2 - wanted)
    assert changed in (None, wanted)
    assert all(site.code == "FP8-F007" and f"{fuel} rewrites" in site.message for site in left)
    (quantise,) = [site for site in sites if site.kind == "quantize"]
    assert quantise.status == ("lowered" if wanted == 2 else "left")


def test_without_fuel_a_kernel_that_cannot_be_had_is_no_error() -> None:
    """Not for products of codes either; with fuel it is."""
    w, sb = weights()
    traced = trace(one, values(5, 256), w, sb)
    for name in ("triton_w8a16", "torch_tensor"):
        (site,) = Passed(traced, force=name, fuel=0).sites("scaled_mm")
        assert (site.status, site.code) == ("left", "FP8-F007")
        with pytest.raises(NoKernelError):
            Passed(traced, force=name, fuel=1)


def test_a_quantise_of_a_product_that_is_not_lowered_is_not_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def choose_none(target: Target, problem: Any, options: Options) -> Any:
        choice = choose(target, problem, options)
        return replace(choice, plan=(), verdict=no("FP8-L012", target=target.spec))

    w, sb = weights()
    data = values(5, 256), w, sb
    monkeypatch.setattr(engine, "choose", choose_none)
    passed = Passed(trace(one, *data), force="w8a16")
    (product,), (quantise,) = passed.sites("scaled_mm"), passed.sites("quantize")
    assert (product.status, quantise.status) == ("left", "left")
    assert has_codes(passed.after.graph)
    assert torch.equal(run(passed.before, *data)[0], run(passed.after, *data)[0])


# ---- what a quantise cuts off --------------------------------------------------------------------


def given(name: str) -> tuple[Tensor, Tensor]:
    """Activations of which some are beyond 448 times the scale, and that scale."""
    x = values(2, 5, 256) if name == "rank 3" else values(17, 256)
    x = x.to(F16 if name == "float16" else F32 if name == "float32" else BF16)
    scale = torch.tensor(0.4 / 448)
    if name == "one by one":
        scale = scale.reshape(1, 1)
    if name == "token":
        scale = torch.rand(17, 1) / 448 + 1e-4
    return x, scale


def static(x: Tensor, scale: Tensor, w: Tensor, sb: Tensor) -> Tensor:
    q = (x.float() / scale).clamp(-448.0, 448.0).to(E4)
    flat = q.reshape(-1, x.shape[-1])
    sb = sb if scale.numel() > 1 else sb[0, 0]
    return torch._scaled_mm(flat, w.t(), scale, sb, out_dtype=x.dtype)


def static_by_reciprocal(x: Tensor, scale: Tensor, w: Tensor, sb: Tensor) -> Tensor:
    q = (x.float() * (1.0 / scale)).clamp(-448.0, 448.0).to(E4)
    return torch._scaled_mm(q, w.t(), scale, sb[0, 0], out_dtype=x.dtype)


def static_narrow(x: Tensor, scale: Tensor, w: Tensor, sb: Tensor) -> Tensor:
    q = (x.float() / scale).clamp(-240.0, 240.0).to(E4)
    return torch._scaled_mm(q, w.t(), scale, sb[0, 0], out_dtype=x.dtype)


@pytest.mark.parametrize("stage", ["all", "joint"])
@pytest.mark.parametrize(
    "name", ["bfloat16", "float16", "float32", "rank 3", "one by one", "token", "recip", "narrow"]
)
def test_a_given_scale_saturates_as_before(name: str, stage: str) -> None:
    fn = {"recip": static_by_reciprocal, "narrow": static_narrow}.get(name, static)
    x, scale = given(name)
    w, sb = weights()
    data = x, scale, w, sb
    passed = Passed(trace(fn, *data), stage=stage, force="w8a16")
    assert not has_codes(passed.after.graph)
    top = (240.0 if name == "narrow" else 448.0) * scale
    assert bool((x.abs() > top).float().mean() > 0.3)  # this is what it is about
    cut = torch.minimum(torch.maximum(x.float(), -top), top).to(x.dtype)
    factor = sb if scale.numel() > 1 else sb[0, 0]
    (result,) = run(passed.after, *data)
    wanted = (cut.reshape(-1, 256).double() @ w.double().t()) * factor
    torch.testing.assert_close(result.double(), wanted, rtol=2**-8, atol=1e-3 * float(wanted.std()))
    assert distance(passed, *data) < 0.03
    uncut = (x.reshape(-1, 256).double() @ w.double().t()) * factor
    assert float((uncut - wanted).norm() / wanted.norm()) > 0.3
    if stage == "all":
        (site,) = passed.sites("scaled_mm")
        assert "beyond their scale is cut off as before" in site.message


def test_nan_inf_and_no_rows() -> None:
    x, scale = given("bfloat16")
    w, sb = weights()
    x[1, 3], x[2, 5], x[3, 7] = float("nan"), float("inf"), -float("inf")
    data = x, scale, w, sb
    passed = Passed(trace(static, *data), force="w8a16")
    (old,), (new,) = run(passed.before, *data), run(passed.after, *data)
    assert torch.equal(old.isnan(), new.isnan()) and bool(old[1].isnan().all())
    assert bool(new[2:4].isfinite().all())
    torch.testing.assert_close(new[2:4], old[2:4], rtol=0.05, atol=0.3)
    empty = x[:0]
    assert run(Passed(trace(static, empty, *data[1:]), force="w8a16").after, empty, *data[1:])[
        0
    ].shape == (0, 48)


def test_products_of_one_quantise_share_the_cut() -> None:
    def fn(x: Tensor, scale: Tensor, w: Tensor, sb: Tensor) -> tuple[Tensor, Tensor]:
        q = (x.float() / scale).clamp(-448.0, 448.0).to(E4)
        first = torch._scaled_mm(q, w.t(), scale, sb[0, 0], out_dtype=BF16)
        return first, torch._scaled_mm(q, w.t(), scale, sb[0, 1], out_dtype=BF16)

    data = *given("bfloat16"), *weights()
    for dims in ([], [0]):
        passed = Passed(trace(fn, *data, dynamic=dims), force="w8a16")
        names = [str(node.target) for node in passed.after.graph.nodes]
        assert sum("aten.maximum" in name for name in names) == 1
        assert len(passed.sites("scaled_mm", "lowered")) == 2


def bounded(kind: str) -> Any:
    def fn(x: Tensor, ub: Tensor, w: Tensor, sb: Tensor) -> Tensor:
        amax = x.float().abs().amax(-1, keepdim=True)
        if kind == "tensor":
            amax = torch.minimum(amax, ub)
        if kind == "number":
            amax = amax.clamp(max=0.5)
        scale = (amax / 448.0).clamp(min=1e-3 if kind == "floor" else 1e-12)
        if kind == "tensor of the scale":
            scale = torch.minimum(scale, ub / 448.0)
        top = 240.0 if kind == "clamp" else 448.0
        q = (x.float() / scale).clamp(-top, top).to(E4)
        return torch._scaled_mm(q, w.t(), scale, sb, out_dtype=BF16)

    return fn


@pytest.mark.parametrize("kind", ["tensor", "tensor of the scale", "number", "clamp"])
def test_a_bound_that_cuts_values_off_is_refused(kind: str) -> None:
    data = values(17, 256), torch.tensor(0.5), *weights()
    traced = trace(bounded(kind), *data)
    passed = Passed(traced, prefer="w8a16")
    (site,) = passed.sites("scaled_mm", "lowered")
    assert site.kernel == "cpu" and "preferred w8a16 was not used (FP8-L043)" in site.message
    assert "cuts values off" in site.message
    assert distance(passed, *data) < 2**-7
    with pytest.raises(NoKernelError, match="FP8-L043.*part of the function"):
        Passed(traced, force="w8a16")


@pytest.mark.parametrize("kind", ["none", "floor"])
def test_what_cuts_nothing_off_is_made(kind: str) -> None:
    data = values(17, 256), torch.tensor(0.5), *weights()
    passed = Passed(trace(bounded(kind), *data), force="w8a16")
    (site,) = passed.sites("scaled_mm", "lowered")
    assert site.kernel == "torch_w8a16" and 0.015 < distance(passed, *data) < 0.04


DYNAMIC = [
    form
    for form in map(QuantForm.parse, (str(form) for form in (*MORE_QUANT_FORMS,)))
    if not form.static and form.dtype == E4
]


@pytest.mark.parametrize(
    "form",
    [
        *DYNAMIC,
        dynamic_form("token"),
        replace(dynamic_form("token"), scale="mul", qmax=1 / 448),
        replace(dynamic_form("token"), scale="mul", qmax=1 / 512),
        replace(dynamic_form("token"), qmax=512.0),
        replace(dynamic_form("token"), lo=0.0),
        replace(dynamic_form("token"), floor="divisor", floor_value=0.01),
        replace(dynamic_form("token"), floor="divisor"),
    ],
    ids=str,
)
def test_what_is_said_to_cut_nothing_does_not(form: QuantForm) -> None:
    """Values of all sizes there and back, of each form: within the rounding, or refused."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(64, 256, generator=g) * torch.rand(64, 1, generator=g).pow(4) * 64
    q, scale = quantize_with(x, None, form, None)
    if form.group is not None:
        scale = scale.repeat_interleave(form.group, -1)
    again = q.float() * scale
    # half a step of e4m3 (and of the top, which is rounded down to from a little above)
    within = bool(((again - x).abs() <= x.abs() * 2.0**-4 + scale * 2.0**-10).all())
    assert within == (not _dynamic_cut(form)), _dynamic_cut(form)


def test_every_form_with_a_tensor_as_bound_is_refused() -> None:
    assert all("scale_ub" in _dynamic_cut(form) for form in UPPER_QUANT_FORMS)
    assert static_form().static and not _dynamic_cut(dynamic_form("group128"))


# ---- preferences that cannot be followed ---------------------------------------------------------


def int8(x: Tensor, w: Tensor, sb: Tensor) -> Tensor:
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    q = torch.round(x.float() / scale).clamp(-128, 127).to(torch.int8)
    return (torch._int_mm(q, w.t()).float() * scale * sb).to(BF16)


@pytest.mark.parametrize("hooks", ["one", "two"])
@pytest.mark.parametrize("name", ["w8a16", "torch_w8a16"])
def test_int8_has_no_weight_only_product_and_says_so_once(
    name: str, hooks: str, caplog: pytest.LogCaptureFixture
) -> None:
    _told.clear()
    w = torch.randint(-128, 128, (32, 64)).to(torch.int8)
    data = values(17, 64), w, torch.rand(32) * 0.01
    with caplog.at_level(logging.WARNING, "fp8pass"):
        for _ in range(2):
            if hooks == "one":
                sites = Passed(trace(int8, *data), prefer=name).record.sites
            else:
                sites = fp8pass.explain(int8, *data, prefer=name).sites
    (site,) = [site for site in sites if site.kind == "scaled_mm"]
    assert site.kernel == "torch_int8_cpu"
    assert f"preferred {name} was not used (FP8-L007)" in site.message
    assert "does not take weights of dtype int8" in site.message
    told = [record.message for record in caplog.records if record.name == "fp8pass"]
    assert told == [f"fp8pass: preferred {name} was not used (FP8-L007)"]


def test_nothing_is_said_where_it_was_taken(caplog: pytest.LogCaptureFixture) -> None:
    _told.clear()
    data = values(5, 256), *weights()
    with caplog.at_level(logging.WARNING, "fp8pass"):
        for name in ("w8a16", "torch_w8a16"):
            (site,) = Passed(trace(one, *data), prefer=name).sites("scaled_mm")
            assert site.kernel == "torch_w8a16" and "not used" not in site.message
    assert not [record for record in caplog.records if record.name == "fp8pass"]


# ---- the bias of a model's own -------------------------------------------------------------------


def test_a_bias_behind_a_rounded_product_is_inside_after_inductors_passes() -> None:
    """docs/numerics.md: the graph that the later hook gets has one rounding, as stock's code."""

    def fn(x: Tensor, w: Tensor, s: Tensor, b: Tensor) -> Tensor:
        return x @ (w.float() * s).to(BF16).t() + b

    w, _ = weights()
    data = values(17, 256), w, torch.rand(48, 1) * 0.01, torch.randn(48).to(BF16)
    assert Reading(trace(fn, *data)).forms("scaled_mm") == ["weight,float32,bfloat16,after"]
    received = post_grad(trace(fn, *data))
    assert Reading(received).forms("scaled_mm") == ["weight,float32,bfloat16,inside"]
    passed = Passed(received, stage="post")
    assert torch.equal(run(passed.after, *data)[0], run(passed.before, *data)[0])
