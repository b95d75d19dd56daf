"""Small file helpers that reports, dumps and the store share: atomic writes, safe names."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from pathlib import Path

from fp8pass.errors import OptionError
from fp8pass.outside import first_line, shown

_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,119}")


def write_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` (UTF-8) so that readers see the old file or the new one, never a part.

    The text goes to a temporary file in the same folder and is renamed over ``path``; the folder
    is created if missing. A link, and what is no regular file (``/dev/stdout``), must not be
    replaced, and is written into. Not ``tempfile.mkstemp``: its files are readable by their owner
    alone, and a dump made inside a container is often read by somebody else.

    Raises:
        OSError: the folder or the file cannot be written; an existing ``path`` is left as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        with open(path, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as f:
            f.write(text)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8", errors="backslashreplace", newline="\n") as f:
            f.write(text)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_writable(path: str | os.PathLike[str]) -> None:
    """Whether a file that was named on a command line can be written, before minutes of work.

    Makes no folder, since a path that has none is most often a slip, and leaves no new file behind.

    Raises:
        OptionError: it cannot, and why.
    """
    path = Path(path)
    try:
        found = path.parent.is_dir()
        if found:
            existed = path.exists()
            with open(path, "a", encoding="utf-8"):
                pass
            if not existed:
                path.unlink()
    except (OSError, ValueError) as error:  # ValueError: no file can have such a name
        why = getattr(error, "strerror", None) or first_line(error)
        raise OptionError(f"{shown(path)} cannot be written: {why}") from error
    if not found:
        raise OptionError(f"{shown(path)} cannot be written: its folder does not exist")


def safe_name(text: str) -> str:
    """``text`` if it can be a file name on every system, else a hash of it."""
    if _SAFE.fullmatch(text):
        return text
    return "h" + hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:40]


def slug(text: str) -> str:
    """``text`` with everything but letters, digits, ``_`` and ``.`` turned into ``_``."""
    return re.sub(r"[^A-Za-z0-9_.]+", "_", text).strip("._") or "graph"
