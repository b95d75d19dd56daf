"""Forms: what differs in *numbers* between two spellings of one operator.

A generic operator stands for many spellings. What changes its result - where a value is rounded
and to what, divide or multiply by the reciprocal, the scale's floor, the largest code - is recorded
in a form. The lists are closed: a reader that meets anything else does not read. A form travels in
the graph as a string, since a schema cannot hold a Python object; ``parse`` is its inverse.
"""

from fp8pass.ops.act_form import ActForm
from fp8pass.ops.form_words import MODEL_DTYPES
from fp8pass.ops.layer_norm_form import LayerNormForm
from fp8pass.ops.norm_form import NormForm
from fp8pass.ops.quant_form import QuantForm, dynamic_form, static_form

__all__ = [
    "MODEL_DTYPES",
    "ActForm",
    "LayerNormForm",
    "NormForm",
    "QuantForm",
    "dynamic_form",
    "static_form",
]
