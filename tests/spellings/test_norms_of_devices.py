"""torch's own norms, as its decompositions leave them on every kind of device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8pass

Tensor = torch.Tensor

#: target -> kernel of an RMSNorm and its quantise
TARGETS = {"cpu": "inductor", "sm90": "triton", "gfx942": "inductor", "xpu-bmg": "inductor"}


class Quantised(nn.Module):
    """``norm`` and a static quantise of its value."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.register_buffer("scale", torch.tensor(0.02))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return (y.float() / self.scale).clamp(-448, 448).to(torch.float8_e4m3fn)


class Functional(nn.Module):
    """``F.rms_norm`` without a weight."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), eps=1e-6)


NORMS = {
    "RMSNorm": (lambda: nn.RMSNorm(64, eps=1e-6), "rms_norm_quant"),
    "rms_norm": (Functional, "rms_norm_quant"),
    "LayerNorm": (lambda: nn.LayerNorm(64), "layer_norm_quant"),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NORMS)
def test_torchs_own_norm(name: str, target: str) -> None:
    make, rule = NORMS[name]
    model = Quantised(make().bfloat16()).eval()
    with torch.no_grad():
        made = fp8pass.graphs_for(model, torch.ones(6, 64).bfloat16(), target=target)
    (site,) = made.report.sites
    assert (site.status, site.rule, site.kernel) == ("fused", rule, TARGETS[target])
