"""The names that vLLM's users know, as names of fp8pass's kernels.

``linear_backend`` takes the values of vLLM's ``--linear-backend``, and ``VLLM_DISABLED_KERNELS``
the names of its kernel classes (``vllm/model_executor/kernels/linear/__init__.py``, as of September
2026). Each stands for patterns of kernel names, of which those count that are registered.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from fp8pass.errors import OptionError, choices
from fp8pass.lowerings.registry import kernel_names

AUTO = "auto"

#: vLLM's ``--linear-backend`` -> kernels, in the order in which they are tried.
BACKENDS: dict[str, tuple[str, ...]] = {
    "torch": ("torch_tensor", "torch_row", "torch_channel", "torch_block*", "torch_int8*"),
    "cutlass": ("vllm_cutlass*",),
    "flashinfer": ("flashinfer*",),
    "flashinfer_cutlass": ("flashinfer*",),
    "deep_gemm": ("deep_gemm*", "deepgemm*"),
    "triton": ("triton_*",),
    "marlin": ("*marlin*",),
    "aiter": ("aiter*",),
    "xpu": ("xpu", "xpu_w8a8*", "xpu_fp8*", "xpu_tensor*", "xpu_token*", "xpu_block*"),
    "xpu_woq": ("xpu_woq*", "xpu_w8a16*"),
    "emulation": ("torch_dequant",),
}
#: Values of vLLM's option whose kernels fp8pass has nothing to set against: other number formats,
#: or libraries that it does not call.
ELSEWHERE = (
    "b12x", "conch", "exllama", "fbgemm", "flashinfer_b12x", "flashinfer_cudnn",
    "flashinfer_cutedsl", "flashinfer_trtllm", "humming", "machete",
)  # fmt: skip

#: vLLM's kernel classes for fp8 and int8 products -> kernels.
CLASSES: dict[str, tuple[str, ...]] = {
    "AiterFp8BlockScaledMMKernel": ("aiter_block*", "aiter_group*"),
    "AiterHipbMMPerTokenFp8ScaledMMLinearKernel": ("aiter_hipb*",),
    "AiterInt8ScaledMMLinearKernel": ("aiter_int8*",),
    "AiterPerTokenFp8ScaledMMLinearKernel": ("aiter_token*", "aiter_row*"),
    "AiterPreshuffledPerTokenFp8ScaledMMLinearKernel": ("aiter_shuffled*",),
    "BlockWiseTorchFP8ScaledMMLinearKernel": ("torch_block*",),
    "CPUFP8W8A8ScaledMMLinearKernel": ("vllm_cpu_w8a8",),
    "CPUFp8BlockScaledMMKernel": ("vllm_cpu_block*",),
    "CPUFp8PerTensorScaledMMLinearKernel": ("vllm_cpu_tensor*",),
    "CPUFp8W8A8BlockScaledMMKernel": ("vllm_cpu_w8a8_block*",),
    "CPUInt8ScaledMMLinearKernel": ("vllm_cpu_int8*",),
    "ChannelWiseTorchFP8ScaledMMLinearKernel": ("torch_channel",),
    "CutlassFP8ScaledMMLinearKernel": ("vllm_cutlass",),
    "CutlassFp8BlockScaledMMKernel": ("vllm_cutlass_block*",),
    "CutlassInt8ScaledMMLinearKernel": ("vllm_cutlass_int8*", "vllm_cutlass_azp*"),
    "DeepGemmFp8BlockScaledMMKernel": ("deep_gemm*", "deepgemm*"),
    "FlashInferFP8ScaledMMLinearKernel": ("flashinfer", "flashinfer_tensor*", "flashinfer_bmm*",
                                          "flashinfer_mm*"),
    "FlashInferFp8DeepGEMMDynamicBlockScaledKernel": ("flashinfer_deep*", "flashinfer_block*"),
    "MarlinFP8ScaledMMLinearKernel": ("*marlin*",),
    "PerTensorTorchFP8ScaledMMLinearKernel": ("torch_tensor",),
    "ROCmFP8ScaledMMLinearKernel": ("vllm_skinny*", "vllm_wvsplitk*", "wvsplitk*", "rocm_skinny*"),
    "RowWiseTorchFP8ScaledMMLinearKernel": ("torch_row",),
    "TritonFp8BlockScaledMMKernel": ("triton_block*",),
    "TritonInt8ScaledMMLinearKernel": ("triton_int8*",),
    "XPUFp8BlockScaledMMKernel": ("xpu_block*", "xpu_fp8_block*"),
    "XPUW8A16FP8LinearKernel": ("xpu_woq*", "xpu_w8a16*"),
    "XPUW8A8FP8LinearKernel": ("xpu", "xpu_w8a8*", "xpu_fp8_gemm*", "xpu_tensor*", "xpu_token*"),
}  # fmt: skip

VARIABLE = "VLLM_DISABLED_KERNELS"


def backend_kernels(name: str) -> tuple[str, ...]:
    """The registered kernels of one of vLLM's backends; nothing for ``"auto"``.

    Raises:
        OptionError: a name that vLLM does not have, or one of which no kernel is registered.
    """
    if name == AUTO:
        return ()
    if name in BACKENDS:
        found = _registered(BACKENDS[name])
        if found:
            return found
    has = [AUTO, *(backend for backend in BACKENDS if _registered(BACKENDS[backend]))]
    known = name in BACKENDS or name in ELSEWHERE
    what = "has no kernel in fp8pass" if known else "is not known"
    raise OptionError(f"linear_backend {name!r} {what}; allowed: {choices(has)}")


def disabled_kernels(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The registered kernels that stand for the classes in ``VLLM_DISABLED_KERNELS``.

    Classes of other number formats, and kernels that fp8pass does not have, are passed over, as
    vLLM passes over names that it does not know.
    """
    names = [name.strip() for name in environment.get(VARIABLE, "").split(",")]
    found = [kernel for name in names for kernel in _registered(CLASSES.get(name, ()))]
    return tuple(dict.fromkeys(found))


def _registered(patterns: tuple[str, ...]) -> tuple[str, ...]:
    names = kernel_names()
    found = [name for pattern in patterns for name in names if fnmatchcase(name, pattern)]
    return tuple(dict.fromkeys(found))
