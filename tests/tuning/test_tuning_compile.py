"""Measuring in the middle of a compile, on this processor; later compiles use what is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fp8pass.nn import quantize_
from fp8pass.report import reports
from fp8pass.report.collector import clear
from fp8pass.tuning import session


def test_a_compile_that_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.RMSNorm(64), torch.nn.Linear(64, 96, bias=False))
    model = model.to(torch.bfloat16).eval()
    quantize_(model, "dynamic", progress=False)
    folder = tmp_path / "tuning"
    for tune in ("measure", "cached"):
        torch._dynamo.reset()
        clear()
        session.forget()
        options = {"fp8pass.tune": tune, "fp8pass.tune_cache": str(folder)}
        compiled = torch.compile(model, backend="fp8pass", dynamic=True, options=options)
        with torch.no_grad():
            for rows in (2, 17, 30):
                x = torch.randn(rows, 64, dtype=torch.bfloat16)
                expected = model(x).double()
                error = (compiled(x).double() - expected).abs().mean()
                assert float(error / expected.abs().mean()) < 0.01
        sites = [s for r in reports() for s in r.sites if s.kind == "scaled_mm"]
        assert sites and all(site.status == "lowered" for site in sites)
        assert all("measured on this device" in site.message for site in sites)
    (file,) = folder.glob("*.json")
    (record,) = json.loads(file.read_text())["products"].values()
    assert not record["refused"] and len(record["points"]) >= 5
