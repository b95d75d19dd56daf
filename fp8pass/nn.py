"""FP8 linears for a model: ``quantize_(model, recipe)`` puts an ``Fp8Linear`` for each linear.

Everything a user needs for that is reachable from here: the recipes, the linear, calibration.
"""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from fp8pass.calibration import Calibration, calibrate
from fp8pass.errors import Fp8PassError, OptionError, UnsupportedError, choices
from fp8pass.fp8_linear import (
    FP8_MAX,
    RECIPES,
    SCALE_FLOOR,
    Fp8Linear,
    Recipe,
    SharedScale,
    weight_reason,
)
from fp8pass.progress import track
from fp8pass.target import Target

__all__ = [
    "RECIPES",
    "Calibration",
    "Fp8Linear",
    "QuantizeSummary",
    "Recipe",
    "calibrate",
    "quantize_",
]


@dataclass(frozen=True)
class QuantizeSummary:
    """What :func:`quantize_` did.

    Attributes:
        layers: number of linears replaced.
        bytes_before, bytes_after: of all parameters and buffers of the model.
        skipped: name of each linear that was left, and why.
        why: for recipe "auto", why this one.
    """

    recipe: str
    layers: int
    bytes_before: int
    bytes_after: int
    skipped: dict[str, str]
    why: str = ""

    def __str__(self) -> str:
        mib = [f"{n / 2**20:.1f} MiB" for n in (self.bytes_before, self.bytes_after)]
        lines = [f"{self.layers} linears quantised ({self.recipe}), {mib[0]} -> {mib[1]}"]
        lines += [f"  {self.recipe} because {self.why}"] if self.why else []
        return "\n".join(lines + [f"  left {name}: {why}" for name, why in self.skipped.items()])


@dataclass
class _Place:
    """One module of the model, under all its names and in all its parents."""

    module: nn.Module
    names: list[str]
    parents: list[tuple[nn.Module, str]]


def quantize_(
    model: nn.Module,
    recipe: str | Recipe,
    *,
    skip: Iterable[str] | str = ("lm_head",),
    calibration: Calibration | None = None,
    linear_types: tuple[type[nn.Linear], ...] = (nn.Linear,),
    progress: bool | None = None,
    target: Target | str | None = None,
    workload: str | None = None,
) -> QuantizeSummary:
    """Replace the linears of ``model`` by :class:`Fp8Linear`, in place.

    Left alone, each with its reason in the summary: what ``skip`` names; weights tied to another
    parameter; subclasses of ``nn.Linear``; linears with hooks or with an overridden ``forward``,
    which would be lost; empty, meta or non-finite weights; for the static recipe what calibration
    did not reach. A second call changes nothing.

    Args:
        model: any module that contains linears; not itself a linear.
        recipe: ``"static"``, ``"dynamic"`` or ``"dynamic_tensor"``; ``"auto"``: the one that
            :func:`fp8pass.advice.advise` names for the model's linears, ``static`` only if there is
            a calibration. The summary says why.
        skip: names or ``fnmatch`` patterns, compared with a linear's dotted name and with the last
            component of it.
        calibration: result of :func:`calibrate`; for the static recipe, and only for it.
        linear_types: exact types that are replaced.
        progress: show a bar: True, False, or None for "when stderr is a terminal".
        target: for ``"auto"``, the device that the model will run on; None = the one it is on.
        workload: for ``"auto"``, such as ``"decode"`` or ``"decode:32x256+512"``; None = mixed.

    Raises:
        OptionError: unknown recipe or workload; ``target`` or ``workload`` beside another recipe
            than ``"auto"``; ``calibration`` missing, superfluous or of another type.
        UnsupportedError: ``model`` is itself a linear, which cannot be replaced in place.
    """
    model = getattr(model, "_orig_mod", model)
    why = ""
    if recipe == "auto":
        recipe, why = _advised(model, calibration is not None, target, workload)
        if recipe != "static":
            calibration = None
    elif not isinstance(recipe, Recipe) and recipe not in tuple(RECIPES):
        raise OptionError(f"unknown recipe {recipe!r}; allowed: {choices((*RECIPES, 'auto'))}")
    elif target is not None or workload is not None:
        raise OptionError("target and workload are for recipe 'auto'")
    found = Recipe.get(recipe)
    if isinstance(model, nn.Linear | Fp8Linear):
        raise UnsupportedError("the model is a linear itself; use Fp8Linear.from_linear")
    if found.act.scale.static and not isinstance(calibration, Calibration):
        raise OptionError(
            f"recipe {found.name!r} needs calibration=fp8pass.nn.calibrate(model, inputs); got "
            f"{type(calibration).__name__}"
        )
    if not found.act.scale.static and calibration is not None:
        raise OptionError(f"recipe {found.name!r} takes no calibration; allowed: 'static'")
    patterns = (skip,) if isinstance(skip, str) else tuple(skip)

    before = _model_bytes(model)
    skipped: dict[str, str] = {}
    todo: list[tuple[_Place, float | None]] = []
    users = _parameter_users(model)
    for place in _linear_places(model):
        reason = _place_reason(place, patterns, linear_types, users)
        scale = None
        if reason is None and calibration is not None:
            scale, reason = _calibrated_scale(calibration, place.names)
        if reason is None:
            todo.append((place, scale))
        else:
            skipped[place.names[0]] = reason
    groups = calibration.groups if calibration is not None else ()
    holders = {
        name: holder
        for holder, names in ((SharedScale(), group) for group in groups)
        for name in names
    }

    layers = 0
    todo.reverse()
    for _ in track(range(len(todo)), f"quantising ({found.name})", progress=progress):
        place, scale = todo.pop()  # popped: each float weight is freed as soon as it is replaced
        try:
            new = Fp8Linear.from_linear(place.module, found, scale)  # type: ignore[arg-type]
        except Fp8PassError as error:
            skipped[place.names[0]] = str(error)
            continue
        holder = next((holders[name] for name in place.names if name in holders), None)
        if holder is not None:
            new.share_input_scale(holder)
        for parent, attribute in place.parents:
            setattr(parent, attribute, new)
        layers += 1
    return QuantizeSummary(found.name, layers, before, _model_bytes(model), skipped, why)


def _advised(
    model: nn.Module, calibrated: bool, target: Target | str | None, workload: str | None
) -> tuple[str, str]:
    """The recipe for the linears of a model, and why."""
    from fp8pass.advice import Workload, advise
    from fp8pass.options import Options

    linears = [m for m in model.modules() if isinstance(m, nn.Linear | Fp8Linear)]
    load = Workload.parse(workload or "mixed")
    named = target.spec if isinstance(target, Target) else target
    if named is not None:
        made = Target.parse(named)
    else:
        made = Target.detect(linears[0].weight.device if linears else None)
    shapes = [(m.weight.shape[0], m.weight.shape[1]) for m in linears if m.weight.numel()]
    options = Options.resolve(target=named)
    found = advise(made, shapes or [(1, 1)], load, options, calibrated=calibrated)
    return found.recipe, f"{found.basis}: {found.why}"


def _linear_places(model: nn.Module) -> list[_Place]:
    """Every linear of the model, float or FP8, once each, in the order of its first name."""
    places: dict[int, _Place] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear | Fp8Linear):
            place = places.setdefault(id(module), _Place(module, [], []))
            prefix, _, attribute = name.rpartition(".")
            parent = model.get_submodule(prefix)
            place.names.append(name)
            if not any(p is parent and a == attribute for p, a in place.parents):
                place.parents.append((parent, attribute))
    return list(places.values())


def _parameter_users(model: nn.Module) -> Counter[int]:
    """How many (module, attribute) pairs hold each parameter; a module counts once."""
    return Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )


def _place_reason(
    place: _Place,
    patterns: tuple[str, ...],
    linear_types: tuple[type[nn.Linear], ...],
    users: Counter[int],
) -> str | None:
    """Why a linear is left alone, or None; without looking at the values of its weight."""
    linear = place.module
    if isinstance(linear, Fp8Linear):
        return f"already FP8 (recipe {linear.recipe!r})"
    for name in place.names:
        for pattern in patterns:
            last = name.rpartition(".")[2]
            if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(last, pattern):
                return f"named by skip ({pattern!r})"
    assert isinstance(linear, nn.Linear)
    if type(linear) not in linear_types:
        return f"it is a {type(linear).__name__}, not one of linear_types"
    if any(users[id(p)] > 1 for p in (linear.weight, linear.bias) if p is not None):
        return "its parameter is tied to another one"
    if linear._forward_hooks or linear._forward_pre_hooks or "forward" in linear.__dict__:
        return "it has forward hooks or an overridden forward, which would be lost"
    if any(isinstance(parent, nn.TransformerEncoderLayer) for parent, _ in place.parents):
        return "nn.TransformerEncoderLayer hands its weight to a kernel of its own"
    return weight_reason(linear)


def _calibrated_scale(
    calibration: Calibration, names: list[str]
) -> tuple[float | None, str | None]:
    """(dequant scale of the input, None), or (None, why there is none)."""
    amax = [calibration.amax[name] for name in names if name in calibration.amax]
    if not amax:
        return None, "not calibrated"
    if not all(map(math.isfinite, amax)):
        return None, "calibration saw inputs that are not finite"
    if max(amax) <= 0:
        return None, "calibration saw nothing but zeros"
    return max(max(amax) / FP8_MAX, SCALE_FLOOR), None


def _model_bytes(model: nn.Module) -> int:
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())
