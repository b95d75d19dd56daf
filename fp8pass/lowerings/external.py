"""What kernels of other libraries share: the library is asked for and imported here.

Nothing is imported before a kernel is called. A target that was parsed has the libraries that its
name lists; one that was detected those that are loaded (vLLM's operators) or installed.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch

from fp8pass.errors import UnsupportedError
from fp8pass.lowerings import conditions as need
from fp8pass.reasons import YES, Verdict, no
from fp8pass.target import Target


def requirements(
    kernel: str, target: Target, architectures: tuple[str, ...], library: str, what: str
) -> Verdict:
    """The architecture is one of those given, and the target has the library, ``what`` in words."""
    found = need.architecture(kernel, target, architectures)
    if found and not target.has_library(library):
        return no("FP8-L011", kernel=kernel, wants=what, target=target.spec)
    return found


def not_older(kernel: str, target: Target, library: str, major: int) -> Verdict:
    """The library's version, where it is known, has at least this first number."""
    version = dict(target.libraries).get(library, "")
    first = version.split(".")[0]
    if first.isdigit() and int(first) < major:
        return no(
            "FP8-L011", kernel=kernel, wants=f"{library} {major} or newer",
            target=f"{target.spec} with {library} {version}",
        )  # fmt: skip
    return YES


@cache
def function(module: str, name: str) -> Any:
    """``module.name``, imported on the first call.

    Raises:
        UnsupportedError: the library is absent, cannot be imported or has no such function, which
            is how an older version shows.
    """
    try:
        found = importlib.import_module(module)
    except Exception as error:  # whatever an extension module raises when it cannot be loaded
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UnsupportedError(
            f"this graph was compiled with {module}, which cannot be imported: {text}"
        ) from error
    value = getattr(found, name, None)
    if value is None:
        raise UnsupportedError(
            f"this graph was compiled with {module}.{name}, which the installed version does not "
            "have: another version is needed"
        )
    return value


def vllm_operator(name: str) -> Any:
    """``torch.ops._C.<name>``.

    Raises:
        UnsupportedError: vLLM's library is not loaded in this process (a graph from a cache that
            was made in one where it was).
    """
    op = getattr(torch.ops._C, name, None)
    if op is None:
        raise UnsupportedError(
            "this graph was compiled with vLLM's kernels: load its library "
            f"(import vllm._custom_ops) before running it; {name} is not there"
        )
    return op
