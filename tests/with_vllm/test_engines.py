"""Real engines with tiny models: ways in, modes, restarts, what is said and what is dumped.

The models are random, so their tokens hang on near-ties; that an engine gives the same tokens twice
is tested, not that fp8pass leaves them: that its numbers are right is the subject of
``test_numbers.py``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from engines import Job, Seen, tiny

LAYERS = 2
#: Products of one forward: qkv, o, gate_up, down in every layer.
PRODUCTS = 4 * LAYERS


def compiled_line(seen: Seen) -> str:
    """The one line of an engine."""
    lines = [line for line in seen.lines if "graph" in line]
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.smoke
def test_smoke_named_in_the_configuration(tmp_path: Path) -> None:
    """Way A without any plugin, mode 2, spawned worker: every product is lowered."""
    seen = Job(tiny("dynamic"), way="A", mends=(), env={"VLLM_PLUGINS": ""}).run(tmp_path / "run")
    counts = seen.counts()
    assert seen.data["mode"] == 2
    assert counts["scaled_mm lowered"] == PRODUCTS
    assert counts["norm fused"] == 2 * LAYERS and counts["activation fused"] == LAYERS
    assert "scaled_mm left" not in counts
    line = compiled_line(seen)
    assert line.startswith("fp8pass, 1 graph compiled: 17 sites"), line
    assert all(len(ids) == 8 for ids in seen.tokens)


def test_installed_and_not_asked(tmp_path: Path) -> None:
    seen = Job(tiny("dynamic"), mends=()).run(tmp_path / "run")
    assert seen.report is None and seen.lines == []


@pytest.mark.parametrize("way", ["complement", "replace"])
@pytest.mark.parametrize("mode", [2, 3])
def test_the_plugin(way: str, mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "debug"
    job = Job(tiny("dynamic"), mode, way, compilation={"debug_dump_path": str(folder)})
    seen = job.run(tmp_path / "run")
    assert seen.data["mode"] == mode
    assert seen.counts()["scaled_mm lowered"] == PRODUCTS
    assert compiled_line(seen).startswith(f"fp8pass ({way})")
    assert list(folder.rglob("report.json")), "the report is in vLLM's debug folder too"


def test_asked_in_the_additional_configuration(tmp_path: Path) -> None:
    asked = {"fp8pass": {"mode": "complement", "disable": ["cpu", "cpu_prepared"]}}
    seen = Job(tiny("dynamic"), arguments={"additional_config": asked}).run(tmp_path / "run")
    kernels = {site.kernel for site in seen.report.select("scaled_mm")} if seen.report else set()
    assert kernels and not kernels & {"cpu", "cpu_prepared"}


def test_eager_mode_says_that_nothing_was_done(tmp_path: Path) -> None:
    seen = Job(tiny("dynamic"), mode=0, way="complement").run(tmp_path / "run")
    assert seen.report is None
    assert len(seen.lines) == 1 and "eager mode" in seen.lines[0]


def test_in_process(tmp_path: Path) -> None:
    env: dict[str, str | None] = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    seen = Job(tiny("dynamic"), way="complement", env=env).run(tmp_path / "run")
    assert seen.counts()["scaled_mm lowered"] == PRODUCTS and compiled_line(seen)


@pytest.mark.parametrize("mode", [2, 3])
def test_tensor_parallel(mode: int, tmp_path: Path) -> None:
    job = Job(tiny("dynamic"), mode, "complement", arguments={"tensor_parallel_size": 2})
    seen = job.run(tmp_path / "run")
    assert seen.counts()["scaled_mm lowered"] == 2 * PRODUCTS, "on both ranks"
    assert compiled_line(seen), "and one of them says so"


def test_restarts(tmp_path: Path) -> None:
    """Cold, warm (the artifact is loaded and the report restored), and with a changed option."""
    cache = tmp_path / "cache"
    cold = Job(tiny("dynamic"), 3, "complement").run(tmp_path / "cold", cache)
    assert "compiled" in compiled_line(cold) and not loaded(cold)

    warm = Job(tiny("dynamic"), 3, "complement").run(tmp_path / "warm", cache)
    assert loaded(warm)
    assert "3 graphs restored from the compile cache" in compiled_line(warm)
    assert warm.counts() == cold.counts() and warm.tokens == cold.tokens
    assert warm.report is not None and all(graph.from_cache for graph in warm.report.graphs)

    env: dict[str, str | None] = {"FP8PASS_DISABLE": "cpu"}
    changed = Job(tiny("dynamic"), 3, "complement", env=env).run(tmp_path / "changed", cache)
    assert "compiled" in compiled_line(changed) and not loaded(changed)
    kernels = {site.kernel for site in changed.report.select("scaled_mm")} if changed.report else {}
    assert "cpu" not in kernels

    without = Job(tiny("dynamic"), 3).run(tmp_path / "without", cache)
    assert not loaded(without) and without.lines == []


def loaded(seen: Seen) -> bool:
    """Whether vLLM loaded an artifact instead of compiling."""
    return re.search(r"Directly load AOT compilation", seen.log) is not None


def test_an_unknown_version_warns_once_and_nothing_is_done(tmp_path: Path) -> None:
    # every process of the engine finds this at its start and then knows no version
    (tmp_path / "plugin").mkdir()
    code = "import fp8pass.vllm.versions as v\nv.TESTED = v.READ = ()\n"
    (tmp_path / "plugin" / "sitecustomize.py").write_text(code, "utf-8")
    seen = Job(tiny("dynamic"), way="complement").run(tmp_path / "run")
    assert seen.report is None
    assert seen.log.count("it does nothing") >= 1


@pytest.mark.parametrize(
    ("recipe", "arguments", "products"),
    [
        ("static", {"linear_backend": "torch"}, PRODUCTS),
        ("fp8_static", {"linear_backend": "torch"}, PRODUCTS),
        ("bf16", {"linear_backend": "torch", "quantization": "fp8"}, PRODUCTS),
        ("bf16", {"quantization": "fp8"}, None),
        ("block", {}, None),
    ],
    ids=["static", "fp8_static", "online", "online_default", "block"],
)
@pytest.mark.parametrize("mode", [2, 3])
def test_formats(
    recipe: str, arguments: dict[str, str], products: int | None, mode: int, tmp_path: Path
) -> None:
    """Every format loads, compiles and generates; where vLLM quantises, all products are lowered.

    Where it chooses its own kernel of a CPU, that multiplies bf16 by FP8 weights: nothing to do.
    """
    seen = Job(tiny(recipe), mode, "complement", arguments=arguments).run(tmp_path / "run")
    assert all(len(ids) == 8 for ids in seen.tokens)
    if products is not None:
        assert seen.counts()["scaled_mm lowered"] == products
