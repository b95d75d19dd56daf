"""Option ``self_check``: a library's kernel that is wrong or raises is never believed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from graphs import Passed, codes, trace
from lowering_sites import operands, problem

import fp8pass
from fp8pass.errors import OptionError, UnsupportedError
from fp8pass.lowerings import Kernel, choose, find, register, unregister
from fp8pass.lowerings.planned import parse_plan, plan_is_for, run_planned
from fp8pass.lowerings.self_check import checked_plan, disabled, forget
from fp8pass.ops.linear import scaled_product
from fp8pass.options import Options
from fp8pass.problem import MRange
from fp8pass.reasons import YES
from fp8pass.target import Target

BF16 = torch.bfloat16
ROW = ("token", "channel")
BLOCKS = ("group1x128", "group128x128")
Make = Callable[..., list[int]]


def right(a: Any, b: Any, sa: Any, sb: Any, bias: Any, out: Any, fast: bool) -> torch.Tensor:
    value = a.float() @ b.float() * sa * sb
    return (value if bias is None else value + bias.float()).to(out)


def wrong(a: Any, b: Any, sa: Any, sb: Any, bias: Any, out: Any, fast: bool) -> torch.Tensor:
    """One element in a hundred thousand is off, as of a kernel that misreads one stride."""
    value = right(a, b, sa, sb, bias, out, fast)
    value[-1, -1] += value.abs().max() * 0.1
    return value


def broken(*args: Any) -> torch.Tensor:
    raise UnsupportedError("the library is another version\nsecond line")


def odd(a: Any, b: Any, sa: Any, sb: Any, bias: Any, out: Any, fast: bool) -> torch.Tensor:
    return right(a, b, sa, sb, bias, torch.float32, fast)


def fragile(a: Any, *rest: Any) -> torch.Tensor:
    """Right until it is given 33 rows."""
    if a.shape[0] == 33:
        raise RuntimeError("no kernel for 33 rows")
    return right(a, *rest)


@pytest.fixture
def make() -> Iterator[Make]:
    """Registers a kernel ``lib`` of a library in front of all others; returns its calls."""
    forget()

    def made(run: Any, m: MRange = MRange()) -> list[int]:  # noqa: B008
        calls: list[int] = []

        def counted(a: Any, *rest: Any) -> torch.Tensor:
            calls.append(a.shape[0])
            return run(a, *rest)  # type: ignore[no-any-return]

        register(
            Kernel(
                "lib",
                "a test",
                frozenset({"cpu", "cuda"}),
                lambda t: YES,
                lambda t, p: YES,
                lambda t, p: -1,
                find("triton_block").emit,
                "none",
                m,
                counted,
                library="testlib",
            )  # fmt: skip
        )
        return calls

    yield made
    unregister("lib")
    forget()


def given(m: int = 5, **more: Any) -> tuple[Any, ...]:
    p = problem(*ROW, **more)
    values = operands(p, m, "cpu", seed=m)
    bias = values.get("bias")
    return values["a"], values["b"], values["scale_a"], values["scale_b"], bias, p.out_dtype


KEYS = "float8_e4m3fn/dynamic/token;float8_e4m3fn/static/channel"


def run(args: tuple[Any, ...], plan: str = "0-=lib|reference", keys: str = KEYS) -> torch.Tensor:
    return run_planned(*args, False, plan, keys)


def expected(args: tuple[Any, ...], keys: str = KEYS) -> torch.Tensor:
    return scaled_product(*args, *keys.split(";"), "")


# ---- plans --------------------------------------------------------------------------------------


def plan_of(target: str, *pair: str, m: int | None = None, **options: Any) -> str:
    found = Target.parse(target)
    p = problem(*pair, target=found, m=m, k=512, n=256)
    made = Options(self_check=True, **options)
    return checked_plan(found, p, choose(found, p, made), made)


def test_a_plan_names_what_runs_instead() -> None:
    every = "sm90+vllm+deepgemm+flashinfer"
    prefer = ("deepgemm_block",)
    assert plan_of(every, *BLOCKS, prefer=prefer) == "0-=deepgemm_block|triton_block"
    prefer = ("vllm_cutlass_block",)
    off = ("torch_block",)
    plan = plan_of(every, *BLOCKS, m=7, prefer=prefer, disable=off)
    assert plan == "7=vllm_cutlass_block|triton_block"
    off = ("torch_block", "triton_block", "torch_dequant")
    plan = plan_of(every, *BLOCKS, prefer=prefer, disable=off)
    assert plan == "0-=vllm_cutlass_block|reference"
    assert (
        plan_of(every, *BLOCKS, m=7, force="flashinfer_block") == "7=flashinfer_block|triton_block"
    )
    parse_plan(plan)


def test_a_checked_plan_is_for_the_devices_of_all_its_kernels() -> None:
    """A graph for an absent device is interpreted by the reference."""
    for plan, on_cpu in (
        ("0-=deepgemm_block|triton_block", False),
        ("0-=vllm_cutlass|reference", False),
        ("0-=torch_row|reference", True),
        ("0-=torch_row|triton_skinny", False),
    ):
        assert plan_is_for(plan, "cpu") is on_cpu
        assert plan_is_for(plan, "cuda")


def test_only_what_is_a_librarys_is_checked() -> None:
    assert plan_of("sm90", *BLOCKS) == ""
    assert plan_of("sm90+vllm", *BLOCKS) == ""
    target = Target.parse("sm90+deepgemm")
    p = problem(*BLOCKS, target=target, k=512, n=256)
    off = Options(prefer=("deepgemm_block",))
    assert checked_plan(target, p, choose(target, p, off), off) == ""


@pytest.mark.parametrize("plan", ["0-=nonsense|reference", "0-=lib|nonsense", "0-4=cpu|reference"])
def test_bad_plans(plan: str, make: Make) -> None:
    make(right)
    with pytest.raises(OptionError):
        parse_plan(plan)


def test_a_gap_is_seen(make: Make) -> None:
    make(right)
    with pytest.raises(OptionError, match="gap"):
        parse_plan("0-3=lib|reference;5-=lib|reference")


# ---- running ------------------------------------------------------------------------------------


def test_a_right_kernel_is_compared_once_for_each_size(make: Make) -> None:
    calls = make(right)
    for m in (5, 7, 5):
        args = given(m, bias=BF16)
        assert torch.equal(run(args), right(*args, False))
    assert calls == [5, 5, 7, 5] and not disabled()
    other = given(5, n=64)
    run(other)
    assert calls == [5, 5, 7, 5, 5, 5]


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (wrong, "1 of 240 elements"),
        (broken, "raised UnsupportedError: the library is another version"),
        (odd, "returned torch.float32"),
    ],
)
def test_a_wrong_kernel_is_disabled_loudly(
    kernel: Any, words: str, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    calls = make(kernel)
    args = given()
    with caplog.at_level(logging.WARNING, "fp8pass"):
        for _ in range(3):
            assert torch.equal(run(args), expected(args))
        run(given(5, n=64))
    assert calls == [5] and set(disabled()) == {"lib"} and words in disabled()["lib"]
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    for word in ("lib", "testlib", "DISABLED", words, "reference runs in its place"):
        assert word in record.getMessage()


def test_an_error_later_disables_too(make: Make) -> None:
    calls = make(fragile)
    assert torch.equal(run(given(5)), right(*given(5), False))
    args = given(33)
    assert torch.equal(run(args), expected(args))
    assert "33 rows" in disabled()["lib"] and calls == [5, 5, 33]
    run(given(5))
    assert calls == [5, 5, 33]


def test_what_was_right_and_raises_later_is_disabled(make: Make) -> None:
    calls = make(fragile)
    for m in (40, 33):  # one size: it was compared with 40 rows
        assert torch.equal(run(given(m)), expected(given(m)))
    assert "33 rows" in disabled()["lib"] and calls == [40, 40, 33]


def test_the_number_of_rows_is_part_of_the_size(make: Make) -> None:
    """Up to the next power of two: a library has other tiles for more rows."""
    calls = make(right)
    for m in (1, 2, 3, 4, 5, 8, 9, 16, 4):
        run(given(m))
    assert calls == [1, 1, 2, 2, 3, 3, 4, 5, 5, 8, 9, 9, 16, 4] and not disabled()


def only_many(at: int, rows: int) -> Any:
    """Wrong in one row, if there are at least so many."""

    def kernel(a: Any, *rest: Any) -> torch.Tensor:
        value = right(a, *rest)
        if a.shape[0] >= rows:
            value[at] += value.abs().max()
        return value

    return kernel


@pytest.mark.parametrize("at", [0, 2, 512, -1])
def test_many_rows_are_run_and_some_compared(at: int, make: Make) -> None:
    calls = make(only_many(at, 500))
    assert torch.equal(run(given(5)), right(*given(5), False)) and not disabled()
    args = given(511 if at != 512 else 513)
    assert torch.equal(run(args), expected(args))
    assert "elements of a random product are wrong" in disabled()["lib"]
    assert calls == [5, 5, args[0].shape[0]]


def test_more_rows_than_are_made_are_one_size(make: Make) -> None:
    calls = make(right)
    for m in (4096, 5000, 9000):
        run(given(m, n=32, k=32))
    assert calls == [4096, 4096, 5000, 9000] and not disabled()


def test_the_next_kernel_runs(make: Make) -> None:
    make(broken)
    args = given()
    ran: list[int] = []
    second = Kernel(
        "second", "a test", frozenset({"cpu"}), lambda t: YES, lambda t, p: YES, lambda t, p: 1,
        find("triton_block").emit, "none", run=lambda *a: ran.append(1) or right(*a),  # type: ignore[func-returns-value]
    )  # fmt: skip
    register(second)
    try:
        assert torch.equal(run(args, "0-=lib|second"), right(*args, False))
        assert ran == [1] and set(disabled()) == {"lib"}
    finally:
        unregister("second")


def test_no_rows_are_no_proof(make: Make) -> None:
    calls = make(wrong_but_empty)
    assert run(given(0)).shape == (0, 48)
    args = given(5)
    assert torch.equal(run(args), expected(args))
    assert calls == [0, 5] and disabled()


def wrong_but_empty(a: Any, *rest: Any) -> torch.Tensor:
    return wrong(a, *rest) if a.shape[0] else right(a, *rest)


@pytest.mark.parametrize(
    ("pair", "more"),
    [
        (("tensor", "tensor"), {}),
        (("tensor", "channel"), {"out_dtype": torch.float32}),
        (BLOCKS, {"k": 200, "n": 72}),
        (ROW, {"dtypes": (torch.int8, torch.int8), "k": 512}),
    ],
)
def test_every_granularity_is_compared_by_its_key(
    pair: tuple[str, str], more: dict[str, Any], make: Make
) -> None:
    p = problem(*pair, **more)
    keys = f"{p.activation};{p.weight}"

    def reference(a: Any, b: Any, sa: Any, sb: Any, bias: Any, out: Any, fast: bool) -> Any:
        return scaled_product(a, b, sa, sb, bias, out, *keys.split(";"), "")

    calls = make(reference)
    for m in (1, 5, 300):
        values = operands(p, m, "cpu", seed=m)
        args = (*(values[x] for x in ("a", "b", "scale_a", "scale_b")), None, p.out_dtype)
        assert torch.equal(run(args, keys=keys), expected(args, keys))
    assert not disabled() and calls == [1, 1, 5, 5, 300, 300]
    forget()
    run(args, keys=keys)
    assert calls[6:] == [300, 300]


def test_the_generators_of_torch_are_not_touched(make: Make) -> None:
    make(right)
    before = torch.get_rng_state()
    run(given())
    assert torch.equal(torch.get_rng_state(), before)


# ---- through the pass ---------------------------------------------------------------------------


def test_through_the_pass(make: Make) -> None:
    """The graph carries the alternatives; without the option it names the kernel alone."""
    make(wrong)

    def fn(q: torch.Tensor, w: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor) -> Any:
        keys = KEYS.split(";")
        return torch.ops.fp8pass.scaled_mm(q, w.t(), sa, sb, None, BF16, *keys, False, None)

    args = codes(16, 32), codes(48, 32, seed=3), torch.rand(16, 1) + 0.1, torch.rand(1, 48) + 0.1
    passed = Passed(trace(fn, *args), self_check=True)
    (site,) = passed.sites("scaled_mm")
    assert (site.status, site.kernel, site.plan) == ("lowered", "lib", "16=lib")
    planned = torch.ops.fp8pass.scaled_mm_planned.default
    (node,) = passed.after.graph.find_nodes(op="call_function", target=planned)
    assert node.args[7].startswith("16=lib|") and node.args[8] == KEYS
    torch.testing.assert_close(passed.after(*args)[0], fn(*args), rtol=2**-7, atol=1e-5)
    assert set(disabled()) == {"lib"}
    without = Passed(trace(fn, *args))
    assert not without.after.graph.find_nodes(op="call_function", target=planned)


def test_the_option_is_a_switch() -> None:
    assert Options.resolve({}).self_check is False
    assert Options.resolve({"FP8PASS_SELF_CHECK": "1"}).self_check is True
    with pytest.raises(OptionError, match="self_check"):
        Options.resolve({}, self_check="perhaps")
    assert fp8pass.inductor_options(self_check=True)
