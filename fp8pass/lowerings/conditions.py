"""Conditions that several kernels share: each a pure predicate that gives a :class:`Verdict`.

Each names the failing condition and the value that failed it. What is not known statically (a
symbolic N or K) fails: unknown means no.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from fp8pass.problem import ScaledMMProblem
from fp8pass.quant_key import QuantKey, dtype_name
from fp8pass.reasons import YES, Verdict, no
from fp8pass.target import NO_TRITON, Target

#: (activation granularity, weight granularity)
Granularity = tuple[str, str]
TENSOR_TENSOR: Granularity = ("tensor", "tensor")
TOKEN_CHANNEL: Granularity = ("token", "channel")
#: Scales that a row and a column vector, or a scalar in place of either, can hold.
OUTER_PRODUCTS: tuple[Granularity, ...] = (
    TENSOR_TENSOR,
    TOKEN_CHANNEL,
    ("tensor", "channel"),
    ("token", "tensor"),
)

MODEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def all_of(*conditions: Callable[[], Verdict]) -> Verdict:
    """The first condition that fails, else YES; later ones are not evaluated."""
    for condition in conditions:
        verdict = condition()
        if not verdict:
            return verdict
    return YES


def always(target: Target) -> Verdict:
    """The requirement of a kernel that asks nothing of its target."""
    return YES


def architecture(kernel: str, target: Target, allowed: Iterable[str]) -> Verdict:
    """The target's architecture is one of ``allowed`` (names, never compared as numbers)."""
    names = tuple(allowed)
    if target.arch in names:
        return YES
    return no("FP8-L011", kernel=kernel, wants=f"one of {', '.join(names)}", target=target.spec)


def with_triton(kernel: str, target: Target, architectures: tuple[str, ...]) -> Verdict:
    """The architecture is one of those given, and Triton is there."""
    if NO_TRITON in target.features:
        return no("FP8-L011", kernel=kernel, wants="Triton", target=f"{target.spec} without it")
    return architecture(kernel, target, architectures)


def torch_at_least(kernel: str, target: Target, version: tuple[int, int]) -> Verdict:
    """The torch that will run the graph is ``version`` or newer."""
    if target.torch_version >= version:
        return YES
    wants, has = (".".join(map(str, v)) for v in (version, target.torch_version))
    return no("FP8-L005", kernel=kernel, wants=wants, has=has, target=target.spec)


def granularity(kernel: str, problem: ScaledMMProblem, allowed: tuple[Granularity, ...]) -> Verdict:
    """The recorded granularity of both scales, as a pair, is one of ``allowed``."""
    has = (problem.activation.granularity, problem.weight.granularity)
    if has in allowed:
        return YES
    wants = " or ".join(_pair(pair) for pair in allowed)
    return no("FP8-L003", kernel=kernel, wants=wants, has=_pair(has))


def _pair(pair: Granularity) -> str:
    return f"per-{pair[0]} x per-{pair[1]}"


def plain_scales(kernel: str, problem: ScaledMMProblem, *, zero_point: bool = False) -> Verdict:
    """Both scales are float32 numbers of a symmetric quantisation.

    With ``zero_point`` the activation may have one; without it neither its key nor the product may.
    A UE8M0 scale (one byte, a power of two) never goes to a kernel that reads float32.
    """
    for key in (problem.activation, problem.weight):
        if key.scale.format != "fp32":
            return no(
                "FP8-L007", kernel=kernel, what="scales in format", has=key.scale.format,
                wants="fp32",
            )  # fmt: skip
        if key.scale.dtype != torch.float32:
            return _dtype(kernel, "scales of dtype", key.scale.dtype, (torch.float32,))
        taken = zero_point and key is problem.activation
        if not taken and (not key.symmetric or problem.zero != "none"):
            if key is problem.weight and key.symmetric:
                continue  # the zero point is the activation's, which was asked first
            return no(
                "FP8-L007", kernel=kernel, what="the quantisation", has=str(key),
                wants="symmetric ones",
            )  # fmt: skip
    return YES


def fp8_operands(
    kernel: str,
    problem: ScaledMMProblem,
    activation: tuple[torch.dtype, ...],
    weight: tuple[torch.dtype, ...],
    *,
    both_e5m2: bool = False,
) -> Verdict:
    """The dtypes of the codes are among those given, and not both e5m2 unless allowed."""
    operands: tuple[tuple[str, QuantKey, tuple[torch.dtype, ...]], ...] = (
        ("activations of dtype", problem.activation, activation),
        ("weights of dtype", problem.weight, weight),
    )
    for what, key, allowed in operands:
        if key.dtype not in allowed:
            return _dtype(kernel, what, key.dtype, allowed)
    if not both_e5m2 and problem.activation.dtype == problem.weight.dtype == torch.float8_e5m2:
        return no(
            "FP8-L007", kernel=kernel, what="the pair of dtypes",
            has="float8_e5m2 x float8_e5m2", wants="float8_e5m2 on one side at most",
        )  # fmt: skip
    return YES


def out_dtype(kernel: str, problem: ScaledMMProblem, allowed: tuple[torch.dtype, ...]) -> Verdict:
    """The dtype of the result is one of ``allowed``."""
    if problem.out_dtype in allowed:
        return YES
    return _dtype(kernel, "results of dtype", problem.out_dtype, allowed)


def _dtype(kernel: str, what: str, has: torch.dtype, allowed: tuple[torch.dtype, ...]) -> Verdict:
    wants = ", ".join(dtype_name(dtype) for dtype in allowed)
    return no("FP8-L007", kernel=kernel, what=what, has=dtype_name(has), wants=wants)


def bias_dtype(kernel: str, problem: ScaledMMProblem, allowed: tuple[torch.dtype, ...]) -> Verdict:
    """No bias, or one of the given dtypes; an empty tuple means that no bias is taken."""
    if problem.bias is None or problem.bias in allowed:
        return YES
    out = dtype_name(problem.out_dtype)
    wants = " or ".join(dtype_name(dtype) for dtype in allowed) or "nothing"
    has = dtype_name(problem.bias)
    return no("FP8-L010", kernel=kernel, wants=f"{wants} (with a result of {out})", has=has)


def layouts(kernel: str, problem: ScaledMMProblem) -> Verdict:
    """``a`` row-major and ``b`` column-major (the transposed view of a row-major weight)."""
    for what, has, wants in (
        ("a", problem.a_layout, "row"),
        ("b", problem.b_layout, "col"),
    ):
        if has != wants:
            return no("FP8-L008", kernel=kernel, what=f"operand {what} in layout", wants=wants,
                      has=has)  # fmt: skip
    return YES


def multiples(kernel: str, problem: ScaledMMProblem, of: int) -> Verdict:
    """N and K are known, not 0, and multiples of ``of``."""
    for what, size in (("N", problem.n), ("K", problem.k)):
        if size is None:
            return no("FP8-L009", kernel=kernel, what=what, wants=of, has="not known statically")
        if size % of or size == 0:
            return no("FP8-L009", kernel=kernel, what=what, wants=of, has=size)
    return YES


#: Architectures whose code generators convert fp8.
_CUDA_FP8 = ("sm89", "sm90", "sm100", "sm103", "sm120", "sm121")
_ROCM_FP8 = ("gfx942", "gfx950", "gfx1200", "gfx1201")


def native_fp8(kernel: str, target: Target, problem: ScaledMMProblem) -> Verdict:
    """No e4m3fn codes on a target whose FP8 is e4m3fnuz: read as these they are wrong numbers.

    :func:`fp8pass.prepare` converts them; other dtypes are for :func:`fp8_operands` to refuse.
    """
    if target.fp8_dtype == torch.float8_e4m3fnuz:
        for what, key in (("activations", problem.activation), ("weights", problem.weight)):
            if key.dtype == torch.float8_e4m3fn:
                return no("FP8-L060", kernel=kernel, what=what, target=target.spec)
    return YES


def library(kernel: str, target: Target, name: str) -> Verdict:
    """The target has the kernel library called ``name``."""
    if target.has_library(name):
        return YES
    return no("FP8-L011", kernel=kernel, wants=f"the library {name}", target=target.spec)


def library_at_least(
    kernel: str, target: Target, name: str, version: tuple[int, int], what: str
) -> Verdict:
    """A library is ``version`` or newer, which is needed for ``what``; a version that is not known
    is taken for an old one."""
    has = target.library_version(name)
    if has is not None and has >= version:
        return YES
    told = "one of unknown version" if has is None else ".".join(map(str, has))
    wants = ".".join(map(str, version))
    return no(
        "FP8-L062", kernel=kernel, library=name, wants=wants, what=what, target=target.spec,
        has=told,
    )  # fmt: skip


def scales_along(kernel: str, problem: ScaledMMProblem) -> Verdict:
    """Scales of ``a`` per tensor, token or group of a row; of ``b`` per tensor, channel or block.

    With blocks N and K must be known, since a scale is spread over them.
    """
    act, weight = problem.activation.scale.group, problem.weight.scale.group
    fits = act.name in ("tensor", "token") or (act.row == 1 and act.col > 0)
    if not fits or (weight.name not in ("tensor", "channel") and min(weight.row, weight.col) < 1):
        wants = "one scale per tensor, token or 1xG group with one per tensor, channel or block"
        return no("FP8-L003", kernel=kernel, wants=wants, has=_pair((act.name, weight.name)))
    if act.name.startswith("group") or weight.name.startswith("group"):
        return multiples(kernel, problem, 1)
    return YES


def converts(kernel: str, target: Target, problem: ScaledMMProblem) -> Verdict:
    """The target converts both dtypes of codes to float32 in generated code.

    A CPU converts all, every target int8; of fp8 only what was seen or read to be converted.
    """
    for key in (problem.activation, problem.weight):
        if key.dtype == torch.int8 or key.dtype in MODEL_DTYPES or target.kind == "cpu":
            continue
        if target.kind == "cuda":
            known = architecture(kernel, target, _CUDA_FP8)
            allowed: tuple[torch.dtype, ...] = (torch.float8_e4m3fn, torch.float8_e5m2)
        else:
            known = architecture(kernel, target, _ROCM_FP8) and native_fp8(kernel, target, problem)
            allowed = () if target.fp8_dtype is None else (target.fp8_dtype,)
        if not known:
            return known
        if key.dtype not in allowed:
            return _dtype(kernel, "codes of dtype", key.dtype, allowed)
    return YES


def int32_sum(kernel: str, problem: ScaledMMProblem) -> Verdict:
    """K is known, and a sum over it of products of int8 codes fits in int32."""
    if problem.k is not None and problem.k < 2**31 // 128**2:
        return YES
    has = "a depth K that is not known statically" if problem.k is None else f"K = {problem.k}"
    return no("FP8-L017", kernel=kernel, what=f"{has}: the int32 sum may overflow")


def exact_zero_point(kernel: str, problem: ScaledMMProblem, allowed: tuple[str, ...]) -> Verdict:
    """No zero point, or one that is taken off in a way the kernel does exactly.

    ``allowed`` names them: the ``zero`` of a product's form, with the dtype of the zero point.
    """
    if problem.zero == "none":
        return YES
    assert problem.zero_dtype is not None
    has = f"{problem.zero} {dtype_name(problem.zero_dtype)}"
    if has not in allowed:
        wants = " or ".join(allowed)
        return no("FP8-L007", kernel=kernel, what="a zero point taken off as", has=has, wants=wants)
    if problem.k is None or problem.k >= 2**31 // (255 * 128):
        has = "a depth K that is not known" if problem.k is None else f"K = {problem.k}"
        return no("FP8-L017", kernel=kernel, what=f"{has}: the sum less a zero point may overflow")
    return YES
