"""The engine: read, fuse, lower, give back, check - on one FX graph, with a record of every site.

    received ─► read ─► fuse ─► lower ─► give back ─► check ─► after
                 │        │        │          │
                 └────────┴────────┴──────────┴─► one record per site

Two ways to run it. ``joint`` and ``post`` are the halves of ``backend="fp8pass"``: producers are
read and fused in the pristine graph, scaled products are lowered after Inductor's own passes, and
nothing that was read but not fused crosses from one to the other. ``all`` does everything in one
graph (the Inductor option).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from fp8pass.errors import NoKernelError
from fp8pass.lowerings import choose
from fp8pass.lowerings.lone_quantize import lower_alone
from fp8pass.lowerings.merge import finish as finish_merge
from fp8pass.lowerings.merge import merge_products
from fp8pass.lowerings.planned import emit_planned
from fp8pass.lowerings.producers import lower_producer
from fp8pass.lowerings.selected import selected
from fp8pass.lowerings.self_check import checked_plan
from fp8pass.lowerings.site import emit_site, problem_of
from fp8pass.lowerings.to_weight_only import (
    asks_here,
    can_be_weight_only,
    count,
    counted,
    forget_products,
    give_back_quantises,
    keeps_own_nodes,
    narrowed_to,
    remember_why_not,
    removed,
    rewritten_from,
    to_weight_only,
    wants_weight_only,
    why_not,
    without_unmet,
)
from fp8pass.lowerings.write_out import write_out
from fp8pass.options import Options
from fp8pass.patterns.rule import Fuel, RuleEngine, rules
from fp8pass.reasons import YES, Verdict, no
from fp8pass.report import GraphRecord, Rejected, Site
from fp8pass.site_draft import Draft
from fp8pass.spellings.left import not_fused
from fp8pass.spellings.reader import Reader, anchors, touches_fp8
from fp8pass.spellings.walk import VIEWS, is_call, val, where
from fp8pass.target import Target
from fp8pass.tuning import session
from fp8pass.workbench import (
    Snapshot,
    Workbench,
    collector_paused,
    merge_common,
    see_through_aliases,
)

Stage = Literal["joint", "post", "all"]

#: Called after a step with (step, graph); the graph still holds replaced nodes as dead code.
Observer = Callable[[str, fx.Graph], None]


def door(graph: fx.Graph) -> Verdict:
    """Whether the pass may work on this graph at all."""
    if not touches_fp8(graph):
        return no("FP8-P004")
    why = _training(graph)
    if why:
        return no("FP8-P001", why=why)
    if _ahead_of_time():
        return no("FP8-P002")
    return YES


def _training(graph: fx.Graph) -> str:
    """Why a graph is one of training; AOTAutograd names inputs of such graphs in its own way."""
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        name = str(node.target)
        if name.startswith(("primals_", "tangents_")):
            return f"its input {name} is one of a graph with a backward"
    return ""


def _ahead_of_time() -> bool:
    from torch._inductor.virtualized import V

    return bool(getattr(V, "aot_compilation", False))


def graph_target(graph: fx.Graph, options: Options) -> Target | Verdict:
    """The target of the graph's FP8 nodes: the one asked for, or that of their device."""
    devices = set()
    for node in anchors(graph):
        value = val(node)
        value = list(value.values()) if isinstance(value, dict) else value
        if isinstance(value, (tuple, list)):  # None for what a call in functional form returns
            value = next((item for item in value if isinstance(item, torch.Tensor)), None)
        if isinstance(value, torch.Tensor):
            devices.add(value.device)
    types = sorted({device.type for device in devices})
    if options.target is not None:
        target = Target.parse(options.target)
        if types and types != [target.device_type]:
            return no("FP8-P005", devices=", ".join(types), target=target.spec)
        return target
    if not types:
        return no("FP8-P004")
    if len(types) != 1:
        return no("FP8-P005", devices=", ".join(types) or "none", target="one device")
    return Target.detect(sorted(devices, key=str)[0])


@dataclass
class Run:
    """One run over one graph."""

    graph: fx.Graph
    options: Options
    stage: Stage
    record: GraphRecord
    observe: Observer | None = None
    spent: int = 0
    step: str = "merge"
    rewrites: int = 0
    used: int = 0
    _clock: float = field(default_factory=time.perf_counter)

    def done(self, step: str, following: str) -> None:
        """Book the time of a step and show the graph to the observer (not on the clock)."""
        now = time.perf_counter()
        self.record.seconds[step] = self.record.seconds.get(step, 0.0) + now - self._clock
        if self.observe is not None and step in ("read", "fuse"):
            self.observe(step, self.graph)
        self.step = following
        self._clock = time.perf_counter()

    def execute(self, target: Target) -> list[Site]:
        """All steps. The graph may be half rewritten if this raises."""
        bench_graph, stage = self.graph, self.stage
        found = anchors(bench_graph)
        if stage != "post":
            merge_common(bench_graph, found)
        else:
            see_through_aliases(bench_graph)
        self.done("merge", "read")

        bench = Workbench(bench_graph)
        reader = Reader(bench)
        fuel = Fuel(self.options.fuel, self.spent)
        if stage != "post":

            def takes(draft: Draft) -> Verdict:
                enough = fuel.left()
                if not enough:
                    return enough
                here = narrowed_to(self.options, draft, target)
                verdict = YES
                if asks_here(here):
                    verdict = can_be_weight_only(draft, target, self.options)
                if not asks_here(here) or not (verdict or here.force is not None):
                    choice = choose(target, problem_of(draft, target), here)
                    verdict = choice.verdict
                if verdict:
                    fuel.take()
                    count(draft)
                return verdict

            self.rewrites += reader.split_linears(takes)
            reader.read_producers()
            reader.read_quantises()
        asked = stage != "post" and wants_weight_only(self.options)
        unread = len(reader.unread)
        if stage != "joint" or asked:
            reader.read_products()
        if asked:
            self.rewrites += to_weight_only(bench, reader, target, self.options, fuel)
        if stage == "joint" and asked:
            forget_products(bench, reader)
            del reader.unread[unread:]
        self.done("read", "fuse")

        if stage != "post":
            self.rewrites += RuleEngine(bench, reader.drafts, fuel).run(rules())
        self.done("fuse", "lower")

        drafts = list(reader.drafts.values())
        live = bench.live()
        at = {True: "post", False: "joint"}  # the hook that has all products, all producers
        for draft in drafts:  # now, while the graph still says what the reasons name
            _count_readers(draft, live)
            if draft.status == "left" and draft.fused_into is None and draft.kind != "scaled_mm":
                if removed(draft, live):
                    continue
                draft.refuse("", not_fused(draft, live, reader.drafts))
        self.record.selectors = selected(
            self.options,
            drafts,
            reader.unread,
            target,
            lambda products: stage in ("all", at[products]),
        )
        for merged in merge_products(bench, drafts) if stage != "joint" else ():
            self._lower_product(bench, merged.draft, target, fuel)
            finish_merge(bench, merged)
        for draft in drafts:
            if draft.kind == "scaled_mm":
                if draft.status != "lowered":
                    self._lower_product(bench, draft, target, fuel)
            elif draft.status == "fused":
                lower_producer(bench, draft, target, self.options)
        give_back_quantises(drafts)
        self.rewrites += lower_alone(drafts, target, self.options, fuel.take)
        self.done("lower", "give back")

        for draft in (d for d in drafts if d.status == "left" and d.fused_into is None):
            bench.undo(draft.swaps)
            if not draft.swaps:
                write_out(bench, draft)
        self.done("give back", "check")

        bench.finish()
        self.used = fuel.used - self.spent
        self.done("check", "report")
        return _sites(drafts, reader)

    def _lower_product(self, bench: Workbench, draft: Draft, target: Target, fuel: Fuel) -> None:
        problem = problem_of(draft, target)
        session.lowered(problem)
        enough = YES if counted(draft) else fuel.left()
        if draft.verdict is not None and not enough:  # asked for as a weight-only one, without fuel
            return
        options, unmet = without_unmet(draft, narrowed_to(self.options, draft, target))
        session.ensure(target, problem, options)
        try:
            choice = choose(target, problem, options)
        except NoKernelError:
            if enough:
                raise
            draft.refuse("", enough)
            return
        notes = [note for note in (unmet, choice.note) if note]
        for note in notes:
            session.tell_once(note)
        draft.rejected = [(r.kernel, r.verdict) for r in choice.rejected]
        draft.shape = f"{problem.m}x{problem.n or 'N'}x{problem.k or 'K'}"
        if not choice.plan:
            draft.refuse("", choice.verdict)
            return
        if not enough:
            draft.refuse("", enough)
            return
        if not counted(draft):
            fuel.take()
        kernel = choice.plan[-1][1]
        node = draft.node
        site = emit_site(draft, problem, target, self.options.numerics)
        own_nodes = problem.weight_only and bool(draft.swaps) and keeps_own_nodes(draft, choice)
        with bench.graph.inserting_before(node):
            checked = checked_plan(target, problem, choice, options)
            if own_nodes:  # the model wrote what the kernel would be
                result = node
            elif checked:
                result = emit_planned(bench.graph, site, choice, checked)
            elif choice.kernel is not None:
                result = choice.kernel.emit(bench.graph, site)
            else:
                result = emit_planned(bench.graph, site, choice)
        if own_nodes:
            bench.undo(draft.swaps)
        else:
            draft.swaps.append(bench.swap(node, result))
        for name in ("stack_trace", "nn_module_stack"):
            if name in node.meta:
                result.meta.setdefault(name, node.meta[name])
        draft.status, draft.kernel, draft.rule = "lowered", kernel.name, "scaled_mm"
        draft.plan = choice.text
        words = (choice.why, *notes, draft.note, rewritten_from(node))
        draft.why = "; ".join(word for word in words if word)
        self.rewrites += 1


def _count_readers(draft: Draft, live: set[fx.Node]) -> None:
    """Number of live readers of the site's result, counted behind reshapes."""
    source = draft.readers_of if draft.readers_of is not None else draft
    name = "q" if "q" in source.outputs else next(iter(source.outputs))
    outputs = [source.outputs[name]]
    if draft.readers_of is not None:  # fused: the codes are an output of the fused operator
        outputs = [swap.new for swap in draft.swaps if swap.old is source.outputs[name]]
    stack, seen, count = outputs, set(outputs), 0
    while stack:
        for user in stack.pop().users:
            if user not in live or user in seen:
                continue
            seen.add(user)
            if is_call(user, *VIEWS):
                stack.append(user)
            else:
                count += 1
    draft.readers = count


def _sites(drafts: list[Draft], reader: Reader) -> list[Site]:
    sites = []
    for draft in drafts:
        if draft.fused_into is not None:
            continue
        verdict = draft.verdict if draft.status == "left" else None
        fused = draft.status == "fused"
        key = draft.readers_of.key if draft.readers_of is not None else draft.key
        sites.append(
            Site(
                kind=draft.kind,
                status=draft.status,
                rule=draft.rule,
                code=verdict.code if verdict is not None else "",
                message=verdict.message if verdict is not None else draft.why,
                hint=verdict.hint if verdict is not None else "",
                kernel=draft.kernel,
                where=draft.where,
                readers=draft.readers,
                node=draft.root_name,
                source=draft.source,
                key=key,
                shape=draft.shape,
                plan=draft.plan,
                rejected=tuple(Rejected(n, v.code, v.message) for n, v in draft.rejected),
            )
        )
        assert not fused or draft.kernel
    for kind, node, verdict in reader.unread:
        sites.append(
            Site(
                kind=kind,
                status="left",
                code=verdict.code,
                message=verdict.message,
                hint=verdict.hint,
                where=where(node),
                readers=len(node.users),
                node=node.name,
            )
        )
    return sites


def run(
    graph: fx.Graph,
    options: Options,
    stage: Stage,
    record: GraphRecord,
    observe: Observer | None = None,
    spent: int = 0,
) -> Exception | None:
    """Run a stage over ``graph`` in place and fill in ``record``.

    ``spent`` is the number of rewrites that an earlier hook made of the same fuel.

    If a step fails, or nothing was rewritten, the graph is put back to what it was, to the node.

    Returns:
        the exception of a step that failed, None otherwise. Never raises for such a failure, except
        :class:`NoKernelError`: a forced kernel that cannot be had is the user's to know.
    """
    record.nodes_before = record.nodes_after = len(graph.nodes)
    try:
        record.verdict = door(graph)
        target = graph_target(graph, options) if record.verdict else record.verdict
    except Exception as error:  # a device that has no target, for one
        return _failed(record, "door", error, options)
    if isinstance(target, Verdict):
        record.verdict = target
        return None
    record.target = target.spec
    # measuring kernels may take minutes and drop tensors of a device: not without the collector
    with nullcontext() if options.tune == "measure" else collector_paused():
        return _run_steps(graph, options, stage, record, observe, spent, target)


def _run_steps(
    graph: fx.Graph,
    options: Options,
    stage: Stage,
    record: GraphRecord,
    observe: Observer | None,
    spent: int,
    target: Target,
) -> Exception | None:
    """What :func:`run` does to a graph that the door let in."""
    started = time.perf_counter()
    _sort(graph)
    snapshot = Snapshot(graph)
    record.seconds["snapshot"] = time.perf_counter() - started
    work = Run(graph, options, stage, record, observe, spent)
    try:
        sites = work.execute(target)
        changed = snapshot.check_outputs(graph)
        if changed:
            raise RuntimeError(changed)
    except Exception as error:
        snapshot.restore(graph)
        if isinstance(error, NoKernelError):
            raise
        return _failed(record, work.step, error, options)
    if work.rewrites == 0:
        told = why_not(graph)
        snapshot.restore(graph)
        remember_why_not(graph, told)
    record.sites = sites
    record.fuel = work.used if work.rewrites else 0
    record.nodes_after = len(graph.nodes)
    return None


def _failed(record: GraphRecord, step: str, error: Exception, options: Options) -> Exception:
    """Note in ``record`` that a step failed."""
    node = getattr(error, "fp8pass_node", "the graph")
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    record.verdict = no(
        "FP8-P003", step=step, node=node, error=text, repro=options.dump or "FP8PASS_DUMP"
    )
    record.sites = []
    return error


def _sort(graph: fx.Graph) -> None:
    """Put a graph in order that an earlier pass left out of order, as Inductor does after ours."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    seen: set[fx.Node] = set()
    for node in graph.nodes:
        if not seen.issuperset(node.all_input_nodes):
            stable_topological_sort(graph)
            return
        seen.add(node)


def plain_options(options: Options) -> dict[str, Any]:
    """The options as plain data for a record."""
    return {name: getattr(options, name) for name in Options.names()}
