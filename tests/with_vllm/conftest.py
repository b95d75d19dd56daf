"""Tests with the real vLLM: run by ``make test-vllm``, in an environment of their own."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The smoke first: if it fails, the rest need not be waited for."""
    items.sort(key=lambda item: item.get_closest_marker("smoke") is None)
