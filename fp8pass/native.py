"""Compiling C++ at run time: which compilers, where results are kept, and one build of each."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)

#: Seconds after which a compiler is given up.
_TIMEOUT = 300


def compilers() -> list[str]:
    """Compilers to try: the one Inductor is configured for, then the usual names."""
    names: list[str | None] = []
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        names.append(get_cpp_compiler())
    except Exception as e:  # noqa: BLE001 - none found, or another torch: the usual names follow
        log.debug("Inductor names no C++ compiler: %s", e)
    names += [os.environ.get("CXX"), "c++", "g++", "clang++"]
    return list(dict.fromkeys(path for name in names if name and (path := shutil.which(name))))


def cache_folder() -> Path:
    """Where compiled libraries are kept: a folder of ours in Inductor's cache."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "fp8pass"


def run(command: Sequence[str]) -> str:
    """The standard output of a compiler; raises OSError or SubprocessError if it fails."""
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT)
    return done.stdout


def shared_library(folder: Path, stem: str, key: Sequence[str], command: Sequence[str]) -> Path:
    """The library that ``command`` (without ``-o``) makes, from ``folder`` or made now.

    Args:
        folder: where it is kept; made if missing.
        stem: first part of its name; the rest is a hash of ``key``.
        key: all that decides what the library does.

    Raises:
        OSError, subprocess.SubprocessError: the compiler is missing or failed.
    """
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:24]
    target = folder / f"{stem}_{digest}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    # Processes that build at the same time each make their own file; the last rename wins.
    handle, scratch = tempfile.mkstemp(dir=folder, suffix=".tmp")
    os.close(handle)
    try:
        run([*command, "-o", scratch])
        os.replace(scratch, target)
    finally:
        Path(scratch).unlink(missing_ok=True)
    return target


def told(error: Exception) -> str:
    """What a compiler that failed said, its end."""
    return (getattr(error, "stderr", None) or str(error)).strip()[-400:]
