"""Option ``self_check``: a kernel of another library is compared with the reference before it runs.

A debugging aid. With it, a site that such a kernel takes becomes a plan that names, behind each of
them, the kernel that would have been chosen without it: ``"0-31=vllm_cutlass_block|triton_block"``.
The plan is an argument in the graph, so that it survives a hit in Inductor's cache. On the first
call for each size a kernel is run on random data of that size and compared with a float64 product;
if that differs by more than the contract allows, or anything is raised, then or later, the kernel
is disabled for the process, which is logged as an error, and the next one runs. Nothing is compared
while a CUDA graph is captured: there, what was not compared before is passed over.

A size is N, K, the dtypes and the number of rows up to the next power of two, since libraries have
other tiles for other numbers of rows; from :data:`_ROWS` on all are one size. Of many rows
:data:`_SEEN`, spread over all of them, are compared.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch

from fp8pass.lowerings.choice import Choice, choose
from fp8pass.lowerings.registry import Kernel, find, kernels
from fp8pass.ops.linear import scaled_product, shaped_scale, spread_scale
from fp8pass.options import Options
from fp8pass.problem import MRange, ScaledMMProblem
from fp8pass.quant_key import QuantKey
from fp8pass.target import Target

log = logging.getLogger("fp8pass")

#: The last of all: the generic product in torch.
REFERENCE = "reference"
#: Between a kernel and what runs in its place.
OR = "|"
#: Most rows of the random data.
_ROWS = 4096
#: Most rows of it that are compared.
_SEEN = 256

#: a, b, scale_a, scale_b, bias
_Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"]

_compared: set[tuple[Any, ...]] = set()
_disabled: dict[str, str] = {}


def disabled() -> dict[str, str]:
    """The kernels that failed in this process, each with what was found."""
    return dict(_disabled)


def forget() -> None:
    """Forget what was compared and what failed (tests)."""
    _compared.clear()
    _disabled.clear()


# ---- when compiling ------------------------------------------------------------------------------


def checked_plan(target: Target, problem: ScaledMMProblem, choice: Choice, options: Options) -> str:
    """The plan of ``choice`` with what runs where a library's kernel fails; ``""`` if no kernel of
    it is a library's, or ``self_check`` is off. The options are those of the site."""
    if problem.zero != "none" or problem.weight_only:  # a plan has no operands for these
        return ""
    if not options.self_check or not any(k.library and k.run for _, k in choice.plan):
        return ""
    others = tuple(kernel.name for kernel in kernels() if kernel.library)
    disable = tuple(dict.fromkeys((*options.disable, *others)))
    rest = replace(options, force=None, prefer=(), disable=disable)
    parts = []
    for m, kernel in choice.plan:
        names = [kernel.name]
        if kernel.library:
            names.append(_next(target, replace(problem, m=m), m, rest))
        parts.append(f"{m}={OR.join(names)}")
    return ";".join(parts)


def _next(target: Target, problem: ScaledMMProblem, m: MRange, options: Options) -> str:
    for _, kernel in choose(target, problem, options).plan:
        if kernel.run is not None and kernel.rows.covers(m):
            return kernel.name
    return REFERENCE


# ---- when running --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checked:
    """A part of a plan with alternatives, called as :attr:`Kernel.run` is.

    Attributes:
        names: kernels, the first that is not disabled runs; or :data:`REFERENCE`.
        keys: ``str`` of both quantisation keys, joined by ``;``.
    """

    names: tuple[str, ...]
    keys: str

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        fast_accum: bool,
    ) -> torch.Tensor:
        """``[M, N]`` by the first kernel that can be believed."""
        args = (a, b, scale_a, scale_b, bias, out_dtype, fast_accum)
        for name, following in zip(self.names, (*self.names[1:], REFERENCE), strict=True):
            kernel = None if name == REFERENCE else find(name)
            if kernel is None or kernel.run is None:
                break
            if not kernel.library:
                return kernel.run(*args)
            if self._believed(kernel, following, *args):
                try:
                    return kernel.run(*args)
                except Exception as error:
                    _disable(kernel, following, _raised(error))
        act_key, weight_key = self.keys.split(";")
        return scaled_product(a, b, scale_a, scale_b, bias, out_dtype, act_key, weight_key, "")

    def _believed(
        self,
        kernel: Kernel,
        following: str,
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        fast_accum: bool,
    ) -> bool:
        if kernel.name in _disabled:
            return False
        if not a.shape[0]:  # nothing that could be wrong, and nothing that was compared
            return True
        offset = None if bias is None else bias.dtype
        rows = min(1 << (a.shape[0] - 1).bit_length(), _ROWS)
        size = (kernel.name, rows, *b.shape, out_dtype, offset, fast_accum, self.keys, a.device)
        if size in _compared:
            return True
        if a.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        given = _random(a, b, scale_a, scale_b, bias)
        reduced = fast_accum or bool(kernel.reduced_accumulation)
        try:
            assert kernel.run is not None
            out = kernel.run(*given, out_dtype, fast_accum)
            found = _difference(out, given, out_dtype, self.keys, reduced)
        except Exception as error:
            found = _raised(error)
        if found:
            _disable(kernel, following, found)
            return False
        _compared.add(size)
        return True


def _raised(error: Exception) -> str:
    text = str(error).splitlines()
    return f"it raised {type(error).__name__}: {text[0] if text else ''}"


def _disable(kernel: Kernel, following: str, found: str) -> None:
    _disabled[kernel.name] = found
    log.error(
        "fp8pass self-check: kernel %s of the library %s is DISABLED for this process: %s. "
        "%s runs in its place",
        kernel.name, kernel.library, found, following,
    )  # fmt: skip


def _random(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
) -> _Operands:
    """Operands as those given (at most :data:`_ROWS` rows), random, without touching torch's
    generators."""
    generator = torch.Generator(a.device).manual_seed(0)

    def normal(like: torch.Tensor, size: float) -> torch.Tensor:
        values = torch.randn(like.shape, device=like.device, generator=generator) * size
        if like.dtype == torch.int8:
            values = values.clamp(-128, 127)
        return torch.empty_like(like).copy_(values.to(like.dtype))

    def positive(like: torch.Tensor) -> torch.Tensor:
        values = torch.rand(like.shape, device=like.device, generator=generator)
        return torch.empty_like(like).copy_(values + 0.1)

    rows = min(a.shape[0], _ROWS) if _by_rows(scale_a, a.shape[0]) else a.shape[0]
    if scale_a.dim() == 2 and scale_a.shape[0] == a.shape[0]:
        scale_a = scale_a[:rows]
    size = 40.0 if a.dtype == torch.int8 else 4.0
    made = normal(a[:rows], size), normal(b, size), positive(scale_a), positive(scale_b)
    return *made, None if bias is None else normal(bias, 1.0)


def _by_rows(scale: torch.Tensor, rows: int) -> bool:
    """Whether some of the rows can be taken with their scales: one for each row, or for all."""
    return scale.dim() < 2 or scale.shape[0] in (1, rows)


def _difference(
    out: torch.Tensor, given: _Operands, out_dtype: torch.dtype, keys: str, reduced: bool
) -> str:
    """What is wrong with ``out``, in words; ``""`` if it keeps the contract."""
    a, b, scale_a, scale_b, bias = given
    rows = a.shape[0]
    if out.dtype != out_dtype or tuple(out.shape) != (rows, b.shape[1]):
        return f"it returned {out.dtype}{tuple(out.shape)}"
    if rows > _SEEN and _by_rows(scale_a, rows):
        at = [i * (rows - 1) // (_SEEN - 1) for i in range(_SEEN)]  # the first and the last too
        seen = torch.tensor(at, device=a.device)
        if scale_a.dim() == 2 and scale_a.shape[0] == rows:
            scale_a = scale_a[seen]
        out = out[seen]
        a = a.view(torch.uint8)[seen].view(a.dtype)
    wide = []
    for codes, scale, text in zip((a, b), (scale_a, scale_b), keys.split(";"), strict=True):
        group = QuantKey.parse(text).scale.group
        scale = shaped_scale(scale, group.name)
        if group.name.startswith("group"):
            scale = spread_scale(scale, group, codes.shape)
        wide.append(codes.to(torch.float64) * scale)
    exact, size = wide[0] @ wide[1], wide[0].abs() @ wide[1].abs()
    if bias is not None:
        exact, size = exact + bias, size + bias.abs()
    bits = 2.0**-6 if reduced else 2.0**-10
    allowed = 2 * torch.finfo(out_dtype).eps * exact.abs() + size * bits
    wrong = ~((out.to(torch.float64) - exact).abs() <= allowed)
    count = int(wrong.sum())
    if not count:
        return ""
    return f"{count} of {wrong.numel()} elements of a random product are wrong"
