"""Every producer and every form of a quantise on a GPU: LayerNorm, int8, powers of two, inverse
scales, given scales per token and group, bounds of every kind, dtypes of the scale.

A quantise is bit for bit that of eager on what the producer normalised; the producer is held to its
reference and to float64.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from producer_cases import BF16, F16, F32, OPS, arguments, exact, kernel, reference, values
from producer_checks import NORMAL, STEP, assert_layouts, differing
from quantise_forms import dequantised, forms, inside, random_given, slack

from fp8pass.ops import QuantForm

pytest.importorskip("triton")

FORMS = forms("group128")
#: All producers; the first of each module on the entire grid.
PRODUCERS = (*OPS, "layer_norm_quant")
WIDTHS = (4096, 5120, 8192, 14336)
ROWS = (1, 17, 256, 2048)
LAYER_NORM = "var_mean,rsqrt,before_cast,{}"


def call(op: str, rows: int, width: int, dtype: torch.dtype, quant: QuantForm) -> tuple[Any, ...]:
    """Arguments of one call that keeps its value, with a given scale where the form has one."""
    scale = random_given(quant, (rows, width), "cuda", rows)
    if op == "layer_norm_quant":
        x = values(rows, width, dtype, rows) + 0.5
        weight, bias = ((values(1, width, F32, i)[0] * 0.1 + i).to(dtype) for i in (1, 2))
        text = LAYER_NORM.format(str(dtype).removeprefix("torch."))
        return x, weight, bias, scale, 1e-5, text, str(quant), True
    args = list(arguments(op, rows, width, dtype, quant, keep=True, seed=rows))
    place = 1 if op == "quantize" else len(args) - (5 if "norm" in op else 4)
    args[place] = scale
    return tuple(args)


def run(op: str, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    if op == "layer_norm_quant":
        from fp8pass.kernels.triton_layer_norm import layer_norm_quant

        return layer_norm_quant(*args)
    return kernel(op)(*args)  # type: ignore[no-any-return]


def wanted(op: str, args: tuple[Any, ...]) -> torch.Tensor:
    """What is quantised, in float64."""
    if op != "layer_norm_quant":
        return exact(op, args)
    x, weight, bias = (a.double() for a in args[:3])
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, args[4])


def same_quantise(
    got: tuple[torch.Tensor, ...], x: torch.Tensor, scale: Any, quant: QuantForm, **say: Any
) -> None:
    """The very codes, scales and strides that eager makes of ``x``; the sign of NaN is free."""
    want = reference("quantize")(x, scale, str(quant))
    assert_layouts(got[:2], want)
    for name, a, b in zip(("codes", "scales"), got[:2], want, strict=True):
        off = differing(a, b, 0.0, 0.0)
        first = off.nonzero()[:4].tolist()
        assert not off.any(), (name, say, str(quant), int(off.sum()), first, a[off][:4], b[off][:4])


def check(op: str, args: tuple[Any, ...], quant: QuantForm, **say: Any) -> None:
    got = run(op, args)
    place = next((a for a in args if isinstance(a, torch.Tensor) and a.dtype == F32), None)
    scale = args[1] if op == "quantize" else args[-5 if "norm" in op else -4]
    if not quant.static:
        scale = None
    assert scale is None or place is not None
    x = args[0] if op == "quantize" else got[2]
    same_quantise(got, x, scale, quant, op=op, **say)
    if op != "quantize":
        want = reference(op)(*args)
        assert_layouts(got, want)
        off = differing(got[2], want[2], 0.0, 0.0)
        # for a LayerNorm the last bit of the mean is more of those values that lie close to it
        few = 100 if op == "layer_norm_quant" else 500
        if x.dtype != F32:  # of a float32 the last bit of mean and rsqrt is in every value
            assert int(off.sum()) <= max(8, x.numel() // few), (op, say, int(off.sum()))
        step = 2.02 * STEP[x.dtype]
        if op == "layer_norm_quant":  # product and bias may cancel
            far = (got[2].double() - want[2].double()).abs()
            rest = 4.0 if x.dtype == F32 else 2.0**-8
            bound = step * want[2].double().abs() + STEP[x.dtype] * rest
            assert bool((far <= bound).all()), (op, say)
        else:
            assert not differing(got[2], want[2], step, NORMAL[x.dtype]).any(), (op, say)
        if len(got) > 3:
            assert not differing(got[3], want[3], 0.0, 0.0).any(), (op, say)
    close_to_float64(op, args, got[0], got[1] if scale is None else scale, quant, **say)


def close_to_float64(
    op: str,
    args: tuple[Any, ...],
    q: torch.Tensor,
    scale: torch.Tensor,
    quant: QuantForm,
    **say: Any,
) -> None:
    """Codes times scales against float64, where no clamp cut and the scale was not replaced."""
    if quant.floor == "divisor" or not q.numel():
        return
    want = wanted(op, args)
    model = 0.0 if op == "quantize" else 4 * STEP[args[0].dtype]
    error = (dequantised(q, scale, quant) - want).abs()
    # where product and bias of a LayerNorm cancel, or 1 + erf of a GELU (which is computed in
    # float32 whatever the dtype), their roundings remain
    size = want.abs() + (1.0 if op == "layer_norm_quant" else 0.0)
    bound = slack(quant, want, scale) + size * model + (1e-6 if op == "act_mul_quant" else 0.0)
    ok = (error <= bound) | ~inside(quant, want * (1 + model), scale)
    assert bool(ok.all()), (op, say, str(quant), float((error - bound)[~ok].max()))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("op", PRODUCERS)
def test_sizes_of_models(op: str, name: str, dtype: torch.dtype) -> None:
    """Every producer and form at the widths of models; all numbers of rows at the narrowest."""
    quant = FORMS[name]
    for width, rows in product(WIDTHS, ROWS):
        if dtype == BF16 or width == WIDTHS[0]:
            check(op, call(op, rows, width, dtype, quant), quant, rows=rows, width=width)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("op", PRODUCERS)
def test_odd_sizes(op: str, name: str) -> None:
    quant = FORMS[name]
    widths = (128, 384, 2176) if quant.group else (47, 1000, 3001)
    for width, rows, dtype in product(widths, (1, 3, 130), (BF16, F32)):
        check(op, call(op, rows, width, dtype, quant), quant, rows=rows, width=width, dtype=dtype)


@pytest.mark.parametrize("op", PRODUCERS)
def test_no_rows(op: str) -> None:
    for quant in FORMS.values():
        if quant.granularity != "tensor" or quant.static:
            args = call(op, 0, 4096, BF16, quant)
            for a, b in zip(run(op, args), reference(op)(*args), strict=True):
                assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@pytest.mark.parametrize("op", PRODUCERS)
def test_strides_of_group_scales(op: str) -> None:
    """Truthful strides at one row and at several; the operator says the same."""
    for name, rows in product(FORMS, (1, 2, 5, 17)):
        quant = FORMS[name]
        if quant.static or not quant.group:
            continue
        expected = {"row": (8, 1), "col": (1, rows), "tma": (1, (rows + 3) // 4 * 4)}
        args = call(op, rows, 1024, BF16, quant)
        scale = run(op, args)[1]
        assert scale.shape == (rows, 8) and scale.stride() == expected[quant.layout], name
        by_operator = getattr(torch.ops.fp8pass, f"triton_{op}")(*args)[1]
        assert by_operator.stride() == scale.stride() and torch.equal(by_operator, scale)


@pytest.mark.parametrize("name", FORMS)
def test_every_bf16_value(name: str) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    in_order = bits.view(BF16).cuda().view(64, 1024)
    quant = FORMS[name]
    for x in (in_order, in_order.t().contiguous().view(64, 1024), in_order[:1]):
        scale = random_given(quant, tuple(x.shape), "cuda")
        if quant.power != "none" and quant.floor == "none":
            # eager's exp2 is not exact where its result is subnormal, ours is
            x = torch.where(x.abs() < 2.0**-110, 0.0, x)
        same_quantise(kernel("quantize")(x, scale, str(quant)), x, scale, quant)


@pytest.mark.parametrize("name", [n for n in FORMS if "power" in n])
def test_scales_around_powers_of_two(name: str) -> None:
    """Largest values next to 448 times a power of two: the logarithm rounds as eager's does."""
    quant = FORMS[name]
    for power in range(-20, 21):
        near = torch.tensor([448.0 * 2.0**power], device="cuda")
        steps = torch.arange(-8, 9, device="cuda", dtype=torch.int32)
        x = torch.zeros(17, 128, device="cuda")
        x[:, 5] = (near.view(torch.int32) + steps).view(F32)
        rows = [x] if quant.granularity != "tensor" else list(x.unsqueeze(1))
        for row in rows:
            same_quantise(kernel("quantize")(row, None, str(quant)), row, None, quant, power=power)


@pytest.mark.parametrize("name", FORMS)
def test_special_values(name: str) -> None:
    quant = FORMS[name]
    x = values(8, 512, F32)
    x[1, 3], x[2, 5], x[3, 7] = math.nan, math.inf, -math.inf
    x[4], x[5], x[6] = 0.0, x[5] * 1e-30, x[6] * 1e30
    for row in x.unsqueeze(1):
        if quant.dtype == torch.int8 and not row.isfinite().all():
            continue  # the conversion of NaN to an integer is not defined
        scale = random_given(quant, (1, 512), "cuda")
        same_quantise(kernel("quantize")(row, scale, str(quant)), row, scale, quant)


def test_strided_rows() -> None:
    wide, cube = values(64, 6000, BF16), values(24, 4096, BF16).view(2, 3, 4, 4096)
    views = (wide[:, 64:4160], wide[:, 3:4099], wide[::3, :4096], cube, cube[:, :, 1:3])
    for x, quant in product(views, FORMS.values()):
        scale = random_given(quant, tuple(x.shape), "cuda")
        got = kernel("quantize")(x, scale, str(quant))
        same_quantise(got, x.contiguous(), scale, quant, shape=tuple(x.shape))
        args = call("layer_norm_quant", 1, 4096, BF16, quant)
        args = (x, *args[1:3], scale, *args[4:])
        got = run("layer_norm_quant", args)
        same_quantise(got, got[2], scale, quant, shape=tuple(x.shape))


@pytest.mark.parametrize("op", PRODUCERS)
def test_cuda_graph(op: str) -> None:
    for name, rows in product(("int8 token", "power group", "given group"), (1, 200)):
        quant = FORMS[name]
        args = call(op, rows, 4096, BF16, quant)
        run(op, args)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run(op, args)
        args[0].copy_(values(rows, 4096, BF16, 77))
        graph.replay()
        again = run(op, args)
        for a, b in zip(got, again, strict=True):
            assert torch.equal(a.float(), b.float())
