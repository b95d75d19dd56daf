"""Lets these tests import what the tests beside this folder share, and each other's helpers."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent, HERE.parent.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
