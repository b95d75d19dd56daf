"""Options: every switch of fp8pass in one frozen record.

Order of precedence: arguments > environment (``FP8PASS_<NAME>``) > defaults. All environment
variables that fp8pass reads are listed here; one more is vLLM's ``VLLM_DISABLED_KERNELS``, which
adds to ``disable``. A bad name or value raises :class:`OptionError` that names it and what is
allowed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, cast

from fp8pass.errors import OptionError, choices
from fp8pass.outside import count_of, shortened, whole_number, why_no_path
from fp8pass.selectors import items_of, joined, parse_item

ENV_PREFIX = "FP8PASS_"
_VLLM_DISABLED = "VLLM_DISABLED_KERNELS"
#: Options that take one of a few words.
_WORDS = {"numerics": ("exact", "fast"), "tune": ("off", "cached", "measure")}
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "")


@dataclass(frozen=True, slots=True)
class Options:
    """What the user may ask of a compile.

    Attributes:
        target: device to compile for, as :meth:`fp8pass.Target.parse` takes it; None = the device
            that the graph runs on.
        numerics: ``"exact"`` (the contract of docs/numerics.md) or ``"fast"`` (may drop
            intermediate roundings to the model dtype; same error class as stock Inductor).
        strict: raise if a step of the pass fails, instead of restoring the graph and going on.
        force: name of the one GEMM kernel to use; a site that it cannot take raises
            :class:`fp8pass.errors.NoKernelError` with every reason. Also for some sites only:
            ``"down_proj=torch_row, fp8-block=triton_block"`` (:mod:`fp8pass.selectors`).
            ``"w8a16"`` (here, in ``prefer`` and in ``disable``) means the weight-only kernels:
            forced or preferred, they take activations before their quantise, which changes numbers;
            what the quantise cuts off stays cut off, or the site is refused (docs/numerics.md).
        prefer: kernel names to try first, in this order; falls back and says so. Items as above.
        disable: kernel names never to use. Items as above.
        dump: folder for before/after graphs and reports.
        fuel: apply at most this many rewrites (for bisecting); None = no limit.
        self_check: compare a kernel of another library with the reference on its first call for
            each size (N, K, dtypes, the number of rows up to a power of two); one that differs or
            raises is disabled for the process (debugging; costs time and memory).
        linear_backend: a value of vLLM's ``--linear-backend`` (``"torch"``, ``"cutlass"``, ...):
            the kernels of that backend are tried first, after ``prefer``; falls back and says so;
            one of which fp8pass has no kernel is an error. Items as above; ``"auto"`` asks for
            nothing.
        tune: ``"off"``: the order of kernels is that of the shipped tables; ``"cached"``: what was
            measured on this device comes before them; ``"measure"``: what was not is measured
            while compiling. Measurements count only where ``target`` is None.
        tune_cache: folder of the measurements; None = ``~/.cache/fp8pass/tuning``.
    """

    target: str | None = None
    numerics: Literal["exact", "fast"] = "exact"
    strict: bool = False
    force: str | None = None
    prefer: tuple[str, ...] = ()
    disable: tuple[str, ...] = ()
    dump: str | None = None
    fuel: int | None = None
    self_check: bool = False
    linear_backend: str | None = None
    tune: Literal["off", "cached", "measure"] = "cached"
    tune_cache: str | None = None

    @staticmethod
    def names() -> tuple[str, ...]:
        """The names of all options."""
        return tuple(f.name for f in fields(Options))

    @staticmethod
    def resolve(env: Mapping[str, str] | None = None, **arguments: Any) -> Options:
        """Merge arguments, environment and defaults; validate everything.

        Raises:
            OptionError: unknown option name or bad value, with where it came from.
        """
        environment = os.environ if env is None else env
        unknown = sorted(set(arguments) - set(Options.names()))
        if unknown:
            raise OptionError(
                f"unknown fp8pass option {unknown[0]!r}; allowed: {choices(Options.names())}"
            )
        values: dict[str, Any] = {}
        for name in Options.names():
            variable = ENV_PREFIX + name.upper()
            if name in arguments:
                values[name] = _convert(name, arguments[name], f"option {name}")
            elif variable in environment:
                values[name] = _convert(name, environment[variable], f"environment {variable}")
        if _VLLM_DISABLED in environment:
            from fp8pass.lowerings.vllm_names import disabled_kernels

            also = disabled_kernels(environment)
            values["disable"] = tuple(dict.fromkeys((*values.get("disable", ()), *also)))
        options = Options(**values)
        options._check_names()
        return options

    def key(self) -> tuple[Any, ...]:
        """Plain data that identifies every option that changes a rewrite (folders do not)."""
        folders = ("dump", "tune_cache")
        return tuple((f.name, getattr(self, f.name)) for f in fields(self) if f.name not in folders)

    @property
    def forced(self) -> tuple[str, ...]:
        """The items of ``force``."""
        return items_of(self.force)

    @property
    def backends(self) -> tuple[str, ...]:
        """The items of ``linear_backend``."""
        return items_of(self.linear_backend)

    def _check_names(self) -> None:
        if self.target is not None:
            from fp8pass.target import Target

            Target.parse(self.target)
        if not (self.prefer or self.disable or self.force or self.linear_backend):
            return
        from fp8pass.lowerings import WEIGHT_ONLY, kernel_names, producer_kernel_names
        from fp8pass.lowerings.vllm_names import backend_kernels

        products = (*kernel_names(), WEIGHT_ONLY)
        known = (*products, *producer_kernel_names())
        forced = [parse_item(text) for text in self.forced]
        disabled = [parse_item(text) for text in self.disable]
        asked = [(item, products) for item in forced]
        asked += [(item, known) for item in (*map(parse_item, self.prefer), *disabled)]
        for item, allowed in asked:
            if item.name not in allowed:
                raise OptionError(f"unknown kernel {item.name!r}; allowed: {choices(allowed)}")
        for text in self.backends:
            backend_kernels(parse_item(text).name)
        for item in disabled:
            if item.name == "inductor":
                raise OptionError(
                    "kernel 'inductor' cannot be disabled: it is what every graph falls back to"
                )
            for other in forced:
                if other.name == item.name and (item.everywhere or other == item):
                    raise OptionError(f"kernel {item.name!r} is both forced and disabled")


def _convert(name: str, value: Any, source: str) -> Any:
    """Turn an argument or an environment string into the option's type."""
    text = value.strip() if isinstance(value, str) else None
    if name in ("force", "linear_backend"):
        if value is None or text == "":
            return None
        try:
            return joined(items_of(value)) or None
        except OptionError as error:
            raise OptionError(f"{source}: {error}") from None
        except TypeError:
            raise OptionError(f"{source}: {value!r} is not a name or SITES=name") from None
    if name in ("target", "dump", "tune_cache"):
        if value is None or text == "":
            return None
        if text is None and name != "target" and isinstance(value, os.PathLike):
            text = os.fsdecode(value)
        if text is None and name == "target" and hasattr(value, "spec"):
            return cast(str, value.spec)
        if text is None:
            raise OptionError(f"{source}: {value!r} is not a string")
        why = why_no_path(text)
        if why:
            raise OptionError(f"{source}: {shortened(text)} cannot be a name: {why}")
        return text
    if name in _WORDS:
        if text == "":  # an empty variable is an unset one
            return getattr(Options(), name)
        if text not in _WORDS[name]:
            raise OptionError(
                f"{source}: {value!r} is not allowed; allowed: {choices(_WORDS[name])}"
            )
        return text
    if name in ("strict", "self_check"):
        if isinstance(value, bool):
            return value
        if text is not None and text.lower() in _TRUE + _FALSE:
            return text.lower() in _TRUE
        raise OptionError(f"{source}: {value!r} is not allowed; allowed: True, False, '1', '0'")
    if name in ("prefer", "disable"):
        try:
            return items_of(value)
        except OptionError as error:
            raise OptionError(f"{source}: {error}") from None
        except TypeError:
            raise OptionError(f"{source}: {value!r} is not a list of kernel names") from None
    # fuel
    if value is None or text == "":
        return None
    try:
        if text is not None:
            return whole_number(text)
        whole = isinstance(value, float) and value.is_integer()  # 3.0 is as good as 3
        return count_of(int(value) if whole else value, name)
    except ValueError:
        raise OptionError(
            f"{source}: {shortened(value)} is not allowed; allowed: a whole number >= 0"
        ) from None
