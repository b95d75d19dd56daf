"""Numbers and JSON that come from outside (files, command lines): read strictly, or a ValueError.

Python's own readers take more than is meant: ``int`` takes digits of every script, signs, spaces
and underscores, and JSON's reader takes ``NaN``, ``1e999`` and numbers that no float holds. All of
that is refused here, in one line that names it.
"""

from __future__ import annotations

import json
import math
import os
import re
from typing import Any

#: The largest size that torch can have.
LARGEST = 2**63 - 1


def whole_number(text: str) -> int:
    """The whole number >= 0 that ``text`` writes in ASCII digits.

    Raises:
        ValueError: anything else, or more than :data:`LARGEST`.
    """
    if re.fullmatch("[0-9]{1,19}", text) is None or int(text) > LARGEST:
        raise ValueError(f"{shortened(text)} is not a whole number from 0 to {LARGEST}")
    return int(text)


def count_of(value: Any, name: str) -> int:
    """A whole number >= 0 out of JSON. Raises ValueError naming ``name`` for anything else."""
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise ValueError(f"{name} is {shortened(value)}, not a whole number from 0 to {LARGEST}")
    return value


def amount_of(value: Any, name: str) -> float:
    """A finite number >= 0 out of JSON. Raises ValueError naming ``name`` for anything else."""
    if type(value) is float and math.isfinite(value) and value >= 0:
        return value
    if type(value) is int and 0 <= value <= LARGEST:
        return float(value)
    raise ValueError(f"{name} is {shortened(value)}, not a finite number >= 0")


def json_of(text: str) -> Any:
    """The data of a JSON text.

    Raises:
        ValueError: no JSON, or what is nested too deeply to be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def why_no_path(text: str) -> str:
    """Why no file system can have a file of this name, in words; ``""`` if one might."""
    if "\0" in text:
        return "it has a character 0 in it"
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return "it has characters that no file name can have"
    return ""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, shortened."""
    lines = str(error).splitlines()
    return lines[0][:200] if lines else type(error).__name__


def shown(path: str | os.PathLike[str]) -> str:
    """A path for a message: as it is, if that is one line and not too long."""
    text = os.fspath(path)
    return text if text.isprintable() and len(text) <= 200 else shortened(text)


def shortened(value: Any) -> str:
    """``repr`` of a value for a message, shortened; never raises for a number that is too long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no int of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"
