"""Measurements on disk: one readable JSON file for each device and set of versions.

A file says what it was measured on, and counts only where all of that is equal; anything else
(another device, another version, a damaged file, another schema) is passed over with one line, and
never raises: a measurement that cannot be had costs speed, not a compile. Writing takes a lock,
reads what others wrote meanwhile, merges, and replaces the file at once, so that processes may
measure side by side. Loading executes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8pass.outside import first_line, json_of, shown
from fp8pass.report.files import slug, write_atomic
from fp8pass.tuning.measured import Record

try:
    import fcntl
except ImportError:  # no such locks on this system: the replacement is still atomic
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("fp8pass")

SCHEMA = 1
_told: set[str] = set()


def default_folder() -> Path:
    """Where measurements lie unless the option ``tune_cache`` says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "fp8pass" / "tuning"


def file_for(folder: Path, identity: dict[str, Any]) -> Path:
    """The file of a device: its name, its architecture, and a hash of everything that counts."""
    text = json.dumps(identity, sort_keys=True)
    tag = hashlib.sha256(text.encode()).hexdigest()[:12]
    name = slug(f"{identity.get('device', '')}")[:60]
    return folder / f"{name}-{identity.get('arch', '')}-{tag}.json"


def load(path: Path, identity: dict[str, Any]) -> dict[str, Record]:
    """The records of a file; none if there is none or it does not count, which is said once."""
    try:
        return parse(path.read_text(encoding="utf-8"), identity)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except UnicodeDecodeError:
        why = "it is not text"
    except OSError as error:
        why = f"{type(error).__name__}: {error.strerror}"
    except Exception as error:  # whatever is wrong with it, it costs speed and not a compile
        why = f"{type(error).__name__}: {first_line(error)}"
    tell_once(f"measurements in {shown(path)} are not used: {why}")
    return {}


def parse(text: str, identity: dict[str, Any]) -> dict[str, Record]:
    """Records from the text of a file.

    Raises:
        ValueError: not such a text, another schema, or measured on something else, which the
            message names.
    """
    data = json_of(text)
    try:
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']!r}, this version reads {SCHEMA}")
        has = data["measured_on"]
        for name in sorted({*has, *identity}):
            if has.get(name) != identity.get(name):
                raise ValueError(
                    f"measured with {name} {has.get(name)!r}, here it is {identity.get(name)!r}"
                )
        return {str(key): Record.from_dict(item) for key, item in data["products"].items()}
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"it holds no measurements: {error!r}") from error


def render(records: dict[str, Record], identity: dict[str, Any], method: dict[str, Any]) -> str:
    """The text of a file."""
    data = {
        "schema": SCHEMA,
        "measured_on": identity,
        "method": method,
        "products": {key: record.to_dict() for key, record in sorted(records.items())},
    }
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def save(
    path: Path, identity: dict[str, Any], records: dict[str, Record], method: dict[str, Any]
) -> dict[str, Record]:
    """Merge ``records`` into the file; what it then holds (with ``records`` alone if not saved)."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            found = load(path, identity)
            for key, record in records.items():
                found[key] = found[key].merged(record) if key in found else record
            write_atomic(path, render(found, identity, method))
            return found
    except (OSError, ValueError) as error:  # ValueError: no file can have such a name
        why = getattr(error, "strerror", None) or first_line(error)
        tell_once(f"measurements are not kept, {shown(path.parent)} cannot be written: {why}")
        return dict(records)


def is_folder(place: Path) -> bool:
    """Whether there is such a folder; where something else is wrong than that it was not made yet,
    that is said once."""
    try:
        if stat.S_ISDIR(os.stat(place).st_mode):
            return True
        why = "it is no folder"
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
    tell_once(f"no measurements are used, {shown(place)} cannot be read: {why}")
    return False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone among the processes that hold this lock; a process that dies gives it back."""
    with open(path, "a", encoding="utf-8") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tell_once(message: str) -> None:
    """One line in the log, once per process."""
    if message not in _told:
        _told.add(message)
        log.warning("fp8pass: %s", message)
