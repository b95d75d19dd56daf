"""Draft: what is known of one site while the pass runs; becomes a ``report.Site`` at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fp8pass.reasons import Verdict
from fp8pass.workbench import Swap


@dataclass(slots=True, eq=False)
class Draft:
    """One site.

    Attributes:
        kind: ``norm``, ``activation``, ``quantize`` or ``scaled_mm``.
        what: the word for messages ("norm", "SiLU·mul", ...).
        node: the generic operator that stands for it in the graph.
        outputs: its results by name (``y``, ``total``, ``q``, ``scale``, ``out``).
        swaps: how the graph was changed for it, in order; empty for an operator that the model
            emitted itself.
        root_name: name of the node it was read from.
        form: text of its form.
        weight_only: of a product, that it takes the place of one of codes; of a quantise, that
            such a product read its codes before.
        codes_of: of such a product, the quantise whose codes it read before.
        note: what the report adds to the reason for the kernel.
    """

    kind: str
    what: str
    node: fx.Node
    outputs: dict[str, fx.Node]
    swaps: list[Swap]
    root_name: str
    form: str
    source: str = "aten"
    where: str = ""
    shape: str = ""
    key: str = ""
    status: str = "left"
    rule: str = ""
    verdict: Verdict | None = None
    kernel: str = ""
    plan: str = ""
    why: str = ""
    rejected: list[tuple[str, Verdict]] = field(default_factory=list)
    readers: int = 0
    quant_form: str = ""
    readers_of: Draft | None = None
    fused_into: Draft | None = None
    match: Any = None
    weight_only: bool = False
    codes_of: Draft | None = None
    note: str = ""

    @property
    def path(self) -> str:
        """The path of the site's module, as far as it is known."""
        path, _, place = self.where.partition(" ")
        return path if place or ":" not in path else ""  # a place in the source alone

    def refuse(self, rule: str, verdict: Verdict) -> None:
        """Note the nearest rule and the first condition that failed; the first refusal stays."""
        if self.verdict is None:
            self.rule, self.verdict = rule, verdict
