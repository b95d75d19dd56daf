"""Operators behind which vLLM's producers and its products for CPUs stand.

As in :mod:`fp8pass.kernels.operators`: fake and semantics are those of a generic operator, the
reference is registered for every device, and the adapter that calls the library for its own kind of
device. Nothing of the library is looked up before such an operator is called there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8pass.kernels.operators import (
    _CPU,
    _GPU,
    _kernel,
    _keyed_inputs,
    _keyed_reference,
    _producer_of,
    _product,
    _weight_only,
)
from fp8pass.ops import activation, norm, quantize, weight_only

_ADAPTERS = "fp8pass.lowerings.vllm_producers"

VLLM_QUANTIZE = _producer_of("vllm", quantize.SPEC, _ADAPTERS)
VLLM_RMS_NORM_QUANT = _producer_of("vllm", norm.RMS_NORM_QUANT, _ADAPTERS)
VLLM_ADD_RMS_NORM_QUANT = _producer_of("vllm", norm.ADD_RMS_NORM_QUANT, _ADAPTERS)
VLLM_SILU_MUL_QUANT = _producer_of("vllm", activation.SILU_MUL_QUANT, _ADAPTERS)

VLLM_MARLIN_W8A16_MM = _weight_only(
    "vllm_marlin_w8a16_mm", _kernel("fp8pass.lowerings.vllm_marlin", "w8a16_mm"), _GPU
)


# ---- on a CPU ------------------------------------------------------------------------------------


def _on_cpu(run: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """The adapter where vLLM's library for CPUs is loaded, else the reference: a graph for another
    CPU than this one is interpreted like one for any other absent device."""
    adapter = _kernel("fp8pass.lowerings.vllm_cpu", run)

    def call(*args: Any) -> Any:
        loaded = hasattr(torch.ops._C, "onednn_scaled_mm")
        return (adapter if loaded else reference)(*args)

    return call


VLLM_CPU_W8A16_MM = _weight_only(
    "vllm_cpu_w8a16_mm", _on_cpu("w8a16_mm", weight_only.weight_only_product), _CPU
)
VLLM_CPU_SCALED_MM = _product(
    "vllm_cpu_scaled_mm",
    ", str act_key, str weight_key",
    _on_cpu("scaled_mm", _keyed_reference),
    key=_CPU,
    reference=_keyed_reference,
    inputs=_keyed_inputs,
)
