"""Small file helpers that reports, dumps and the store share: atomic writes, safe names."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from pathlib import Path

_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,119}")


def write_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` (UTF-8) so that readers see the old file or the new one, never a part.

    The text goes to a temporary file in the same folder and is renamed over ``path``; the folder
    is created if missing. Not ``tempfile.mkstemp``: its files are readable by their owner alone,
    and a dump made inside a container is often read by somebody else.

    Raises:
        OSError: the folder or the file cannot be written; an existing ``path`` is left as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8", errors="backslashreplace", newline="\n") as f:
            f.write(text)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def safe_name(text: str) -> str:
    """``text`` if it can be a file name on every system, else a hash of it."""
    if _SAFE.fullmatch(text):
        return text
    return "h" + hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:40]


def slug(text: str) -> str:
    """``text`` with everything but letters, digits, ``_`` and ``.`` turned into ``_``."""
    return re.sub(r"[^A-Za-z0-9_.]+", "_", text).strip("._") or "graph"
