"""Former names of classes and hooks: a pickle names them by the path that it had when written.

A module that is gone gets an empty one in its place, which holds the former names and nothing else: ``pickle`` then
needs no ``Unpickler`` of ours, which ``torch.load`` and ``pickle.load`` of others would not use.

A class that moves again gets a row here and in ``lazy.ALLOWED``; ``tests/test_former_checkpoints.py`` loads what names
it.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable

from hybridtensor import state_dicts
from hybridtensor.recipes.config import HybridConfig, QuantizerRole
from hybridtensor.state import DelayedRule, LayerState, StateTensors
from hybridtensor.subclasses.high_precision import HighPrecisionValues

FORMER_NAMES: dict[str, Callable[..., object]] = {
    "hybridtensor.config.HybridConfig": HybridConfig,
    "hybridtensor.config.QuantizerRole": QuantizerRole,
    "hybridtensor.convert._keep_recipe_on_assign": state_dicts.before_loading,
    "hybridtensor.convert._plain_values": state_dicts.plain_values,
    "hybridtensor.state.DelayedRule": DelayedRule,
    "hybridtensor.state.LayerState": LayerState,
    "hybridtensor.state.layer.DelayedRule": DelayedRule,
    "hybridtensor.state.StateTensors": StateTensors,
    "hybridtensor.subclasses.kept.Kept": HighPrecisionValues,
}


def _module(path: str) -> types.ModuleType:
    if path not in sys.modules and importlib.util.find_spec(path) is None:
        sys.modules[path] = types.ModuleType(path, "Former names, for pickles.")
    return importlib.import_module(path)


def _register() -> None:
    """Register every class under its former name for pickles."""
    for former, present in FORMER_NAMES.items():
        path, _, name = former.rpartition(".")
        module = _module(path)
        if not hasattr(module, name):
            setattr(module, name, present)


_register()
