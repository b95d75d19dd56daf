"""Sums that are no residual: the norm is fused, the sum stays where it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graphs import Passed, Reading, assert_same_bits, run, trace, values, vector
from spell import llama, static

Tensor = torch.Tensor
X, U = values(6, 64), values(6, 64, seed=1)
W, S = vector(64), torch.tensor(0.02)


def residual(add: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    def fn(x: Tensor, r: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        total = add(x, r)
        return *static(llama(total, w, 1e-6), s), total

    return fn


RESIDUALS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], Tensor]] = {
    "alpha": (residual(lambda x, r: torch.add(x, r, alpha=2)), U),
    "difference": (residual(lambda x, r: x - r), U),
    "broadcast_row": (residual(lambda x, r: x + r), U[:1]),
    "broadcast_vector": (residual(lambda x, r: x + r), U[0]),
    "number": (residual(lambda x, r: x + 1.5), U),
    "sum_in_float32": (residual(lambda x, r: (x.float() + r.float()).bfloat16()), U),
    "product": (residual(lambda x, r: x * r), U),
}


@pytest.mark.parametrize("name", RESIDUALS)
def test_not_a_residual(name: str) -> None:
    fn, r = RESIDUALS[name]
    inputs = (X, r, W, S)
    traced = trace(fn, *inputs)
    reading = Reading(traced)
    reading.check(*inputs)
    targets = [str(d.node.target) for d in reading.drafts if d.kind == "norm"]
    assert targets == ["fp8pass.rms_norm.default"]
    passed = Passed(traced)
    assert [s.rule for s in passed.sites("norm", "fused")] == ["rms_norm_quant"]
    assert_same_bits(run(passed.fused, *inputs), run(passed.before, *inputs))


@pytest.mark.parametrize("r", [U, U.float(), U.half()], ids=lambda r: str(r.dtype))
def test_control_is_a_residual(r: Tensor) -> None:
    """Of any dtype: the sum has the promoted one."""
    inputs = (X, r, W, S)
    passed = Passed(trace(residual(lambda x, r: x + r), *inputs))
    assert [s.rule for s in passed.sites("norm", "fused")] == ["add_rms_norm_quant"]
    assert_same_bits(run(passed.fused, *inputs), run(passed.before, *inputs))
