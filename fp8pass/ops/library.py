"""The operator library ``fp8pass::`` and the record that describes one operator.

``Library.define``, not ``torch.library.custom_op``: the latter costs four times the overhead of a
call. Each operator has a reference (its semantics), a fake with exact strides, an input generator
and a tolerance with its reason; tests and benchmarks are written against that record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

#: FRAGMENT, so that a second library of the same namespace (a test, a plugin) can add operators.
LIBRARY = torch.library.Library("fp8pass", "FRAGMENT")


@dataclass(frozen=True, slots=True)
class OpSpec:
    """One operator.

    Attributes:
        name: name in the namespace ``fp8pass``.
        schema: its arguments and results, without the name.
        reference: the semantics, in torch.
        fake: result tensors without data, from inputs without data.
        inputs: ``inputs(generator) -> iterator of argument tuples``, random and edge cases.
        tolerance: largest allowed fraction of codes that differ by one step from the reference,
            for an implementation that may only change the order of a reduction.
        tolerance_reason: why that number.
        kind: for an operator that stands for something read: ``norm``, ``activation``, ``quantize``
            or ``scaled_mm``, as reports say it; else empty.
        what: the word for it in messages.
    """

    name: str
    schema: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    inputs: Callable[[torch.Generator], Iterator[tuple[Any, ...]]]
    tolerance: float
    tolerance_reason: str
    kind: str = ""
    what: str = ""

    @property
    def op(self) -> torch._ops.OpOverload:
        """The registered overload ``torch.ops.fp8pass.<name>.default``."""
        overload = getattr(torch.ops.fp8pass, self.name).default
        assert isinstance(overload, torch._ops.OpOverload)
        return overload

    @property
    def results(self) -> tuple[str, ...]:
        """Short names of its results: ``q`` and ``scale``, ``y``, ``total``, ``out``."""
        only = "out" if self.kind == "scaled_mm" else "y"
        names = (r.name or only for r in self.op._schema.returns)
        return tuple(name.removesuffix("_out") for name in names)


SPECS: dict[str, OpSpec] = {}


def generic() -> dict[Any, OpSpec]:
    """The operators that stand for something read, by overload."""
    return {spec.op: spec for spec in SPECS.values() if spec.kind}


def register(spec: OpSpec) -> OpSpec:
    """Define the operator with its reference for every device.

    Registered under CompositeExplicitAutograd: no gradient formula, because fp8pass rewrites
    inference graphs only; torch warns about a backward through one. What a kernel computes instead,
    on its own kind of device, is registered in :mod:`fp8pass.kernels.operators`.
    """
    LIBRARY.define(f"{spec.name}{spec.schema}", tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(spec.name, spec.reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp8pass::{spec.name}", spec.fake, lib=LIBRARY)
    SPECS[spec.name] = spec
    return spec


def contiguous_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor of the shape of ``x``: what each operator returns."""
    return x.new_empty(x.shape, dtype=dtype)


def nothing(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The empty tensor that stands for an output that was not asked for."""
    return x.new_empty((0,), dtype=dtype)
