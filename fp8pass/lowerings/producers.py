"""Kernels for fused producers (norm + quantise, activation + quantise), and the choice of one.

- ``triton``: fp8pass's own kernels, one launch for a site (lowerings/triton_producers.py).
- ``inductor``, on every kind of device: the site is written out as aten operators, once, with one
  quantise for all its readers, for Inductor to generate code from. On a CPU that is the usual
  choice, since Triton has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8pass.lowerings.write_out import write_out
from fp8pass.ops.quant_form import QuantForm
from fp8pass.options import Options
from fp8pass.quant_key import QuantKey
from fp8pass.reasons import YES, Verdict, no
from fp8pass.selectors import names_at, schemes_of_key
from fp8pass.site_draft import Draft
from fp8pass.target import UNKNOWN, Target
from fp8pass.workbench import Workbench

INDUCTOR = "inductor"


@dataclass(frozen=True, slots=True)
class ProducerProblem:
    """What a fused producer asks of a kernel, as a plain value.

    Attributes:
        op: name of the generic operator, such as ``"rms_norm_quant"``.
        form: text of the producer's form, ``""`` for a quantise alone.
        quant_form: text of the quantise's form.
        width: size of the last dim, None where symbolic.
        dtypes: dtypes of the tensor operands in the order of the schema, None for a missing one;
            the scale and its upper bound, which the form tells, are not among them.
        device_type: torch's device type of the operands.
        keep: the value before the quantise has other readers, and is returned too.
    """

    op: str
    form: str
    quant_form: str
    width: int | None
    dtypes: tuple[torch.dtype | None, ...]
    device_type: str
    keep: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ProducerKernel:
    """One way to compute a fused producer; compared by identity.

    Attributes:
        name: what options and reports call it.
        summary: one line for people.
        requirements, can_implement, provenance: as in :class:`fp8pass.lowerings.Kernel`.
        replaces: generic operator -> the operator of the same schema that runs it.
        inexact: how it rounds in another way than the source, "" if it does not; with a text it is
            for ``numerics="fast"``, or for those who prefer it by name.
        keeps_value: whether it can return the value before the quantise, for its other readers.
    """

    name: str
    summary: str
    kinds: frozenset[str]
    requirements: Callable[[Target], Verdict]
    can_implement: Callable[[Target, ProducerProblem], Verdict]
    replaces: Callable[[str], torch._ops.OpOverload]
    provenance: str
    inexact: str = ""
    keeps_value: bool = True


#: In the order in which they are tried; ``inductor`` comes after all of them and takes everything.
_PRODUCERS: dict[str, ProducerKernel] = {}


def register_producer(kernel: ProducerKernel) -> ProducerKernel:
    """Add a kernel to the list.

    Raises:
        ValueError: the name is taken.
    """
    if kernel.name in producer_kernel_names():
        raise ValueError(f"a kernel for producers named {kernel.name!r} is registered already")
    _PRODUCERS[kernel.name] = kernel
    return kernel


def producer_kernel_names() -> tuple[str, ...]:
    """The names of all kernels for producers."""
    return (*_PRODUCERS, INDUCTOR)


def producer_kernels() -> tuple[ProducerKernel, ...]:
    """All kernels for producers in the order in which they are tried, ``inductor`` apart."""
    return tuple(_PRODUCERS.values())


@dataclass(frozen=True, slots=True)
class ProducerChoice:
    """The kernel of one producer (None = ``inductor``) and why the others were not chosen."""

    kernel: ProducerKernel | None
    rejected: tuple[tuple[str, Verdict], ...]
    why: str


def consider_producer(kernel: ProducerKernel, target: Target, problem: ProducerProblem) -> Verdict:
    """Whether ``kernel`` can take the site, apart from what the user asked for."""
    if target.kind == UNKNOWN and UNKNOWN not in kernel.kinds:
        return no("FP8-L061", kernel=kernel.name, target=target.spec)
    if target.kind not in kernel.kinds:
        wants = "/".join(sorted(kernel.kinds))
        return no("FP8-L001", kernel=kernel.name, wants=wants, target=target.spec)
    if problem.device_type != target.device_type:
        return no("FP8-L015", kernel=kernel.name, wants=target.device_type, has=problem.device_type)
    if problem.keep and not kernel.keeps_value:
        return no("FP8-L017", kernel=kernel.name, what="a value that is read elsewhere too")
    return kernel.requirements(target) and kernel.can_implement(target, problem)


def choose_producer(
    target: Target, problem: ProducerProblem, options: Options, path: str = ""
) -> ProducerChoice:
    """The kernel for one fused producer on ``target``, in the module of ``path``; a pure function
    of its arguments."""
    schemes = _schemes(problem) if options.prefer or options.disable else frozenset()
    prefer = names_at(options.prefer, schemes, path)
    disable = names_at(options.disable, schemes, path)
    verdicts: dict[str, Verdict] = {}
    for kernel in _PRODUCERS.values():
        if kernel.name in disable:
            verdicts[kernel.name] = no("FP8-L002", kernel=kernel.name)
        else:
            verdict = consider_producer(kernel, target, problem)
            wanted = options.numerics == "fast" or kernel.name in prefer
            if verdict and kernel.inexact and not wanted:
                verdict = no("FP8-L063", kernel=kernel.name, why=kernel.inexact)
            verdicts[kernel.name] = verdict
    verdicts[INDUCTOR] = YES  # what every graph falls back to, so it cannot be disabled
    able = [name for name, verdict in verdicts.items() if verdict]
    preferred = [name for name in prefer if name in able]
    winner = (preferred or able)[0]
    why = "preferred" if preferred else "static priority"
    rejected = tuple(
        (name, no("FP8-L013", kernel=name, chosen=winner, why=why) if verdict else verdict)
        for name, verdict in verdicts.items()
        if name != winner
    )
    return ProducerChoice(_PRODUCERS.get(winner), rejected, why)


def _schemes(problem: ProducerProblem) -> frozenset[str]:
    """The schemes of the products that may read the result."""
    return schemes_of_key(QuantKey.parse(QuantForm.parse(problem.quant_form).key))


def problem_of_producer(node: fx.Node) -> ProducerProblem:
    """The problem that a fused operator (or ``fp8pass::quantize``) poses."""
    schema = node.target._schema  # type: ignore[union-attr]
    named = dict(zip((a.name for a in schema.arguments), node.args, strict=False))
    op = str(schema.name).split("::")[1]
    first = node.args[0]
    assert isinstance(first, fx.Node)
    value = first.meta["val"]
    width = value.shape[-1] if value.dim() else None
    operands = [
        named[argument.name]
        for argument in schema.arguments
        if "Tensor" in str(argument.type) and argument.name not in ("scale", "scale_ub")
    ]
    form = named.get("form", "")
    quant_form = named.get("quant_form", "")
    return ProducerProblem(
        op,
        str(form) if quant_form else "",
        str(quant_form or form),
        width if type(width) is int else None,
        tuple(n.meta["val"].dtype if isinstance(n, fx.Node) else None for n in operands),
        value.device.type,
        bool(named.get("keep", False)),
    )


def fused_node(draft: Draft) -> fx.Node:
    """The fused operator of a site."""
    if draft.readers_of is None:
        return draft.node  # emitted by the model
    last = draft.swaps[-1].new
    while "quant" not in str(last.target):  # from one of its results to the operator itself
        last = last.all_input_nodes[0]
    return last


def lower_producer(bench: Workbench, draft: Draft, target: Target, options: Options) -> None:
    """Choose the kernel of a fused site and write it.

    A site that was read from aten and goes to Inductor goes back to the nodes it was read from:
    they are that code, with every rounding where it was, and the quantises of its other readers
    were merged into this one. What was emitted by the model, or read from an operator of a library,
    is written out.
    """
    node = fused_node(draft)
    choice = choose_producer(target, problem_of_producer(node), options, draft.path)
    draft.rejected = list(choice.rejected)
    draft.why = choice.why
    if choice.kernel is not None:
        draft.kernel = choice.kernel.name
        # same schema, same results: only who computes them changes
        node.target = choice.kernel.replaces(str(node.target._schema.name).split("::")[1])  # type: ignore[union-attr]
        return
    draft.kernel = INDUCTOR
    bench.undo(draft.swaps)
    for part in (draft, draft.readers_of):
        if part is None or part.source == "aten":
            continue
        if part.source != "fp8pass":  # a library's call is opaque to Inductor: not that again
            for swap in part.swaps:
                bench.swap(swap.old, swap.new)
        if not write_out(bench, part) and part.source != "fp8pass":
            bench.undo(part.swaps)


def inductor_patches(target: Target, options: Options) -> dict[str, Any]:
    """Settings of Inductor under which the code it generates for a site keeps the contract.

    Inductor keeps intermediate values of a fused loop in float32, so its code for norm + quantise
    differs from eager in 2 to 3 % of the codes; with ``emulate_precision_casts`` it rounds where
    the graph does (on CPUs since torch 2.13; before that the setting changes nothing there). Where
    another kernel takes the producers, Inductor's own code is left as it is.
    """
    if options.numerics != "exact":
        return {}
    for kernel in _PRODUCERS.values():
        refused = kernel.name in options.disable or INDUCTOR in options.prefer or kernel.inexact
        if target.kind in kernel.kinds and kernel.requirements(target) and not refused:
            return {}
    return {"emulate_precision_casts": True}
