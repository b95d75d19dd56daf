"""vLLM's operators exist while the tests of its dialect run, and in no other test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _vllm_operators(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.module.__name__.rpartition(".")[2].startswith("test_dialects_vllm"):
        yield
        return
    import vllm_standins

    with vllm_standins.defined():
        yield
