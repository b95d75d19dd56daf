"""Exceptions of fp8pass: one base class, one subclass per kind of fault a caller can act on."""

from __future__ import annotations


class Fp8PassError(Exception):
    """Base class of every error that fp8pass raises on purpose."""


class OptionError(Fp8PassError, ValueError):
    """An option, recipe, target or environment variable has a value that is not allowed."""


class NoKernelError(Fp8PassError):
    """A forced kernel cannot take a site; the message lists every reason."""


class PassError(Fp8PassError):
    """A step of the pass failed and ``strict=True`` asked for the failure to be raised."""


class UnsupportedError(Fp8PassError):
    """The caller asked for something that this way of using fp8pass does not support."""


def choices(values: object) -> str:
    """Render the allowed values of an option for an error message."""
    return ", ".join(repr(v) for v in values)  # type: ignore[attr-defined]
