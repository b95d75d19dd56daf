"""The device that is here: what identifies it, and what the measurements need to know of it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fp8pass.lowerings.registry import registered_elsewhere
from fp8pass.target import HOST, Target

#: Folders of the package whose source decides how fast a kernel is.
_SOURCES = ("kernels", "lowerings")


def live_device(target: Target) -> torch.device | None:
    """The device that ``target`` was detected from, None if there is none of its kind."""
    if target.host:
        return torch.device(HOST)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != target.device_type:
        return None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def identity_of(target: Target) -> dict[str, Any]:
    """Everything that a measurement depends on, as plain data: device, versions, our kernels.

    A measurement counts only where all of it is equal.
    """
    found: dict[str, Any] = {
        "device": _device_name(target.device_type),
        "arch": target.arch,
        "units": target.units,
        "libraries": dict(target.libraries),
        **dict(target.runtime),
        "triton": _version("triton"),
        "kernels": kernels_hash(),
        "other_kernels": dict(registered_elsewhere()),
    }
    if target.host:
        found["threads"] = torch.get_num_threads()
    else:
        found["driver"] = _driver()
    return found


@cache
def _device_name(device_type: str) -> str:
    if device_type != HOST:
        module = torch.get_device_module(device_type)
        return str(module.get_device_name())
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def _driver() -> str:
    version = getattr(torch._C, "_cuda_getDriverVersion", None)
    return "" if version is None else str(version())


@cache
def _version(package: str) -> str:
    for name in (package, f"pytorch-{package}"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


@cache
def kernels_hash() -> str:
    """SHA-256 over the source of the package's kernels, tables apart; computed once."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h") and path.is_file():
                digest.update(str(path.relative_to(root)).encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def prepared_weight(weight: torch.Tensor) -> torch.Tensor:
    """The copy of a ``[N, K]`` weight that :func:`fp8pass.prepare` makes."""
    from fp8pass.kernels import cpu

    return cpu.pack(weight)
