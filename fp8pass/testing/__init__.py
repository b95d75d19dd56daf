"""Helpers for tests of FP8 code, fp8pass's own and that of projects that use it.

Nothing here is imported by the rest of the package. :mod:`fp8pass.testing.vllm_cpu` alters the vLLM
of its process and is for tests only.
"""

from __future__ import annotations
