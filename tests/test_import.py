"""What importing the package does (little), and house rules that a program can check."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import fp8pass

PACKAGE = Path(fp8pass.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
HEAVY = ("triton", "vllm", "transformers", "rich", "typer", "gguf", "torch._inductor.compile_fx")

_PROGRAM = """
import json, sys
import torch

def refuse(*args, **kwargs):
    raise AssertionError("a device was asked")

torch.cuda.is_available = torch.cuda.device_count = torch.cuda.current_device = refuse
torch.cuda.get_device_properties = torch.cuda.get_device_capability = refuse
torch.cuda._lazy_init = torch.xpu._lazy_init = refuse
torch.accelerator.current_accelerator = torch.accelerator.is_available = refuse
before = set(sys.modules)
{statement}
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def imported(statement: str) -> list[str]:
    """Modules that a fresh process imports for ``statement``, beyond those of torch itself."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.replace("{statement}", statement)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=None,
    )
    assert done.returncode == 0, done.stderr
    result: list[str] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_import_is_light() -> None:
    added = imported("import fp8pass")
    assert {name for name in added if name.startswith("fp8pass")} <= {
        "fp8pass",
        "fp8pass._version",
    }
    assert not [name for name in added if name.startswith("torch._inductor")]
    assert len(added) < 20


def test_values_and_operators_are_light() -> None:
    """Plain values and the operators need no device and nothing heavy."""
    added = imported(
        "import fp8pass, fp8pass.ops\n"
        "fp8pass.Target.parse('sm90+cutlass'); fp8pass.Options.resolve(target='gfx942')\n"
        "fp8pass.QuantKey.parse('float8_e4m3fn/static/tensor'); fp8pass.Verdict"
    )
    assert not [n for n in added if n.split(".")[0] in HEAVY or n in HEAVY]
    assert not [n for n in added if n.startswith("torch._inductor")]


@pytest.mark.parametrize("statement", ["import fp8pass.passes", "import fp8pass.kernels.cpu"])
def test_the_pass_asks_no_device_at_import(statement: str) -> None:
    added = {name.split(".")[0] for name in imported(statement)}
    assert not added & {"vllm", "transformers", "rich", "typer", "gguf"}


def test_public_names_resolve() -> None:
    assert sorted(fp8pass.__all__) == list(fp8pass.__all__)
    for name in fp8pass.__all__:
        assert getattr(fp8pass, name) is not None
    assert set(fp8pass._HOMES) | {"__version__"} == set(fp8pass.__all__)
    assert dir(fp8pass) == sorted(fp8pass.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        fp8pass.nonsense  # noqa: B018


def test_public_names_are_their_own() -> None:
    """A public name is the object of the module that it is said to live in."""
    for name, home in fp8pass._HOMES.items():
        assert getattr(importlib.import_module(f"fp8pass.{home}"), name) is getattr(fp8pass, name)


# ---- house rules ---------------------------------------------------------------------------------


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_module(path: Path) -> None:
    text = path.read_text()
    assert text.startswith('"""'), "the first line says what a module is for"
    assert ast.get_docstring(ast.parse(text))
    assert len(text.splitlines()) <= 500


KINDS = {"cuda", "rocm", "xpu", "hip"}
#: where the kind of device is data or the very subject
ALLOWED = ("target.py", "lowerings/", "kernels/")


def test_no_device_kind_in_the_core() -> None:
    found = []
    for path in MODULES:
        if relative(path).startswith(ALLOWED):
            continue
        tree = ast.parse(path.read_text())
        texts = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        found += [
            f"{relative(path)}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in texts
            and node.value.split(":")[0] in KINDS
        ]
    assert not found


def test_no_device_query_at_import() -> None:
    """Module-level code calls nothing of ``torch.cuda``, ``torch.xpu`` or ``torch.accelerator``."""
    found = []
    for path in MODULES:
        for statement in ast.parse(path.read_text()).body:
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                continue
            for node in ast.walk(statement):
                if isinstance(node, ast.Call):
                    name = ast.unparse(node.func)
                    if name.startswith(("torch.cuda", "torch.xpu", "torch.accelerator")):
                        found.append(f"{relative(path)}:{node.lineno}")
    assert not found
