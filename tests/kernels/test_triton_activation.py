"""The Triton activation in Triton's interpreter, and its limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from types import ModuleType

import pytest
import torch
from graphs import values
from producer_checks import assert_exact, without_cancelled

from fp8pass.errors import UnsupportedError
from fp8pass.kernels.triton_limits import MAX_ROW, why_not_activation
from fp8pass.ops import SPECS, ActForm, QuantForm, activation, dynamic_form, static_form

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

E5 = torch.float8_e5m2
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
STATIC, TOKEN, TENSOR = static_form(), dynamic_form("token"), dynamic_form("tensor")
LLAMA = "div,bfloat16,bfloat16"


@pytest.fixture(scope="module")
def kernels(interpreted: Callable[[str], ModuleType]) -> ModuleType:
    return interpreted("activation")


def check(
    kernels: ModuleType,
    gate: torch.Tensor,
    up: torch.Tensor,
    form: str = LLAMA,
    quant: QuantForm = TOKEN,
    keep: bool = True,
) -> tuple[torch.Tensor, ...]:
    """Within the contract; returns the results."""
    scale = torch.tensor(0.02) if quant.static else None
    args = (gate, up, scale, form, str(quant), keep)
    got: tuple[torch.Tensor, ...] = kernels.silu_mul_quant(*args)
    assert_exact(got, activation.silu_mul_quant(*args), form=form, quant=str(quant))
    return got


def test_inputs_of_the_record(kernels: ModuleType) -> None:
    spec = SPECS["silu_mul_quant"]
    for args in spec.inputs(torch.Generator().manual_seed(5)):
        assert_exact(kernels.silu_mul_quant(*args), spec.reference(*args), args=args[3:])


@pytest.mark.parametrize("silu", ActForm.SILUS)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_forms(kernels: ModuleType, silu: str, dtype: torch.dtype) -> None:
    """Every dtype of SiLU, of the other operand and of the product."""
    for i, (mid, out) in enumerate(product((BF16, F16, F32), (BF16, F16, F32))):
        form = str(ActForm(silu, mid, out))
        gate, up = values(3, 40, dtype=dtype), values(3, 40, dtype=(F32, BF16, F16)[i % 3], seed=7)
        check(kernels, gate, up, form, (STATIC, TOKEN, TENSOR)[(i + i // 3) % 3])


@pytest.mark.parametrize("quant", [STATIC, TOKEN, TENSOR], ids=str)
def test_special_values(kernels: ModuleType, quant: QuantForm) -> None:
    gate, up = values(7, 40), values(7, 40, seed=7)
    gate[1, 3], gate[2, 5], gate[3, 7] = math.nan, math.inf, -math.inf
    up[4, 0], up[5, 1] = math.nan, math.inf
    gate[6, :4] = torch.tensor([-0.0, -200.0, -88.5, 200.0])
    for g, u in ((gate, up), *zip(gate.unsqueeze(1), up.unsqueeze(1), strict=True)):
        check(kernels, g, u, quant=quant)
    q, *_ = check(kernels, gate, up, quant=quant)
    assert quant.granularity == "tensor" or q[4].float().isnan().all()


def test_fp8_e5m2_and_no_product(kernels: ModuleType) -> None:
    for quant in (static_form(E5), dynamic_form("token", E5), dynamic_form("tensor", E5)):
        *_, y = check(kernels, values(3, 48), values(3, 48, seed=7), quant=quant, keep=False)
        assert y.shape == (0,) and y.dtype == BF16


def test_layouts(kernels: ModuleType) -> None:
    """Halves of one packed product, in either order; operands of different pitches; no pitch."""
    packed, cube = values(2, 3, 80), values(2, 3, 4, 32)
    gate, up = packed.chunk(2, -1)
    for quant in (STATIC, TOKEN, TENSOR):
        check(kernels, gate, up, quant=quant)
        check(kernels, up, gate.contiguous(), quant=quant)
        check(kernels, packed[:, 1, 3:35], packed[:, 2, 40:72], quant=quant)
        check(kernels, cube.transpose(0, 1), cube.transpose(0, 1).contiguous(), quant=quant)


def test_no_rows(kernels: ModuleType) -> None:
    x = torch.empty(0, 64, dtype=BF16)
    for quant in (STATIC, TOKEN):
        check(kernels, x, x, quant=quant)
    for width in (64, MAX_ROW + 1):
        x = torch.empty(0, width, dtype=BF16)
        q, scale, _ = kernels.silu_mul_quant(x, x, None, LLAMA, str(TENSOR), False)
        assert q.shape == x.shape and scale.shape == () and scale.item() > 0


def test_several_pieces_to_a_program(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    host = kernels.host
    monkeypatch.setattr(host, "PARTIALS", 4)
    monkeypatch.setattr(host, "row_shape", lambda width, rows: host.Shape(1, 16, 5, 3, True))
    monkeypatch.setattr(host, "piece_shape", lambda width, rows: host.Shape(1, 16, 2, 3, True))
    for quant in (STATIC, TOKEN, TENSOR):
        check(kernels, values(7, 72), values(7, 72, seed=7), quant=quant)


# ---- every activation, with and without an up ---------------------------------------------------


def check_act(
    kernels: ModuleType,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    form: str,
    quant: QuantForm,
) -> None:
    scale = torch.tensor(0.02) if quant.static else None
    args = (gate, up, scale, form, str(quant), True)
    want = activation.act_mul_quant(*args)
    assert_exact(kernels.act_mul_quant(*args), want, form=form, quant=str(quant))


def test_inputs_of_the_record_of_every_activation(kernels: ModuleType) -> None:
    spec = SPECS["act_mul_quant"]
    for args in spec.inputs(torch.Generator().manual_seed(5)):
        got, wanted = kernels.act_mul_quant(*args), spec.reference(*args)
        got, wanted = without_cancelled(args, got, wanted)
        assert_exact(got, wanted, form=args[3:])


@pytest.mark.parametrize("act", ActForm.ACTS)
@pytest.mark.parametrize("compute", [BF16, F16, F32], ids=str)
def test_every_activation(kernels: ModuleType, act: str, compute: torch.dtype) -> None:
    for i, dtype in enumerate((BF16, F16, F32)):
        gate, up = values(3, 40, dtype=dtype), values(3, 40, dtype=(F32, BF16, F16)[i], seed=7)
        form = str(ActForm(act, (compute, BF16, F16)[i], (BF16, F32, F16)[i], compute))
        quant = (STATIC, TOKEN, TENSOR)[i]
        check_act(kernels, gate, up, form, quant)
        if act != "gpt_oss":
            check_act(kernels, gate, None, form, quant)


@pytest.mark.parametrize("act", ActForm.ACTS)
@pytest.mark.parametrize("quant", [STATIC, TOKEN, TENSOR], ids=str)
def test_special_values_of_every_activation(
    kernels: ModuleType, act: str, quant: QuantForm
) -> None:
    gate, up = values(7, 40), values(7, 40, seed=7)
    gate[1, 3], gate[2, 5], gate[3, 7] = math.nan, math.inf, -math.inf
    gate[6, :4] = torch.tensor([-0.0, -200.0, -88.5, 200.0])
    form = f"{act},bfloat16,bfloat16"
    check_act(kernels, gate, up, form, quant)
    if act != "gpt_oss":
        check_act(kernels, gate, None, form, quant)


@pytest.mark.parametrize("quant", [STATIC, TOKEN, TENSOR], ids=str)
def test_layouts_without_an_up(kernels: ModuleType, quant: QuantForm) -> None:
    packed = values(2, 3, 80)
    for gate in (packed[..., 40:], packed[:, 1, 3:35], packed[..., ::2], values(0, 64)):
        if gate.numel() or quant is not TENSOR:
            check_act(kernels, gate, None, "gelu_erf,bfloat16,bfloat16", quant)


def test_refusals_of_forms(kernels: ModuleType) -> None:
    ask = why_not_activation
    assert "without an up" in (ask("gpt_oss,bfloat16,bfloat16", str(TOKEN), 64, BF16, None) or "")
    assert ask("gpt_oss,bfloat16,bfloat16", str(TOKEN), 64, BF16, BF16) is None
    assert ask("relu,bfloat16,bfloat16", str(TOKEN), 64, BF16, None) is None
    assert "activation" in (ask("mish,bfloat16,bfloat16", str(TOKEN), 64, BF16, None) or "")
    x = values(2, 16)
    with pytest.raises(UnsupportedError, match="as one of SiLU"):
        kernels.silu_mul_quant(x, x, None, "relu,bfloat16,bfloat16", str(TOKEN), False)
    kernels.act_mul_quant(x, x, None, "relu,bfloat16,bfloat16", str(TOKEN), False)


def test_refusals(kernels: ModuleType) -> None:
    ask = why_not_activation
    assert "at most" in (ask(LLAMA, str(TOKEN), MAX_ROW + 1, BF16, BF16) or "")
    for quant in (STATIC, TENSOR):
        assert ask(LLAMA, str(quant), MAX_ROW + 1, BF16, F32) is None
    assert "a gate of torch.int8" in (ask(LLAMA, str(TOKEN), 64, torch.int8, BF16) or "")
    assert "an input of torch.int8" in (ask(LLAMA, str(TOKEN), 64, BF16, torch.int8) or "")
    assert "parts" in (ask("div", str(TOKEN), 64, BF16, BF16) or "")
    assert "not known" in (ask(LLAMA, str(TOKEN), None, BF16, BF16) or "")
    with pytest.raises(UnsupportedError, match="operands of shapes"):
        kernels.silu_mul_quant(values(2, 16), values(1, 16), None, LLAMA, str(TOKEN), False)
