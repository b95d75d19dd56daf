"""Site: what happened at one place of the graph, as a plain value that survives JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from fp8pass.errors import choices
from fp8pass.reasons import CATALOGUE

#: What a site is named after: its producer, or else what it is itself.
KINDS = ("norm", "activation", "quantize", "scaled_mm")
#: ``fused``: a producer and its quantise became one operator; ``lowered``: a product got a kernel;
#: ``left``: the graph keeps what it came with, and ``code`` says why.
STATUSES = ("fused", "lowered", "left")


@dataclass(frozen=True, slots=True)
class Rejected:
    """A kernel that was not chosen for a site, and why.

    Raises:
        ValueError: ``code`` is not in :data:`fp8pass.reasons.CATALOGUE`, or an empty name.
    """

    kernel: str
    code: str
    message: str

    def __post_init__(self) -> None:
        if not self.kernel:
            raise ValueError("a rejected kernel needs a name")
        _check_code(self.code, f"rejected kernel {self.kernel!r}")

    def to_dict(self) -> dict[str, str]:
        """Plain data; :meth:`from_dict` is the inverse."""
        return {"kernel": self.kernel, "code": self.code, "message": self.message}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Rejected:
        """Rebuild from :meth:`to_dict`; raises KeyError or ValueError on bad data."""
        return Rejected(str(data["kernel"]), str(data["code"]), str(data["message"]))


@dataclass(frozen=True, slots=True)
class Site:
    """One record of the report. A fused producer and its quantise are one site.

    Attributes:
        kind: one of :data:`KINDS`; for a fused site that of the producer.
        status: one of :data:`STATUSES`.
        rule: the rule that fired, or the nearest one when the site was left.
        code: reason code of :data:`fp8pass.reasons.CATALOGUE`; required when left.
        message: the failing condition and its value; required when left.
        hint: what would change the answer.
        kernel: what runs there; with several M ranges the one of the largest.
        where: module path and, where known, source line.
        readers: number of nodes that read the result.
        node: name of the node in the received graph.
        source: dialect that it was written in (``aten``, ``vllm``, ``torchao``, ``fp8pass``).
        key: quantisation key(s) as text.
        shape: for a product ``MxNxK`` (symbolic sizes by name), else the shape of the input.
        plan: ranges of M and their kernels, such as ``"1-16=triton_skinny;17-=torch_row"``.
        rejected: kernels that were not chosen.

    Raises:
        ValueError: an unknown kind, status or code, or a left site without code and message.
    """

    kind: str
    status: str
    rule: str = ""
    code: str = ""
    message: str = ""
    hint: str = ""
    kernel: str = ""
    where: str = ""
    readers: int = 0
    node: str = ""
    source: str = "aten"
    key: str = ""
    shape: str = ""
    plan: str = ""
    rejected: tuple[Rejected, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown site kind {self.kind!r}; allowed: {choices(KINDS)}")
        if self.status not in STATUSES:
            raise ValueError(f"unknown site status {self.status!r}; allowed: {choices(STATUSES)}")
        if self.code:
            _check_code(self.code, f"site {self.node or self.where!r}")
        if self.status == "left" and not (self.code and self.message):
            raise ValueError(
                f"a site that was left needs a reason code and a message: {self.kind} "
                f"{self.node or self.where!r}"
            )
        if not isinstance(self.rejected, tuple):
            object.__setattr__(self, "rejected", tuple(self.rejected))

    def to_dict(self) -> dict[str, Any]:
        """Plain data with every field; :meth:`from_dict` is the inverse."""
        data = asdict(self)
        data["rejected"] = [r.to_dict() for r in self.rejected]
        return data

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Site:
        """Rebuild from :meth:`to_dict`; fields that this version does not know are ignored.

        Raises:
            KeyError, TypeError, ValueError: missing or bad data.
        """
        known = {f.name for f in fields(Site)}
        values = {name: value for name, value in data.items() if name in known}
        for name, value in values.items():
            expected = list if name == "rejected" else int if name == "readers" else str
            if not isinstance(value, expected) or isinstance(value, bool):
                raise TypeError(f"site field {name!r} has a bad value {value!r}")
        values["rejected"] = tuple(Rejected.from_dict(r) for r in values.get("rejected", ()))
        return Site(**values)


def _check_code(code: str, what: str) -> None:
    if code not in CATALOGUE:
        raise ValueError(f"{what} has reason code {code!r}, which is not in the catalogue")
