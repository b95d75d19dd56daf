"""The committed results of ``fp8pass coverage``: small enough to be read in a diff.

fp8pass coverage --json out.json --markdown docs/coverage.md
python tests/coverage_golden.py out.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent / "golden" / "coverage.json"


def compact(cell: dict[str, Any]) -> dict[str, Any]:
    """What of a cell is committed: counts, and one line per refusal."""
    pairs, gemms = cell["pairs"], cell["gemms"]
    result = {
        "pairs": f"{pairs['fused']}/{pairs['expected']}",
        "gemms": f"{gemms['lowered']}/{gemms['expected']}",
        "missing": [f"{m['producer']} {m['code']} {m['message']}" for m in cell["missing"]],
        "not_fusible": [f"{p['producer']}: {p['reason']}" for p in cell["not_fusible"]],
        "refusals": [
            f"{r['count']} {r['kind']} {r['site']} {r['code']} {r['message']}"
            for r in cell["refusals"]
        ],
        "error": cell["error"],
    }
    return {name: value for name, value in result.items() if value}


def compact_all(data: dict[str, Any]) -> dict[str, Any]:
    """The golden file's content."""
    cells: dict[str, dict[str, Any]] = {}
    for cell in data["cells"]:
        cells.setdefault(cell["family"], {})[cell["recipe"]] = compact(cell)
    return {"torch": data["torch"], "transformers": data["transformers"], "cells": cells}


if __name__ == "__main__":
    text = json.dumps(compact_all(json.loads(Path(sys.argv[1]).read_text())), indent=1)
    FILE.write_text(text + "\n")
