"""Lowerings: the kernels for a scaled product, and the choice between them for a target.

``choose(target, problem, options)`` answers with a plan and a reason for every other kernel;
``plan[0][1].emit(graph, site)`` writes it into the graph. Importing this imports torch and nothing
heavier, and asks no device.
"""

from __future__ import annotations

# The order of these imports is the order of registration.
from fp8pass.lowerings import cpu, torch_scaled_mm, triton, vllm_cutlass  # isort: split

from fp8pass.lowerings import (  # isort: split
    deepgemm,
    flashinfer,
    torch_block,
    torch_dequant,
    torch_rescaled,
    vllm_block,
    vllm_cpu,
    vllm_int8,
    vllm_marlin,
    weight_only,
    xpu,
)

# producers of vLLM's library for CUDA
from fp8pass.lowerings import vllm_producers  # isort: skip

# ROCm's libraries
from fp8pass.lowerings import (  # isort: skip
    aiter_block,
    aiter_producers,
    aiter_row,
    aiter_shuffled,
    vllm_skinny,
)
from fp8pass.lowerings.choice import (
    FORCED,
    MEASURED,
    PREFERRED,
    STATIC_PRIORITY,
    Choice,
    Rejection,
    choose,
    consider,
)
from fp8pass.lowerings.producers import producer_kernel_names
from fp8pass.lowerings.registry import (
    WEIGHT_ONLY,
    EmitSite,
    Kernel,
    find,
    kernel_names,
    kernels,
    register,
    unregister,
    weight_only_names,
)

__all__ = [
    "FORCED",
    "MEASURED",
    "PREFERRED",
    "STATIC_PRIORITY",
    "WEIGHT_ONLY",
    "Choice",
    "EmitSite",
    "Kernel",
    "Rejection",
    "aiter_block",
    "aiter_producers",
    "aiter_row",
    "aiter_shuffled",
    "choose",
    "consider",
    "cpu",
    "deepgemm",
    "find",
    "flashinfer",
    "kernel_names",
    "kernels",
    "producer_kernel_names",
    "register",
    "torch_block",
    "torch_dequant",
    "torch_rescaled",
    "torch_scaled_mm",
    "triton",
    "unregister",
    "vllm_block",
    "vllm_cpu",
    "vllm_cutlass",
    "vllm_int8",
    "vllm_marlin",
    "vllm_producers",
    "vllm_skinny",
    "weight_only",
    "weight_only_names",
    "xpu",
]
