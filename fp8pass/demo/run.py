"""The demo from beginning to end: load, compile each variant, measure, check, collect."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass.demo import text
from fp8pass.demo.checks import checks_of
from fp8pass.demo.facts import duration, machine, versions
from fp8pass.demo.measure import (
    ENOUGH,
    SLOW_SECONDS,
    continuation,
    difference,
    eager_guess,
    interleaved,
    loss,
    perplexity,
    run_eagerly,
    windows_of,
)
from fp8pass.demo.model import MODELS, RECIPES, DemoModel, load
from fp8pass.demo.reference import Comparison, compare, reference_products
from fp8pass.demo.variants import Variant, first_line, peak_memory_bytes, warm_up, weight_bytes
from fp8pass.errors import OptionError, choices
from fp8pass.nn import Fp8Linear

#: Version of the JSON form.
SCHEMA = 1
PROMPT = "Once upon a time, in a small village by the sea, there lived"
CONTINUATION_TOKENS = 8
#: Length of the calibration of a static recipe, in tokens.
CALIBRATION_TOKENS = 1024
#: A stock variant whose forward would take longer than this is measured on 4 tokens.
TOO_SLOW_SECONDS = 20.0
FEW = 4
#: The probe that tells so runs a whole product only if that takes no longer than this.
PROBE_SECONDS = 3.0
#: fp8pass and the reference alone are compared on up to so many tokens: on the first ones the noise
#: of FP8 hides small differences. It ends earlier where it takes too long, see compare_seconds.
COMPARED_TOKENS = ENOUGH
#: Windows that the reference does at once.
BATCH = 4
NUMERICS = ("exact", "fast", "both")

Say = Callable[[str], None]


def to_stderr(text: str) -> None:
    """The default way to tell progress."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Plan:
    """What the user asked for; checked when made.

    Attributes:
        model: one of :data:`~fp8pass.demo.model.MODELS`.
        recipe: a recipe, or ``all``.
        tokens: all variants are measured on so many (rounded up to windows), if the text has them.
        window: tokens per forward.
        numerics: ``exact``, ``fast``, or ``both`` (a further variant in ``fast``).
        skip_stock: leave FP8 under stock Inductor out.
        dump: folder for graphs and reports of the compiles, or None.

    Raises:
        OptionError: a bad value, named, with the allowed ones.
    """

    model: str = "smollm2"
    recipe: str = "dynamic"
    tokens: int = 2048
    window: int = 256
    numerics: str = "exact"
    skip_stock: bool = False
    dump: Path | None = None

    def __post_init__(self) -> None:
        allowed = {"model": MODELS, "recipe": (*RECIPES, "all"), "numerics": NUMERICS}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise OptionError(
                    f"unknown {name} {getattr(self, name)!r}; allowed: {choices(values)}"
                )
        if not 32 <= self.window <= 2048:
            raise OptionError(f"window is {self.window}; allowed: 32 to 2048")
        if self.tokens < self.window:
            raise OptionError(f"tokens is {self.tokens}; allowed: at least one window")

    @property
    def recipes(self) -> tuple[str, ...]:
        return RECIPES if self.recipe == "all" else (self.recipe,)


@dataclass
class Session:
    """What all recipes of one run share."""

    plan: Plan
    model: DemoModel
    windows: list[Tensor]
    more: list[Tensor]
    bf16: Variant
    kernels: dict[str, Any]
    say: Say
    prompt: list[int] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    @property
    def all_windows(self) -> list[Tensor]:
        """The windows of all variants, then those for fp8pass and the reference alone."""
        return [*self.windows, *self.more]

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Tell what begins, and at its end how long it took."""
        self.say(f"  {what} ...")
        start = time.perf_counter()
        yield
        self.say(f"  {what}: {time.perf_counter() - start:.1f} s")


def run(plan: Plan, say: Say = to_stderr) -> dict[str, Any]:
    """Run the demo; everything that it found, as plain data.

    With one recipe the result has ``variants``, ``reference``, ``sites``, ``checks`` and so on;
    with all of them ``recipes`` maps each to such a record.

    Raises:
        Fp8PassError: a bad option, or something is not installed.
    """
    start = time.perf_counter()
    session = _prepare(plan, say)
    records = {recipe: _run_recipe(session, recipe) for recipe in plan.recipes}
    common = {
        "schema": SCHEMA,
        "model": session.model.name,
        "note": session.model.note,
        "recipe": plan.recipe,
        "numerics": plan.numerics,
        "text": text.SOURCE,
        "window": plan.window,
        "windows": len(session.windows),
        "tokens": len(session.windows) * plan.window,
        "prompt": PROMPT,
        "versions": versions(),
        "machine": {**machine(), "cpu_kernels": session.kernels},
        "seconds": time.perf_counter() - start,
        "peak_memory_bytes": peak_memory_bytes(),
    }
    if plan.recipe != "all":
        return {**common, **records[plan.recipe]}
    checks = {
        f"{recipe}: {name}": check
        for recipe, record in records.items()
        for name, check in record["checks"].items()
    }
    sites = [
        {"recipe": recipe, **site} for recipe, record in records.items() for site in record["sites"]
    ]
    return {**common, "recipes": records, "sites": sites, "checks": checks}


def passed(result: dict[str, Any]) -> bool:
    """Whether every check of a result holds."""
    return all(check["ok"] for check in result["checks"].values())


def _prepare(plan: Plan, say: Say) -> Session:
    say(f"fp8pass demo: model {plan.model}, recipe {plan.recipe}, window {plan.window}")
    start = time.perf_counter()
    model = load(plan.model, lambda sentence: say(f"  {sentence}"))
    say(f"  {model.name} loaded: {time.perf_counter() - start:.1f} s")
    ids = model.tokenizer.encode(text.measured_text())
    if len(ids) < plan.window:
        raise OptionError(f"window is {plan.window}, but the text has {len(ids)} tokens")
    windows = windows_of(ids, plan.tokens, plan.window)
    more = windows_of(ids, max(plan.tokens, COMPARED_TOKENS), plan.window)[len(windows) :]
    bf16 = Variant("bf16", "bf16, Inductor", model.module, "inductor", plan.window)
    session = Session(plan, model, windows, more, bf16, {}, say)
    session.started = start
    session.prompt = model.tokenizer.encode(PROMPT)[: plan.window - CONTINUATION_TOKENS]
    with session.step("building fp8pass's CPU kernels (once per machine)"):
        session.kernels = _kernels()
    with session.step("letting Inductor build its header (once per machine)"):
        warm_up()
    with session.step(f"compiling {bf16.title}"):
        bf16.compile(windows[0])
    if bf16.error:
        raise OptionError(f"Inductor cannot compile the bf16 model here: {bf16.error}")
    return session


def _kernels() -> dict[str, Any]:
    """Build the library now and not inside a compile that is timed."""
    from fp8pass.kernels import cpu

    start = time.perf_counter()
    available = cpu.available()
    return {
        "available": available,
        "description": cpu.describe(),
        "build_seconds": time.perf_counter() - start,
    }


def _run_recipe(session: Session, recipe: str) -> dict[str, Any]:
    plan, model, say = session.plan, session.model, session.say
    say(f"recipe {recipe}")
    with session.step("quantising, and preparing a second copy"):
        module = model.quantised(recipe, CALIBRATION_TOKENS)
        prepared = _prepared(module)
    stock, rate = _stock(session, recipe, module)
    ours = _ours(session, recipe, module, prepared)
    few = _few(session, recipe, stock, module) if stock is not None and stock.tokens == FEW else []
    for variant in [*([stock] if stock else []), *ours, *few[1:]]:
        if variant.error:
            continue
        with session.step(f"compiling {variant.title}"):
            variant.compile(session.windows[0][:, : variant.tokens])
        if variant.error:
            say(f"  {variant.title} does not run: {variant.error}")

    reference = Variant("reference", "FP8, reference", module, None, plan.window)
    reference.compile(session.windows[0])
    bit_identical = _compare(recipe)
    # The seconds of this run only: bf16 takes part in the run of every recipe.
    bf16 = copy.copy(session.bf16)
    bf16.seconds = []
    measured = [bf16, *([stock] if stock and not few else []), *ours]
    measured = [variant for variant in measured if variant.call is not None]
    with session.step(f"measuring on {len(session.windows)} windows of {plan.window} tokens"):
        interleaved(
            measured, session.windows, lambda v: v is stock, lambda sentence: say(f"    {sentence}")
        )
    with session.step("the same by the reference, eagerly"):
        _refer(session, recipe, reference, range(len(session.windows)))
    with session.step("comparing fp8pass with the reference on more of the text"):
        _compare_on_more(session, recipe, reference, ours)
    runnable_few = [variant for variant in few if variant.call is not None]
    if runnable_few:
        with session.step(f"measuring on {FEW} tokens"):
            interleaved(runnable_few, [session.windows[0][:, :FEW]], rounds=2)
    with session.step(f"continuing the prompt by {CONTINUATION_TOKENS} tokens"):
        _continue(session, measured)
    for variant in ours:
        if variant.call is not None:
            variant.count_products(session.windows[0])

    variants = [bf16, *([stock] if stock else []), *ours, *few[1:]]
    record: dict[str, Any] = {
        "variants": {v.key: _variant_record(session, v, bf16) for v in variants},
        "reference": {**_variant_record(session, reference, bf16), **bit_identical},
        "stock_probe": rate,
        "expected_sites": model.expected_sites(),
    }
    for variant in [v for v in ours if v.call is not None]:
        found = difference(variant, reference)
        record["variants"][variant.key]["to_reference"] = found and asdict(found)
    report = ours[0].report
    record["report"] = None if report is None else report.table()
    record["sites"] = [] if report is None else report.to_dict()["sites"]
    record["checks"] = checks_of(record, bf16, reference, ours, 7 * model.layers)
    return record


def _prepared(module: nn.Module) -> nn.Module:
    """A second FP8 model with the packed bf16 copies of :func:`fp8pass.prepare`.

    Not the same one: the unprepared variant must stay as it was compiled.
    """
    from fp8pass.preparation import prepare

    second = copy.deepcopy(module)
    prepare(second, progress=False)
    return second


def _stock(
    session: Session, recipe: str, module: nn.Module
) -> tuple[Variant | None, dict[str, Any]]:
    """FP8 under stock Inductor, if it is asked for; on few tokens where that would take minutes."""
    if session.plan.skip_stock:
        return None, {}
    stock = Variant("stock", "FP8, Inductor", module, "inductor", session.plan.window)
    probe = probe_product(module, session.plan.window)
    if probe["error"]:
        stock.error = probe["error"]
        session.say(f"  {stock.title} is not available: {stock.error}")
    elif probe["estimated_seconds_per_forward"] > TOO_SLOW_SECONDS:
        stock.tokens = FEW
        stock.title += f", {FEW} tokens"
        session.say(
            f"  torch._scaled_mm does {probe['gmac_per_second']:.3f} GMAC/s here: a forward of "
            f"{session.plan.window} tokens would take "
            f"{duration(probe['estimated_seconds_per_forward'])}, so it is measured on {FEW}"
        )
    return stock, probe


def probe_product(module: nn.Module, tokens: int) -> dict[str, Any]:
    """How fast ``torch._scaled_mm`` is for this model: the product of one linear, timed.

    First with few rows; if all of them would not take long, with all, since a fast product of few
    rows spends its time on the weight.

    Returns:
        ``gmac_per_second``, ``estimated_seconds_per_forward`` (all products, ``tokens`` rows) and
        ``error`` (what torch raised, or "").
    """
    linears = [linear for linear in module.modules() if isinstance(linear, Fp8Linear)]
    macs = sum(linear.in_features * linear.out_features for linear in linears) * tokens
    one = linears[0]
    try:
        with torch.no_grad():
            one(torch.ones(1, one.in_features, dtype=torch.bfloat16))  # sets itself up
            rows, seconds = FEW, _seconds(one, FEW)
            if seconds * tokens / FEW < PROBE_SECONDS:
                rows, seconds = tokens, _seconds(one, tokens)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return {
            "gmac_per_second": None,
            "estimated_seconds_per_forward": None,
            "error": first_line(error),
        }
    rate = rows * one.in_features * one.out_features / seconds
    return {
        "gmac_per_second": rate / 1e9,
        "estimated_seconds_per_forward": macs / rate,
        "error": "",
    }


def _seconds(linear: Fp8Linear, rows: int) -> float:
    """The best of three: another process can make a single call many times slower."""
    x = torch.ones(rows, linear.in_features, dtype=torch.bfloat16)
    found = []
    for _ in range(3):
        start = time.perf_counter()
        linear(x)
        found.append(time.perf_counter() - start)
    return min(found)


def _ours(session: Session, recipe: str, module: nn.Module, prepared: nn.Module) -> list[Variant]:
    """The variants under fp8pass: not prepared, prepared, and perhaps once more in ``fast``."""
    plan = session.plan
    numerics = "fast" if plan.numerics == "fast" else "exact"
    kinds = [("fp8pass", "FP8, fp8pass", module, numerics)]
    kinds.append(("fp8pass_prepared", "FP8, fp8pass prepared", prepared, numerics))
    if plan.numerics == "both":
        kinds.append(("fp8pass_prepared_fast", "FP8, fp8pass prepared, fast", prepared, "fast"))
    found = []
    for key, title, source, how in kinds:
        options = {"fp8pass.numerics": how}
        if plan.dump is not None:
            options["fp8pass.dump"] = str(plan.dump / f"{recipe}-{key}")
        found.append(Variant(key, title, source, "fp8pass", plan.window, options))
    return found


def _few(session: Session, recipe: str, stock: Variant, module: nn.Module) -> list[Variant]:
    """Stock on few tokens, and fp8pass on the same: what is compared has the same shape.

    Not with the default recipe, whose demo would take one compile longer; there the estimate of the
    whole forward says as much.
    """
    if recipe == "dynamic":
        return [stock]
    title = f"FP8, fp8pass, {FEW} tokens"
    return [stock, Variant(f"fp8pass_{FEW}_tokens", title, module, "fp8pass", FEW)]


def _compare(recipe: str) -> dict[str, Any]:
    """The reference against torch on three small shapes, per-tensor if torch has nothing else."""
    per_channel = recipe == "dynamic"
    found: list[Comparison] = compare(per_channel)
    if per_channel and all(item.error for item in found):
        per_channel, missing = False, found[0].error
        found = compare(per_channel)
    else:
        missing = ""
    return {
        "scales": "per-token x per-channel" if per_channel else "per-tensor x per-tensor",
        "row_wise_error": missing,
        "bit_identical": [item.to_dict() for item in found],
    }


def _refer(session: Session, recipe: str, reference: Variant, indices: Sequence[int]) -> None:
    """Run the reference; windows one by one where they would share one scale."""
    batch = 1 if recipe == "dynamic_tensor" else BATCH
    with reference_products():
        for first in range(0, len(indices), batch):
            run_eagerly(reference, session.all_windows, indices[first : first + batch])


def compare_seconds(recipe: str, elapsed: float) -> float:
    """Seconds for the comparison on more tokens, ``elapsed`` seconds after the start.

    The default recipe keeps the whole demo within some nine and a half minutes, installing not
    counted: only a slow machine has no time for all of the tokens. The others may take longer.
    """
    if recipe != "dynamic":
        return 240.0
    return min(240.0, max(30.0, 540.0 - elapsed))


def _compare_on_more(
    session: Session, recipe: str, reference: Variant, ours: Sequence[Variant]
) -> None:
    """Run fp8pass and the reference on further windows, for as long as there is time.

    Of the variants under fp8pass the fastest is run. The losses of another one that was equal to it
    in every bit so far are its losses: the prepared copy changes the speed and no number.
    """
    runnable = [v for v in ours if v.call is not None and v.forward_seconds is not None]
    if not runnable:
        return
    leader = min(runnable, key=lambda v: v.forward_seconds or 0.0)
    followers = [v for v in runnable if v is not leader and v.losses == leader.losses]
    start, first = time.perf_counter(), len(session.windows)
    limit = compare_seconds(recipe, start - session.started)
    while first < len(session.all_windows):
        spent = time.perf_counter() - start
        done = first - len(session.windows)
        if spent * (done + BATCH) / max(done, 1) > limit:
            break
        indices = range(first, min(first + BATCH, len(session.all_windows)))
        for index in indices:
            window = session.all_windows[index]
            leader.losses[index] = loss(leader.timed(window), window)
        _refer(session, recipe, reference, indices)
        first = indices.stop
        session.say(f"    {first * session.plan.window} tokens")
    for variant in followers:
        variant.losses = dict(leader.losses)
        variant.same_as = leader.key


def _continue(session: Session, variants: Sequence[Variant]) -> None:
    """Greedy continuations: the fastest variant first, each guessing what the one before found."""
    prompt, window = session.prompt, session.plan.window
    draft: list[int] = []
    for variant in sorted(variants, key=lambda v: v.forward_seconds or 0.0):
        assert variant.call is not None
        if variant.key == "stock" and (variant.forward_seconds or 0) > SLOW_SECONDS / 4:
            continue
        if variant.key == "bf16":
            draft = eager_guess(variant.module, prompt, CONTINUATION_TOKENS)
        found = continuation(variant.call, prompt, CONTINUATION_TOKENS, window, draft)
        variant.continuation = draft = found


def _variant_record(session: Session, variant: Variant, bf16: Variant) -> dict[str, Any]:
    """A variant as plain data, with its perplexity and bf16's on the same windows."""
    ids = variant.continuation
    full = variant.tokens == session.plan.window
    done = [i for i in range(len(session.windows)) if i in variant.losses] if full else []
    return {
        **variant.to_dict(),
        "perplexity": perplexity(variant, done),
        "perplexity_tokens": len(done) * session.plan.window,
        "bf16_perplexity_on_these": perplexity(bf16, done),
        "losses": [variant.losses[index] for index in sorted(variant.losses)] if full else [],
        "continuation": session.model.tokenizer.decode(ids) if ids else None,
        "weights_bytes": weight_bytes(variant.module),
    }
