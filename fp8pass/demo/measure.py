"""Measuring: perplexity and seconds in one interleaved run, and greedy continuations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8pass.demo.variants import Call, Variant, no_recompile

#: Fewest timed forwards of a variant.
ROUNDS = 5
#: Tokens on which a difference of perplexities is taken as it is; its standard error is 0.2 % then.
ENOUGH = 16384
#: A variant that only shows how slow it is stops after this many seconds (and two windows).
SLOW_SECONDS = 45.0


def windows_of(ids: Sequence[int], tokens: int, window: int) -> list[Tensor]:
    """Consecutive windows ``[1, window]`` that hold at least ``tokens`` tokens, or all there are.

    Raises:
        ValueError: the text has not even one window.
    """
    count = min(math.ceil(tokens / window), len(ids) // window)
    if count < 1:
        raise ValueError(f"the text has {len(ids)} tokens, less than one window of {window}")
    return [torch.tensor([ids[i * window : (i + 1) * window]]) for i in range(count)]


def loss(logits: Tensor, ids: Tensor) -> float:
    """Mean negative log-likelihood in nats of ``ids[0, 1:]``, computed in float32."""
    return F.cross_entropy(logits[0, :-1].float(), ids[0, 1:]).item()


def perplexity(variant: Variant, windows: Sequence[int] | None = None) -> float | None:
    """``exp`` of the mean loss over ``windows`` (default: all that it was run on), or None."""
    chosen = list(variant.losses if windows is None else windows)
    if not chosen or any(index not in variant.losses for index in chosen):
        return None
    return math.exp(fmean(variant.losses[index] for index in chosen))


@dataclass(frozen=True)
class Difference:
    """How much two perplexities differ, measured on the same windows.

    Attributes:
        relative: first / second - 1.
        standard_error: of ``relative``, from the scatter between windows; None with one window.
        tokens: that it was measured on.
    """

    relative: float
    standard_error: float | None
    tokens: int

    def within(self, limit: float) -> bool:
        """Whether ``relative`` is at most ``limit``.

        On fewer than :data:`ENOUGH` tokens it may exceed it by two standard errors: two FP8
        computations that differ by one rounding anywhere differ by whole codes some layers on, and
        end as two independent draws of the quantisation noise. On a few thousand tokens these alone
        move a perplexity by some tenths of a percent either way.
        """
        noise = 0.0 if self.tokens >= ENOUGH else 2 * (self.standard_error or 0.0)
        return abs(self.relative) <= limit + noise


def difference(one: Variant, other: Variant) -> Difference | None:
    """``one`` against ``other`` on all windows that both were run on; None if there are none."""
    same = sorted(set(one.losses) & set(other.losses))
    if not same:
        return None
    each = [one.losses[index] - other.losses[index] for index in same]
    error = stdev(each) / math.sqrt(len(each)) if len(each) > 1 else None
    return Difference(math.expm1(fmean(each)), error, len(same) * one.tokens)


def interleaved(
    variants: Sequence[Variant],
    windows: Sequence[Tensor],
    may_stop: Callable[[Variant], bool] = lambda variant: False,
    say: Callable[[str], None] = lambda text: None,
    rounds: int | None = None,
) -> None:
    """Run all variants window by window, in an order that rotates; every forward is timed.

    Interleaved, because a machine's speed drifts: what is compared must have had the same weather.

    Args:
        may_stop: whether a slow variant may be spared the rest of the windows.
        say: told how far it is.
        rounds: how often; default: once for each window, and at least :data:`ROUNDS`.
    """
    for number in range(rounds or max(len(windows), ROUNDS)):
        index = number % len(windows)
        say(f"window {index + 1} of {len(windows)}")
        turn = number % len(variants)
        for variant in [*variants[turn:], *variants[:turn]]:
            done = len(variant.seconds)
            if done >= 2 and may_stop(variant) and sum(variant.seconds) > SLOW_SECONDS:
                continue
            logits = variant.timed(windows[index])
            if index not in variant.losses:
                variant.losses[index] = loss(logits, windows[index])


def run_eagerly(variant: Variant, windows: Sequence[Tensor], indices: Sequence[int]) -> None:
    """Losses and seconds of an eager variant on ``windows[i]`` for ``i`` in ``indices``.

    All of them in one forward, which dequantises the weights only once.
    """
    assert variant.call is not None
    with torch.no_grad():
        start = time.perf_counter()
        logits = variant.call(torch.cat([windows[index] for index in indices]))
        seconds = (time.perf_counter() - start) / len(indices)
    for row, index in enumerate(indices):
        variant.seconds.append(seconds)
        variant.losses[index] = loss(logits[row : row + 1], windows[index])


def continuation(
    call: Call, prompt: Sequence[int], count: int, window: int, draft: Sequence[int] = ()
) -> list[int]:
    """The greedy continuation of ``prompt`` by a function of one fixed shape.

    The whole window is computed anew each time, padded on the right, which a causal model does not
    see. One forward tells the model's choice at *every* position, so a guess of all tokens is
    checked at once and replaced by those choices, until nothing changes (Jacobi decoding; Song et
    al. 2021, arXiv:2002.03629). Each forward settles at least one more token; a good draft, such as
    another variant's continuation, is confirmed by a single one.

    Returns:
        ids.

    Raises:
        ValueError: prompt and continuation do not fit into the window.
    """
    if not prompt or len(prompt) + count > window:
        raise ValueError(f"{len(prompt)} tokens and {count} more do not fit a window of {window}")
    guess = (list(draft) + [prompt[-1]] * count)[:count]
    first = len(prompt) - 1
    for _ in range(count):
        row = [*prompt, *guess]
        ids = torch.tensor([row + [prompt[-1]] * (window - len(row))])
        with torch.no_grad(), no_recompile():
            chosen = call(ids)[0, first : first + count].argmax(-1).tolist()
        if chosen == guess:
            break
        guess = chosen
    return guess


def eager_guess(module: Call, prompt: Sequence[int], count: int) -> list[int]:
    """What an eager model says next, on growing sequences: a cheap draft for its compiled form."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(module(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]
