"""vLLM's producers: which sites they are for, and how the library is called.

No GPU was at hand: the library's operators are stood in for (:mod:`vllm_library`), after its
source. tests/gpu/test_gpu_vllm_producers.py is for a machine that has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_library

from fp8pass import target as targets
from fp8pass.errors import UnsupportedError
from fp8pass.lowerings import vllm_producers as vllm
from fp8pass.lowerings.producers import ProducerProblem, choose_producer
from fp8pass.ops import dynamic_form, static_form
from fp8pass.ops.library import SPECS
from fp8pass.options import Options
from fp8pass.target import NO_MARLIN, NO_VLLM_PRODUCERS, Target

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
Tensor = torch.Tensor
TARGET = Target.parse("sm90+vllm")
WANTED = Options(prefer=("vllm",))
NORM = "mean,rsqrt,after_cast,bfloat16"
WIDE = f"{NORM},sum=float32"
ACT = "div,bfloat16,bfloat16"
#: As vLLM's own quantises are written.
TOKEN = replace(dynamic_form("token"), floor_value=vllm.FLOOR)
GROUP = replace(dynamic_form("group128"), floor="amax", floor_value=1e-10)
TENSOR = replace(dynamic_form("tensor"), floor="none", floor_value=0.0)
STATIC = replace(static_form(), apply="mul_recip")


def problem(op: str = "rms_norm_quant", **changes: Any) -> ProducerProblem:
    operands = {"rms_norm_quant": 2, "add_rms_norm_quant": 3, "quantize": 1}.get(op, 2)
    form = {"silu_mul_quant": ACT, "quantize": ""}.get(op, NORM)
    made = ProducerProblem(op, form, str(TOKEN), 4096, (BF16,) * operands, "cuda")
    if "quant" in changes:
        changes["quant_form"] = str(changes.pop("quant"))
    return replace(made, **changes)


# ---- the choice ----------------------------------------------------------------------------------

TAKEN = {
    "norm, token": problem(),
    "norm, static": problem(quant=STATIC),
    "norm, static, divided": problem(quant=static_form()),
    "norm, groups": problem(quant=replace(dynamic_form("group64"), floor_value=1e-12)),
    "norm, own recipe": problem(quant=dynamic_form("token")),
    "norm, fp16": problem(dtypes=(F16, F16), form=NORM.replace("bfloat16", "float16")),
    "add, token, sum in float32": problem("add_rms_norm_quant", form=WIDE),
    "add, static": problem("add_rms_norm_quant", quant=STATIC),
    "silu, static": problem("silu_mul_quant", quant=STATIC),
    "silu, groups": problem("silu_mul_quant", quant=replace(GROUP, floor_value=1e-4 / 512)),
    "quantise, static": problem("quantize", quant=STATIC),
    "quantise, tensor": problem("quantize", quant=TENSOR),
    "quantise, token": problem("quantize"),
    "quantise, token, bounded": problem("quantize", quant=replace(TOKEN, upper="amax")),
    "quantise, groups": problem("quantize", quant=GROUP),
}


@pytest.mark.parametrize("name", TAKEN)
def test_taken_on_request_alone(name: str) -> None:
    one = TAKEN[name]
    unasked = choose_producer(TARGET, one, Options())
    assert unasked.kernel is not vllm.VLLM
    verdict = dict(unasked.rejected)["vllm"]
    assert verdict.code == "FP8-L063" and "NaN" in verdict.message
    assert choose_producer(TARGET, one, WANTED).kernel is vllm.VLLM
    fast = Options(numerics="fast", disable=("triton",))
    assert choose_producer(TARGET, one, fast).kernel is vllm.VLLM
    without = choose_producer(Target.parse("sm90"), one, WANTED)
    told = dict(without.rejected)["vllm"]
    assert told.code == "FP8-L011" and "vLLM" in told.message


REFUSED: list[tuple[ProducerProblem, ProducerProblem, str]] = [
    # refused, what differs from it and is taken, a word of the reason
    (problem(keep=True), problem(), "read elsewhere"),
    (problem(width=None), problem(), "not known"),
    (problem(dtypes=(F32, F32)), problem(), "float32"),
    (problem(dtypes=(BF16, F32)), problem(), "different dtypes"),
    (problem(form="mean,rsqrt,none,bfloat16", dtypes=(BF16, None)), problem(), "none"),
    (problem(form=NORM.replace("after_cast", "before_cast")), problem(), "behind a cast"),
    (problem(form=NORM.replace("bfloat16", "float32")), problem(), "behind a cast"),
    (problem(form=f"{NORM},eps=max"), problem(), "epsilon"),
    (
        problem("add_rms_norm_quant", form=WIDE, quant=STATIC),
        problem("add_rms_norm_quant", form=WIDE),
        "sum in float32",
    ),
    (problem(quant=dynamic_form("token", torch.float8_e5m2)), problem(), "e5m2"),
    (problem(quant=replace(TOKEN, qmax=224.0)), problem(), "224"),
    (problem(quant=replace(TOKEN, floor_value=1e-3)), problem(), "0.001"),
    (problem(quant=replace(TOKEN, floor="amax_add")), problem(), "amax_add"),
    (problem(quant=replace(TOKEN, compute=BF16)), problem(), "recipe"),
    (problem(quant=replace(TOKEN, power="ceil")), problem(), "power"),
    (problem(quant=TENSOR), problem("quantize", quant=TENSOR), "per tensor"),
    (problem(quant=dynamic_form("group32")), problem(quant=dynamic_form("group64")), "group32"),
    (
        problem(quant=replace(dynamic_form("group128"), layout="col")),
        problem(quant=dynamic_form("group128")),
        "col",
    ),
    (
        problem(quant=dynamic_form("group128"), width=4000),
        problem(quant=dynamic_form("group128"), width=4096),
        "4000",
    ),
    (
        problem(quant=dynamic_form("group128"), width=32768),
        problem(quant=dynamic_form("group128"), width=16384),
        "32768",
    ),
    (problem("silu_mul_quant"), problem("silu_mul_quant", quant=STATIC), "per token"),
    (
        problem("silu_mul_quant", quant=STATIC, width=4088),
        problem("silu_mul_quant", quant=STATIC),
        "4088",
    ),
    (
        problem("silu_mul_quant", quant=STATIC, form="div,float32,bfloat16"),
        problem("silu_mul_quant", quant=replace(GROUP), form="div,float32,bfloat16"),
        "both rounded",
    ),
    (
        problem("silu_mul_quant", quant=STATIC, form=f"{ACT},bfloat16"),
        problem("silu_mul_quant", quant=STATIC),
        "computed in",
    ),
    (
        problem("quantize", quant=replace(GROUP, floor="scale")),
        problem("quantize", quant=GROUP),
        "floor",
    ),
    (
        problem("quantize", quant=replace(TENSOR, upper="amax")),
        problem("quantize", quant=replace(TOKEN, upper="amax")),
        "upper",
    ),
    (
        problem("quantize", quant=replace(static_form(), granularity="token")),
        problem("quantize", quant=static_form()),
        "given scales",
    ),
    (problem("act_mul_quant"), problem("silu_mul_quant", quant=STATIC), "act_mul_quant"),
]


@pytest.mark.parametrize(("refused", "taken", "word"), REFUSED, ids=[r[2] for r in REFUSED])
def test_refused_beside_what_is_taken(
    refused: ProducerProblem, taken: ProducerProblem, word: str
) -> None:
    verdict = dict(choose_producer(TARGET, refused, WANTED).rejected)["vllm"]
    assert verdict.code == "FP8-L017" and word in verdict.message
    assert choose_producer(TARGET, taken, WANTED).kernel is vllm.VLLM


@pytest.mark.parametrize("target", ["sm80+vllm", "gfx942+vllm", "cpu", "xpu-bmg"])
def test_no_other_device(target: str) -> None:
    where = Target.parse(target)
    one = problem(device_type=where.device_type)
    verdict = dict(choose_producer(where, one, WANTED).rejected)["vllm"]
    assert verdict.code in ("FP8-L001", "FP8-L011")


def test_a_library_that_lacks_them() -> None:
    """0.21 has its producers in one library and its products in another."""
    part = replace(TARGET, features=frozenset({NO_VLLM_PRODUCERS}))
    choice = choose_producer(part, problem(), WANTED)
    verdict = dict(choice.rejected)["vllm"]
    assert choice.kernel is not vllm.VLLM and verdict.code == "FP8-L011"
    assert "another part" in verdict.message


@pytest.mark.parametrize("has", [(), ("marlin_gemm",), ("rms_norm_static_fp8_quant",)])
def test_the_parts_that_are_loaded(has: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(cutlass_scaled_mm=1, **dict.fromkeys(has, 1))
    monkeypatch.setitem(torch.ops.__dict__, "_C", fake)
    absent = targets._absent((("vllm", ""),))
    assert (NO_VLLM_PRODUCERS in absent) == ("rms_norm_static_fp8_quant" not in has)
    assert (NO_MARLIN in absent) == ("marlin_gemm" not in has)
    assert targets._absent(()) == frozenset()


# ---- the calls -----------------------------------------------------------------------------------


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setattr(vllm, "vllm_operator", vllm_library.operator)
    with vllm_library.loaded() as seen:
        yield seen


def values(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=g) * 3).to(dtype)


def agree(got: tuple[Tensor, ...], op: str, args: tuple[Any, ...], scale: Any = None) -> None:
    """Layouts of the operator; few codes elsewhere, scales but for a rounding of the norm."""
    wanted = getattr(torch.ops.fp8pass, op)(*args)
    for one, other in zip(got, wanted, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    if not got[0].numel():
        return
    torch.testing.assert_close(got[1], wanted[1], rtol=2**-6, atol=1e-5)
    wide = [
        (q.float().unflatten(-1, (s.shape[-1] if s.dim() else 1, -1)) * s[..., None]).flatten(-2)
        for q, s in ((r[0], r[1] if scale is None else scale.reshape(1)) for r in (got, wanted))
    ]
    error = (wide[0] - wide[1]).abs()
    smallest = float((wanted[1] if scale is None else scale).max()) * 2.0**-8
    assert bool((error <= wide[1].abs() / 7 + smallest).all())
    assert float(error.mean() / wide[1].abs().mean()) < 0.01


SHAPES = [(5, 256), (1, 256), (0, 256), (2, 3, 256)]
GIVEN = torch.tensor(0.03)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("quant", [STATIC, TOKEN, dynamic_form("group128")], ids=str)
def test_norms(library: list[str], quant: Any, shape: tuple[int, ...]) -> None:
    x, residual, weight = values(*shape), values(*shape, seed=1), values(256, seed=2)
    kept = x.clone(), residual.clone()
    scale = GIVEN if quant.static else None
    args: tuple[Any, ...] = (x, weight, scale, 1e-6, NORM, str(quant), False)
    agree(vllm.rms_norm_quant(*args), "rms_norm_quant", args, scale)
    for form in (NORM,) if quant.static else (NORM, WIDE):
        args = (x, residual, weight, scale, 1e-6, form, str(quant), False)
        got = vllm.add_rms_norm_quant(*args)
        agree(got, "add_rms_norm_quant", args, scale)
        assert torch.equal(got[3], x + residual)
    assert torch.equal(x, kept[0]) and torch.equal(residual, kept[1]), "no input is written to"
    names = {
        "given": ["rms_norm_static_fp8_quant", "fused_add_rms_norm_static_fp8_quant"],
        "token": ["rms_norm_dynamic_per_token_quant"] * 3,
        "group128": ["rms_norm_per_block_quant"] * 3,
    }["given" if quant.static else quant.granularity]
    assert library == (names if x.numel() else [])


def test_the_very_bits_of_vllms_own_form(library: list[str]) -> None:
    """A model that was written for vLLM's operators has their roundings: all codes are the same."""
    x, residual, weight = values(64, 512), values(64, 512, seed=1), values(512, seed=2)
    for quant in (STATIC, TOKEN):
        scale, form = (GIVEN, NORM) if quant.static else (None, WIDE)
        args = (x, residual, weight, scale, 1e-6, form, str(quant), False)
        got = vllm.add_rms_norm_quant(*args)
        for one, other in zip(got, torch.ops.fp8pass.add_rms_norm_quant(*args), strict=True):
            same = one.float() == other.float()
            assert float((~same).float().mean() if same.numel() else 0) < 1e-3


@pytest.mark.parametrize("quant", [STATIC, replace(GROUP, granularity="group64")], ids=str)
def test_silu_mul(library: list[str], quant: Any) -> None:
    both = values(5, 512)
    scale = GIVEN if quant.static else None
    for gate, up in (both.chunk(2, -1), (values(5, 256), values(5, 256, seed=3)),
                     (values(2, 3, 256), values(2, 3, 256, seed=4)), values(0, 512).chunk(2, -1),
                     reversed(both.chunk(2, -1)), values(5, 1024).chunk(4, -1)[1:3],
                     values(5, 513)[:, 1:].chunk(2, -1)):  # fmt: skip
        args = (gate, up, scale, ACT, str(quant), False)
        agree(vllm.silu_mul_quant(*args), "silu_mul_quant", args, scale)


def test_halves_of_one_tensor_are_not_copied(
    library: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(
        vllm, "vllm_operator", lambda name: lambda out, both, scale: seen.append(both.data_ptr())
    )
    both = values(4, 64)
    gate, up = both.chunk(2, -1)
    for pair in ((gate, up), (up, gate)):
        vllm.silu_mul_quant(*pair, GIVEN, ACT, str(STATIC), False)
    assert seen[0] == both.data_ptr() != seen[1]


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("quant", [STATIC, TENSOR, TOKEN, GROUP], ids=str)
def test_quantise(quant: Any, older: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "vllm_operator", vllm_library.operator)
    with vllm_library.loaded(older) as seen:
        for x in (values(5, 256), values(2, 3, 256), values(5, 512)[:, :256], values(0, 256),
                  values(256)):  # fmt: skip
            if x.dim() == 1 and quant.granularity == "token":
                continue
            scale = GIVEN if quant.static else None
            args = (x, scale, str(quant))
            if not x.numel() and quant is TENSOR:  # the reference has no maximum to take
                q, made = vllm.quantize(*args)
                assert q.shape == x.shape and made.shape == () and float(made) > 0
                continue
            agree(vllm.quantize(*args), "quantize", args, scale)
        if quant is TOKEN:
            bounded = (values(5, 256), None, str(replace(TOKEN, upper="amax")), torch.tensor(4.0))
            agree(vllm.quantize(*bounded), "quantize", bounded)
    assert len(set(seen)) == 1


def test_rows_of_zeros_and_not_a_number(library: list[str]) -> None:
    """What is said of it as the reason why it is not used unasked."""
    x, weight = torch.zeros(2, 256, dtype=BF16), torch.ones(256, dtype=BF16)
    q, scale, _ = vllm.rms_norm_quant(x, weight, None, 1e-6, NORM, str(TOKEN), False)
    assert not q.float().any() and bool((scale == torch.tensor(vllm.FLOOR)).all())
    x[0, 0] = float("nan")
    q, _ = vllm.quantize(x, GIVEN, str(STATIC))
    assert float(q[0, 0]) == 448.0


def test_the_operators_have_the_schema_of_the_generic_ones() -> None:
    for op in ("rms_norm_quant", "add_rms_norm_quant", "silu_mul_quant", "quantize"):
        assert SPECS[f"vllm_{op}"].schema == SPECS[op].schema
        assert vllm.VLLM.replaces(op).name() == f"fp8pass::vllm_{op}"


def test_without_the_library() -> None:
    if hasattr(torch.ops._C, "silu_and_mul_quant"):
        pytest.skip("vLLM's library is loaded")
    with pytest.raises(UnsupportedError, match=r"import vllm._custom_ops.*silu_and_mul_quant"):
        vllm.silu_mul_quant(values(4, 32), values(4, 32), GIVEN, ACT, str(STATIC), False)
