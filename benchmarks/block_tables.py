"""The tables of ``block.py``, made from its cells: plain data, as they stand in its JSON file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from block_variants import VARIANTS
from gpu_timing import table

#: Stands for a value that there is not.
ABSENT = "-"


def render(cells: Sequence[dict[str, Any]]) -> str:
    """Everything that was found, as text; the times come last."""
    details, times = [], []
    for recipe in dict.fromkeys(cell["recipe"] for cell in cells):
        mine = [cell for cell in cells if cell["recipe"] == recipe]
        names = list(mine[0]["variants"])
        details += [f"\n{recipe}: kernels chosen by fp8pass", *chosen_lines(mine)]
        for field, head in (
            ("compile_s", "seconds of the first call, nothing cached (processes side by side)"),
            ("first_call_s", "seconds of the first call in this process"),
            ("kernels", "kernels per block"),
            ("error", "relative L2 distance from float64"),
        ):
            if any(field in entry for cell in mine for entry in cell["variants"].values()):
                details.append(f"\n{recipe}: {head}\n{field_table(mine, names, field)}")
        if "inductor" in names:
            times.append(f"\n{recipe}: time / time of inductor\n{ratio_table(mine, names)}")
        times.append(f"\n{recipe}: microseconds per block\n{times_table(mine, names)}")
    return "\n".join(details + times)


def _times(cell: dict[str, Any]) -> dict[str, float]:
    return {name: entry["us"] for name, entry in cell["variants"].items() if "us" in entry}


def _ratio(value: float | None, base: float | None) -> str:
    return ABSENT if value is None or base is None else f"{value / base:.3f}"


def times_table(cells: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Medians, the best peer, and how many times faster than it each variant of fp8pass is."""
    ours = [name for name in names if VARIANTS[name].backend == "fp8pass"]
    rows = []
    for cell in cells:
        us = _times(cell)
        peers = [name for name in us if VARIANTS[name].peer]
        best = min(peers, key=lambda name: us[name], default=ABSENT)
        row = [cell["rows"], *(us.get(name, ABSENT) for name in names), cell["floor_us"], best]
        rows.append([*row, *(_ratio(us.get(best), us.get(name)) for name in ours)])
    return table(["M", *names, "floor", "best peer", *(f"it/{name}" for name in ours)], rows)


def ratio_table(cells: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Time of each variant by that of stock Inductor; below 1 is faster."""
    rows = []
    for cell in cells:
        us = _times(cell)
        rows.append([cell["rows"], *(_ratio(us.get(name), us.get("inductor")) for name in names)])
    return table(["M", *names], rows)


def field_table(cells: Sequence[dict[str, Any]], names: Sequence[str], field: str) -> str:
    """One value of each variant."""
    digits = 4 if field == "error" else 2
    rows = []
    for cell in cells:
        values = [cell["variants"][name].get(field, ABSENT) for name in names]
        texts = [f"{v:.{digits}f}" if isinstance(v, float) else str(v) for v in values]
        rows.append([cell["rows"], *texts])
    return table(["M", *names], rows)


def chosen_lines(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Which kernels fp8pass took for qkv, o, gate_up, down, and for their producers."""
    groups: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        for name, entry in cell["variants"].items():
            if entry.get("chosen"):
                found = entry["chosen"]
                text = f"{', '.join(found['products'])} | {', '.join(found['producers'])}"
                text += "".join(f"\n      {problem}" for problem in found["problems"])
                groups.setdefault((name, text), []).append(str(cell["rows"]))
    return [f"  {name} M {','.join(rows)}: {text}" for (name, text), rows in groups.items()]


def failures(cells: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each variant that raised or is wrong."""
    return [
        f"{cell['recipe']} M {cell['rows']} {name}: {entry['failed']}"
        for cell in cells
        for name, entry in cell["variants"].items()
        if "failed" in entry
    ]


def kernel_lines(cell: dict[str, Any], most: int = 14) -> list[str]:
    """The longest kernels of each variant."""
    lines = []
    for name, entry in cell["variants"].items():
        lines.append(f"\n{cell['recipe']} M {cell['rows']}: {name}, microseconds per block")
        for item in entry.get("by_kernel", [])[:most]:
            lines.append(f"  {item['us']:8.2f}  {item['calls']:5.2f} x  {item['name'][:110]}")
    return lines
