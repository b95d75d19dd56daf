"""What the operators compute, against float64, against their parts and against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import assert_same_bits, bits, codes, ordered, values, vector

from fp8pass.errors import OptionError
from fp8pass.ops import (
    SPECS,
    ActForm,
    LayerNormForm,
    NormForm,
    QuantForm,
    dynamic_form,
    static_form,
)
from fp8pass.ops.forms import MODEL_DTYPES

ops = torch.ops.fp8pass
E4 = torch.float8_e4m3fn
DTYPES = sorted(MODEL_DTYPES, key=str)
ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}


def norm_forms() -> list[str]:
    return [
        f"{mean},{root},{weight},{dtype}"
        for mean in NormForm.MEANS
        for root in NormForm.ROOTS
        for weight in NormForm.WEIGHTS
        for dtype in ("float32", "bfloat16", "float16")
    ]


# ---- norms and activations against float64 -------------------------------------------------------


@pytest.mark.parametrize("form", norm_forms())
def test_rms_norm_against_float64(form: str) -> None:
    parsed = NormForm.parse(form)
    x = values(7, 96, dtype=torch.float32)
    w = None if parsed.weight == "none" else vector(96, torch.float32)
    got = ops.rms_norm(x, w, 1e-5, form)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    if w is not None:
        exact = exact * w.double()
    torch.testing.assert_close(
        got.double(), exact, rtol=2 * ULP[parsed.mid] + 1e-6, atol=1e-6, check_dtype=False
    )


@pytest.mark.parametrize("variance", LayerNormForm.VARIANCES)
@pytest.mark.parametrize("root", LayerNormForm.ROOTS)
@pytest.mark.parametrize("rest", ["none,bfloat16", "after_cast,bfloat16", "before_cast,float32"])
def test_layer_norm_against_float64(variance: str, root: str, rest: str) -> None:
    x = values(7, 96, dtype=torch.float32) + 3
    plain = rest.startswith("none")
    w, b = (None, None) if plain else (vector(96, torch.float32), vector(96, torch.float32, 5))
    form = f"{variance},{root},{rest}"
    exact = torch.nn.functional.layer_norm(
        *(x.double(), (96,), None if w is None else w.double(), None if b is None else b.double())
    )
    narrow = 0.0 if rest.endswith("float32") else ULP[torch.bfloat16]
    got = ops.layer_norm(x, w, b, 1e-5, form).double()
    torch.testing.assert_close(got, exact, rtol=2 * narrow + 1e-5, atol=2 * narrow + 1e-5)
    for one in ((w, None), (None, b)):
        if not plain:
            both = ops.layer_norm(x, *one, 1e-5, form)
            assert both.dtype == torch.float32 and not torch.equal(both.double(), got)


@pytest.mark.parametrize("silu", ActForm.SILUS)
@pytest.mark.parametrize("mid", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul_against_float64(silu: str, mid: torch.dtype, dtype: torch.dtype) -> None:
    gate, up = values(7, 96, dtype=dtype), values(7, 96, dtype=dtype, seed=5)
    got = ops.silu_mul(gate, up, str(ActForm(silu, mid, dtype)))
    exact = gate.double() * gate.double().sigmoid() * up.double()
    tolerance = 2 * (ULP[mid] + ULP[dtype]) + 1e-6
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residual_is_rounded_before_the_norm(dtype: torch.dtype) -> None:
    x, r, w = values(5, 64, dtype=dtype), values(5, 64, dtype=dtype, seed=3), vector(64, dtype)
    name = str(dtype).removeprefix("torch.")
    y, total = ops.add_rms_norm(x, r, w, 1e-6, f"mean,rsqrt,after_cast,{name}")
    assert_same_bits(
        [total, y], [x + r, ops.rms_norm(x + r, w, 1e-6, f"mean,rsqrt,after_cast,{name}")]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_residual_that_is_not_rounded_before_the_norm(dtype: torch.dtype) -> None:
    x, r, w = values(64, 64, dtype=dtype), values(64, 64, dtype=dtype, seed=3), vector(64, dtype)
    form = f"mean,rsqrt,before_cast,{str(dtype).removeprefix('torch.')}"
    y, total = ops.add_rms_norm(x, r, w, 1e-6, f"{form},sum=float32")
    wide = x.float() + r.float()
    assert_same_bits([total, y], [x + r, ops.rms_norm(wide, w, 1e-6, form)])
    rounded, _ = ops.add_rms_norm(x, r, w, 1e-6, form)
    assert (y != rounded).float().mean() > 0.01, "another function"


@pytest.mark.parametrize("root", ["recip_sqrt", "div_sqrt"])
@pytest.mark.parametrize("eps", NormForm.EPSILONS)
def test_where_epsilon_goes(eps: str, root: str) -> None:
    x = torch.tensor([[0.0, 0.0], [1e-3, 1e-3], [1.0, -1.0]])
    got = ops.rms_norm(
        x, None, 1e-3, f"mean,{root},none,float32,eps={eps}".replace(",eps=inside", "")
    )
    mean = x.double().pow(2).mean(-1, keepdim=True)
    rms = {
        "inside": (mean + 1e-3).sqrt(),
        "max": mean.clamp(min=1e-3).sqrt(),
        "outside": mean.sqrt() + 1e-3,
        "outside_max": mean.sqrt().clamp(min=1e-3),
    }[eps]
    torch.testing.assert_close(got.double(), x.double() / rms, rtol=1e-6, atol=0)


def test_epsilon_counts() -> None:
    """At a root mean square of 1e-3, 1e-5 in place of 1e-6 scales the output by 0.43."""
    x = torch.randn(8, 4096, generator=torch.Generator().manual_seed(0)) * 1e-3
    form = "mean,rsqrt,none,float32"
    ratio = ops.rms_norm(x, None, 1e-5, form) / ops.rms_norm(x, None, 1e-6, form)
    torch.testing.assert_close(
        ratio.mean(), torch.tensor((2e-6 / 1.1e-5) ** 0.5), rtol=0.02, atol=0
    )


# ---- quantises -----------------------------------------------------------------------------------

FORMS = {
    "static": static_form(),
    "token": dynamic_form("token"),
    "tensor": dynamic_form("tensor"),
    "mul": QuantForm(
        E4, "token", torch.float32, "mul", 1 / 448, "amax", 1e-4, "mul_recip", -448.0, 448.0
    ),
    "240": QuantForm(
        E4, "tensor", torch.float32, "given", 240.0, "none", 0.0, "mul_recip", -240.0, 240.0
    ),
}


def nearest(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes nearest to float64 values (ties either way), by looking at all finite codes."""
    table = torch.arange(256, dtype=torch.uint8).view(dtype)
    table = table[table.float().isfinite()]
    distance = (value.reshape(-1, 1) - table.double()).abs()
    return table[distance.argmin(1)].reshape(value.shape)


@pytest.mark.parametrize("name", FORMS)
def test_quantize_against_float64(name: str) -> None:
    form, x = FORMS[name], values(6, 64)
    scale = torch.tensor(0.037) if form.static else None
    q, made = ops.quantize(x, scale, str(form))
    if scale is None:
        amax = x.double().abs()
        amax = amax.amax(-1, keepdim=True) if form.granularity == "token" else amax.amax()
        if form.floor == "amax":
            amax = amax.clamp(min=form.floor_value)
        exact = amax / form.qmax if form.scale == "div" else amax * form.qmax
        if form.floor == "scale":
            exact = exact.clamp(min=form.floor_value)
        torch.testing.assert_close(made.double(), exact, rtol=3e-7, atol=0)
    used = (made if scale is None else scale).double()
    wanted = nearest((x.double() / used).clamp(form.lo, form.hi), form.dtype)
    step = (ordered(q) - ordered(wanted)).abs()
    # -0.0 and 0.0 are one value with two codes; a tie may fall either way
    assert int(step[wanted.float() != 0].max()) <= 1
    assert (q.float() == wanted.float()).float().mean() > 0.97


@pytest.mark.parametrize("name", ["token", "tensor", "mul"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_rows_give_the_floor(name: str, dtype: torch.dtype) -> None:
    form = FORMS[name]
    floor = form.floor_value if form.floor == "scale" else form.floor_value * form.qmax
    q, scale = ops.quantize(torch.zeros(3, 16, dtype=dtype), None, str(form))
    assert torch.equal(scale, torch.full_like(scale, floor))
    assert torch.equal(q.view(torch.uint8), torch.zeros(3, 16, dtype=torch.uint8))


def test_without_a_floor_a_zero_row_is_nan() -> None:
    """0 / 0: what the source computes, and what the form says."""
    form = str(dynamic_form("token")).replace("scale,1e-12", "none,0.0")
    q, scale = ops.quantize(torch.zeros(2, 4), None, form)
    assert q.float().isnan().all() and (scale == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("fp8", "top"), [(E4, 448.0), (torch.float8_e4m3fnuz, 240.0), (torch.float8_e5m2, 57344.0)]
)
def test_overflow_nan_and_zero(fp8: torch.dtype, top: float, dtype: torch.dtype) -> None:
    x = torch.tensor([top, top * 1.04, top * 1.2, torch.inf, -torch.inf, torch.nan, -0.0, 0.0])
    q, _ = ops.quantize(x.to(dtype), torch.tensor(1.0), str(static_form(fp8)))
    got = q.float()
    assert got[:5].tolist() == [top, top, top, top, -top]
    assert got[5].isnan() and (got[6:] == 0).all() and not got[7].signbit()
    assert got[6].signbit() == (fp8 != torch.float8_e4m3fnuz)  # fnuz has no negative zero


@pytest.mark.parametrize("name", ["token", "tensor"])
def test_nan_and_infinity_in_a_dynamic_quantise(name: str) -> None:
    x = torch.tensor([[1.0, torch.nan, 2.0], [1.0, torch.inf, 2.0], [1.0, 2.0, 4.0]])
    q, scale = ops.quantize(x, None, str(FORMS[name]))
    if name == "tensor":
        assert scale.isnan() and q.float().isnan().all()
    else:
        assert scale[0].isnan() and scale[1].isinf() and scale[2].isfinite()
        assert q[0].float().isnan().all() and q[1].float().tolist()[0] == 0.0
        assert q[2].float().tolist() == [112.0, 224.0, 448.0]


@pytest.mark.parametrize("name", ["static", "token"])
def test_scale_and_form_must_agree(name: str) -> None:
    scale = None if name == "static" else torch.tensor(1.0)
    with pytest.raises(ValueError, match="disagree"):
        ops.quantize(values(3, 8), scale, str(FORMS[name]))


def test_weight_and_form_must_agree() -> None:
    with pytest.raises(ValueError, match="disagree"):
        ops.rms_norm(values(3, 8), None, 1e-6, "mean,rsqrt,after_cast,bfloat16")
    with pytest.raises(ValueError, match="disagree"):
        ops.rms_norm(values(3, 8), vector(8), 1e-6, "mean,rsqrt,none,bfloat16")
    with pytest.raises(ValueError, match="disagree"):
        ops.layer_norm(values(3, 8), None, None, 1e-6, "var,rsqrt,after_cast,bfloat16")
    with pytest.raises(ValueError, match="disagree"):
        ops.layer_norm(values(3, 8), None, vector(8), 1e-6, "var,rsqrt,none,bfloat16")


@pytest.mark.parametrize(
    "call",
    [
        lambda bad: ops.quantize(values(3, 8), None, bad),
        lambda bad: ops.rms_norm(values(3, 8), None, 1e-6, bad),
        lambda bad: ops.layer_norm(values(3, 8), None, None, 1e-6, bad),
        lambda bad: ops.silu_mul(values(3, 8), values(3, 8), bad),
    ],
)
@pytest.mark.parametrize("bad", ["", "mean", "div,bfloat16", "a,b,c,d", "x" * 30 + ",,,,,,,,,"])
def test_unknown_forms_raise(call: Any, bad: str) -> None:
    with pytest.raises(OptionError):
        call(bad)


# ---- activations ---------------------------------------------------------------------------------

EXACT: dict[str, Any] = {
    "div": F.silu,
    "sigmoid": F.silu,
    "gelu_erf": F.gelu,
    "gelu_erf_div": F.gelu,
    "gelu_tanh": lambda g: F.gelu(g, approximate="tanh"),
    "gelu_tanh_pow": lambda g: F.gelu(g, approximate="tanh"),
    "gelu_quick": lambda g: g * torch.sigmoid(1.702 * g),
    "gpt_oss": lambda g: g.clamp(max=7) * torch.sigmoid(1.702 * g.clamp(max=7)),
    "relu": F.relu,
    "relu2": lambda g: F.relu(g) ** 2,
}


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("act", ActForm.ACTS)
def test_act_mul_against_float64(act: str, compute: torch.dtype) -> None:
    gate, up = values(40, 64), values(40, 64, seed=1)
    form = str(ActForm(act, compute, torch.float32, compute))
    # gates whose erf or tanh is close to -1 lose their bits in 1 + erf, in torch as well
    gate = gate.clamp(min=-1.0)
    want, factor = EXACT[act](gate.double()), up.double()
    if act == "gpt_oss":
        factor = factor.clamp(-7, 7) + 1
    else:
        got = ops.act_mul(gate, None, form).double()
        bound = 1e-5 if compute == torch.float32 else 0.15
        assert torch.all((got - want).abs() <= bound * want.abs() + 1e-7)
    got = ops.act_mul(gate, up, form)
    assert got.dtype == torch.float32 and got.is_contiguous()
    bound = 2.0**-7 if compute == torch.float32 else 0.15
    assert torch.all((got.double() - want * factor).abs() <= bound * (want * factor).abs() + 1e-6)


def test_activations_refuse_what_they_do_not_know() -> None:
    x = values(3, 8)
    with pytest.raises(OptionError, match="without an up"):
        ops.act_mul(x, None, "gpt_oss,bfloat16,bfloat16")
    with pytest.raises(OptionError, match="not one of SiLU"):
        ops.silu_mul(x, x, "relu,bfloat16,bfloat16")
    with pytest.raises(OptionError, match="is written"):
        ops.act_mul(x, x, "relu,bfloat16,bfloat16,float32")
    with pytest.raises(OptionError, match="activation 'mish'"):
        ops.act_mul(x, x, "mish,bfloat16,bfloat16")


# ---- fused operators are their parts -------------------------------------------------------------


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "layer_norm", "silu_mul", "act_mul"])
def test_fused_is_its_parts(name: str) -> None:
    fused = SPECS[f"{name}_quant"]
    for args in fused.inputs(torch.Generator().manual_seed(3)):
        if name in ("silu_mul", "act_mul"):
            gate, up, scale, form, quant_form, keep = args
            parts: tuple[Any, ...] = (getattr(ops, name)(gate, up, form),)
        elif name == "layer_norm":
            x, w, b, scale, eps, form, quant_form, keep = args
            parts = (ops.layer_norm(x, w, b, eps, form),)
        elif name == "rms_norm":
            x, w, scale, eps, form, quant_form, keep = args
            parts = (ops.rms_norm(x, w, eps, form),)
        else:
            x, r, w, scale, eps, form, quant_form, keep = args
            parts = ops.add_rms_norm(x, r, w, eps, form)
        q, made = ops.quantize(parts[0], scale, quant_form)
        y = parts[0] if keep else parts[0].new_empty((0,))
        assert_same_bits(fused.op(*args), (q, made, y, *parts[1:]))


# ---- the scaled product --------------------------------------------------------------------------

KEYS = {
    False: ("float8_e4m3fn/dynamic/tensor", "float8_e4m3fn/static/tensor"),
    True: ("float8_e4m3fn/dynamic/token", "float8_e4m3fn/static/channel"),
}


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    sa: torch.Tensor,
    sb: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    keys = KEYS[sa.dim() == 2 and sa.numel() > 1]
    result = ops.scaled_mm(a, b, sa, sb, bias, out, *keys, False, None)
    assert_same_bits([ops.cpu_scaled_mm(a, b, sa, sb, bias, out, None)], [result])
    return result


def assert_close_to_float64(
    got: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    sa: torch.Tensor,
    sb: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    """The contract of products: 2 ulp of the result plus 2^-10 of the sum of magnitudes."""
    exact = (a.double() @ b.double()) * sa.double() * sb.double()
    magnitude = (a.double().abs() @ b.double().abs()) * sa.double() * sb.double()
    if bias is not None:
        exact = exact + bias.double()
    limit = 2 * ULP[got.dtype] * exact.abs() + 2.0**-10 * magnitude + 1e-7
    assert ((got.double() - exact).abs() <= limit).all()
    if exact.numel():
        mean = ((got.double() - exact).abs() / exact.abs().clamp(min=1e-9)).median()
        assert mean < 5e-3


@pytest.mark.parametrize("out", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("sa", "sb"),
    [
        ((), ()),
        ((), (1,)),
        ((1,), (1, 1)),
        ((1, 1), (1, 1)),
        ((16, 1), (1, 48)),
        ((16, 1), ()),
        ((16, 1), (1, 1)),
        ((1, 1), (1, 48)),
    ],
    ids=str,
)
def test_scale_shapes(sa: tuple[int, ...], sb: tuple[int, ...], out: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    a = (torch.randn(16, 32, generator=generator) * 16).to(E4)
    b = (torch.randn(48, 32, generator=generator) * 16).to(E4).t()
    scale_a = torch.rand(sa, generator=generator) * 0.01 + 0.001
    scale_b = torch.rand(sb, generator=generator) * 0.01 + 0.001
    got = product(a, b, scale_a, scale_b, None, out)
    assert got.dtype == out and got.is_contiguous()
    assert_close_to_float64(got, a, b, scale_a, scale_b)


@pytest.mark.parametrize("out", DTYPES, ids=str)
@pytest.mark.parametrize("bias", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [False, True])
def test_bias_is_added_after_scaling(rows: bool, bias: torch.dtype, out: torch.dtype) -> None:
    a, b = codes(16, 32), codes(48, 32, seed=3).t()
    sa = torch.rand((16, 1) if rows else ()) * 0.01 + 0.001
    sb = torch.rand((1, 48) if rows else ()) * 0.01 + 0.001
    vector_ = torch.randn(48).to(bias)
    got = product(a, b, sa, sb, vector_, out)
    assert_close_to_float64(got, a, b, sa, sb, vector_)
    early = (a.float() @ b.float() + vector_.float()) * sa * sb
    assert (got.float() - early).abs().max() > 0.5


@pytest.mark.parametrize("m", [0, 1, 2, 17])
@pytest.mark.parametrize(("k", "n"), [(32, 48), (47, 63), (1, 1), (64, 1)])
@pytest.mark.parametrize("rows", [False, True])
def test_equals_torch_scaled_mm(m: int, k: int, n: int, rows: bool) -> None:
    """Whole numbers and powers of two: every order of the sum gives the same float32."""
    a, b = codes(m, k), codes(n, k, seed=3).t()
    sa = torch.full((m, 1) if rows else (), 0.25)
    sb = torch.rand((1, n) if rows else ()).mul(4).ceil().exp2()
    wanted = torch._scaled_mm(a, b, sa, sb, out_dtype=torch.bfloat16)
    assert_same_bits([product(a, b, sa, sb)], [wanted])


def test_layouts() -> None:
    """Operands in rows, in columns and inside larger buffers."""
    a, b = codes(6, 32), codes(48, 32, seed=3).t()
    one = torch.tensor(1.0)
    wanted = product(a, b, one, one)
    wide = torch.zeros(8, 64, dtype=torch.uint8).view(E4)
    wide.view(torch.uint8)[1:7, 16:48] = a.view(torch.uint8)
    for left in (a, a.t().contiguous().t(), wide[1:7, 16:48]):
        for right in (b, b.contiguous()):
            assert_same_bits([product(left, right, one, one)], [wanted])


def test_e5m2() -> None:
    a, b = codes(6, 32, dtype=torch.float8_e5m2), codes(48, 32, dtype=E4, seed=3).t()
    one = torch.tensor(0.5)
    keys = ("float8_e5m2/dynamic/tensor", "float8_e4m3fn/static/tensor")
    got = ops.scaled_mm(a, b, one, one, None, torch.float32, *keys, False, None)
    assert torch.equal(got, a.float() @ b.float() * 0.25)


def test_nan_and_overflow_of_a_product() -> None:
    a = torch.tensor([[448.0, 448.0], [torch.nan, 0.0]]).to(E4)
    b = torch.tensor([[448.0, -448.0], [448.0, 448.0]]).to(E4)
    one = torch.tensor(1.0)
    got = product(a, b, one, one, None, torch.float16)
    assert got[0].tolist() == [torch.inf, 0.0]
    assert got[1].isnan().all()
    assert bits(got).shape == (2, 2)
