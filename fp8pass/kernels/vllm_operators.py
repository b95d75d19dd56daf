"""Operators behind which vLLM's producers and its products for CPUs stand.

As in :mod:`fp8pass.kernels.operators`: fake and semantics are those of a generic operator, the
reference is registered for every device, and the adapter that calls the library for its own kind of
device. Nothing of the library is looked up before such an operator is called there.
"""

from __future__ import annotations

from fp8pass.kernels.operators import _producer_of
from fp8pass.ops import activation, norm, quantize

_ADAPTERS = "fp8pass.lowerings.vllm_producers"

VLLM_QUANTIZE = _producer_of("vllm", quantize.SPEC, _ADAPTERS)
VLLM_RMS_NORM_QUANT = _producer_of("vllm", norm.RMS_NORM_QUANT, _ADAPTERS)
VLLM_ADD_RMS_NORM_QUANT = _producer_of("vllm", norm.ADD_RMS_NORM_QUANT, _ADAPTERS)
VLLM_SILU_MUL_QUANT = _producer_of("vllm", activation.SILU_MUL_QUANT, _ADAPTERS)
