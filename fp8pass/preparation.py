"""prepare(model, target): extra copies of the weights in the layout that a target's kernels want.

Weights are graph inputs, which a compiler pass can neither fold nor cache; whatever copy a kernel
wants must be made before compiling, in the open, as buffers of the module whose memory is
reported. On a CPU that is a bf16 copy of each fp8 weight: no CPU multiplies fp8, and converting
the weight at each call costs more than the product itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fp8pass.errors import UnsupportedError
from fp8pass.fp8_linear import Fp8Linear
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
    """

    layers: int
    bytes: int
    target: str
    skipped: dict[str, str]
    message: str

    def __str__(self) -> str:
        return self.message


def prepare(
    model: nn.Module, target: Target | str | None = None, *, progress: bool | None = None
) -> PrepareReport:
    """Add to each ``Fp8Linear`` of ``model`` the copy of its weight that ``target`` wants.

    The copy is the buffer ``weight_prepared``, which is not in the state dict. It is packed again
    when a state dict is loaded, copied or unpickled, and dropped when the model leaves the CPU.
    Whoever writes to ``weight`` in another way calls ``prepare`` again, which packs what changed
    and leaves the rest.

    Args:
        model: a model after :func:`fp8pass.nn.quantize_`.
        target: a target or its name; None means the device that the model's weights are on.
        progress: show a bar: True, False, or None for "when stderr is a terminal".

    Raises:
        OptionError: unknown target.
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
    if not target.host:
        message = f"nothing added: the kernels of {target.spec} need no preparation"
        return PrepareReport(0, 0, target.spec, {}, message)

    layers = added = 0
    skipped: dict[str, str] = {}
    for name, linear in track(linears, "preparing", progress=progress):
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
    if skipped:
        message += f", {len(skipped)} left"
    return PrepareReport(layers, added, target.spec, skipped, message)


def unprepare(model: nn.Module) -> int:
    """Drop what :func:`prepare` added; the number of linears that had a copy."""
    return sum(m.unprepare_weight() for m in model.modules() if isinstance(m, Fp8Linear))


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
