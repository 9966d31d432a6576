"""Lightning: precision plugins for Trainer and Fabric that convert a module and advance its state."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Unpack

import torch
from lightning.fabric.plugins import precision as fabric
from lightning.pytorch.plugins import precision as pytorch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hybridtensor.arguments import require_choice, reusable
from hybridtensor.convert import Options, quantize_
from hybridtensor.dtensor import local
from hybridtensor.selection import Recipe
from hybridtensor.state.step import step_, step_after
from hybridtensor.subclasses import is_converted

_OF_THE_REST = (
    "tensor_init_context",
    "module_init_context",
    "convert_input",
    "convert_output",
)


class _Converting:
    """What both plugins do: convert, and leave the rest to Lightning's plugin for ``precision``."""

    _kinds: ModuleType = fabric

    def __init__(
        self, recipe: Recipe, *, precision: str = "32-true", **options: Unpack[Options]
    ) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"  # until there is a module
        made = {
            "32-true": lambda: self._kinds.Precision(),
            "bf16-true": lambda: self._kinds.HalfPrecision(precision),
            "bf16-mixed": lambda: self._kinds.MixedPrecision(precision, device),
        }
        require_choice(type(self).__name__, "precision", precision, made)
        self.precision, self._rest = precision, made[precision]()
        # On the instance, where they come before the methods of these names that Lightning's base
        # class has.
        for name in _OF_THE_REST:
            setattr(self, name, getattr(self._rest, name))
        self.forward_context = self._on_the_device
        self._recipe, self._options = recipe, reusable(options)
        self._module: weakref.ref[nn.Module] | None = None

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert a module, unless that was done before."""
        module = self._rest.convert_module(module)
        self._module = weakref.ref(module)
        if not any(is_converted(local(p)) for p in module.parameters()):
            quantize_(module, self._recipe, **self._options)
        return module

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_module": None}

    def _on_the_device(self) -> AbstractContextManager[object]:
        """Autocast, for ``bf16-mixed``, on the device where the module is by now."""
        module = None if self._module is None else self._module()
        parameter = None if module is None else next(module.parameters(), None)
        device = None if parameter is None else _device_type(parameter)
        if device is not None and torch.amp.is_autocast_available(device):
            self._rest.device = device
        context: AbstractContextManager[object] = self._rest.forward_context()
        return context


def _device_type(parameter: Tensor) -> str:
    """Return the type of device that computes with a parameter: FSDP2 may offload its shards to the host."""
    mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
    return parameter.device.type if mesh is None else mesh.device_type


class HybridPrecision(_Converting, pytorch.Precision):
    """A plugin of Trainer that quantizes the module, and advances its state with its optimizers.

    ::

        Trainer(plugins=HybridPrecision("nvfp4", precision="bf16-mixed")).fit(module, data)

    With several optimizers the state advances when all of them have stepped.

    Args:
        recipe: As for ``quantize_``. A module that is converted already keeps its recipes: what
            shards in ``configure_model`` calls ``quantize_`` there, before.
        precision: Of everything else: ``"32-true"``, ``"bf16-true"`` or ``"bf16-mixed"``.
        options: More arguments of ``quantize_``.

    Raises:
        ValueError: If ``precision`` is another.
    """

    _kinds = pytorch

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[object]
    ) -> tuple[nn.Module, list[Optimizer], list[object]]:
        """Have the optimizers advance the state; without any, as in a test, nothing does."""
        if optimizers:
            step_after(optimizers, model)
        return model, optimizers, lr_schedulers


class FabricHybridPrecision(_Converting, fabric.Precision):
    """A plugin of Fabric that quantizes the modules it sets up, and advances their state.

    ::

        fabric = Fabric(plugins=FabricHybridPrecision("fp8"))

    With several optimizers of one module its state advances with the one that stepped first.

    Args:
        recipe: As for ``HybridPrecision``.
        precision: As for ``HybridPrecision``.
        options: More arguments of ``quantize_``.

    Raises:
        ValueError: If ``precision`` is another.
    """

    def __init__(
        self, recipe: Recipe, *, precision: str = "32-true", **options: Unpack[Options]
    ) -> None:
        super().__init__(recipe, precision=precision, **options)
        self._leaders: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Optimizer] | None]
        self._leaders = weakref.WeakKeyDictionary()

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert a module, unless that was done before, and remember it."""
        self._leaders[super().convert_module(module)] = None
        return module

    def optimizer_step(self, optimizer: Optimizer, **arguments: object) -> object:
        """Step, then advance the state of modules whose parameters the optimizer holds."""
        result = super().optimizer_step(optimizer, **arguments)
        # A plugin learns nowhere which optimizers train a module, nor when all of them have
        # stepped.
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for module, leader in list(self._leaders.items()):
            first = None if leader is None else leader()  # None also if that optimizer is gone
            if first is None and any(id(p) in held for p in module.parameters()):
                self._leaders[module], first = weakref.ref(optimizer), optimizer
            if first is optimizer:
                step_(module)
        return result
