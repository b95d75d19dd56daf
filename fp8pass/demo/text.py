"""The prose that the demo reads: chapters of a novel in the public domain (see data/NOTICE)."""

from __future__ import annotations

from importlib.resources import files

#: What the report calls the text.
SOURCE = "Northanger Abbey by Jane Austen (1817), chapters 1 to 8; public domain, from Debian"

_CHAPTER = "CHAPTER "


def chapters() -> list[str]:
    """The chapters in order, each without its heading; one line per paragraph, empty lines between.

    Raises:
        FileNotFoundError: the package was installed without its data.
    """
    text = files("fp8pass.demo").joinpath("data", "northanger_abbey.txt").read_text("utf-8")
    parts = text.split(_CHAPTER)[1:]
    return [part.partition("\n")[2].strip() for part in parts]


def calibration_text() -> str:
    """What a static recipe is calibrated on: the first chapter, never measured."""
    return chapters()[0]


def measured_text() -> str:
    """What perplexity is measured on: all chapters after the first."""
    return "\n\n".join(chapters()[1:])
