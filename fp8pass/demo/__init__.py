"""The demo: a real model in bf16, in FP8 under stock Inductor and in FP8 under fp8pass."""
