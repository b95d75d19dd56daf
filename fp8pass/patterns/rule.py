"""Rule: a pattern over the generic operators, its conditions, and what is put in its place.

Because reading comes first, a rule is small: it sees ``quantize(rms_norm(x))``, whatever way the
model wrote it. Patterns are expressions of torch's own FX pattern matcher, built by hand: no
tracing, any number of readers, no literal that must be equal. Each condition is a predicate that
gives a :class:`Verdict`; the first one that says no is the reason in the report.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import fx
from torch._inductor.pattern_matcher import (
    Match,
    PatternExpr,
    PatternMatcherPass,
    register_graph_pattern,
)

from fp8pass.reasons import YES, Verdict, no
from fp8pass.site_draft import Draft
from fp8pass.workbench import Swap, Workbench


@dataclass(slots=True)
class Fusion:
    """One place where a pattern matched: the producer's draft, the quantise's, the bindings."""

    bench: Workbench
    producer: Draft
    quantise: Draft
    bound: dict[str, Any]
    dead: set[fx.Node]

    @property
    def y(self) -> fx.Node:
        """The producer's value that is quantised."""
        return self.producer.outputs["y"]

    def other_readers(self) -> list[fx.Node]:
        """Live readers of the producer's value besides this quantise."""
        return [u for u in self.y.users if u is not self.quantise.node and u not in self.dead]


Condition = Callable[[Fusion], Verdict]
Emit = Callable[[Fusion], list[Swap]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One fusion.

    Attributes:
        name: stable name, as the report says it; the name of the fused operator.
        pattern: expression whose root is the quantise.
        where: conditions, asked in this order.
        emit: makes the fused operator and gives it the uses; returns what was swapped.
        order: rules are tried in this order: the longest pattern first.
    """

    name: str
    pattern: PatternExpr
    where: tuple[Condition, ...]
    emit: Emit
    order: int = 100


@cache
def rules() -> tuple[Rule, ...]:
    """The rules of every file of this folder that has ``RULES``, by their order and name."""
    package = importlib.import_module(__package__)
    found: list[Rule] = []
    for info in pkgutil.iter_modules(package.__path__):
        found += getattr(importlib.import_module(f"{__package__}.{info.name}"), "RULES", ())
    names = [rule.name for rule in found]
    if len(set(names)) != len(names):
        raise ValueError(f"two rules of one name among {', '.join(sorted(names))}")
    return tuple(sorted(found, key=lambda rule: (rule.order, rule.name)))


def scale_is_independent(fusion: Fusion) -> Verdict:
    """A given scale must not come from the value that is quantised: that would be a cycle."""
    scale = fusion.bound["scale"]
    if fusion.bench.depends_on(scale, fusion.y) or fusion.bench.depends_on(
        scale, fusion.producer.node
    ):
        return no("FP8-F003", scale=getattr(scale, "name", scale), what=fusion.producer.what)
    return YES


def one_device(fusion: Fusion) -> Verdict:
    """All tensor operands on one device."""
    devices = set()
    for operand in fusion.bound.values():
        if isinstance(operand, fx.Node):
            devices.add(str(operand.meta["val"].device))
    if len(devices) > 1:
        names = " and ".join(sorted(devices))
        return no("FP8-F006", node=fusion.producer.node.name, devices=names)
    return YES


def first_quantise(fusion: Fusion) -> Verdict:
    """A producer is fused with one quantise; a second one reads its normalised output."""
    if fusion.producer.status == "fused":
        return no(
            "FP8-F004",
            node=fusion.quantise.root_name,
            what=fusion.producer.what,
            key=fusion.quantise.form,
            fused=fusion.producer.quant_form,
        )
    return YES


#: Conditions that every rule of a producer and its quantise has.
SHARED: tuple[Condition, ...] = (first_quantise, one_device, scale_is_independent)


@dataclass(slots=True)
class Fuel:
    """How many rewrites may still be made; None = any number."""

    limit: int | None
    used: int = 0

    def left(self) -> Verdict:
        """Whether a unit is left, else FP8-F007."""
        if self.limit is not None and self.used >= self.limit:
            return no("FP8-F007", fuel=self.limit)
        return YES

    def take(self) -> Verdict:
        """Use one unit, or refuse with FP8-F007."""
        verdict = self.left()
        self.used += bool(verdict)
        return verdict


@dataclass(slots=True)
class RuleEngine:
    """Applies rules to a graph that was read; one instance per run of the pass."""

    bench: Workbench
    drafts: dict[fx.Node, Draft]
    fuel: Fuel
    dead: set[fx.Node] = field(default_factory=set)

    def run(self, rules: tuple[Rule, ...]) -> int:
        """Apply ``rules``; returns the number of fusions."""
        live = self.bench.live()
        self.dead = {node for node in self.bench.graph.nodes if node not in live}
        matcher = PatternMatcherPass(pass_name="fp8pass_fuse")
        for rule in rules:
            self._register(matcher, rule)
        return matcher.apply(self.bench.graph)

    def _register(self, matcher: PatternMatcherPass, rule: Rule) -> None:
        def allowed(match: Match) -> bool:
            return self._allowed(rule, match)

        def handler(match: Match, **bound: Any) -> None:
            self._apply(rule, match)

        register_graph_pattern(rule.pattern, extra_check=allowed, pass_dict=matcher)(handler)

    def _fusion(self, match: Match) -> Fusion | None:
        node = match.output_node()
        quantise = self.drafts.get(node)
        source = node.args[0]
        if quantise is None or node in self.dead or not isinstance(source, fx.Node):
            return None
        producer = self.drafts.get(source) or self.drafts.get(source.all_input_nodes[0])
        if producer is None:
            return None
        return Fusion(self.bench, producer, quantise, dict(match.kwargs), self.dead)

    def _allowed(self, rule: Rule, match: Match) -> bool:
        fusion = self._fusion(match)
        if fusion is None:
            return False
        verdict = YES
        for condition in rule.where:
            verdict = condition(fusion)
            if not verdict:
                break
        else:
            verdict = self.fuel.take()
        if not verdict:
            fusion.quantise.refuse(rule.name, verdict)
            if fusion.producer.status != "fused":
                fusion.producer.refuse(rule.name, verdict)
        return bool(verdict)

    def _apply(self, rule: Rule, match: Match) -> None:
        fusion = self._fusion(match)
        assert fusion is not None
        swaps = rule.emit(fusion)
        producer, quantise = fusion.producer, fusion.quantise
        producer.status, producer.rule = "fused", rule.name
        producer.quant_form = quantise.form
        producer.readers_of = quantise
        producer.swaps = [*producer.swaps, *quantise.swaps, *swaps]
        quantise.fused_into = producer
        self.dead.update((producer.node, quantise.node))
        self.dead.update(producer.outputs.values())
        self.dead.update(quantise.outputs.values())
