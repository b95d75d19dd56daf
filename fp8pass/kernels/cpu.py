"""The FP8 scaled product on a CPU: builds and calls ``cpu_scaled_mm.cpp``; torch ops otherwise.

The library is compiled on the first product, with the compiler that Inductor would use, for the
CPU at hand, and kept in Inductor's cache folder. Without a compiler, or on another kind of CPU than
x86-64 with AVX2 under Linux, the same product is made of torch ops: convert to float32, ``mm``,
scale, round. :func:`available` and :func:`why_unavailable` say which.

Weights are never cached here. :func:`pack` makes the form that the kernels read, for whoever wants
to spend two bytes per weight on it; without it the weight is unpacked, a block at a time, in every
call.
"""

from __future__ import annotations

import ctypes
import logging
import platform
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from fp8pass.errors import UnsupportedError
from fp8pass.native import cache_folder as _cache_folder
from fp8pass.native import compilers as _compilers
from fp8pass.native import run, shared_library, told

log = logging.getLogger(__name__)

SOURCES = ("cpu_scaled_mm.cpp", "cpu_kernels.h", "cpu_convert.h")
# -ffp-contract=off: scales and bias round in fp32 exactly as the torch ops do.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-w")
NEEDED_CPU_FLAGS = ("avx2", "fma", "f16c")
KERNELS = {"fp32": 1, "bf16": 2, "amx": 3, "gemv": 4, "gemv_bf16": 5}  # enum Isa in cpu_convert.h
GEMV_ROWS = 4  # the gemv kernels take at most this many rows of ``a``
BLOCK_N, ROUND_K = 32, 32  # NB and KR in cpu_convert.h

_FP8 = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1}
_FLOATS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_ARGUMENTS = struct.Struct("14q")  # of the C entry point, in one: ctypes takes long over each


@dataclass(frozen=True)
class _Library:
    call: Callable[..., int] | None
    kernels: tuple[str, ...]
    threads: bool
    reason: str


_library: _Library | None = None
_lock = threading.Lock()


def available() -> bool:
    """Whether the compiled kernels are used. The first call builds or loads them (some seconds)."""
    return _loaded().call is not None


def why_unavailable() -> str:
    """Why :func:`available` is False, in a sentence; empty when it is True."""
    return _loaded().reason


def kernels() -> tuple[str, ...]:
    """The names of the compiled kernels that this CPU can run, among ``fp32 bf16 amx
    gemv gemv_bf16``."""
    return _loaded().kernels


def describe() -> str:
    """One line for reports and logs: which kernels, and whether they share torch's thread pool."""
    lib = _loaded()
    if lib.call is None:
        return f"torch ops ({lib.reason})"
    return f"{', '.join(lib.kernels)}; {'torch threads' if lib.threads else 'one thread'}"


def packed_numel(n: int, k: int) -> int:
    """Elements of the packed form of an ``[n, k]`` weight."""
    return -(-n // BLOCK_N) * BLOCK_N * (-(-k // ROUND_K) * ROUND_K)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """The form of an fp8 weight that the kernels read.

    Args:
        weight: ``[N, K]`` fp8, any strides.

    Returns:
        1-D bf16 of :func:`packed_numel` elements, laid out ``[ceil(N / 32)][KP / 2][32][2]`` with K
        rounded up to ``KP``, a multiple of 32, and zero padding: pairs of k side by side, as
        AVX512-BF16 and AMX instructions read them. Exact, as bf16 holds every fp8 value.

    Raises:
        UnsupportedError: not a matrix of float8_e4m3fn or float8_e5m2.
    """
    if weight.dim() != 2 or weight.dtype not in _FP8:
        raise UnsupportedError(
            f"pack() takes a matrix of {_names(_FP8)}, not {tuple(weight.shape)} {weight.dtype}"
        )
    n, k = weight.shape
    padded = weight.new_zeros(
        (-(-n // BLOCK_N) * BLOCK_N, -(-k // ROUND_K) * ROUND_K), dtype=torch.bfloat16
    )
    padded[:n, :k] = weight.to(torch.bfloat16)
    blocks = padded.view(padded.shape[0] // BLOCK_N, BLOCK_N, padded.shape[1] // 2, 2)
    return blocks.transpose(1, 2).reshape(-1)


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    prepared: torch.Tensor | None = None,
    *,
    kernel: str | None = None,
) -> torch.Tensor:
    """``(a @ b) * scale_a * scale_b + bias``, all in float32, rounded once to ``out_dtype``.

    Args:
        a: ``[M, K]`` float8_e4m3fn or float8_e5m2; rows any distance apart.
        b: ``[K, N]`` of either type; the ``.t()`` view of a row-major weight is read in place, any
            other layout is copied first.
        scale_a: float32 dequant scale, one element or ``[M, 1]``.
        scale_b: float32 dequant scale, one element or ``[1, N]``.
        bias: None or ``[N]`` of float32, bfloat16 or float16.
        out_dtype: float32, bfloat16 or float16.
        prepared: None or ``pack(b.t())``. It changes the speed, never a bit of the result.
        kernel: one of :func:`kernels` for tests and measurements; None chooses.

    Returns:
        ``[M, N]`` contiguous.

    Raises:
        UnsupportedError: a shape, dtype or kernel other than those above; it is named.
    """
    lib = _library or _loaded()
    m, k, n, flags = _checked(a, b, scale_a, scale_b, bias, out_dtype, prepared)
    if kernel is not None:
        if kernel not in lib.kernels or (kernel.startswith("gemv") and m > GEMV_ROWS):
            raise UnsupportedError(f"kernel {kernel!r} cannot run here; it takes {lib.kernels}")
        flags |= KERNELS[kernel] << 8
    if lib.call is None or k == 0:
        return _with_torch_ops(a, b, scale_a, scale_b, bias, out_dtype)
    out = torch.empty((m, n), dtype=out_dtype)
    if m == 0 or n == 0:
        return out
    # Whatever is copied here must stay referenced until the call returns, hence the names.
    row, step = a.stride()
    if step != 1 and k > 1:
        a, row = a.contiguous(), k
    step, column = b.stride()
    if step != 1 and k > 1:
        b, column = b.t().contiguous(), k
    if flags & 4:
        scale_a = scale_a.contiguous()
    if flags & 8:
        scale_b = scale_b.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    status = lib.call(
        _ARGUMENTS.pack(
            a.data_ptr(),
            row,
            b.data_ptr(),
            column,
            0 if prepared is None else prepared.data_ptr(),
            scale_a.data_ptr(),
            scale_b.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            m,
            n,
            k,
            flags,
            torch.get_num_threads(),
        )
    )
    if status:
        raise MemoryError(f"no memory for the scratch of a {m}x{k} by {k}x{n} product")
    return out


def _checked(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    prepared: torch.Tensor | None,
) -> tuple[int, int, int, int]:
    """M, K, N and the flags of the C entry point; raises for what no path can take."""
    of_a, of_b = a.shape, b.shape
    if len(of_a) != 2 or len(of_b) != 2 or of_a[1] != of_b[0]:
        raise UnsupportedError(f"cannot multiply {tuple(of_a)} by {tuple(of_b)}")
    (m, k), n = of_a, of_b[1]
    try:
        flags = _FP8[a.dtype] | _FP8[b.dtype] << 1 | _FLOATS[out_dtype] << 6
        if bias is not None:
            flags |= _FLOATS[bias.dtype] << 4
    except KeyError as e:
        raise UnsupportedError(
            f"{e.args[0]}: matrices are {_names(_FP8)}; result and bias are {_names(_FLOATS)}"
        ) from None
    if bias is not None and bias.shape != (n,):
        raise UnsupportedError(f"bias of shape {tuple(bias.shape)}; it must be ({n},)")
    if scale_a.dtype != torch.float32 or scale_b.dtype != torch.float32:
        raise UnsupportedError(f"scales are float32, not {scale_a.dtype} and {scale_b.dtype}")
    if scale_a.numel() != 1:
        if scale_a.shape != (m, 1):
            raise UnsupportedError(
                f"scale_a of shape {tuple(scale_a.shape)}; it has one element or is ({m}, 1)"
            )
        flags |= 4
    if scale_b.numel() != 1:
        if scale_b.shape != (1, n):
            raise UnsupportedError(
                f"scale_b of shape {tuple(scale_b.shape)}; it has one element or is (1, {n})"
            )
        flags |= 8
    if prepared is not None and (
        prepared.dtype != torch.bfloat16
        or prepared.numel() != packed_numel(n, k)
        or not prepared.is_contiguous()
    ):
        raise UnsupportedError(
            f"prepared weight of {prepared.numel()} {prepared.dtype}; "
            f"pack() of a {n}x{k} weight has {packed_numel(n, k)} bfloat16"
        )
    return m, k, n, flags


def _names(dtypes: dict[torch.dtype, int]) -> str:
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)


def _with_torch_ops(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    # Within autocast, mm would round to bf16 on its own.
    with torch.autocast("cpu", enabled=False):
        value = torch.mm(a.float(), b.float()).mul_(scale_a).mul_(scale_b)
        if bias is not None:
            value.add_(bias.float())
        return value.to(out_dtype)


# ---- building ------------------------------------------------------------------------------------


def _loaded() -> _Library:
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                _library = _load()
                log.info("cpu kernels: %s", _library.reason or ", ".join(_library.kernels))
    return _library


def _load() -> _Library:
    """The library, or the reason why there is none; a machine that cannot build it is no error."""
    try:
        machine, missing = _machine()
        if missing:
            raise _NotBuilt(missing)
        dll = ctypes.CDLL(str(_build(machine)))
    except (_NotBuilt, OSError, subprocess.SubprocessError) as e:
        return _Library(None, (), False, str(e))
    found = int(dll.fp8pass_kernels())
    call = dll.fp8pass_scaled_mm
    call.argtypes = (ctypes.c_char_p,)
    call.restype = ctypes.c_int
    names = tuple(name for name, bit in KERNELS.items() if found >> bit & 1)
    return _Library(call, names, bool(found & 1), "")


class _NotBuilt(Exception):
    """The library cannot be built here; the message says why."""


def _machine() -> tuple[str, str]:
    """What the machine code depends on, and what this machine lacks for it ("" if nothing)."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return "", f"no compiled kernels for {platform.machine()} under {sys.platform}"
    seen: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        seen.setdefault(name.strip(), value.strip())
    flags = seen.get("flags", "").split()
    lacks = [flag for flag in NEEDED_CPU_FLAGS if flag not in flags]
    if lacks:
        return "", f"the CPU lacks {', '.join(lacks)}"
    return f"{seen.get('model name')} {' '.join(sorted(flags))}", ""


def _build(machine: str) -> Path:
    compilers = _compilers()
    if not compilers:
        raise _NotBuilt("no C++ compiler found (tried Inductor's, $CXX, c++, g++, clang++)")
    folder = _cache_folder()
    failures = []
    for compiler in compilers:
        try:
            return _compile(compiler, machine, folder)
        except (OSError, subprocess.SubprocessError) as e:
            failures.append(f"{compiler}: {told(e)}")
    raise _NotBuilt("the compiler failed: " + "; ".join(failures))


def _compile(compiler: str, machine: str, folder: Path) -> Path:
    """The shared library for this compiler and machine, from the cache or made now."""
    here = Path(__file__).parent
    version = run([compiler, "--version"])
    texts = [(here / name).read_text() for name in SOURCES]
    command = [compiler, *FLAGS, str(here / SOURCES[0])]
    return shared_library(folder, "cpu", [*texts, *FLAGS, version, machine], command)
