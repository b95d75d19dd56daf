"""``module:name`` on a command line -> the model or function that it means, and its inputs."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fp8pass.errors import OptionError

_EXPECTED = "it must give (model or function, inputs), or a module with a method example_inputs()"


@dataclass(frozen=True)
class Program:
    """Something to compile.

    Attributes:
        model: a module or function.
        inputs, kwargs: positional and keyword inputs of one call.
    """

    model: Callable[..., Any]
    inputs: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def load(name: str) -> Program:
    """Import ``"package.module:attribute"``, with the current directory importable.

    The attribute is a function without arguments that returns ``(model_or_function, inputs)``, or a
    module, its class, or a function that makes it, where the module has ``example_inputs()``.
    Inputs are a tuple or list of positional inputs, one tensor, or a dict of keyword inputs.

    Raises:
        OptionError: in one line, what is wrong with the name or with what it gave.
    """
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path) or ":" in path:
        raise OptionError(f"{name!r} is not of the form module:function")
    found = _attribute(_module(module_name), path, module_name)
    if isinstance(found, nn.Module):
        return _with_own_inputs(found, name)
    if not callable(found):
        raise OptionError(f"{name!r} is {_described(found)}, which cannot be called")
    result = _called(found, name)
    if isinstance(result, nn.Module):
        return _with_own_inputs(result, name)
    if not isinstance(result, (tuple, list)) or len(result) != 2 or not callable(result[0]):
        raise OptionError(f"{name!r} gave {_described(result)}; {_EXPECTED}")
    return _program(result[0], result[1], name)


def _module(name: str) -> Any:
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise OptionError(f"cannot import {name!r}: {_failure(error)}") from error


def _attribute(module: Any, path: str, module_name: str) -> Any:
    value = module
    for part in path.split("."):
        if not hasattr(value, part):
            raise OptionError(f"module {module_name!r} has no {path!r}")
        value = getattr(value, part)
    return value


def _called(function: Callable[[], Any], name: str) -> Any:
    try:
        return function()
    except Exception as error:
        raise OptionError(f"{name!r} failed when called: {_failure(error)}") from error


def _with_own_inputs(model: nn.Module, name: str) -> Program:
    example = getattr(model, "example_inputs", None)
    if not callable(example):
        raise OptionError(f"{name!r} is a {type(model).__name__} without inputs; {_EXPECTED}")
    return _program(model, _called(example, f"{name}.example_inputs"), name)


def _program(model: Callable[..., Any], inputs: Any, name: str) -> Program:
    if isinstance(inputs, torch.Tensor):
        return Program(model, (inputs,))
    if isinstance(inputs, dict) and all(isinstance(key, str) for key in inputs):
        return Program(model, (), inputs)
    if isinstance(inputs, (tuple, list)):
        return Program(model, tuple(inputs))
    raise OptionError(
        f"{name!r} gave {_described(inputs)} as inputs; allowed: a tuple or list, a tensor, or a "
        "dict of keyword inputs"
    )


def _described(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value) if value is None else f"a value of type {type(value).__name__}"


def _failure(error: Exception) -> str:
    """The error and the line of the user's program that raised it, in one line."""
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    frames = [f for f in frames if "importlib" not in f.filename]
    if not frames:
        return text
    return f"{text} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})"
