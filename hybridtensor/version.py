"""The version of the package, importable without torch."""

__version__ = "0.1.0"
