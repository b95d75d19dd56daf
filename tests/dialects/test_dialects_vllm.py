"""vLLM's norms, activations and quantises: each is read as what its kernel computes, or refused.

Its products and what stays as it is: ``test_dialects_vllm_products.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import Passed, Reading, assert_same_bits, run, trace, values, vector
from vllm_calls import (
    BF16,
    E4,
    F32,
    IR,
    C,
    S,
    Tensor,
    functional_form,  # noqa: F401  (used by every test)
    host_run,
    on_gpu,
    quantised,
    refused,
)

# ---- norms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "w", "form"),
    [
        (BF16, BF16, "mean,rsqrt,after_cast,bfloat16"),
        (torch.float16, torch.float16, "mean,rsqrt,after_cast,float16"),
        (BF16, F32, "mean,rsqrt,before_cast,bfloat16"),
        (F32, F32, "mean,rsqrt,before_cast,float32"),
        (BF16, None, "mean,rsqrt,none,bfloat16"),
    ],
    ids=str,
)
def test_norms_of_the_ir(x: torch.dtype, w: torch.dtype | None, form: str) -> None:
    value, other = values(6, 64, dtype=x), values(6, 64, dtype=x, seed=3)
    weight = None if w is None else vector(64, w)

    def plain(x: Tensor, r: Tensor, s: Tensor, *w: Tensor) -> Any:
        return quantised(IR.rms_norm(x, w[0] if w else None, 1e-5), s)

    def add(x: Tensor, r: Tensor, s: Tensor, *w: Tensor) -> Any:
        y, total = IR.fused_add_rms_norm(x, r, w[0] if w else None, 1e-5)
        return quantised(y, s), total

    given = (value, other, S, *(() if weight is None else (weight,)))
    for function, wide in ((plain, ""), (add, ",sum=float32")):
        reading = Reading(trace(function, *given))
        if function is add and x == F32:
            assert "never rounded" in reading.unread[0][2]
            continue
        assert reading.forms("norm") == [form + wide]
        reading.check(*given)
        assert Passed(trace(function, *given)).fusions == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda x, w, s: IR.rms_norm(x, w.float().to(torch.float16), 1e-5), "with a weight of"),
        (lambda x, w, s: IR.rms_norm(x, w, 1e-5, 32), "variance_size is not known"),
        (lambda x, w, s: IR.rms_norm(x, w.expand(6, 64), 1e-5), "its weight has the shape"),
        (lambda x, w, s: IR.rms_norm(x.t(), w[:6], 1e-5).t(), "not contiguous"),
    ],
    ids=["weight's dtype", "part of the row", "weight's shape", "strides"],
)
def test_norms_that_are_not_read(change: Callable[..., Tensor], why: str) -> None:
    """Beside each the norm of :func:`test_norms_of_the_ir`, which is read."""

    def function(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return quantised(change(x, w, s), s)

    made = Passed(trace(function, values(6, 64), vector(64), S))
    assert made.fusions == 0 and why in refused(made, "norm")


def test_an_epsilon_that_is_no_number() -> None:
    traced = trace(lambda x, w, s: quantised(IR.rms_norm(x, w, 1e-5), s), values(6, 64),
                   vector(64), S)  # fmt: skip
    (node,) = traced.graph.find_nodes(op="call_function", target=IR.rms_norm.default)
    for eps in (1, None, node.args[0]):
        node.args = (*node.args[:2], eps)
        assert "its epsilon is" in Reading(traced).unread[0][2]
    node.args = (*node.args[:2], 1e-5)
    assert Reading(traced).unread == []


def compiled_norm(x: Tensor, w: Tensor) -> Tensor:
    out = torch.empty_like(x)
    C.rms_norm(out, x, w, 1e-5)
    return out


def test_the_compiled_norm() -> None:
    """On a CPU it rounds once; on a GPU that depends on vLLM's version, which no graph shows."""

    def function(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return quantised(compiled_norm(x, w), s)

    given = values(6, 64), vector(64), S
    reading = Reading(trace(function, *given))
    assert reading.forms("norm") == ["sum_div,rsqrt,before_cast,bfloat16"]
    assert Passed(trace(function, *given)).fusions == 1
    made = on_gpu(function, *given)
    assert made.fusions == 0 and "differs between versions" in refused(made, "norm")
    assert str(made.after.graph) == str(made.before.graph)


def test_the_compiled_norm_on_a_gpu_where_nothing_rounds_twice() -> None:
    def function(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return quantised(compiled_norm(x, w), s)

    given = values(6, 64, dtype=F32), vector(64, F32), S
    made = on_gpu(function, *given)
    assert made.fusions == 1
    host_run(made, *given)


def test_the_compiled_add_norm() -> None:
    def function(x: Tensor, r: Tensor, w: Tensor, s: Tensor) -> Any:
        x, r = x.clone(), r.clone()
        C.fused_add_rms_norm(x, r, w, 1e-5)
        return quantised(x, s), r

    given = values(6, 64), values(6, 64, seed=3), vector(64), S
    made = Passed(trace(function, *given))
    assert made.fusions == 0 and "sum that was not rounded" in refused(made, "norm")
    assert "differs between versions" in refused(on_gpu(function, *given), "norm")


# ---- activations ---------------------------------------------------------------------------------


def activated(x: Tensor, op: Any) -> Tensor:
    out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    op(out, x)
    return out


@pytest.mark.parametrize("op", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
def test_activations(op: str) -> None:
    act = {"silu_and_mul": "div", "gelu_and_mul": "gelu_erf"}.get(op, "gelu_tanh")

    def function(x: Tensor, s: Tensor) -> Tensor:
        return quantised(activated(x, getattr(C, op).default), s)

    given = values(6, 128), S
    made = on_gpu(function, *given)
    assert made.fusions == 1 and not made.sites("activation", "left")
    (node,) = [n for n in made.fused.graph.nodes if "mul_quant" in str(n.target)]
    assert f"{act},bfloat16,bfloat16" in node.args
    host_run(made, *given)
    assert on_gpu(function, *given, dynamic=(0,)).fusions == 1
    host = Passed(trace(function, *given))
    if act == "gelu_tanh":
        assert "approximates" in refused(host, "activation")
        return
    (node,) = [n for n in host.fused.graph.nodes if "mul_quant" in str(n.target)]
    assert f"{act},float32,bfloat16" in node.args


def test_an_activation_in_another_dtype() -> None:
    def function(x: Tensor, s: Tensor) -> Tensor:
        out = x.new_empty((6, 64), dtype=F32)
        C.silu_and_mul(out, x)
        return quantised(out, s)

    made = on_gpu(function, values(6, 128), S)
    assert "another dtype" in refused(made, "activation")


# ---- what a call writes over ---------------------------------------------------------------------


def read_elsewhere(x: Tensor, s: Tensor) -> Any:
    out = torch.empty_like(x[:, :64])
    before = out + 1
    C.silu_and_mul(out, x)
    return quantised(out, s), before


def not_allocated(x: Tensor, s: Tensor) -> Any:
    out = x[:, :64] * 2
    C.silu_and_mul(out, x)
    return quantised(out, s)


def written_twice(x: Tensor, s: Tensor) -> Any:
    out = torch.empty_like(x[:, :64])
    C.silu_and_mul(out, x)
    C.silu_and_mul(out, x + 1)
    return quantised(out, s)


def part_of_another(x: Tensor, s: Tensor) -> Any:
    out = torch.empty_like(x)
    C.silu_and_mul(out[:, :64], x)
    return quantised(out, s)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (read_elsewhere, "is read elsewhere too"),
        (not_allocated, "was not allocated for it"),
        (part_of_another, "is a part of another tensor|was not allocated for it"),
    ],
)
def test_memory_of_others(function: Callable[..., Any], why: str) -> None:
    message = refused(on_gpu(function, values(6, 128), S), "activation")
    assert re.search(why, message), message


def test_a_second_write() -> None:
    """The second call is given what the first one wrote; the first, on its own, is read."""
    made = on_gpu(written_twice, values(6, 128), S)
    assert made.fusions == 0 and str(made.after.graph) == str(made.before.graph)
    found = {site.code: site.message for site in made.sites("activation", "left")}
    assert set(found) == {"FP8-F001", "FP8-R010"}
    assert "was not allocated for it" in found["FP8-R010"]


# ---- quantises -----------------------------------------------------------------------------------


def static(x: Tensor, s: Tensor) -> Tensor:
    q = torch.empty_like(x, dtype=E4)
    C.static_scaled_fp8_quant(q, x, s)
    return q


def per_tensor(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    q, scale = torch.empty_like(x, dtype=E4), x.new_empty(1, dtype=F32)
    C.dynamic_scaled_fp8_quant(q, x, scale)
    return q, scale


def per_token(x: Tensor, s: Tensor, bound: Tensor | None = None) -> tuple[Tensor, Tensor]:
    q, scale = torch.empty_like(x, dtype=E4), x.new_empty((x.shape[0], 1), dtype=F32)
    C.dynamic_per_token_scaled_fp8_quant(q, x, scale, bound)
    return q, scale


def per_group(
    x: Tensor, s: Tensor, size: int = 128, eps: float = 1e-10, top: float = 448.0,
    power: bool = False, column: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, groups = torch.empty_like(x, dtype=E4), x.shape[1] // size
    if column:
        scale = x.new_empty((groups, x.shape[0]), dtype=F32).permute(1, 0)
    else:
        scale = x.new_empty((x.shape[0], groups), dtype=F32)
    C.per_token_group_fp8_quant(x, q, scale, size, eps, -top, top, power, column, False)
    return q, scale


FORMS = {
    static: "tensor,float32,given,448.0,none,0.0,mul_recip,-448.0,448.0",
    per_tensor: "tensor,float32,div,448.0,amax_zero,1.0,mul_recip,-448.0,448.0",
    per_token: "token,float32,div,448.0,scale,4.359654017857143e-06,div,-448.0,448.0",
    per_group: "group128,float32,div,448.0,amax,1e-10,div,-448.0,448.0",
}


@pytest.mark.parametrize("quantise", FORMS, ids=lambda f: f.__name__)
def test_quantises(quantise: Callable[..., Any]) -> None:
    def function(x: Tensor, w: Tensor, s: Tensor) -> Any:
        return quantise(IR.rms_norm(x, w, 1e-5), s)

    given = values(6, 256), vector(256), S
    made = on_gpu(function, *given)
    assert made.fusions == 1
    (node,) = [n for n in made.fused.graph.nodes if "norm_quant" in str(n.target)]
    assert f"float8_e4m3fn,{FORMS[quantise]}" in node.args
    host_run(made, *given)
    # on any other device those operators have other kernels
    assert "is not known" in refused(Passed(trace(function, *given)), "quantize")


def test_a_tensor_of_zeros() -> None:
    """vLLM's kernel gives a scale of 0 and codes of 448, ours codes of 0: products of 0 in both."""
    from fp8pass.ops.quantize import quantize_with
    from fp8pass.spellings.vllm_quantize import PER_TENSOR

    q, scale = quantize_with(torch.zeros(3, 16, dtype=BF16), None, PER_TENSOR)
    assert float(scale) == pytest.approx(1 / 448) and not q.float().any()


def test_scales_in_columns(request: pytest.FixtureRequest) -> None:
    def function(x: Tensor, w: Tensor, s: Tensor) -> Any:
        return per_group(IR.rms_norm(x, w, 1e-5), s, column=True)

    given = values(6, 256), vector(256), S
    made = on_gpu(function, *given)
    if request.getfixturevalue("functional_form") == "v2":  # it is a view of what was allocated
        assert "a part of another tensor" in refused(made, "quantize")
        return
    (node,) = [n for n in made.fused.graph.nodes if "norm_quant" in str(n.target)]
    assert f"float8_e4m3fn,{FORMS[per_group]},layout=col" in node.args
    host_run(made, *given)


def aligned(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    q, groups = torch.empty_like(x, dtype=E4), x.shape[1] // 128
    scale = torch.empty_strided((x.shape[0], groups), (1, 8), dtype=F32, device=x.device)
    C.per_token_group_fp8_quant(x, q, scale, 128, 1e-10, -448.0, 448.0, False, True, True)
    return q, scale


def test_scales_aligned_for_tma() -> None:
    def function(x: Tensor, w: Tensor, s: Tensor) -> Any:
        return aligned(IR.rms_norm(x, w, 1e-5), s)

    for rows, layout in ((6, "tma"), (8, "col")):
        given = values(rows, 256), vector(256), S
        made = on_gpu(function, *given)
        (node,) = [n for n in made.fused.graph.nodes if "norm_quant" in str(n.target)]
        assert f"float8_e4m3fn,{FORMS[per_group]},layout={layout}" in node.args
        host_run(made, *given)
    made = on_gpu(function, values(9, 256), vector(256), S)  # strides of neither
    assert "its scale has the strides" in refused(made, "quantize")


def test_powers_of_two() -> None:
    made = on_gpu(lambda x, s: per_group(x, s, power=True), values(6, 256), S)
    (site,) = made.sites("quantize")
    assert (site.code, site.source) == ("FP8-F002", "vllm")  # read, with nothing before it


def bounded(x: Tensor, s: Tensor) -> Any:
    return per_token(x, s, s.reshape(1))


def test_an_upper_bound() -> None:
    """As with any tensor that bounds a scale: read, and not fused."""
    made = on_gpu(lambda x, w, s: bounded(IR.rms_norm(x, w, 1e-5), s), values(6, 64), vector(64), S)
    assert made.fusions == 0
    assert {site.code for site in made.record.sites} == {"FP8-F030"}


def integers(x: Tensor, s: Tensor) -> Tensor:
    q = torch.empty_like(x, dtype=torch.int8)
    C.static_scaled_int8_quant(q, x, s, None)
    return q


def dynamic_integers(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    q, scale = torch.empty_like(x, dtype=torch.int8), x.new_empty((x.shape[0], 1), dtype=F32)
    C.dynamic_scaled_int8_quant(q, x, scale, None)
    return q, scale


def test_int8() -> None:
    def function(x: Tensor, w: Tensor, s: Tensor) -> Any:
        return integers(IR.rms_norm(x, w, 1e-5), s)

    given = values(6, 256), vector(256), S
    made = on_gpu(function, *given)
    assert made.fusions == 1
    host_run(made, *given)
    made = on_gpu(lambda x, s: dynamic_integers(x, s), *given[::2])
    assert "each rounded on its own" in refused(made, "quantize")


def test_rows_on_a_cpu() -> None:
    def function(x: Tensor, w: Tensor) -> Any:
        return C.quantize_fp8e4m3_vec(IR.rms_norm(x, w, 1e-5), True, None)

    given = values(6, 256), vector(256)
    made = Passed(trace(function, *given))
    assert made.fusions == 1
    assert_same_bits(run(made.fused, *given), run(made.before, *given))
    made = Passed(trace(lambda x: C.quantize_fp8e4m3_vec(x, False, x[0, :1].float()), given[0]))
    assert "a scale that is given is not known" in refused(made, "quantize")
    assert "on cuda" in refused(on_gpu(function, *given), "quantize")


@pytest.mark.parametrize("quantise", [static, per_token], ids=lambda f: f.__name__)
def test_two_of_one_norm(quantise: Callable[..., Any]) -> None:
    """Equal quantises are one, though each writes to memory of its own."""

    def function(x: Tensor, w: Tensor, s: Tensor) -> Any:
        y = IR.rms_norm(x, w, 1e-5)
        leaves = torch.utils._pytree.tree_leaves((quantise(y, s), quantise(y, s)))
        return [value.float() + i for i, value in enumerate(leaves)]

    given = values(6, 256), vector(256), S
    made = on_gpu(function, *given)
    assert made.fusions == 1 and not made.sites("quantize", "left")
    host_run(made, *given)


def other_codes(x: Tensor, s: Tensor) -> Any:
    q = torch.empty_like(x, dtype=torch.float8_e5m2)
    torch.ops._C.static_scaled_fp8_quant(q, x, s)
    return q


@pytest.mark.parametrize(
    ("function", "scale", "why"),
    [
        (static, torch.rand(256), "its scale has the shape"),
        (static, torch.tensor(0.02, dtype=BF16), "or is not float32"),
        (lambda x, s: per_group(x, s, size=96), S, "its groups are 96 of 256 values"),
        (lambda x, s: per_group(x, s, top=240.0), S, "its bounds are"),
        (lambda x, s: per_group(x, s, eps=1e-3, power=True), S, "a power of two above the floor"),
        (lambda x, s: per_group(x, s, eps=0.0), S, "its floor is 0.0"),
        (lambda x, s: per_token(x, s)[0], S, "its scale is read 0 times"),
        (lambda x, s: per_tensor(x, s)[1], S, "its codes are read 0 times"),
        (lambda x, s: per_token(x, s, torch.cat([s.reshape(1)] * 2)), S, "is not one float32"),
        (other_codes, S, "it gives codes of torch.float8_e5m2"),
    ],
)  # fmt: skip
def test_quantises_that_are_not_read(function: Callable[..., Any], scale: Tensor, why: str) -> None:
    """Beside each the quantise of :func:`test_quantises`, which is read."""
    made = on_gpu(function, values(6, 256), scale)
    message = refused(made, "quantize")
    assert why in message, message
    assert str(made.after.graph) == str(made.before.graph)
