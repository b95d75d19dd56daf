"""What the user asked of fp8pass in vLLM: the environment and ``additional_config["fp8pass"]``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fp8pass.errors import OptionError, choices

#: Environment variable that asks for the pass in every engine.
VARIABLE = "FP8PASS_VLLM"
#: Key of vLLM's ``additional_config``.
KEY = "fp8pass"

#: Mode -> the slot of Inductor's configuration that the pass takes.
#: *complement* comes after vLLM's own fusions and takes what they left; *replace* comes before.
SLOTS = {
    "complement": "post_grad_custom_post_pass",
    "replace": "post_grad_custom_pre_pass",
}
OFF = ("", "off", "0", "false", "no")


@dataclass(frozen=True)
class Asked:
    """One request.

    Attributes:
        mode: ``complement`` or ``replace``.
        options: arguments for :meth:`fp8pass.Options.resolve`.
        source: where it was asked, for messages.
    """

    mode: str
    options: Mapping[str, Any] = field(default_factory=dict)
    source: str = VARIABLE

    @property
    def slot(self) -> str:
        return SLOTS[self.mode]


def asked(additional: Any = None, env: Mapping[str, str] | None = None) -> Asked | None:
    """The request of a configuration or of the environment, which it outranks; None without one.

    Args:
        additional: vLLM's ``additional_config``; ``{"fp8pass": "complement"}`` or ``{"fp8pass":
            {"mode": "complement", "numerics": "fast", ...}}`` with any option of
            :class:`fp8pass.Options`.

    Raises:
        OptionError: an unknown mode, or something that is no request.
    """
    if isinstance(additional, Mapping) and KEY in additional:
        source = f"additional_config[{KEY!r}]"
        request = additional[KEY]
        if isinstance(request, (str, bool)) or request is None:
            request = {"mode": request}
        if not isinstance(request, Mapping):
            raise OptionError(f"{source}: {request!r} is neither a mode nor a dict of options")
        options = {str(name): value for name, value in request.items() if name != "mode"}
        mode = _mode(request.get("mode", "complement"), source)
        return Asked(mode, options, source) if mode else None
    mode = _mode((os.environ if env is None else env).get(VARIABLE, ""), VARIABLE)
    return Asked(mode) if mode else None


def _mode(value: Any, source: str) -> str:
    """``complement``, ``replace`` or "" for neither."""
    text = "" if value is None or value is False else str(value).strip().lower()
    if text in OFF:
        return ""
    if text not in SLOTS:
        raise OptionError(
            f"{source}: {value!r} is not allowed; allowed: {choices([*SLOTS, 'off'])}"
        )
    return text
