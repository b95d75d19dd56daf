"""docs/add-a-backend.md and the file that it walks through."""

from __future__ import annotations

import re
from pathlib import Path

from fp8pass.identity import identity
from fp8pass.lowerings import find, register, unregister
from fp8pass.lowerings.registry import Kernel, registered_elsewhere

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "add-a-backend.md").read_text()
EXAMPLE = (ROOT / "examples" / "custom_lowering.py").read_text()


def test_five_steps_in_both() -> None:
    assert re.findall(r"^(\d)\. \*\*", PAGE, re.M) == list("12345")
    assert re.findall(r"^# (\d)\. ", EXAMPLE, re.M) == list("12345")
    for path in re.findall(r"`((?:fp8pass|tests|docs)/[\w./]+)`", PAGE):
        assert (ROOT / path).exists(), path


def test_its_source_is_in_the_identity() -> None:
    plain = identity((), "all", None)
    assert registered_elsewhere() == ()
    row = find("torch_row")
    made = Kernel(
        "outside", row.summary, row.kinds, row.requirements, row.can_implement, row.priority,
        lambda graph, site: row.emit(graph, site), row.provenance,
    )  # fmt: skip
    register(made)
    try:
        ((name, digest),) = registered_elsewhere()
        assert name == "outside" and len(digest) == 64
        assert identity((), "all", None) != plain
    finally:
        unregister("outside")
    assert identity((), "all", None) == plain
