"""Layouts of group scales: the copy becomes part of the quantise, strides stay truthful."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import Passed, Reading, assert_same_bits, post_grad, run, trace, values, vector
from spell import LAYOUTS, G, aligned, column_major, group, llama, silu_two, tma_strided

S = torch.tensor(0.02)
Tensor = torch.Tensor
COPIES = ("clone", "copy", "constant_pad_nd", "empty", "slice_scatter")


def copies(reading: Reading | Passed) -> list[str]:
    names = [str(n.target) for n in reading.after.graph.nodes if n.op == "call_function"]
    return [name for name in names if any(copy in name for copy in COPIES)]


def layout_of(reading: Reading) -> str:
    (form,) = reading.forms("quantize")
    return form.split("layout=")[1] if "layout=" in form else "row"


def same_results(reading: Reading | Passed, *inputs: Tensor) -> None:
    """Bits and strides, and that each stride is where the numbers are (R30, N09)."""
    got, wanted = run(reading.after, *inputs), run(reading.before, *inputs)
    assert_same_bits(got, wanted)
    assert [g.stride() for g in got] == [w.stride() for w in wanted]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_read_as_a_layout(name: str, dynamic: bool) -> None:
    copy, layout = LAYOUTS[name]

    def model(x: Tensor) -> tuple[Tensor, ...]:
        q, scale = group(x, S)
        return q, copy(scale)

    for graph in (lambda g: g, post_grad) if dynamic else (lambda g: g,):
        reading = Reading(graph(trace(model, values(5, 64), dynamic=(0,) if dynamic else ())))
        assert layout_of(reading) == layout and copies(reading) == []
        for rows in (1, 2, 3, 4, 5, 9) if dynamic else (5,):
            same_results(reading, values(rows, 64, seed=rows))


@pytest.mark.parametrize("rows", [1, 4, 6])
@pytest.mark.parametrize("name", LAYOUTS)
def test_known_rows(name: str, rows: int) -> None:
    """One row needs no copy; a multiple of 4 is aligned as it is."""
    reading = Reading(trace(lambda x: (lambda q, s: (q, LAYOUTS[name][0](s)))(*group(x, S)),
                            values(rows, 64)))  # fmt: skip
    same_results(reading, values(rows, 64))
    q, scale = run(reading.after, values(rows, 64))
    step = rows if LAYOUTS[name][1] == "col" else aligned(rows)
    assert scale.shape == (rows, 4)
    if rows > 1:
        assert scale.stride() == (1, step)
    wide = q.float().view(rows, 4, G) * scale.unsqueeze(-1)
    assert (wide.view(rows, 64) - values(rows, 64).float()).abs().max() <= 2.0


@pytest.mark.parametrize("name", LAYOUTS)
def test_fused_with_its_producer(name: str) -> None:
    """Through a flattening view too: the fused operator has the layout and its fake the strides."""
    copy, layout = LAYOUTS[name]

    def model(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        q, scale = group(llama(x, w, 1e-6).view(-1, 64), S)
        return q, copy(scale)

    inputs = values(6, 3, 64), vector(64)
    passed = Passed(trace(model, *inputs, dynamic=(0,)), strict=True)
    assert passed.fusions == 1
    (fused,) = [n for n in passed.fused.graph.nodes if "rms_norm_quant" in str(n.target)]
    assert f"layout={layout}" in fused.args[5]
    for rows in (1, 2, 6):
        given = values(rows, 3, 64, seed=rows), vector(64)
        wanted = run(passed.before, *given)
        for module in (passed.fused, passed.after):
            assert [t.stride() for t in run(module, *given)] == [t.stride() for t in wanted]
        assert_same_bits(run(passed.after, *given), wanted)


def test_turned_scales() -> None:
    """A reader of ``[G, M]`` gets a view of the column-major scale."""

    def model(g: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        q, scale = group(silu_two(g, u), S)
        return q, scale.t().contiguous()

    reading = Reading(trace(model, values(5, 64), values(5, 64, seed=3), dynamic=(0, 1)))
    assert layout_of(reading) == "col" and copies(reading) == []
    same_results(reading, values(3, 64), values(3, 64, seed=4))


def test_both_readers_of_one_layout() -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        q, scale = group(x, S)
        turned = column_major(scale)
        return q, turned * 2, turned + 1, scale.t().contiguous() - 1

    reading = Reading(trace(model, values(5, 64)))
    assert layout_of(reading) == "col" and copies(reading) == []
    same_results(reading, values(5, 64))


def _pad(size: int) -> Callable[[Tensor], Tensor]:
    return lambda s: F.pad(s, (0, 0, 0, size))


#: what a model makes of the scale; none may be taken for one layout
OTHERS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "row_and_column": lambda s: (s, column_major(s)),
    "row_read_and_column": lambda s: (s * 2, column_major(s)),
    "column_and_tma": lambda s: (column_major(s), tma_strided(s)),
    "two_results": lambda s: (column_major(s), s.t().contiguous()),
    "padded_result": lambda s: (column_major(_pad(3)(s)),),
    "padded_before": lambda s: (F.pad(s, (0, 0, 3, 0)).t().contiguous().t()[:5],),
    "padded_groups": lambda s: (F.pad(s, (0, 4)).t().contiguous().t(),),
    "padded_with_ones_and_read": lambda s: (F.pad(s, (0, 0, 0, 3), value=1.0).sum(),),
    "later_rows": lambda s: (column_major(_pad(3)(s))[1:6],),
    "aligned_to_8": lambda s: (column_major(_pad(11)(s))[:5],),
    "changed_on_the_way": lambda s: (column_major(s * 2),),
    "flat": lambda s: (s.t().contiguous().view(-1),),
    "written_over": lambda s: (torch.zeros(4, 5).t().copy_(s) + torch.ones(5, 4),),
    "other_dtype": lambda s: (column_major(s.double()),),
    "padded_turned": lambda s: (F.pad(s.t(), (0, 3))[:, :5].t(),),  # with no padding: no copy
    "row_major_copy": lambda s: (s.clone(),),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_readers_keep_what_they_had(name: str) -> None:
    """Beside the positive control: the same quantise with one column-major reader is laid out."""

    def model(x: Tensor) -> tuple[Tensor, ...]:
        q, scale = group(x, S)
        return (q, *OTHERS[name](scale))

    reading = Reading(trace(model, values(5, 64)))
    if name == "flat":  # what is flattened is the turned copy, which is a view of the layout
        assert layout_of(reading) in ("row", "col")
    else:
        assert layout_of(reading) == "row"
    same_results(reading, values(5, 64))
    control = Reading(trace(lambda x: (lambda q, s: (q, column_major(s)))(*group(x, S)),
                            values(5, 64)))  # fmt: skip
    assert layout_of(control) == "col"


def test_two_layouts_of_two_quantises() -> None:
    """Each quantise of one norm has the layout of its own readers."""

    def model(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = llama(x, w, 1e-6)
        q, scale = group(y, S)
        other, other_scale = group(y * 2, S)
        return q, column_major(scale), other, tma_strided(other_scale)

    reading = Reading(trace(model, values(5, 64), vector(64)))
    forms = reading.forms("quantize")
    assert sorted(form.split("layout=")[1] for form in forms) == ["col", "tma"]
    same_results(reading, values(5, 64), vector(64))
