"""A backend that records what a pass did: operators before and after, and what was matched.

::

    backend = RecordingBackend(numerics="exact")
    out = torch.compile(model, backend=backend)(x)
    backend.check_before(torch.ops.aten._scaled_mm.default)
    backend.check_after("fp8pass::cpu_scaled_mm")
    assert backend.matched["norm fused"] == 2

Caches are off, so there is always a compile to see.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from fp8pass.options import Options
from fp8pass.passes import Fp8Pass
from fp8pass.report import Report
from fp8pass.report.collector import collecting

Operator = Any


class RecordingBackend:
    """For ``torch.compile(model, backend=RecordingBackend())``: fp8pass in one hook of Inductor.

    Attributes:
        before: operator -> how often it was in the graphs that the pass received.
        after: ... and in those that it gave back.
        report: what the pass did in the last compile.
        graphs: number of graphs.

    Args:
        before_ours: passes to run first in the same hook, such as vLLM's.
        execute: False returns the model's own code after compiling, where the target's kernels
            cannot run on this machine.
        options: of :class:`fp8pass.Options`.
    """

    def __init__(
        self,
        *before_ours: Callable[[fx.Graph], Any],
        execute: bool = True,
        **options: Any,
    ) -> None:
        self.options = Options.resolve(**options)
        self.before: Counter[str] = Counter()
        self.after: Counter[str] = Counter()
        self.report = Report()
        self.graphs = 0
        self.execute = execute
        self._first = before_ours

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        patches = {
            "post_grad_custom_post_pass": _Recorder(self),
            "force_disable_caches": True,
        }
        inner = Fp8Pass(self.options)
        with collecting(None, uuid=inner.identity_text()) as self.report:
            if self.execute:
                return cast(Callable[..., Any], compile_fx(gm, inputs, config_patches=patches))
            with suppress(_Seen):
                compile_fx(gm, inputs, config_patches=patches)
        return gm.forward

    @property
    def matched(self) -> Counter[str]:
        """``"kind status"`` -> number of sites of the last compile."""
        counts = self.report.counts()
        return Counter({f"{kind} {status}": n for (kind, status), n in counts.items()})

    def count(self, operator: Operator, before: bool = False) -> int:
        """How often an operator (or ``"namespace::name"``, any overload) is in the graphs."""
        seen = self.before if before else self.after
        name = _name(operator)
        return sum(n for found, n in seen.items() if found == name or _base(found) == name)

    def check_before(self, *operators: Operator) -> None:
        """Assert that each was there before and is gone, or is used less, afterwards."""
        for operator in operators:
            was, now = self.count(operator, before=True), self.count(operator)
            assert was > now, f"{_name(operator)}: {was} before, {now} after"

    def check_after(self, *operators: Operator) -> None:
        """Assert that each was not there, or less often, and is there afterwards."""
        for operator in operators:
            was, now = self.count(operator, before=True), self.count(operator)
            assert now > was, f"{_name(operator)}: {was} before, {now} after"


class _Seen(BaseException):
    """Ends a compile whose code nobody wants; no Exception, or Inductor would wrap it."""


class _Recorder(CustomGraphPass):
    def __init__(self, backend: RecordingBackend) -> None:
        super().__init__()
        self.backend = backend

    def __call__(self, graph: fx.Graph) -> None:
        backend = self.backend
        for earlier in backend._first:
            earlier(graph)
        backend.graphs += 1
        backend.before += operators_of(graph)
        Fp8Pass(backend.options)(graph)
        backend.after += operators_of(graph)
        if not backend.execute:
            raise _Seen

    def uuid(self) -> Any:
        return None  # not to be cached

    def __deepcopy__(self, memo: dict[int, Any]) -> _Recorder:
        return self


def operators_of(graph: fx.Graph) -> Counter[str]:
    """Operator -> number of calls; inside ``auto_functionalized`` the operator that it wraps."""
    found: Counter[str] = Counter()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        target = node.target
        if "auto_functionalized" in str(target) and node.args:
            target = node.args[0]
        found[_name(target)] += 1
    return found


def _name(operator: Operator) -> str:
    """``aten::_scaled_mm.default`` of an overload, ``aten::_scaled_mm`` of a packet or a text."""
    if isinstance(operator, str):
        return operator
    schema = getattr(operator, "_schema", None)
    if schema is not None:
        return f"{schema.name}.{operator._overloadname}"
    return str(getattr(operator, "_qualified_op_name", operator))


def _base(name: str) -> str:
    return name.rpartition(".")[0] if "::" in name else name


@contextmanager
def forced_kernel(name: str) -> Iterator[None]:
    """Within, every scaled product is compiled for the kernel ``name``; one that cannot be raises.

    Works for every way in, since all read the environment: ``backend="fp8pass"``, the option of
    Inductor, vLLM in this process and in those that it starts.

    Raises:
        OptionError: no kernel has that name.
    """
    Options.resolve(force=name)
    before = os.environ.get("FP8PASS_FORCE")
    os.environ["FP8PASS_FORCE"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["FP8PASS_FORCE"]
        else:
            os.environ["FP8PASS_FORCE"] = before
