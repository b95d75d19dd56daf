"""Dialect of Hugging Face's fine-grained FP8: operators of ``kernels-community/finegrained-fp8``.

``FP8Linear`` of transformers calls one operator for quantise and product together. Which ones there
are, and their arguments, was read in the kernel package that transformers 5.24 loads; their
namespace carries the build's hash.

None is read yet, for a reason that is not the same for all:

- the quantise floors the *divisor* only: ``scale = amax / 448``, ``q = x / max(scale, 1e-12)``. No
  form of :class:`fp8pass.ops.forms.QuantForm` is that (``scale`` floors what is stored too), and
  rows with a largest value below 4.5e-10 would differ;
- the static quantise has no clamp: it relies on the saturation of its device;
- the product of the block-wise ones has one scale for each 128x128 block of the weight.

A build that registers them with ``torch.library.triton_op`` is taken apart before any pass sees the
graph: what arrives is the launches of its Triton kernels. A kernel's name says too little to be
read as anything, so these are named in the report too.
"""

from __future__ import annotations

from torch import fx

from fp8pass.spellings.library_ops import Arguments, LibraryOp

_PACKAGE = "kernels-community/finegrained-fp8, as transformers 5.24 calls it"
_NAME = r"_?finegrained_fp8(_\w+)?::"


def _block(node: fx.Node, given: Arguments) -> str:
    rows, cols = given.get("block_size", (128, 128))
    return (
        f"it quantises and multiplies in one call, with one scale for each {rows}x{cols} block of "
        "its weight, which no kernel of fp8pass takes"
    )


def _tensor(node: fx.Node, given: Arguments) -> str:
    return (
        "it quantises and multiplies in one call, and its quantise floors the divisor but not the "
        "scale, which is not a known form"
    )


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
        _NAME + "w8a8_block_(dynamic|static)_fp8_matmul",
        "scaled_mm",
        None,
        _block,
        _PACKAGE,
    ),
    LibraryOp(_NAME + "w8a8_tensor_dynamic_fp8_matmul", "scaled_mm", None, _tensor, _PACKAGE),
    LibraryOp(
        _NAME + r"(mxfp\w*|w4a8_\w+_matmul|w8a8_mx\w*)", "scaled_mm", None, _microscaled, _PACKAGE
    ),
    LibraryOp(_NAME + r"\w+_(batched|grouped)", "scaled_mm", None, _experts, _PACKAGE),
)
