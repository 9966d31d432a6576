"""Imports timm where torchvision does not fit the installed torch.

timm's models use nothing of torchvision but the name of one class, to ask whether a layer is an instance of it; what
loads images uses more, and is imported with the models. For the time of the import, every name that is asked of
torchvision is an empty class.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import types


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes ``torchvision`` and its modules; whatever is asked of them is a class of that name."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = _class_named
        return module

    def exec_module(self, module):
        """There is nothing to run."""


class _Anything(type):
    """A class whose attributes are classes, too: ``InterpolationMode.BICUBIC``."""

    def __getattr__(cls, name):
        return _class_named(name)


def _class_named(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything(name, (), {"__init__": lambda self, *args, **kwargs: None})


def import_timm():
    """Return timm, imported with torchvision if that works, or else with nothing in its place.

    Raises:
        ImportError: If timm is not installed, or asks torchvision for more than names.
    """
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):  # absent, or built for another torch: its operators are not there
        _forget_torchvision()
    else:
        return importlib.import_module("timm")
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module("timm")
    finally:
        sys.meta_path.remove(finder)
        _forget_torchvision()


def _forget_torchvision():
    """Let nobody else find the modules that were made, or half imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        with contextlib.suppress(KeyError):
            del sys.modules[name]
