"""Views of a whole tensor, wherever they stand in a spelling, and those that must stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import Passed, Reading, codes, read, trace, values, vector
from spell import llama
from spell_zero_point import I8, by_int32, shifted, token_by_zero, torchao_token
from test_read_by_place import groups, padded, rows
from torch import fx

from fp8pass.workbench import see_through_aliases

Tensor = torch.Tensor
BF16 = torch.bfloat16
aten = torch.ops.aten


def spread(scale: Tensor, n: int, k: int) -> Tensor:
    """A scale per 16 x 16 block, of which the last are cut short, or not."""
    return scale.repeat_interleave(16, 0)[:n].repeat_interleave(16, 1)[:, :k]


def weight_only(x: Tensor, w: Tensor, sb: Tensor) -> Tensor:
    return x @ (w.to(BF16) * spread(sb, *w.shape)).t()


def dequantised(q: Tensor, w: Tensor, s: Tensor, sb: Tensor) -> Tensor:
    return (q.float() * s.repeat_interleave(16, 1)) @ (w.float() * spread(sb, *w.shape)).t()


@pytest.mark.parametrize(("n", "k"), [(40, 64), (48, 60), (48, 64), (40, 60), (16, 16)])
def test_blocks_of_which_a_slice_takes_all(n: int, k: int) -> None:
    """A slice that takes everything is traced as an alias."""
    blocks = torch.rand(-(-n // 16), -(-k // 16))
    reading = read(weight_only, values(5, k), codes(n, k), blocks.to(BF16))
    if min(n, k) > 16:  # one block is one scale
        (draft,) = reading.drafts
        assert draft.key.endswith("group16x16") and not reading.unread
    given = codes(5, k), codes(n, k), torch.rand(5, -(-k // 16)), blocks
    if k % 16 == 0 and k > 16:
        (draft,) = read(dequantised, *given).drafts
        assert draft.key.endswith("group16x16")


def test_blocks_too_many_are_not_read() -> None:
    reading = Reading(trace(weight_only, values(5, 64), codes(40, 64), torch.rand(4, 4).to(BF16)))
    assert not reading.drafts and [code for _, code, _ in reading.unread] == ["FP8-R005"]


# ---- an alias behind every call ------------------------------------------------------------------

INT8 = torch.randint(-128, 128, (32, 64)).to(I8)
#: name -> (function, inputs)
SPELLED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "product": (
        lambda x, w, sw: torch._scaled_mm(
            *(lambda q, s: (q, w.t(), s, sw))(*rows(x)), out_dtype=BF16
        ),
        (values(5, 64), codes(32, 64), torch.rand(1, 32)),
    ),
    "norm": (lambda x, v: rows(llama(x, v, 1e-6)), (values(5, 64), vector(64))),
    "activation": (
        lambda x: rows(torch.nn.functional.silu(x) * x.tanh()), (values(5, 64),),
    ),
    "layout": (lambda x: (groups(x)[0], padded(groups(x)[1]) * 2), (values(5, 64),)),
    "weight_only": (weight_only, (values(5, 64), codes(40, 64), torch.rand(3, 4).to(BF16))),
    "zero_point": (
        lambda x, w, sb, b: by_int32(*token_by_zero(x, sb), w, sb, b),
        (values(5, 64), INT8, torch.rand(1, 32), vector(32)),
    ),
    "shifted": (
        lambda x, w, sb, b: shifted(*torchao_token(x, sb), w, sb, b),
        (values(5, 64), INT8, torch.rand(1, 32), vector(32)),
    ),
}  # fmt: skip

#: target -> arguments behind the tensor
WHOLE: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (aten.alias.default, ()),
    (aten.detach.default, ()),
    (aten.lift_fresh.default, ()),
    (aten.slice.Tensor, (0, 0, 2**63 - 1)),
)


def aliased(traced: fx.GraphModule) -> int:
    """Put a view of the whole behind every tensor; returns how many."""
    count = 0
    for node in list(traced.graph.nodes):
        value = node.meta.get("val")
        if node.op == "output" or not isinstance(value, torch.Tensor):
            continue
        target, more = WHOLE[count % (4 if value.dim() else 3)]
        with traced.graph.inserting_after(node):
            view = traced.graph.call_function(target, (node, *more))
        view.meta["val"] = value
        node.replace_all_uses_with(view, delete_user_cb=lambda user, view=view: user is not view)
        count += 1
    traced.recompile()
    return count


@pytest.mark.parametrize("name", SPELLED)
def test_a_spelling_with_a_view_of_the_whole_behind_every_call(name: str) -> None:
    fn, inputs = SPELLED[name]
    wanted = [(d.kind, d.form, d.key) for d in read(fn, *inputs).drafts]
    traced = trace(fn, *inputs)
    assert aliased(traced) > 4 and wanted
    reading = Reading(traced)
    reading.check(*inputs)
    assert [(d.kind, d.form, d.key) for d in reading.drafts] == wanted and not reading.unread


def test_also_between_the_hooks() -> None:
    """The hook behind Inductor's passes sees through them as well."""
    fn, inputs = SPELLED["product"]
    traced = trace(fn, *inputs)
    aliased(traced)
    passed = Passed(traced, stage="post")
    assert [site.status for site in passed.sites("scaled_mm")] == ["lowered"]


def test_results_and_writes_keep_theirs() -> None:
    """Two results must stay two tensors, and a write is to the view that it was given."""
    traced = trace(lambda x: (x * 2, x + 1), values(5, 64))
    first, second = traced.graph.output_node().args[0]
    with traced.graph.inserting_after(second):
        alias = traced.graph.call_function(aten.alias.default, (first,))
        view = traced.graph.call_function(aten.view.default, (alias, [64, 5]))
        fill = traced.graph.call_function(aten.zero_.default, (alias,))
        other = traced.graph.call_function(aten.neg.default, (alias,))
    traced.graph.output_node().args = ((first, view, other),)
    alias.meta["val"] = first.meta["val"]
    assert see_through_aliases(traced.graph) == 0
    assert view.args[0] is alias and fill.args == (alias,)
    assert other.args == (first,), "the control"


@pytest.mark.parametrize(
    ("target", "more"),
    [
        (aten.slice.Tensor, (0, 1)),
        (aten.slice.Tensor, (0, 0, 2**63 - 1, 2)),
        (aten.neg.default, ()),
    ],
)
def test_other_calls_stay(target: Any, more: tuple[Any, ...]) -> None:
    traced = trace(lambda x: x * 2, values(5, 64))
    (source,) = traced.graph.output_node().args[0]
    with traced.graph.inserting_after(source):
        call = traced.graph.call_function(target, (source, *more))
        call.meta["val"] = target(source.meta["val"], *more)
        end = traced.graph.call_function(aten.neg.default, (call,))
    traced.graph.output_node().args = ((end,),)
    assert see_through_aliases(traced.graph) == 0 and end.args == (call,)
