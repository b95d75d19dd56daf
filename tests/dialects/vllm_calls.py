"""What the tests of vLLM's operators share: graphs for a GPU, and both forms of their calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
import vllm_standins  # noqa: F401  (the operators)
from golden_graphs import interpreted
from graphs import Passed, assert_same_bits, trace
from vllm_graphs import moved

from fp8pass.absent_device import absent_device

Tensor = torch.Tensor
E4 = torch.float8_e4m3fn
F32, BF16 = torch.float32, torch.bfloat16
C: Any = torch.ops._C
IR: Any = torch.ops.vllm_ir
S = torch.tensor(0.02)


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
    before = interpreted(made.before, list(inputs))
    assert_same_bits(interpreted(made.fused, list(inputs)), before)


def quantised(y: Tensor, s: Tensor) -> Tensor:
    return (y.float() * (1 / s)).clamp(-448.0, 448.0).to(E4)
