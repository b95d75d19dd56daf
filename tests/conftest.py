"""Shared by all tests: golden texts, and what torch 2.11 does not have on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden anew, to be reviewed"
    )
    parser.addoption(
        "--long", action="store_true", help="more random examples (tests/spellings/test_random_*)"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden("lowerings/cpu", text)``: ``text`` equals ``tests/golden/lowerings/cpu.txt``."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} is missing; write it with pytest --update-golden"
        assert text == path.read_text(), f"differs from {path}; see pytest --update-golden"

    return check


#: What torch 2.11 raises where a test runs a row-wise product eagerly on a CPU, in either spelling.
_NO_ROW_WISE = (
    "only supports per-tensor scaling for CPU backend",
    "Could not run 'aten::_scaled_mm_v2' with arguments from the 'CPU' backend",
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Skip what torch before 2.12 cannot run at all: a row-wise ``_scaled_mm``, eagerly on a CPU.

    Under fp8pass such models do run there, which the tests of compiled models show.
    """
    try:
        return (yield)
    except RuntimeError as error:
        known = any(text in str(error) for text in _NO_ROW_WISE)
        if torch.__version__.startswith("2.11.") and known:
            pytest.skip("torch 2.11 has no row-wise scaled product on a CPU")
        raise
