"""Spelling x granularity: which of the test suite's spellings are fused with which quantises.

The spellings live with the tests, so this table can only be made in a checkout.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

_TESTS = Path(__file__).resolve().parents[2] / "tests"

_HEAD = """## Spellings and granularities

The spellings of `tests/spell.py` in bfloat16: of so many spellings of the quantise, so many are
fused with the producer; the ones that are not are named.

"""


def spellings() -> str:
    """The section, or "" where the tests are not at hand."""
    with _tests() as modules:
        if modules is None:
            return ""
        graphs, spell = modules
        columns: dict[str, list[str]] = defaultdict(list)
        for name, (_, form) in spell.QUANTS.items():
            columns[_granularity(form)].append(name)
        lines = [_row(["producer", *columns]), _row(["---"] * (len(columns) + 1))]
        for kind, name, producer, inputs in _producers(spell):
            cells = []
            for names in columns.values():
                left = [q for q in names if not _fused(graphs, spell, producer, inputs, q)]
                text = f"{len(names) - len(left)}/{len(names)}"
                cells.append(text + (f" (not {', '.join(left)})" if left else ""))
            lines.append(_row([f"{kind} `{name}`", *cells]))
    return _HEAD + "".join(lines)


def _granularity(form: str) -> str:
    """The column of a quantise's form."""
    words = form.split(",")
    return f"{'static' if 'given' in words else 'dynamic'} {words[0]}"


def _producers(spell: Any) -> Iterator[tuple[str, str, Callable[..., Any], int]]:
    """(kind, name, function of its tensors, number of tensors beside a norm's weight)."""
    for name, (function, *_) in spell.NORMS.items():
        yield "norm", name, lambda x, y, w, f=function: f(x, w, 1e-6), 1
    for name, function in spell.ACTIVATIONS.items():
        yield "activation", name, lambda x, y, w, f=function: f(x, y), 2
    for name, (function, *_) in getattr(spell, "ALONE", {}).items():
        yield "activation", name, lambda x, y, w, f=function: f(x), 1


def _fused(graphs: Any, spell: Any, producer: Callable[..., Any], inputs: int, name: str) -> bool:
    """Whether fp8pass fuses the producer with the quantise of that name."""
    quantise = spell.QUANTS[name][0]

    def model(x: Any, y: Any, w: Any, s: Any) -> Any:
        return quantise(producer(x, y, w), s)

    x = torch.empty(4, 256, dtype=torch.bfloat16)
    traced = graphs.trace(model, x, x.clone(), x[0].clone(), torch.ones(()))
    passed = graphs.Passed(traced)
    return any(passed.sites(kind, "fused") for kind in ("norm", "activation"))


def _row(texts: list[str]) -> str:
    return "| " + " | ".join(texts) + " |\n"


@contextlib.contextmanager
def _tests() -> Iterator[tuple[Any, Any] | None]:
    """The modules ``graphs`` and ``spell`` of the tests, importable while this lasts."""
    if not (_TESTS / "spell.py").is_file():
        yield None
        return
    sys.path.insert(0, str(_TESTS))
    try:
        yield importlib.import_module("graphs"), importlib.import_module("spell")
    finally:
        sys.path.remove(str(_TESTS))
