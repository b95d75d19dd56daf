"""track: with tqdm, with rich, with neither, and not at all."""

from __future__ import annotations

from typing import Any

import pytest

from fp8pass import progress as progress_module


@pytest.mark.parametrize(
    "missing", [(), ("tqdm",), ("tqdm", "rich.console", "rich.progress")], ids=str
)
def test_progress(missing: tuple[str, ...], monkeypatch: Any, capsys: Any) -> None:
    for name in missing:
        monkeypatch.setitem(progress_module.sys.modules, name, None)
    assert list(progress_module.track(range(3), "working", progress=True)) == [0, 1, 2]
    captured = capsys.readouterr()
    assert "working" in captured.err and captured.out == ""
    assert list(progress_module.track(iter([1]), "working", progress=False)) == [1]
    assert list(progress_module.track([1], "working")) == [1]  # stderr is no terminal here
    assert capsys.readouterr().err == ""
