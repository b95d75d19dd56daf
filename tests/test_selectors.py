"""Options for some sites only: by scheme, by the module's path, by vLLM's names."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8pass.errors import NoKernelError, OptionError
from fp8pass.lowerings import choose, kernel_names
from fp8pass.lowerings.vllm_names import BACKENDS, CLASSES, backend_kernels, disabled_kernels
from fp8pass.options import Options
from fp8pass.problem_spec import parse_problem
from fp8pass.selectors import SCHEMES, items_of, parse_item, schemes_of
from fp8pass.target import Target

SM90 = Target.parse("sm90")


def plan(text: str, path: str = "", **options: Any) -> str:
    resolved = Options.resolve({}, target="sm90", **options)
    return choose(SM90, parse_problem(text, SM90), resolved, path).text


def test_by_path() -> None:
    down, up = "model.layers.3.mlp.down_proj", "model.layers.3.mlp.up_proj"
    force = "down_proj=torch_row"
    assert plan("row, m=8", down, force=force) == "8=torch_row"
    assert plan("row, m=8", up, force=force) == "8=triton_skinny"
    assert plan("row, m=8", "", force=force) == "8=triton_skinny", "a path that is not known"
    assert plan("row, m=8", "model.layers.3.mlp.no_down_proj", force=force) == "8=triton_skinny"
    for pattern in ("*", "layers.3.*", "model.layers.*", "mlp.down_proj", "*down*"):
        assert plan("row, m=8", down, force={pattern: "torch_row"}) == "8=torch_row", pattern


def test_by_scheme_and_both() -> None:
    force = "fp8-token=torch_row, fp8-tensor=torch_tensor"
    assert plan("row, m=8", force=force) == "8=torch_row"
    assert plan("static, m=8", force=force) == "8=torch_tensor"
    assert plan("mixed, m=8", force=force) == plan("mixed, m=8")
    both = "fp8-token:down_proj=torch_row"
    assert plan("row, m=8", "mlp.down_proj", force=both) == "8=torch_row"
    assert plan("row, m=8", "mlp.up_proj", force=both) == "8=triton_skinny"
    assert plan("static, m=8", "mlp.down_proj", force=both) == plan("static, m=8")


def test_the_first_forced_item_counts_and_all_disabled_ones() -> None:
    force = ["down_proj=torch_row", "triton_general"]
    assert plan("row, m=8", "mlp.down_proj", force=force) == "8=torch_row"
    assert plan("row, m=8", "mlp.up_proj", force=force) == "8=triton_general"
    disable = {"fp8-token": ["triton_skinny", "triton_general"], "down_proj": "torch_row"}
    assert plan("row, m=8", "mlp.up_proj", disable=disable) == "8=torch_row"
    assert plan("row, m=8", "mlp.down_proj", disable=disable) == "8=torch_channel"
    assert plan("row, m=8", "x", prefer="down_proj=torch_row") == "8=triton_skinny"
    assert plan("row, m=8", "x.down_proj", prefer="down_proj=torch_row") == "8=torch_row"


def test_schemes() -> None:
    for text, expected in {
        "static": {"fp8", "fp8-tensor"},
        "row": {"fp8", "fp8-token"},
        "mixed": {"fp8", "fp8-mixed"},
        "block": {"fp8", "fp8-block"},
        "block-ue8m0": {"fp8", "fp8-block"},
        "int8": {"int8"},
        "int8-azp": {"int8", "int8-azp"},
    }.items():
        assert schemes_of(parse_problem(text)) == expected <= set(SCHEMES)


def test_a_forced_kernel_that_cannot_raises_with_every_reason() -> None:
    with pytest.raises(NoKernelError) as info:
        plan("row, m=8", "mlp.down_proj", force="down_proj=torch_tensor")
    for word in ("FP8-L003", "torch_row", "cpu: FP8-L001"):
        assert word in str(info.value)


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("force", "down_proj=", "neither"),
        ("force", "=torch_row", "neither"),
        ("force", "down_proj=fastest", "unknown kernel 'fastest'; allowed: .*torch_row"),
        ("prefer", "fp9:down_proj=torch_row", "unknown scheme 'fp9'; allowed: 'fp8'"),
        ("disable", "fp8:=torch_row", "no pattern"),
        ("disable", "down_proj=inductor", "cannot be disabled"),
        ("linear_backend", "fast", "'fast' is not known; allowed: 'auto', 'torch'"),
        ("linear_backend", "machete", "'machete' has no kernel in fp8pass; allowed: 'auto'"),
        ("linear_backend", 3, "SITES=name"),
        ("force", {"a,b": "cpu"}, "has a comma"),
        ("prefer", ["cpu", "a,b=cpu"], "has a comma"),
        ("disable", {"layers.[0,1],up": "cpu"}, "has a comma"),
        ("force", {"a[": "cpu", "b]": "torch_row"}, "bracket"),
        ("force", {"fp8": ["torch_row", "cpu"]}, "'fp8=cpu' can never count.*'fp8=torch_row'"),
        ("force", "torch_row, cpu", "'cpu' can never count"),
        ("force", "torch_row, down_proj=cpu", "'down_proj=cpu' can never count"),
        ("linear_backend", {"x": ["torch", "triton"]}, "'x=triton' can never count"),
        ("prefer", {None: "cpu"}, "not a list of kernel names"),
        ("prefer", {"x": None}, "not a list of kernel names"),
        ("disable", [("a", "b")], "not a list of kernel names"),
        ("force", {3: "cpu"}, "SITES=name"),
        ("force", {"x": [None]}, "SITES=name"),
        ("tune", "always", "'off', 'cached', 'measure'"),
    ],
)
def test_mistakes(name: str, value: Any, word: str) -> None:
    with pytest.raises(OptionError, match=word):
        Options.resolve({}, **{name: value})


@pytest.mark.parametrize("option", ["force", "prefer", "disable", "linear_backend"])
def test_a_comma_in_a_set_of_characters(option: str) -> None:
    name, other = ("torch", "triton") if option == "linear_backend" else ("torch_row", "cpu")
    sites = {"layers.[0,2].*": name, "[!],].x": other, "y": other}
    items = tuple(f"{place}={kernel}" for place, kernel in sites.items())
    for value in (sites, list(items), ", ".join(items)):
        options = Options.resolve({}, **{option: value})
        found = {"force": options.forced, "linear_backend": options.backends}
        assert found.get(option, getattr(options, option)) == items
    about = parse_item(items[0]).about
    assert about(frozenset(), "model.layers.2.up") and not about(frozenset(), "model.layers.1.up")


def test_items_that_all_can_count() -> None:
    """Control of the mistakes: other sites, or the same said twice."""
    for force in (
        "down_proj=torch_row, fp8=cpu, torch_dequant",
        {"fp8": "torch_row", "fp8:up": "cpu"},
        ["torch_row", "torch_row"],
        {"x": ["torch_row"], "y": ("cpu",)},
    ):
        assert Options.resolve({}, force=force).forced
    assert Options.resolve({}, prefer={"x": ["torch_row", "cpu"]}).prefer == (
        "x=torch_row",
        "x=cpu",
    )


def test_forced_and_disabled_at_once() -> None:
    with pytest.raises(OptionError, match="both"):
        Options.resolve({}, force="down_proj=torch_row", disable="torch_row")
    with pytest.raises(OptionError, match="both"):
        Options.resolve({}, force="down_proj=torch_row", disable="down_proj=torch_row")
    Options.resolve({}, force="torch_row", disable="down_proj=torch_row")


WORD = st.text("abz*_.", min_size=1, max_size=6) | st.sampled_from(
    ["[0,1]", "a.[!,]*", "[],]", "["]
)


@given(st.sampled_from(["", *SCHEMES]), st.just("*") | WORD, st.sampled_from(kernel_names()))
def test_items_there_and_back(scheme: str, pattern: str, name: str) -> None:
    sites = f"{scheme}:{pattern}" if scheme else pattern
    item = parse_item(f"{sites}={name}")
    assert (item.scheme, item.pattern, item.name) == (scheme, pattern, name)
    assert parse_item(str(item)) == item
    assert items_of({sites: name}) == items_of(f" {sites}={name} ,") == (str(item),)


# ---- vLLM's names --------------------------------------------------------------------------------


def test_a_backend_is_tried_first() -> None:
    assert plan("row, m=8", linear_backend="torch") == "8=torch_row"
    assert plan("row, m=8", linear_backend="triton") == "8=triton_skinny"
    assert plan("static, m=0-", linear_backend="triton").startswith("0-64=triton_skinny")
    assert plan("row, m=8", linear_backend="auto") == plan("row, m=8")
    assert plan("row, m=8", linear_backend="fp8-block=torch") == plan("row, m=8")
    assert plan("row, m=8", linear_backend="fp8-token=torch, triton") == "8=torch_row"
    # what is preferred or forced by name is more exact than a backend
    assert plan("row, m=8", linear_backend="torch", prefer="triton_general") == "8=triton_general"


def test_a_backend_that_cannot_falls_back_and_says_so() -> None:
    options = Options.resolve({}, linear_backend="cutlass")
    choice = choose(SM90, parse_problem("row, m=8", SM90), options)
    assert choice.text == "8=triton_skinny" and choice.why != "linear_backend"
    assert "linear_backend cutlass has no kernel for this site" in choice.note
    assert "FP8-L011" in choice.note
    fits = choose(
        SM90, parse_problem("row, m=8", SM90), Options.resolve({}, linear_backend="torch")
    )
    assert fits.why == "linear_backend" and not fits.note


def test_names_stand_for_registered_kernels() -> None:
    assert backend_kernels("auto") == ()
    assert "torch_row" in backend_kernels("torch")
    assert backend_kernels("cutlass")[0] == "vllm_cutlass"
    for table in (BACKENDS, CLASSES):
        assert all(patterns for patterns in table.values())
    known = set(kernel_names())
    assert all(set(disabled_kernels({"VLLM_DISABLED_KERNELS": name})) <= known for name in CLASSES)


def test_vllms_variable() -> None:
    environment = {
        "VLLM_DISABLED_KERNELS": "CutlassFP8ScaledMMLinearKernel, "
        "RowWiseTorchFP8ScaledMMLinearKernel,MacheteLinearKernel,Nonsense",
        "FP8PASS_DISABLE": "triton_general",
    }
    options = Options.resolve(environment)
    assert options.disable == ("triton_general", "vllm_cutlass", "torch_row")
    assert options.key() != Options().key(), "in the identity of the pass"
    argument = Options.resolve(environment, disable="torch_channel")
    assert argument.disable == ("torch_channel", "vllm_cutlass", "torch_row")
    assert Options.resolve({"VLLM_DISABLED_KERNELS": ""}) == Options()


def test_a_preference_that_cannot_be_followed_is_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from fp8pass.tuning.store import _told, tell_once

    _told.clear()
    options = Options.resolve({}, prefer="vllm_cutlass")
    choice = choose(SM90, parse_problem("row, m=8", SM90), options)
    with caplog.at_level(logging.WARNING, "fp8pass"):
        for _ in range(3):
            tell_once(choice.note)
    assert [r.message for r in caplog.records] == [
        "fp8pass: preferred vllm_cutlass was not used (FP8-L011)"
    ]
