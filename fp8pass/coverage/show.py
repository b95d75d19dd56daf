"""The result of ``fp8pass coverage`` on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def failures(data: Mapping[str, Any]) -> list[str]:
    """What makes the command fail: one line per required cell that falls short."""
    return [
        f"{cell['family']} {cell['recipe']}: {cell['shortfall']}"
        for cell in data["cells"]
        if cell["required"] and cell["shortfall"]
    ]


def show(data: Mapping[str, Any], console: Console) -> None:
    """One row per family and recipe, the pairs that are not fused, and what fails."""
    from rich.table import Table

    table = Table("family", "recipe", "pairs fused", "products lowered", "result")
    for cell in data["cells"]:
        pairs, gemms = cell["pairs"], cell["gemms"]
        result = cell["shortfall"] or "ok"
        table.add_row(
            cell["family"],
            cell["recipe"],
            f"{pairs['fused']}/{pairs['expected']}",
            f"{gemms['lowered']}/{gemms['expected']}",
            result if cell["required"] or result == "ok" else f"{result} (not required)",
        )
    console.print(table)
    for cell in data["cells"]:
        for pair in cell["missing"] if cell["required"] else ():
            line = f"{cell['family']} {cell['recipe']} {pair['producer']}: "
            console.print(f"{line}{pair['code']} {pair['message']}", markup=False, highlight=False)
    for line in failures(data):
        console.print(f"below the limit: {line}", markup=False, highlight=False)
