"""``fp8pass.graphs_for``: the graphs that a device would get, made on a machine without it.

Parameters, buffers and inputs become fake tensors of the target's device, and Dynamo, AOTAutograd
and Inductor's graph passes run on these, with fp8pass's hooks in their places, up to code
generation. Nothing else is simulated: module paths, source lines, graph breaks, guards on sizes and
everything that asks a tensor for its device are the real ones. What torch asks of a device while it
traces, apart from tensors, is answered by :mod:`fp8pass.absent_device`.

Two other ways were tried. ``make_fx`` on fake tensors knows no module path and no graph break, and
lifts no parameter by itself. Capturing on the CPU and renaming the device afterwards is wrong
wherever the device decides: a model's own ``x.device.type`` is a constant by then, ``full`` and
``arange`` carry it in their arguments, and Inductor decomposes small products and attention for a
CPU in another way.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from fp8pass.absent_device import absent_device, fake_like
from fp8pass.errors import OptionError, UnsupportedError
from fp8pass.options import Options
from fp8pass.report import Report
from fp8pass.report.graph_text import live_module
from fp8pass.report.listing import call_names, listing
from fp8pass.spellings.walk import ROOT
from fp8pass.target import Target

#: One trace at a time: Dynamo's caches and the modules' tensors belong to the whole process.
_lock = threading.RLock()


@dataclass(frozen=True)
class TargetGraph:
    """One graph of the model; a graph break makes several.

    Attributes:
        name: as in the report.
        before: as fp8pass's first hook received it: functional aten, decomposed.
        after: as Inductor's code generation would get it.
        inputs: name of a placeholder -> the parameter, buffer or argument that it is.
    """

    name: str
    before: fx.GraphModule
    after: fx.GraphModule
    inputs: dict[str, str]

    def calls(self) -> list[str]:
        """The operators that the graph calls at the end, in order."""
        return call_names(self.after.graph)

    def text(self, which: str = "after") -> str:
        """The graph ``"before"`` or ``"after"`` for reading, one call per line."""
        return listing(getattr(self, which).graph, self.inputs)


@dataclass(frozen=True)
class TargetGraphs:
    """What :func:`graphs_for` found.

    Attributes:
        target: what it was made for.
        graphs: in the order in which the model runs them.
        report: every site, as :func:`fp8pass.explain` gives it.
    """

    target: Target
    graphs: tuple[TargetGraph, ...]
    report: Report

    @property
    def graph(self) -> TargetGraph:
        """The only graph.

        Raises:
            UnsupportedError: there is none, or more than one.
        """
        if len(self.graphs) != 1:
            raise UnsupportedError(f"the model has {len(self.graphs)} graphs, not one")
        return self.graphs[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the target's name, each graph as text and calls, the report."""
        return {
            "target": self.target.spec,
            "graphs": [
                {
                    "name": graph.name,
                    "before": graph.text("before"),
                    "after": graph.text("after"),
                    "calls": graph.calls(),
                }
                for graph in self.graphs
            ],
            "report": self.report.to_dict(),
        }

    def calls(self) -> list[str]:
        """The operators that all graphs call, in order."""
        return [name for graph in self.graphs for name in graph.calls()]

    def text(self, which: str = "after") -> str:
        """All graphs for reading; see :meth:`TargetGraph.text`."""
        return "\n\n".join(
            f"{graph.name} {which} fp8pass, for {self.target.spec}\n{graph.text(which)}"
            for graph in self.graphs
        )


def graphs_for(
    model: Callable[..., Any],
    *inputs: Any,
    target: str | Target,
    dynamic: bool | Sequence[int] | None = None,
    kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> TargetGraphs:
    """What ``torch.compile(model, backend="fp8pass")`` would hand to code generation on ``target``.

    Quick (no code is generated, no data computed) and always fresh: all caches are off. The model's
    parameters and buffers are fake while this runs, so no other thread may use it meanwhile; they
    are put back whatever happens, and nothing is left compiled.

    Attention is shown as torch's flash operator where its limits allow, since torch asks the device
    for its choice; a product that Inductor might pad after timing it is shown unpadded.

    Args:
        model: a module, or a function that uses modules (as closure, argument, global or ``self``).
            Tensors that it reads otherwise stay where they are, as they would with ``model.to``.
        inputs: positional inputs of one call, on any device; only their metadata is used.
        target: a target's name, such as ``"sm90"`` or ``"gfx942+aiter"``; of a :class:`Target` its
            name counts.
        dynamic: as for ``torch.compile``; or the dims that are symbolic in every tensor input that
            has them (``[0]``: the first), which then must not be specialised.
        kwargs: keyword inputs of that call.
        options: further fields of :class:`fp8pass.Options`.

    Raises:
        OptionError: a bad option or target, named, or a dim that no input has.
        NoKernelError: a forced kernel cannot take a site.
        UnsupportedError: the model asks for the value of a tensor, mixes devices, holds a tensor
            subclass, or specialises a size that was to be symbolic; or this torch knows nothing of
            the target's device type and there is no C++ compiler to help it.
    """
    import torch._dynamo
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    from fp8pass.explaining import _ours, tell_unmatched
    from fp8pass.report import merge

    parsed = Target.parse(target if isinstance(target, str) else target.spec)
    resolved = Options.resolve(target=parsed.spec, **options)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = torch.device(parsed.device_type)
    collected = _Collected(resolved, mode)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_lock)
        torch._dynamo.reset()
        stack.callback(torch._dynamo.reset)
        stack.enter_context(torch.no_grad())
        stack.enter_context(absent_device(parsed.device_type))
        stack.enter_context(inductor.patch(force_disable_caches=True))
        stack.enter_context(functorch.patch(enable_autograd_cache=False))
        stack.enter_context(warnings.catch_warnings())
        # that switching the caches off switches off Dynamo's too is what is wanted
        warnings.filterwarnings("ignore", message=".*dynamo_pgo.*")
        stack.enter_context(_moved(_modules_of(model, inputs, kwargs), mode, device))

        def to_target(value: torch.Tensor) -> torch.Tensor:
            return _moved_tensor(value, mode, device, "an input")

        args, named = tree_map_only(torch.Tensor, to_target, (inputs, kwargs or {}))
        if dynamic is not None and not isinstance(dynamic, bool):
            _mark(dynamic, (args, named))
            dynamic = None
        compiled = torch.compile(model, backend=collected.backend, dynamic=dynamic)
        try:
            with mode:
                compiled(*args, **named)
        except Exception as error:
            raise _explained(_ours(error)) from error
    report = merge(collected.reports)
    tell_unmatched(report)
    if not collected.reports:
        report.note = "no graph was captured: the model runs no torch operator"
    return TargetGraphs(parsed, tuple(collected.graphs), report)


# ---- the backend ---------------------------------------------------------------------------------


class _Collected:
    """A backend that keeps each graph before and after, and runs it on fake tensors."""

    def __init__(self, options: Options, mode: FakeTensorMode) -> None:
        self.options, self.mode = options, mode
        self.graphs: list[TargetGraph] = []
        self.reports: list[Report] = []

    def backend(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        import torch._inductor.compile_fx as inductor
        import torch._inductor.config as config

        from fp8pass.backend import numerics_patches, two_hooks
        from fp8pass.report.collector import collecting

        before: list[fx.GraphModule] = []
        after: list[fx.GraphModule] = []
        patches = numerics_patches(gm, inputs, self.options)
        joint, post = two_hooks(self.options, patches)

        def first(graph: fx.Graph) -> None:
            before.append(live_module(graph))
            joint(graph)

        patches |= {"joint_custom_pre_pass": first, "post_grad_custom_post_pass": post}
        inner = functools.partial(self._without_code, after)
        with collecting(None, uuid=post.identity_text()) as report, config.patch(patches):
            result: Any = inductor.compile_fx(gm, inputs, inner_compile=inner)  # type: ignore[arg-type]
        self.reports.append(report)
        if before and after:
            number = len(self.graphs)
            name = report.graphs[0].name if report.graphs else f"graph {number}"
            labels = _labels(gm, before[0].graph)
            self.graphs.append(TargetGraph(name, before[0], after[-1], labels))
        return cast(Callable[..., Any], result)

    def _without_code(
        self, after: list[fx.GraphModule], graph: fx.GraphModule, inputs: Sequence[Any], **how: Any
    ) -> Callable[..., Any]:
        """The place of ``compile_fx_inner``: its graph passes, then the graph as it is."""
        from torch._functorch.aot_autograd import make_boxed_func
        from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
        from torch._inductor.virtualized import V

        with V.set_fake_mode(torch._guards.detect_fake_mode(inputs)):
            view_to_reshape(graph)
            post_grad_passes(graph, is_inference=how.get("is_inference", True))
        graph.recompile()
        after.append(live_module(graph.graph))

        def call(*values: Any) -> Any:
            with self.mode:
                return graph.forward(*values)

        return cast(Callable[..., Any], make_boxed_func(call))


def _labels(captured: fx.GraphModule, traced: fx.Graph) -> dict[str, str]:
    """What the placeholders of the traced graph are; it has the inputs of the captured one."""
    inputs = captured.graph.find_nodes(op="placeholder")
    placeholders = traced.find_nodes(op="placeholder")
    if len(inputs) != len(placeholders):
        return {}
    names = [_source(node) for node in inputs]
    # a module's parameters are what they are for it, whatever the frame calls the module
    roots = {root[0] for root in map(_module_root, names) if root is not None}
    for strip in (roots if len(roots) == 1 else set(), set()):
        labels = [
            node.name if name is None else _label(name, strip)
            for node, name in zip(inputs, names, strict=True)
        ]
        if len(set(labels)) == len(labels):
            return {node.name: label for node, label in zip(placeholders, labels, strict=True)}
    return {}


def _source(node: fx.Node) -> str | None:
    """What Dynamo calls an input of a captured graph, such as ``L['x']``."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", None)
    name = name() if callable(name) else name
    return name if isinstance(name, str) else None


def _module_root(name: str | None) -> re.Match[str] | None:
    """The variable that holds the module whose parameter or buffer ``name`` is."""
    root = None if name is None else ROOT.match(name)
    if root is None or name is None:
        return None
    held = re.match(r"\._(?:modules|parameters|buffers)\['", name[root.end() :])
    return None if held is None else root


def _label(name: str, strip: set[str]) -> str:
    """``L['self']._modules['mlp']._buffers['weight']`` as ``mlp.weight``."""
    root = _module_root(name)
    if root is not None and root[0] in strip:
        name = "L" + name[root.end() :]
    name = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", name)
    name = re.sub(r"\['([^']*)'\]", r".\1", name)
    return re.sub(r"^[LG]\.(?:self\.)?", "", name)


# ---- moving a model to fake tensors --------------------------------------------------------------


def _modules_of(*roots: Any) -> list[nn.Module]:
    """The modules that a callable and its arguments reach."""
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()
    stack: list[Any] = list(roots)
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            for module in value.modules():
                found.setdefault(id(module), module)
        elif isinstance(value, dict):
            stack.extend(value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            stack.extend(value)
        elif isinstance(value, functools.partial):
            stack += [value.func, value.args, value.keywords]
        elif isinstance(value, types.MethodType):
            stack += [value.__self__, value.__func__]
        elif isinstance(value, types.FunctionType):
            stack += _reached(value)
        elif callable(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
            stack += [vars(value), value.__call__]
    return list(found.values())


def _reached(function: types.FunctionType) -> Iterator[Any]:
    """What a function closes over, its defaults, and the globals that it names."""
    if (function.__module__ or "").partition(".")[0] == "torch":
        original = getattr(function, "_torchdynamo_orig_callable", None)
        yield from (original,) if original is not None else ()
        return
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # empty
            yield cell.cell_contents
    yield function.__defaults__
    yield function.__kwdefaults__
    yield getattr(function, "_torchdynamo_orig_callable", None)
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
        for name in code.co_names:
            value = function.__globals__.get(name)
            if not isinstance(value, (types.ModuleType, type)):
                yield value


@contextlib.contextmanager
def _moved(
    modules: Sequence[nn.Module], mode: FakeTensorMode, device: torch.device
) -> Iterator[None]:
    """Within, all parameters and buffers of ``modules`` are fake and on ``device``.

    The modules themselves stay the same objects, because functions, hooks and other modules refer
    to them. A tensor that two modules share stays one tensor.
    """
    fakes: dict[int, torch.Tensor] = {}
    originals: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for module in modules:
            for tensors in (module._parameters, module._buffers):
                originals.append((tensors, dict(tensors)))
                for name, value in tensors.items():
                    if value is None:
                        continue
                    if id(value) not in fakes:
                        what = f"{type(module).__name__}.{name}"
                        fakes[id(value)] = _moved_tensor(value, mode, device, what)
                    tensors[name] = cast(Any, fakes[id(value)])
        yield
    finally:
        for tensors, before in originals:
            tensors.clear()
            tensors.update(before)


def _moved_tensor(
    value: torch.Tensor, mode: FakeTensorMode, device: torch.device, what: str
) -> torch.Tensor:
    if type(value) not in (torch.Tensor, nn.Parameter) or value.layout != torch.strided:
        kind = type(value).__name__ if value.layout == torch.strided else f"{value.layout} tensor"
        raise UnsupportedError(
            f"{what} is a {kind}; only plain tensors can be moved to a device that is not there"
        )
    fake = fake_like(mode, value.detach(), device)
    if isinstance(value, nn.Parameter):
        return nn.Parameter(fake, requires_grad=value.requires_grad)
    return fake


def _mark(dims: Sequence[int], inputs: Any) -> None:
    """Make these dims of every tensor input symbolic."""
    import torch._dynamo

    tensors: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, tensors.append, inputs)
    for dim in dims:
        having = [tensor for tensor in tensors if -tensor.dim() <= dim < tensor.dim()]
        if not having:
            raise OptionError(f"dynamic dim {dim}: no input has it")
        for tensor in having:
            torch._dynamo.mark_dynamic(tensor, dim % tensor.dim())


# ---- errors --------------------------------------------------------------------------------------

#: Names of torch's errors for a value that a fake tensor does not have.
_VALUE_ERRORS = (
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "GuardOnDataDependentSymNode",
)
_REFUSED = re.compile(r"got \w+\((['\"])(.+?)\1\)", re.DOTALL)
_MIXED_DEVICES = re.compile(r"two (?:different )?devices,? ?(.*)")
_USER_LINE = re.compile(r'from user code:\s+File "([^"]+)", line (\d+)')


def _explained(error: Exception) -> Exception:
    """An :class:`UnsupportedError` for what cannot be done without the device, else ``error``."""
    text, cause = str(error), cast("BaseException | None", error)
    found = _USER_LINE.search(text)
    place = f" at {found[1].rsplit('/', 1)[-1]}:{found[2]}" if found else ""
    while cause is not None:
        text = str(cause).strip()
        first = text.splitlines()[0] if text else ""
        if type(cause).__name__ in _VALUE_ERRORS:
            return UnsupportedError(
                f"the model asks for the value of a tensor{place} ({first}), which does not exist "
                "without the device"
            )
        if devices := _MIXED_DEVICES.search(text):
            return UnsupportedError(
                "the model mixes devices: a tensor that is neither parameter, buffer nor input "
                f"does not move with it{place} ({devices[1].rstrip('!. ')})"
            )
        if type(cause).__name__ == "ConstraintViolationError":
            wanted = next((line for line in text.splitlines() if "marked" in line), first)
            return UnsupportedError(f"a size that was to be symbolic is not: {wanted.strip(' -')}")
        if type(cause).__name__ == "TorchRuntimeError":  # an operator refused its operands
            refused = _REFUSED.search(text)
            why = refused[2] if refused else first
            return UnsupportedError(f"torch cannot run the model on the target{place}: {why}")
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    return error
