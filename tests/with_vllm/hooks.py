"""What fp8pass relies on in vLLM, looked for in its source: nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def missing(package: Path) -> list[str]:
    """What the sources of a ``vllm`` package lack; empty if all is there."""
    return [why for why in _checks(package) if why]


def _checks(package: Path) -> Iterator[str]:
    config = _classes(package / "config" / "vllm.py")
    compilation = _classes(package / "config" / "compilation.py")
    passes = package / "compilation" / "passes" / "inductor_pass.py"
    yield _lacks(config, "VllmConfig", "__post_init__", "compilation_config", "additional_config")
    yield _lacks(config, "VllmConfig", "compile_debug_dump_path")
    names = ("inductor_passes", "inductor_compile_config", "debug_dump_path", "mode", "backend")
    yield _lacks(compilation, "CompilationConfig", *names)
    yield _lacks(compilation, "CompilationMode", "NONE", "STOCK_TORCH_COMPILE", "VLLM_COMPILE")
    yield _lacks(_classes(passes), "InductorPass", "uuid", "is_applicable_for_range")
    found = _classes(passes).get("InductorPass")
    if found is not None and "CustomGraphPass" not in map(ast.unparse, found.bases):
        yield "InductorPass is no CustomGraphPass"
    for file, text in (
        (passes, "_pass_context"),
        (passes, "compile_range"),
        (package / "plugins" / "__init__.py", '"vllm.general_plugins"'),
        (package / "compilation" / "monitor.py", "took %.2f s in total"),
        (package / "config" / "utils.py", ".uuid()"),
        (package / "compilation" / "decorators.py", "TORCHINDUCTOR_CACHE_DIR"),
    ):
        if text not in _text(file):
            yield f"{file.relative_to(package)} has no {text}"


def _text(file: Path) -> str:
    return file.read_text("utf-8") if file.is_file() else ""


def _classes(file: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(_text(file))
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _lacks(classes: dict[str, ast.ClassDef], name: str, *members: str) -> str:
    if name not in classes:
        return f"there is no class {name}"
    found: set[str] = set()
    for node in classes[name].body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            found.add(ast.unparse(node.target))
        elif isinstance(node, ast.Assign):
            found.update(map(ast.unparse, node.targets))
    lacking = [member for member in members if member not in found]
    return f"{name} has no {', '.join(lacking)}" if lacking else ""
