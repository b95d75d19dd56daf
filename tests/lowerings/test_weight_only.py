"""Weight-only products (W8A16): which kernel takes them, and how products of codes become one.

The rewrite changes numbers, so that it is made on request alone; the activations' quantise and its
scale must leave with it, and no weight-only operator may ever see codes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from graphs import Passed, codes, run, trace, values, vector
from lowering_sites import build, operands, problem, render
from torch import fx

import fp8pass
from fp8pass.crossing import graphs_for
from fp8pass.errors import NoKernelError, OptionError
from fp8pass.lowerings import choose, find, kernel_names, weight_only_names
from fp8pass.ops.weight_only import weight_only_product
from fp8pass.options import Options
from fp8pass.problem import unquantised
from fp8pass.quant_key import FP8_DTYPES
from fp8pass.report import reports
from fp8pass.target import Target

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4 = torch.float8_e4m3fn
Tensor = torch.Tensor
OPERATORS = ("w8a16_mm", "triton_w8a16_mm", "xpu_w8a16_mm")
TARGETS = ("cpu", "sm75", "sm80", "sm89", "sm90", "sm120", "gfx90a", "gfx942", "gfx1100",
           "xpu-bmg", "xpu-bmg+vllm_xpu")  # fmt: skip


# ---- the choice ----------------------------------------------------------------------------------


def site(target: str, weight: str = "channel", *, dtype: Any = BF16, **more: Any) -> Any:
    where = Target.parse(target)
    more.setdefault("dtypes", (dtype, E4))
    more.setdefault("out_dtype", dtype)
    return where, problem("tensor", weight, target=where, **more)


def known(target: str) -> bool:
    try:
        Target.parse(target)
    except OptionError:
        return False
    return True


@pytest.mark.parametrize("target", filter(known, TARGETS))
def test_table(target: str) -> None:
    """Every kernel is chosen or refused with a reason; none for codes takes such a site."""
    for weight, bias, m, form in product(
        ("tensor", "channel", "group128x128"),
        (None, BF16),
        (1, 17, None),
        ("", "weight,bfloat16,bfloat16,inside", "product,bfloat16,bfloat16,after"),
    ):
        where, p = site(target, weight, m=m, bias=bias, form=form, n=256, k=512)
        choice = choose(where, p, Options())
        assert choice == choose(where, p, Options())
        names = {r.kernel for r in choice.rejected} | {k.name for _, k in choice.plan}
        assert names == set(kernel_names())
        assert all(kernel.weight_only for _, kernel in choice.plan)
        for rejection in choice.rejected:
            assert rejection.kernel in rejection.verdict.message
            if (
                where.kind in find(rejection.kernel).kinds
                and not find(rejection.kernel).weight_only
            ):
                assert rejection.verdict.code == "FP8-L041"


def winner(target: str, *args: Any, **more: Any) -> str | None:
    where, p = site(target, *args, **more)
    choice = choose(where, p, Options())
    return None if choice.kernel is None else choice.kernel.name


def test_expected_winners() -> None:
    assert winner("cpu") == "torch_w8a16"
    for target in ("sm89", "sm90", "gfx950"):
        # what was not run on hardware is not in front of what Inductor generates
        assert winner(target, m=1) == winner(target, m=None) == "torch_w8a16"
    for target in ("sm80", "gfx90a", "gfx1100", "gfx942"):  # Inductor does not convert e4m3fn
        assert winner(target, m=1) == winner(target, m=None) == "triton_w8a16"
        assert winner(target, dtype=F32) is None
    assert winner("xpu-bmg") is None
    assert winner("xpu-bmg+vllm_xpu") == "xpu_woq"
    assert winner("sm90", m=1, dtype=F32) == "torch_w8a16"
    assert winner("sm90", m=1, n=None) == "torch_w8a16"


@pytest.mark.parametrize("target", ["sm80", "sm86", "gfx90a", "gfx1100", "sm90", "cpu"])
def test_a_product_of_codes_is_never_made_weight_only_unasked(target: str) -> None:
    where = Target.parse(target)
    choice = choose(where, problem("token", "channel", target=where), Options())
    assert not any(kernel.weight_only for _, kernel in choice.plan)
    reasons = {r.kernel: r.verdict.code for r in choice.rejected}
    for name in weight_only_names():
        assert reasons[name] in ("FP8-L040", "FP8-L001")


def test_options() -> None:
    assert Options.resolve({}, force="w8a16", prefer=["w8a16"]).force == "w8a16"
    with pytest.raises(OptionError, match="w8a17"):
        Options.resolve({}, force="w8a17")
    where, p = site("cpu")
    assert choose(where, p, Options(force="w8a16")).why == "forced"
    assert choose(where, p, Options(prefer=("w8a16",))).why == "preferred"
    assert choose(where, p, Options(prefer=("w8a16",))).note == ""
    # what says how codes are multiplied says nothing about this
    assert choose(where, p, Options(force="cpu")).text.endswith("torch_w8a16")
    assert not choose(where, p, Options(disable=("w8a16",))).plan
    where, p = site("xpu-bmg")
    with pytest.raises(NoKernelError, match=r"'w8a16' is forced.*\n(.*\n)*.*xpu_woq: FP8-L011"):
        choose(where, p, Options(force="w8a16"))
    where = Target.parse("cpu")
    with pytest.raises(NoKernelError, match="FP8-L040"):
        choose(where, problem(target=where), Options(force="torch_w8a16"))


# ---- what is emitted -----------------------------------------------------------------------------

EMITTED = {
    "torch_w8a16": ("cpu", "channel", {"bias": BF16}),
    "torch_w8a16_rounded": (
        "sm90", "channel", {"bias": BF16, "form": "weight,bfloat16,bfloat16,inside"},
    ),
    "torch_w8a16_blocks": ("cpu", "group128x128", {"n": 200, "k": 256}),
    "triton_w8a16": ("sm80", "channel", {"bias": BF16, "form": "weight,bfloat16,bfloat16,inside"}),
    "xpu_woq": ("xpu-bmg+vllm_xpu", "channel", {"bias": BF16}),
    "vllm_cpu_tensor": (
        "x86-amx+vllm", "tensor",
        {"bias": BF16, "n": 64, "k": 256, "form": "weight,bfloat16,bfloat16,inside"},
    ),
    "vllm_marlin": (
        "sm80+vllm", "channel",
        {"bias": BF16, "n": 64, "k": 256, "form": "product,bfloat16,bfloat16,after"},
    ),
    "vllm_cpu_block": ("x86-amx+vllm", "group128x128", {"n": 160, "k": 256}),
}  # fmt: skip


def emitted(name: str, device: str | None = None, m: int = 5) -> tuple[Any, Any]:
    target, weight, changes = EMITTED[name]
    where, p = site(target if device is None else "cpu", weight, **changes)
    kernel = name.removesuffix("_rounded").removesuffix("_blocks")
    return build(find(kernel).emit, Target.parse(target), p, device=device, m=m), p


@pytest.mark.parametrize("name", EMITTED)
def test_golden(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"lowerings/{name}", render(emitted(name)[0].module.graph))


def test_a_golden_graph_for_every_weight_only_kernel() -> None:
    assert set(weight_only_names()) <= set(EMITTED)


@pytest.mark.parametrize("m", [0, 1, 17])
@pytest.mark.parametrize("name", EMITTED)
def test_numbers_are_those_of_the_generic_operator(name: str, m: int) -> None:
    built, p = emitted(name, "cpu", m)
    given = operands(p, m, "cpu", seed=m)
    result = Reference(built.module).run(*(given[key] for key in built.names))[0]
    wanted = weight_only_product(
        given["a"], given["b"], given["scale_b"], given.get("bias"), p.out_dtype, str(p.weight),
        p.form,
    )  # fmt: skip
    assert torch.equal(result, wanted)


class Reference(fx.Interpreter):
    """Runs a graph with every operator of one kernel by its reference."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if getattr(target, "namespace", "") == "fp8pass":
            return weight_only_product(*args, **kwargs)
        return super().call_function(target, args, kwargs)


# ---- the rewrite ---------------------------------------------------------------------------------


def dynamic(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = (x.float().abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-12)
    return (x.float() / scale).clamp(-448.0, 448.0).to(E4), scale


def static(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(-448.0, 448.0).to(E4)


def norm(x: Tensor, w: Tensor) -> Tensor:
    h = x.float()
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def product_dynamic(x: Tensor, w: Tensor, sb: Tensor, si: Tensor, b: Tensor) -> Tensor:
    q, s = dynamic(x)
    return torch._scaled_mm(q, w.t(), s, sb, bias=b, out_dtype=BF16)


def product_static(x: Tensor, w: Tensor, sb: Tensor, si: Tensor, b: Tensor) -> Tensor:
    return torch._scaled_mm(static(x, si), w.t(), si, sb[0, 0], bias=b, out_dtype=BF16)


def product_written_out(x: Tensor, w: Tensor, sb: Tensor, si: Tensor, b: Tensor) -> Tensor:
    q, s = dynamic(x)
    return (torch.mm(q.float(), w.float().t()) * s * sb + b.float()).to(BF16)


def product_of_norm(x: Tensor, w: Tensor, sb: Tensor, si: Tensor, b: Tensor) -> Tensor:
    q, s = dynamic(norm(x, torch.ones_like(x[0])))
    return torch._scaled_mm(q, w.t(), s, sb, bias=b, out_dtype=BF16)


def product_of_rank_3(x: Tensor, w: Tensor, sb: Tensor, si: Tensor, b: Tensor) -> Tensor:
    q, s = dynamic(x.reshape(1, *x.shape))
    out = torch._scaled_mm(
        q.reshape(-1, x.shape[-1]), w.t(), s.reshape(-1, 1), sb, bias=b, out_dtype=BF16
    )
    return out.reshape(1, -1, w.shape[0])


PRODUCTS = (
    product_dynamic, product_static, product_written_out, product_of_norm, product_of_rank_3,
)  # fmt: skip


def given(m: int = 64) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(m, 256, generator=g).to(BF16)
    w = (torch.randn(48, 256, generator=g) * 32).clamp(-448, 448).to(E4)
    sb = torch.rand(1, 48, generator=g) * 0.01 + 0.001
    return x, w, sb, torch.tensor(4.0 / 448), torch.zeros(48, dtype=BF16)


def calls(graph: fx.Graph) -> list[str]:
    return [str(n.target) for n in graph.nodes if n.op == "call_function"]


def never_sees_codes(graph: fx.Graph) -> None:
    """No weight-only operator has codes as activations, and nothing is made fp8."""
    for node in graph.nodes:
        if any(f"fp8pass.{name}." in str(node.target) for name in OPERATORS):
            assert node.args[0].meta["val"].dtype in (BF16, F16, F32)


def quantises(graph: fx.Graph) -> list[fx.Node]:
    """Calls that make fp8 of something that is not fp8."""
    found = []
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, Tensor) and value.dtype in FP8_DTYPES:
            inputs = [n.meta["val"].dtype for n in node.all_input_nodes]
            if not any(dtype in FP8_DTYPES for dtype in inputs):
                found.append(node)
    return found


@pytest.mark.parametrize("stage", ["all", "joint"])
@pytest.mark.parametrize("options", [{"force": "w8a16"}, {"prefer": "torch_w8a16"}], ids=str)
@pytest.mark.parametrize("fn", PRODUCTS)
def test_the_activations_are_no_longer_quantised(fn: Any, options: Any, stage: str) -> None:
    data = given()
    passed = Passed(trace(fn, *data), stage=stage, **options)
    after = passed.after.graph
    never_sees_codes(after)
    assert not quantises(after)
    assert not any("amax" in call or "clamp" in call for call in calls(after)), "a scale is left"
    (quantise,) = passed.sites("quantize")
    assert (quantise.status, quantise.kernel) == ("lowered", "w8a16")
    x, w, sb, _, b = data
    if fn is product_of_norm:
        x = norm(x, torch.ones_like(x[0]))
    scale = sb[0, 0] if fn is product_static else sb
    if fn is product_static:  # some values saturate, and still do
        assert bool((x.abs() > 4.0).any())
        x = x.clamp(-4.0, 4.0)
    wanted = (x.float() @ (w.float().t() * scale) + b.float()).double()
    (result,) = run(passed.after, *data)
    result = result.reshape(wanted.shape)
    ulp = wanted.abs() * 2.0**-8
    summands = x.double().abs() @ (w.double().t() * scale).abs()
    assert bool(((result.double() - wanted).abs() <= ulp + summands * 2.0**-18).all())
    (codes_result,) = run(passed.before, *data)
    distance = (codes_result.reshape(wanted.shape).double() - wanted).norm() / wanted.norm()
    assert 0.015 < float(distance) < 0.04  # about 2.6 %: another function of the inputs


def test_the_report_says_so() -> None:
    passed = Passed(trace(product_dynamic, *given()), force="w8a16")
    (found,) = passed.sites("scaled_mm", "lowered")
    assert found.kernel == "torch_w8a16" and found.message.startswith("forced; W8A16 in place of")
    assert "float8_e4m3fn/dynamic/token" in found.message and "2.6 %" in found.message
    assert found.key == "bfloat16 x float8_e4m3fn/static/channel"


@pytest.mark.parametrize("options", [{}, {"numerics": "fast"}, {"prefer": "cpu"}], ids=str)
def test_nothing_of_it_unasked(options: Any) -> None:
    passed = Passed(trace(product_dynamic, *given()), **options)
    assert quantises(passed.after.graph)
    (found,) = passed.sites("scaled_mm", "lowered")
    assert found.kernel == "cpu"


def test_what_is_preferred_before_it_comes_first() -> None:
    traced = trace(product_dynamic, *given())
    for prefer, kernel in (("cpu,w8a16", "cpu"), ("w8a16,cpu", "torch_w8a16")):
        (found,) = Passed(traced, prefer=prefer).sites("scaled_mm", "lowered")
        assert found.kernel == kernel and found.message.startswith("preferred")
    # a preferred kernel that cannot be had is none
    (found,) = Passed(traced, prefer="triton_w8a16").sites("scaled_mm", "lowered")
    assert found.kernel == "cpu" and "triton_w8a16 was not used" in found.message


def test_readers_that_stay_keep_the_quantise() -> None:
    def fn(x: Tensor, w: Tensor, sb: Tensor, nw: Tensor) -> tuple[Tensor, ...]:
        y = norm(x, nw)
        q, s = dynamic(y)
        return torch._scaled_mm(q, w.t(), s, sb, out_dtype=BF16), q, s

    x, w, sb, _, _ = given()
    data = x, w, sb, vector(256)
    passed = Passed(trace(fn, *data), force="w8a16")
    never_sees_codes(passed.after.graph)
    assert passed.fusions == 1 and len(quantises(passed.after.graph)) == 1
    before, after = run(passed.before, *data), run(passed.after, *data)
    for old, new in zip(before[1:], after[1:], strict=True):
        assert torch.equal(old.float(), new.float())
    y = norm(x, vector(256))
    wanted = weight_only_product(y, w.t(), sb, None, BF16, "float8_e4m3fn/static/channel")
    torch.testing.assert_close(after[0], wanted, rtol=2**-7, atol=1e-3)


def test_one_quantise_of_two_products() -> None:
    def fn(x: Tensor, w: Tensor, sb: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        q, s = dynamic(x)
        first = torch._scaled_mm(q, w.t(), s, sb, out_dtype=BF16)
        return first, torch._scaled_mm(q, v.t(), s, sb, out_dtype=BF16)

    x, w, sb, _, _ = given()
    passed = Passed(trace(fn, x, w, sb, w.clone()), force="w8a16")
    assert not quantises(passed.after.graph)
    assert len(passed.sites("scaled_mm", "lowered")) == 2


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("op", ["rms_norm_quant", "add_rms_norm_quant"])
def test_a_quantise_that_the_model_fused_with_its_norm(op: str, keep: bool) -> None:
    quant_form, norm_form = str(fp8pass.ops.dynamic_form("token")), _norm_form()

    def fn(x: Tensor, w: Tensor, sb: Tensor, nw: Tensor) -> tuple[Tensor, ...]:
        more = (x,) if op.startswith("add") else ()
        made = getattr(torch.ops.fp8pass, op)(x, *more, nw, None, 1e-6, norm_form, quant_form, keep)
        keys = "float8_e4m3fn/dynamic/token", "float8_e4m3fn/static/channel", False, None
        out = torch.ops.fp8pass.scaled_mm(made[0], w.t(), made[1], sb, None, BF16, *keys)
        return (out, made[2]) if keep else (out,)

    x, w, sb, _, _ = given()
    data = x, w, sb, vector(256)
    passed = Passed(trace(fn, *data), force="w8a16")
    never_sees_codes(passed.after.graph)
    total = x + x if op.startswith("add") else x
    wanted = weight_only_product(
        norm(total, vector(256)), w.t(), sb, None, BF16, "float8_e4m3fn/static/channel"
    )
    after = run(passed.after, *data)
    torch.testing.assert_close(after[0], wanted, rtol=2**-7, atol=1e-3)
    (found,) = passed.sites("scaled_mm", "lowered")
    assert found.kernel == "torch_w8a16"


def _norm_form() -> str:
    passed = Passed(trace(lambda x, w: (dynamic(norm(x, w))[0],), values(4, 256), vector(256)))
    (node,) = [n for n in passed.fused.graph.nodes if "rms_norm_quant" in str(n.target)]
    return str(node.args[4])


def with_other_scale(x: Tensor, w: Tensor, sb: Tensor, other: Tensor) -> Tensor:
    q, _ = dynamic(x)
    return torch._scaled_mm(q, w.t(), other, sb, out_dtype=BF16)


def with_altered_scale(x: Tensor, w: Tensor, sb: Tensor, other: Tensor) -> Tensor:
    q, s = dynamic(x)
    return torch._scaled_mm(q, w.t(), s * other, sb, out_dtype=BF16)


def with_given_codes(x: Tensor, w: Tensor, sb: Tensor, other: Tensor) -> Tensor:
    return torch._scaled_mm(x.to(E4), w.t(), other, sb, out_dtype=BF16)


@pytest.mark.parametrize("fn", [with_other_scale, with_altered_scale, with_given_codes])
def test_what_cannot_be_proven_is_not_made(fn: Any) -> None:
    x, w, sb, _, _ = given()
    data = x, w, sb, torch.rand(64, 1) + 0.1
    traced = trace(fn, *data)
    passed = Passed(traced, prefer="w8a16")
    (found,) = passed.sites("scaled_mm", "lowered")
    assert found.kernel == "cpu" and "no weight-only product" in found.message
    (old,), (new,) = run(passed.before, *data), run(passed.after, *data)
    torch.testing.assert_close(new, old, rtol=2**-7, atol=1e-3)
    with pytest.raises(NoKernelError, match="FP8-L042"):
        Passed(traced, force="w8a16")


def test_any_number_of_rows_adds_no_guard() -> None:
    data = given()
    traced = trace(product_of_norm, *data, dynamic=[0])
    first = next(iter(traced.graph.nodes)).meta["val"]
    before = len(first.fake_mode.shape_env.guards)
    passed = Passed(traced, force="w8a16")
    assert len(first.fake_mode.shape_env.guards) == before
    assert not quantises(passed.after.graph)


def test_fuel_stops_it() -> None:
    passed = Passed(trace(product_dynamic, *given()), prefer="w8a16", fuel=0)
    assert quantises(passed.after.graph)


def test_a_product_that_the_model_wrote_keeps_its_nodes() -> None:
    def fn(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, (w.float() * s).to(BF16))

    passed = Passed(trace(fn, values(5, 32), codes(48, 32), torch.rand(48, 1)))
    (found,) = passed.sites("scaled_mm", "lowered")
    assert found.kernel == "torch_w8a16"
    assert calls(passed.after.graph) == calls(passed.before.graph)


class Linear(torch.nn.Module):
    """A dynamically quantised linear behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        _, w, sb, _, _ = given()
        for name, value in (("w", w), ("sb", sb), ("nw", vector(256))):
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        q, s = dynamic(norm(x, self.nw))
        return torch._scaled_mm(q, self.w.t(), s, self.sb, out_dtype=BF16)


@pytest.mark.parametrize("target", ["sm80", "gfx90a", "sm90"])
def test_graphs_for_devices_that_are_absent(target: str) -> None:
    """Unasked, a device without fp8 gets no weight-only product; asked, the own kernel."""
    x = values(5, 256)
    plain = graphs_for(Linear(), x, target=target)
    assert not any("w8a16" in call for call in calls(plain.graph.after.graph))
    asked = graphs_for(Linear(), x, target=target, force="triton_w8a16")
    assert "fp8pass.triton_w8a16_mm.default" in calls(asked.graph.after.graph)
    never_sees_codes(asked.graph.after.graph)
    assert not quantises(asked.graph.after.graph)


def test_compiled() -> None:
    model, x = Linear(), given()[0]
    torch._dynamo.reset()
    with torch.no_grad():
        out = torch.compile(
            model, backend=fp8pass.fp8pass_backend, options={"fp8pass.force": "w8a16"}
        )(x)
    (found,) = reports()[-1].select("scaled_mm")
    assert (found.status, found.kernel) == ("lowered", "torch_w8a16")
    wanted = weight_only_product(
        norm(x, model.nw), model.w.t(), model.sb, None, BF16, "float8_e4m3fn/static/channel"
    )
    torch.testing.assert_close(out, wanted, rtol=2**-6, atol=1e-2)


def test_unquantised_activations_are_no_key_of_codes() -> None:
    assert site("cpu")[1].weight_only and not problem().weight_only
    assert unquantised(BF16).dtype not in FP8_DTYPES


class TwoLinears(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = torch.nn.Linear(64, 96, bias=False, dtype=BF16)
        self.down_proj = torch.nn.Linear(96, 64, bias=False, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.up_proj(x))
        return y


@pytest.mark.parametrize("option", ["force", "prefer"])
@pytest.mark.parametrize("value", ["down_proj=w8a16", "down_proj=torch_w8a16"])
def test_asked_for_at_some_sites_alone(option: str, value: str) -> None:
    """The other product keeps its quantised activations."""
    torch.manual_seed(0)
    model = TwoLinears().eval()
    fp8pass.quantize_(model, "dynamic")
    x = values(5, 64)
    report = fp8pass.explain(model, x, **{option: value})
    kernels = {site.where.split()[0]: site.kernel for site in report.select("scaled_mm")}
    assert kernels["down_proj"] == "torch_w8a16"
    assert kernels["up_proj"] not in (*weight_only_names(), "")
    statuses = sorted(site.status for site in report.select("quantize"))
    assert statuses == ["left", "lowered"]  # one left to Inductor, one gone with its product
