"""SharedScale: keeps one input scale one tensor, in all the linears that have it."""

from __future__ import annotations

import torch


class SharedScale:
    """Held by all linears that share one input scale, to bring them together again.

    ``Module._apply`` and ``load_state_dict`` treat every module by itself, so that q, k and v would
    end with three equal tensors. Each module hands its new tensor in here; the first one is kept,
    and the others take it over where it is the same value on the same device.
    """

    def __init__(self) -> None:
        self._tensor: torch.Tensor | None = None
        self._made_from: torch.Tensor | None = None

    def shared(self, scale: torch.Tensor, made_from: torch.Tensor | None = None) -> torch.Tensor:
        """``scale``, or the tensor that another linear already holds in its place.

        ``made_from`` is the tensor that a conversion made ``scale`` from; it decides where there
        are no values to compare, as on the meta device.
        """
        held = self._tensor
        if held is not None and held.device == scale.device and type(held) is type(scale):
            if scale.is_meta or type(scale) is not torch.Tensor:
                same = made_from is not None and made_from is self._made_from
            else:
                same = torch.equal(held, scale)
            if same:
                return held
        self._tensor, self._made_from = scale, made_from
        return scale
