"""A quantise without a producer and the kernel that the user prefers: where, and where not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fp8pass
from fp8pass.crossing import TargetGraphs

FP8 = torch.float8_e4m3fn
KERNEL = "fp8pass.triton_quantize.default"


def quantised(x: torch.Tensor, w: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-12)
    q = (wide / scale).clamp(-448.0, 448.0).to(FP8)
    return torch._scaled_mm(q, w.t(), scale, scale_b, out_dtype=torch.bfloat16)


def plain(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return quantised(x, w, s)


def columns(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return quantised(torch.mm(x, x.t() @ x)[:, :32].contiguous(), w[:, :32], s)


def behind_attention(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    heads = x.view(1, -1, 2, 32).transpose(1, 2)
    y = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    return quantised(y.transpose(1, 2).reshape(-1, 64), w, s)


def computed(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return quantised(x * 2, w, s)


def turned(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return quantised(x.t().contiguous()[:, :16], w[:, :16], s)


def graph(model: Callable[..., Any], rows: int = 64, **options: Any) -> TargetGraphs:
    x = torch.randn(rows, 64, dtype=torch.bfloat16)
    w = torch.randn(48, 64).to(FP8)
    with torch.no_grad():
        return fp8pass.graphs_for(model, x, w, torch.rand(1, 48), target="sm90", **options)


def sites(found: TargetGraphs) -> dict[str, tuple[str, str]]:
    return {s.kind: (s.status, s.kernel) for s in found.report.sites}


@pytest.mark.parametrize("model", [plain, columns, behind_attention])
def test_what_is_in_memory_goes_to_the_kernel_that_is_preferred(model: Callable[..., Any]) -> None:
    found = graph(model, prefer="triton")
    assert sites(found)["quantize"] == ("lowered", "triton")
    assert found.text().count(KERNEL) == 1
    assert KERNEL not in graph(model).text(), "only by preference"


def test_columns_are_read_where_they_are() -> None:
    assert "aten.clone" not in graph(columns, prefer="triton").text()


@pytest.mark.parametrize("model", [computed, turned])
def test_what_a_loop_computes_stays_in_that_loop(model: Callable[..., Any]) -> None:
    found = graph(model, prefer="triton")
    assert KERNEL not in found.text() and sites(found)["quantize"][0] == "left"


def test_the_preference_may_name_another_site_or_the_fuel_be_used_up() -> None:
    for options in ({"prefer": "int8-token=triton"}, {"prefer": "triton", "fuel": 0}):
        found = graph(plain, **options)
        assert KERNEL not in found.text() and sites(found)["quantize"][0] == "left"
    assert KERNEL in graph(plain, prefer="fp8-token=triton").text()


def test_symbolic_rows() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.randn(48, 64).to(FP8))
            self.register_buffer("s", torch.rand(1, 48))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return plain(x[..., :64], self.w, self.s)

    x = torch.randn(24, 80, dtype=torch.bfloat16)
    with torch.no_grad():
        found = fp8pass.graphs_for(Layer(), x, target="sm90", dynamic=[0], prefer="triton")
    assert KERNEL in found.text()


def test_a_device_without_the_kernel() -> None:
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    w = torch.randn(48, 64).to(FP8)
    with torch.no_grad():
        found = fp8pass.graphs_for(plain, x, w, torch.rand(1, 48), target="gfx942", prefer="triton")
    assert KERNEL not in found.text() and sites(found)["quantize"][0] == "left"
