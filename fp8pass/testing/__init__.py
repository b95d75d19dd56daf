"""Helpers for tests of FP8 code, fp8pass's own and that of projects that use it.

=======================  ===================================================================
:mod:`.recording`        a backend that counts operators before and after; forcing a kernel
:mod:`.layers`           FP8 linears by granularity
:mod:`.checkpoints`      small FP8 checkpoints in the usual formats
:mod:`.vllm_operators`   operators of vLLM's CUDA library with reference code for a CPU
:mod:`.vllm_cpu`         vLLM's CPU build made to compile and load as on a GPU; it patches vLLM
=======================  ===================================================================

Nothing here is imported by the rest of the package.
"""

from __future__ import annotations

from fp8pass.testing.layers import Fp8TestLayer
from fp8pass.testing.recording import RecordingBackend, forced_kernel, operators_of

__all__ = ["Fp8TestLayer", "RecordingBackend", "forced_kernel", "operators_of"]
