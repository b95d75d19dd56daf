"""Triton kernels in Triton's interpreter, beside whatever else the process does with Triton."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

_KERNELS = "fp8pass.kernels.triton_"
_SWITCH = "TRITON_INTERPRET"


Load = Callable[[str], ModuleType]


def _loader(switch: str) -> Load:
    copies: dict[str, ModuleType] = {}
    package = importlib.import_module("fp8pass.kernels")

    def swap(modules: dict[str, ModuleType]) -> dict[str, ModuleType]:
        """Take the kernels' modules out of the process, put ``modules`` in, return the former."""
        former = {n: sys.modules.pop(n) for n in list(sys.modules) if n.startswith(_KERNELS)}
        for name in former:
            package.__dict__.pop(name.rpartition(".")[2], None)
        for name, module in modules.items():
            sys.modules[name] = module
            setattr(package, name.rpartition(".")[2], module)
        return former

    def load(name: str) -> ModuleType:
        outside = swap(copies)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(_SWITCH, switch)
                return importlib.import_module(f"{_KERNELS}{name}")
        finally:
            copies.update(swap(outside))

    return load


@pytest.fixture(scope="session")
def interpreted() -> Load:
    """``interpreted("norm")``: ``fp8pass.kernels.triton_norm`` with interpreted kernels.

    Triton decides when it decorates a function whether that will be compiled or interpreted. So the
    modules are imported once more, with the switch on, as copies that only the tests see: neither
    the switch nor the copies stay, and kernels of Inductor or of a GPU in this process are compiled
    as always.
    """
    pytest.importorskip("triton")
    return _loader("1")


@pytest.fixture(scope="session")
def compilable() -> Load:
    """As :func:`interpreted`, with kernels that Triton compiles, whatever the process has set."""
    pytest.importorskip("triton")
    return _loader("0")
