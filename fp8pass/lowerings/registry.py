"""The kernels that a scaled product can be lowered to, as plain records, and the list of them.

To add a backend: copy the shortest file of this folder, describe the kernel in a :class:`Kernel`,
call :func:`register`, name the module in ``__init__.py`` and add one golden graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import fx

from fp8pass.errors import OptionError, choices
from fp8pass.problem import MRange, ScaledMMProblem
from fp8pass.reasons import Verdict
from fp8pass.target import Target


@dataclass(frozen=True, slots=True)
class EmitSite:
    """What :attr:`Kernel.emit` gets: the operands as nodes, and what was decided about them.

    Attributes:
        a: ``[M, K]`` fp8 codes; of a weight-only product the activations themselves.
        b: ``[K, N]`` fp8 codes.
        scale_a: float32 dequant scale of ``a``, one element or ``[M, 1]``; of a weight-only
            product, which has none, the same node as ``scale_b``.
        scale_b: float32 dequant scale of ``b``, one element or ``[1, N]``.
        bias: ``[N]``, or None.
        prepared: the weight copy made by :func:`fp8pass.prepare`, or None.
        out_dtype: dtype of the result.
        problem, target: what the choice was made for.
        numerics: ``"exact"`` or ``"fast"`` (the latter allows reduced-precision accumulation).
        zero: the zero point of ``a``, one element or ``[M, 1]``, or None.
        val: fake tensor of the result ``[M, N]``; becomes ``meta["val"]`` of the last node.
    """

    a: fx.Node
    b: fx.Node
    scale_a: fx.Node
    scale_b: fx.Node
    bias: fx.Node | None
    prepared: fx.Node | None
    out_dtype: torch.dtype
    problem: ScaledMMProblem
    target: Target
    numerics: str
    val: torch.Tensor
    zero: fx.Node | None = None

    @property
    def fast_accum(self) -> bool:
        """Whether the product may be accumulated with less than float32."""
        return self.problem.use_fast_accum or self.numerics == "fast"


#: ``run(a, b, scale_a, scale_b, bias, out_dtype, fast_accum) -> [M, N]``: a kernel on real tensors.
Run = Callable[
    [
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        "torch.Tensor | None",
        torch.dtype,
        bool,
    ],
    torch.Tensor,
]


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """One way to compute ``round((a @ b) * scale_a * scale_b + bias)``; compared by identity.

    Attributes:
        name: what options, reports and plans call it.
        summary: one line for people.
        kinds: device kinds (:attr:`Target.kind`) that it can run on.
        requirements: what it needs of the target alone (architecture, versions, libraries).
        can_implement: whether it takes this product on this target. Both are pure functions: no
            device is asked, so that the choice for any device is made and tested on any other.
        priority: order among the kernels that can; lower comes first, ties by registration.
        emit: inserts the nodes at the graph's insertion point, sets ``meta["val"]`` on each of
            them, returns the node of the result. Functional ops only.
        provenance: where it was tested, honestly.
        rows: the range of M that it takes; a choice is made for each part of the site's range.
        run: the kernel called on real tensors, for a plan over several ranges of M; None if it is
            more than one call, so that it can only stand for a whole site.
        reduced_accumulation: it always accumulates in less than float32, so that the source must
            allow that; or the architectures on which it does.
        library: the library whose kernel it is, if it is none of torch's or our own: what
            ``self_check`` looks at.
        weight_only: it multiplies activations that are not quantised (W8A16): what
            ``fp8pass::w8a16_mm`` is lowered to, and on request what two quantised operands become.
        inexact: how its numbers differ from the source's beyond the contract of a product, "" if
            they do not; with a text it is only for those who name it.
    """

    name: str
    summary: str
    kinds: frozenset[str]
    requirements: Callable[[Target], Verdict]
    can_implement: Callable[[Target, ScaledMMProblem], Verdict]
    priority: Callable[[Target, ScaledMMProblem], int]
    emit: Callable[[fx.Graph, EmitSite], fx.Node]
    provenance: str
    rows: MRange = MRange()
    run: Run | None = None
    reduced_accumulation: bool | frozenset[str] = False
    library: str = ""
    weight_only: bool = False
    inexact: str = ""

    def reduces(self, target: Target) -> bool:
        """Whether it accumulates in less than float32 on this target."""
        where = self.reduced_accumulation
        return where if isinstance(where, bool) else target.arch in where


#: What options call the best weight-only kernel of a site.
WEIGHT_ONLY = "w8a16"

_KERNELS: dict[str, Kernel] = {}


def register(kernel: Kernel) -> Kernel:
    """Add a kernel to the list; the order of registration breaks ties of priority.

    Raises:
        OptionError: the name is taken, or contains a character that the list options use.
    """
    if kernel.name in _KERNELS or kernel.name == WEIGHT_ONLY:
        raise OptionError(f"a kernel named {kernel.name!r} is registered already")
    if not kernel.name.isidentifier():
        raise OptionError(f"kernel name {kernel.name!r} is not an identifier")
    _KERNELS[kernel.name] = kernel
    return kernel


def unregister(name: str) -> None:
    """Remove a kernel again (plugins, tests). Raises :class:`OptionError` if there is none."""
    find(name)
    del _KERNELS[name]


def find(name: str) -> Kernel:
    """The kernel called ``name``. Raises :class:`OptionError` naming the known ones."""
    if name not in _KERNELS:
        raise OptionError(f"unknown kernel {name!r}; allowed: {choices(kernel_names())}")
    return _KERNELS[name]


def weight_only_names() -> tuple[str, ...]:
    """The names of the weight-only kernels, in the order of registration."""
    return tuple(kernel.name for kernel in _KERNELS.values() if kernel.weight_only)


def kernels() -> tuple[Kernel, ...]:
    """All kernels, in the order of registration."""
    return tuple(_KERNELS.values())


def registered_elsewhere() -> tuple[tuple[str, str], ...]:
    """(name, hash of the file) of each kernel from outside the package, whose source the identity
    of the package does not cover."""
    found = []
    for kernel in _KERNELS.values():
        emit = kernel.emit
        while isinstance(emit, partial):
            emit = emit.func
        if not str(getattr(emit, "__module__", "")).startswith("fp8pass."):
            code = getattr(emit, "__code__", None)
            found.append((kernel.name, _file_hash(code.co_filename) if code is not None else ""))
    return tuple(found)


@lru_cache(maxsize=64)
def _file_hash(name: str) -> str:
    try:
        return hashlib.sha256(Path(name).read_bytes()).hexdigest()
    except OSError:  # typed in at a prompt
        return name


def kernel_names() -> tuple[str, ...]:
    """The names of all kernels, in the order of registration."""
    return tuple(_KERNELS)
