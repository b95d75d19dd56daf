"""What a compile knows of measurements: those of the device that is here, read once and kept.

Measurements count for the device that a graph runs on, and only where no target was named: a graph
for a named target is the same on every machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fp8pass.problem import ScaledMMProblem
from fp8pass.target import Target
from fp8pass.tuning import store
from fp8pass.tuning.live import identity_of, live_device
from fp8pass.tuning.measured import NOTHING, Measured, Record, key_of
from fp8pass.tuning.store import tell_once as tell_once

if TYPE_CHECKING:
    from fp8pass.options import Options

_lock = threading.RLock()
#: file -> (what the file system said of it, what it held).
_files: dict[Path, tuple[object, Measured]] = {}
#: file -> what this process measured, in case that it cannot be kept there.
_own: dict[Path, dict[str, Record]] = {}
_unmeasurable: set[tuple[Path, str, str]] = set()
_heard: list[list[ScaledMMProblem]] = []


def folder(options: Options) -> Path:
    """The folder of the measurements."""
    return Path(options.tune_cache) if options.tune_cache else store.default_folder()


def uses_measurements(options: Options) -> bool:
    """Whether measurements may decide anything under these options."""
    return options.tune != "off" and options.target is None


def measured_for(target: Target, options: Options) -> Measured:
    """The measurements for a compile; nothing if they are off or a target was named."""
    if not uses_measurements(options):
        return NOTHING
    place = folder(options)
    if not store.is_folder(place) and not _own:  # the usual case: nothing was ever measured
        return NOTHING
    identity = identity_of(target)
    path = store.file_for(place, identity)
    with _lock:
        stamp = _stamp(path)
        known = _files.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        records = store.load(path, identity)
        for key, record in _own.get(path, {}).items():
            records[key] = records[key].merged(record) if key in records else record
        previous = None if known is None else known[1]
        made = Measured(records) if records else NOTHING
        if previous is not None and previous.digest == made.digest:
            made = previous  # choices that were made stay cached
        _files[path] = (stamp, made)
        return made


def ensure(target: Target, problem: ScaledMMProblem, options: Options) -> None:
    """Under ``tune="measure"``: measure the product now, unless that was done before.

    Never raises: what cannot be measured is said in one line and chosen as without measurements.
    """
    if options.tune != "measure" or not uses_measurements(options):
        return
    from fp8pass.tuning.measure import METHOD, ROWS, ROWS_HOST, candidates, measure, ranges
    from fp8pass.tuning.operands import why_not_measured

    place, identity = folder(options), identity_of(target)
    path = store.file_for(place, identity)
    key = key_of(problem)
    with _lock:
        if (path, key, str(problem.m)) in _unmeasurable:
            return
        why = why_not_measured(problem)
        device = live_device(target)
        if device is None or why:
            _unmeasurable.add((path, key, str(problem.m)))
            store.tell_once(f"{key} was not measured: {why or f'no {target.spec} is here'}")
            return
        able = candidates(target, problem, options.disable)
        if len(able) < 2:  # nothing to choose
            return
        known = measured_for(target, options).record(problem)
        if known is not None:
            grid = ROWS_HOST if target.host else ROWS
            wanted = {str(m) for m, _ in ranges(problem.m, grid)}
            tried = known.known()
            if wanted <= {str(p.m) for p in known.points} and {k.name for k in able} <= tried:
                return
        made = Record()
        try:
            with _really():
                for part in measure(
                    target, problem, device, numerics=options.numerics, disabled=options.disable
                ):
                    made = made.merged(part)
        except Exception as error:
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            _unmeasurable.add((path, key, str(problem.m)))
            store.tell_once(f"{key} was not measured: {line}")
        if not made.points:
            _unmeasurable.add((path, key, str(problem.m)))
        keep(path, identity, {key: made}, METHOD)


def keep(
    path: Path, identity: dict[str, object], records: dict[str, Record], method: dict[str, str]
) -> None:
    """Remember records in this process, and in the file if that can be written."""
    with _lock:
        own = _own.setdefault(path, {})
        for key, record in records.items():
            own[key] = own[key].merged(record) if key in own else record
        store.save(path, identity, own, method)
        _files.pop(path, None)


def digest(options: Options) -> str:
    """Identity of all measurements that a compile under these options could use; "" for none."""
    if not uses_measurements(options):
        return ""
    place = folder(options)
    found = hashlib.sha256()
    with _lock:
        for path, records in sorted(_own.items()):
            found.update(f"{path.name}{Measured(records).digest}".encode())
        names = sorted(p for p in _listed(place) if p.suffix == ".json")
        for path in names:
            with contextlib.suppress(OSError):
                found.update(path.name.encode() + path.read_bytes())
        return found.hexdigest() if names or _own else ""


def _listed(place: Path) -> list[Path]:
    try:
        return list(place.iterdir())
    except (OSError, ValueError):
        return []


def _stamp(path: Path) -> object:
    try:
        stat = path.stat()
    except (OSError, ValueError):
        return None
    return (stat.st_mtime_ns, stat.st_size, stat.st_ino)


@contextlib.contextmanager
def _really() -> Iterator[None]:
    """Real tensors and plain eager operators, in the middle of a compile."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), unset_fake_temporarily(), torch.no_grad():
        yield


@contextlib.contextmanager
def listening() -> Iterator[list[ScaledMMProblem]]:
    """The products that passes lower while the context lasts, each once, in their order."""
    heard: list[ScaledMMProblem] = []
    _heard.append(heard)
    try:
        yield heard
    finally:
        _heard.remove(heard)


def lowered(problem: ScaledMMProblem) -> None:
    """A pass lowers this product."""
    for heard in _heard:
        if problem not in heard:
            heard.append(problem)


def forget() -> None:
    """Drop everything that this process keeps (tests)."""
    with _lock:
        _files.clear()
        _own.clear()
        _unmeasurable.clear()
