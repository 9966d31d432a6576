"""Imports the package when one of its names is first used: torchao and DTensor take longer to import than torch.

Until then stand-ins take its place: for the attributes of the package, for its modules, for the names that
``torch.load(weights_only=True)`` allows, and for the operators of ``torch.ops``. Each imports the whole package at its
first use. Modules are not imported one by one, because some register what others need: without ``linear/``, which
intercepts ``F.linear``, every product of a weight raises.
"""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
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
    "recipe_table",
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
    "quantizers.base": ("CastQuantizer", "OneFormatQuantizer", "RoundingQuantizer"),
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
    # From here on torch's own namespace, which it makes when it is next asked for one, in place of ``_Operators``.
    # Before the flag: from then on modules that another thread imports define operators in it.
    if isinstance(vars(torch.ops).get(PACKAGE), _Operators):
        vars(torch.ops).pop(PACKAGE, None)
    _finder.is_loading = True
    try:
        public = importlib.import_module(f"{PACKAGE}.public")
    except BaseException:
        _finder.is_loading = False
        setattr(torch.ops, PACKAGE, _Operators(PACKAGE))
        raise
    own = vars(sys.modules[PACKAGE])
    # A name that a user has set stays; a submodule that the import system bound, such as ``check``, is replaced.
    free = [name for name in public.__all__ if isinstance(own.get(name, public), ModuleType)]
    own.update({name: getattr(public, name) for name in free})
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

    def __reduce__(self) -> tuple[object, ...]:
        # pickle cannot, and cloudpickle knows modules by their exact type.
        return importlib.import_module, (PACKAGE,)

    def __dir__(self) -> list[str]:
        return sorted(load().__all__)


class _Finder(MetaPathFinder):
    """Finds modules of the package, after importing all of it, and torchao's module of configs.

    Another thread's modules are found one by one while the package is imported: it holds locks that this import needs.
    """

    is_loading = is_loaded = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == _CONFIGS:
            spec = self._found_by_others(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _ConfigsLoader(spec.loader)
            return spec
        if not self._is_deferred(name):
            return None
        load()
        imported = sys.modules.get(name)
        if imported is None:
            return None
        # The import system goes on with the spec of what is in ``sys.modules``, and would execute the module once more.
        spec = ModuleSpec(name, None) if imported.__spec__ is None else copy.copy(imported.__spec__)
        spec.loader = _ModuleLoader(spec.loader)
        imported.__spec__ = spec
        return spec

    def _is_deferred(self, name: str) -> bool:
        """Return whether a module is imported with the whole package."""
        package, _, module = name.partition(".")
        return package == PACKAGE and not self.is_loading and module.partition(".")[0] not in LIGHT

    def _found_by_others(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """Return the spec that later finders have."""
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None


class _Loader(Loader):
    """Does what another loader does, which the imported module then has as its own."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # such as ``get_code``, which runpy calls

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._execute(module)

    def _execute(self, module: ModuleType) -> None:
        self._loader.exec_module(module)


class _ModuleLoader(_Loader):
    """Hands out a module that was executed with the whole package."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return sys.modules[spec.name]

    def _execute(self, module: ModuleType) -> None:
        pass


class _ConfigsLoader(_Loader):
    """Adds the package to torchao's list of configs."""

    def _execute(self, module: ModuleType) -> None:
        super()._execute(module)
        allow_config()


_finder = _Finder()


def allow_config() -> None:
    """Have torchao's ``config_from_dict`` find this package's config, if torchao was imported."""
    if _CONFIGS in sys.modules:
        sys.modules[_CONFIGS].ALLOWED_AO_MODULES.add(PACKAGE)


class _Allowed(tuple[Any, str]):
    """A module and a name in it, which torch unpacks as a pair of object and full name when it reads a file."""

    def __iter__(self) -> Iterator[object]:
        yield self._found
        yield f"{self[0]}.{self[1]}"

    @functools.cached_property
    def _found(self) -> object:
        load()
        return getattr(importlib.import_module(self[0]), self[1])


class _Operators(type(torch.ops.aten)):  # type: ignore[misc]
    """``torch.ops.hybridtensor`` until the package is imported: ``torch.export.load`` looks operators up there."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        load()
        return getattr(getattr(torch.ops, PACKAGE), name)


def install() -> None:
    """Have the package imported at its first use, once ``hybridtensor`` itself is in ``sys.modules``."""
    if _finder in sys.meta_path:
        return  # ``importlib.reload``
    sys.modules[PACKAGE].__class__ = Package
    sys.meta_path.insert(0, _finder)
    allow_config()
    names = ((f"{PACKAGE}.{module}", name) for module, names in ALLOWED.items() for name in names)
    torch.serialization.add_safe_globals([_Allowed(pair) for pair in names])
    setattr(torch.ops, PACKAGE, _Operators(PACKAGE))
