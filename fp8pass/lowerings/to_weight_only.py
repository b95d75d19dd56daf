"""Makes weight-only products (W8A16) of products of two quantised operands, on request alone.

    x ─ quantize ─ (q, s) ─ scaled_mm(q, w, s, sw)   ──►   x ─ w8a16_mm(x, w, sw)

It changes numbers: the activations' rounding to fp8 is gone, so that the result is nearer to the
model before it was quantised, and about 2.6 % (relative L2) away from what the graph computed. So
it is made where ``force`` or ``prefer`` names a weight-only kernel, or ``w8a16`` for the best of
them, and the report says of each site that it was. What a quantise cuts off stays cut off: see
:mod:`fp8pass.spellings.before_quantise`. A target without an fp8 product changes nothing about all
of that: there a product of codes is emulated, or keeps the operator it came with.

It comes before fusing: a quantise that no other product reads is gone by then, and what made its
input is no longer fused with it.

The hook that lowers a product may be a later one than that which is asked here. What it has to know
travels with the graph: the key of the codes as an argument of the product that took their place,
the rest as entries of ``meta``.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from fp8pass.errors import NoKernelError
from fp8pass.lowerings.choice import (
    FORCED,
    PREFERRED,
    Choice,
    choose,
    is_weight_only,
    narrowed,
)
from fp8pass.lowerings.registry import WEIGHT_ONLY, find, weight_only_names
from fp8pass.lowerings.site import problem_of, weight_only_problem
from fp8pass.options import Options
from fp8pass.patterns.rule import Fuel
from fp8pass.reasons import YES, Verdict
from fp8pass.selectors import parse_item, schemes_of
from fp8pass.site_draft import Draft
from fp8pass.spellings.before_quantise import Made, Source, before_quantise, put_weight_only
from fp8pass.spellings.reader import Reader
from fp8pass.spellings.walk import is_call, tensor, val
from fp8pass.spellings.weight_only import key_of
from fp8pass.target import Target
from fp8pass.workbench import Workbench

#: The kernel of a weight-only product that stands for nodes which Inductor generates by itself.
_INDUCTOR_OWN = "torch_w8a16"
RULE = "w8a16"
#: Kernels of other devices or libraries, and those for who names them: where another kernel has a
#: reason, these say nothing about why none takes a product.
_ELSEWHERE = ("FP8-L001", "FP8-L011", "FP8-L062", "FP8-L069")


#: Entries of a node's ``meta``: why a product was not made weight-only (code, sentence), and that
#: the rewrite which made it was counted.
_WHY_NOT, _COUNTED = "fp8pass_not_w8a16", "fp8pass_counted"


def wants_weight_only(options: Options) -> bool:
    """Whether the user asked for weight-only products in any way, at any site."""
    items = (*options.forced, *options.prefer)
    return any(is_weight_only(parse_item(text).name) for text in items)


def asks_here(options: Options) -> bool:
    """The same of options that were :func:`fp8pass.lowerings.choice.narrowed` to one site."""
    if options.force is not None:
        return is_weight_only(options.force)
    return any(is_weight_only(name) for name in options.prefer)


def narrowed_to(options: Options, draft: Draft, target: Target) -> Options:
    """The options as they are for the site of a draft."""
    return narrowed(options, problem_of(draft, target), draft.path, _act_key(draft.node))


def schemes_at(draft: Draft, target: Target) -> frozenset[str]:
    """The schemes of a product, see :data:`fp8pass.selectors.SCHEMES`."""
    return schemes_of(problem_of(draft, target), _act_key(draft.node))


def _chosen(draft: Draft, source: Source, target: Target, options: Options) -> Choice:
    """The choice for the weight-only product that a product of codes would be.

    ``options`` are not narrowed: an item may name the scheme of either.
    """
    _, b, _, _, bias, out_dtype, _, weight_key = draft.node.args[:8]
    a = val(draft.node.args[0])
    like = torch.empty_strided(a.shape, a.stride(), dtype=source.dtype, device="meta")
    problem = weight_only_problem(like, val(b), tensor(bias), out_dtype, str(weight_key))
    problem = replace(problem, device_type=a.device.type)
    return choose(target, problem, narrowed(options, problem, draft.path, source.key))


def can_be_weight_only(draft: Draft, target: Target, options: Options) -> Verdict:
    """Whether a weight-only kernel takes the place of a product of codes; ``options`` are those of
    the graph.

    Raises:
        NoKernelError: one was forced that cannot.
    """
    source = before_quantise(draft)
    if isinstance(source, Verdict):
        return source
    choice = _chosen(draft, source, target, options)
    return YES if choice.plan else choice.verdict


def _comes_first(draft: Draft, target: Target, options: Options) -> bool:
    """Whether no kernel for codes is preferred to the weight-only ones."""
    if options.force is not None:
        return True
    before = []
    for name in options.prefer:
        if is_weight_only(name):
            break
        before.append(name)
    if not before:
        return True
    choice = choose(target, problem_of(draft, target), options)
    return not any(kernel.name in before for _, kernel in choice.plan)


def to_weight_only(
    bench: Workbench, reader: Reader, target: Target, options: Options, fuel: Fuel
) -> int:
    """Rewrite every product that the user asked for and that can be; returns how many.

    Raises:
        NoKernelError: a weight-only kernel is forced, and a product cannot be made one.
    """
    made = 0
    before: Made = {}
    for node, draft in list(reader.drafts.items()):
        if not is_call(node, torch.ops.fp8pass.scaled_mm.default):
            continue
        here = narrowed_to(options, draft, target)
        if not asks_here(here) or not _comes_first(draft, target, here):
            continue
        enough = YES if counted(draft) else fuel.left()
        if not enough:
            draft.refuse(RULE, enough)
            continue
        source = before_quantise(draft)
        if isinstance(source, Verdict):
            if here.force is not None:
                raise NoKernelError(
                    f"kernel {here.force!r} is forced but cannot take this site on "
                    f"{target.spec}: {source.code}: {source.message}"
                )
            _tell_why_not(draft, source)
            continue
        choice = _chosen(draft, source, target, options)
        if choice.why not in (FORCED, PREFERRED):
            _tell_why_not(draft, _why_not_preferred(choice, here))
            continue
        if not counted(draft):
            fuel.take()
        product, new = put_weight_only(bench, draft, source, before)
        draft.swaps.append(bench.swap(node, product))
        del reader.drafts[node]
        for producer in new:
            reader._take_native(producer)
        quantise = reader.drafts.get(source.made)
        _take(reader, product, draft, quantise)
        if quantise is not None:
            quantise.weight_only = True
        made += 1
    return made


def counted(draft: Draft) -> bool:
    """Whether a product is counted by ``fuel`` already, as the rewrite that made it."""
    return bool(_act_key(draft.node)) or bool(draft.node.meta.get(_COUNTED))


def count(draft: Draft) -> None:
    """Note that the rewrite which made a product was counted."""
    draft.node.meta[_COUNTED] = True


def _why_not_preferred(choice: Choice, here: Options) -> Verdict:
    """Why none of the weight-only kernels that are preferred takes a product."""
    verdicts = {r.kernel: r.verdict for r in choice.rejected}
    names = [name for name in here.prefer if is_weight_only(name)]
    if WEIGHT_ONLY in names:
        names = list(weight_only_names())
    found = [verdicts[name] for name in names if name in verdicts]
    telling = [verdict for verdict in found if verdict.code not in _ELSEWHERE]
    return next(iter((*telling, *found)), choice.verdict)


def _root(draft: Draft) -> fx.Node:
    """The node that a product was read from, which is still there in a later hook."""
    return draft.swaps[0].old if draft.swaps else draft.node


def _tell_why_not(draft: Draft, verdict: Verdict) -> None:
    _root(draft).meta[_WHY_NOT] = (verdict.code, verdict.message)


def why_not(graph: fx.Graph) -> dict[str, tuple[str, str]]:
    """Name of a node -> why the product was not made weight-only: (code, sentence)."""
    return {node.name: node.meta[_WHY_NOT] for node in graph.nodes if _WHY_NOT in node.meta}


def remember_why_not(graph: fx.Graph, told: dict[str, tuple[str, str]]) -> None:
    """Note again, in a graph that was put back to what it was, what the later hook has to know."""
    for node in graph.nodes if told else ():
        if node.name in told:
            node.meta[_WHY_NOT] = told[node.name]


def without_unmet(draft: Draft, options: Options) -> tuple[Options, str]:
    """Options for a product of codes without the weight-only kernels that it was refused, and the
    preference that could not be followed, in words; why goes into the note of the draft."""
    found = _root(draft).meta.get(_WHY_NOT)
    asked = [name for name in options.prefer if is_weight_only(name)]
    if found is None or not asked or is_call(draft.node, torch.ops.fp8pass.w8a16_mm.default):
        return options, ""
    code, why = found
    draft.note = f"no weight-only product: {why}"
    rest = tuple(name for name in options.prefer if name not in asked)
    return replace(options, prefer=rest), f"preferred {' and '.join(asked)} was not used ({code})"


def _take(reader: Reader, product: fx.Node, before: Draft, quantise: Draft | None) -> None:
    """The draft of a weight-only product, which took the place of ``before``."""
    draft = reader._draft(product, before.node, {"out": product}, "")
    draft.key, draft.swaps, draft.weight_only = key_of(product), before.swaps, True
    draft.codes_of = quantise
    draft.root_name, draft.where, draft.source = before.root_name, before.where, before.source


def forget_products(bench: Workbench, reader: Reader) -> None:
    """Give the products back that were read only to be asked here: a later hook lowers them.

    What was made weight-only stays, as if the model had emitted it.
    """
    for node, draft in list(reader.drafts.items()):
        if draft.kind == "scaled_mm":
            if not draft.weight_only:
                bench.undo(draft.swaps)
            del reader.drafts[node]


def removed(draft: Draft, live: set[fx.Node]) -> bool:
    """Book a quantise whose readers all became weight-only products; whether it is one."""
    if draft.kind != "quantize" or draft.node in live or not draft.weight_only:
        return False
    draft.status, draft.kernel, draft.rule = "lowered", WEIGHT_ONLY, RULE
    draft.why = "removed: all that read its codes became weight-only products, as asked for"
    return True


def give_back_quantises(drafts: list[Draft]) -> None:
    """A quantise that was booked as removed stays if a product that took its place does not."""
    for draft in drafts:
        quantise = draft.codes_of
        if draft.status == "left" and quantise is not None and quantise.rule == RULE:
            quantise.status, quantise.kernel, quantise.rule, quantise.why = "left", "", "", ""
            if draft.verdict is not None:
                quantise.refuse(RULE, draft.verdict)


def keeps_own_nodes(draft: Draft, choice: Choice) -> bool:
    """Whether a site that was read from aten is what the kernel would be, as the model wrote it."""
    kernel = choice.kernel
    return kernel is find(_INDUCTOR_OWN) and draft.source == "aten" and not _act_key(draft.node)


def _act_key(node: fx.Node) -> str:
    if not is_call(node, torch.ops.fp8pass.w8a16_mm.default) or len(node.args) < 8:
        return ""
    return str(node.args[7])


def rewritten_from(node: fx.Node) -> str:
    """For the report: that a product of codes was made a weight-only one, as the user asked."""
    key = _act_key(node)
    if not key:
        return ""
    static = "/static/" in key
    return (
        f"W8A16 in place of W8A8 as asked for: its activations are no longer quantised ({key}); "
        f"{'what is beyond their scale is cut off as before; ' if static else ''}"
        "more exact, and away from the source's numbers by what their rounding costs: about 2.6 % "
        "(relative L2) for e4m3 codes and a scale that fits"
    )
