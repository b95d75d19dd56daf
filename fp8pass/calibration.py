"""Calibration: the largest input of every linear, and which linears read the very same tensor.

A static recipe needs the range of each linear's input beforehand. :func:`calibrate` runs the model
that is not yet quantised on a few inputs, with hooks that record the largest magnitude. The hooks
also see when several linears are always handed the *same tensor* (q, k and v; gate and up): those
will share one scale tensor, so that the compiled graph itself shows that one quantise serves all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from fp8pass.errors import OptionError
from fp8pass.progress import track


@dataclass(frozen=True)
class Calibration:
    """What :func:`calibrate` saw; plain data, so it can be stored as JSON and built by hand.

    Attributes:
        amax: module name -> largest ``|input|`` over all calls. A linear that was never called
            with data is absent.
        groups: names of linears that were handed the same tensor at every call; each group has at
            least two names, and no name is in two groups.
    """

    amax: dict[str, float]
    groups: tuple[tuple[str, ...], ...] = field(default=())


#: Which tensor it was: its storage, and the part and the state of it that was read.
_TensorKey = tuple[StorageWeakRef, int, torch.Size, tuple[int, ...], torch.dtype, int | None]


class _Recorder:
    """Hooks' memory: running amax per linear, and the sequence of tensors each one was handed."""

    def __init__(self) -> None:
        self.amax: dict[str, torch.Tensor] = {}
        self.calls: dict[str, list[int]] = defaultdict(list)
        self._numbers: dict[_TensorKey, int] = {}
        self._next = 0

    def new_forward(self, *_: object) -> None:
        """Forget the tensors of the forward before; their numbers are never given out again."""
        self._numbers.clear()

    def record(self, name: str, x: torch.Tensor) -> None:
        """Note one call of the linear ``name`` with input ``x``."""
        self.calls[name].append(self._number(x))
        if x.numel() == 0:
            return
        # abs and amax are exact in any dtype. Kept on the device: no synchronisation per call.
        amax = x.detach().abs().amax().float()
        seen = self.amax.get(name)
        self.amax[name] = amax if seen is None else torch.maximum(seen, amax.to(seen.device))

    def _number(self, x: torch.Tensor) -> int:
        key = _tensor_key(x)
        number = self._next if key is None else self._numbers.setdefault(key, self._next)
        self._next += number == self._next
        return number

    def result(self) -> Calibration:
        """Read the maxima back, and group the linears whose sequences of tensors are equal."""
        amax = {name: value.item() for name, value in self.amax.items()}
        by_calls: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, numbers in self.calls.items():
            if name in amax:
                by_calls[tuple(numbers)].append(name)
        return Calibration(amax, tuple(tuple(names) for names in by_calls.values() if names[1:]))


def _tensor_key(x: torch.Tensor) -> _TensorKey | None:
    """The identity of ``x``'s content now, or None when it has none to speak of.

    The weak reference keeps no data alive (a forward's inputs can be gigabytes), yet while it
    exists the allocator cannot give the storage's identity to another storage, so that a tensor
    made later at the same address is not taken for this one.
    """
    try:
        storage = StorageWeakRef(x.untyped_storage())
    except (NotImplementedError, RuntimeError):  # a tensor subclass without storage
        return None
    # Inference tensors count no versions. Written in place between two reads, such a tensor would
    # be taken for the same; harmless, since the scale is then the maximum over both.
    version = None if x.is_inference() else x._version
    return storage, int(x.storage_offset()), x.shape, x.stride(), x.dtype, version


def calibrate(
    model: nn.Module,
    inputs: Iterable[Any] | Callable[[nn.Module], Any],
    *,
    progress: bool | None = None,
) -> Calibration:
    """Record the range of every ``nn.Linear``'s input while the model runs on ``inputs``.

    The model is run without gradients and in ``eval`` mode (its modes are put back afterwards),
    uncompiled even when it was wrapped by ``torch.compile``. Pass the result to
    ``quantize_(model, "static", calibration=...)``.

    Args:
        model: the model before :func:`~fp8pass.nn.quantize_`.
        inputs: batches, each a tensor (``model(x)``), a tuple or list (``model(*x)``) or a mapping
            (``model(**x)``); one bare tensor or mapping is one batch. Or a callable, which is
            called once with the model and runs it as it likes.
        progress: show a bar: True, False, or None for "when stderr is a terminal".

    Raises:
        OptionError: ``inputs`` is neither, or no linear was reached.
    """
    model = getattr(model, "_orig_mod", model)
    recorder = _Recorder()
    with _recording(model, recorder), _eval_mode(model), torch.no_grad():
        if isinstance(inputs, torch.Tensor | Mapping):
            _call(model, inputs)
        elif isinstance(inputs, Iterable):
            for batch in track(inputs, "calibrating", progress=progress):
                _call(model, batch)
        elif callable(inputs):
            inputs(model)
        else:
            raise OptionError(
                f"inputs is a {type(inputs).__name__}; allowed: an iterable of batches, or a "
                "callable that takes the model"
            )
    if not recorder.amax:
        raise OptionError(
            "calibration reached no nn.Linear: inputs is empty, or the model holds none (any more)"
        )
    return recorder.result()


def _call(model: nn.Module, batch: object) -> None:
    if isinstance(batch, torch.Tensor):
        model(batch)
    elif isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, tuple | list):
        model(*batch)
    else:
        raise OptionError(
            f"a calibration batch is a {type(batch).__name__}; allowed: Tensor, tuple, list, "
            "mapping"
        )


@contextmanager
def _recording(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Hooks on every linear of ``model``, and on the model itself for where a forward begins."""

    def hook_for(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            recorder.record(name, args[0] if args else kwargs["input"])

        return hook

    handles = [model.register_forward_pre_hook(recorder.new_forward)]
    try:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                hook = hook_for(name)
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """``model.eval()``, with each module's own mode put back: they need not all be the same."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
