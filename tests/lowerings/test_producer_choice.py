"""Which kernel a fused producer gets, and what is said about the others."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fp8pass.errors import OptionError
from fp8pass.kernels.operators import TRITON_SILU_MUL_QUANT
from fp8pass.lowerings import producer_kernel_names
from fp8pass.lowerings.producers import (
    ProducerProblem,
    choose_producer,
    inductor_patches,
    register_producer,
)
from fp8pass.lowerings.triton import TRITON
from fp8pass.ops import dynamic_form, static_form
from fp8pass.ops.library import SPECS
from fp8pass.options import Options
from fp8pass.target import NO_TRITON, Target

BF16, F32 = torch.bfloat16, torch.float32
NORM = "mean,rsqrt,after_cast,bfloat16"
ACT = "div,bfloat16,bfloat16"
TOKEN = str(dynamic_form("token"))

PROBLEMS = {
    "rms_norm_quant": ProducerProblem("rms_norm_quant", NORM, TOKEN, 4096, (BF16, BF16), "cuda"),
    "add_rms_norm_quant": ProducerProblem(
        "add_rms_norm_quant", NORM, TOKEN, 4096, (BF16, BF16, BF16), "cuda"
    ),
    "silu_mul_quant": ProducerProblem("silu_mul_quant", ACT, TOKEN, 4096, (BF16, BF16), "cuda"),
    "act_mul_quant": ProducerProblem(
        "act_mul_quant", "gelu_tanh,bfloat16,bfloat16", TOKEN, 4096, (BF16, None), "cuda"
    ),
    "quantize": ProducerProblem("quantize", "", str(static_form()), 4096, (BF16,), "cuda"),
}


def name_of(target: str | Target, problem: ProducerProblem, **options: object) -> str:
    parsed = Target.parse(target) if isinstance(target, str) else target
    choice = choose_producer(parsed, problem, Options(**options))  # type: ignore[arg-type]
    return "inductor" if choice.kernel is None else choice.kernel.name


@pytest.mark.parametrize("op", PROBLEMS)
def test_triton_on_gpus_that_have_fp8(op: str) -> None:
    problem = PROBLEMS[op]
    for target in ("sm89", "sm90", "sm100", "sm120"):
        assert name_of(target, problem) == "triton"
    assert TRITON.replaces(op).name() == f"fp8pass::triton_{op}"
    assert SPECS[f"triton_{op}"].schema == SPECS[op].schema, "only who computes it changes"


@pytest.mark.parametrize(
    ("target", "code"),
    [("sm80", "FP8-L011"), ("gfx942", "FP8-L001"), ("xpu-bmg", "FP8-L001"), ("cpu", "FP8-L001")],
)
def test_elsewhere_inductor_with_a_reason(target: str, code: str) -> None:
    parsed = Target.parse(target)
    problem = dataclasses.replace(PROBLEMS["rms_norm_quant"], device_type=parsed.device_type)
    choice = choose_producer(parsed, problem, Options())
    assert choice.kernel is None
    assert [(name, verdict.code) for name, verdict in choice.rejected] == [("triton", code)]


def test_a_machine_without_triton() -> None:
    target = dataclasses.replace(Target.parse("sm90"), features=frozenset({NO_TRITON}))
    choice = choose_producer(target, PROBLEMS["silu_mul_quant"], Options())
    ((name, verdict),) = choice.rejected
    assert choice.kernel is None and name == "triton"
    assert verdict.code == "FP8-L011" and "Triton" in verdict.message


def test_what_the_kernel_does_not_take_is_named() -> None:
    fnuz = str(dynamic_form("token", torch.float8_e4m3fnuz))
    problem = dataclasses.replace(PROBLEMS["rms_norm_quant"], quant_form=fnuz)
    choice = choose_producer(Target.parse("sm90"), problem, Options())
    ((_, verdict),) = choice.rejected
    assert choice.kernel is None
    assert verdict.code == "FP8-L017" and "fnuz" in verdict.message


def test_operands_on_another_device() -> None:
    problem = dataclasses.replace(PROBLEMS["quantize"], device_type="cpu")
    choice = choose_producer(Target.parse("sm90"), problem, Options())
    assert choice.kernel is None and choice.rejected[0][1].code == "FP8-L015"


def test_disable_and_prefer() -> None:
    problem = PROBLEMS["rms_norm_quant"]
    assert name_of("sm90", problem, disable=("triton",)) == "inductor"
    choice = choose_producer(Target.parse("sm90"), problem, Options(prefer=("inductor",)))
    assert choice.kernel is None and choice.why == "preferred"
    ((name, verdict),) = choice.rejected
    assert (name, verdict.code) == ("triton", "FP8-L013") and "inductor" in verdict.message
    with pytest.raises(OptionError, match="fall"):
        Options.resolve({}, disable=("inductor",))
    with pytest.raises(OptionError, match="'triton'"):
        Options.resolve({}, force="triton")  # forcing is for products


@pytest.mark.parametrize(
    ("target", "options", "emulated"),
    [
        ("cpu", {}, True),
        ("gfx942", {}, True),
        ("xpu-bmg", {}, True),
        ("sm80", {}, True),
        ("sm90", {}, False),
        ("sm90", {"disable": ("triton",)}, True),
        ("sm90", {"prefer": ("inductor",)}, True),
        ("cpu", {"numerics": "fast"}, False),
    ],
)
def test_inductor_rounds_as_the_graph_does_where_it_takes_producers(
    target: str, options: dict[str, object], emulated: bool
) -> None:
    patches = inductor_patches(Target.parse(target), Options(**options))  # type: ignore[arg-type]
    assert patches == ({"emulate_precision_casts": True} if emulated else {})


def test_names_are_taken_once() -> None:
    assert producer_kernel_names() == ("triton", "inductor")
    for kernel in (TRITON, dataclasses.replace(TRITON, name="inductor")):
        with pytest.raises(ValueError, match="registered"):
            register_producer(kernel)


def test_the_reference_is_there_for_every_device() -> None:
    generator = torch.Generator().manual_seed(0)
    args = next(iter(TRITON_SILU_MUL_QUANT.inputs(generator)))
    found = TRITON_SILU_MUL_QUANT.op(*args)
    expected = SPECS["silu_mul_quant"].op(*args)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.float(), other.float())
