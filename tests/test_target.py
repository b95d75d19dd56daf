"""Targets: named without a device, and found without a wrong guess."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from fp8pass import target as module
from fp8pass.errors import OptionError
from fp8pass.target import LIBRARIES, UNKNOWN, Target

NAMES = sorted(module._ARCHITECTURES)


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name: str) -> None:
    target = Target.parse(name)
    assert target.arch == target.spec == name
    assert Target.parse(target.spec) == target and hash(target) == hash(Target.parse(name))
    assert (target.fp8_dtype is None) == (target.fp8_max is None)


@pytest.mark.parametrize("library", LIBRARIES)
def test_libraries(library: str) -> None:
    target = Target.parse(f"sm90+{library}")
    assert target.has_library(library) and target.spec == f"sm90+{library}"
    assert not Target.parse("sm90").has_library(library)


def test_spelling() -> None:
    assert Target.parse(" SM90 + Cutlass ") == Target.parse("sm90+cutlass")
    assert Target.parse("sm90+vllm+cutlass+vllm").spec == "sm90+cutlass+vllm"
    assert Target.parse("cpu").arch == "cpu-generic"
    assert Target.parse("xpu").arch == "xpu-bmg"


@pytest.mark.parametrize(
    ("text", "named", "allowed"),
    [
        ("sm", "sm", "sm90"),
        ("sn90", "sn90", "sm90"),
        ("sm9o", "sm9o", "sm90"),
        ("gfx", "gfx", "gfx942"),
        ("mi300", "mi300", "gfx942"),
        ("", "''", "gfx942"),
        ("cuda", "cuda", "x86-amx"),
        ("sm90+", "''", "cutlass"),
        ("sm90+cublas", "cublas", "flashinfer"),
        ("+cutlass", "+cutlass", "sm90"),
    ],
)
def test_errors_name_value_and_allowed(text: str, named: str, allowed: str) -> None:
    with pytest.raises(OptionError) as info:
        Target.parse(text)
    assert named in str(info.value) and allowed in str(info.value)


def test_facts() -> None:
    """What decides: who has FP8 products, in which format, and who is called what by torch."""
    no_fp8 = {name for name in NAMES if Target.parse(name).fp8_dtype is None}
    assert no_fp8 == {"sm75", "sm80", "sm86", "gfx90a", "gfx1100", "xpu-pvc"}
    fnuz = {name for name in NAMES if Target.parse(name).fp8_dtype == torch.float8_e4m3fnuz}
    assert fnuz == {"gfx942"}
    assert Target.parse("gfx942").fp8_max == 240.0 and Target.parse("gfx950").fp8_max == 448.0
    assert {Target.parse(n).device_type for n in NAMES if n.startswith("gfx")} == {"cuda"}
    assert {Target.parse(n).kind for n in NAMES if n.startswith("gfx")} == {"rocm"}
    assert Target.parse("sm100").arch != Target.parse("sm120").arch


def test_key_tells_targets_apart() -> None:
    keys = {Target.parse(name).key() for name in NAMES}
    keys |= {Target.parse(f"sm90+{library}").key() for library in LIBRARIES}
    assert len(keys) == len(NAMES) + len(LIBRARIES)
    hash(tuple(keys))


def test_parse_asks_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a device was asked")

    for name in ("is_available", "device_count", "get_device_properties", "current_device"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", refuse)
    for name in NAMES:
        Target.parse(name)


def test_this_cpu() -> None:
    target = Target.detect("cpu")
    assert target.kind == target.device_type == "cpu" and target.units == os.cpu_count()
    assert target.torch_version == tuple(int(p) for p in torch.__version__.split(".")[:2])
    assert Target.parse(target.spec).arch == target.arch
    assert Target.detect(torch.device("cpu")) == target


def test_no_accelerator_means_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert Target.detect() == Target.detect("cpu")


@pytest.mark.parametrize(
    ("capabilities", "machine", "arch"),
    [
        ({"avx2": True}, "x86_64", "x86-avx2"),
        ({"avx2": True, "avx512_f": True}, "x86_64", "x86-avx512"),
        ({"avx2": True, "avx512_f": True, "amx_tile": True}, "AMD64", "x86-amx"),
        ({"sse": True}, "x86_64", "cpu-generic"),
        ({"neon": True}, "aarch64", "aarch64"),
        ({"neon": True}, "arm64", "aarch64"),
        ({"vsx": True}, "ppc64le", "cpu-generic"),
    ],
)
def test_cpu_architectures(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], machine: str, arch: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    monkeypatch.setattr(module.platform, "machine", lambda: machine)
    assert module._detect_cpu().arch == arch


@pytest.mark.parametrize(
    ("hip", "properties", "arch"),
    [
        (None, {"major": 9, "minor": 0}, "sm90"),
        (None, {"major": 12, "minor": 0}, "sm120"),
        ("6.4", {"gcnArchName": "gfx942:sramecc+:xnack-"}, "gfx942"),
    ],
)
def test_gpu_architectures(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, properties: dict[str, Any], arch: str
) -> None:
    found = SimpleNamespace(**properties, multi_processor_count=33)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    target = module._detect_cuda(0)
    assert (target.arch, target.units, target.device_type) == (arch, 33, "cuda")
    assert target.kind == ("rocm" if hip else "cuda")


@pytest.fixture
def nothing_warned_of() -> None:
    module._warn_of.cache_clear()


def warned(recwarn: pytest.WarningsRecorder) -> list[str]:
    return [str(w.message) for w in recwarn if "does not know the architecture" in str(w.message)]


@pytest.mark.parametrize(
    ("hip", "properties", "arch"),
    [
        (None, {"major": 7, "minor": 0}, "sm70"),
        (None, {"major": 13, "minor": 1}, "sm131"),
        ("7.0", {"gcnArchName": "gfx1250:sramecc+"}, "gfx1250"),
    ],
)
def test_unknown_gpu(
    monkeypatch: pytest.MonkeyPatch,
    nothing_warned_of: None,
    recwarn: pytest.WarningsRecorder,
    hip: str | None,
    properties: dict[str, Any],
    arch: str,
) -> None:
    """A device that is newer than this version, or too old, is no error: one warning."""
    found = SimpleNamespace(**properties, multi_processor_count=33)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    for _ in range(2):
        target = module._detect_cuda(0)
    assert (target.kind, target.arch, target.units) == (UNKNOWN, arch, 33)
    assert target.fp8_dtype is None and target.device_type == "cuda"
    assert len(warned(recwarn)) == 1 and arch in warned(recwarn)[0]
    assert Target.parse(target.spec).arch == arch


@pytest.mark.parametrize(
    ("name", "device_type"),
    [
        ("unknown", "cuda"),
        ("sm999", "cuda"),
        ("sm100a", "cuda"),
        ("gfx9999", "cuda"),
        ("gfx90c", "cuda"),
        ("mps-unknown", "mps"),
    ],
)
def test_names_that_look_like_architectures(
    nothing_warned_of: None, recwarn: pytest.WarningsRecorder, name: str, device_type: str
) -> None:
    first, again = Target.parse(name), Target.parse(f"{name}+vllm")
    assert (first.kind, first.arch, first.device_type) == (UNKNOWN, name, device_type)
    assert first.fp8_dtype is None and not first.host and again.has_library("vllm")
    assert len(warned(recwarn)) == 1


def test_unknown_device_types(nothing_warned_of: None, recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(OptionError, match="meta"):
        Target.detect("meta")
    target = module._detect("mps", None)
    assert (target.kind, target.device_type) == (UNKNOWN, "mps")
    assert len(warned(recwarn)) == 1


def test_aiter_is_found_where_it_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not hasattr(torch.ops._C, "cutlass_scaled_mm")
    assert module._loaded_libraries() == ()
    aiter = ModuleType("aiter")
    monkeypatch.setitem(sys.modules, "aiter", aiter)
    assert module._loaded_libraries() == (("aiter", ""),)
    monkeypatch.setattr(aiter, "__version__", "0.1.7.dev3+g12", raising=False)
    assert module._loaded_libraries() == (("aiter", "0.1.7.dev3+g12"),)


def test_versions_of_libraries() -> None:
    target = Target.parse("gfx942+vllm==0.21.0+aiter")
    assert target.spec == "gfx942+aiter+vllm==0.21"
    assert target.library_version("vllm") == (0, 21)
    assert target.library_version("aiter") is None and target.has_library("aiter")
    assert target.library_version("cutlass") is None
    assert Target.parse(target.spec).library_version("vllm") == (0, 21)
    built = replace(target, libraries=(("vllm", "0.21.1rc1.dev8+gabc"),))
    assert built.spec == "gfx942+vllm==0.21"
    assert replace(target, libraries=(("vllm", "dev"),)).spec == "gfx942+vllm"
    for text in ("gfx942+vllm==", "gfx942+vllm==new", "gfx942+==0.21"):
        with pytest.raises(OptionError):
            Target.parse(text)
