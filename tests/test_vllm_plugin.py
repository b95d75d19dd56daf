"""The plugin for vLLM and the pass that it adds, with a stand-in for vLLM."""

from __future__ import annotations

import copy
import logging
import pickle
import subprocess
import sys
from typing import Any

import fake_vllm
import pytest
import torch
from fake_vllm import CompilationConfig, CompilationMode, FakeVllm, InductorPass
from torch import fx

from fp8pass import report
from fp8pass.errors import OptionError
from fp8pass.vllm import announcing, plugin
from fp8pass.vllm.asking import SLOTS, asked
from fp8pass.vllm.versions import READ, TESTED, missing_in, unknown

POST, PRE = SLOTS["complement"], SLOTS["replace"]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    monkeypatch.delenv("FP8PASS_VLLM", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    yield fake_vllm.install(monkeypatch)
    monkeypatch.undo()
    fake_vllm.forget(monkeypatch)


class Other(InductorPass):
    """A pass of the user."""

    def __init__(self, name: str = "other") -> None:
        self.name = name
        self.calls = 0

    def __call__(self, graph: fx.Graph) -> None:
        self.calls += 1

    def uuid(self) -> str:
        return self.name


def ours(config: Any, slot: str = POST) -> Any:
    return config.compilation_config.inductor_compile_config.get(slot)


def with_passes(vllm: FakeVllm, **passes: Any) -> Any:
    return vllm.VllmConfig(CompilationConfig(inductor_compile_config=passes))


# ---- what is asked


@pytest.mark.parametrize("text", ["", "off", "0", "no", "False", " OFF "])
def test_words_that_ask_for_nothing(text: str) -> None:
    assert asked({}, {"FP8PASS_VLLM": text}) is None


@pytest.mark.parametrize(("mode", "slot"), SLOTS.items())
def test_a_mode_is_a_slot(mode: str, slot: str) -> None:
    request = asked(None, {"FP8PASS_VLLM": f" {mode.upper()}"})
    assert request is not None and (request.mode, request.slot) == (mode, slot)


def test_the_configuration_outranks_the_environment() -> None:
    env = {"FP8PASS_VLLM": "complement"}
    assert asked({"fp8pass": None}, env) is None
    assert asked({"fp8pass": False}, env) is None
    assert asked({"other": 1}, env) is not None
    request = asked({"fp8pass": {"mode": "replace", "numerics": "fast"}}, env)
    assert request is not None
    assert (request.mode, dict(request.options)) == ("replace", {"numerics": "fast"})
    request = asked({"fp8pass": {"disable": ["cpu"]}}, {})
    assert request is not None and request.mode == "complement"


@pytest.mark.parametrize(
    ("additional", "env", "words"),
    [
        (None, {"FP8PASS_VLLM": "complete"}, "FP8PASS_VLLM: 'complete'"),
        ({"fp8pass": "complete"}, {}, "additional_config['fp8pass']: 'complete'"),
        ({"fp8pass": ["complement"]}, {}, "neither a mode nor a dict"),
        ({"fp8pass": True}, {}, "True is not allowed"),
    ],
)
def test_a_bad_request_is_an_error(additional: Any, env: dict[str, str], words: str) -> None:
    with pytest.raises(OptionError) as error:
        asked(additional, env)
    assert words in str(error.value)


# ---- versions


@pytest.mark.parametrize("version", [f"{a}.{b}.1+cpu" for a, b in TESTED + READ])
def test_known_versions(version: str) -> None:
    assert unknown(version) == ""


@pytest.mark.parametrize("version", ["0.29.9", "0.34.0", "1.32.0", "0.320.0", "dev", ""])
def test_other_versions_are_unknown(version: str) -> None:
    assert "it does nothing" in unknown(version)


def test_an_unknown_version_warns_once_and_nothing_is_added(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vllm = fake_vllm.install(monkeypatch, "0.99.0")
    monkeypatch.setenv("FP8PASS_VLLM", "complement")
    plugin.register()
    plugin.register()
    assert ours(vllm.VllmConfig()) is None
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "0.99.0" in caplog.text


def test_a_named_pass_stands_aside_too_but_the_users_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch, "0.99.0")
    from fp8pass.vllm.vllm_pass import VllmPass

    other = Other()
    graph = quantised_graph()
    before = str(graph)
    VllmPass(before=(other,))(graph)
    assert other.calls == 1 and str(graph) == before


def test_what_is_missing_is_named(vllm: FakeVllm) -> None:
    assert missing_in(vllm.VllmConfig, InductorPass) == ""
    assert "__post_init__" in missing_in(CompilationConfig, InductorPass)
    assert "CustomGraphPass" in missing_in(vllm.VllmConfig, object)
    vllm.VllmConfig.__dataclass_fields__.pop("additional_config")
    assert "additional_config" in missing_in(vllm.VllmConfig, InductorPass)


# ---- the wrapper


def test_not_asked_nothing_is_added_and_nothing_said(
    vllm: FakeVllm, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    plugin.register()
    config = vllm.VllmConfig()
    assert config.compilation_config.inductor_compile_config == {} and config.done == 1
    assert not caplog.records
    assert "fp8pass.vllm.vllm_pass" not in sys.modules


def test_registering_imports_no_vllm() -> None:
    code = (
        "import sys, torch; from fp8pass.vllm.plugin import register; register();"
        "assert 'vllm' not in sys.modules; assert 'fp8pass.ops' not in sys.modules;"
        "assert 'fp8pass.options' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("mode", "slot"), SLOTS.items())
def test_asked_in_the_environment(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch, mode: str, slot: str
) -> None:
    monkeypatch.setenv("FP8PASS_VLLM", mode)
    plugin.register()
    plugin.register()
    config = vllm.VllmConfig()
    assert config.done == 1
    assert list(config.compilation_config.inductor_compile_config) == [slot]
    assert ours(config, slot).mode == mode


def test_asked_in_the_configuration_after_registering_unasked(vllm: FakeVllm) -> None:
    plugin.register()
    config = vllm.VllmConfig(additional_config={"fp8pass": {"numerics": "fast", "fuel": 3}})
    options = ours(config).options
    assert (options.numerics, options.fuel) == ("fast", 3)


def test_a_bad_option_is_an_error_at_the_configuration(vllm: FakeVllm) -> None:
    plugin.register()
    with pytest.raises(OptionError, match="unknown fp8pass option 'nummerics'"):
        vllm.VllmConfig(additional_config={"fp8pass": {"nummerics": "fast"}})


def test_a_configuration_is_given_the_pass_once(vllm: FakeVllm) -> None:
    plugin.register()
    config = vllm.VllmConfig(additional_config={"fp8pass": "complement"})
    first = ours(config)
    config.__post_init__()  # vLLM derives configurations from others
    assert ours(config) is first and config.done == 2


def test_a_pass_that_the_user_named_is_left_alone(vllm: FakeVllm) -> None:
    from fp8pass_vllm import PASS

    plugin.register()
    config = with_passes(vllm, **{PRE: PASS})
    config.additional_config = {"fp8pass": "complement"}
    config.__post_init__()
    assert config.compilation_config.inductor_compile_config == {PRE: PASS}


def test_a_users_pass_is_chained_under_a_joint_identity(vllm: FakeVllm) -> None:
    plugin.register()
    identities = set()
    for name in ("one", "two"):
        config = with_passes(vllm, **{POST: Other(name)})
        config.additional_config = {"fp8pass": "complement"}
        config.__post_init__()
        chained = ours(config)
        identities.add(chained.uuid())
        other = chained.before[0]
        chained(quantised_graph())
        assert other.calls == 1 and other.name == name
    alone = vllm.VllmConfig(additional_config={"fp8pass": "complement"})
    assert len(identities | {ours(alone).uuid()}) == 3


def test_a_slot_with_something_else_in_it_is_left_alone(
    vllm: FakeVllm, caplog: pytest.LogCaptureFixture
) -> None:
    plugin.register()
    config = with_passes(vllm, **{POST: print})
    config.additional_config = {"fp8pass": "complement"}
    config.__post_init__()
    assert ours(config) is print and "which is no InductorPass" in caplog.text


@pytest.mark.parametrize(
    ("compilation", "words"),
    [
        (CompilationConfig(mode=CompilationMode.NONE), "eager mode"),
        (CompilationConfig(mode=CompilationMode.STOCK_TORCH_COMPILE), "mode 1"),
        (CompilationConfig(backend="eager"), "'eager'"),
    ],
)
def test_where_nothing_is_compiled_one_line_says_so(
    vllm: FakeVllm, caplog: pytest.LogCaptureFixture, compilation: CompilationConfig, words: str
) -> None:
    caplog.set_level(logging.INFO)
    plugin.register()
    for _ in range(2):
        config = vllm.VllmConfig(copy.deepcopy(compilation), {"fp8pass": "complement"})
        assert ours(config) is None
    (record,) = caplog.records
    assert words in record.getMessage()


def test_a_vllm_of_another_shape_gets_one_line(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    del vllm.VllmConfig.__post_init__
    monkeypatch.setenv("FP8PASS_VLLM", "complement")
    plugin.register()
    assert "no __post_init__" in caplog.text


# ---- the pass


def quantised_graph() -> fx.Graph:
    """x / scale clamped and cast to fp8, as a graph with values."""

    def program(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (x.float() * scale.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn)

    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(program, tracing_mode="fake")(torch.ones(4, 8), torch.ones(1)).graph


def test_the_pass_survives_pickling_with_the_options_of_its_process(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fp8pass_vllm import PASS

    monkeypatch.setenv("FP8PASS_NUMERICS", "fast")
    data = pickle.dumps(PASS)
    monkeypatch.delenv("FP8PASS_NUMERICS")
    sent = pickle.loads(data)
    assert sent.options.numerics == "fast" and PASS.options.numerics == "exact"
    assert copy.deepcopy(sent) is sent
    assert len(data) < 2000, "plain options, nothing that was built"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FP8PASS_NUMERICS", "fast"),
        ("FP8PASS_DISABLE", "cpu"),
        ("FP8PASS_TARGET", "sm90"),
        ("FP8PASS_FUEL", "1"),
        ("VLLM_DISABLED_KERNELS", "CutlassFP8ScaledMMLinearKernel"),
    ],
)
def test_a_switch_changes_the_identity(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    from fp8pass_vllm import PASS

    before = PASS.uuid()
    assert PASS.uuid() == before and isinstance(before, str)
    monkeypatch.setenv(variable, value)
    assert PASS.uuid() != before


def test_what_changes_no_rewrite_changes_no_identity(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from fp8pass_vllm import PASS

    before = PASS.uuid()
    monkeypatch.setenv("FP8PASS_DUMP", str(tmp_path))
    assert PASS.uuid() == before


def test_the_range_of_tokens_is_part_of_the_identity(vllm: FakeVllm) -> None:
    from fp8pass_vllm import PASS

    seen = {PASS.uuid()}
    for first, last in ((1, 64), (65, 128)):
        with vllm.compiling(first, last):
            seen.add(PASS.uuid())
    assert len(seen) == 3


def test_a_users_pass_is_asked_for_its_range(vllm: FakeVllm) -> None:
    from fp8pass.vllm.vllm_pass import VllmPass

    class Small(Other):
        def is_applicable_for_range(self, compile_range: Any) -> bool:
            return compile_range.end <= 64

    other = Small()
    chained = VllmPass(before=(other,))
    with vllm.compiling(1, 64):
        chained(quantised_graph())
    with vllm.compiling(65, 128):
        chained(quantised_graph())
    assert other.calls == 1


def product_graph(*dynamic: int) -> fx.Graph:
    """A scaled product of ``[18, 64]`` by ``[64, 32]`` in which the named dims are symbolic."""
    from torch._dynamo.backends.common import aot_autograd

    def program(a: torch.Tensor, w: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor) -> Any:
        return torch._scaled_mm(a, w.t(), sa, sb, out_dtype=torch.bfloat16)

    fp8 = torch.float8_e4m3fn
    a, w = torch.zeros(18, 64).to(fp8), torch.zeros(32, 64).to(fp8)
    for dim in dynamic:
        torch._dynamo.mark_dynamic((a, w)[dim], 0)
    traced: list[fx.Graph] = []

    def keep(gm: fx.GraphModule, inputs: Any) -> Any:
        traced.append(gm.graph)
        return gm.forward

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep)
    torch.compile(program, backend=backend)(a, w, torch.ones(1), torch.ones(1))
    return traced[0]


@torch.no_grad()
def test_a_kernel_is_chosen_for_the_range_of_tokens(vllm: FakeVllm) -> None:
    from fp8pass_vllm import PASS

    def plan(graph: fx.Graph) -> str:
        PASS(graph)
        (site,) = report.reports()[-1].select("scaled_mm")
        return site.plan

    assert plan(product_graph(0)).startswith("2-=")
    with vllm.compiling(1, 64):
        assert plan(product_graph(0)).startswith("1-64=")
        # which of two symbols the tokens are is not known
        assert plan(product_graph(0, 1)).startswith("2-=")
        assert plan(product_graph()).startswith("18=")


# ---- the line and the report


def test_the_whole_model_is_announced_at_once(
    vllm: FakeVllm, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fp8pass_vllm import PASS

    caplog.set_level(logging.INFO)
    PASS.uuid()
    PASS(quantised_graph())
    (record,) = [r for r in caplog.records if r.name == "vllm.fp8pass"]
    assert record.getMessage() == "fp8pass, 1 graph compiled: 1 site; left 1 quantize (FP8-F002)."


def test_pieces_are_announced_when_vllm_says_that_it_compiled(
    vllm: FakeVllm, caplog: pytest.LogCaptureFixture, tmp_path: Any, monkeypatch: Any
) -> None:
    from fp8pass_vllm import PASS

    caplog.set_level(logging.INFO)
    monitor = logging.getLogger("vllm.compilation.monitor")
    monkeypatch.setenv("FP8PASS_DUMP", str(tmp_path / "dump"))
    PASS.uuid()
    for first, last in ((1, 64), (65, 128)):
        with vllm.compiling(first, last):
            PASS(quantised_graph())
    mine = [r for r in caplog.records if r.name == "vllm.fp8pass"]
    assert mine == []
    monitor.info("Starting torch.compile")
    assert [r for r in caplog.records if r.name == "vllm.fp8pass"] == []
    monitor.info("torch.compile took %.2f s in total", 1.0)
    monitor.info("torch.compile took %.2f s in total", 1.0)
    (record,) = [r for r in caplog.records if r.name == "vllm.fp8pass"]
    assert "fp8pass, 2 graphs compiled: 2 sites" in record.getMessage()
    names = [g.name for g in report.load_dump(tmp_path / "dump").graphs]
    assert names == ["piece for 1 to 64 tokens", "piece for 65 to 128 tokens"]

    # the next process loads vLLM's artifact: the pass is asked for its identity and not called
    caplog.clear()
    fake_vllm.forget(monkeypatch)
    from fp8pass_vllm import PASS as again

    report.clear()
    monkeypatch.setenv("FP8PASS_DUMP", str(tmp_path / "second"))
    again.uuid()
    monitor.info("torch.compile took %.2f s in total", 1.0)
    (record,) = [r for r in caplog.records if r.name == "vllm.fp8pass"]
    assert "2 graphs restored from the compile cache: 2 sites" in record.getMessage()
    restored = report.load_dump(tmp_path / "second")
    assert [g.from_cache for g in restored.graphs] == [True, True]
    assert [r.from_cache for r in report.reports()] == [True, True]


def test_the_report_goes_to_vllms_debug_folder_too(
    vllm: FakeVllm, caplog: pytest.LogCaptureFixture, tmp_path: Any, monkeypatch: Any
) -> None:
    plugin.register()
    caplog.set_level(logging.INFO)
    for dump in (None, tmp_path / "dump"):
        if dump is not None:
            monkeypatch.setenv("FP8PASS_DUMP", str(dump))
        caplog.clear()
        debug = tmp_path / f"debug{dump is None}"
        config = vllm.VllmConfig(
            CompilationConfig(debug_dump_path=str(debug)), {"fp8pass": "complement"}
        )
        ours(config)(quantised_graph())
        (line,) = [r.getMessage() for r in caplog.records if r.name == "vllm.fp8pass"]
        folders = [str(f) for f in (dump, debug / "fp8pass") if f is not None]
        assert line.endswith(f"Report: {', '.join(folders)}"), line
        for folder in folders:
            assert len(report.load_dump(folder).graphs) == 1


def test_a_pass_shows_what_it_was_given(vllm: FakeVllm) -> None:
    from fp8pass_vllm import PASS

    plugin.register()
    asked_for = {"fp8pass": {"mode": "replace", "numerics": "fast"}}
    config = vllm.VllmConfig(additional_config=asked_for)
    assert repr(ours(config, PRE)) == "fp8pass(replace, numerics='fast')"
    assert repr(PASS) == "fp8pass(options of the environment)"


def test_a_line_counts_what_was_done_and_what_was_left() -> None:
    sites = [
        report.Site(kind="norm", status="fused", kernel="inductor"),
        report.Site(kind="scaled_mm", status="lowered", kernel="cpu"),
        report.Site(kind="scaled_mm", status="lowered", kernel="cpu"),
        report.Site(kind="quantize", status="left", code="FP8-F002", message="why"),
    ]
    found = report.Report([report.GraphRecord("g", "post_grad", sites=sites)])
    assert announcing.line_of("replace", found, restored=True) == (
        "fp8pass (replace), 1 graph restored from the compile cache: 4 sites; 1 norm fused, "
        "2 scaled_mm lowered; left 1 quantize (FP8-F002)."
    )
