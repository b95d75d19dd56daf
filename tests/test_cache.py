"""Identity, and Inductor's caches: a hit gives the same result and the same report."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import pytest
from torch._inductor.custom_graph_pass import CustomGraphPass

import fp8pass
from fp8pass import identity as identity_module
from fp8pass.backend import two_hooks
from fp8pass.options import Options
from fp8pass.passes import Fp8Pass
from fp8pass.target import Target

TESTS = Path(__file__).parent


# ---- identity ------------------------------------------------------------------------------------


def uuid(stage: Any = "all", **options: Any) -> Any:
    return Fp8Pass(Options.resolve({}, **options), stage).uuid()


def is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(is_plain(item) for item in value)
    return value is None or type(value) in (str, int, float, bool, bytes)


def test_uuid_is_plain_data() -> None:
    value = uuid(numerics="fast", disable=["cpu"], fuel=3, target="sm90+cutlass")
    assert is_plain(value) and is_plain(uuid())
    assert pickle.loads(pickle.dumps(value)) == value
    hash(value)
    assert uuid() == uuid()
    assert Fp8Pass(Options()).identity_text() == Fp8Pass(Options()).identity_text()


def test_uuid_tells_apart_what_changes_a_rewrite() -> None:
    values = [
        uuid(),
        uuid("joint"),
        uuid("post"),
        uuid(numerics="fast"),
        uuid(strict=True),
        uuid(force="cpu"),
        uuid(prefer=["cpu"]),
        uuid(disable=["cpu"]),
        uuid(fuel=1),
        uuid(fuel=0),
        uuid(target="sm90"),
        uuid(target="sm90+cutlass"),
        uuid(target="gfx942"),
    ]
    assert len(set(values)) == len(values)
    assert uuid(dump="some/folder") == uuid()  # writes files, changes no rewrite


def test_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = "post_grad_custom_post_pass"
    before = fp8pass.inductor_options()[hook].uuid()
    monkeypatch.setenv("FP8PASS_NUMERICS", "fast")
    assert fp8pass.inductor_options()[hook].uuid() == uuid(numerics="fast") != before
    monkeypatch.setenv("FP8PASS_DISABLE", "cpu")
    assert fp8pass.inductor_options()[hook].uuid() == uuid(numerics="fast", disable=["cpu"])
    assert fp8pass.inductor_options(numerics="exact", disable=())[hook].uuid() == before


def test_source_versions_and_machine_count(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [uuid()]
    changes = [
        ("fp8pass.identity.source_hash", lambda: "of another source"),
        ("fp8pass._version.__version__", "0.0.0"),
        ("torch.__version__", "9.9.9"),
        ("fp8pass.target.Target.detect", lambda device=None: Target.parse("x86-amx")),
    ]
    for place, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(place, value)
            found.append(uuid())
    assert uuid() == found[0]
    assert len(set(found)) == len(found)


def test_source_hash_covers_every_file_that_computes(tmp_path: Path) -> None:
    """A copy of the package has the same hash until a byte of it changes."""
    package = Path(fp8pass.__file__).parent
    code = "from fp8pass.identity import source_hash; print(source_hash())"
    copy = tmp_path / "fp8pass"
    ignore = shutil.ignore_patterns("__pycache__")

    def hashed() -> str:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        run = [sys.executable, "-c", code]
        return subprocess.check_output(run, text=True, env=environment, cwd=tmp_path).strip()

    shutil.copytree(package, copy, ignore=ignore)
    original = hashed()
    assert original == identity_module.source_hash()
    changed = copy / "kernels" / "cpu_scaled_mm.cpp"
    changed.write_text(changed.read_text() + "\n")
    assert hashed() != original


def test_a_device_without_a_target_has_an_identity_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def detect(device: Any = None) -> Target:
        raise fp8pass.errors.OptionError("no target for device type 'abacus'")

    monkeypatch.setattr(Target, "detect", detect)
    assert "abacus" in str(uuid())


def test_what_is_slow_in_the_uuid_is_done_once() -> None:
    from fp8pass.target import _detect

    uuid()
    source, device = identity_module.source_hash.cache_info(), _detect.cache_info()
    for _ in range(100):
        uuid()
    assert identity_module.source_hash.cache_info().misses == source.misses
    assert _detect.cache_info().misses == device.misses


def test_a_library_that_is_loaded_later_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Target.parse("sm90")
    monkeypatch.setattr("fp8pass.target._detect", lambda kind, index: gpu)
    before = Target.detect("cuda:0")
    monkeypatch.setattr("fp8pass.target._loaded_libraries", lambda: (("vllm", "0.21.0"),))
    after = Target.detect("cuda:0")
    assert not before.has_library("vllm") and after.has_library("vllm")
    assert before.key() != after.key() and after.spec == "sm90+vllm==0.21"


class Named(CustomGraphPass):
    """A pass of somebody else with an identity."""

    def __init__(self, name: Any) -> None:
        self.name = name

    def __call__(self, graph: Any) -> None:
        pass

    def uuid(self) -> Any:
        return self.name


def test_a_chain_has_the_identity_of_its_parts() -> None:
    def chained(*passes: Any) -> Any:
        return Fp8Pass(Options(), "all", passes).uuid()

    values = [chained(), chained(Named("a")), chained(Named("b")), chained(Named("a"), Named("b"))]
    values.append(chained(Named("b"), Named("a")))
    assert None not in values
    assert len(set(values)) == len(values)
    # Inductor does not cache what it cannot identify, and neither may we
    assert chained(Named(None)) is None
    assert chained(Named("a"), models.Watch()) is None
    assert chained(lambda graph: None) is None
    joint, post = two_hooks(Options(), {"joint_custom_pre_pass": models.Watch()})
    assert joint.uuid() is None
    assert post.uuid() is not None
    assert len(Fp8Pass(Options(), "all", (Named(None),)).identity_text()) == 32


# ---- hits and misses, in processes of their own --------------------------------------------------


def compile_in_process(
    folder: Path, *options: dict[str, Any], backend: str = "fp8pass", **environment: str
) -> list[dict[str, Any]]:
    """What the caches in ``folder`` did for one compile with each of ``options``, in turn."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("FP8PASS_")}
    variables |= {"TORCHINDUCTOR_CACHE_DIR": str(folder), **environment}
    path = [str(TESTS), str(TESTS.parent), variables.get("PYTHONPATH", "")]
    variables["PYTHONPATH"] = os.pathsep.join(path)
    request = json.dumps({"backend": backend, "options": options or ({},)})
    command = [sys.executable, str(TESTS / "cache_process.py"), request]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that holds nothing but the compiled CPU kernels, which take long to make."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    from fp8pass.kernels import cpu

    path = tmp_path_factory.mktemp("inductor")
    assert cpu.available()
    (path / "fp8pass").mkdir()
    for library in (Path(cache_dir()) / "fp8pass").glob("*.so"):
        shutil.copy2(library, path / "fp8pass")
    return path


HIT, MISS = {"hit": 1, "miss": 0, "bypass": 0}, {"hit": 0, "miss": 1, "bypass": 0}


def test_another_process_hits_both_caches_and_has_the_report(folder: Path) -> None:
    (cold,) = compile_in_process(folder)
    assert (cold["graph"], cold["autograd"]) == (MISS, MISS)
    assert cold["restored"] == [False]
    assert cold["hooks"] == [["joint", "post_grad"]]
    assert [(s["kind"], s["status"]) for s in cold["sites"][0]] == [
        ("norm", "fused"),
        ("scaled_mm", "lowered"),
    ]
    assert cold["distance"] < models.CLOSE

    warm, fast, disabled, again = compile_in_process(
        folder, {}, {"numerics": "fast"}, {"disable": ["cpu", "torch_dequant"]}, {}
    )
    for hit in (warm, again):
        assert (hit["graph"]["hit"], hit["autograd"]["hit"]) == (1, 1)
        assert hit["autograd"]["miss"] == hit["graph"]["miss"] == 0
        assert hit["restored"] == [True]
        assert hit["sites"] == cold["sites"]
        assert hit["hooks"] == cold["hooks"]
        assert "restored from cache" in hit["text"][0].lower().replace("the cache", "cache")
        assert hit["bits"] == cold["bits"]
    # an option that changes a rewrite: another identity, another entry, and a fresh report
    for miss, kernel, code in ((fast, "cpu", ""), (disabled, "", "FP8-L012")):
        assert (miss["graph"], miss["autograd"]) == (MISS, MISS)
        assert miss["restored"] == [False]
        assert (miss["sites"][0][-1]["kernel"], miss["sites"][0][-1]["code"]) == (kernel, code)
        assert miss["distance"] < 2e-2

    # the environment is an option like any other: another miss, and then a hit on the same entry
    (by_environment,) = compile_in_process(folder, FP8PASS_DISABLE="cpu,torch_dequant")
    assert by_environment["autograd"]["hit"] == 1
    assert by_environment["bits"] == disabled["bits"]
    assert by_environment["sites"] == disabled["sites"]


def test_the_inductor_option_hits_too(folder: Path) -> None:
    (cold,) = compile_in_process(folder, backend="options")
    assert (cold["graph"], cold["autograd"]) == (MISS, MISS)
    (warm,) = compile_in_process(folder, backend="options")
    assert (warm["graph"]["hit"], warm["autograd"]["hit"]) == (1, 1)
    assert warm["bits"] == cold["bits"]
    (report,) = warm["sites"]  # the set of reports of this pass, of which there is one
    assert [report] == cold["sites"]
    assert warm["restored"] == [True]
