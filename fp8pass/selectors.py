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
``{SITES: [names]}`` is the same. A comma separates items, but for one in brackets: it is a
character of a set, as in ``layers.[0,1].*``.

A product that was made weight-only (W8A16) of one of codes has the schemes of both.
"""

from __future__ import annotations

import re
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
#: An item: no comma, but for those of a set of characters. In a set "]" may come first, as in a
#: shell.
_ITEM = re.compile(r"(?:\[!?\]?[^\]]*\]|[^,])+")


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
    def sites(self) -> tuple[str, str]:
        """Scheme and pattern: which sites it is about."""
        return self.scheme, self.pattern

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
        OptionError: an empty name, an empty pattern, a scheme that is not known, or a comma that
            would make two items of it.
    """
    if len(split(text)) > 1:
        raise OptionError(
            f"{text!r} has a comma, which separates items; it can be in a set alone, as in [0,1]"
        )
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


def split(text: str) -> list[str]:
    """The texts of the items of one text; empty ones are left out."""
    return [found.strip() for found in _ITEM.findall(text) if found.strip()]


def items_of(value: Any) -> tuple[str, ...]:
    """An option's value as the texts of its items: from a text with commas, names or a mapping.

    Raises:
        TypeError: neither of these, or something in it that is no text.
        OptionError: an item that is not understood.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        texts: Iterable[Any] = split(value)
    elif isinstance(value, Mapping):
        texts = [
            f"{_text(sites)}={_text(name)}"
            for sites, names in value.items()
            for name in ([names] if isinstance(names, str) else names)
        ]
    else:
        texts = value
    cleaned = [_text(text).strip() for text in texts]
    return tuple(str(parse_item(text)) for text in cleaned if text)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def joined(items: tuple[str, ...]) -> str:
    """Items of which the first that is about a site counts, as one text.

    Raises:
        OptionError: an item can never count because one before it is about all of its sites, or
            the text would be understood as other items.
    """
    parsed = [parse_item(text) for text in items]
    for i, item in enumerate(parsed):
        for before in parsed[:i]:
            if item != before and (before.everywhere or before.sites == item.sites):
                raise OptionError(
                    f"{str(item)!r} can never count: the first item that is about a site does, "
                    f"and {str(before)!r} comes before it"
                )
    text = ", ".join(items)
    if items_of(text) != items:
        raise OptionError(f"{text!r} is not understood: a bracket is open")
    return text


def names_at(items: tuple[str, ...], schemes: frozenset[str], path: str) -> tuple[str, ...]:
    """The names of the items that are about a site, each once, in their order."""
    if not items:
        return ()
    found = [item.name for item in map(parse_item, items) if item.about(schemes, path)]
    return tuple(dict.fromkeys(found))


def first_at(items: tuple[str, ...], schemes: frozenset[str], path: str) -> str | None:
    """The name of the first item that is about a site, or None."""
    return next(iter(names_at(items, schemes, path)), None)


def schemes_of(problem: ScaledMMProblem, act_key: str = "") -> frozenset[str]:
    """The schemes of a product.

    ``act_key``: of a weight-only product that took the place of one of codes, the key of those
    codes. It has the schemes of both, so that what names either is about it, before and after.
    """
    if problem.weight_only:
        own = frozenset({"w8a16"})
        if not act_key:
            return own
        from fp8pass.quant_key import QuantKey as Key

        return own | _schemes(Key.parse(act_key), problem.weight)
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
