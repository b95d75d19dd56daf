"""Dialect of Hugging Face's fine-grained FP8: operators of ``kernels-community/finegrained-fp8``.

``FP8Linear`` of transformers calls one operator for quantise and product together. Which ones there
are, and their arguments, was read in the kernel package that transformers 5.24 loads; their
namespace carries the build's hash.

Such a call is taken apart into a quantise and a product where a kernel of fp8pass takes the
product: then the quantise can be fused with what comes before it. The arithmetic of the dynamic
ones is ``scale = amax / 448``, ``q = x / max(scale, 1e-12)`` for each row, or for each block of a
row as wide as the weight's. Not taken apart:

- the static quantise, which has no clamp: it relies on the saturation of its device;
- block-wise weights, as long as no kernel takes one scale for each block;
- scales in UE8M0, microscaled weights, and the products of several experts.

A build that registers them with ``torch.library.triton_op`` is taken apart before any pass sees the
graph: what arrives is the launches of its Triton kernels. A kernel's name says too little to be
read as anything, so these are named in the report too.
"""

from __future__ import annotations

import torch
from torch import fx

from fp8pass.ops.forms import MODEL_DTYPES, QuantForm
from fp8pass.quant_key import dtype_name
from fp8pass.spellings.library_ops import Arguments, LibraryOp, LinearMatch
from fp8pass.spellings.walk import contiguous, one_element, same, tensor

_PACKAGE = "kernels-community/finegrained-fp8, as transformers 5.24 calls it"
_NAME = r"_?finegrained_fp8(_\w+)?::"
_E4M3 = torch.float8_e4m3fn
_TOP = 448.0


def _form(granularity: str) -> QuantForm:
    return QuantForm(
        _E4M3, granularity, torch.float32, "div", _TOP, "divisor", 1e-12, "div", -_TOP, _TOP
    )


def _operands(node: fx.Node, given: Arguments) -> str | None:
    """Why the operands are not those of a product, None if they are."""
    a, weight, scale, out = (tensor(n) for n in (given["A"], given["B"], given["Bs"], node))
    if a is None or weight is None or scale is None or out is None or a.dim() == 0:
        return "the graph does not know its shapes"
    if a.dtype not in MODEL_DTYPES or out.dtype not in MODEL_DTYPES:
        return f"it takes {a.dtype} values and gives {out.dtype}"
    if weight.dtype != _E4M3 or scale.dtype != torch.float32:
        return f"its weight is {weight.dtype} with scales of {scale.dtype}"
    if weight.dim() != 2 or not all(type(size) is int for size in weight.shape):
        return f"its weight has the shape {tuple(weight.shape)}"
    if not same(a.shape[-1], weight.shape[1]):
        return "the widths of its operands are not known to be equal"
    return None if contiguous(a) else "its input is not known to be contiguous"


def _tensor(node: fx.Node, given: Arguments) -> LinearMatch | str:
    why = _operands(node, given)
    if why is not None:
        return why
    if not one_element(given["Bs"].meta["val"]):
        return "its weight has several scales"
    name = dtype_name(_E4M3)
    keys = f"{name}/dynamic/token", f"{name}/static/tensor"
    return LinearMatch(node, given["A"], _form("token"), given["B"], given["Bs"], *keys)


def _block(node: fx.Node, given: Arguments) -> LinearMatch | str:
    why = _operands(node, given)
    if why is not None:
        return why
    size = given["block_size"]
    if len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        return f"its blocks are {size}"
    rows, cols = size
    weight, scale = given["B"].meta["val"], given["Bs"].meta["val"]
    n, k = weight.shape
    if k % cols:
        return f"its width is not a multiple of {cols}"
    if scale.dim() != 2 or tuple(scale.shape) != (-(-n // rows), k // cols):
        return f"its scales have the shape {tuple(scale.shape)}"
    name = dtype_name(_E4M3)
    keys = f"{name}/dynamic/group1x{cols}", f"{name}/static/group{cols}x{rows}"
    form = _form(f"group{cols}")
    return LinearMatch(node, given["A"], form, given["B"], given["Bs"], *keys)


def _static(node: fx.Node, given: Arguments) -> str:
    return "its static quantise has no clamp, so an overflow is left to the device"


def _microscaled(node: fx.Node, given: Arguments) -> str:
    return "it multiplies microscaled (MX) weights, which no kernel of fp8pass takes"


def _experts(node: fx.Node, given: Arguments) -> str:
    return "it multiplies by the weights of several experts, which fp8pass does not read"


def _launch(node: fx.Node, given: Arguments) -> str:
    return "it is the launch of a Triton kernel, of which the graph shows the name alone"


_KERNEL = "triton:"

OPS = (
    LibraryOp(_KERNEL + r"_fp8_act_quant\w*_kernel", "quantize", None, _launch, _PACKAGE),
    LibraryOp(_KERNEL + r"w8a8_\w+_matmul\w*_kernel", "scaled_mm", None, _launch, _PACKAGE),
    LibraryOp(
        _NAME + "w8a8_block_dynamic_fp8_matmul",
        "linear",
        ("A", "B", "Bs", "block_size", "output_dtype"),
        _block,
        _PACKAGE,
    ),
    LibraryOp(_NAME + "w8a8_block_static_fp8_matmul", "scaled_mm", None, _static, _PACKAGE),
    LibraryOp(
        _NAME + "w8a8_tensor_dynamic_fp8_matmul",
        "linear",
        ("A", "B", "Bs", "output_dtype"),
        _tensor,
        _PACKAGE,
    ),
    LibraryOp(
        _NAME + r"(mxfp\w*|w4a8_\w+_matmul|w8a8_mx\w*)", "scaled_mm", None, _microscaled, _PACKAGE
    ),
    LibraryOp(_NAME + r"\w+_(batched|grouped)", "scaled_mm", None, _experts, _PACKAGE),
)
