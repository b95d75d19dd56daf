"""The adapters of ROCm's libraries, on stand-ins made from recorded signatures.

None of these libraries runs here. A stand-in takes only what the recorded signature takes, checks
layouts and dtypes as the library's source does, and computes as its kernels do; what comes out has
to be the dequantised reference.
"""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lowering_sites import build, operands, problem
from torch import Tensor

from fp8pass.errors import UnsupportedError
from fp8pass.kernels.rocm_operators import shuffle, unshuffle
from fp8pass.lowerings import choose, find
from fp8pass.lowerings.aiter_block import run_operator as block
from fp8pass.lowerings.aiter_producers import add_rms_norm_quant, rms_norm_quant, silu_mul_quant
from fp8pass.lowerings.aiter_row import run_operator as row
from fp8pass.lowerings.aiter_shuffled import run_operator as shuffled
from fp8pass.lowerings.planned import run_planned
from fp8pass.ops import dynamic_form
from fp8pass.ops.library import SPECS
from fp8pass.ops.linear import scaled_product
from fp8pass.options import Options
from fp8pass.problem import ScaledMMProblem
from fp8pass.target import Target

SCHEMAS = json.loads((Path(__file__).parents[1] / "golden/schemas.json").read_text())
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FN, FNUZ, INT8 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.int8
ROW, BLOCK = ("token", "channel"), ("group1x128", "group128x128")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Puts ``module:name`` of the recorded signatures in place; returns the calls it gets."""

    def put(name: str, function: Callable[..., Any]) -> list[dict[str, Any]]:
        module, _, attribute = name.partition(":")
        names: dict[str, Any] = {}
        exec(f"def like{SCHEMAS[name]['signature']}: ...", names)
        signature, calls = inspect.signature(names["like"]), []

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            calls.append(dict(bound.arguments))
            return function(**bound.arguments)

        parts = module.split(".")
        for i in range(1, len(parts) + 1):
            parent = ".".join(parts[:i])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        monkeypatch.setattr(sys.modules[module], attribute, stand_in, raising=False)
        return calls

    return put


def packed(*tensors: Tensor) -> None:
    assert all(t.is_contiguous() for t in tensors)


def reference(p: ScaledMMProblem, v: dict[str, Tensor]) -> Tensor:
    keys = str(p.activation), str(p.weight)
    scales = v["scale_a"], v["scale_b"]
    return scaled_product(v["a"], v["b"], *scales, v.get("bias"), p.out_dtype, *keys, "")


# ---- AITER's products ----------------------------------------------------------------------------


def ck_row(XQ: Any, WQ: Any, x_scale: Any, w_scale: Any, bias: Any, dtype: Any, splitK: Any) -> Any:
    """The kernel multiplies by the scale of the column first; it reads M and N scales."""
    packed(XQ, WQ, x_scale, w_scale)
    assert XQ.dtype == WQ.dtype and x_scale.dtype == w_scale.dtype == F32
    assert (x_scale.numel(), w_scale.numel()) == (XQ.shape[0], WQ.shape[0])
    assert dtype in (BF16, F16) and (bias is None or bias.dtype == dtype)
    total = (XQ.double() @ WQ.double().t()).float()
    value = total * w_scale.reshape(1, -1) * x_scale.reshape(-1, 1)
    return (value if bias is None else value + bias.float()).to(dtype)


@pytest.mark.parametrize("dtype", [FN, FNUZ, INT8], ids=str)
@pytest.mark.parametrize(
    "pair", [ROW, ("tensor", "channel"), ("token", "tensor"), ("tensor", "tensor")], ids=str
)
def test_row(library: Any, dtype: torch.dtype, pair: tuple[str, str]) -> None:
    calls = library("aiter.ops.gemm_op_a8w8:gemm_a8w8_CK", ck_row)
    for m, out, bias, split in (
        (1, BF16, BF16, False),
        (5, F16, None, True),
        (0, BF16, None, True),
    ):
        p = problem(*pair, dtypes=(dtype, dtype), out_dtype=out, bias=bias, k=64, packed=m == 1)
        v = operands(p, m, "cpu", seed=m)
        scales = v["scale_a"], v["scale_b"]
        result = row(v["a"], v["b"], *scales, v.get("bias"), out, split)
        assert result.shape == (m, p.n) and result.dtype == out
        torch.testing.assert_close(result, reference(p, v), rtol=2**-7, atol=1e-6)
        if m:
            call = calls.pop()
            # None: AITER's table says how K is split; 0: it is not, and there is one rounding
            assert call["splitK"] == (None if split else 0)
            assert call["XQ"].shape == (m, 64) and call["WQ"].shape == (p.n, 64)
    assert not calls


def test_per_tensor_scales_of_one_row_are_spread(library: Any) -> None:
    """[1, 1] beside N columns: the kernel would read N numbers behind one."""
    calls = library("aiter.ops.gemm_op_a8w8:gemm_a8w8_CK", ck_row)
    p = problem("tensor", "tensor", m=1)
    for rank in (0, 1, 2):
        v = operands(p, 1, "cpu", scale_rank=rank)
        row(v["a"], v["b"], v["scale_a"], v["scale_b"], None, BF16, False)
        assert (calls[-1]["x_scale"].shape, calls[-1]["w_scale"].shape) == ((1, 1), (1, 48))


def test_shuffled(library: Any) -> None:
    def kernel(XQ, WQ, x_scale, w_scale, bias, dtype, check):  # type: ignore[no-untyped-def]
        assert bias is None
        return ck_row(XQ, unshuffle(WQ), x_scale, w_scale, None, dtype, None)

    calls = library("aiter.ops.gemm_op_a8w8:gemm_a8w8_bpreshuffle", kernel)
    p = problem(*ROW, dtypes=(FNUZ, FNUZ), k=64)
    for m in (0, 1, 5):
        v = operands(p, m, "cpu", seed=m)
        tiles = shuffle(v["b"].t())
        result = shuffled(v["a"], tiles, v["scale_a"], v["scale_b"], BF16)
        torch.testing.assert_close(result, reference(p, v), rtol=2**-7, atol=1e-6)
        again = torch.ops.fp8pass.aiter_shuffled_scaled_mm(
            v["a"], tiles, v["scale_a"], v["scale_b"], BF16
        )
        assert torch.equal(again, reference(p, v))
    assert len(calls) == 2


def ck_block(XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor) -> Tensor:
    packed(XQ, WQ, x_scale, w_scale)
    m, k = XQ.shape
    n = WQ.shape[0]
    assert x_scale.shape == (m, k // 128) and w_scale.shape == (n // 128, k // 128)
    total = torch.zeros(m, n)
    for i in range(k // 128):
        part = XQ[:, i * 128 :][:, :128].float() @ WQ[:, i * 128 :][:, :128].float().t()
        columns = w_scale[:, i].repeat_interleave(128)
        total += part * x_scale[:, i : i + 1] * columns
    return total


@pytest.mark.parametrize("dtype", [FN, FNUZ], ids=str)
def test_block(library: Any, dtype: torch.dtype) -> None:
    def compiled(XQ, WQ, x_scale, w_scale, Out, splitK, kernelName):  # type: ignore[no-untyped-def]
        assert splitK == 0 and kernelName == ""
        Out.copy_(ck_block(XQ, WQ, x_scale, w_scale))

    def chosen(XQ, WQ, x_scale, w_scale, dtype, isBpreshuffled):  # type: ignore[no-untyped-def]
        assert not isBpreshuffled
        return ck_block(XQ, WQ, x_scale, w_scale).to(dtype)

    exact = library("aiter.ops.gemm_op_a8w8:gemm_a8w8_blockscale_ck", compiled)
    fast = library("aiter.ops.gemm_op_a8w8:gemm_a8w8_blockscale", chosen)
    p = problem(*BLOCK, dtypes=(dtype, dtype), k=384, n=256)
    for m in (0, 1, 5):
        v = operands(p, m, "cpu", seed=m)
        for split in (False, True):
            result = block(v["a"], v["b"], v["scale_a"], v["scale_b"], BF16, split)
            assert result.shape == (m, 256)
            torch.testing.assert_close(result, reference(p, v), rtol=2**-7, atol=1e-4)
        # the operator's scale of b is oriented as b is: a transposed one in memory is fine
        odd = v["scale_b"].t().contiguous().t()
        assert torch.equal(block(v["a"], v["b"], v["scale_a"], odd, BF16, False), result)
        column_major = v["scale_a"].t().contiguous().t()
        assert torch.equal(block(v["a"], v["b"], column_major, odd, BF16, False), result)
    assert (len(exact), len(fast)) == (6, 2)


def test_without_the_library() -> None:
    p = problem(*ROW)
    v = operands(p, 3, "cpu")
    for call in (
        lambda: row(v["a"], v["b"], v["scale_a"], v["scale_b"], None, BF16, False),
        lambda: shuffled(v["a"], v["b"].t(), v["scale_a"], v["scale_b"], BF16),
        lambda: block(v["a"], v["b"], v["scale_a"], v["scale_b"], BF16, False),
    ):
        with pytest.raises(UnsupportedError, match="AITER"):
            call()
    assert "aiter" not in sys.modules and importlib.util.find_spec("aiter") is None


# ---- vLLM's product for few rows -----------------------------------------------------------------

SKINNY = """
import torch
import fp8pass.lowerings.vllm_skinny as skinny
from fp8pass.errors import UnsupportedError
from fp8pass.ops.linear import dequantised_product
from fp8pass.target import _loaded_libraries
skinny.compute_units = lambda device: 304
fp8 = torch.float8_e4m3fnuz
a, b = torch.randn(3, 64).to(fp8)[:, :32], torch.randn(16, 32).to(fp8).t()
one = torch.tensor(0.3), torch.tensor([[0.7]])
try:
    skinny.run_operator(a, b, *one, None, torch.bfloat16)
except UnsupportedError as error:
    assert "vllm._custom_ops" in str(error)
else:
    raise AssertionError("nothing is loaded yet")
assert _loaded_libraries() == ()
library = torch.library.Library("_rocm_C", "DEF")
library.define({schema!r}.removeprefix("_rocm_C::"))
seen = []
def kernel(in_a, in_b, *rest):
    in_bias, out_c, scale_a, scale_b, units = rest if {biased} else (None, *rest)
    m, k = in_a.shape  # the weight comes first
    assert in_b.shape[0] <= 4 and k % 16 == 0 and in_a.dtype == in_b.dtype == fp8
    assert in_a.stride(1) == in_b.stride(1) == 1 and not in_b.stride(0) % 16
    assert scale_a.numel() == scale_b.numel() == 1 and units == 304
    assert out_c.shape == (in_b.shape[0], m) and out_c.is_contiguous()
    value = (in_b.float() @ in_a.float().t()) * (scale_a * scale_b)
    out_c.copy_(value if in_bias is None else value + in_bias.float())
    seen.append(in_bias is not None)
library.impl("wvSplitKQ", kernel, "CPU")
assert _loaded_libraries() == (("vllm", ""),)
for rows, bias in ((1, None), (3, None), (0, None), (1, torch.randn(16).bfloat16())):
    if bias is not None and not {biased}:
        try:
            skinny.run_operator(a[:rows], b, *one, bias, torch.bfloat16)
        except UnsupportedError as error:
            assert "bias" in str(error)
            continue
        raise AssertionError("a bias was dropped")
    got = skinny.run_operator(a[:rows], b, *one, bias, torch.bfloat16)
    wanted = dequantised_product(a[:rows], b, *one, bias, torch.bfloat16)
    torch.testing.assert_close(got, wanted, rtol=2**-7, atol=1e-6)
assert seen == ([False, False, True] if {biased} else [False, False]), seen
"""


@pytest.mark.parametrize("biased", [True, False])
def test_skinny(biased: bool) -> None:
    name = "_rocm_C::wvSplitKQ" + ("" if biased else " before a bias")
    program = SKINNY.format(schema=SCHEMAS[name]["schema"], biased=biased)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- which of them is chosen ---------------------------------------------------------------------


def chosen(target: str, *pair: str, fast: bool = False, **more: Any) -> str:
    parsed = Target.parse(target)
    options = Options(numerics="fast" if fast else "exact")
    return choose(parsed, problem(*pair, target=parsed, **more), options).text


def test_skinny_for_few_rows() -> None:
    assert chosen("gfx942+vllm", "tensor", "tensor", m=None) == "0-4=vllm_skinny;5-=torch_tensor"
    assert chosen("gfx950+vllm", "tensor", "tensor", m=4) == "4=vllm_skinny"
    assert chosen("gfx942+vllm", "tensor", "tensor", m=5) == "5=torch_tensor"
    assert chosen("gfx942+vllm", *ROW, m=1) == "1=torch_row"
    assert chosen("gfx942", "tensor", "tensor", m=1) == "1=torch_tensor"
    # RDNA4: a version that has it, and not too wide
    assert chosen("gfx1201+vllm", "tensor", "tensor", m=1) == "1=torch_tensor"
    assert chosen("gfx1201+vllm==0.21", "tensor", "tensor", m=1) == "1=vllm_skinny"
    assert chosen("gfx1201+vllm==0.21", "tensor", "tensor", m=1, k=4096) == "1=vllm_skinny"
    assert chosen("gfx1201+vllm==0.21", "tensor", "tensor", m=1, k=4112) == "1=torch_tensor"
    assert chosen("gfx942+vllm", "tensor", "tensor", m=1, k=8192) == "1=vllm_skinny"


@pytest.mark.parametrize("version", ["", "==0.10", "==0.11"])
def test_a_bias_never_goes_to_a_kernel_that_may_lose_it(version: str) -> None:
    """vllm#24895: the first versions have no argument for it."""
    for m in (1, 4, None):
        plan = chosen(f"gfx942+vllm{version}", "tensor", "tensor", m=m, bias=BF16)
        assert "vllm_skinny" not in plan and "torch_tensor" in plan
    assert chosen("gfx942+vllm==0.12", "tensor", "tensor", m=1, bias=BF16) == "1=vllm_skinny"
    other = chosen("gfx942+vllm==0.12", "tensor", "tensor", m=1, bias=F32)
    assert other == "1=torch_channel"


def test_aiter() -> None:
    for arch in ("gfx942+aiter", "gfx950+aiter"):
        assert chosen(arch, *ROW) == "5=torch_row"
        assert chosen(arch, *ROW, out_dtype=F16) == "5=aiter_row"
        assert chosen(arch, *ROW, out_dtype=F32) == "5=torch_channel"
        assert chosen(arch, "token", "tensor") == "5=aiter_row"
        assert chosen(arch, *BLOCK, k=256, n=128) == "5=aiter_block"
        assert chosen(arch, *BLOCK, k=256, n=128, bias=BF16) == "5=torch_dequant"
        assert chosen(arch, *BLOCK, k=256, n=64) == "5=torch_dequant"
        assert chosen(arch, *ROW, dtypes=(INT8, INT8), m=1, bias=BF16) == "1=aiter_int8"
        assert chosen(arch, *ROW, dtypes=(INT8, INT8), n=40) == "5=torch_dequant"
        native = Target.parse(arch).fp8_dtype
        tiles = {"prepared": True, "prepared_dtype": native}
        assert chosen(arch, *ROW, **tiles) == "5=torch_row"
        assert chosen(arch, *ROW, fast=True, **tiles) == "5=aiter_shuffled"
        assert chosen(arch, *ROW, fast=True, prepared=True, prepared_dtype=BF16) == "5=torch_row"
    # where it is not built for, and without it
    assert chosen("gfx1201+aiter", *BLOCK, k=256, n=128) == "5=torch_dequant"
    assert chosen("gfx942", *ROW, out_dtype=F16) == "5=torch_channel"


def test_a_plan_over_rows_calls_the_adapter(library: Any) -> None:
    calls = library("aiter.ops.gemm_op_a8w8:gemm_a8w8_CK", ck_row)
    p = problem(*ROW, k=64)
    v = operands(p, 5, "cpu")
    args = v["a"], v["b"], v["scale_a"], v["scale_b"], None, BF16, False
    result = run_planned(*args, "0-4=torch_row;5-=aiter_row")
    torch.testing.assert_close(result, reference(p, v), rtol=2**-7, atol=1e-6)
    assert len(calls) == 1


EMITTED = [
    ("vllm_skinny", "gfx942+vllm==0.21", ("tensor", "tensor"), {"bias": BF16}, 4),
    ("aiter_row", "gfx942+aiter", ROW, {"bias": F16, "out_dtype": F16}, 5),
    ("aiter_row", "gfx950+aiter", ("tensor", "channel"), {}, 1),
    ("aiter_int8", "gfx942+aiter", ROW, {"dtypes": (INT8, INT8), "bias": BF16}, 5),
    ("aiter_block", "gfx942+aiter", BLOCK, {"k": 256, "n": 128}, 3),
]


@pytest.mark.parametrize(("kernel", "name", "pair", "changes", "m"), EMITTED)
def test_what_is_emitted_computes_the_product(
    kernel: str, name: str, pair: tuple[str, str], changes: dict[str, Any], m: int
) -> None:
    """By the reference of the operator, which a graph for an absent device is interpreted with."""
    target = Target.parse(name)
    for rows in (0, m):
        p = problem(*pair, target=target, m=rows, **changes)
        v = operands(p, rows, "cpu", seed=rows)
        built = build(find(kernel).emit, target, p, m=rows, device="cpu")
        assert torch.equal(built.module(*(v[n] for n in built.names))[0], reference(p, v))


# ---- AITER's producers ---------------------------------------------------------------------------


def per_token(out: Any, value: Tensor, yscale: Any) -> None:
    top = torch.finfo(out.dtype).max
    yscale.copy_(value.abs().amax(-1, keepdim=True) / top)
    inverse = torch.where(yscale > 0, 1 / yscale, torch.zeros(()))
    out.copy_((value * inverse).clamp(-top, top).to(out.dtype))


def normed(wide: Tensor, weight: Tensor, eps: float, sensitive: int) -> Tensor:
    value = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (value.to(weight.dtype).float() if sensitive else value) * weight.float()


def token_norm(
    out, input, yscale, weight, epsilon, use_model_sensitive_rmsnorm, group_size, shuffle_scale
):  # type: ignore[no-untyped-def]
    assert weight.dtype == input.dtype and not group_size and not shuffle_scale
    packed(out, input, yscale, weight)
    assert input.dim() == 2 and yscale.shape == (input.shape[0], 1)
    per_token(out, normed(input.float(), weight, epsilon, use_model_sensitive_rmsnorm), yscale)


def token_add_norm(
    out, input, residual_in, residual_out, yscale, weight, epsilon,
    use_model_sensitive_rmsnorm, group_size, shuffle_scale,
):  # type: ignore[no-untyped-def]  # fmt: skip
    packed(out, input, residual_in, residual_out, yscale, weight)
    assert residual_out.data_ptr() != residual_in.data_ptr()
    wide = input.float() + residual_in.float()
    residual_out.copy_(wide)
    wide = residual_out.float() if use_model_sensitive_rmsnorm else wide
    per_token(out, normed(wide, weight, epsilon, use_model_sensitive_rmsnorm), yscale)


def per_group(value: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    top = torch.finfo(dtype).max
    parts = value.unflatten(-1, (-1, group))
    scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-10) / top
    return (parts * (1 / scale)).clamp(-top, top).to(dtype).flatten(-2), scale.squeeze(-1)


def group_norm(
    inp1, inp1_weight, inp1_epsilon, inp2, inp2_weight, inp2_epsilon, group_size, dtype_quant, res1
):  # type: ignore[no-untyped-def]
    assert inp2 is None and inp2_weight is None and inp2_epsilon is None
    wide = inp1.float() if res1 is None else inp1.float() + res1.float()
    value = normed(wide, inp1_weight, inp1_epsilon, 0)
    total = None if res1 is None else wide.to(inp1.dtype)
    return per_group(value, group_size, dtype_quant), None, None, total


def group_silu(x, activation, group_size, dtype_quant):  # type: ignore[no-untyped-def]
    assert activation == "silu" and x.dim() == 2
    gate, up = x.float().chunk(2, -1)
    return per_group(gate * torch.sigmoid(gate) * up, group_size, dtype_quant)


NORMS = ("mean,rsqrt,after_cast,bfloat16", "mean,rsqrt,before_cast,bfloat16,sum=float32")
QUANTS = {"token": dynamic_form("token"), "group128": dynamic_form("group128")}


@pytest.fixture
def producers(library: Any) -> None:
    library("aiter.ops.rmsnorm:rmsnorm2d_fwd_with_dynamicquant", token_norm)
    library("aiter.ops.rmsnorm:rmsnorm2d_fwd_with_add_dynamicquant", token_add_norm)
    library("aiter.ops.triton.fused_fp8_quant:fused_rms_fp8_group_quant", group_norm)
    library("aiter.ops.triton.activation:act_mul_and_fp8_group_quant", group_silu)


def values(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=g) * 3).to(BF16)


def agree(got: tuple[Tensor, ...], op: str, args: tuple[Any, ...]) -> None:
    """Shapes, dtypes and strides of the operator; values within a step of a code."""
    wanted = getattr(torch.ops.fp8pass, op)(*args)
    for one, other in zip(got, wanted, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    spread = [
        (q.float().unflatten(-1, (scale.shape[-1], -1)) * scale.unsqueeze(-1)).flatten(-2)
        for q, scale in (got[:2], wanted[:2])
    ]
    if spread[0].numel():
        error = (spread[0] - spread[1]).abs()
        smallest = float(wanted[1].max()) * 2.0**-8
        assert bool((error <= spread[1].abs() / 7 + smallest).all())
        assert float(error.mean() / spread[1].abs().mean()) < 0.01


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("form", NORMS)
@pytest.mark.parametrize("shape", [(5, 256), (1, 256), (0, 256), (2, 3, 256)], ids=str)
def test_norms(producers: None, quant: str, form: str, shape: tuple[int, ...]) -> None:
    text = str(QUANTS[quant])
    x, residual = values(*shape), values(*shape, seed=1)
    kept = x.clone(), residual.clone()
    weight = values(256, seed=2)
    args = (x, weight, None, 1e-6, form, text, False)
    agree(rms_norm_quant(*args), "rms_norm_quant", args)
    args = (x, residual, weight, None, 1e-6, form, text, False)
    got = add_rms_norm_quant(*args)
    agree(got, "add_rms_norm_quant", args)
    assert torch.equal(got[3], x + residual)
    assert torch.equal(x, kept[0]) and torch.equal(residual, kept[1]), "no input is written to"


def test_a_row_of_zeros(producers: None) -> None:
    x, weight = torch.zeros(2, 256, dtype=BF16), torch.ones(256, dtype=BF16)
    q, scale, _ = rms_norm_quant(x, weight, None, 1e-6, NORMS[0], str(QUANTS["token"]), False)
    assert not q.float().any() and not scale.any()


def test_silu_mul(producers: None) -> None:
    text, form = str(QUANTS["group128"]), "div,bfloat16,bfloat16"
    both = values(5, 512)
    for gate, up in (both.chunk(2, -1), (values(5, 256), values(5, 256, seed=3)),
                     (values(2, 3, 256), values(2, 3, 256, seed=4)), values(0, 512).chunk(2, -1),
                     reversed(both.chunk(2, -1))):  # fmt: skip
        args = (gate, up, None, form, text, False)
        agree(silu_mul_quant(*args), "silu_mul_quant", args)


def test_halves_of_one_tensor_are_not_copied(library: Any) -> None:
    calls = library("aiter.ops.triton.activation:act_mul_and_fp8_group_quant", group_silu)
    both = values(5, 512)
    text, form = str(QUANTS["group128"]), "div,bfloat16,bfloat16"
    gate, up = both.chunk(2, -1)
    silu_mul_quant(gate, up, None, form, text, False)
    assert calls[0]["x"].data_ptr() == both.data_ptr()
    silu_mul_quant(up, gate, None, form, text, False)
    assert calls[1]["x"].data_ptr() != both.data_ptr()


def test_the_operators_have_the_schema_of_the_generic_ones() -> None:
    for op in ("rms_norm_quant", "add_rms_norm_quant", "silu_mul_quant"):
        assert SPECS[f"aiter_{op}"].schema == SPECS[op].schema
