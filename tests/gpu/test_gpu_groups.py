"""A scale for each group of neighbours on a GPU: every producer, size and layout of the scale."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from producer_cases import (
    BF16,
    F16,
    F32,
    HALF_LEAST,
    HALF_STEP,
    OF_TWO,
    OPS,
    ROWS,
    WIDTHS,
    Case,
    arguments,
    compile_in_parallel,
    exact,
    kernel,
    reference,
    values,
)
from producer_checks import NORMAL, STEP, assert_exact, assert_layouts, differing

from fp8pass.ops import QuantForm, dynamic_form

pytest.importorskip("triton")

E5 = torch.float8_e5m2
DTYPES = (BF16, F16)
GROUPS = (64, 128)
LAYOUTS = ("row", "col", "tma")
#: Widths at which the value is not kept either.
BOTH = (4096, 5120)


def form_of_groups(group: int, layout: str = "row") -> QuantForm:
    return replace(dynamic_form(f"group{group}"), layout=layout)


@pytest.fixture(scope="module")
def warm() -> None:
    compile_in_parallel(
        Case(op, width, dtype, str(form_of_groups(group)), keep)
        for op, width, dtype, group, keep in product(OPS, WIDTHS, DTYPES, GROUPS, (True, False))
        if width % group == 0 and (keep or width in BOTH) and not (keep and op == "quantize")
    )


def same_quantise(
    got: tuple[torch.Tensor, ...], x: torch.Tensor, quant: QuantForm, **say: Any
) -> None:
    """The very codes and scales that eager makes of ``x``, with the same strides.

    A maximum has no rounding and every other step is one operation. The sign of NaN is free.
    """
    want = reference("quantize")(x, None, str(quant))
    assert_layouts(got[:2], want)
    for a, b in zip(got[:2], want, strict=True):
        off = differing(a, b, 0.0, 0.0) | ((a.float().signbit() != b.float().signbit()) & (b == b))
        assert not off.any(), (say, str(quant), int(off.sum()), off.nonzero()[:4].tolist())


def same_value(got: torch.Tensor, want: torch.Tensor, **say: Any) -> None:
    """A normalised value or a product: few round to a neighbour.

    How many is what the functions of the reference and of the kernel differ by, one in a thousand;
    for the small tensors here, as many more as chance makes.
    """
    assert_layouts([got], [want])
    off = differing(got, want, 0.0, 0.0)
    assert int(off.sum()) <= max(8, got.numel() // 500), (say, int(off.sum()), got.numel())
    step = 2.02 * STEP[got.dtype]
    assert not differing(got, want, step, NORMAL[got.dtype]).any(), say


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check(op: str, args: tuple[Any, ...], **say: Any) -> None:
    """Codes and scales of what the kernel quantised, and that against the reference."""
    got, quant = kernel(op)(*args), QuantForm.parse(args[-1 if op == "quantize" else -2])
    if op == "quantize":
        same_quantise(got, args[0], quant, op=op, **say)
    else:
        want = reference(op)(*args)
        assert_layouts(got, want)
        same_value(got[2], want[2], op=op, **say)
        same_quantise(got, got[2], quant, op=op, **say)
        if len(got) > 3:
            assert not differing(got[3], want[3], 0.0, 0.0).any(), (op, say)
    close_to_float64(op, args, got, quant)


def close_to_float64(
    op: str, args: tuple[Any, ...], got: tuple[torch.Tensor, ...], quant: QuantForm
) -> None:
    """Codes times their group's scale are within half a step of fp8 and some roundings."""
    if not got[0].numel():
        return
    assert quant.group is not None
    want, scale = exact(op, args), got[1].double().repeat_interleave(quant.group, -1)
    error = (got[0].double() * scale - want).abs()
    bound = want.abs() * (HALF_STEP + 4 * STEP[args[0].dtype]) + scale * HALF_LEAST * 1.01
    inside = want.abs() < 448 * scale
    assert bool((error <= bound)[inside].all()), (op, str(quant))
    assert bool((got[0].double().abs()[~inside] >= 416).all()), (op, str(quant))


# ---- the grid -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_grid(warm: None, op: str, dtype: torch.dtype) -> None:
    for width, group, layout, rows in product(WIDTHS, GROUPS, LAYOUTS, ROWS):
        if width % group:
            continue
        quant = form_of_groups(group, layout)
        keep = op != "quantize"
        args = arguments(op, rows, width, dtype, quant, keep=keep, seed=rows)
        check(op, args, rows=rows, width=width)


@pytest.mark.parametrize("op", [op for op in OPS if op != "quantize"])
def test_without_the_value_the_codes_are_the_same(warm: None, op: str) -> None:
    for width, group, layout, dtype in product(BOTH, GROUPS, LAYOUTS, DTYPES):
        for rows in (1, 3, 255, 2048):
            quant = form_of_groups(group, layout)
            kept = kernel(op)(*arguments(op, rows, width, dtype, quant, keep=True))
            alone = kernel(op)(*arguments(op, rows, width, dtype, quant, keep=False))
            assert alone[2].shape == (0,)
            assert same_bits(alone[0], kept[0]) and same_bits(alone[1], kept[1])


def test_strides_of_the_scale() -> None:
    for op, group, rows in product(OPS, GROUPS, (1, 5, 16)):
        for layout, strides in (
            ("row", (1536 // group, 1)),
            ("col", (1, rows)),
            ("tma", (1, (rows + 3) // 4 * 4)),
        ):
            args = arguments(op, rows, 1536, BF16, form_of_groups(group, layout))
            scale = kernel(op)(*args)[1]
            assert scale.shape == (rows, 1536 // group) and scale.stride() == strides
            operator = getattr(torch.ops.fp8pass, f"triton_{op}")
            assert operator(*args)[1].stride() == strides


# ---- forms, values, layouts ---------------------------------------------------------------------

FORMS = {
    "reciprocal": replace(form_of_groups(128), apply="mul_recip"),
    "factor": replace(form_of_groups(64, "col"), scale="mul", qmax=1 / 448),
    "floor of amax": replace(form_of_groups(128, "tma"), floor="amax", floor_value=1e-4),
    "no floor": replace(form_of_groups(64), floor="none", floor_value=0.0),
    "no floor, reciprocal": replace(
        form_of_groups(16), floor="none", floor_value=0.0, apply="mul_recip"
    ),
    "narrow clamp": replace(form_of_groups(32), lo=-240.0, hi=240.0),
    "e5m2": dynamic_form("group128", E5),
    "16": form_of_groups(16, "col"),
    "32": form_of_groups(32, "tma"),
    "256": form_of_groups(256),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    quant = FORMS[name]
    for dtype, width, rows in product((BF16, F16, F32), (256, 1536), (3, 300)):
        x = values(rows, width, dtype)
        same_quantise(kernel("quantize")(x, None, str(quant)), x, quant)
    for op in OPS:
        args = arguments(op, 33, 1536, BF16, quant, keep=True)
        got = kernel(op)(*args)
        assert_exact(got, reference(op)(*args), op=op, form=str(quant))
        if op != "quantize":
            same_quantise(got, got[2], quant, op=op)


def test_every_bf16_value() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    in_order = bits.view(BF16).cuda().view(64, 1024)
    mixed = in_order.t().contiguous().view(64, 1024)
    for x, quant in product((in_order, mixed), FORMS.values()):
        same_quantise(kernel("quantize")(x, None, str(quant)), x, quant)


@pytest.mark.parametrize("op", OPS)
def test_special_values(op: str) -> None:
    """NaN and infinities stay within their group; zeros, small and large numbers."""
    for name, width in product(("no floor", "reciprocal", "16"), (1536, 5120)):
        quant = FORMS[name]
        args = list(arguments(op, 8, width, BF16, quant, keep=True))
        x = args[0] = args[0].clone()
        x[1, 3], x[3, 5], x[4, 7], x[5, :4] = math.nan, math.inf, -math.inf, -0.0
        x[6, 0], x[7] = 3e38, x[7] * 1e-30
        operands = 2 if op in OF_TWO else 1
        for rows in (slice(0, 8), *(slice(i, i + 1) for i in range(8))):
            cut = [a[rows] for a in args[:operands]] + args[operands:]
            got = kernel(op)(*cut)
            assert_exact(got, reference(op)(*cut), op=op, rows=rows, quant=str(quant))
            same_quantise(got, cut[0] if op == "quantize" else got[2], quant, op=op, rows=rows)


@pytest.mark.parametrize("op", OPS)
def test_strided_rows(op: str) -> None:
    """Rows with a pitch, aligned and not; starts off a multiple of 16; three dims; no pitch."""
    operands = 2 if op in OF_TWO else 1

    def views(seed: int) -> list[torch.Tensor]:
        wide, cube = values(64, 6000, BF16, seed), values(24, 4096, BF16, seed).view(2, 3, 4, 4096)
        return [wide[:, 64 : 64 + 4096], wide[:, 3 : 3 + 4096], wide[::3, :4096], cube,
                cube[:, :, 1:3], cube.transpose(0, 1).contiguous(), wide[0, :4096]]  # fmt: skip

    for layout in LAYOUTS:
        args = arguments(op, 1, 4096, BF16, form_of_groups(128, layout), keep=True)
        for inputs in zip(*(views(seed) for seed in range(operands)), strict=True):
            check(op, (*inputs, *args[operands:]), shape=tuple(inputs[0].shape), layout=layout)


def test_rows_beyond_what_one_program_holds() -> None:
    """Element-wise kernels take any width."""
    for op in ("quantize", "silu_mul_quant", "act_mul_quant"):
        check(op, arguments(op, 3, 53248, BF16, form_of_groups(128, "col"), keep=True))


# ---- the same every time, graphs ----------------------------------------------------------------


def test_the_same_result_every_time() -> None:
    for op, layout in product(OPS, LAYOUTS):
        args = arguments(op, 1000, 5120, BF16, form_of_groups(128, layout))
        first = kernel(op)(*args)
        for _ in range(5):
            for a, b in zip(kernel(op)(*args), first, strict=True):
                assert same_bits(a, b)


@pytest.mark.parametrize("op", OPS)
def test_cuda_graph(op: str) -> None:
    """Captured once, replayed with other data: nothing read on the host, nothing kept."""
    quant = form_of_groups(128, "tma")
    for rows in (1, 200):
        args = arguments(op, rows, 4096, BF16, quant, keep=True)
        kernel(op)(*args)  # compiled before the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = kernel(op)(*args)
        for seed in (5, 6):
            other = arguments(op, rows, 4096, BF16, quant, keep=True, seed=seed)
            for a, b in zip(args, other, strict=True):
                if isinstance(a, torch.Tensor):
                    a.copy_(b)
            graph.replay()
            same_quantise(got, args[0] if op == "quantize" else got[2], quant, op=op, rows=rows)
