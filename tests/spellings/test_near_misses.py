"""Near-misses: what looks like a known spelling and is another function must not be taken for it.

Each case stands beside its positive control, the same graph with the one thing put right. Whatever
is read of a near-miss (half of it may well be) must change no number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from graphs import Passed, Reading, assert_same_bits, run, trace, values, vector
from spell import E4, llama, static, token

Tensor = torch.Tensor
Fn = Callable[..., tuple[Tensor, ...]]
EPS = 1e-6
M, H = 6, 64


@dataclass(frozen=True)
class Case:
    """``fn`` must have no fusion where ``control`` has one.

    Attributes:
        reads: how many sites of each kind are read in the near-miss (norm, activation, quantize).
    """

    fn: Fn
    control: Fn
    inputs: tuple[Tensor, ...]
    reads: tuple[int, int, int]
    control_inputs: tuple[Tensor, ...] | None = None


# ---- norms ---------------------------------------------------------------------------------------


def norm(
    x: Tensor,
    w: Tensor,
    s: Tensor,
    *,
    mean: Callable[[Tensor], Tensor] = lambda h: h.pow(2).mean(-1, keepdim=True),
    shift: Callable[[Tensor], Tensor] = lambda v: v + EPS,
    wide: Callable[[Tensor], Tensor] = lambda x: x.float(),
    of: Callable[[Tensor], Tensor] = lambda h: h,
    scale: Callable[[Tensor, Tensor], Tensor] = lambda y, w: w * y,
) -> tuple[Tensor, ...]:
    h = wide(x)
    h = of(h) * torch.rsqrt(shift(mean(h)))
    return static(scale(h.to(x.dtype), w), s)


def with_(**parts: object) -> Fn:
    return lambda x, w, s: norm(x, w, s, **parts)  # type: ignore[arg-type]


SQUARE = values(H, H)  # as many rows as columns: dims can only be told apart by their number
X, W, S = values(M, H), vector(H), torch.tensor(0.02)
NORM_INPUTS = (X, W, S)
ROWS = (SQUARE, W, S)

NORM_CASES = {
    "mean_over_rows": Case(
        with_(mean=lambda h: h.pow(2).mean(0, keepdim=True)), norm, ROWS, (0, 0, 1)
    ),
    "mean_over_everything": Case(
        with_(mean=lambda h: h.pow(2).mean((0, 1), keepdim=True)), norm, NORM_INPUTS, (0, 0, 1)
    ),
    "mean_without_keepdim": Case(with_(mean=lambda h: h.pow(2).mean(-1)), norm, ROWS, (0, 0, 1)),
    "mean_of_abs": Case(
        with_(mean=lambda h: h.abs().mean(-1, keepdim=True)), norm, NORM_INPUTS, (0, 0, 1)
    ),
    "mean_of_cubes": Case(
        with_(mean=lambda h: h.pow(3).mean(-1, keepdim=True)), norm, NORM_INPUTS, (0, 0, 1)
    ),
    "mean_of_a_product": Case(
        with_(mean=lambda h: (h * (h + 1)).mean(-1, keepdim=True)), norm, NORM_INPUTS, (0, 0, 1)
    ),
    "sum_over_another_width": Case(
        with_(mean=lambda h: h.pow(2).sum(-1, keepdim=True) / (H - 1)),
        with_(mean=lambda h: h.pow(2).sum(-1, keepdim=True) / H),
        NORM_INPUTS,
        (0, 0, 1),
    ),
    "variance": Case(
        with_(mean=lambda h: h.var(-1, keepdim=True, unbiased=False)),
        norm,
        NORM_INPUTS,
        (0, 0, 1),
    ),
    "eps_subtracted": Case(with_(shift=lambda v: v - EPS), norm, NORM_INPUTS, (0, 0, 1)),
    "eps_is_a_tensor": Case(
        with_(shift=lambda v: v + v.amax() * EPS), norm, NORM_INPUTS, (0, 0, 1)
    ),
    "variance_rounded_to_bf16": Case(
        with_(shift=lambda v: v.bfloat16().float() + EPS), norm, NORM_INPUTS, (0, 0, 1)
    ),
    "variance_in_bf16": Case(
        with_(mean=lambda h: h.bfloat16().pow(2).mean(-1, keepdim=True)),
        norm,
        NORM_INPUTS,
        (0, 0, 1),
    ),
    "rounded_between_x_and_the_root": Case(
        with_(of=lambda h: h.half().float()), norm, NORM_INPUTS, (0, 0, 1)
    ),
    "another_x": Case(with_(of=lambda h: h + 1), norm, NORM_INPUTS, (0, 0, 1)),
    "x_is_scaled": Case(with_(of=lambda h: h * 2), norm, NORM_INPUTS, (0, 0, 1)),
    "x_is_transposed": Case(with_(of=lambda h: h.t()), norm, ROWS, (0, 0, 0)),
    "in_float64": Case(with_(wide=lambda x: x.double()), norm, NORM_INPUTS, (0, 0, 1)),
    "in_bf16": Case(with_(wide=lambda x: x), norm, NORM_INPUTS, (0, 0, 1)),
}


def _weight_case(weight: Tensor) -> Case:
    return Case(norm, norm, (SQUARE, weight, S), (1, 0, 1), ROWS)


WEIGHT_CASES = {
    # read as a norm without weight; the product with the matrix stays outside, so no fusion
    "weight_column": _weight_case(vector(H).view(H, 1)),
    "weight_matrix": _weight_case(values(H, H)),
    "weight_row": _weight_case(vector(H).view(1, H)),
    "weight_one_element": _weight_case(vector(1)),
    "weight_0d": _weight_case(torch.tensor(1.5, dtype=torch.bfloat16)),
}


def weight_added(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    return norm(x, w, s, scale=lambda y, w: w + y)


def used_inside(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    """Something else reads the value before the weight: the norm is read up to there only."""
    h = x.float()
    y = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)
    return *static(w * y, s), y


MORE_NORMS = {
    "weight_added": Case(weight_added, norm, NORM_INPUTS, (1, 0, 1)),
    "value_before_the_weight_is_read": Case(used_inside, norm, NORM_INPUTS, (1, 0, 1)),
}


# ---- quantises -----------------------------------------------------------------------------------


def quantised(fn: Fn) -> Fn:
    """``fn(y, s)`` behind a norm."""
    return lambda x, w, s: fn(llama(x, w, EPS), s)


def per_token(
    y: Tensor,
    s: Tensor,
    *,
    amax: Callable[[Tensor], Tensor] = lambda v: v.abs().amax(-1, keepdim=True),
    scale: Callable[[Tensor], Tensor] = lambda a: (a / 448.0).clamp(min=1e-12),
    finish: Callable[[Tensor], Tensor] = lambda v: v.clamp(-448, 448).to(E4),
) -> tuple[Tensor, ...]:
    wide = y.float()
    made = scale(amax(wide))
    return finish(wide / made), made


def tok(**parts: object) -> Fn:
    return quantised(lambda y, s: per_token(y, s, **parts))  # type: ignore[arg-type]


STATIC, TOKEN = quantised(static), quantised(token)


def static_clamp(lo: float | None, hi: float | None) -> Fn:
    return quantised(lambda y, s: ((y.float() / s).clamp(lo, hi).to(E4),))


def two_scales(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    return ((y.float() / s / (s + 1)).clamp(-448, 448).to(E4),)


def multiplied(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    return ((y.float() * s).clamp(-448, 448).to(E4),)


def offset(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    return ((y.float() / s + 0.5).clamp(-448, 448).to(E4),)


def rounded(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    return ((y.float() / s).bfloat16().clamp(-448, 448).to(E4),)


def rounded_after_the_clamp(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    return ((y.float() / s).clamp(-448, 448).bfloat16().to(E4),)


def rounded_before(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    return ((y.half().float() / s).clamp(-448, 448).to(E4),)


def scale_from_y(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    scale = y.float().mean().abs() + s
    return ((y.float() / scale).clamp(-448, 448).to(E4), scale)


def scale_of_another_quantise(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    """The first is dynamic and fusible; the second divides by twice the scale of the first."""
    scale = (y.float().abs().amax() / 448.0).clamp(min=1e-12) + s
    return ((y.float() / scale).clamp(-448, 448).to(E4),)


def transposed(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    return token(y.t(), s)


def transposed_copy(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    return token(y.t().contiguous(), s)


def sliced(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    return static(y[1:], s)


def mixes_rows(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    return token(y.view(-1, H // 2), s)


def column_of_scales(y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    """Per-token amax, used as if it were one scale per column."""
    scale = (y.float().abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-12)
    return (y.float() / scale.view(1, -1)).clamp(-448, 448).to(E4), scale


INPUTS = (X, W, S)
QUANT_CASES = {
    "clamp_not_symmetric": Case(static_clamp(-448, 400), STATIC, INPUTS, (1, 0, 0)),
    "clamp_beyond_the_largest_code": Case(static_clamp(-500, 500), STATIC, INPUTS, (1, 0, 0)),
    "clamp_missing": Case(
        quantised(lambda y, s: ((y.float() / s).to(E4),)), STATIC, INPUTS, (1, 0, 0)
    ),
    "clamp_on_one_side": Case(static_clamp(None, 448), STATIC, INPUTS, (1, 0, 0)),
    "scale_in_bf16": Case(STATIC, TOKEN, (X, W, S.bfloat16()), (1, 0, 0), INPUTS),
    "scale_in_float64": Case(STATIC, TOKEN, (X, W, S.double()), (1, 0, 0), INPUTS),
    # the second division is a quantise of the quotient, which no norm made
    "two_scales": Case(quantised(two_scales), STATIC, INPUTS, (1, 0, 1)),
    "multiplied_by_the_scale": Case(quantised(multiplied), STATIC, INPUTS, (1, 0, 0)),
    "offset": Case(quantised(offset), STATIC, INPUTS, (1, 0, 0)),
    "quotient_rounded_to_bf16": Case(quantised(rounded), STATIC, INPUTS, (1, 0, 0)),
    "clamped_then_rounded": Case(quantised(rounded_after_the_clamp), STATIC, INPUTS, (1, 0, 0)),
    "value_rounded_to_half": Case(quantised(rounded_before), STATIC, INPUTS, (1, 0, 1)),
    "scale_per_column_given": Case(
        STATIC, quantised(static), (X, W, S.expand(H)), (1, 0, 0), INPUTS
    ),
    "scale_made_from_the_norm": Case(quantised(scale_from_y), STATIC, INPUTS, (1, 0, 1)),
    "amax_with_the_scale_added": Case(
        quantised(scale_of_another_quantise), STATIC, INPUTS, (1, 0, 1)
    ),
    "maximum_without_abs": Case(
        tok(amax=lambda v: v.amax(-1, keepdim=True)), TOKEN, INPUTS, (1, 0, 0)
    ),
    "amax_over_rows": Case(
        tok(amax=lambda v: v.abs().amax(0, keepdim=True)), TOKEN, ROWS, (1, 0, 0)
    ),
    "max_over_rows": Case(
        tok(amax=lambda v: v.abs().max(0, keepdim=True)[0]),
        tok(amax=lambda v: v.abs().max(1, keepdim=True)[0]),
        ROWS,
        (1, 0, 0),
    ),
    "minimum": Case(tok(amax=lambda v: v.abs().amin(-1, keepdim=True)), TOKEN, INPUTS, (1, 0, 0)),
    "amax_of_another_tensor": Case(
        tok(amax=lambda v: (v + 1).abs().amax(-1, keepdim=True)), TOKEN, INPUTS, (1, 0, 0)
    ),
    "amax_without_keepdim": Case(tok(amax=lambda v: v.abs().amax(-1)), TOKEN, ROWS, (1, 0, 0)),
    "amax_rounded_to_bf16": Case(
        tok(amax=lambda v: (v * 1.001).bfloat16().abs().amax(-1, keepdim=True).float()),
        TOKEN,
        INPUTS,
        (1, 0, 0),
    ),
    "two_floors": Case(
        tok(scale=lambda a: (a.clamp(min=1e-4) / 448.0).clamp(min=1e-12)),
        TOKEN,
        INPUTS,
        (1, 0, 0),
    ),
    "scale_with_an_upper_bound": Case(
        tok(scale=lambda a: (a / 448.0).clamp(1e-12, 0.1)), TOKEN, INPUTS, (1, 0, 0)
    ),
    "scale_rounded_to_bf16": Case(
        tok(scale=lambda a: (a / 448.0).bfloat16().float()), TOKEN, INPUTS, (1, 0, 0)
    ),
    "scale_negated": Case(tok(scale=lambda a: a / -448.0), TOKEN, INPUTS, (1, 0, 0)),
    "no_amax": Case(tok(amax=lambda v: v.abs().mean(-1, keepdim=True)), TOKEN, INPUTS, (1, 0, 0)),
    "scales_turned": Case(quantised(column_of_scales), TOKEN, ROWS, (1, 0, 0)),
    "transposed": Case(quantised(transposed), TOKEN, INPUTS, (1, 0, 0)),
    "transposed_copy": Case(quantised(transposed_copy), TOKEN, INPUTS, (1, 0, 1)),
    "some_rows": Case(quantised(sliced), STATIC, INPUTS, (1, 0, 1)),
    "view_mixes_rows": Case(quantised(mixes_rows), TOKEN, INPUTS, (1, 0, 1)),
}


# ---- activations ---------------------------------------------------------------------------------

G, U = values(M, H), values(M, H, seed=1)
ACT_INPUTS = (G, U, S)


def act(
    g: Tensor,
    u: Tensor,
    s: Tensor,
    *,
    silu: Callable[[Tensor], Tensor] = F.silu,
    times: Callable[[Tensor, Tensor], Tensor] = lambda a, u: a * u,
) -> tuple[Tensor, ...]:
    return static(times(silu(g), u), s)


def acts(**parts: object) -> Fn:
    return lambda g, u, s: act(g, u, s, **parts)  # type: ignore[arg-type]


def wide_silu(one: float = 1.0, sign: float = -1.0) -> Callable[[Tensor], Tensor]:
    def silu(g: Tensor) -> Tensor:
        wide = g.float()
        negated = wide.neg() if sign == -1.0 else wide * sign
        return (wide / (negated.exp() + one)).to(g.dtype)

    return silu


def crossed(g: Tensor, u: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    """``g / (1 + exp(-u))``: the exponent is of the other tensor."""
    return static((g.float() / (u.float().neg().exp() + 1)).to(g.dtype) * u, s)


def silu_read_twice(g: Tensor, u: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    value = F.silu(g)
    return *static(value * u, s), value


def gelu(
    root: float = math.sqrt(0.5), one: float = 1.0, half: float = 0.5
) -> Callable[..., Tensor]:
    return lambda g: (g * half) * (torch.erf(g * root) + one)


def gelu_tanh(
    cubic: float = 0.044715, root: float = math.sqrt(2 / math.pi), power: int = 3
) -> Callable[..., Tensor]:
    return lambda g: (0.5 * g) * (1 + torch.tanh(root * (g + cubic * torch.pow(g, power))))


def alone(fn: Callable[[Tensor], Tensor]) -> Fn:
    return lambda g, u, s: static(fn(g), s)


SILU = acts(silu=wide_silu())
ACT_CASES = {
    "silu_of_one_and_exp_of_another": Case(crossed, act, ACT_INPUTS, (0, 0, 1)),
    "plus_two": Case(acts(silu=wide_silu(2.0)), SILU, ACT_INPUTS, (0, 0, 1)),
    "quick_gelu": Case(acts(silu=wide_silu(1.0, -1.702)), SILU, ACT_INPUTS, (0, 0, 1)),
    "exp_of_plus": Case(acts(silu=wide_silu(1.0, 1.0)), SILU, ACT_INPUTS, (0, 0, 1)),
    "mish": Case(acts(silu=F.mish), act, ACT_INPUTS, (0, 0, 1)),
    "gelu_of_another_root": Case(
        acts(silu=gelu(root=0.7)), acts(silu=gelu()), ACT_INPUTS, (0, 0, 1)
    ),
    "gelu_plus_two": Case(acts(silu=gelu(one=2.0)), acts(silu=gelu()), ACT_INPUTS, (0, 0, 1)),
    "gelu_not_halved": Case(acts(silu=gelu(half=0.25)), acts(silu=gelu()), ACT_INPUTS, (0, 0, 1)),
    "gelu_halved_last": Case(
        acts(silu=lambda g: (g * (1 + torch.erf(g * math.sqrt(0.5)))) * 0.5),
        acts(silu=gelu()),
        ACT_INPUTS,
        (0, 0, 1),
    ),
    "gelu_tanh_of_another_cube": Case(
        acts(silu=gelu_tanh(cubic=0.044)), acts(silu=gelu_tanh()), ACT_INPUTS, (0, 0, 1)
    ),
    "gelu_tanh_of_a_rounded_root": Case(
        acts(silu=gelu_tanh(root=0.79788456)), acts(silu=gelu_tanh()), ACT_INPUTS, (0, 0, 1)
    ),
    "gelu_tanh_of_a_square": Case(
        acts(silu=gelu_tanh(power=2)), acts(silu=gelu_tanh()), ACT_INPUTS, (0, 0, 1)
    ),
    "another_quick_gelu": Case(
        acts(silu=lambda g: g * torch.sigmoid(1.7 * g)),
        acts(silu=lambda g: g * torch.sigmoid(1.702 * g)),
        ACT_INPUTS,
        (0, 0, 1),
    ),
    "relu_cubed": Case(alone(lambda g: F.relu(g) ** 3), alone(F.relu), ACT_INPUTS, (0, 0, 1)),
    "relu6": Case(alone(F.relu6), alone(F.relu), ACT_INPUTS, (0, 0, 1)),
    "leaky_relu": Case(alone(F.leaky_relu), alone(F.relu), ACT_INPUTS, (0, 0, 1)),
    "tanh_alone": Case(alone(torch.tanh), alone(F.gelu), ACT_INPUTS, (0, 0, 1)),
    "sigmoid_alone": Case(alone(torch.sigmoid), alone(F.silu), ACT_INPUTS, (0, 0, 1)),
    "gelu_alone_in_float64": Case(
        alone(lambda g: F.gelu(g.double()).bfloat16()), alone(F.gelu), ACT_INPUTS, (0, 0, 1)
    ),
    "gelu_alone_transposed": Case(
        lambda g, u, s: static(F.gelu(g.t()), s), alone(F.gelu), ACT_INPUTS, (0, 0, 0)
    ),
    "added": Case(acts(times=lambda a, u: a + u), act, ACT_INPUTS, (0, 0, 1)),
    "divided": Case(acts(times=lambda a, u: a / u), act, ACT_INPUTS, (0, 0, 1)),
    "squared": Case(acts(times=lambda a, u: a * a), act, ACT_INPUTS, (0, 0, 1)),
    "up_is_a_row": Case(acts(times=lambda a, u: a * u[1]), act, ACT_INPUTS, (0, 0, 1)),
    "up_is_a_number": Case(acts(times=lambda a, u: a * 1.5), act, ACT_INPUTS, (0, 0, 1)),
    "silu_is_read_by_another": Case(silu_read_twice, act, ACT_INPUTS, (0, 0, 1)),
    "rounded_to_another_dtype": Case(
        acts(silu=lambda g: F.silu(g.float()).half().bfloat16()), act, ACT_INPUTS, (0, 0, 1)
    ),
}

CASES = {**NORM_CASES, **WEIGHT_CASES, **MORE_NORMS, **QUANT_CASES, **ACT_CASES}


@pytest.mark.parametrize("name", CASES)
def test_near_miss(name: str) -> None:
    case = CASES[name]
    traced = trace(case.fn, *case.inputs)
    reading = Reading(traced)
    reading.check(*case.inputs)
    kinds = ("norm", "activation", "quantize")
    assert tuple(len(reading.forms(kind)) for kind in kinds) == case.reads
    for stage in ("all", "joint"):
        passed = Passed(traced, stage, strict=True)
        assert passed.fusions == 0
        assert not [s for s in passed.record.sites if s.status == "fused"]
        assert_same_bits(run(passed.after, *case.inputs), run(passed.before, *case.inputs))
        for site in passed.sites("quantize"):
            assert site.code.startswith("FP8-"), "left without a reason"


@pytest.mark.parametrize("name", CASES)
def test_its_control_fuses(name: str) -> None:
    case = CASES[name]
    inputs = case.control_inputs or case.inputs
    traced = trace(case.control, *inputs)
    Reading(traced).check(*inputs)
    passed = Passed(traced)
    assert passed.fusions == 1
    assert len([s for s in passed.record.sites if s.status == "fused"]) == 1
    assert_same_bits(run(passed.after, *inputs), run(passed.before, *inputs))


# ---- whole graphs --------------------------------------------------------------------------------


def test_training_graph_is_not_touched() -> None:
    """A graph with a backward has inputs that AOTAutograd names ``primals_1``."""
    traced = trace(STATIC, *INPUTS)
    text = str(traced.graph)
    for node in traced.graph.find_nodes(op="placeholder"):
        node.target = str(node.target).replace("arg0", "primals_0")
    renamed = str(traced.graph)
    assert renamed != text
    passed = Passed(traced)
    assert passed.record.verdict is not None and passed.record.verdict.code == "FP8-P001"
    assert passed.fusions == 0 and not passed.record.sites


def test_scale_cycle_has_its_reason() -> None:
    passed = Passed(trace(quantised(scale_from_y), *INPUTS))
    (site,) = passed.sites("quantize")
    assert site.code == "FP8-F003"


def test_reshape_that_mixes_rows_has_its_reason() -> None:
    passed = Passed(trace(quantised(mixes_rows), *INPUTS))
    (site,) = passed.sites("quantize")
    assert site.code == "FP8-F008" and "(6, 64)" in site.message and "(12, 32)" in site.message


def test_norm_output_written_to() -> None:
    """A graph that writes to the norm's output in place keeps the order of reads and writes."""
    traced = trace(STATIC, *INPUTS)
    graph = traced.graph
    aten = torch.ops.aten
    (root,) = [n for n in graph.nodes if n.target is aten.mul.Tensor and n.args[0].name == "arg1_1"]
    after = next(iter(root.users))
    with graph.inserting_before(after):
        write = graph.call_function(aten.mul_.Tensor, (root, 3.0))
        write.meta["val"] = root.meta["val"]
    graph.lint()
    traced.recompile()
    passed = Passed(traced)
    assert_same_bits(run(passed.after, *INPUTS), run(passed.before, *INPUTS))
    assert_same_bits(run(passed.fused, *INPUTS), run(passed.before, *INPUTS))
