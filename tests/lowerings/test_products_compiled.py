"""Products in every spelling through the pass, on a CPU: all lowered, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from graphs import Passed, codes, trace, values

import fp8pass
from fp8pass.ops.linear import scaled_product
from fp8pass.report import reports

BF16, F32 = torch.bfloat16, torch.float32
E4, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
Tensor = torch.Tensor


def scales(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.01


def int8(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(-128, 128, shape, generator=generator).to(torch.int8)


def rows(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
    return (torch.mm(q.float(), w.float().t()) * sb * sa).to(BF16)


def sequences(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
    return (torch.nn.functional.linear(q.float(), w.float()) * sa * sb).to(BF16)


def blocks(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
    a = q.float() * sa.repeat_interleave(128, 1)
    b = w.float() * sb.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return torch.mm(a, b.t()).to(BF16)


def integers(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
    return (torch._int_mm(q, w.t()).float() * sa * sb).to(BF16)


def zero_point(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
    zero = torch.round(sa * 100).to(torch.int32)
    total = torch._int_mm(q, w.t()) - zero * w.sum(1, dtype=torch.int32)
    return (total.float() * sa * sb).to(BF16)


SPELLINGS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], str]] = {
    "rows": (rows, (codes(5, 32), codes(48, 32), scales(5, 1), scales(1, 48)), "cpu"),
    "sequences": (
        sequences, (codes(2, 3, 32), codes(48, 32), scales(2, 3, 1), scales(48)), "cpu",
    ),
    "fnuz": (
        rows,
        (codes(5, 32, dtype=FNUZ), codes(48, 32, dtype=FNUZ), scales(5, 1), scales(1, 48)),
        "torch_dequant",
    ),
    "blocks": (
        blocks, (codes(5, 256), codes(384, 256), scales(5, 2), scales(3, 2)), "torch_dequant",
    ),
    "integers": (
        integers, (int8(5, 32), int8(48, 32), scales(5, 1), scales(1, 48)), "torch_int8_cpu",
    ),
    "zero_point": (
        zero_point, (int8(5, 32), int8(48, 32), scales(5, 1), scales(1, 48)), "torch_int8_cpu",
    ),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_lowered(name: str, dynamic: bool) -> None:
    fn, given, kernel = SPELLINGS[name]
    passed = Passed(trace(fn, *given, dynamic=(0, 2) if dynamic else ()))
    (site,) = passed.sites("scaled_mm")
    assert (site.status, site.kernel) == ("lowered", kernel)
    with torch.no_grad():
        got = passed.after(*given)[0]
    torch.testing.assert_close(got, fn(*given), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("name", SPELLINGS)
def test_compiled(name: str) -> None:
    fn, given, kernel = SPELLINGS[name]
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(fn, backend=fp8pass.fp8pass_backend)(*given)
    torch.testing.assert_close(got, fn(*given), rtol=2**-7, atol=1e-5)
    sites = reports()[-1].select("scaled_mm")
    assert [(s.status, s.kernel) for s in sites] == [("lowered", kernel)]


# ---- scales in every shape -----------------------------------------------------------------------

PER_TOKEN = ((16, 1), (16,), (1, 16))
PER_CHANNEL = ((1, 48), (48,), (48, 1))
PER_TENSOR = ((), (1,), (1, 1))
SHAPES = [
    *((a, b, "token", "channel") for a, b in product(PER_TOKEN, PER_CHANNEL)),
    *((a, b, "tensor", "tensor") for a, b in product(PER_TENSOR, PER_TENSOR)),
    ((16, 1), (1, 1), "token", "tensor"),
    ((1, 1), (1, 48), "tensor", "channel"),
]


def check_native(sa: Tensor, sb: Tensor, act: str, weight: str) -> None:
    keys = f"float8_e4m3fn/dynamic/{act}", f"float8_e4m3fn/static/{weight}"

    def fn(q: Tensor, w: Tensor, sa: Tensor, sb: Tensor) -> Any:
        return torch.ops.fp8pass.scaled_mm(q, w.t(), sa, sb, None, BF16, *keys, False, None)

    given = codes(16, 32), codes(48, 32, seed=3), sa, sb
    wanted = (given[0].float() @ given[1].float().t()) * (
        sa.float() if act == "tensor" else sa.float().reshape(-1, 1)
    )
    wanted = wanted * (sb.float() if weight == "tensor" else sb.float().reshape(1, -1))
    for kernel in ("cpu", "torch_dequant"):
        passed = Passed(trace(fn, *given), force=kernel)
        (site,) = passed.sites("scaled_mm")
        assert (site.status, site.kernel) == ("lowered", kernel)
        with torch.no_grad():
            got = passed.after(*given)[0]
        torch.testing.assert_close(got, wanted.to(BF16), rtol=2**-7, atol=1e-5)
    eager = fn(*given)
    reference = scaled_product(given[0], given[1].t(), sa, sb, None, BF16, *keys, "")
    torch.testing.assert_close(eager, wanted.to(BF16), rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(reference, wanted.to(BF16), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize(("sa", "sb", "act", "weight"), SHAPES, ids=str)
def test_scale_shapes(sa: Any, sb: Any, act: str, weight: str) -> None:
    check_native(scales(*sa), scales(*sb, seed=1), act, weight)


@pytest.mark.parametrize("dtype", [BF16, torch.float64], ids=str)
def test_scales_of_another_dtype(dtype: torch.dtype) -> None:
    check_native(scales(16, 1).to(dtype), scales(1, 48).to(dtype), "token", "channel")
    check_native(scales().to(dtype), scales().to(dtype), "tensor", "tensor")


def test_expanded_scale() -> None:
    check_native(scales(1, 1).expand(16, 1), scales(1, 48), "token", "channel")


def test_a_weight_only_product_keeps_the_nodes_of_the_model() -> None:
    def fn(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, w.to(BF16) * s.to(BF16))

    given = values(5, 32), codes(48, 32), scales(48, 1)
    passed = Passed(trace(fn, *given))
    (site,) = passed.sites("scaled_mm")
    assert (site.status, site.kernel) == ("lowered", "torch_w8a16")
    assert str(passed.after.graph) == str(passed.before.graph)
