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
    told = {name: verdict.code for name, verdict in choice.rejected}
    assert told["triton"] == code and told["aiter"] in ("FP8-L001", "FP8-L011")


def test_a_machine_without_triton() -> None:
    target = dataclasses.replace(Target.parse("sm90"), features=frozenset({NO_TRITON}))
    choice = choose_producer(target, PROBLEMS["silu_mul_quant"], Options())
    verdict = dict(choice.rejected)["triton"]
    assert choice.kernel is None
    assert verdict.code == "FP8-L011" and "Triton" in verdict.message


def test_what_the_kernel_does_not_take_is_named() -> None:
    fnuz = str(dynamic_form("token", torch.float8_e4m3fnuz))
    problem = dataclasses.replace(PROBLEMS["rms_norm_quant"], quant_form=fnuz)
    choice = choose_producer(Target.parse("sm90"), problem, Options())
    verdict = dict(choice.rejected)["triton"]
    assert choice.kernel is None
    assert verdict.code == "FP8-L017" and "fnuz" in verdict.message


def test_operands_on_another_device() -> None:
    problem = dataclasses.replace(PROBLEMS["quantize"], device_type="cpu")
    choice = choose_producer(Target.parse("sm90"), problem, Options())
    assert choice.kernel is None and dict(choice.rejected)["triton"].code == "FP8-L015"


def test_disable_and_prefer() -> None:
    problem = PROBLEMS["rms_norm_quant"]
    assert name_of("sm90", problem, disable=("triton",)) == "inductor"
    choice = choose_producer(Target.parse("sm90"), problem, Options(prefer=("inductor",)))
    assert choice.kernel is None and choice.why == "preferred"
    verdict = dict(choice.rejected)["triton"]
    assert verdict.code == "FP8-L013" and "inductor" in verdict.message
    with pytest.raises(OptionError, match="fall"):
        Options.resolve({}, disable=("inductor",))
    with pytest.raises(OptionError, match="'triton'"):
        Options.resolve({}, force="triton")  # forcing is for products


@pytest.mark.parametrize(
    ("target", "options", "emulated"),
    [
        ("cpu", {}, True),
        ("gfx942", {}, True),
        ("gfx942+aiter", {}, True),
        ("gfx942+aiter", {"numerics": "fast"}, False),
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
    assert producer_kernel_names()[-1] == "inductor" and "triton" in producer_kernel_names()
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


# ---- AITER ---------------------------------------------------------------------------------------

AITER = Target.parse("gfx950+aiter")
FAST = Options(numerics="fast")


def norm(**changes: object) -> ProducerProblem:
    return dataclasses.replace(PROBLEMS["rms_norm_quant"], **changes)  # type: ignore[arg-type]


def test_aiter_rounds_otherwise_so_only_where_that_is_allowed() -> None:
    choice = choose_producer(AITER, norm(), Options())
    verdict = dict(choice.rejected)["aiter"]
    assert choice.kernel is None and verdict.code == "FP8-L063"
    assert "roundings" in verdict.message and "fast" in verdict.hint
    assert name_of(AITER, norm(), numerics="fast") == "aiter"
    assert name_of(AITER, norm(), prefer=("aiter",)) == "aiter"
    here = Options(prefer=("layers.0.*=aiter",))
    for path, wanted in (("layers.0.mlp", "aiter"), ("layers.1.mlp", None)):
        kernel = choose_producer(AITER, norm(), here, path).kernel
        assert (None if kernel is None else kernel.name) == wanted
    assert name_of(AITER, norm(), numerics="fast", disable=("aiter",)) == "inductor"
    assert name_of("gfx950", norm(), numerics="fast") == "inductor"
    assert name_of("gfx1201+aiter", norm(), numerics="fast") == "inductor"


GROUP = str(dynamic_form("group128"))
FNUZ_TOKEN = str(dynamic_form("token", torch.float8_e4m3fnuz))
REFUSED = [
    (norm(keep=True), "read elsewhere"),
    (norm(width=None), "not known"),
    (norm(dtypes=(F32, F32)), "float32"),
    (norm(dtypes=(BF16, F32)), "different dtypes"),
    (norm(dtypes=(BF16, None)), "none"),
    (norm(form="mean,rsqrt,none,bfloat16", dtypes=(BF16, None)), "none"),
    (norm(form="mean,recip_sqrt,after_cast,bfloat16,eps=outside"), "outside"),
    (norm(quant_form=str(static_form())), "recipe"),
    (norm(quant_form=str(dynamic_form("tensor"))), "tensor"),
    (norm(quant_form=str(dynamic_form("group64"))), "group64"),
    (norm(quant_form=str(dataclasses.replace(dynamic_form("token"), ceiling=3.0))), "ceiling"),
    (norm(quant_form=str(dataclasses.replace(dynamic_form("token"), power="ceil"))), "power"),
    (norm(quant_form=str(dataclasses.replace(dynamic_form("token"), floor="amax_add"))), "add"),
    (norm(quant_form=str(dataclasses.replace(dynamic_form("token"), floor_value=1e-3))), "0.001"),
    (norm(quant_form=str(dataclasses.replace(dynamic_form("group128"), layout="col"))), "col"),
    (norm(quant_form=FNUZ_TOKEN), "fnuz"),
    (norm(quant_form=GROUP, width=4000), "4000"),
    (norm(quant_form=GROUP, width=16384), "16384"),
    (PROBLEMS["silu_mul_quant"], "per token"),
    (PROBLEMS["act_mul_quant"], "act_mul_quant"),
    (PROBLEMS["quantize"], "quantize"),
    (
        dataclasses.replace(
            PROBLEMS["silu_mul_quant"], quant_form=GROUP, form="sigmoid,bfloat16,bfloat16,bfloat16"
        ),
        "computed in",
    ),
]


@pytest.mark.parametrize(("problem", "word"), REFUSED, ids=[word for _, word in REFUSED])
def test_what_aiter_does_not_take(problem: ProducerProblem, word: str) -> None:
    choice = choose_producer(AITER, problem, FAST)
    verdict = dict(choice.rejected)["aiter"]
    assert choice.kernel is None and verdict.code == "FP8-L017"
    assert word in verdict.message


def test_what_aiter_takes() -> None:
    for problem in (
        norm(),
        norm(quant_form=GROUP),
        norm(quant_form=GROUP, width=8192),
        norm(form="sum_div,rsqrt,before_cast,bfloat16"),
        PROBLEMS["add_rms_norm_quant"],
        dataclasses.replace(PROBLEMS["silu_mul_quant"], quant_form=GROUP, width=16384),
    ):
        assert name_of(AITER, problem, numerics="fast") == "aiter"
    assert name_of("gfx942+aiter", norm(quant_form=FNUZ_TOKEN), numerics="fast") == "aiter"


def test_aiter_quantises_e4m3fnuz_by_240_not_224() -> None:
    """What prepare makes of a model is by 224: another quantise, which is not replaced."""
    form = dataclasses.replace(
        dynamic_form("token", torch.float8_e4m3fnuz), qmax=224.0, lo=-224.0, hi=224.0
    )
    choice = choose_producer(Target.parse("gfx942+aiter"), norm(quant_form=str(form)), FAST)
    verdict = dict(choice.rejected)["aiter"]
    assert choice.kernel is None and "224" in verdict.message and "240" in verdict.message
