"""Imports the package when one of its names is first used: torchao and DTensor take longer to import than torch.

Until then stand-ins take its place: for the attributes of the package, for its modules, for the names that
``torch.load(weights_only=True)`` allows, and for the operators of ``torch.ops``. Each imports the whole package at its
first use. Nothing of it ever runs without the rest: a weight's class alone, without the functions that it intercepts,
would be multiplied in high precision.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

PACKAGE = "hybridtensor"
# What commands need that read files or print tables; these import nothing but torch and each other.
LIGHT = (
    "__main__",
    "arguments",
    "commands",
    "lazy",
    "named_recipes",
    "printed",
    "untrusted",
    "verify",
    "version",
)
_CONFIGS = "torchao.core.config"
# What ``torch.load(weights_only=True)`` may call for files of this version and of former ones, by module
ALLOWED = {
    "config": ("HybridConfig", "QuantizerRole"),
    "convert": ("_keep_recipe_on_assign", "_plain_values"),
    "formats": ("format_of_face", "get_format"),
    "quantizers.base": ("CastQuantizer", "OneFormatQuantizer"),
    "quantizers.float8": ("DelayedFloat8Quantizer", "Float8Quantizer"),
    "quantizers.hybrid": ("HybridQuantizer", "IdentityQuantizer"),
    "quantizers.mxfp4": ("MXFP4Quantizer",),
    "quantizers.mxfp8": ("MXFP8Quantizer",),
    "quantizers.nvfp4": ("NVFP4Quantizer",),
    "recipes.config": ("HybridConfig",),
    "state": ("DelayedRule", "LayerState", "StateTensors"),
    "state.layer": ("DelayedRule", "LayerState"),
    "state.rules": ("DelayedRule",),
    "subclasses.high_precision": ("HighPrecisionValues",),
    "subclasses.hybrid_tensor": ("HybridTensor",),
    "subclasses.identity_tensor": ("IdentityTensor",),
    "subclasses.kept": ("Kept",),
    "subclasses.master_tensor": ("MasterWeight",),
    "subclasses.quantized_tensor": ("QuantizedTensor",),
    "subclasses.wrapper": ("_rebuild",),
}


def load() -> ModuleType:
    """Import the whole package and set its public names, once; return the module that has them."""
    if _finder.is_loaded:
        return sys.modules[f"{PACKAGE}.public"]
    _finder.is_loading = True
    # From here on torch's own namespace, which it makes when it is next asked for one, in place of ``_Operators``.
    if isinstance(vars(torch.ops).get(PACKAGE), _Operators):
        delattr(torch.ops, PACKAGE)
    try:
        public = importlib.import_module(f"{PACKAGE}.public")
    except BaseException:
        _finder.is_loading = False
        raise
    vars(sys.modules[PACKAGE]).update({name: getattr(public, name) for name in public.__all__})
    _finder.is_loaded = True
    return public


class Package(ModuleType):
    """The class of the module ``hybridtensor``."""

    def __getattr__(self, name: str) -> object:
        # Names with underscores are what ``inspect`` and the import system ask every module for.
        if not name.startswith("__") or name == "__all__":
            public = load()
            if name in vars(self):
                return vars(self)[name]
            if name == "__all__":
                return public.__all__
        raise AttributeError(f"{PACKAGE}: no attribute {name!r}", name=name, obj=self)

    def __setattr__(self, name: str, value: object) -> None:
        # The import system binds a submodule when it has been imported: ``check.py`` would replace ``ht.check``.
        if not isinstance(value, ModuleType) or isinstance(vars(self).get(name, value), ModuleType):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted(load().__all__)


class _Finder(MetaPathFinder, Loader):
    """Imports the whole package before any one of its modules, and adds the package to torchao's list of configs."""

    is_loading = is_loaded = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == _CONFIGS:
            return self._find_configs(path)
        package, _, module = name.partition(".")
        if package != PACKAGE or self.is_loading or module.partition(".")[0] in LIGHT:
            return None
        load()
        if name not in sys.modules:
            return None
        # The import system goes on with the spec of what is in ``sys.modules``, and would execute the module once more.
        imported = sys.modules[name]
        spec = copy.copy(imported.__spec__)
        if spec is not None:
            spec.loader, spec.loader_state = self, imported.__spec__
            imported.__spec__ = spec
        return spec

    def _find_configs(self, path: Sequence[str] | None) -> ModuleSpec | None:
        """Find torchao's module of configs, to be executed by this loader."""
        spec = PathFinder.find_spec(_CONFIGS, path)
        if spec is not None and spec.loader is not None:
            spec.loader_state, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None if spec.name == _CONFIGS else sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is None:
            raise ImportError(f"{module.__name__}: a module with a spec is required")
        if spec.name != _CONFIGS:  # was executed by ``load``, with the spec that it keeps
            module.__spec__ = spec.loader_state
            return
        spec.loader = module.__loader__ = spec.loader_state
        spec.loader.exec_module(module)
        allow_config()


_finder = _Finder()


def allow_config() -> None:
    """Have torchao's ``config_from_dict`` find this package's config, if torchao was imported."""
    if _CONFIGS in sys.modules:
        sys.modules[_CONFIGS].ALLOWED_AO_MODULES.add(PACKAGE)


class _Allowed(tuple[Any, str]):
    """A module and a name in it, which torch unpacks as a pair of object and full name when it reads a file."""

    __slots__ = ()

    def __iter__(self) -> Iterator[object]:
        load()
        module, name = self[0], self[1]
        yield getattr(importlib.import_module(module), name)
        yield f"{module}.{name}"


class _Operators(type(torch.ops.aten)):  # type: ignore[misc]
    """``torch.ops.hybridtensor`` until the package is imported: ``torch.export.load`` looks operators up there."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        load()
        return getattr(getattr(torch.ops, PACKAGE), name)


def install() -> None:
    """Have the package imported at its first use, once ``hybridtensor`` itself is in ``sys.modules``."""
    sys.modules[PACKAGE].__class__ = Package
    sys.meta_path.insert(0, _finder)
    allow_config()
    names = ((f"{PACKAGE}.{module}", name) for module, names in ALLOWED.items() for name in names)
    torch.serialization.add_safe_globals([_Allowed(pair) for pair in names])
    setattr(torch.ops, PACKAGE, _Operators(PACKAGE))
