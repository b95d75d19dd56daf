"""Look at what fp8pass did: graphs and a report as files, and the same inside a depyf dump.

Usage: python examples/graph_dump_depyf.py [FOLDER]

``FP8PASS_DUMP=FOLDER`` in the environment does the same as the option used here, for a program that
you would rather not edit. depyf is optional: pip install depyf.
"""

import contextlib
import importlib.util
import json
import sys
import tempfile
from pathlib import Path

import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn

from fp8pass.nn import quantize_


class NormLinear(nn.Module):
    """RMSNorm and one linear layer; [tokens, 64] to [tokens, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64) + 0.5)
        self.linear = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.linear(self.weight * h.to(x.dtype))


def list_files(title: str, folder: Path) -> list[str]:
    """Print the files below ``folder`` with their sizes; return their names."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    print(f"\n{title}, {folder}:")
    for path in files:
        print(f"  {path.stat().st_size:7d} bytes  {path.relative_to(folder)}")
    return [path.name for path in files]


@torch.no_grad()
def dump(folder: Path) -> None:
    """Compile a small model; write fp8pass's files and depyf's to folders in ``folder``."""
    torch.manual_seed(0)
    model = NormLinear().to(torch.bfloat16).eval()
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    quantize_(model, "dynamic_tensor")
    expected = model(x).float()

    ours, theirs = folder / "fp8pass", folder / "depyf"
    compiled = torch.compile(model, backend="fp8pass", options={"fp8pass.dump": str(ours)})
    with contextlib.ExitStack() as stack:
        # With a warm cache nothing is compiled, and so there is no graph to see.
        stack.enter_context(inductor_config.patch(force_disable_caches=True))
        if importlib.util.find_spec("depyf") is None:
            print("depyf is not installed, leaving its part out; to see it: pip install depyf")
        else:
            import depyf

            stack.enter_context(depyf.prepare_debug(str(theirs)))
        error = ((compiled(x).float() - expected).norm() / expected.norm()).item()
    print(f"relative L2 error against the uncompiled model: {error:.2e}")
    assert error < 0.03, error

    names = list_files("fp8pass", ours)
    assert "report.json" in names, names
    for path in sorted(ours.rglob("report.json")):
        for site in json.loads(path.read_text())["sites"]:
            print(f"  {site['kind']}: {site['status']} {site['code'] or site['rule'] or ''}")
    if theirs.exists():
        names = list_files("depyf", theirs)
        assert any("fp8pass" in name for name in names), names


def main() -> None:
    if len(sys.argv) > 1:
        dump(Path(sys.argv[1]).resolve())
    else:
        with tempfile.TemporaryDirectory() as folder:
            dump(Path(folder))


if __name__ == "__main__":
    main()
