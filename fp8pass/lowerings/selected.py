"""Which selectors of the options are about a site of a graph, and which about none.

A pattern with a slip of the pen, or a scheme that a model does not have, changes nothing: that is
said in the report. A model may become several graphs, and what is about no site of one may be about
sites of another: so each graph says what it found, and a report over all of them counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from fp8pass.lowerings.producers import producer_kernel_names
from fp8pass.lowerings.to_weight_only import schemes_at
from fp8pass.options import Options
from fp8pass.quant_key import QuantKey
from fp8pass.reasons import Verdict
from fp8pass.selectors import Item, parse_item, schemes_of_key
from fp8pass.site_draft import Draft
from fp8pass.spellings.walk import where
from fp8pass.target import Target

#: The schemes of a site and the path of its module.
Place = tuple[frozenset[str], str]


def _narrow(options: Options) -> list[tuple[str, Item]]:
    """(option, item) of the items that are about some sites only."""
    found = {
        "force": options.forced,
        "linear_backend": options.backends,
        "prefer": options.prefer,
        "disable": options.disable,
    }
    items = [(option, parse_item(text)) for option, texts in found.items() for text in texts]
    return [(option, item) for option, item in items if not item.everywhere]


def selected(
    options: Options,
    drafts: Sequence[Draft],
    unread: Sequence[tuple[str, fx.Node, Verdict]],
    target: Target,
    judges: Callable[[bool], bool],
) -> dict[str, bool]:
    """Selector, such as ``force="down_proj=torch_row"`` -> whether it is about a site here.

    Args:
        drafts: the sites, before they are lowered.
        unread: what was seen and not read: (kind, node, reason); its schemes are not known.
        judges: whether the sites that are products (True) or producers (False) are all here.
    """
    items = _narrow(options)
    if not items:
        return {}
    places: dict[bool, list[Place]] = {True: [], False: []}
    for draft in drafts:
        product = draft.kind == "scaled_mm"
        places[product].append((_schemes(draft, target), draft.path))
    for kind, node, _ in unread:
        places[kind == "scaled_mm"].append((frozenset(), where(node).partition(" ")[0]))
    producers = producer_kernel_names()
    found = {}
    for option, item in items:
        product = item.name not in producers
        if judges(product):
            found[f'{option}="{item}"'] = any(item.about(*place) for place in places[product])
    return found


def _schemes(draft: Draft, target: Target) -> frozenset[str]:
    if draft.kind == "scaled_mm":
        return schemes_at(draft, target)
    quantise = draft if draft.kind == "quantize" else draft.readers_of
    key = "" if quantise is None else quantise.key
    return schemes_of_key(QuantKey.parse(key)) if key else frozenset()
