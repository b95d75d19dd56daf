"""A progress bar for long work, from whatever is installed: tqdm, else rich, else plain text.

Neither library is a dependency, and neither is imported before a bar is really shown.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

T = TypeVar("T")

#: Seconds between two lines of the plain-text fallback.
_PLAIN_INTERVAL_S = 2.0


def track(
    items: Iterable[T], description: str, *, total: int | None = None, progress: bool | None = None
) -> Iterator[T]:
    """Yield ``items`` one by one while showing on stderr how far they are.

    Args:
        items: what to go through; a generator is fine.
        description: a few words in front of the bar.
        total: number of items; read from ``len(items)`` where there is one.
        progress: True shows the bar, False does not, None shows it when stderr is a terminal.
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    show = sys.stderr.isatty() if progress is None else progress
    if not show:
        yield from items
        return
    try:
        from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        pass
    else:
        # Without a bar for work that is over at once, unless the caller insists on one.
        delay = 0.0 if progress else 0.5
        yield from tqdm(items, desc=description, total=total, file=sys.stderr, delay=delay)
        return
    try:
        from rich.console import Console
        from rich.progress import track as rich_track
    except ImportError:
        yield from _plain(items, description, total)
        return
    console = Console(stderr=True)
    yield from rich_track(items, description, total=total, console=console, transient=not progress)


def _plain(items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
    """One line on stderr every two seconds, and one at the end."""
    of = "" if total is None else f"/{total}"
    last = time.monotonic()
    done = 0
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - last >= _PLAIN_INTERVAL_S:
            last = now
            print(f"{description}: {done}{of}", file=sys.stderr, flush=True)
    print(f"{description}: {done}{of}, done", file=sys.stderr, flush=True)
