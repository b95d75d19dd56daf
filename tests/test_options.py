"""Options: arguments over environment over defaults; bad names and values are named."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8pass.errors import OptionError
from fp8pass.lowerings import kernel_names
from fp8pass.options import Options
from fp8pass.target import Target

KERNELS = sorted(kernel_names())


def resolve(env: dict[str, str] | None = None, **arguments: Any) -> Options:
    return Options.resolve(env or {}, **arguments)


def test_defaults() -> None:
    assert resolve() == Options()
    assert Options() == Options(
        None, "exact", False, None, (), (), None, None, False, None, "cached", None
    )


def test_arguments_win_over_the_environment() -> None:
    env = {"FP8PASS_NUMERICS": "fast", "FP8PASS_FUEL": "3", "FP8PASS_STRICT": "1"}
    assert resolve(env) == Options(numerics="fast", fuel=3, strict=True)
    assert resolve(env, numerics="exact", fuel=None) == Options(strict=True)


def test_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8PASS_FUEL", "7")
    assert Options.resolve().fuel == 7


def test_every_option_has_a_variable() -> None:
    good = {
        "target": "sm90",
        "numerics": "fast",
        "strict": "yes",
        "force": KERNELS[0],
        "prefer": ",".join(KERNELS[:2]),
        "disable": f" {KERNELS[-1]} , ",
        "dump": "folder",
        "fuel": " 5 ",
        "self_check": "1",
        "linear_backend": "fp8-block=triton, torch",
        "tune": "measure",
        "tune_cache": "place",
    }
    assert set(good) == set(Options.names())
    options = resolve({f"FP8PASS_{name.upper()}": value for name, value in good.items()})
    assert options == Options(
        "sm90", "fast", True, KERNELS[0], tuple(KERNELS[:2]), (KERNELS[-1],), "folder", 5, True,
        "fp8-block=triton, torch", "measure", "place",
    )  # fmt: skip


@pytest.mark.parametrize("name", Options.names())
def test_an_empty_variable_is_an_unset_one(name: str) -> None:
    assert resolve({f"FP8PASS_{name.upper()}": ""}) == Options()


@pytest.mark.parametrize("text", ["1", "true", "TRUE", "yes", "on"])
def test_true(text: str) -> None:
    assert resolve({"FP8PASS_STRICT": text}).strict is True


@pytest.mark.parametrize("text", ["0", "false", "No", "off", ""])
def test_false(text: str) -> None:
    assert resolve({"FP8PASS_STRICT": text}).strict is False


BAD: list[tuple[str, Any, str]] = [
    ("numerics", "precise", "'exact', 'fast'"),
    ("numerics", None, "'exact', 'fast'"),
    ("strict", "maybe", "True"),
    ("strict", 1, "True"),
    ("fuel", -1, ">= 0"),
    ("fuel", "many", ">= 0"),
    ("fuel", 1.5, ">= 0"),
    ("fuel", True, ">= 0"),
    ("fuel", float("inf"), ">= 0"),
    ("fuel", float("nan"), ">= 0"),
    ("target", "sn42", "sm90"),
    ("target", "sm90+nonsense", "cutlass"),
    ("target", 90, "string"),
    ("force", "fastest", KERNELS[0]),
    ("force", 3, "SITES=name"),
    ("prefer", ["fastest"], KERNELS[0]),
    ("prefer", 5, "list"),
    ("disable", "fastest,other", KERNELS[0]),
    ("dump", 3, "string"),
    ("fuel", "\u0663", ">= 0"),
    ("fuel", "1_0", ">= 0"),
    ("fuel", "1e3", ">= 0"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), BAD)
def test_bad_values(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(OptionError) as info:
        resolve(**{name: value})
    assert allowed in str(info.value)
    shown = str(value[0]) if isinstance(value, list) else str(value).split(",")[0]
    assert shown in str(info.value)


@pytest.mark.parametrize(
    "value",
    [10**5000, -(10**5000), "9" * 5000, 1e300, 2**63],
    ids=lambda value: type(value).__name__,
)
def test_a_number_that_is_too_large_is_not_taken(value: Any) -> None:
    with pytest.raises(OptionError, match=r"option fuel.*>= 0") as info:
        resolve(fuel=value)
    assert len(str(info.value)) < 200
    assert resolve(fuel=2**63 - 1).fuel == 2**63 - 1 and resolve(fuel=3.0).fuel == 3


@pytest.mark.parametrize("name", ["dump", "tune_cache", "target"])
@pytest.mark.parametrize("value", ["\0", "a\0b", "\ud800"])
def test_what_no_file_can_be_called_is_not_taken(name: str, value: str) -> None:
    with pytest.raises(OptionError, match=f"option {name}: .*cannot be a name") as info:
        resolve(**{name: value})
    assert str(info.value).isprintable()


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(OptionError, match="FP8PASS_NUMERICS"):
        resolve({"FP8PASS_NUMERICS": "precise"})


def test_unknown_option() -> None:
    with pytest.raises(OptionError) as info:
        resolve(numeric="exact")
    assert "'numeric'" in str(info.value)
    assert all(repr(name) in str(info.value) for name in Options.names())


def test_forced_and_disabled() -> None:
    with pytest.raises(OptionError, match="both forced and disabled"):
        resolve(force=KERNELS[0], disable=[KERNELS[0]])


def test_targets_and_paths_as_objects() -> None:
    assert resolve(target=Target.parse("sm90+cutlass")).target == "sm90+cutlass"
    assert resolve(dump=pathlib.Path("a") / "b").dump == str(pathlib.Path("a/b"))
    assert resolve(prefer=None, disable=()).prefer == ()
    assert resolve(prefer=KERNELS[0]).prefer == (KERNELS[0],)


def test_key_has_what_changes_a_rewrite() -> None:
    assert Options(dump="a").key() == Options(dump="b").key()
    assert Options(tune_cache="a").key() == Options().key(), "its content counts, not its place"
    changes: dict[str, Any] = {
        "target": "cpu",
        "numerics": "fast",
        "strict": True,
        "force": "x",
        "prefer": ("x",),
        "disable": ("x",),
        "self_check": True,
        "fuel": 1,
        "linear_backend": "torch",
        "tune": "off",
    }
    made = {Options(**{name: value}).key() for name, value in changes.items()}
    assert len(made | {Options().key()}) == len(changes) + 1
    assert {name for name, _ in Options().key()} == set(changes)


@given(
    st.sampled_from(Options.names()),
    st.one_of(st.text(max_size=20), st.integers(), st.floats(), st.none(), st.lists(st.integers())),
)
def test_any_value_is_taken_or_an_option_error(name: str, value: Any) -> None:
    try:
        options = resolve(**{name: value})
    except OptionError as error:
        assert str(error)
    else:
        assert hash(options) == hash(options)
