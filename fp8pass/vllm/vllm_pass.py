"""The pass as vLLM knows it: an ``InductorPass`` of plain data around fp8pass's own pass.

vLLM pickles it into every worker, asks its ``uuid`` for the key of its compile cache, and calls it
on each graph: in compilation mode 3 on every piece between attentions and for every range of
tokens, in mode 2 (a CPU's default) once on the whole model, without a pass context.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx
from vllm.compilation.passes import inductor_pass as vllm_passes
from vllm.compilation.passes.inductor_pass import InductorPass

import fp8pass.ops  # noqa: F401  (an artifact from vLLM's cache calls these operators)
from fp8pass.lowerings.site import known_range
from fp8pass.options import Options
from fp8pass.passes import Fp8Pass
from fp8pass.problem import MRange
from fp8pass.report import store
from fp8pass.report.collector import collecting
from fp8pass.vllm import announcing
from fp8pass.vllm.versions import stands_aside

_FIELDS = dataclasses.fields(Options)


class VllmPass(InductorPass):
    """Reads, fuses and lowers FP8 in each graph that vLLM compiles.

    Args:
        options: resolved options; None = those of the environment at the time of use. Pickling
            resolves them, so that a worker has the options of the process that made it.
        before: passes of the user for the same slot; they run first.
        mode: ``complement``, ``replace`` or "" (named by the user); for messages alone.
        debug: folder for the report beside the option ``dump``; None = vLLM's folder of debug
            dumps, if it has one.
    """

    def __init__(
        self,
        options: Options | None = None,
        before: Sequence[InductorPass] = (),
        mode: str = "",
        debug: str | None = None,
    ) -> None:
        self._options = options
        self.before = tuple(before)
        self.mode = mode
        self.debug = debug

    @property
    def options(self) -> Options:
        """The options of a compile now.

        Raises:
            OptionError: a bad value in the environment.
        """
        return Options.resolve() if self._options is None else self._options

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite ``graph`` in place; raises what :class:`fp8pass.passes.Fp8Pass` raises."""
        tokens = compile_range()
        for earlier in self.before:
            if tokens is None or earlier.is_applicable_for_range(tokens):
                earlier(graph)
        if stands_aside():
            return
        inner = Fp8Pass(self._with_folder(), name=announcing.name_of(tokens))
        with collecting(None, uuid=inner.identity_text()) as report, _rows(graph, tokens):
            inner(graph)
        # vLLM points Inductor's cache into the folder of its own artifact: a warm start, in which
        # this is not called, finds the report there.
        store.save_set(report.uuid, report)
        announcing.ran(self, report, whole=tokens is None)

    def uuid(self) -> str:
        """Identity for the compile caches of vLLM and Inductor, the range of tokens included."""
        announcing.expect(self)
        tokens = compile_range()
        parts = [Fp8Pass(self.options).uuid(), stands_aside(), str(tokens)]
        parts += [earlier.uuid() for earlier in self.before]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def identity_text(self) -> str:
        """What the reports of this pass are stored under."""
        return Fp8Pass(self.options).identity_text()

    def _with_folder(self) -> Options:
        """The options, with vLLM's debug folder to dump into if the user named none."""
        options = self.options
        folder = self.debug or announcing.debug_folder()
        if options.dump is None and folder is not None:
            return dataclasses.replace(options, dump=folder)
        return options

    def __reduce__(self) -> tuple[Any, ...]:
        return (VllmPass, (self.options, self.before, self.mode, self.debug))

    def __deepcopy__(self, memo: dict[int, Any]) -> VllmPass:
        return self  # vLLM and Inductor deep-copy their configuration; this is plain data

    def __repr__(self) -> str:
        words = [self.mode] if self.mode else []
        if self._options is None:
            words.append("options of the environment")
        else:
            given = [(f.name, getattr(self._options, f.name), f.default) for f in _FIELDS]
            words += [f"{name}={value!r}" for name, value, default in given if value != default]
        return f"fp8pass({', '.join(words)})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, VllmPass):
            return NotImplemented
        return (self._options, self.before, self.mode) == (other._options, other.before, other.mode)

    def __hash__(self) -> int:
        return hash((self._options, self.before, self.mode))


def _rows(graph: fx.Graph, tokens: Any) -> AbstractContextManager[None]:
    """Tells the choice of kernels how many rows there will be.

    vLLM runs a graph for every number of tokens in its range, one token included, with the guards
    of torch dropped. Nothing is said if the graph has not exactly one symbolic size, or a range
    that is no pair of numbers.
    """
    first, last = getattr(tokens, "start", None), getattr(tokens, "end", None)
    symbols = _symbols(graph)
    if type(first) is not int or type(last) is not int or len(symbols) != 1:
        return nullcontext()
    return known_range(symbols.pop(), MRange(first, last))


def _symbols(graph: fx.Graph) -> set[Any]:
    """The symbols in the sizes of a graph's inputs."""
    found: set[Any] = set()
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        for size in sizes:
            expression = getattr(getattr(size, "node", None), "expr", None)
            found |= set(getattr(expression, "free_symbols", ()))
    return found


def compile_range() -> Any:
    """The range of tokens that vLLM compiles for at this moment; None outside (and in mode 2)."""
    context = getattr(vllm_passes, "_pass_context", None)
    return getattr(context, "compile_range", None)
