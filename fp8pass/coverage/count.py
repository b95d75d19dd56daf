"""The denominators: what could be fused and lowered, counted while the model runs uncompiled.

Nothing of the reader is used. Forward hooks note what modules of norms and of activations return,
and which tensor each quantised linear is handed; a mode over torch's functions follows an
activation's result through the product with its second half, which is no module of its own.

A *fusible pair* is the output of a norm or an activation that is, through views, the input of a
quantised linear; linears that read one tensor with one scale are one pair, since one quantise
serves them. Norms of queries and keys feed attention and make no pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from fp8pass.coverage.recipes import QUANTISED

_ACTIVATIONS = frozenset({F.silu, F.gelu, F.relu, torch.relu, torch.Tensor.relu})
_PRODUCTS = frozenset({torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__})
_SQUARES = frozenset({torch.square, torch.Tensor.square})
_CASTS = frozenset({torch.Tensor.to, torch.Tensor.type_as, torch.Tensor.float})


@dataclass
class Pair:
    """One producer with the quantise of its result.

    Attributes:
        kind: ``norm`` or ``activation``.
        producer: path of the norm, or of the activation's module (or of the linear's parent).
        consumers: paths of the linears that read it with one scale.
        reason: why no kernel could make it one, although the linear reads the producer; "" else.
    """

    kind: str
    producer: str
    consumers: list[str] = field(default_factory=list)
    reason: str = ""


@dataclass
class Counted:
    """What one run of the model showed.

    Attributes:
        pairs: the fusible ones.
        not_fusible: those with a reason.
        gemms: path of the linear of every scaled product, in order.
    """

    pairs: list[Pair]
    not_fusible: list[Pair]
    gemms: list[str]


@dataclass
class _Made:
    """What a storage holds. The tensor is kept, so that its address is not given out again."""

    kind: str
    path: str
    value: torch.Tensor
    version: int


class _Follow(TorchFunctionMode):
    """Marks results of activations, and their products with one other tensor."""

    def __init__(self, made: dict[int, _Made]) -> None:
        super().__init__()
        self.made = made

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not isinstance(out, torch.Tensor):
            return out
        if func in _ACTIVATIONS:
            _note(self.made, "act", "", out)
        elif func in _PRODUCTS or func in _SQUARES or func in _CASTS:
            sources = [self._of(a) for a in args if isinstance(a, torch.Tensor)]
            kinds = {found.kind for found in sources if found is not None}
            known = self.made.get(_address(out))
            if known is not None and known.value is out:
                pass  # a cast that changed nothing
            elif func in _CASTS and len(kinds & {"act", "activation"}) == 1:
                _note(self.made, kinds.pop(), "", out)
            elif func not in _CASTS and "act" in kinds:
                _note(self.made, "activation", "", out)
        return out

    def _of(self, value: torch.Tensor) -> _Made | None:
        return _lookup(self.made, value)


def _address(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _note(made: dict[int, _Made], kind: str, path: str, value: torch.Tensor) -> None:
    made[_address(value)] = _Made(kind, path, value, value._version)


def _lookup(made: dict[int, _Made], value: torch.Tensor) -> _Made | None:
    """What made ``value``, if it holds all of that and nothing was written since."""
    found = made.get(_address(value))
    if found is None or found.value.numel() != value.numel() or found.version != value._version:
        return None
    return found


def count(model: nn.Module, inputs: tuple[Any, ...], granularity: str) -> Counted:
    """Run a quantised model once and count its pairs and scaled products.

    Args:
        model: with linears of :data:`~fp8pass.coverage.recipes.QUANTISED`; run without gradients.
        inputs: positional inputs.
        granularity: of the scale of the linears' inputs, see :class:`CoverageRecipe`.
    """
    made: dict[int, _Made] = {}
    found: dict[tuple[int, int], Pair] = {}
    gemms: list[str] = []
    handles = []

    def on_output(kind: str, path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, out: Any) -> None:
            if isinstance(out, torch.Tensor):
                _note(made, kind, path, out)

        return hook

    def on_input(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            gemms.append(path)
            source = _lookup(made, args[0])
            if source is None or granularity == "none":
                return
            kind = "norm" if source.kind == "norm" else "activation"
            key = (id(source), id(getattr(module, "input_scale", None)))
            pair = found.setdefault(key, Pair(kind, source.path or path.rpartition(".")[0]))
            pair.consumers.append(path)
            before, after = source.value.shape[-1], args[0].shape[-1]
            if granularity in ("token", "group") and before != after:
                pair.reason = (f"a view from rows of {before} to rows of {after} stands between "
                               f"it and the per-{granularity} quantise")  # fmt: skip

        return hook

    for path, module in model.named_modules():
        name = type(module).__name__
        if isinstance(module, QUANTISED):
            handles.append(module.register_forward_pre_hook(on_input(path)))
        elif "RMSNorm" in name or "LayerNorm" in name:
            handles.append(module.register_forward_hook(on_output("norm", path)))
        elif _is_activation(module):
            handles.append(module.register_forward_hook(on_output("act", path)))
    try:
        with torch.no_grad(), _Follow(made):
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    pairs = list(found.values())
    return Counted(
        [pair for pair in pairs if not pair.reason], [pair for pair in pairs if pair.reason], gemms
    )


def _is_activation(module: nn.Module) -> bool:
    home = type(module).__module__
    return home in ("torch.nn.modules.activation", "transformers.activations") and not list(
        module.children()
    )
