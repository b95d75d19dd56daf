"""fp8pass as an option of Inductor, for when you call torch.compile with options of your own.

The same pass as ``backend="fp8pass"``, run in one hook of Inductor. It leaves your options alone,
and is chained to a pass that you have set in Inductor's configuration.
"""

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor, nn

import fp8pass
from fp8pass.nn import quantize_

HIDDEN, INTERMEDIATE, TOKENS = 128, 256, 16


class MLP(nn.Module):
    """RMSNorm and SwiGLU with a residual; [tokens, HIDDEN] in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)
        self.gate = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        h = self.weight * h.to(x.dtype)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    model = MLP().to(torch.bfloat16).eval()
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    quantize_(model, "dynamic_tensor")
    expected = model(x).float()

    # An option of Inductor: round to bfloat16 wherever the model does, also inside a fused loop.
    # Without it a few FP8 codes are one step off, with and without fp8pass. No effect on a CPU
    # before torch 2.13.
    for emulate, limit in ((False, 0.06), (True, 1e-3 if torch.__version__ >= "2.13" else 0.06)):
        torch.compiler.reset()
        options = fp8pass.inductor_options({"emulate_precision_casts": emulate})
        compiled = torch.compile(model, options=options)
        # Relative to what the block adds to its input, which the residual would otherwise hide.
        with inductor_config.patch(force_disable_caches=True):  # so that there is a compile to see
            actual = compiled(x).float()
        error = ((actual - expected).norm() / (expected - x.float()).norm()).item()
        print(f"emulate_precision_casts={emulate}: relative L2 error {error:.2e}")
        assert error < limit, error

    report = fp8pass.reports()[-1]
    print(report.table())
    done = [site.kind for site in report.sites if site.status in ("fused", "lowered")]
    assert sorted(done) == ["activation", "norm"] + ["scaled_mm"] * 3, done


if __name__ == "__main__":
    main()
