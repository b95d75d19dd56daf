"""Launching a Triton kernel with fixed constants at little cost to the host.

Triton's own launch finds the compiled code by a text of every constant and option, which takes 25
microseconds for a kernel with twenty of them: as long as a small product runs. Here the constants
belong to a :class:`Launcher`, which finds the compiled code by what Triton specialises run-time
arguments for, and calls it. Anything out of the ordinary goes Triton's own way.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from fp8pass.kernels.triton_rounding import NATIVE

_INT32 = 2**31


class Launcher:
    """``kernel`` with values for all of its constants, which come last in its signature.

    Args:
        kernel: a ``triton.jit`` function.
        constants: values by name for each ``tl.constexpr`` parameter, and launch options.
    """

    __slots__ = ("_constants", "_kernel", "_known", "_plain", "_tail")

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self._kernel = kernel
        self._constants = constants
        self._known: dict[Any, Any] = {}
        names = [p.name for p in getattr(kernel, "params", ())]
        given = [name for name in names if name in constants]
        # interpreted, or constants that are not the last parameters: Triton's own way
        self._plain = not NATIVE.value or not given or names[-len(given) :] != given
        self._tail = tuple(constants[name] for name in given)

    def __call__(self, programs: int, *args: Any) -> None:
        """Run ``programs`` programs on the current stream of the current device."""
        if self._plain:
            self._kernel[(programs,)](*args, **self._constants)
            return
        key: list[Any] = [torch.cuda.current_device()]
        for arg in args:
            if isinstance(arg, torch.Tensor):
                key.append(arg.dtype)
                key.append(arg.data_ptr() % 16 == 0)
            elif type(arg) is int:
                # what makes another type or another specialisation of it
                narrow = -_INT32 <= arg < _INT32
                key.append((arg == 1, arg % 16 == 0, narrow or (arg >= 0, arg < 2 * _INT32**2)))
            else:
                key.append(type(arg))
        found = tuple(key)
        compiled = self._known.get(found)
        if compiled is None:
            compiled = self._kernel[(programs,)](*args, **self._constants)
            if isinstance(compiled, triton.compiler.CompiledKernel):
                self._known[found] = compiled
            return
        compiled[(programs, 1, 1)](*args, *self._tail)


_launchers: dict[Any, Launcher] = {}


def launcher(kernel: Any, **constants: Any) -> Launcher:
    """The launcher for a kernel and its constants, made once."""
    key = (id(kernel), *constants.items())
    found = _launchers.get(key)
    if found is None:
        found = _launchers[key] = Launcher(kernel, constants)
    return found
