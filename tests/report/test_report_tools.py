"""Tools that watch a compile: depyf, tlparse's trace, torch's logs."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import depyf
import pytest
import report_samples as samples
import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from fp8pass.report import count_ops, dump, emit_record, emit_to_tools


class Emit(CustomGraphPass):
    """Adds a dead node, then shows the graph, as the real pass does in its middle."""

    def __init__(self) -> None:
        self.counts: list[Any] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        first = next(n for n in graph.nodes if n.op == "placeholder")
        with graph.inserting_after(first):
            dead = graph.call_function(torch.ops.aten.erf.default, (first,))
        nodes = list(graph.nodes)
        emit_to_tools("received", graph, "post_grad")
        emit_to_tools("after", graph, "post_grad")
        assert list(graph.nodes) == nodes
        graph.erase_node(dead)
        self.counts.append(count_ops(graph))

    def __deepcopy__(self, memo: object) -> Emit:
        return self

    def uuid(self) -> None:
        return None  # bypasses the caches, so that the pass always runs


def test_a_compile_inside_depyf_leaves_our_graphs(tmp_path: Path, cache: Path) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * 2 + 1

    torch._dynamo.reset()
    emit = Emit()
    x = torch.randn(8)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        with depyf.prepare_debug(str(tmp_path / "depyf")):
            compiled = torch.compile(f, options={"post_grad_custom_post_pass": emit})
            result = compiled(x)
    torch._dynamo.reset()
    assert torch.equal(result, f(x))
    files = os.listdir(tmp_path / "depyf")
    for step in ("received", "after"):
        (name,) = [n for n in files if n.endswith(f".fp8pass_post_grad_{step}.0.py")]
        text = (tmp_path / "depyf" / name).read_text()
        assert "erf" not in text
        assert [count_ops(text)] == emit.counts
        assert emit.counts[0]["aten.relu.default"] == 1


def test_nobody_watches_nothing_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(*_: object) -> Any:
        raise AssertionError("made a text that nobody wants")

    # Outside pytest, which adds handlers of its own, this is so after Dynamo's first trace record.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "handlers", [])
    monkeypatch.setattr(dump, "live_module", unwanted)
    monkeypatch.setattr(dump, "graph_text", unwanted)
    assert not logging.getLogger("fp8pass").isEnabledFor(logging.DEBUG)
    lines: list[str] = []
    monkeypatch.setattr(dump.log, "debug", lambda text, *args: lines.append(text % args))
    emit_to_tools("received", samples.small_graph().graph, "joint")
    assert lines == []


def test_the_debug_log_has_the_graph(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="fp8pass"):
        emit_to_tools("received", samples.small_graph().graph, "joint")
    assert "fp8pass joint received" in caplog.text
    assert "torch.ops.aten.mul.Tensor" in caplog.text
    assert "neg" not in caplog.text


def test_a_tool_that_fails_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(*_: object) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(dump, "_trace", bad)
    emit_to_tools("received", samples.small_graph().graph, "joint")
    emit_record(samples.joint())


_TRACED = """
import report_samples as samples
from fp8pass.report import add, emit_record, emit_to_tools
emit_to_tools("after", samples.small_graph().graph, "joint")
emit_record(samples.joint())
add(samples.joint())
"""


def _run(tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    root = Path(dump.__file__).parents[2]
    paths = os.pathsep.join([str(Path(__file__).parent), str(root)])
    return subprocess.run(
        [sys.executable, "-c", _TRACED],
        env={**os.environ, "PYTHONPATH": paths, **env},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )


def test_tlparse_gets_the_graph_and_the_sites(tmp_path: Path) -> None:
    _run(tmp_path, TORCH_TRACE=str(tmp_path / "trace"))
    (path,) = (tmp_path / "trace").iterdir()
    lines = path.read_text().splitlines()
    names = [
        json.loads(line[line.index("{") :])["artifact"] for line in lines if '"artifact"' in line
    ]
    assert {"name": "fp8pass_joint_after", "encoding": "string"} in names
    assert {"name": "fp8pass_joint_sites", "encoding": "json"} in names
    assert any("torch.ops.aten.mul.Tensor" in line for line in lines)
    assert any('"rule": "rms_norm_quant"' in line for line in lines)


@pytest.mark.parametrize("setting", ["fp8pass", "+fp8pass"])
def test_torch_logs_knows_fp8pass(tmp_path: Path, setting: str) -> None:
    output = _run(tmp_path, TORCH_LOGS=setting).stderr
    assert "graph_0 (joint hook): 3 norm fused, 3 quantize left" in output
    assert ("torch.ops.aten.mul.Tensor" in output) == (setting == "+fp8pass")
