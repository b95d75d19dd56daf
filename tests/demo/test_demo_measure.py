"""The arithmetic of the demo: windows, perplexity, differences, greedy continuation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8pass.demo import variants
from fp8pass.demo.measure import (
    ENOUGH,
    Difference,
    continuation,
    difference,
    eager_guess,
    interleaved,
    perplexity,
    run_eagerly,
    windows_of,
)
from fp8pass.demo.tiny import build
from fp8pass.demo.variants import Variant, weight_bytes


def variant(key: str = "v", losses: dict[int, float] | None = None, **values: Any) -> Variant:
    return Variant(key, key, nn.Identity(), None, 8, losses=losses or {}, **values)


def test_windows_cover_the_tokens_that_were_asked_for() -> None:
    ids = list(range(100))
    windows = windows_of(ids, tokens=33, window=16)
    assert len(windows) == 3
    assert windows[1].tolist() == [list(range(16, 32))]
    assert len(windows_of(ids, tokens=10_000, window=16)) == 6  # no more than the text has
    with pytest.raises(ValueError, match="less than one window"):
        windows_of(ids, tokens=1, window=101)


def test_perplexity_of_a_uniform_guess_is_the_vocabulary() -> None:
    ids = torch.randint(0, 50, (1, 8))
    one = variant(call=lambda ids: torch.zeros(1, 8, 50))
    interleaved([one], [ids, ids])
    assert perplexity(one) == pytest.approx(50)
    assert len(one.seconds) == 5 and set(one.losses) == {0, 1}
    assert perplexity(one, [0, 7]) is None


def test_difference_has_the_error_of_its_scatter() -> None:
    a = variant(losses={0: 2.0, 1: 3.0, 2: 4.0, 9: 1.0})
    b = variant(losses={0: 2.01, 1: 2.99, 2: 3.97, 3: 9.0})
    found = difference(a, b)
    assert found is not None and found.tokens == 24
    assert found.relative == pytest.approx(math.expm1(0.01))
    # scatter of (-0.01, 0.01, 0.03): standard deviation 0.02, over the root of three windows
    assert found.standard_error == pytest.approx(0.02 / math.sqrt(3))
    assert difference(a, variant()) is None


def test_within_allows_for_noise_and_no_more() -> None:
    assert Difference(0.005, None, 8).within(0.005)
    assert not Difference(-0.0051, None, 8).within(0.005)
    assert Difference(-0.0068, 0.001, 8).within(0.005)
    assert not Difference(0.0071, 0.001, 8).within(0.005)
    # with tokens enough, the limit is the limit
    assert Difference(-0.0049, 0.002, ENOUGH).within(0.005)
    assert not Difference(-0.0051, 0.002, ENOUGH).within(0.005)


def test_order_rotates_and_a_slow_variant_may_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    class Stub(Variant):
        def timed(self, ids: Tensor) -> Tensor:
            ran.append(self.key)
            self.seconds.append(100.0 if self.key == "slow" else 0.01)
            return torch.zeros(1, 8, 50)

    slow, quick = (Stub(k, k, nn.Identity(), None, 8) for k in ("slow", "quick"))
    windows = [torch.zeros(1, 8, dtype=torch.long)] * 4
    interleaved([slow, quick], windows, lambda v: v is slow, rounds=4)
    assert ran == ["slow", "quick", "quick", "slow", "quick", "quick"]
    assert set(slow.losses) == {0, 1} and set(quick.losses) == {0, 1, 2, 3}


def test_eager_windows_in_one_batch_have_their_own_losses() -> None:
    model, tokenizer = build()
    windows = windows_of(tokenizer.encode("It was a bright cold day in April. " * 9), 192, 64)
    together, alone = (variant(call=model.float()) for _ in range(2))
    run_eagerly(together, windows, range(3))
    for index in range(3):
        run_eagerly(alone, windows, [index])
    assert together.losses == pytest.approx(alone.losses, rel=1e-5)
    assert len(together.seconds) == 3


@pytest.mark.parametrize("draft", ["none", "wrong", "half", "right"])
def test_continuation_is_the_greedy_one(draft: str) -> None:
    """A stand-in for a causal model: what follows depends on the sum of all ids before."""

    calls = 0

    def model(ids: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        assert ids.shape == (1, 24)
        return nn.functional.one_hot(ids.cumsum(1) * 7 % 31, 31).float()

    expected = [5, 11]
    for _ in range(8):
        expected.append(sum(expected) * 7 % 31)
    prompt, wanted = expected[:2], expected[2:]
    drafts = {"none": [], "wrong": [1, 2, 3], "half": wanted[:4], "right": wanted}
    assert continuation(model, prompt, 8, 24, drafts[draft]) == wanted
    assert calls <= (1 if draft == "right" else 8)
    unpadded = eager_guess(lambda ids: nn.functional.one_hot(ids.cumsum(1) * 7 % 31, 31), prompt, 8)
    assert unpadded == wanted
    with pytest.raises(ValueError, match="do not fit"):
        continuation(model, prompt, 23, 24)


def test_weights_are_counted_once_and_by_kind() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Embedding(4, 8, dtype=torch.bfloat16)
            self.b = nn.Linear(8, 4, bias=False, dtype=torch.bfloat16)
            self.b.weight = self.a.weight
            self.register_buffer("weight", torch.zeros(3, 5).to(torch.float8_e4m3fn))
            self.register_buffer("weight_scale", torch.zeros(1, 3))
            self.register_buffer("weight_prepared", torch.zeros(15, dtype=torch.bfloat16))

    assert weight_bytes(Holder()) == {
        "fp8": 15,
        "prepared": 30,
        "scales": 12,
        "other": 64,
        "total": 121,
    }


def test_a_function_of_its_own_has_code_of_its_own() -> None:
    one, two = (variants.own_function(nn.ReLU()) for _ in range(2))
    assert one.__code__ is not two.__code__  # type: ignore[attr-defined]
    assert torch.equal(one(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))


def test_what_cannot_run_is_noted_and_not_raised() -> None:
    class Broken(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            raise ValueError("no such thing\nand more")

    one = Variant("x", "x", Broken(), "inductor", 8)
    one.compile(torch.zeros(1, 8, dtype=torch.long))
    assert one.call is None and one.error and "\n" not in one.error
    assert one.to_dict()["compile_seconds"] is None
