"""``fp8pass.explain``: compile up to code generation and say what was done at every site."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

from fp8pass.options import Options
from fp8pass.report import Report


def explain(model: Callable[..., Any], *inputs: Any, **options: Any) -> Report:
    """What ``torch.compile(model, backend="fp8pass")`` does with ``model(*inputs)``.

    Captures the model, runs Inductor's graph passes and ours, and stops before any code is
    generated, with all caches off, so it is quick and always fresh. Nothing is left compiled, and
    Dynamo is reset: what was compiled before compiles once more when it is next called.

    Args:
        model: a module or function.
        inputs: positional inputs of one call.
        options: fields of :class:`fp8pass.Options`; ``kwargs`` (a dict) gives keyword inputs,
            ``dynamic`` is that of ``torch.compile``.

    Returns:
        one report over all graphs of the model.

    Raises:
        OptionError: a bad option, named.
        NoKernelError: a forced kernel cannot take a site.
    """
    import torch._dynamo
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    from fp8pass.report import merge
    from fp8pass.report.collector import collecting

    keywords = options.pop("kwargs", {})
    dynamic = options.pop("dynamic", None)
    resolved = Options.resolve(**options)
    parts: list[Report] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        from fp8pass.backend import numerics_patches, two_hooks

        joint, post = two_hooks(resolved, {})
        patches = {
            **numerics_patches(gm, example_inputs, resolved),
            "joint_custom_pre_pass": joint,
            "post_grad_custom_post_pass": post,
        }
        with collecting(None, uuid=post.identity_text()) as report:
            result = _compile_without_code(gm, example_inputs, patches)
        parts.append(report)
        return result

    caches = inductor.patch(force_disable_caches=True)
    autograd_cache = functorch.patch(enable_autograd_cache=False)
    torch._dynamo.reset()
    try:
        with torch.no_grad(), caches, autograd_cache, warnings.catch_warnings():
            # that switching the caches off switches off Dynamo's too is what is wanted
            warnings.filterwarnings("ignore", message=".*dynamo_pgo.*")
            torch.compile(model, backend=backend, dynamic=dynamic)(*inputs, **keywords)
    except Exception as error:
        raise _ours(error) from error
    finally:
        torch._dynamo.reset()
    if not parts:
        return Report(note="no graph was captured: the model runs no torch operator")
    report = merge(parts)
    tell_unmatched(report)
    return report


def tell_unmatched(report: Report) -> None:
    """One warning for each selector that is about no site of a model, all graphs of which are here.

    ``torch.compile`` never knows that it has seen the last graph: there the report alone says so.
    """
    from fp8pass.tuning.session import tell_once

    for item in report.unmatched:
        tell_once(f"option {item} matched no site")


def _ours(error: Exception) -> Exception:
    """The error of fp8pass inside one that Dynamo wrapped around it."""
    from fp8pass.errors import Fp8PassError

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, Fp8PassError):
            return cause
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    return error


def _compile_without_code(
    gm: fx.GraphModule, example_inputs: Sequence[Any], patches: dict[str, Any]
) -> Callable[..., Any]:
    """``compile_fx`` with an inner compiler that runs the post-grad passes and then the graph."""
    import torch._inductor.compile_fx as inductor
    import torch._inductor.config as config

    def inner(graph: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        from torch._functorch.aot_autograd import make_boxed_func
        from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
        from torch._inductor.virtualized import V

        fake_mode = torch._guards.detect_fake_mode(inputs)
        with V.set_fake_mode(fake_mode):
            view_to_reshape(graph)
            post_grad_passes(graph, is_inference=True)
        graph.recompile()
        return cast(Callable[..., Any], make_boxed_func(graph.forward))

    with config.patch(patches):
        compiled: Any = inductor.compile_fx(gm, example_inputs, inner_compile=inner)  # type: ignore[arg-type]
        return cast(Callable[..., Any], compiled)
