"""The entry point of vLLM's plugins: adds the pass to every configuration that asks for it.

vLLM calls :func:`register` in each of its processes. It wraps one function, the end of
``VllmConfig.__post_init__``: there the configuration is whole, still in the main process, and what
it holds is pickled into every worker and hashed into the key of vLLM's compile cache. Nothing else
of vLLM is touched: a pass that came in by another way would be missing in that key, and an artifact
made without it would be loaded.
"""

from __future__ import annotations

import functools
import multiprocessing
import sys
from pathlib import Path
from typing import Any

from fp8pass.vllm.asking import Asked, asked
from fp8pass.vllm.versions import log, missing_in, stands_aside

_MARK = "__fp8pass_wrapped__"


def register() -> None:
    """What vLLM calls in each process, perhaps more than once.

    Where nothing asks in the environment, vLLM is not imported and nothing is logged; a
    configuration that is made later may still ask, so what is imported already is wrapped.

    Raises:
        OptionError: ``FP8PASS_VLLM`` has a bad value.
    """
    now = asked() is not None
    if not now:
        module = sys.modules.get("vllm.config")
        config = getattr(module, "VllmConfig", None)
    else:
        if stands_aside():
            return
        import fp8pass.ops  # noqa: F401  (an artifact from vLLM's cache calls these operators)

        config = _vllm_config()
    if config is not None:
        _wrap(config)


def _vllm_config() -> Any:
    """``VllmConfig``, or None with one line if this vLLM has none."""
    try:
        from vllm.config import VllmConfig
    except ImportError as error:
        log.warning("fp8pass does nothing: this vLLM has no VllmConfig (%s)", error)
        return None
    return VllmConfig


def _wrap(config: Any) -> None:
    original = vars(config).get("__post_init__")
    if original is None or getattr(original, _MARK, False):
        if original is None and asked() is not None:
            log.warning("fp8pass does nothing: VllmConfig has no __post_init__")
        return

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        request = asked(getattr(self, "additional_config", None))
        if request is not None:
            add_pass(self, request)

    setattr(wrapped, _MARK, True)
    config.__post_init__ = wrapped


def add_pass(vllm_config: Any, request: Asked) -> bool:
    """Put the pass into a whole ``VllmConfig``; whether it is there now.

    A pass of the user in the same slot runs first, under one joint identity. A configuration that
    has fp8pass's pass already, in whichever slot, is left as it is.

    Raises:
        OptionError: an option of the request is bad.
    """
    if stands_aside():
        return False
    from vllm.compilation.passes.inductor_pass import InductorPass

    compilation = vllm_config.compilation_config
    lacks = missing_in(type(vllm_config), InductorPass)
    passes = getattr(compilation, "inductor_compile_config", None)
    if lacks or not isinstance(passes, dict):
        log.warning("fp8pass does nothing: %s", lacks or "there is no inductor_compile_config")
        return False
    off = not_compiled(compilation)
    if off:
        _once(f"fp8pass ({request.mode}): nothing is done, because {off}")
        return False

    import fp8pass.ops  # noqa: F401
    from fp8pass.options import Options
    from fp8pass.vllm.vllm_pass import VllmPass

    if any(isinstance(value, VllmPass) for value in passes.values()):
        return True
    options = Options.resolve(**request.options)
    folder = getattr(compilation, "debug_dump_path", None)
    debug = str(Path(folder) / "fp8pass") if folder else None
    before = passes.get(request.slot)
    if before is not None and not isinstance(before, InductorPass):
        log.warning(
            "fp8pass does nothing: the slot %s holds %r, which is no InductorPass",
            request.slot,
            before,
        )
        return False
    passes[request.slot] = VllmPass(
        options, before=() if before is None else (before,), mode=request.mode, debug=debug
    )
    return True


def not_compiled(compilation: Any) -> str:
    """Why vLLM will run no pass of Inductor under this ``CompilationConfig``; "" if it will."""
    mode = getattr(compilation, "mode", None)
    name = getattr(mode, "name", str(mode))
    if mode is None or name == "NONE":
        return "the model is not compiled (eager mode)"
    if name == "STOCK_TORCH_COMPILE":
        return "compilation mode 1 takes no passes"
    backend = getattr(compilation, "backend", "")
    if backend not in ("", "inductor"):
        return f"the compilation backend is {backend!r}, not Inductor"
    return ""


@functools.cache
def _once(line: str) -> None:
    """Log a line once, and not again in the processes that build the configuration anew."""
    if multiprocessing.parent_process() is None:
        log.info("%s", line)
