"""A stand-in for the parts of vLLM that fp8pass touches, to test the plugin without it."""

from __future__ import annotations

import enum
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
from torch._inductor.custom_graph_pass import CustomGraphPass


class CompilationMode(enum.IntEnum):
    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


@dataclass
class CompilationConfig:
    mode: CompilationMode = CompilationMode.VLLM_COMPILE
    backend: str = "inductor"
    inductor_compile_config: dict[str, Any] = field(default_factory=dict)
    debug_dump_path: str | None = None


@dataclass
class Range:
    """Numbers of tokens, both ends included."""

    start: int
    end: int


class InductorPass(CustomGraphPass):
    """vLLM's class of passes."""

    def uuid(self) -> Any:
        return type(self).__name__

    def is_applicable_for_range(self, compile_range: Range) -> bool:
        return True


@dataclass
class PassContext:
    compile_range: Range


@dataclass
class FakeVllm:
    """The modules' contents."""

    VllmConfig: Any
    passes: ModuleType

    @contextmanager
    def compiling(self, first: int, last: int) -> Any:
        """As vLLM compiles in mode 3: with a pass context."""
        self.passes._pass_context = PassContext(Range(first, last))  # type: ignore[attr-defined]
        try:
            yield
        finally:
            self.passes._pass_context = None  # type: ignore[attr-defined]


def install(patch: pytest.MonkeyPatch, version: str = "0.32.0") -> FakeVllm:
    """Put the stand-in into ``sys.modules`` for one test, and let fp8pass meet it anew."""

    @dataclass
    class VllmConfig:
        compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
        additional_config: Any = field(default_factory=dict)

        def __post_init__(self) -> None:
            self.done = getattr(self, "done", 0) + 1

    def module(name: str, **contents: Any) -> ModuleType:
        made = ModuleType(name)
        vars(made).update(contents)
        patch.setitem(sys.modules, name, made)
        return made

    passes = module(
        "vllm.compilation.passes.inductor_pass", InductorPass=InductorPass, _pass_context=None
    )
    package = module("vllm.compilation.passes", inductor_pass=passes)
    compilation = module("vllm.compilation", passes=package)
    config = module(
        "vllm.config", VllmConfig=VllmConfig, get_current_vllm_config_or_none=lambda: None
    )
    module("vllm", __version__=version, compilation=compilation, config=config)
    forget(patch)
    return FakeVllm(VllmConfig, passes)


def forget(patch: pytest.MonkeyPatch) -> None:
    """Make fp8pass import and judge vLLM anew, now and after the test."""
    import fp8pass.vllm as package
    from fp8pass.vllm import announcing, plugin, versions

    for name in ("fp8pass_vllm", "fp8pass.vllm.vllm_pass"):
        patch.delitem(sys.modules, name, raising=False)
    patch.delattr(package, "vllm_pass", raising=False)
    versions.stands_aside.cache_clear()
    plugin._once.cache_clear()
    announcing._waiting.clear()
    announcing._ran.clear()
