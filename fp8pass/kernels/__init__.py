"""Kernels that fp8pass ships itself, one module per kind of device."""
