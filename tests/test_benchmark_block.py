"""benchmarks/block.py at toy size on a CPU: what it computes, what it prints; no times."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8pass.fp8_linear import Fp8Linear

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
if not BENCHMARKS.is_dir():
    pytest.skip("the benchmarks are not part of a source distribution", allow_module_level=True)
sys.path.insert(0, str(BENCHMARKS))

import block  # noqa: E402
import block_model as model  # noqa: E402
import block_tables  # noqa: E402
import block_timing  # noqa: E402
from block_variants import VARIANTS  # noqa: E402

TOY = model.Sizes(hidden=64, intermediate=128, qkv=96, blocks=2)
FP8 = torch.float8_e4m3fn


class Now:
    """Stands for a CUDA graph: runs the forward whenever it is replayed."""

    def __init__(self, forward: Callable[[Tensor], Any], residual: Tensor) -> None:
        self.forward, self.residual = forward, residual

    def run(self) -> Any:
        return self.forward(self.residual.clone())

    def microseconds(self) -> float:
        self.run()
        return 1.0


# ---- the block -----------------------------------------------------------------------------------


def as_fp8_linear(layer: model.Linear, recipe: str) -> Fp8Linear:
    new = Fp8Linear(layer.weight.shape[1], layer.weight.shape[0], recipe)
    new.weight, new.weight_scale = layer.weight, layer.weight_scale
    new.input_scale = layer.input_scale
    return new


@pytest.mark.parametrize("recipe", model.RECIPES)
def test_the_block_is_one_of_fp8_linears(recipe: str) -> None:
    (w, *_) = model.make_weights(TOY, recipe, "cpu")
    hidden, residual = model.make_inputs(TOY, 5, "cpu")
    qkv, o, gate_up, down = (
        as_fp8_linear(layer, recipe) for layer in (w.qkv, w.o, w.gate_up, w.down)
    )
    total = hidden + residual
    total = total + o(qkv(model.rms_norm(total, w.input_norm))[:, :64])
    gate, up = gate_up(model.rms_norm(total, w.post_norm)).split(128, dim=-1)
    wanted = down(nn.functional.silu(gate) * up)
    found = model.make_block(model.torch_product)(hidden, residual, w)
    assert torch.equal(found[0], wanted) and torch.equal(found[1], total)


@pytest.mark.parametrize("recipe", model.RECIPES)
def test_eager_is_near_the_reference_and_a_changed_block_is_not(recipe: str) -> None:
    stack = model.make_weights(TOY, recipe, "cpu")
    inputs = model.make_inputs(TOY, 33, "cpu")
    wanted = model.reference(stack, *inputs)
    assert wanted[0].dtype is torch.float64 and wanted[0].shape == inputs[0].shape
    eager = model.make_block(model.torch_product)
    error, worst = model.distances(model.run_blocks(eager, stack, *inputs), wanted)
    assert 0 < error < 0.1 and error <= worst < 0.25
    assert block.wrong(error, worst, None) is None

    swapped = [w._replace(input_norm=w.post_norm, post_norm=w.input_norm) for w in stack]
    error, worst = model.distances(model.run_blocks(eager, swapped, *inputs), wanted)
    assert block.wrong(error, worst, None)
    assert block.wrong(float("nan"), 0.0, None) and block.wrong(0.0, float("nan"), None)


def test_one_wrong_row_is_seen() -> None:
    wanted = torch.randn(4096, 8, dtype=torch.float64)
    found = wanted.clone()
    found[7] = 0
    error, worst = model.distances([found], [wanted])
    assert error < 0.05 and block.wrong(error, worst, 0.02)
    found[7, 0] = float("nan")
    assert block.wrong(*model.distances([found], [wanted]), 0.02)


def test_static_scales_cover_what_they_were_calibrated_on() -> None:
    stack = model.make_weights(TOY, "static", "cpu")
    inputs = model.make_inputs(TOY, 64, "cpu")
    total = (inputs[0] + inputs[1]).float()
    largest = model.rms_norm(total, stack[0].input_norm).abs().amax()
    scale = stack[0].qkv.input_scale
    assert scale is not None and scale.dtype is torch.float32 and scale.dim() == 0
    torch.testing.assert_close(scale * 448, largest, rtol=1e-2, atol=0)
    assert model.make_weights(TOY, "dynamic", "cpu")[0].qkv.weight_scale.shape == (1, 96)


def test_floor_is_memory_for_few_rows_and_arithmetic_for_many() -> None:
    sizes = model.Sizes()
    assert sizes.weight_bytes == 6144 * 4096 + 4096 * 4096 + 28672 * 4096 + 4096 * 14336
    assert block.floor_us(sizes, 1) == block.floor_us(sizes, 64) == pytest.approx(49.8, abs=0.1)
    assert block.floor_us(sizes, 4096) == pytest.approx(1191.1, abs=0.2)


# ---- vLLM's operators ----------------------------------------------------------------------------


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def _quantise(out: Tensor, x: Tensor, scale: Tensor) -> None:
    out.copy_((x.float() / scale).clamp(-448, 448).to(FP8))


def _per_token(out: Tensor, x: Tensor, scale: Tensor, upper: None) -> None:
    assert upper is None and scale.shape == (x.shape[0], 1)
    scale.copy_(x.float().abs().amax(-1, keepdim=True) / 448)
    _quantise(out, x, scale)


def _add_norm_per_token(
    out: Tensor, x: Tensor, w: Tensor, scale: Tensor, eps: float, upper: None, residual: Tensor
) -> None:
    residual.add_(x)
    _per_token(out, _norm(residual, w, eps), scale, upper)


def _add_norm_static(
    out: Tensor, x: Tensor, residual: Tensor, w: Tensor, scale: Tensor, eps: float
) -> None:
    residual.add_(x)
    _quantise(out, _norm(residual, w, eps), scale)


def _silu_mul(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def _silu_and_mul(out: Tensor, x: Tensor) -> None:
    out.copy_(_silu_mul(x))


def _mm(out: Tensor, a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, bias: None) -> None:
    assert a.is_contiguous() and b.t().is_contiguous() and bias is None
    assert sa.shape in ((), (a.shape[0], 1)) and sb.shape in ((), (1, b.shape[1]))
    out.copy_((a.float() * sa) @ (b.float() * sb))


#: Schemas of vLLM 0.21, with what they mean.
MEANINGS: dict[str, Callable[..., None]] = {
    "rms_norm_dynamic_per_token_quant(Tensor! result, Tensor input, Tensor weight, Tensor! scale, "
    "float epsilon, Tensor? scale_ub, Tensor(a!)? residual) -> ()": _add_norm_per_token,
    "fused_add_rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor! residual, "
    "Tensor weight, Tensor scale, float epsilon) -> ()": _add_norm_static,
    "dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, "
    "Tensor? scale_ub) -> ()": _per_token,
    "static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale) -> ()": _quantise,
    "silu_and_mul(Tensor! result, Tensor input) -> ()": _silu_and_mul,
    "silu_and_mul_quant(Tensor! result, Tensor input, Tensor scale) -> ()": (
        lambda out, x, scale: _quantise(out, _silu_mul(x), scale)
    ),
    "cutlass_scaled_mm(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, "
    "Tensor? bias) -> ()": _mm,
}


@pytest.fixture
def vllm_stand_in() -> Iterator[None]:
    """Operators of vLLM's names, schemas and meanings, for a CPU."""
    if hasattr(torch.ops._C, "cutlass_scaled_mm"):
        pytest.skip("vLLM's own operators are loaded")
    library = torch.library.Library("_C", "FRAGMENT")
    for schema, meaning in MEANINGS.items():
        name = schema.partition("(")[0]
        for letter in "bcd"[: schema.count("Tensor!")]:
            schema = schema.replace("Tensor!", f"Tensor({letter}!)", 1)
        library.define(schema)
        library.impl(name, meaning, "CPU")
    try:
        yield
    finally:
        library._destroy()
        assert not hasattr(torch.ops._C, "cutlass_scaled_mm")


@pytest.mark.parametrize("recipe", model.RECIPES)
def test_every_uncompiled_variant_computes_the_block(recipe: str, vllm_stand_in: None) -> None:
    bench = block.Bench(
        recipe, ["eager", "vllm_fused"], [3, 17], sizes=TOY, device="cpu", replay=Now
    )
    for rows in (3, 17):
        cell, replays = bench.cell(rows, seconds=0)
        for failure in block_tables.failures([cell]):
            raise RuntimeError(failure)
        assert set(replays) == {"eager", "vllm_fused"}
        assert all(0 < entry["error"] < 0.1 for entry in cell["variants"].values())


def test_vllms_product_inside_a_model(vllm_stand_in: None) -> None:
    import vllm_ops

    stack = model.make_weights(TOY, "dynamic", "cpu")
    inputs = model.make_inputs(TOY, 4, "cpu")
    found = model.run_blocks(model.make_block(vllm_ops.product), stack, *inputs)
    assert model.distances(found, model.reference(stack, *inputs))[0] < 0.1
    q, scale = model.quantise(inputs[0], None)
    layer = stack[0].qkv
    args = (q, layer.weight, scale, layer.weight_scale)
    # its other checks do arithmetic on the arguments, which fp8 has not
    torch.library.opcheck(vllm_ops.vllm_scaled_mm, args, test_utils="test_faketensor")


def test_a_variant_that_is_wrong_or_raises_is_reported_and_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = block.variants.build

    def build(name: str, *rest: Any) -> model.Block:
        if name == "inductor":
            raise RuntimeError("no compiler")
        eager = real("eager", *rest)
        if name == "fp8pass":
            return lambda hidden, residual, w: (eager(hidden, residual, w)[0] * 1.5, residual)
        return eager

    monkeypatch.setattr(block.variants, "build", build)
    names = ["eager", "inductor", "fp8pass"]
    cell, replays = block.Bench("static", names, [4], sizes=TOY, device="cpu", replay=Now).cell(
        4, 0
    )
    assert set(replays) == {"eager"}
    first, second = block_tables.failures([cell])
    assert "inductor: RuntimeError: no compiler" in first
    assert "fp8pass: relative L2 distance" in second
    assert "no compiler" not in block_tables.render([cell])


# ---- what is printed -----------------------------------------------------------------------------


SHOWN = ("eager", "inductor", "inductor_fast", "vllm_default", "vllm_fused", "fp8pass",
         "fp8pass_fast", "fp8pass_fast_vllm")  # fmt: skip


def made_up(rows: int) -> dict[str, Any]:
    entries = {
        name: {"us": 100.0 - 10 * i, "error": 0.01, "first_call_s": 2.5, "kernels": 9.0}
        for i, name in enumerate(SHOWN)
    }
    chosen = {"products": ["triton_skinny"] * 4, "producers": ["norm triton"], "problems": []}
    entries["fp8pass"]["chosen"] = chosen  # type: ignore[assignment]
    return {"recipe": "dynamic", "rows": rows, "floor_us": 49.8, "variants": entries}


def test_tables() -> None:
    assert set(SHOWN) <= set(VARIANTS)
    text = block_tables.render([made_up(1), made_up(16)])
    lines = text.splitlines()
    head = lines[lines.index("dynamic: microseconds per block") + 1].split()
    row = dict(zip(head, lines[-1].replace("best peer", "best_peer").split(), strict=False))
    assert row["M"] == "16" and row["eager"] == "100.0" and row["floor"] == "49.8"
    # vllm_fused, the fastest of the others, takes 60, and fp8pass 50
    assert lines[-1].split()[len(SHOWN) + 2 :] == ["vllm_fused", "1.200", "1.500", "2.000"]
    assert "fp8pass M 1,16: triton_skinny, triton_skinny" in text
    ratios = lines[lines.index("dynamic: time / time of inductor") + 2].split()
    assert ratios[1:4] == ["1.111", "1.000", "0.889"]


def test_a_table_with_gaps() -> None:
    cell = made_up(1)
    cell["variants"]["inductor"] = {"failed": "RuntimeError: of some kind"}
    text = block_tables.render([cell])
    assert "-" in text.splitlines()[-1].split()
    assert block_tables.failures([cell]) == ["dynamic M 1 inductor: RuntimeError: of some kind"]


def test_kernels_between_sleeps() -> None:
    spin = "at::cuda::spin_kernel(long)"
    names = ["warm", spin, "a", "b", spin, "reset", spin, "a", spin]
    events = [(name, float(i), 2.0) for i, name in enumerate(names)]
    found = block_timing.split(events[::-1], ["x", "y"])
    assert found == {"x": [("a", 2.0), ("b", 2.0)], "y": [("a", 2.0)]}
    assert block_timing.split(events, ["x"]) == block_timing.split(events[:-1], ["x", "y"]) == {}


def test_command_line() -> None:
    args = block.arguments(["--recipes", "static", "--rows", "1", "64", "--dynamic"])
    assert (args.recipes, args.rows, args.dynamic) == (["static"], [1, 64], True)
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="torch finds none"):
            block.main([])
