"""``module:name`` on a command line: what it may be, and one clear sentence for what it may not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from fp8pass.errors import OptionError
from fp8pass.loading import load

PROGRAM = '''
import torch
from torch import nn

class Model(nn.Module):
    """Has inputs of its own."""
    def forward(self, x, scale=1.0):
        return x * scale
    def example_inputs(self):
        return torch.ones(3)

class Bare(nn.Module):
    def forward(self, x):
        return x

class Needs(nn.Module):
    def __init__(self, width):
        super().__init__()

class Holder:
    inner = Model

made = Model()
number = 3
def pair():
    return Model(), (torch.ones(2), 4)
def listed():
    return [lambda x: x, [torch.ones(2)]]
def keywords():
    return Model(), {"x": torch.ones(2), "scale": 2.0}
def one_tensor():
    return Model(), torch.ones(5)
def module():
    return Model()
def nothing():
    pass
def one_value():
    return (Model(),)
def not_callable():
    return 3, ()
def bad_inputs():
    return Model(), 7
def fails():
    raise RuntimeError("no luck\\nat all")
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "a_program.py").write_text(PROGRAM)
    (tmp_path / "a_broken_one.py").write_text("import torch\n\nimport no_such_module\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("a_program", "a_broken_one"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["made", "Model", "module", "Holder.inner"])
def test_modules_with_inputs_of_their_own(name: str) -> None:
    program = load(f"a_program:{name}")
    assert isinstance(program.model, nn.Module)
    (x,) = program.inputs
    assert torch.equal(x, torch.ones(3)) and program.kwargs == {}


def test_functions_that_give_both() -> None:
    program = load("a_program:pair")
    assert program.inputs[1] == 4 and torch.equal(program.inputs[0], torch.ones(2))
    assert callable(load("a_program:listed").model)
    keywords = load("a_program:keywords")
    assert keywords.inputs == () and keywords.kwargs["scale"] == 2.0
    assert load("a_program:one_tensor").inputs[0].shape == (5,)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a_program", "'a_program' is not of the form module:function"),
        (":pair", "is not of the form"),
        ("a_program:", "is not of the form"),
        ("a:b:c", "is not of the form"),
        ("no_such_program:f", "cannot import 'no_such_program': ModuleNotFoundError"),
        ("a_broken_one:f", r"No module named 'no_such_module' \(a_broken_one.py:3\)"),
        ("a_program:other", "module 'a_program' has no 'other'"),
        ("a_program:made.other", "module 'a_program' has no 'made.other'"),
        ("a_program:number", "is a value of type int, which cannot be called"),
        ("a_program:Bare", "is a Bare without inputs; it must give"),
        ("a_program:Needs", r"failed when called: TypeError: .*width"),
        ("a_program:nothing", "gave None; it must give"),
        ("a_program:one_value", "gave a tuple of 1; it must give"),
        ("a_program:not_callable", "gave a tuple of 2; it must give"),
        ("a_program:bad_inputs", "gave a value of type int as inputs; allowed: a tuple or list"),
        ("a_program:fails", r"RuntimeError: no luck \(a_program.py:\d+\)$"),
    ],
)
def test_a_mistake_is_one_sentence(name: str, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        load(name)
    assert len(str(caught.value).splitlines()) == 1
