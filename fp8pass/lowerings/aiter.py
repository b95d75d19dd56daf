"""What the kernels of AITER, AMD's library of operators, share."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from fp8pass.lowerings import conditions as need
from fp8pass.reasons import Verdict
from fp8pass.target import Target

LIBRARY = "aiter"
#: Its compiled products have code for these alone; a launch elsewhere crashes the process.
ARCHITECTURES = ("gfx942", "gfx950")
RESULTS = (torch.bfloat16, torch.float16)
PROVENANCE = "not run on hardware (rules read in AITER's source)"


def requirements(kernel: str, target: Target) -> Verdict:
    """An architecture that AITER is built for, and AITER."""
    known = need.architecture(kernel, target, ARCHITECTURES)
    return known and need.library(kernel, target, LIBRARY)


def native(target: Target) -> tuple[torch.dtype, ...]:
    """The FP8 dtype of the device, which is the one that AITER is built for."""
    return () if target.fp8_dtype is None else (target.fp8_dtype,)


def find(name: str, *modules: str) -> Any:
    """``module.name`` of the first module that has it: functions move between versions.

    Raises:
        UnsupportedError: none has it; a graph from a cache that was made where one had.
    """
    for module in modules:
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError:
            continue
        if found is not None:
            return found
    from fp8pass.errors import UnsupportedError

    raise UnsupportedError(
        f"this graph was compiled with AITER, of which {name} is not there "
        f"(looked for in {', '.join(modules)})"
    )


def full_scale(scale: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """A scale as one number for each row or column, contiguous: the kernels read that many."""
    return scale.expand(shape).contiguous()
