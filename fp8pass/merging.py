"""Merging linears that read the same tensor (q/k/v, gate/up) into one product.

Their weights are laid into one buffer, of which each linear then reads its rows. Nothing is assumed
about who reads what: the pass merges the products only where the graph shows that they have the
same quantised input and neighbouring rows of the same buffer (lowerings/merge.py). Elsewhere the
linears go on as they were, each with its part of the buffer.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from fp8pass.errors import OptionError
from fp8pass.fp8_linear import Fp8Linear

#: Names of linears of one module that usually read the same tensor, in the order they are laid out.
USUAL_GROUPS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)


def merge_linears(
    model: nn.Module, groups: Iterable[Iterable[str]] = USUAL_GROUPS
) -> tuple[list[tuple[str, ...]], dict[str, str]]:
    """Lay the weights of sibling ``Fp8Linear`` into common buffers; called by ``fp8pass.prepare``.

    Args:
        model: a model after :func:`fp8pass.nn.quantize_`.
        groups: tuples of at least two attribute names of one module each.

    Returns:
        ``(the groups that were merged, each as dotted names; name of a linear -> why it was not)``.

    Raises:
        OptionError: a group that is not a tuple of at least two different names.
    """
    checked = [_checked(group) for group in groups]
    merged: list[tuple[str, ...]] = []
    left: dict[str, str] = {}
    owners = _owners(model)
    for prefix, parent in model.named_modules():
        for group in checked:
            members = [parent._modules.get(name) for name in group]
            if not all(isinstance(member, Fp8Linear) for member in members):
                continue
            names = tuple(f"{prefix}.{name}" if prefix else name for name in group)
            linears = [member for member in members if isinstance(member, Fp8Linear)]
            if all(linear.weight_merged is not None for linear in linears):
                continue
            why = _why_not(linears, owners)
            if why:
                left.update(dict.fromkeys(names, why))
                continue
            _merge(linears)
            merged.append(names)
    return merged, left


def _checked(group: Iterable[str]) -> tuple[str, ...]:
    names = () if isinstance(group, str) else tuple(group)
    if len(names) < 2 or len(set(names)) != len(names) or not all(type(n) is str for n in names):
        raise OptionError(
            f"merge_linears: {group!r} is not a tuple of at least two different names, such as "
            f"{USUAL_GROUPS[0]}"
        )
    return names


def _owners(model: nn.Module) -> dict[int, int]:
    """How many places of the model hold each FP8 linear."""
    count: dict[int, int] = {}
    for module in model.modules():
        for child in module._modules.values():
            if isinstance(child, Fp8Linear):
                count[id(child)] = count.get(id(child), 0) + 1
    return count


def _why_not(linears: list[Fp8Linear], owners: dict[int, int]) -> str | None:
    """Why these linears cannot share one buffer, or None."""
    first = linears[0]
    for linear in linears:
        if linear.weight_merged is not None:
            return "one of them is merged already"
        if owners[id(linear)] > 1:
            return "one of them is used in several places"
        if type(linear.weight) is not torch.Tensor or linear.weight.is_meta:
            return f"its weight is a {type(linear.weight).__name__} on {linear.weight.device}"
        same = (linear.in_features, linear.recipe, linear.weight.device) == (
            first.in_features,
            first.recipe,
            first.weight.device,
        )
        if not same:
            return "they differ in width, recipe or device"
        if (linear.bias is None) != (first.bias is None):
            return "only some have a bias"
        dtypes = {None if each.bias is None else each.bias.dtype for each in (linear, first)}
        if len(dtypes) > 1:
            return "their biases differ in dtype"
    return None


def _merge(linears: list[Fp8Linear]) -> None:
    with torch.inference_mode(False), torch.no_grad():
        # bytes: not every version of torch concatenates fp8
        codes = torch.cat([linear.weight.view(torch.uint8) for linear in linears])
        weights = codes.view(linears[0].weight.dtype)
        scales = torch.cat(
            [linear.weight_scale.expand(1, linear.out_features) for linear in linears], 1
        )
        biases = [linear.bias for linear in linears if linear.bias is not None]
        bias = torch.cat(biases) if biases else None
    start = 0
    for linear in linears:
        linear.merge_into(weights, scales, bias, start)
        start += linear.out_features
