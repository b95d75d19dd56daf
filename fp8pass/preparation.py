"""prepare(model, target): extra copies of the weights in the layout that a target's kernels want.

Weights are graph inputs, which a compiler pass can neither fold nor cache; whatever copy a kernel
wants must be made before compiling, in the open, as buffers of the module whose memory is
reported. On a CPU that is a bf16 copy of each fp8 weight: no CPU multiplies fp8, and converting
the weight at each call costs more than the product itself. For gfx942, whose FP8 is e4m3fnuz, the
weights themselves are converted, with scales that keep every number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from fp8pass.errors import UnsupportedError
from fp8pass.fnuz import E4M3FN, E4M3FNUZ, convert_linear
from fp8pass.fp8_linear import Fp8Linear
from fp8pass.merging import USUAL_GROUPS
from fp8pass.merging import merge_linears as _merge
from fp8pass.progress import track
from fp8pass.target import HOST, UNKNOWN, Target


@dataclass(frozen=True)
class PrepareReport:
    """What :func:`prepare` did.

    Attributes:
        layers: number of linears that got a copy by this call.
        bytes: memory of these copies, on top of the fp8 weights.
        target: the target's name.
        skipped: name of each FP8 linear that got none, and why.
        message: one line for people.
        merged: names of the linears that were merged, group by group.
        converted: number of linears whose codes were converted to the target's FP8.
    """

    layers: int
    bytes: int
    target: str
    skipped: dict[str, str]
    message: str
    merged: tuple[tuple[str, ...], ...] = ()
    converted: int = 0

    def __str__(self) -> str:
        return self.message


def prepare(
    model: nn.Module,
    target: Target | str | None = None,
    *,
    merge_linears: bool | Iterable[Iterable[str]] = False,
    shuffle: bool = False,
    progress: bool | None = None,
) -> PrepareReport:
    """Add to each ``Fp8Linear`` of ``model`` the copy of its weight that ``target`` wants.

    The copy is the buffer ``weight_prepared``, which is not in the state dict. It is packed again
    when a state dict is loaded, copied or unpickled, and dropped when the model leaves the CPU.
    Whoever writes to ``weight`` in another way calls ``prepare`` again, which packs what changed
    and leaves the rest.

    With ``merge_linears`` q/k/v and gate/up projections also become one product each: their weights
    are laid into one buffer (no more memory; the merged ones get no copy of their own), and the
    pass makes one product of those that turn out to read the same quantised tensor. A result may
    differ from the unmerged one only as two kernels do. Loading a state dict, converting or moving
    the model undoes it; call ``prepare`` again then.

    For a target whose FP8 is e4m3fnuz (gfx942) the weights are converted to it and their scales,
    static input scales included, doubled; inputs are quantised to it from then on. Every number
    stays what it was (see :mod:`fp8pass.fnuz`), at no cost of memory. A state dict in e4m3fn is
    converted when it is loaded; one that is saved afterwards holds e4m3fnuz. Preparing for another
    target, and :func:`unprepare`, convert back.

    Args:
        model: a model after :func:`fp8pass.nn.quantize_`.
        target: a target or its name; None means the device that the model's weights are on.
        merge_linears: False, True for the usual names (:data:`fp8pass.merging.USUAL_GROUPS`), or
            groups of attribute names of one module, such as ``[("wq", "wk", "wv")]``.
        shuffle: for gfx942 and gfx950 with AITER, of the dynamic recipe: also add a copy of each
            weight in tiles (1 more byte per weight) for the product that ``numerics="fast"`` may
            then use.
        progress: show a bar: True, False, or None for "when stderr is a terminal".

    Raises:
        OptionError: unknown target, or a group that is not one.
        UnsupportedError: ``target`` is None and the model holds no ``Fp8Linear``.
    """
    model = getattr(model, "_orig_mod", model)
    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, Fp8Linear)]
    if target is None:
        if not linears:
            raise UnsupportedError(
                "the model holds no Fp8Linear to take the target from; call quantize_ first, or "
                "name the target"
            )
        target = Target.detect(linears[0][1].weight.device)
    elif isinstance(target, str):
        target = Target.parse(target)
    converted, left = _converted(linears, target)
    groups: list[tuple[str, ...]] = []
    skipped: dict[str, str] = {}
    if merge_linears is not False:
        wanted = USUAL_GROUPS if merge_linears is True else merge_linears
        groups, skipped = _merge(model, wanted)
    skipped |= left
    told = f"{sum(map(len, groups))} linears merged into {len(groups)}" if groups else ""
    if converted:
        text = f"{converted} linears converted to {linears[0][1].weight.dtype}"
        told = f"{text}; {told}" if told else text
    tiles = shuffle and target.has_library("aiter") and target.arch in ("gfx942", "gfx950")
    if not target.host and not tiles:
        message = told or f"nothing added: {_nothing_to_prepare(target)}"
        return PrepareReport(0, 0, target.spec, skipped, message, tuple(groups), converted)

    layers = added = 0
    for name, linear in track(linears, "preparing", progress=progress):
        if linear.weight_merged is not None:
            continue  # it shares the weights of others, and has no copy of its own
        reason = _tiles_reason(linear) if tiles else _reason(linear)
        if reason is None:
            size = linear.prepare_weight(tiles)
            if size:
                layers += 1
                added += size
                continue
            reason = "already prepared"
        skipped[name] = reason
    message = f"{layers} linears prepared for {target.spec}, {added / 2**20:.1f} MiB added"
    if told:
        message = f"{told}; {message}"
    if skipped:
        message += f", {len(skipped)} left"
    return PrepareReport(layers, added, target.spec, skipped, message, tuple(groups), converted)


def unprepare(model: nn.Module) -> int:
    """Undo :func:`prepare`; the number of linears that had a copy, were merged or converted."""
    linears = [m for m in model.modules() if isinstance(m, Fp8Linear)]
    return sum([m.unprepare_weight() | m.unmerge() | convert_linear(m, E4M3FN) for m in linears])


def _converted(linears: list[tuple[str, Fp8Linear]], target: Target) -> tuple[int, dict[str, str]]:
    """Give every linear codes that the target multiplies; ``(how many, name -> why not)``."""
    dtype = E4M3FNUZ if target.fp8_dtype == E4M3FNUZ else E4M3FN
    done, left = 0, {}
    for name, linear in linears:
        if linear.weight.dtype == dtype:
            continue
        if type(linear.weight) is not torch.Tensor or linear.weight.is_meta:
            left[name] = f"its weight is a {type(linear.weight).__name__} without values"
            continue
        done += convert_linear(linear, dtype)
    return done, left


def _nothing_to_prepare(target: Target) -> str:
    """Why a target that is not the host gets no copies."""
    from fp8pass.lowerings import kernels

    if target.kind == UNKNOWN:
        return f"fp8pass does not know {target.arch}, and has no kernel for it"
    if any(target.kind in kernel.kinds and kernel.requirements(target) for kernel in kernels()):
        return f"the kernels of {target.spec} need no preparation"
    return f"fp8pass has no kernel for {target.spec}"


def _tiles_reason(linear: Fp8Linear) -> str | None:
    """Why this linear gets no copy in tiles, or None."""
    weight = linear.weight
    if type(weight) is not torch.Tensor or weight.is_meta:
        return f"its weight is a {type(weight).__name__} without values"
    if linear.recipe != "dynamic" or linear.bias is not None:
        return "the product in tiles is for the dynamic recipe without a bias"
    n, k = weight.shape
    if not n or not k or n % 16 or k % 32:
        return f"its weight is {n} x {k}, not in tiles of 16 x 32"
    return None


def _reason(linear: Fp8Linear) -> str | None:
    """Why this linear gets no copy, or None."""
    weight = linear.weight
    if type(weight) is not torch.Tensor:
        return f"its weight is a {type(weight).__name__}, not a plain tensor"
    if weight.device.type != HOST:
        return f"its weight is on {weight.device}, the target is a CPU"
    if weight.numel() == 0:
        return f"its weight is empty, {tuple(weight.shape)}"
    return None
