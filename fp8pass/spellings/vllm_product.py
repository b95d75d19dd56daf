"""Dialect of vLLM: the scaled products that its kernels compute.

``_C::cutlass_scaled_mm(out, a, b, a_scales, b_scales, bias)`` is read by the number of its scales,
as it reads them itself (``csrc/.../w8a8/cutlass``): one, or one for each row of ``a`` and column of
``b``; else one for each 1x128 of ``a`` and each 128x128 of ``b``. Both scales and the bias are
applied in float32 to the sum, which is rounded once. Products with one scale for each row, column
or tensor accumulate in the reduced precision of the tensor core where there is one, so they are
read as products that allow it; the sums of blocks are added up in float32, those of int8 are exact.

``vllm::fp8_gemm_nt_op`` is DeepGEMM: ``weight [N, K]``, bf16 results, scales as those blocks,
unless they are rounded to powers of two and packed (``use_deep_gemm_e8m0``), which is not read.

What quantises inside, what multiplies bf16 values by an fp8 weight and what keeps its weight behind
a handle stays in the kernel that vLLM chose, with that reason.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8pass.quant_key import dtype_name
from fp8pass.reasons import Verdict, no
from fp8pass.spellings.library_ops import (
    Arguments,
    LibraryOp,
    ProductMatch,
    Read,
    name_of,
    written,
)
from fp8pass.spellings.linear import peel_views_is_input, quantise_form
from fp8pass.spellings.walk import contiguous, one_element, same, tensor

_E4M3 = torch.float8_e4m3fn
_RESULTS = (torch.bfloat16, torch.float16)
_BLOCK = 128
#: How many summands of int8 products an int32 holds for sure.
_INT32_SUMMANDS = 2**31 // 2**14


def _scaled_mm(node: fx.Node, given: Arguments) -> ProductMatch | str:
    a, b, scale_a, scale_b = (given[n] for n in ("a", "b", "a_scales", "b_scales"))
    out = _out(node, "out")
    why = _operands(a, b, scale_a, scale_b, out)
    if isinstance(out, str) or why is not None:
        return out if isinstance(out, str) else str(why)
    va, vb, vsa, vsb, result = (n.meta["val"] for n in (a, b, scale_a, scale_b, out))
    bias = given["bias"]
    if bias is not None:
        held = tensor(bias)
        if held is None or held.dim() != 1 or held.dtype != result.dtype:
            return "its bias is not a vector of the dtype of its result"
    rows, cols = _along(vsa, va.shape[0], 0), _along(vsb, vb.shape[1], 1)
    if rows is not None and cols is not None:
        kinds = ("token" if rows else "tensor", "channel" if cols else "tensor")
        return _product(out, a, b, scale_a, scale_b, bias, kinds, fast=va.dtype == _E4M3)
    if bias is not None or va.dtype != _E4M3 or not _blocks(vsa, vsb, va, vb):
        return f"its scales have the shapes {tuple(vsa.shape)} and {tuple(vsb.shape)}"
    kinds = (f"group1x{_BLOCK}", f"group{_BLOCK}x{_BLOCK}")
    return _product(out, a, b, scale_a, scale_b, None, kinds, fast=False)


def _gemm_nt(node: fx.Node, given: Arguments) -> ProductMatch | str:
    a, weight = given["q_input"], given["weight"]
    scale_a, scale_b = given["input_scale"], given["weight_scale"]
    if given["use_deep_gemm_e8m0"] is not False:
        return "its scales are powers of two, packed by DeepGEMM"
    out = _out(node, "output")
    vw, vsb = tensor(weight), tensor(scale_b)
    if vw is None or vsb is None or vw.dim() != 2 or vsb.dim() != 2:
        return "the graph does not know the shapes of its weight and its scales"
    why = _operands(a, weight, scale_a, scale_b, out, turned=False)
    if isinstance(out, str) or why is not None:
        return out if isinstance(out, str) else str(why)
    va, vsa = a.meta["val"], scale_a.meta["val"]
    if va.dtype != _E4M3 or out.meta["val"].dtype != torch.bfloat16:
        return f"it multiplies {va.dtype} codes to {out.meta['val'].dtype}"
    if not _blocks(vsa, vsb.t(), va, vw.t()):
        return f"its scales have the shapes {tuple(vsa.shape)} and {tuple(vsb.shape)}"
    kinds = (f"group1x{_BLOCK}", f"group{_BLOCK}x{_BLOCK}")
    return _product(out, a, weight, scale_a, scale_b, None, kinds, fast=False, turned=False)


def _out(node: fx.Node, name: str) -> fx.Node | str:
    """The node of the result."""
    found = written(node, name)
    return found[0] if len(found) == 1 else f"its result is read {len(found)} times, not once"


def _operands(
    a: Any, b: Any, scale_a: Any, scale_b: Any, out: Any, turned: bool = True
) -> str | None:
    """Why these are not the operands of one product, None if they are."""
    va, vb, vsa, vsb, result = (tensor(n) for n in (a, b, scale_a, scale_b, out))
    if va is None or vb is None or vsa is None or vsb is None or result is None:
        return None if isinstance(out, str) else "the graph does not know its shapes"
    if va.dtype != vb.dtype or va.dtype not in (_E4M3, torch.int8):
        return f"its operands are {va.dtype} and {vb.dtype}"
    if va.dim() != 2 or vb.dim() != 2 or result.dim() != 2:
        return "its operands are no matrices"
    if vsa.dtype != torch.float32 or vsb.dtype != torch.float32:
        return f"its scales are {vsa.dtype} and {vsb.dtype}, not float32"
    depth, width = vb.shape if turned else vb.shape[::-1]
    if not same(va.shape[1], depth):
        return "the widths of its operands are not known to be equal"
    if va.dtype == torch.int8 and (type(depth) is not int or depth >= _INT32_SUMMANDS):
        return f"its int32 sum over K = {depth} may overflow"
    if result.dtype not in _RESULTS:
        return f"its result is {result.dtype}"
    if not same(result.shape[0], va.shape[0]) or not same(result.shape[1], width):
        return f"its result has the shape {tuple(result.shape)}"
    return None if contiguous(result) else "its result is not contiguous"


def _along(scale: torch.Tensor, size: Any, dim: int) -> bool | None:
    """Whether there is a scale for each row (column) or one for all; None if it is neither."""
    if scale.dim() == 2 and same(scale.shape[1 - dim], 1) and same(scale.shape[dim], size):
        # [M, 1] and [1, N]; of one row or column it is the same number
        return contiguous(scale) or None
    if scale.dim() == 1 and not same(scale.shape[0], 1) and same(scale.shape[0], size):
        return contiguous(scale) or None
    if one_element(scale):
        return False
    if dim == 1 and scale.dim() == 2 and same(scale.shape[1], 1) and same(scale.shape[0], size):
        return contiguous(scale) or None  # [N, 1], which it takes for a vector as well
    return None


def _blocks(scale_a: torch.Tensor, scale_b: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether there is a scale for each 1x128 of ``a [M, K]`` and each 128x128 of ``b [K, N]``."""
    depth, width = b.shape
    if type(depth) is not int or type(width) is not int or depth <= _BLOCK:
        return False  # of one block of K the number of scales does not tell blocks from rows
    count = -(-depth // _BLOCK)
    if scale_a.dim() != 2 or scale_b.dim() != 2 or not same(scale_a.shape[0], a.shape[0]):
        return False
    return same(scale_a.shape[1], count) and tuple(scale_b.shape) == (count, -(-width // _BLOCK))


def _product(
    out: fx.Node,
    a: fx.Node,
    weight: fx.Node,
    scale_a: fx.Node,
    scale_b: fx.Node,
    bias: fx.Node | None,
    kinds: tuple[str, str],
    fast: bool,
    turned: bool = True,
) -> ProductMatch:
    act, channel = kinds
    form = quantise_form(a)
    if form is not None:
        static = form.static
        if form.granularity == "token" and act == "tensor":
            act = "token"  # one row
    else:
        static = act == "tensor" and (peel_views_is_input(a) or peel_views_is_input(scale_a))
    name = dtype_name(a.meta["val"].dtype)
    return ProductMatch(
        out,
        a,
        weight,
        scale_a,
        scale_b,
        bias,
        out.meta["val"].dtype,
        f"{name}/{'static' if static else 'dynamic'}/{act}",
        f"{name}/static/{channel}",
        fast,
        turned,
    )


# ---- what stays --------------------------------------------------------------------------------


def _kept(what: str) -> Read:
    def read(node: fx.Node, given: Arguments) -> Verdict:
        return no("FP8-R012", op=name_of(node), node=node.name, dialect="vLLM", what=what)

    return read


def _stays(name: str, what: str) -> LibraryOp:
    return LibraryOp(name, "scaled_mm", None, _kept(what), "vLLM's sources of 2026", dialect="vllm")


_TESTED = "vLLM's sources of 2026"

OPS = (
    LibraryOp(
        "_C::cutlass_scaled_mm",
        "scaled_mm",
        ("out", "a", "b", "a_scales", "b_scales", "bias"),
        _scaled_mm,
        _TESTED,
        writes=("out",),
        renamed=(("c", "out"),),
        dialect="vllm",
    ),
    LibraryOp(
        "vllm::fp8_gemm_nt_op",
        "scaled_mm",
        ("q_input", "input_scale", "weight", "weight_scale", "output", "use_deep_gemm_e8m0"),
        _gemm_nt,
        _TESTED,
        writes=("output",),
        dialect="vllm",
    ),
    _stays(
        "_C::(fp8|int8)_scaled_mm_with_quant",
        "it quantises its activations inside, in a way that the graph does not show",
    ),
    _stays(
        r"_C::fp8_scaled_mm_\w+",
        "bf16 activations by an fp8 weight packed for the CPU (W8A16), with nothing to quantise",
    ),
    _stays("_C::onednn_scaled_mm", "int8 codes by a weight that oneDNN keeps behind a handle"),
    _stays("_C::cutlass_scaled_mm_azp", "int8 codes with a zero point, corrected by its own sums"),
    _stays(
        "vllm::(dynamic_)?flashinfer_(deepgemm|fp8)_blockscale_gemm",
        "FlashInfer and DeepGEMM quantise bf16 activations in blocks inside it, each in its way; "
        "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER=0 makes vLLM quantise before the product",
    ),
)
