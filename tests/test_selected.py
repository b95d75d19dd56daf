"""Selectors that are about no site of a model: said in the report, and once in a warning."""

from __future__ import annotations

import logging

import pytest
import torch
from graphs import codes, values

import fp8pass
from fp8pass.crossing import graphs_for
from fp8pass.report import Report, merge, reports
from fp8pass.tuning.store import _told

BF16, E4 = torch.bfloat16, torch.float8_e4m3fn


class Layer(torch.nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.norm = norm
        self.register_buffer("w", codes(64, 64))
        self.register_buffer("sb", torch.rand(1, 64) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.norm:
            x = torch.nn.functional.rms_norm(x, (64,), eps=1e-6)
        scale = (x.float().abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-12)
        q = (x.float() / scale).clamp(-448.0, 448.0).to(E4)
        return torch._scaled_mm(q, self.w.t(), scale, self.sb, out_dtype=BF16)


class Model(torch.nn.Module):
    """Two layers in two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Layer(True), Layer(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        torch._dynamo.graph_break()
        y: torch.Tensor = self.down(x)
        return y


MATCHED = ["up=torch_row", "fp8-token:down=torch_row", "fp8=triton", "d*=triton", "torch_row"]
UNMATCHED = ["dwn=torch_row", "fp8-block=torch_row", "fp8-block:up=cpu", "int8=triton", "x=triton"]


@pytest.mark.parametrize("tool", ["explain", "graphs_for"])
def test_said_once_for_all_graphs(tool: str, caplog: pytest.LogCaptureFixture) -> None:
    _told.clear()
    prefer = [*MATCHED, *UNMATCHED]
    with caplog.at_level(logging.WARNING, "fp8pass"):
        for _ in range(2):
            if tool == "explain":
                report = fp8pass.explain(Model(), values(4, 64), prefer=prefer)
            else:
                report = graphs_for(Model(), values(4, 64), target="sm90", prefer=prefer).report
    assert len({graph.name for graph in report.graphs}) == 2
    wanted = [f'prefer="{item}"' for item in UNMATCHED]
    assert sorted(report.unmatched) == sorted(wanted)
    assert all(report.table().count(f"option {item} matched no site") == 1 for item in wanted)
    told = [r.message for r in caplog.records if "matched no site" in r.message]
    assert sorted(told) == sorted(f"fp8pass: option {item} matched no site" for item in wanted)
    assert Report.from_dict(report.to_dict()).unmatched == report.unmatched


def test_every_option_and_nothing_to_say() -> None:
    report = fp8pass.explain(
        Model(), values(4, 64), force="dwn=cpu", linear_backend="int8=torch", disable="z=cpu"
    )
    assert sorted(report.unmatched) == [
        'disable="z=cpu"', 'force="dwn=cpu"', 'linear_backend="int8=torch"',
    ]  # fmt: skip
    report = fp8pass.explain(
        Model(), values(4, 64), force="down=cpu", disable="torch_row, *=triton"
    )
    assert not report.unmatched and "matched no site" not in report.table()


def test_a_compile_says_it_of_its_own_graph_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Which graphs are still to come is not known."""
    _told.clear()
    torch._dynamo.reset()
    compiled = torch.compile(
        Model(),
        backend=fp8pass.fp8pass_backend,
        options={"fp8pass.force": "down=torch_row"},
    )
    with torch.no_grad(), caplog.at_level(logging.WARNING, "fp8pass"):
        compiled(values(4, 64))
    first, second = reports()[-2:]
    assert first.unmatched == ['force="down=torch_row"'] and not second.unmatched
    assert not merge([first, second]).unmatched
    assert not [record for record in caplog.records if record.name == "fp8pass"]


def test_what_was_made_weight_only_is_matched_by_both_schemes() -> None:
    report = fp8pass.explain(
        Model(), values(4, 64), force="fp8-token:up=w8a16", prefer="w8a16:up=cpu, w8a16:down=cpu"
    )
    assert report.unmatched == ['prefer="w8a16:down=cpu"']
