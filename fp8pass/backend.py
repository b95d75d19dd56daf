"""``torch.compile(backend="fp8pass")``, and the options that do the same for plain Inductor.

The backend is Inductor with two passes: producers are read and fused in the joint pre-pass, where
the graph is pristine and all roundings are there; scaled products are lowered in the post-grad
post-pass.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from fp8pass.errors import OptionError, choices
from fp8pass.options import Options
from fp8pass.quant_key import FP8_DTYPES
from fp8pass.reasons import no

log = logging.getLogger("fp8pass")

#: Our options among Inductor's in ``torch.compile(..., options={...})``.
PREFIX = "fp8pass."


def split_options(options: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate ``{"fp8pass.numerics": "fast", "max_autotune": True}`` into ours and Inductor's.

    Raises:
        OptionError: a name that belongs to neither.
    """
    import torch._inductor.config as inductor

    if options is not None and not isinstance(options, Mapping):
        raise OptionError(f"options is {options!r}, not a dict of names and values")
    ours, theirs = {}, {}
    for name, value in (options or {}).items():
        if name.startswith(PREFIX):
            ours[name.removeprefix(PREFIX)] = value
        elif name.replace("-", "_") in inductor.get_config_copy():
            theirs[name.replace("-", "_")] = value
        else:
            allowed = choices(f"{PREFIX}{n}" for n in Options.names())
            raise OptionError(
                f"unknown option {name!r}: not one of Inductor's, and fp8pass's are {allowed}"
            )
    return ours, theirs


def mode_patches(mode: str | None) -> dict[str, Any]:
    """What ``mode=`` means to Inductor (``"reduce-overhead"``, ``"max-autotune"``, ...).

    Raises:
        OptionError: an unknown mode.
    """
    import torch._inductor as inductor

    if mode is None or mode == "default":
        return {}
    known = inductor.list_mode_options()
    if mode not in known:
        raise OptionError(f"unknown mode {mode!r}; allowed: {choices(known)}")
    return dict(known[mode])


def existing_passes(hook: str, patches: Mapping[str, Any]) -> tuple[Any, ...]:
    """The passes that a user or another library has set for a hook; fp8pass chains to them."""
    import torch._inductor.config as inductor

    from fp8pass.passes import chain, without_ours

    current = patches[hook] if hook in patches else getattr(inductor, hook)
    return without_ours(chain(current))


def fp8pass_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend that ``torch.compile(model, backend="fp8pass")`` finds through its entry point.

    Args:
        gm: Dynamo's graph.
        example_inputs: fake or real inputs.
        mode: as for Inductor.
        options: Inductor's options, and ours with the prefix ``"fp8pass."``.

    Raises:
        OptionError: a bad option or mode, named.
        NoKernelError: a forced kernel cannot take a site.
    """
    import torch._inductor.compile_fx as inductor

    ours, theirs = split_options(options)
    resolved = Options.resolve(**ours)
    patches = {**numerics_patches(gm, example_inputs, resolved), **mode_patches(mode), **theirs}
    joint, post = two_hooks(resolved, patches)
    patches |= {"joint_custom_pre_pass": joint, "post_grad_custom_post_pass": post}

    def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from fp8pass.report.collector import collecting

        key = compile_key(
            graph, inputs, (joint.uuid(), post.uuid(), mode, sorted(map(str, theirs)))
        )
        try:
            with collecting(key, uuid=post.identity_text()) as report:
                result = inductor.compile_fx(graph, inputs, config_patches=patches)
        except Exception:
            _hint_at_grad(inputs)
            raise
        if resolved.dump and any(record.from_cache for record in report.graphs):
            from fp8pass.report import Dump

            Dump(resolved.dump).write_report(report)
        return cast(Callable[..., Any], result)

    return compile_graph(gm, example_inputs)


def _hint_at_grad(inputs: Sequence[Any]) -> None:
    """Say why a compile under autograd failed, where that may be the cause.

    torch has no derivative of a scaled product, so capturing one for training fails before any pass
    is called, with an error that does not say what to do.
    """
    wanting = any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs)
    if torch.is_grad_enabled() and wanting:
        verdict = no("FP8-P001", why="an input or a parameter requires grad, and grad mode is on")
        log.warning("fp8pass: %s %s; %s", verdict.code, verdict.message, verdict.hint)


def numerics_patches(gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> dict[str, Any]:
    """What Inductor must be told to keep the contract; nothing for a graph without FP8."""
    from fp8pass.lowerings.producers import inductor_patches
    from fp8pass.target import Target

    # codes that come in, and codes that are made here
    values = [node.meta.get("example_value") for node in gm.graph.nodes]
    codes = set(FP8_DTYPES)
    if any("round" in str(node.target) for node in gm.graph.nodes):
        codes.add(torch.int8)  # rounded and then narrowed: an INT8 quantise
    devices = {
        value.device
        for value in [*inputs, *gm.buffers(), *gm.parameters(), *values]
        if isinstance(value, torch.Tensor) and value.dtype in codes
    }
    if len({device.type for device in devices}) != 1:
        return {}
    if options.target is not None:
        target = Target.parse(options.target)
        if target.device_type == min(devices, key=str).type:
            return inductor_patches(target, options)
    return inductor_patches(Target.detect(min(devices, key=str)), options)


def two_hooks(options: Options, patches: Mapping[str, Any]) -> tuple[Any, Any]:
    """The passes of the two hooks of ``backend="fp8pass"``, each chained to what is there."""
    from fp8pass.passes import Fp8Pass

    return (
        Fp8Pass(options, "joint", existing_passes("joint_custom_pre_pass", patches)),
        Fp8Pass(options, "post", existing_passes("post_grad_custom_post_pass", patches)),
    )


def compile_key(gm: fx.GraphModule, inputs: Sequence[Any], identity: Any) -> str | None:
    """A name for this very compile, by which its report is found again after a cache hit.

    The graph's code, the inputs' metadata and the identity of the pass; None if caches are off.
    """
    import torch._inductor.config as inductor

    if inductor.force_disable_caches or identity[0] is None or identity[1] is None:
        return None
    digest = hashlib.sha256()
    text = gm.print_readable(print_output=False, include_stride=True)
    # without the comments, which say where in a file the code stood: Inductor's key has none either
    code = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    digest.update("\n".join(code).encode())
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for i, value in enumerate(inputs):
        if isinstance(value, torch.Tensor):
            # what was captured: the sizes of this call stand for others where one is symbolic
            seen = placeholders[i].meta.get("example_value") if i < len(placeholders) else None
            sizes = seen if isinstance(seen, torch.Tensor) else value
            facts = (
                str(tuple(sizes.shape)),
                str(tuple(sizes.stride())),
                str(value.dtype),
                str(value.device),
                str(value.requires_grad),
            )
        else:
            facts = (str(type(value)), str(value), "", "", "")
        digest.update(repr(facts).encode())
    digest.update(repr((identity, torch.is_grad_enabled())).encode())
    return digest.hexdigest()


def inductor_options(base: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Options for ``torch.compile(model, options=fp8pass.inductor_options())``.

    Everything happens in one hook, after Inductor's joint passes.

    Args:
        base: further options of Inductor to keep; a pass that is set there, or in Inductor's
            configuration, runs before ours. Ours may be among them, with the prefix
            ``"fp8pass."``; an argument wins.
        options: fields of :class:`fp8pass.Options`.

    Returns:
        ``base`` with ``post_grad_custom_post_pass`` set.

    Raises:
        OptionError: a bad option, named.
    """
    from fp8pass.passes import Fp8Pass
    from fp8pass.report.collector import expect

    merged = dict(base or {})
    for name in [name for name in merged if str(name).startswith(PREFIX)]:
        options.setdefault(name.removeprefix(PREFIX), merged.pop(name))
    resolved = Options.resolve(**options)
    before = existing_passes("post_grad_custom_post_pass", merged)
    ours = Fp8Pass(resolved, "all", before)
    merged["post_grad_custom_post_pass"] = ours
    expect(ours.identity_text())
    return merged
