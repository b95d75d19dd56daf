"""The name under which a report is found again: as fine as Inductor's own key, and no finer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import fx

from fp8pass.backend import compile_key, inductor_options, split_options
from fp8pass.errors import OptionError

SOURCE = """
import torch
def forward(x):
    return (x * 2).sum(-1)
"""


def graph(lines_before: int) -> fx.GraphModule:
    """Dynamo's graph of a function that stands some lines further down in its file."""
    seen: list[fx.GraphModule] = []
    space: dict[str, Any] = {}
    exec(compile("\n" * lines_before + SOURCE, f"file{lines_before}.py", "exec"), space)

    def keep(gm: fx.GraphModule, inputs: Any) -> Any:
        seen.append(copy.deepcopy(gm))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(space["forward"], backend=keep)(torch.ones(3, 4))
    return seen[0]


def test_where_in_a_file_the_code_stands_does_not_count() -> None:
    x = [torch.ones(3, 4)]
    one, other = graph(0), graph(7)
    assert compile_key(one, x, ("id", "id")) == compile_key(other, x, ("id", "id")) is not None


def test_sizes_count_as_they_were_captured() -> None:
    gm = graph(0)
    key = compile_key(gm, [torch.ones(3, 4)], ("id", "id"))
    assert compile_key(gm, [torch.ones(3, 4).double()], ("id", "id")) != key
    assert compile_key(gm, [torch.ones(3, 4)], ("id", "other")) != key
    (placeholder,) = [node for node in gm.graph.nodes if node.op == "placeholder"]
    # a size of this call, where the graph was captured for any
    assert compile_key(gm, [torch.ones(9, 4)], ("id", "id")) == key
    placeholder.meta["example_value"] = torch.ones(9, 4)
    assert compile_key(gm, [torch.ones(9, 4)], ("id", "id")) != key
    # a graph without that knowledge: the sizes of the call
    del placeholder.meta["example_value"]
    found = {compile_key(gm, [torch.ones(n, 4)], ("id", "id")) for n in (3, 9)}
    assert len(found) == 2


def test_options_that_are_no_dict() -> None:
    with pytest.raises(OptionError, match="5"):
        split_options(5)  # type: ignore[arg-type]


def test_our_options_among_inductors() -> None:
    merged = inductor_options({"fp8pass.fuel": 1, "max_autotune": True})
    assert set(merged) == {"max_autotune", "post_grad_custom_post_pass"}
    assert merged["post_grad_custom_post_pass"].options.fuel == 1
    merged = inductor_options({"fp8pass.fuel": 1}, fuel=2)
    assert merged["post_grad_custom_post_pass"].options.fuel == 2
    with pytest.raises(OptionError, match="nonsense"):
        inductor_options({"fp8pass.nonsense": 1})
