"""The version, in one place: the build, the package and the pass's identity read it from here."""

__version__ = "0.1.0"
