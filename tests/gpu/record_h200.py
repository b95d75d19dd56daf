"""Record what a GPU runs for the golden models: the final graphs, and the kernels of one forward.

    python tests/gpu/record_h200.py tests/golden/h200.json

Compiles each golden model of target sm90 with fp8pass's backend of ``torch.compile`` on the device,
keeps the graph that Inductor generates code from, and profiles forwards. Each result is compared
with the model's reference on the CPU, and each graph with the one that ``fp8pass.graphs_for`` makes
in a process that sees no device. The file is read by tests/test_recorded_h200.py on any machine.
Exits with 1 if a graph or a result differs.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import golden_graphs  # noqa: E402
import models  # noqa: E402
import torch  # noqa: E402
from golden_graphs import MODELS  # noqa: E402
from torch import fx  # noqa: E402

from fp8pass.report import clear  # noqa: E402
from fp8pass.report.listing import call_names, listing  # noqa: E402
from fp8pass.target import Target  # noqa: E402

SCHEMA = 1
TARGET = "sm90"
#: Rows of the forwards: those of the trace, and enough for another part of a plan.
MORE_ROWS = 80
#: Relative L2 distance from the reference; another order of a sum moves a few codes.
CLOSE = 2e-2


@contextmanager
def final_graphs() -> Iterator[list[fx.Graph]]:
    """The graphs that Inductor generates code from, while it compiles."""
    import torch._inductor.compile_fx as compile_fx

    real, found = compile_fx.post_grad_passes, []

    def keep(gm: fx.GraphModule, is_inference: bool) -> None:
        real(gm, is_inference)
        found.append(gm.graph)

    compile_fx.post_grad_passes = keep
    try:
        yield found
    finally:
        compile_fx.post_grad_passes = real


def kernels_of(function: Any, x: torch.Tensor) -> dict[str, int]:
    """Names and counts of what the device runs for one forward."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        function(x)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        function(x)
        torch.cuda.synchronize()
    events = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return dict(sorted(Counter(e.name for e in events).items()))


def record(name: str) -> dict[str, Any]:
    """What the device does for one golden model."""
    import fp8pass

    golden = MODELS[name]
    model, x = golden.build(), golden.inputs()
    on_device = golden.build().cuda()
    options = {f"fp8pass.{key}": value for key, value in golden.options.items()}
    torch._dynamo.reset()
    clear()
    marked = x.cuda()
    if golden.dynamic:
        torch._dynamo.mark_dynamic(marked, 0)
    result: dict[str, Any] = {"distance": {}, "kernels": {}}
    with torch.no_grad(), final_graphs() as found:
        compiled = torch.compile(
            on_device, backend=fp8pass.fp8pass_backend, options=options, fullgraph=True
        )
        compiled(marked)
        (graph,) = found
        result["calls"] = call_names(graph)
        result["graph"] = listing(graph)
        planned = torch.ops.fp8pass.scaled_mm_planned.default
        nodes = graph.find_nodes(op="call_function", target=planned, sort=True)
        result["plans"] = [node.args[7] for node in nodes]
        sites = fp8pass.reports()[-1].sites
        result["sites"] = [[s.kind, s.status, s.kernel, s.plan] for s in sites]
        for rows in (golden_graphs.ROWS, MORE_ROWS) if golden.dynamic else (golden_graphs.ROWS,):
            given = models.rows(rows).to(golden.dtype)
            wanted = models.reference(model, given)
            got = compiled(given.cuda()).cpu()
            result["distance"][str(rows)] = models.distance(got, wanted)
            result["kernels"][str(rows)] = kernels_of(compiled, given.cuda())
        assert len(found) == 1, "compiled again for another number of rows"
    return result


def crossed(file: str) -> None:
    """In a process without a device: the graphs that graphs_for makes, into ``file``."""
    assert not torch.cuda.is_available()
    texts = {}
    for name in golden_graphs.RECORDED:
        texts[name] = listing(golden_graphs.found(TARGET, name).graph.after.graph)
    Path(file).write_text(json.dumps(texts))


def crossed_elsewhere() -> dict[str, str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "crossed.json"
        command = [sys.executable, __file__, "--crossed", str(file)]
        subprocess.run(command, env=environment, check=True)
        texts: dict[str, str] = json.loads(file.read_text())
        return texts


def main(file: str) -> int:
    import torch._inductor.config as inductor

    found: dict[str, Any] = {}
    bad = 0
    with inductor.patch(force_disable_caches=True):
        for name in golden_graphs.RECORDED:
            found[name] = record(name)
            print(name, found[name]["distance"], found[name]["kernels"], flush=True)
            bad += any(value > CLOSE for value in found[name]["distance"].values())
    for name, text in crossed_elsewhere().items():
        here = found[name]["graph"]
        found[name]["crossed_is_equal"] = text == here
        if text != here:
            bad += 1
            lines = difflib.unified_diff(text.splitlines(), here.splitlines(), "crossed", "device")
            print(name, *lines, sep="\n")
    target = Target.detect("cuda")
    data = {
        "schema": SCHEMA,
        "device": torch.cuda.get_device_name(),
        "target": target.spec,
        "runtime": dict(target.runtime),
        "models": found,
    }
    Path(file).write_text(json.dumps(data, indent=1) + "\n")
    print(f"{len(found)} models written to {file}, {bad} that differ")
    return 1 if bad else 0


if __name__ == "__main__":
    if sys.argv[1] == "--crossed":
        crossed(sys.argv[2])
    else:
        raise SystemExit(main(sys.argv[1]))
