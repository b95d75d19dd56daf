"""The operators of fp8pass: importing this module registers ``torch.ops.fp8pass.*``.

A warm start from torch's compile cache runs graphs that call these operators without the pass ever
running, so whatever can be unpickled from such a cache imports this module.
"""

from __future__ import annotations

from fp8pass.ops import activation, layer_norm, linear, norm, quantize, weight_only
from fp8pass.ops.forms import ActForm, LayerNormForm, NormForm, QuantForm, dynamic_form, static_form
from fp8pass.ops.library import SPECS, OpSpec

# last, since it builds on all of the above: the operators of single kernels
from fp8pass.kernels import operators  # isort: skip

__all__ = [
    "SPECS",
    "ActForm",
    "LayerNormForm",
    "NormForm",
    "OpSpec",
    "QuantForm",
    "activation",
    "dynamic_form",
    "layer_norm",
    "linear",
    "norm",
    "operators",
    "quantize",
    "static_form",
    "weight_only",
]
