"""Target: the device a graph is compiled for, as a plain value.

``Target.detect()`` reads the machine; ``Target.parse("sm90+cutlass")`` needs no such machine. All
decisions (which kernel, which fp8 dtype) are functions of a target, so that the choice for any
device can be made, printed and tested on any other. SM10x and SM12x are different architectures,
and ROCm's numbers are never compared with CUDA's: an architecture is a name, not a number.

An architecture that is not in the table gets a target of kind ``unknown`` and one warning: no
kernel is chosen for it, so its graphs keep the operators they came with, and nothing raises. That
holds for a device that is found, and for a name that looks like an architecture (``sm999``,
``gfx9999``, ``unknown`` itself), since a newer device than this version knows is no mistake of the
user's. Any other name is taken for a typo and is an error.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import warnings
from dataclasses import dataclass, replace
from functools import cache

import torch

from fp8pass.errors import OptionError

#: architecture -> (device kind, native fp8 dtype or None, compute units or None).
#: Compute units are those of the usual part: sm90 = H100/H200 SXM, gfx942 = MI300X, ...
_ARCHITECTURES: dict[str, tuple[str, torch.dtype | None, int | None]] = {
    "x86-avx2": ("cpu", torch.float8_e4m3fn, None),
    "x86-avx512": ("cpu", torch.float8_e4m3fn, None),
    "x86-amx": ("cpu", torch.float8_e4m3fn, None),
    "x86-amx-fp8": ("cpu", torch.float8_e4m3fn, None),
    "aarch64": ("cpu", torch.float8_e4m3fn, None),
    "cpu-generic": ("cpu", torch.float8_e4m3fn, None),
    "sm75": ("cuda", None, 40),
    "sm80": ("cuda", None, 108),
    "sm86": ("cuda", None, 84),
    "sm89": ("cuda", torch.float8_e4m3fn, 142),
    "sm90": ("cuda", torch.float8_e4m3fn, 132),
    "sm100": ("cuda", torch.float8_e4m3fn, 148),
    "sm103": ("cuda", torch.float8_e4m3fn, 160),
    "sm120": ("cuda", torch.float8_e4m3fn, 170),
    "sm121": ("cuda", torch.float8_e4m3fn, 48),
    "gfx90a": ("rocm", None, 104),
    "gfx942": ("rocm", torch.float8_e4m3fnuz, 304),
    "gfx950": ("rocm", torch.float8_e4m3fn, 256),
    "gfx1100": ("rocm", None, 96),
    "gfx1200": ("rocm", torch.float8_e4m3fn, 32),
    "gfx1201": ("rocm", torch.float8_e4m3fn, 64),
    "xpu-bmg": ("xpu", torch.float8_e4m3fn, 20),
    "xpu-pvc": ("xpu", None, 128),
}
#: torch's device type of the host, where constants are computed and weights are packed.
HOST = "cpu"
#: torch's device type of NVIDIA's devices and of AMD's, for which libraries share their sources.
GPU = "cuda"

#: Short names of a whole kind; "cpu" is the most careful of its architectures.
_ALIASES = {"cpu": "cpu-generic", "xpu": "xpu-bmg"}

#: Libraries that may stand behind a "+" in a target's name.
#: ``vllm_xpu`` is the distribution vllm-xpu-kernels, with which vLLM runs on XPUs: it has operators
#: and versions of its own.
LIBRARIES = ("aiter", "cutlass", "deepgemm", "flashinfer", "triton", "vllm", "vllm_xpu")

#: Feature of a GPU target whose machine has no Triton. It comes with torch's builds for GPUs, so
#: its absence is what has to be said.
NO_TRITON = "no-triton"

#: The same of parts of vLLM's library, where another part of it is loaded.
NO_VLLM_PRODUCERS, NO_MARLIN = "no-vllm-producers", "no-vllm-marlin"

#: The architecture of CPUs that multiply fp8 (AMX-FP8). torch does not tell them from others: what
#: does is vLLM's library, which is also the only one that has a kernel for them.
AMX_FP8 = "x86-amx-fp8"
#: Feature of a CPU with AVX-512 BF16, told where a library for it is loaded.
AVX512_BF16 = "avx512-bf16"

#: Kind of a target whose architecture is not in the table, and the name of one without a name.
UNKNOWN = "unknown"
#: Names that are taken for architectures, with torch's device type. What a device of another type
#: than these is called ends in ``-unknown``.
_LOOKS_LIKE = ((r"sm[1-9][0-9]{1,2}[a-z]?", "cuda"), (r"gfx[0-9a-f]{3,5}", "cuda"))
_NAMELESS = "-unknown"

#: torch's device type for each kind: ROCm builds of torch call their devices "cuda".
_DEVICE_TYPES = {"cpu": "cpu", "cuda": "cuda", "rocm": "cuda", "xpu": "xpu"}


def architectures() -> tuple[str, ...]:
    """The names of all architectures that :meth:`Target.parse` knows, short names apart."""
    return tuple(_ARCHITECTURES)


@dataclass(frozen=True, slots=True)
class Target:
    """A device to compile for.

    Attributes:
        kind: ``cpu``, ``cuda``, ``rocm`` or ``xpu``; ``unknown`` for an architecture that fp8pass
            does not know, for which no kernel is chosen.
        arch: architecture name such as ``sm90``, ``gfx942``, ``x86-amx``.
        fp8_dtype: the fp8 dtype of its products, or None where it has none.
        units: number of compute units (SMs, CUs, Xe cores, cores), or None if not known.
        libraries: (name, version) of kernel libraries that can be called; version may be "".
        runtime: (name, version) of what runs it: torch, CUDA, ROCm.
        features: further facts, such as ``"compiler"`` on a CPU.
    """

    kind: str
    arch: str
    fp8_dtype: torch.dtype | None
    units: int | None = None
    libraries: tuple[tuple[str, str], ...] = ()
    runtime: tuple[tuple[str, str], ...] = ()
    features: frozenset[str] = frozenset()

    @property
    def fp8_max(self) -> float | None:
        """Largest finite value of :attr:`fp8_dtype`, None without fp8."""
        return None if self.fp8_dtype is None else float(torch.finfo(self.fp8_dtype).max)

    @property
    def spec(self) -> str:
        """The name that :meth:`parse` takes, e.g. ``"sm90+cutlass"`` or ``"gfx942+vllm==0.21"``."""
        parts = [self.arch]
        for name, _ in self.libraries:
            version = self.library_version(name)
            parts.append(name if version is None else f"{name}=={version[0]}.{version[1]}")
        return "+".join(parts)

    @property
    def host(self) -> bool:
        """Whether the target is the CPU itself, no accelerator."""
        return self.device_type == HOST

    @property
    def device_type(self) -> str:
        """What ``torch.device(...).type`` says on this target (ROCm says ``cuda``)."""
        if self.kind == UNKNOWN:
            return _device_type_of(self.arch)
        return _DEVICE_TYPES[self.kind]

    @property
    def torch_version(self) -> tuple[int, int]:
        """(major, minor) of the torch that will run the graph."""
        text = dict(self.runtime).get("torch", str(torch.__version__))
        major, minor = text.split(".")[:2]
        return int(major), int(minor)

    def has_library(self, name: str) -> bool:
        """Whether a kernel library is declared or was found."""
        return any(library == name for library, _ in self.libraries)

    def library_version(self, name: str) -> tuple[int, int] | None:
        """(major, minor) of a kernel library; None if it is not there or its version not known."""
        numbers = re.match(r"([0-9]{1,9})\.([0-9]{1,9})", dict(self.libraries).get(name, ""))
        return None if numbers is None else (int(numbers[1]), int(numbers[2]))

    def key(self) -> tuple[object, ...]:
        """Plain data that identifies the target in a cache key."""
        dtype = None if self.fp8_dtype is None else str(self.fp8_dtype)
        features = tuple(sorted(self.features))
        return (self.kind, self.arch, dtype, self.units, self.libraries, self.runtime, features)

    @staticmethod
    def parse(text: str) -> Target:
        """``"sm90"``, ``"gfx942+aiter"``, ``"cpu"`` ... -> a target, without asking any device.

        A library may come with its version (``"gfx942+vllm==0.21"``); without one only that is
        used which every version of it has.

        Raises:
            OptionError: a name that is not an architecture's (see the top of this module), an
                unknown library or a bad version, naming it and the allowed ones.
        """
        arch, *libraries = (part.strip() for part in text.strip().lower().split("+"))
        arch = _ALIASES.get(arch, arch)
        if arch not in _ARCHITECTURES and not _may_exist(arch):
            allowed = ", ".join([*_ALIASES, *_ARCHITECTURES])
            raise OptionError(f"unknown target {text!r}; allowed: {allowed}")
        found: dict[str, str] = {}
        for part in libraries:
            library, _, version = (word.strip() for word in part.partition("=="))
            if library not in LIBRARIES:
                raise OptionError(
                    f"unknown library {library!r} in target {text!r}; allowed: "
                    f"{', '.join(LIBRARIES)}"
                )
            if "==" in part and re.match(r"[0-9]{1,9}\.[0-9]{1,9}", version) is None:
                raise OptionError(f"{part!r} in target {text!r} has no version such as 0.21")
            found[library] = version or found.get(library, "")
        if arch not in _ARCHITECTURES:
            _warn_of(arch)
        kind, dtype, units = _ARCHITECTURES.get(arch, (UNKNOWN, None, None))
        named = tuple(sorted(found.items()))
        return Target(kind, arch, dtype, units, named, (("torch", _torch_version()),))

    @staticmethod
    def detect(device: torch.device | str | None = None) -> Target:
        """The target of ``device`` (default: the current accelerator, else the CPU).

        A device that fp8pass does not know gets a target of kind ``unknown`` and one warning.

        Raises:
            OptionError: a device that runs nothing (``meta``).
        """
        if device is None:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            device = torch.device("cpu") if accelerator is None else accelerator
        device = torch.device(device)
        found = _detect(device.type, device.index)
        if found.kind == "cpu":
            return _with_vllm(found)
        # not cached: a library may be loaded after the first question
        libraries = (*_installed_libraries(), *_loaded_libraries())
        return replace(found, libraries=libraries, features=found.features | _absent(libraries))


def _loaded_libraries() -> tuple[tuple[str, str], ...]:
    """Kernel libraries that this process has loaded already, with versions where they say one."""
    found = []
    if "aiter" in sys.modules:
        found.append(("aiter", str(getattr(sys.modules["aiter"], "__version__", ""))))
    for name, operators, module in _LOADED:
        if any(hasattr(getattr(torch.ops, space), operator) for space, operator in operators):
            found.append((name, str(getattr(sys.modules.get(module), "__version__", ""))))
    return tuple(found)


def _absent(libraries: tuple[tuple[str, str], ...]) -> frozenset[str]:
    """What vLLM's loaded library for CUDA lacks: 0.21 has its operators in two, of which one may be
    loaded without the other."""
    if not any(name == "vllm" for name, _ in libraries):
        return frozenset()
    operators = torch.ops._C
    if not hasattr(operators, "cutlass_scaled_mm"):  # that for ROCm
        return frozenset()
    asked = ((NO_VLLM_PRODUCERS, "rms_norm_static_fp8_quant"), (NO_MARLIN, "marlin_gemm"))
    return frozenset(feature for feature, name in asked if not hasattr(operators, name))


def _with_vllm(found: Target) -> Target:
    """A CPU, with what vLLM's compiled library for it adds, if that is loaded and of use."""
    operators = torch.ops._C
    if not hasattr(operators, "onednn_scaled_mm"):
        return found
    has_fp8 = hasattr(operators, "fp8_scaled_mm_cpu")
    if found.arch == "x86-amx" and not has_fp8:
        return found  # one for other CPUs
    arch, features = found.arch, found.features
    if has_fp8 and hasattr(operators, "cpu_has_amx_fp8") and operators.cpu_has_amx_fp8():
        arch = AMX_FP8
    if has_fp8 and torch.cpu._is_avx512_bf16_supported():
        features = features | {AVX512_BF16}
    version = str(getattr(sys.modules.get("vllm"), "__version__", ""))
    return replace(found, arch=arch, features=features, libraries=(("vllm", version),))


#: Libraries of operators: name here, (namespace, operator) pairs of which one says that it is
#: loaded (vLLM's for CUDA and for ROCm), the module that has its version.
_LOADED = (
    ("vllm", (("_C", "cutlass_scaled_mm"), ("_rocm_C", "wvSplitKQ")), "vllm"),
    ("vllm_xpu", (("_xpu_C", "fp8_gemm"),), "vllm_xpu_kernels"),
)


def _may_exist(arch: str) -> bool:
    """Whether a name that is not in the table looks like an architecture's."""
    known = arch == UNKNOWN or re.fullmatch(rf"[a-z]+{_NAMELESS}", arch) is not None
    return known or any(re.fullmatch(pattern, arch) for pattern, _ in _LOOKS_LIKE)


def _device_type_of(arch: str) -> str:
    """torch's device type of an architecture that is not in the table; a GPU's if nothing says."""
    for pattern, device_type in _LOOKS_LIKE:
        if re.fullmatch(pattern, arch):
            return device_type
    return arch.removesuffix(_NAMELESS) if arch.endswith(_NAMELESS) else "cuda"


@cache
def _warn_of(arch: str) -> None:
    """Say once per process that nothing is known of an architecture."""
    warnings.warn(
        f"fp8pass does not know the architecture {arch!r}: no kernel is chosen for it, and graphs "
        "keep the operators they came with",
        stacklevel=4,
    )


#: Libraries of Python modules: found without importing them, and called only when a graph runs.
_INSTALLED = (("deepgemm", "deep_gemm"), ("flashinfer", "flashinfer"))


@cache
def _installed_libraries() -> tuple[tuple[str, str], ...]:
    """Kernel libraries that are installed, by their names here, with their versions."""
    found = []
    for name, module in _INSTALLED:
        if importlib.util.find_spec(module) is None:
            continue
        distributions = (module, f"{module}-python", module.replace("_", "-"))
        found.append((name, next(filter(None, map(_version_of, distributions)), "")))
    return tuple(found)


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _torch_version() -> str:
    return torch.__version__.split("+")[0]


@cache
def _detect(device_type: str, index: int | None) -> Target:
    if device_type == "cpu":
        return _detect_cpu()
    if device_type == "cuda":
        return _detect_cuda(index)
    if device_type == "xpu":
        return replace(Target.parse("xpu"), runtime=(("torch", str(torch.__version__)),))
    if device_type == "meta":
        raise OptionError(f"fp8pass has no target for device type {device_type!r}")
    return Target.parse(f"{device_type}{_NAMELESS}")


def _detect_cpu() -> Target:
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    if capabilities:
        amx, avx512 = bool(capabilities.get("amx_tile")), bool(capabilities.get("avx512_f"))
        avx2 = bool(capabilities.get("avx2"))
    else:  # torch < 2.13 has single predicates instead
        amx = bool(torch.cpu._is_amx_tile_supported())
        avx512, avx2 = torch.cpu._is_avx512_supported(), torch.cpu._is_avx2_supported()
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        arch = "x86-amx" if amx else "x86-avx512" if avx512 else "x86-avx2" if avx2 else ""
    else:
        arch = "aarch64" if machine in ("aarch64", "arm64") else ""
    base = Target.parse(arch or "cpu")
    return replace(base, units=os.cpu_count(), runtime=(("torch", str(torch.__version__)),))


def _detect_cuda(index: int | None) -> Target:
    properties = torch.cuda.get_device_properties(
        torch.cuda.current_device() if index is None else index
    )
    if torch.version.hip:
        arch = str(properties.gcnArchName).split(":")[0]
        runtime = (("torch", str(torch.__version__)), ("hip", str(torch.version.hip)))
    else:
        arch = f"sm{properties.major}{properties.minor}"
        runtime = (("torch", str(torch.__version__)), ("cuda", str(torch.version.cuda)))
    base = Target.parse(arch)
    features = frozenset() if importlib.util.find_spec("triton") else frozenset({NO_TRITON})
    units = int(properties.multi_processor_count)
    return replace(base, units=units, runtime=runtime, features=features)
