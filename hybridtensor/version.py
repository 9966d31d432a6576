"""The version of the package, importable without torch."""

__version__ = "0.2.0"
