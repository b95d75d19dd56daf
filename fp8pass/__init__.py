"""fp8pass: rewrites FP8 graphs of torch.compile into fused and device-specific calls, and says why.

Importing this package imports torch and nothing heavier, and touches no device; everything below is
loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fp8pass._version import __version__

if TYPE_CHECKING:
    from fp8pass.backend import fp8pass_backend, inductor_options
    from fp8pass.crossing import TargetGraphs, graphs_for
    from fp8pass.errors import Fp8PassError, NoKernelError, OptionError, PassError
    from fp8pass.explaining import explain
    from fp8pass.nn import Fp8Linear, quantize_
    from fp8pass.options import Options
    from fp8pass.preparation import prepare
    from fp8pass.problem import ScaledMMProblem
    from fp8pass.quant_key import GroupShape, QuantKey, ScaleDesc
    from fp8pass.reasons import Verdict
    from fp8pass.report import Report, Site, reports
    from fp8pass.target import Target

#: public name -> module that has it
_HOMES = {
    "Fp8Linear": "nn",
    "Fp8PassError": "errors",
    "GroupShape": "quant_key",
    "NoKernelError": "errors",
    "OptionError": "errors",
    "Options": "options",
    "PassError": "errors",
    "QuantKey": "quant_key",
    "Report": "report",
    "ScaleDesc": "quant_key",
    "ScaledMMProblem": "problem",
    "Site": "report",
    "Target": "target",
    "TargetGraphs": "crossing",
    "Verdict": "reasons",
    "explain": "explaining",
    "fp8pass_backend": "backend",
    "graphs_for": "crossing",
    "inductor_options": "backend",
    "prepare": "preparation",
    "quantize_": "nn",
    "reports": "report",
}

__all__ = [
    "Fp8Linear",
    "Fp8PassError",
    "GroupShape",
    "NoKernelError",
    "OptionError",
    "Options",
    "PassError",
    "QuantKey",
    "Report",
    "ScaleDesc",
    "ScaledMMProblem",
    "Site",
    "Target",
    "TargetGraphs",
    "Verdict",
    "__version__",
    "explain",
    "fp8pass_backend",
    "graphs_for",
    "inductor_options",
    "prepare",
    "quantize_",
    "reports",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name == "nn":
        return importlib.import_module("fp8pass.nn")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'fp8pass' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fp8pass.{home}"), name)
    globals()[name] = value  # later uses find it without this function
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
