"""vLLM's operators: each is read as what its kernel computes, or refused with the reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
import vllm_ops  # noqa: F401  (the operators)
from graphs import Passed, Reading, assert_same_bits, codes, run, trace, values, vector
from vllm_graphs import moved

from fp8pass.absent_device import absent_device

Tensor = torch.Tensor
E4 = torch.float8_e4m3fn
F32, BF16 = torch.float32, torch.bfloat16
C: Any = torch.ops._C
IR: Any = torch.ops.vllm_ir


@pytest.fixture(params=["v1", "v2"], autouse=True)
def functional_form(request: pytest.FixtureRequest) -> Any:
    """Both forms in which torch writes a call of an operator that writes to its arguments."""
    with inductor.patch(enable_auto_functionalized_v2=request.param == "v2"):
        yield request.param


def on_gpu(function: Callable[..., Any], *inputs: Tensor, dynamic: tuple[int, ...] = ()) -> Passed:
    """The pass over ``function`` for an H200; the first input has a symbolic number of rows."""
    traced = trace(function, *inputs, dynamic=dynamic)
    with absent_device("cuda"):
        return Passed(moved(traced, "cuda"), target="sm90")


def refused(made: Passed, kind: str) -> str:
    """The reason of the only site of a kind, which was left as FP8-R010."""
    ((code, message),) = {(s.code, s.message) for s in made.sites(kind, "left")}
    assert code == "FP8-R010", (code, message)
    return message


def host_run(made: Passed, *inputs: Tensor) -> None:
    """Fused or not, the numbers of a graph for a GPU are the same, by its references."""
    from golden_graphs import interpreted

    before = interpreted(made.before, list(inputs))
    assert_same_bits(interpreted(made.fused, list(inputs)), before)


# ---- norms ---------------------------------------------------------------------------------------


def quantised(y: Tensor, s: Tensor) -> Tensor:
    return (y.float() * (1 / s)).clamp(-448.0, 448.0).to(E4)


S = torch.tensor(0.02)


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
    """vLLM's kernel gives a scale of 0 and codes of 448; ours codes of 0. Products are 0 in both."""
    from fp8pass.ops.quantize import quantize_with
    from fp8pass.spellings.vllm_quantize import PER_TENSOR

    q, scale = quantize_with(torch.zeros(3, 16, dtype=BF16), None, PER_TENSOR)
    assert float(scale) == pytest.approx(1 / 448) and not q.float().any()


def test_scales_in_columns(functional_form: str) -> None:
    def function(x: Tensor, w: Tensor, s: Tensor) -> Any:
        return per_group(IR.rms_norm(x, w, 1e-5), s, column=True)

    given = values(6, 256), vector(256), S
    made = on_gpu(function, *given)
    if functional_form == "v2":  # the scale is a view of what was allocated
        assert "a part of another tensor" in refused(made, "quantize")
        return
    (node,) = [n for n in made.fused.graph.nodes if "norm_quant" in str(n.target)]
    assert f"float8_e4m3fn,{FORMS[per_group]},layout=col" in node.args
    host_run(made, *given)


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


# ---- products ------------------------------------------------------------------------------------


def cutlass(
    a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None = None, out: Any = BF16
) -> Tensor:
    result = torch.empty((a.shape[0], b.shape[0]), dtype=out, device=a.device)
    C.cutlass_scaled_mm(result, a, b.t(), sa, sb, bias)
    return result


A, B = codes(5, 256), codes(384, 256, seed=3)
ONE = torch.rand(1) + 0.1
ROWS, COLS = torch.rand(5, 1) + 0.1, torch.rand(384, 1) + 0.1
BLOCK_A, BLOCK_B = torch.rand(2, 5).t() + 0.1, torch.rand(3, 2) + 0.1
BLOCKS = "dynamic/group1x128 x static/group128x128"


@pytest.mark.parametrize(
    ("sa", "sb", "key", "fast"),
    [
        (ONE, ONE, "static/tensor x static/tensor", True),
        (torch.tensor(0.1), ONE, "static/tensor x static/tensor", True),
        (ROWS, COLS, "dynamic/token x static/channel", True),
        (ROWS.flatten(), COLS.flatten(), "dynamic/token x static/channel", True),
        (ROWS, COLS.t(), "dynamic/token x static/channel", True),
        (ROWS, ONE, "dynamic/token x static/tensor", True),
        (ONE, COLS, "static/tensor x static/channel", True),
        (BLOCK_A, BLOCK_B, BLOCKS, False),
    ],
)
def test_products(sa: Tensor, sb: Tensor, key: str, fast: bool) -> None:
    blocks = sb.dim() == 2 and 1 not in sb.shape

    def function(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
        return cutlass(a, b, sa, sb.t() if blocks else sb)

    given = A, B, sa, sb
    made = on_gpu(function, *given)
    (site,) = made.sites("scaled_mm")
    assert site.key.replace("float8_e4m3fn/", "") == key and site.source == "vllm"
    (node,) = [n for n in made.fused.graph.nodes if "fp8pass.scaled_mm" in str(n.target)]
    assert node.args[8] is fast
    host_run(made, *given)


@pytest.mark.parametrize("out", [BF16, torch.float16])
def test_bias(out: torch.dtype) -> None:
    given = A, B, ROWS, COLS, vector(384, out)
    made = on_gpu(lambda *t: cutlass(*t, out=out), *given)
    assert made.sites("scaled_mm")[0].status == "lowered"
    host_run(made, *given)


def test_integers() -> None:
    given = codes(5, 256, dtype=torch.int8), codes(384, 256, dtype=torch.int8, seed=3), ROWS, COLS
    made = on_gpu(cutlass, *given)
    assert made.sites("scaled_mm")[0].key == "int8/dynamic/token x int8/static/channel"
    host_run(made, *given)


def deepgemm(
    a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, packed: bool = False, out: Any = BF16
) -> Tensor:
    result = torch.empty((a.shape[0], b.shape[0]), dtype=out, device=a.device)
    torch.ops.vllm.fp8_gemm_nt_op(a, sa, b, sb, result, packed)
    return result


def test_deepgemm() -> None:
    given = A, B, BLOCK_A, BLOCK_B
    made = on_gpu(deepgemm, *given)
    assert made.sites("scaled_mm")[0].key.replace("float8_e4m3fn/", "") == BLOCKS
    host_run(made, *given)


@pytest.mark.parametrize(
    ("function", "given", "why"),
    [
        (cutlass, (A, B, ROWS, torch.rand(7, 1)), "its scales have the shapes"),
        (cutlass, (A, B, torch.rand(5, 3), COLS), "its scales have the shapes"),
        (cutlass, (A[:, :128].clone(), B[:, :128].clone(), ROWS, torch.rand(1, 3)),
         "its scales have the shapes"),  # one block of K: it would count rows
        (cutlass, (A, B, ROWS.to(BF16), COLS), "its scales are torch.bfloat16"),
        (cutlass, (A, B, ROWS, COLS, vector(384, F32)), "its bias is not a vector"),
        (cutlass, (A.to(torch.float8_e5m2), B, ROWS, COLS), "its operands are torch.float8_e5m2"),
        (lambda *t: cutlass(*t, out=F32), (A, B, ROWS, COLS), "its result is torch.float32"),
        (lambda *t: deepgemm(*t, packed=True), (A, B, BLOCK_A, BLOCK_B), "powers of two, packed"),
        (lambda *t: deepgemm(*t, out=torch.float16), (A, B, BLOCK_A, BLOCK_B), "it multiplies"),
        (deepgemm, (A, B, BLOCK_A, BLOCK_B.t().contiguous()), "its scales have the shapes"),
    ],
)  # fmt: skip
def test_products_that_are_not_read(
    function: Callable[..., Any], given: tuple[Tensor, ...], why: str
) -> None:
    """Beside each the product of :func:`test_products` or :func:`test_deepgemm`, which is read."""
    made = on_gpu(function, *given)
    message = refused(made, "scaled_mm")
    assert why in message, message
    assert str(made.after.graph) == str(made.before.graph)


def test_the_contract_of_the_sum() -> None:
    """Where vLLM's kernel accumulates in the reduced precision of the tensor core, kernels that do
    may take its place; the sums of blocks are float32, and no such kernel takes them."""
    from fp8pass.lowerings import choose, find
    from fp8pass.lowerings.site import problem_of
    from fp8pass.options import Options
    from fp8pass.site_draft import Draft
    from fp8pass.target import Target

    target, options = Target.parse("sm90+vllm"), Options.resolve({}, linear_backend="cutlass")
    for given, kernel in (
        ((A, B, ROWS, COLS), "vllm_cutlass"),
        ((A, B, BLOCK_A, BLOCK_B), "vllm_cutlass_block"),
    ):
        blocks = kernel.endswith("block")
        made = on_gpu(lambda a, b, sa, sb: cutlass(a, b, sa, sb.t() if blocks else sb), *given)
        (node,) = [n for n in made.fused.graph.nodes if "fp8pass.scaled_mm" in str(n.target)]
        draft = Draft("scaled_mm", "", node, {}, [], "", "")
        problem = problem_of(draft, target)
        assert choose(target, problem, options).kernel is find(kernel)
        assert problem.use_fast_accum is not blocks


def test_per_compile_range() -> None:
    """The choice is made for the numbers of rows that the graph is compiled for."""
    given = A, B, ROWS, COLS
    traced = trace(cutlass, *given, dynamic=(0, 2))
    with absent_device("cuda"):
        graph = moved(traced, "cuda")
        rows = graph.graph.find_nodes(op="placeholder")[0].meta["val"].shape[0]
        torch._check(rows <= 16)
        made = Passed(graph, target="sm90")
    (site,) = made.sites("scaled_mm")
    assert site.status == "lowered" and site.shape == "2-16x384x256"


# ---- what stays ----------------------------------------------------------------------------------


def norm_static(x: Tensor, s: Tensor) -> Tensor:
    q = torch.empty_like(x, dtype=E4)
    C.rms_norm_static_fp8_quant(q, x, x[0] * 1, s, 1e-5)
    return q


def silu_static(x: Tensor, s: Tensor) -> Tensor:
    q = x.new_empty((x.shape[0], x.shape[1] // 2), dtype=E4)
    C.silu_and_mul_quant(q, x, s)
    return q


def weight_only(x: Tensor, s: Tensor) -> Tensor:
    weight = x[:, :256].to(E4).clone()
    return C.fp8_scaled_mm_cpu(x * 1, weight, s.reshape(1, 1) * 1, [128, 128], None, BF16, True)


def onednn(x: Tensor, s: Tensor) -> Tensor:
    out, a = torch.empty_like(x), x.to(torch.int8)
    C.onednn_scaled_mm(out, a, s, None, None, None, s * 1)
    return out


def flashinfer(x: Tensor, s: Tensor) -> Tensor:
    op = torch.ops.vllm.dynamic_flashinfer_deepgemm_blockscale_gemm
    return op(x, x.to(E4), s.reshape(1, 1), 128, False)


@pytest.mark.parametrize(
    ("function", "kind", "code", "words"),
    [
        (norm_static, "norm", "FP8-R011", "norm and static quantise"),
        (silu_static, "activation", "FP8-R011", "SiLU·mul and static quantise"),
        (weight_only, "scaled_mm", "FP8-R012", "W8A16"),
        (onednn, "scaled_mm", "FP8-R012", "behind a handle"),
        (flashinfer, "scaled_mm", "FP8-R012", "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER=0"),
    ],
)
def test_sites_that_are_done(
    function: Callable[..., Any], kind: str, code: str, words: str
) -> None:
    made = on_gpu(function, values(6, 256), S)
    (site,) = made.sites(kind)
    assert (site.status, site.code) == ("left", code) and words in site.message
    assert str(made.after.graph) == str(made.before.graph)


def test_operators_that_no_table_knows() -> None:
    vllm_ops.define(
        "vllm::some_w8a8_scaled_mm", "(Tensor a, Tensor b) -> Tensor", lambda a, b: a @ b.t(),
        lambda a, b: a.new_empty((a.shape[0], b.shape[0])),
    )  # fmt: skip
    op = torch.ops.vllm.some_w8a8_scaled_mm
    made = on_gpu(lambda x, s: op(x, x * 2) + quantised(x, s).float()[0, 0], values(6, 64), S)
    assert "does not know what it computes" in refused(made, "scaled_mm")


# ---- padding -------------------------------------------------------------------------------------


def padded(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, first: int = 0) -> Tensor:
    rows = a.shape[0]
    a = torch.nn.functional.pad(a, (0, 0, 0, 17 - rows))
    return torch._scaled_mm(a, b.t(), sa, sb, out_dtype=BF16)[first : first + rows]


def kept(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
    whole = torch._scaled_mm(
        torch.nn.functional.pad(a, (0, 0, 0, 12)), b.t(), sa, sb, out_dtype=BF16
    )
    return whole[:5] + whole[5:10]


def fewer(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
    a = torch.nn.functional.pad(a, (0, 0, 0, 12))
    return torch._scaled_mm(a, b.t(), sa, sb, out_dtype=BF16)[:4]


@pytest.mark.parametrize(
    ("function", "removed"),
    [
        (padded, True),
        (lambda *t: padded(*t, first=1), False),
        (kept, False),
        (fewer, False),
    ],
    ids=["padded", "other rows", "a second reader", "fewer rows"],
)
def test_padding_to_17_rows(function: Callable[..., Any], removed: bool) -> None:
    given = A, B, ONE, ONE * 2
    made = Passed(trace(function, *given))
    pads = made.after.graph.find_nodes(
        op="call_function", target=torch.ops.aten.constant_pad_nd.default
    )
    assert bool(pads) is not removed
    assert made.sites("scaled_mm")[0].status == "lowered"
    for a, b in zip(run(made.fused, *given), run(made.before, *given), strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-3)


def test_padded_rows_with_a_scale_each() -> None:
    """A scale for each row has one for the padding too, so that nothing is taken away."""
    given = A, B, torch.rand(17, 1), COLS.t().contiguous()
    made = Passed(trace(padded, *given))
    assert made.after.graph.find_nodes(
        op="call_function", target=torch.ops.aten.constant_pad_nd.default
    )
