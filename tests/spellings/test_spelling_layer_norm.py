"""LayerNorm spellings: read as the right form, no number changed, fused, left to Inductor."""

from __future__ import annotations

import pytest
import torch
from graphs import Passed, Reading, assert_same_bits, post_grad, read, run, trace, values, vector
from spell import LAYER_NORMS, layer_norm_form, static, tensor, token

Tensor = torch.Tensor
S = torch.tensor(0.02)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check(name: str, dtype: torch.dtype, shape: tuple[int, ...], dynamic: bool = False) -> Reading:
    fn = LAYER_NORMS[name][0]
    x, w, b = values(*shape, dtype=dtype), vector(shape[-1], dtype), vector(shape[-1], dtype, 5)
    reading = read(
        lambda x, w, b, s: static(fn(x, w, b, 1e-5), s),
        *(x, w, b, S),
        dynamic=(0,) if dynamic else (),
    )
    assert reading.forms("norm") == [layer_norm_form(name, dtype)]
    assert [str(d.node.target) for d in reading.drafts if d.kind == "norm"] == [
        "fp8pass.layer_norm.default"
    ]
    assert reading.unread == []
    return reading


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYER_NORMS)
def test_form_and_numbers(name: str, dtype: torch.dtype) -> None:
    check(name, dtype, (5, 64))


@pytest.mark.parametrize("name", LAYER_NORMS)
def test_three_dims_and_symbolic_batch(name: str) -> None:
    reading = check(name, torch.bfloat16, (6, 3, 48), dynamic=True)
    w, b = vector(48), vector(48, seed=5)
    for rows in (1, 4):
        reading.check(values(rows, 3, 48, seed=rows), w, b, S)


@pytest.mark.parametrize("name", LAYER_NORMS)
def test_after_inductors_passes(name: str) -> None:
    fn = LAYER_NORMS[name][0]
    inputs = (values(6, 3, 64), vector(64), vector(64, seed=5), S)
    traced = trace(
        lambda x, w, b, s: static(fn(x, w, b, 1e-5).view(-1, 64), s), *inputs, dynamic=(0,)
    )
    reading = Reading(post_grad(traced))
    reading.check(*inputs)
    assert reading.forms("norm") == [layer_norm_form(name, torch.bfloat16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["functional", "var", "recip"])
def test_weight_and_bias_of_another_dtype(name: str, dtype: torch.dtype) -> None:
    fn = LAYER_NORMS[name][0]

    def both(x: Tensor, w: Tensor, b: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        y = fn(x, w, b, 1e-6)
        return *static(y, s), y

    inputs = (values(5, 64), vector(64, dtype), vector(64, dtype, 5), S)
    if name == "functional":  # torch wants its operands in one of two ways
        inputs = (values(5, 64), vector(64, torch.float32), vector(64, torch.float32, 5), S)
    assert read(both, *inputs).forms("norm") == [layer_norm_form(name, torch.bfloat16)]


@pytest.mark.parametrize("quant", [static, token, tensor])
@pytest.mark.parametrize("residual", [False, True])
def test_it_fuses(quant, residual: bool) -> None:  # type: ignore[no-untyped-def]
    """With its other readers; a residual add stays outside."""

    def fn(x: Tensor, r: Tensor, w: Tensor, b: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        total = x + r if residual else x
        y = LAYER_NORMS["functional"][0](total, w, b, 1e-5)
        return *quant(y, s), y * 2, total + 1

    inputs = (values(6, 64), values(6, 64, seed=3), vector(64), vector(64, seed=5), S)
    traced = trace(fn, *inputs, dynamic=(0, 1))
    passed = Passed(traced, strict=True)
    assert passed.fusions == 1
    (site,) = passed.sites("norm")
    assert (site.status, site.rule, site.kernel) == ("fused", "layer_norm_quant", "inductor")
    assert_same_bits(run(passed.fused, *inputs), run(passed.before, *inputs))
    assert_same_bits(run(passed.after, *inputs), run(passed.before, *inputs))


def test_its_own_operator_is_written_out() -> None:
    """An operator that the model emits itself goes to Inductor as aten."""

    def fn(x: Tensor, w: Tensor, b: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        form = layer_norm_form("functional", torch.bfloat16)
        return static(torch.ops.fp8pass.layer_norm(x, w, b, 1e-5, form), s)

    inputs = (values(6, 64), vector(64), vector(64, seed=5), S)
    passed = Passed(trace(fn, *inputs), strict=True)
    assert passed.fusions == 1
    assert not [n for n in passed.after.graph.nodes if "fp8pass" in str(n.target)]
    assert_same_bits(run(passed.after, *inputs), run(passed.before, *inputs))


def test_kernel_of_a_target() -> None:
    """Triton's where it takes the width, else what Inductor generates, with a reason."""
    from fp8pass.lowerings.producers import ProducerChoice, ProducerProblem, choose_producer
    from fp8pass.ops import dynamic_form
    from fp8pass.options import Options
    from fp8pass.target import Target

    def chosen(width: int) -> ProducerChoice:
        problem = ProducerProblem(
            "layer_norm_quant",
            layer_norm_form("functional", torch.bfloat16),
            str(dynamic_form("token")),
            width,
            (torch.bfloat16,) * 3,
            "cuda",
        )
        return choose_producer(Target.parse("sm90"), problem, Options())

    taken = chosen(64)
    assert taken.kernel is not None and taken.kernel.name == "triton"
    wide = chosen(2**20)
    assert wide.kernel is None
    verdict = dict(wide.rejected)["triton"]
    assert verdict.code == "FP8-L017" and "1048576 values" in verdict.message
