"""prepare(model, target): extra copies of the weights in the layout that a target's kernels want.

Weights are graph inputs, which a compiler pass can neither fold nor cache; whatever copy a kernel
wants must be made before compiling, in the open, as buffers of the module whose memory is
reported. On a CPU that is a bf16 copy of each fp8 weight: no CPU multiplies fp8, and converting
the weight at each call costs more than the product itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from fp8pass.errors import UnsupportedError
from fp8pass.fp8_linear import Fp8Linear
from fp8pass.merging import USUAL_GROUPS
from fp8pass.merging import merge_linears as _merge
from fp8pass.progress import track
from fp8pass.target import HOST, Target


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
    """

    layers: int
    bytes: int
    target: str
    skipped: dict[str, str]
    message: str
    merged: tuple[tuple[str, ...], ...] = ()

    def __str__(self) -> str:
        return self.message


def prepare(
    model: nn.Module,
    target: Target | str | None = None,
    *,
    merge_linears: bool | Iterable[Iterable[str]] = False,
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

    Args:
        model: a model after :func:`fp8pass.nn.quantize_`.
        target: a target or its name; None means the device that the model's weights are on.
        merge_linears: False, True for the usual names (:data:`fp8pass.merging.USUAL_GROUPS`), or
            groups of attribute names of one module, such as ``[("wq", "wk", "wv")]``.
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
    groups: list[tuple[str, ...]] = []
    skipped: dict[str, str] = {}
    if merge_linears is not False:
        wanted = USUAL_GROUPS if merge_linears is True else merge_linears
        groups, skipped = _merge(model, wanted)
    told = f"{sum(map(len, groups))} linears merged into {len(groups)}" if groups else ""
    if not target.host:
        message = told or f"nothing added: the kernels of {target.spec} need no preparation"
        return PrepareReport(0, 0, target.spec, skipped, message, tuple(groups))

    layers = added = 0
    for name, linear in track(linears, "preparing", progress=progress):
        if linear.weight_merged is not None:
            continue  # it shares the weights of others, and has no copy of its own
        reason = _reason(linear)
        if reason is None:
            size = linear.prepare_weight()
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
    return PrepareReport(layers, added, target.spec, skipped, message, tuple(groups))


def unprepare(model: nn.Module) -> int:
    """Drop what :func:`prepare` added; the number of linears that had a copy or were merged."""
    linears = [m for m in model.modules() if isinstance(m, Fp8Linear)]
    return sum([m.unprepare_weight() | m.unmerge() for m in linears])


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
