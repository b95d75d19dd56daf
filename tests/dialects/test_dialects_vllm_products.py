"""vLLM's products, those that stay as they are, and its own fusions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import vllm_standins
from graphs import Passed, codes, run, trace, values, vector
from vllm_calls import (
    BF16,
    E4,
    F32,
    C,
    S,
    Tensor,
    functional_form,  # noqa: F401  (used by every test)
    host_run,
    on_gpu,
    quantised,
    refused,
)
from vllm_graphs import moved

from fp8pass.absent_device import absent_device

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


def turned(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
    return cutlass(a, b, sa, sb.t())


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
        made = on_gpu(turned if blocks else cutlass, *given)
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
    vllm_standins.define(
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
