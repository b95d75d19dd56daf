"""Identity: what makes two compiles the same for a cache - source, versions, options, target."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fp8pass.target import Target

#: Files of the package that decide what is emitted or how it computes.
_SUFFIXES = (".py", ".cpp", ".h", ".json")


@lru_cache(maxsize=1)
def source_hash() -> str:
    """SHA-256 over the source of the installed package; computed once per process."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in _SUFFIXES and path.is_file() and "demo" not in path.parts:
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def identity(
    options_key: tuple[Any, ...], stage: str, device: str | None, measured: str = ""
) -> tuple[Any, ...]:
    """Plain data that changes whenever a rewrite could: for ``uuid()`` of the pass.

    The target is resolved here if the options name none, because the same model on another machine
    is another compile; and each time, because a library may be loaded between two compiles.
    ``measured`` identifies the measurements that a choice may use.
    """
    from fp8pass._version import __version__
    from fp8pass.errors import OptionError
    from fp8pass.lowerings.registry import registered_elsewhere
    from fp8pass.target import Target

    named = dict(options_key).get("target")
    try:
        target = (_parsed(named) if named else Target.detect(device)).key()
    except OptionError as error:  # a device that has no target: the pass will leave its graphs
        target = (str(error),)
    return (
        "fp8pass",
        __version__,
        source_hash(),
        str(torch.__version__),
        stage,
        options_key,
        target,
        registered_elsewhere(),
        measured,
    )


@lru_cache(maxsize=64)
def _parsed(name: str) -> Target:
    from fp8pass.target import Target

    return Target.parse(name)
