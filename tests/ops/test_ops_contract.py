"""Every operator: schema, fake, reference, no aliasing - over the inputs of its own record."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from graphs import assert_same_bits, bits, fake, fake_mode
from torch.utils._pytree import tree_leaves, tree_map_only

from fp8pass.ops import SPECS, OpSpec

Args = tuple[Any, ...]


def inputs(spec: OpSpec) -> list[Args]:
    return list(spec.inputs(torch.Generator().manual_seed(0)))


def results(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def layout(value: torch.Tensor) -> tuple[Any, ...]:
    return (
        value.dtype,
        tuple(value.shape),
        value.stride(),
        value.device.type,
        value.storage_offset(),
    )


def row_positions(args: Args) -> list[int]:
    """Positions of the tensors whose first dim is the rows."""
    if args[0].dtype.itemsize == 1:  # a product: its operand b and that scale have none
        tensors = [i for i in (0, 2, 6, 11) if i < len(args) and isinstance(args[i], torch.Tensor)]
        return [i for i in tensors if args[i].dim() == 2 and args[i].shape[0] == args[0].shape[0]]
    if isinstance(args[1], torch.Tensor) and args[1].dtype.itemsize == 1:  # a weight-only product
        return [0]
    return [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.dim() > 1]


def with_rows(args: Args, rows: int) -> Args:
    """The same arguments with fewer rows; those with fewer already are left as they are."""
    cut = row_positions(args) if args[0].shape[0] >= rows else []
    return tuple(a.narrow(0, 0, rows) if i in cut else a for i, a in enumerate(args))


def strided(args: Args) -> Args:
    """The same values, each tensor of rank 2 and more inside a larger buffer."""

    def spread(value: torch.Tensor) -> torch.Tensor:
        if value.dim() < 2 or not value.is_contiguous() or value.numel() < 2:
            return value
        buffer = value.new_zeros((*value.shape[:-1], value.shape[-1] + 5))
        buffer[..., 2:-3] = value
        return buffer[..., 2:-3]

    return tree_map_only(torch.Tensor, spread, args)


def permuted(args: Args) -> Args:
    """The same values, those of rank 3 stored with their first two dims swapped."""

    def swap(value: torch.Tensor) -> torch.Tensor:
        return value if value.dim() != 3 else value.transpose(0, 1).contiguous().transpose(0, 1)

    return tree_map_only(torch.Tensor, swap, args)


VARIANTS = {
    "as_given": lambda args: args,
    "strided": strided,
    "permuted": permuted,
    "one_row": lambda args: with_rows(args, 1),
    "one_strided_row": lambda args: with_rows(strided(args), 1),
    "no_rows": lambda args: with_rows(args, 0),
}


def defined(spec: OpSpec, args: Args) -> bool:
    """A per-tensor maximum of nothing is not defined (aten raises as well)."""
    empty = any(isinstance(a, torch.Tensor) and a.numel() == 0 and a.dim() > 1 for a in args)
    dynamic_tensor = any(
        isinstance(a, str) and re.search(",tensor,float32,(div|inverse),", a) for a in args
    )
    return not (empty and dynamic_tensor)


def cases(spec: OpSpec, variant: str) -> list[Args]:
    made = [VARIANTS[variant](args) for args in inputs(spec)]
    return [args for args in made if defined(spec, args)]


BOTH = [(name, variant) for name in SPECS for variant in VARIANTS]


@pytest.mark.parametrize("name", SPECS)
def test_opcheck(name: str) -> None:
    spec = SPECS[name]
    sample = inputs(spec)
    step = max(1, len(sample) // 5)
    # torch's own check for mutation cannot compare fp8 tensors; a test below does it for them
    base = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for args in [*sample[::step], *cases(spec, "strided")[1::step][:2]]:
        codes = any(isinstance(a, torch.Tensor) and "float8" in str(a.dtype) for a in args)
        tests: Any = base if codes else ("test_schema", *base)
        torch.library.opcheck(spec.op, args, test_utils=tests)


@pytest.mark.parametrize(("name", "variant"), BOTH)
def test_fake_is_like_the_real_one(name: str, variant: str) -> None:
    spec = SPECS[name]
    made = cases(spec, variant)
    assert made
    for args in made:
        real = results(spec.op(*args))
        reference = results(spec.reference(*args))
        mode = fake_mode()
        pretended = tree_map_only(torch.Tensor, lambda t, m=mode: fake(m, t), args)
        with mode:
            faked = results(spec.op(*pretended))
        for a, b, c in zip(faked, real, reference, strict=True):
            assert layout(a) == layout(b) == layout(c), [str(x) for x in args if isinstance(x, str)]


@pytest.mark.parametrize("name", SPECS)
def test_fake_with_a_symbolic_batch(name: str) -> None:
    """No guard on the number of rows, and the fake shape is right for any of them."""
    spec = SPECS[name]
    for args in inputs(spec):
        rows = args[0].shape[0] if args[0].dim() > 1 else 0
        if rows < 2:
            continue
        mode = fake_mode()

        symbolic = row_positions(args)
        pretended = [
            fake(mode, a, i in symbolic) if isinstance(a, torch.Tensor) else a
            for i, a in enumerate(args)
        ]
        with mode:
            faked = results(spec.op(*pretended))
        assert mode.shape_env is not None and not mode.shape_env.guards
        for a, b in zip(faked, results(spec.op(*args)), strict=True):
            assert a.dtype == b.dtype and a.dim() == b.dim()
            for symbol, number in zip(a.shape, b.shape, strict=True):
                concrete = symbol if isinstance(symbol, int) else symbol.node.hint
                assert concrete == number
            if b.dim() > 1 and b.shape[0] == rows:
                assert not isinstance(a.shape[0], int)


@pytest.mark.parametrize(("name", "variant"), BOTH)
def test_inputs_are_neither_changed_nor_returned(name: str, variant: str) -> None:
    spec = SPECS[name]
    for args in cases(spec, variant):
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        before = [t.clone() for t in tensors]
        made = results(spec.op(*args))
        assert_same_bits(tensors, before)
        storages = [t.untyped_storage().data_ptr() for t in tensors if t.numel()]
        for result in made:
            if result.numel():
                assert result.untyped_storage().data_ptr() not in storages
        for a, b in itertools.combinations([r for r in made if r.numel()], 2):
            assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()


@pytest.mark.parametrize("variant", ["strided", "permuted"])
@pytest.mark.parametrize("name", [n for n in SPECS if "scaled_mm" not in n])
def test_values_do_not_depend_on_strides(name: str, variant: str) -> None:
    spec = SPECS[name]
    for args, other in zip(inputs(spec), map(VARIANTS[variant], inputs(spec)), strict=True):
        for a, b in zip(results(spec.op(*args)), results(spec.op(*other)), strict=True):
            if a.dtype.itemsize == 1:
                differ = (bits(a) != bits(b)).float().mean() if a.numel() else 0.0
                assert differ <= 1e-3  # the order of a reduction may follow the strides
            else:
                torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("name", SPECS)
def test_record(name: str) -> None:
    spec = SPECS[name]
    assert spec.tolerance_reason and 0 <= spec.tolerance <= 1e-3
    assert spec.reference.__doc__ or name == "cpu_scaled_mm"
    assert not spec.op._schema.is_mutable
    assert "out" not in [a.name for a in spec.op._schema.arguments]
    assert all(leaf is None or leaf is not Ellipsis for leaf in tree_leaves(inputs(spec)[0]))


@pytest.mark.parametrize("name", SPECS)
def test_backward_warns(name: str) -> None:
    """There is no gradient formula, and torch says so."""
    spec = SPECS[name]
    args = next(a for a in inputs(spec) if any(_wants_grad(t) for t in a) and a[0].numel() > 0)
    armed = tuple(t.clone().requires_grad_() if _wants_grad(t) else t for t in args)
    made = next(r for r in results(spec.op(*armed)) if r.is_floating_point() and r.numel())
    with pytest.warns(UserWarning, match="an autograd kernel was not registered"):
        made.float().sum().backward()


def _wants_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
    )
