"""Which sites an option is about: ``"down_proj=torch_row, fp8-block:*.mlp.*=triton_general"``.

The options force, prefer, disable and linear_backend are lists of items. An item is a name, which
counts for every site, or ``SITES=name``, where ``SITES`` is

- a scheme, one of :data:`SCHEMES`: how the operands are quantised;
- a pattern of the module's path, with the wildcards of a shell: ``down_proj`` matches the last part
  of ``model.layers.3.mlp.down_proj``, ``layers.0.*`` everything in one layer. A pattern that starts
  anywhere but at the root need not say so;
- both, ``scheme:pattern``.

Of the items of ``force`` and ``linear_backend`` the first that is about a site counts; of
``prefer`` and ``disable`` all of them, in their order. A mapping ``{SITES: name}`` or
``{SITES: [names]}`` is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fp8pass.errors import OptionError, choices

if TYPE_CHECKING:
    from fp8pass.problem import ScaledMMProblem
    from fp8pass.quant_key import QuantKey

#: How the operands of a product are quantised, for the options; a site may have several.
SCHEMES = {
    "fp8": "any fp8 product",
    "fp8-tensor": "one scale for each operand",
    "fp8-token": "a scale per token with one per channel",
    "fp8-mixed": "one scale for one operand, one per token or channel for the other",
    "fp8-block": "a scale per group of 64, 128, ... values, of either operand",
    "w8a16": "fp8 weights, activations that are not quantised",
    "int8": "any int8 product",
    "int8-azp": "int8 with a zero point of the activations",
}
_EVERYWHERE = "*"


@dataclass(frozen=True, slots=True)
class Item:
    """One item: a name, and which sites it is about.

    Attributes:
        name: what is asked for.
        scheme: one of :data:`SCHEMES`, or ``""`` for all.
        pattern: of the module's path; ``"*"`` for all.
    """

    name: str
    scheme: str = ""
    pattern: str = _EVERYWHERE

    @property
    def everywhere(self) -> bool:
        """Whether the item is about every site."""
        return not self.scheme and self.pattern == _EVERYWHERE

    def about(self, schemes: frozenset[str], path: str) -> bool:
        """Whether the item is about a site of these schemes in the module of this path."""
        if self.scheme and self.scheme not in schemes:
            return False
        pattern = self.pattern
        return (
            pattern == _EVERYWHERE
            or fnmatchcase(path, pattern)
            or fnmatchcase(path, f"*.{pattern}")
        )

    def __str__(self) -> str:
        if self.everywhere:
            return self.name
        pattern = "" if self.pattern == _EVERYWHERE else self.pattern
        sites = f"{self.scheme}:{pattern}" if self.scheme and pattern else self.scheme or pattern
        return f"{sites}={self.name}"


@lru_cache(maxsize=1024)
def parse_item(text: str) -> Item:
    """The item of a text.

    Raises:
        OptionError: an empty name, an empty pattern, or a scheme that is not known.
    """
    sites, equals, name = text.rpartition("=")
    sites, name = sites.strip(), name.strip()
    if not name or (equals and not sites):
        raise OptionError(f"{text!r} is neither a name nor SITES=name")
    if not sites:
        return Item(name)
    scheme, colon, pattern = sites.partition(":")
    if colon:
        if scheme not in SCHEMES:
            raise OptionError(f"{text!r}: unknown scheme {scheme!r}; allowed: {choices(SCHEMES)}")
        if not pattern:
            raise OptionError(f"{text!r} has no pattern behind {scheme + ':'!r}")
        return Item(name, scheme, pattern)
    if sites in SCHEMES:
        return Item(name, sites)
    return Item(name, "", sites)


def items_of(value: Any) -> tuple[str, ...]:
    """An option's value as the texts of its items: from a text with commas, names or a mapping.

    Raises:
        TypeError: neither of these.
        OptionError: an item that is not understood.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        texts: Iterable[Any] = value.split(",")
    elif isinstance(value, Mapping):
        texts = [
            f"{sites}={name}"
            for sites, names in value.items()
            for name in ([names] if isinstance(names, str) else names)
        ]
    else:
        texts = value
    cleaned = [str(text).strip() for text in texts]
    return tuple(str(parse_item(text)) for text in cleaned if text)


def names_at(items: tuple[str, ...], schemes: frozenset[str], path: str) -> tuple[str, ...]:
    """The names of the items that are about a site, each once, in their order."""
    if not items:
        return ()
    found = [item.name for item in map(parse_item, items) if item.about(schemes, path)]
    return tuple(dict.fromkeys(found))


def first_at(items: tuple[str, ...], schemes: frozenset[str], path: str) -> str | None:
    """The name of the first item that is about a site, or None."""
    return next(iter(names_at(items, schemes, path)), None)


def schemes_of(problem: ScaledMMProblem) -> frozenset[str]:
    """The schemes of a product."""
    if problem.weight_only:
        return frozenset({"w8a16"})
    return _schemes(problem.activation, problem.weight)


@lru_cache(maxsize=256)
def _schemes(activation: QuantKey, weight: QuantKey) -> frozenset[str]:
    names = (activation.granularity, weight.granularity)
    if not activation.dtype.is_floating_point:
        return frozenset({"int8"} if activation.symmetric else {"int8", "int8-azp"})
    if any(name.startswith("group") for name in names):
        return frozenset({"fp8", "fp8-block"})
    if names == ("tensor", "tensor"):
        return frozenset({"fp8", "fp8-tensor"})
    return frozenset({"fp8", "fp8-token" if names == ("token", "channel") else "fp8-mixed"})


def schemes_of_key(key: QuantKey) -> frozenset[str]:
    """The schemes of the products that may read a tensor quantised like this."""
    from fp8pass.quant_key import QuantKey as Key

    group = key.granularity
    if group.startswith("group"):
        return _schemes(key, key)
    weights = {"tensor": ("tensor", "channel"), "token": ("channel", "tensor")}.get(group, ())
    return frozenset().union(*(_schemes(key, _weight(Key, key, w)) for w in weights))


def _weight(made: type[QuantKey], key: QuantKey, granularity: str) -> QuantKey:
    from fp8pass.quant_key import dtype_name

    return made.parse(f"{dtype_name(key.dtype)}/static/{granularity}")
