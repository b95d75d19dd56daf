"""Tracing for a device that is not there: what torch asks of one while it only traces.

Fake tensors stand in for the device's memory, and Dynamo, AOTAutograd and Inductor's graph passes
take them for the real thing, except in four places. :func:`absent_device` covers these for the
duration of one trace and puts everything back.

- Indexing, copying and differentiating a tensor asks for the guard of its device, which builds of
  torch without that backend do not have. A no-op guard is compiled (one second, kept in Inductor's
  cache folder) and registered; ``FakeTensorMode`` does the same for CUDA builds without a GPU.
- Inductor folds constants by computing them on the graph's device: here on this machine instead.
- Attention asks the device which kernel it has. The answer here is torch's flash operator within
  the limits that it documents, else its plain form; the device itself may decide otherwise.
- Inductor times whether padding a matrix product pays (``shape_padding``); without a device to time
  on, nothing is padded. Scaled products are never padded by it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._C import DispatchKey
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from fp8pass import native
from fp8pass.errors import UnsupportedError
from fp8pass.target import HOST

_SOURCE = Path(__file__).with_suffix(".cpp")
#: torch's headers want C++20 from 2.12 on; older compilers know it by another name.
_STANDARDS = ("-std=c++20", "-std=c++2a")

#: Limits of torch's flash attention (aten/src/ATen/native/transformers/sdp_utils_cpp.h, cuda/).
_FLASH_HEAD_DIM, _FLASH_MULTIPLE = 256, 8
_FLASH_DTYPES = (torch.bfloat16, torch.float16)


def fake_like(mode: FakeTensorMode, value: torch.Tensor, device: torch.device) -> FakeTensor:
    """``value`` without data on ``device``: same shape, strides, offset and dtype.

    The device is not touched and need not exist.
    """
    elements = value.untyped_storage().nbytes() // value.element_size()
    meta = torch.empty(elements, dtype=value.dtype, device="meta").as_strided(
        value.shape, value.stride(), value.storage_offset()
    )
    return FakeTensor(mode, meta, device)


@contextlib.contextmanager
def absent_device(device_type: str) -> Iterator[None]:
    """Within, torch traces for ``device_type`` without having it (see the module's text).

    Changes state of the process, so that one thread at a time may be inside; all of it is undone.

    Raises:
        UnsupportedError: the guard is needed and there is no C++ compiler to build it with.
    """
    import torch._inductor.config as inductor

    with contextlib.ExitStack() as stack:
        if not _has_guard(device_type):
            stack.enter_context(_guard(device_type))
        if not _present(device_type):
            stack.enter_context(_attention(device_type))
            stack.enter_context(_constants_here(device_type))
            stack.enter_context(inductor.patch(shape_padding=False))
        yield


def _present(device_type: str) -> bool:
    module = getattr(torch, device_type, None)
    return bool(module is not None and module.is_available())


# ---- the guard -----------------------------------------------------------------------------------


def _has_guard(device_type: str) -> bool:
    """Whether this torch can index a tensor of the type; entering the mode may install a guard."""
    with FakeTensorMode() as mode:
        probe = fake_like(mode, torch.empty(1, device="meta"), torch.device(device_type))
        try:
            probe[0:1]
        except RuntimeError:
            return False
    return True


@contextlib.contextmanager
def _guard(device_type: str) -> Iterator[None]:
    library, why = _guard_library()
    if library is None:  # going on would end in torch's C++ code, which aborts the process
        raise UnsupportedError(
            f"this build of torch knows nothing of {device_type} devices, and what stands in for "
            f"one could not be compiled: {why}"
        )
    name = device_type.encode()
    installed = library.fp8pass_install_guard(name) == 1
    try:
        yield
    finally:
        if installed:
            library.fp8pass_remove_guard(name)


@cache
def _guard_library() -> tuple[ctypes.CDLL | None, str]:
    """The compiled guard, or why there is none."""
    failures = ["no C++ compiler found"]
    for compiler in native.compilers():
        for standard in _STANDARDS:
            try:
                library = ctypes.CDLL(str(_build(compiler, standard)))
            except (OSError, subprocess.SubprocessError) as error:
                failures.append(f"{compiler} {standard}: {native.told(error)}")
                continue
            for function in (library.fp8pass_install_guard, library.fp8pass_remove_guard):
                function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int
            return library, ""
    return None, failures[-1]


def _build(compiler: str, standard: str) -> Path:
    root = Path(torch.__file__).parent
    flags = [standard, "-O1", "-fPIC", "-shared", "-w"]
    key = [_SOURCE.read_text(), *flags, str(torch.__version__), str(root), compiler]
    paths = [f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10"]
    command = [compiler, *flags, str(_SOURCE), *paths]
    return native.shared_library(native.cache_folder(), "absent_device", key, command)


# ---- constants -----------------------------------------------------------------------------------


class _Here(TorchFunctionMode):
    """Makes on this machine what is to be made on a device of the absent type."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._is_absent(kwargs.get("device")):
            kwargs["device"] = torch.device(HOST)
        args = tuple(torch.device(HOST) if self._is_absent(arg) else arg for arg in args)
        return func(*args, **kwargs)

    def _is_absent(self, value: Any) -> bool:
        if isinstance(value, str):
            return value.split(":")[0] == self.device_type
        return isinstance(value, torch.device) and value.type == self.device_type


@contextlib.contextmanager
def _constants_here(device_type: str) -> Iterator[None]:
    """Inductor's folding of uniform constants computes them on this machine.

    The nodes that it makes take their device from the graph, not from these values.
    """
    import torch._inductor.fx_passes.joint_graph as joint_graph

    name = "constant_fold_uniform_value"
    fold: Callable[[Any], Any] | None = getattr(joint_graph, name, None)
    if fold is None:
        yield
        return

    def fold_here(gm: torch.fx.GraphModule) -> Any:
        with _Here(device_type):
            return fold(gm)

    setattr(joint_graph, name, fold_here)
    try:
        yield
    finally:
        setattr(joint_graph, name, fold)


# ---- attention -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _attention(device_type: str) -> Iterator[None]:
    """Scaled dot product attention on the absent type asks no device for its kernel."""
    operator = torch.ops.aten.scaled_dot_product_attention.default
    key = DispatchKey.CompositeImplicitAutograd

    def attention(query: torch.Tensor, *rest: Any, **named: Any) -> Any:
        if query.device.type != device_type:
            return operator.decompose(query, *rest, **named)
        return _absent_attention(query, *rest, **named)

    before = operator.py_kernels.get(key)
    operator.py_kernels[key] = attention
    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        if before is None:
            del operator.py_kernels[key]
        else:
            operator.py_kernels[key] = before
        operator._dispatch_cache.clear()


def _absent_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    head_dim = query.shape[-1]
    flash = (
        attn_mask is None
        and query.dim() == 4
        and query.dtype in _FLASH_DTYPES
        and isinstance(head_dim, int)
        and head_dim == value.shape[-1]
        and head_dim <= _FLASH_HEAD_DIM
        and head_dim % _FLASH_MULTIPLE == 0
    )
    if flash:
        factor = 1 / math.sqrt(head_dim) if scale is None else scale
        return torch.ops.aten._scaled_dot_product_flash_attention.default(
            query, key, value, dropout_p, is_causal, False, scale=factor
        )[0]
    return torch.ops.aten._scaled_dot_product_attention_math.default(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
