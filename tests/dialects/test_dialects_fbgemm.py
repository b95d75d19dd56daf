"""FBGEMM's and MSLK's operators: read as the arithmetic that their sources show, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import Passed, Reading, codes, read, run, trace, values, vector
from spell import llama
from stand_ins import fbgemm, mslk

FBGEMM = fbgemm()
TRITON, MSLK = mslk()

FORMS = {
    "fbgemm": f"float8_e4m3fn,token,float32,div,448.0,scale,{1 / (448 * 512)!r},div,-448.0,448.0",
    "mslk": "float8_e4m3fn,token,float32,inverse,448.0,amax,1e-12,mul_inverse,-448.0,448.0",
}
QUANTISES = {
    "fbgemm": lambda x: FBGEMM.quantize_fp8_per_row(x),
    "mslk": lambda x: TRITON.quantize_fp8_row(x),
}
PRODUCTS = {"fbgemm": FBGEMM.f8f8bf16_rowwise, "mslk": MSLK.f8f8bf16_rowwise}
NAMES = tuple(FORMS)


def weights(n: int = 48, k: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    return codes(n, k), torch.rand(n, 1, generator=torch.Generator().manual_seed(3)) + 0.01


# ---- the quantise --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(5, 64), (1, 64), (2, 3, 47), (7, 1), (0, 64)], ids=str)
def test_quantise(name: str, shape: tuple[int, ...]) -> None:
    reading = read(QUANTISES[name], values(*shape))
    assert reading.forms("quantize") == [FORMS[name]]
    assert reading.unread == []


@pytest.mark.parametrize("name", NAMES)
def test_symbolic_rows(name: str) -> None:
    reading = read(QUANTISES[name], values(6, 64), dynamic=(0,))
    assert reading.forms("quantize") == [FORMS[name]]
    for rows in (1, 4):
        reading.check(values(rows, 64, seed=rows))


@pytest.mark.parametrize("name", NAMES)
def test_extremes(name: str) -> None:
    """Zero rows, overflow and small rows, bit for bit; a row with NaN is NaN in its product."""
    x = torch.tensor([[0.0, 0.0], [1e38, -1e38], [1e-30, 0.0], [1.0, -0.0]]).bfloat16()
    assert len(read(QUANTISES[name], x).forms("quantize")) == 1


REFUSED: dict[str, tuple[Any, str]] = {
    "fbgemm_stochastic": (
        lambda x, u: FBGEMM.quantize_fp8_per_row(x, stochastic_rounding=True),
        "stochastically",
    ),
    "fbgemm_bs": (lambda x, u: FBGEMM.quantize_fp8_per_row(x, u), "it is given bs"),
    "fbgemm_float": (
        lambda x, u: FBGEMM.quantize_fp8_per_row(x.float()),
        "it quantises torch.float32 values",
    ),
    "mslk_torch": (
        lambda x, u: TRITON.quantize_fp8_row(x, use_triton=False),
        "computes its scale in another way",
    ),
    "mslk_jagged": (
        lambda x, u: TRITON.quantize_fp8_row(x, None, u),
        "its argument zero_start_index_M is not known",
    ),
    "codes_only": (lambda x, u: TRITON.quantize_fp8_row(x)[0], "not both read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    """Next to each: the same call without what is refused is read (test_quantise)."""
    fn, why = REFUSED[case]
    reading = read(fn, values(5, 64), torch.tensor([3.0]))
    assert reading.forms("quantize") == []
    ((kind, code, message),) = reading.unread
    assert (kind, code) == ("quantize", "FP8-R010") and why in message


def test_equal_calls_are_one_but_not_stochastic_ones() -> None:
    def three(x: torch.Tensor, stochastic: bool) -> tuple[torch.Tensor, ...]:
        return tuple(
            t
            for _ in range(3)
            for t in FBGEMM.quantize_fp8_per_row(x, stochastic_rounding=stochastic)
        )

    def calls(stochastic: bool) -> int:
        def fn(x: torch.Tensor) -> torch.Tensor:
            parts = three(x, stochastic)
            return sum(
                q.float() * s.unsqueeze(-1) for q, s in zip(parts[::2], parts[1::2], strict=True)
            )

        before = read(fn, values(5, 64)).before
        target = FBGEMM.quantize_fp8_per_row.default
        return len(before.graph.find_nodes(op="call_function", target=target))

    assert (calls(False), calls(True)) == (1, 3)


# ---- the product ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("shape", ["vector", "column", "row"])
@pytest.mark.parametrize("bias", [False, True])
def test_product(name: str, rows: int, shape: str, bias: bool) -> None:
    """Per token x per channel for any number of rows, in each shape that its scales may have."""
    weight, scale = weights()
    scale = {"vector": scale.flatten(), "column": scale, "row": scale.t()}[shape]
    b = vector(48)

    def fn(q: torch.Tensor, s: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
        return PRODUCTS[name](q, w[0], s, w[1], bias=w[2] if bias else None)

    reading = read(fn, codes(rows, 64), torch.rand(rows) + 0.1, weight, scale, b)
    (draft,) = reading.drafts
    assert draft.key == "float8_e4m3fn/dynamic/token x float8_e4m3fn/static/channel"
    assert draft.node.args[8] is True  # fast accumulation is what the operator does unless told
    assert reading.unread == []


def test_slow_accumulation() -> None:
    weight, scale = weights()

    def fn(q: torch.Tensor, s: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return FBGEMM.f8f8bf16_rowwise(q, w, s, t, None, False)

    (draft,) = read(fn, codes(5, 64), torch.rand(5), weight, scale).drafts
    assert draft.node.args[8] is False


PRODUCT_REFUSED: dict[str, tuple[tuple[torch.Tensor, ...], str]] = {
    "scale_of_x": ((codes(5, 64), torch.rand(1), *weights()), "its scales have shapes (1,)"),
    "scale_of_w": ((codes(5, 64), torch.rand(5), weights()[0], torch.rand(1)), "its scales have"),
    "narrow_scale": ((codes(5, 64), torch.rand(5).bfloat16(), *weights()), "not float32"),
    "e5m2": ((codes(5, 64).to(torch.float8_e5m2), torch.rand(5), *weights()), "its operands are"),
    "three_dims": ((codes(2, 5, 64), torch.rand(2, 5), *weights()), "its operands are"),
}


@pytest.mark.parametrize("case", PRODUCT_REFUSED)
def test_product_refused(case: str) -> None:
    inputs, why = PRODUCT_REFUSED[case]

    def fn(q: torch.Tensor, s: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return FBGEMM.f8f8bf16_rowwise(q, w, s, t)

    reading = Reading(trace(fn, *inputs))
    ((kind, code, message),) = reading.unread
    assert (kind, code) == ("scaled_mm", "FP8-R010") and why in message


# ---- a whole block -------------------------------------------------------------------------------


def block(name: str) -> Any:
    """Norm, row-wise quantise, two linears that read it, as the library's linear spells it."""

    def fn(x: torch.Tensor, w: torch.Tensor, *linears: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = llama(x, w, 1e-6)
        outs = []
        for i in (0, 2):
            q, s = QUANTISES[name](y.view(-1, y.shape[-1]).contiguous())
            out = PRODUCTS[name](q, linears[i], s, linears[i + 1])
            outs.append(out.reshape(*x.shape[:-1], -1))
        return tuple(outs)

    return fn


@pytest.mark.parametrize("name", NAMES)
def test_block_is_fused_and_lowered(name: str) -> None:
    x, w = values(2, 3, 64), vector(64)
    inputs = x, w, *weights(48), *weights(32)
    passed = Passed(trace(block(name), *inputs))
    assert passed.fusions == 1
    (norm,) = passed.sites("norm")
    assert (norm.status, norm.rule) == ("fused", "rms_norm_quant")
    assert [site.status for site in passed.sites("scaled_mm")] == ["lowered", "lowered"]
    assert not [site for site in passed.sites("quantize") if site.status == "left"]
    for target in passed.after.graph.nodes:
        assert getattr(target.target, "namespace", "") not in ("fbgemm", "mslk", "triton")
    before, after = run(passed.before, *inputs), run(passed.fused, *inputs)
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(a, b), f"result {i}"


@pytest.mark.parametrize("name", NAMES)
def test_block_against_float64(name: str) -> None:
    """The error of the rewritten graph is that of FP8, not of the rewriting."""
    x, w = values(2, 3, 64), vector(64)
    inputs = x, w, *weights(48), *weights(32)
    passed = Passed(trace(block(name), *inputs))
    before, fused = run(passed.before, *inputs), run(passed.fused, *inputs)
    y = llama(x.double(), w.double(), 1e-6)
    for i, weight, scale in ((0, *weights(48)), (1, *weights(32))):
        exact = y @ (weight.double() * scale.double()).t()
        error = (fused[i].double() - exact).norm() / exact.norm()
        assert error < 0.05
        assert error <= 1.1 * (before[i].double() - exact).norm() / exact.norm()


@pytest.mark.parametrize("name", NAMES)
def test_no_producer_no_change(name: str) -> None:
    """A quantise that nothing fuses is the library's call again."""
    passed = Passed(trace(QUANTISES[name], values(5, 64)))
    assert str(passed.after.graph) == str(passed.before.graph)
    (site,) = passed.sites("quantize")
    assert (site.status, site.code) == ("left", "FP8-F002")


@pytest.mark.parametrize("name", NAMES)
def test_symbolic_block(name: str) -> None:
    """With symbolic rows the quantise cannot be written out: it stays the library's."""
    x, w = values(6, 64), vector(64)
    inputs = x, w, *weights(48), *weights(32)
    passed = Passed(trace(block(name), *inputs, dynamic=(0,)))
    assert [site.status for site in passed.sites("scaled_mm")] == ["lowered", "lowered"]
    names = [str(node.target) for node in passed.after.graph.nodes]
    assert sum("quantize_fp8" in name for name in names) == 1
    assert not any(name.startswith("fp8pass.rms_norm") for name in names)
    for rows in (1, 5):
        again = values(rows, 64, seed=rows), *inputs[1:]
        for a, b in zip(run(passed.before, *again), run(passed.fused, *again), strict=True):
            assert torch.equal(a, b)
