"""Layers of one module that read one input, such as q, k and v, quantize it once and save its faces
once.

In eager execution only; in a compiled graph equal casts are one node anyway. Whether an input has
changed between two layers cannot always be known: ``input.data``, numpy and in-place collectives
write where nothing counts. So faces are shared only within one forward of the module that the
layers belong to, between layers that each read the input for the first time there, of inputs that
autograd has recorded, and not with another version. What remains is a forward that writes its own
intermediate result behind autograd's back between two of its layers: turn sharing off for it.
"""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from hybridtensor.arguments import require_flag
from hybridtensor.ops import Faces
from hybridtensor.ops.library import is_recorded, is_traced
from hybridtensor.state import LayerState
from hybridtensor.subclasses.record import WeightRecord


class _Scope:
    """One forward of a module with several converted layers.

    Attributes:
        module: The module, weakly.
        parent: Its name, by which layers know that they belong to it.
        outer: The forward that it runs in, or None.
        input: The last input that was quantized, or the tensor that it is a view of, weakly.
        key: Everything else that its faces depend on.
        faces: What it was quantized to.
        readers: Records of the weights that it was quantized for.
    """

    __slots__ = ("__weakref__", "faces", "input", "key", "module", "outer", "parent", "readers")

    def __init__(self, module: nn.Module, parent: str, outer: _Scope | None) -> None:
        self.module, self.parent, self.outer = weakref.ref(module), parent, outer
        self.input: weakref.ref[Tensor] | None = None
        self.key: tuple[object, ...] = ()
        self.faces: Faces = (None, None)
        self.readers: list[WeightRecord] = []

    def known_faces(
        self, input: Tensor, record: WeightRecord, how: tuple[object, ...]
    ) -> Faces | None:
        """Return the faces of this very input, made for another layer of the module, or None.

        Another view of the same elements is the same input: DTensors give each layer a view.

        If it is None, ``remember`` is to be called with what the input is quantized to.

        Args:
            input: What is quantized.
            record: That of the weight that the faces are multiplied with.
            how: What else they depend on, compared with ``==``.
        """
        stream = (
            torch._C._cuda_getCurrentRawStream(input.device.index) if input.is_cuda else 0
        )  # orders the cast
        place = (input.shape, input.stride(), input.storage_offset())
        key = (input._version, place, stream, *how)
        known = self.input is not None and self.input() is _owner(input) and self.key == key
        if known and all(record is not reader for reader in self.readers):
            self.readers.append(record)
            return self.faces
        self.clear()
        self.key, self.readers = key, [record]
        return None

    def remember(self, input: Tensor, faces: Faces) -> None:
        """Keep the faces of ``input``, for as long as it lives and the forward runs.

        Apart from ``known_faces``: an input whose cast raised has no faces to share.
        """
        self.input, self.faces = _until_death(_owner(input), self), faces

    def clear(self) -> None:
        """Let go of the faces."""
        self.input, self.faces, self.readers = None, (None, None), []


def _owner(input: Tensor) -> Tensor:
    """Return the tensor that ``input`` is a view of, or itself."""
    base = input._base
    return input if base is None else base


class _Thread(threading.local):
    """The innermost forward of this thread, or None."""

    scope: _Scope | None = None


_thread = _Thread()
_enabled = True


class share_inputs:  # noqa: N801  (used as a function, and as a context)
    """Turn sharing on or off, from the call on; as a context, until it ends.

    ::

        ht.share_inputs(False)
        with ht.share_inputs(False):
            loss = model(tokens)

    Args:
        enabled: Whether layers of one module share what they quantize an input to.

    Raises:
        TypeError: If it is not a bool.
    """

    def __init__(self, enabled: bool) -> None:
        global _enabled
        require_flag("share_inputs", enabled=enabled)
        self._before, _enabled = _enabled, enabled

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        global _enabled
        _enabled = self._before


def share_between_layers_of(module: nn.Module, parent: str) -> None:
    """Let the layers of ``module`` share what they quantize an input to.

    Args:
        module: The module that the layers belong to.
        parent: Its name, ``LayerState.parent`` of the layers.
    """
    if parent in getattr(module, "_hybridtensor_shares", ()):
        return
    module._hybridtensor_shares = (*getattr(module, "_hybridtensor_shares", ()), parent)  # type: ignore[assignment]
    module.register_forward_pre_hook(partial(_enter, parent))
    module.register_forward_hook(_leave, always_call=True)


def forget(module: nn.Module) -> None:
    """Undo ``share_between_layers_of``."""
    if module.__dict__.pop("_hybridtensor_shares", None) is None:
        return
    # torch's private tables: a handle of each hook would be one more thing that is copied with it
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, partial) and hook.func is _enter:
            del module._forward_pre_hooks[key]
    for key, hook in list(module._forward_hooks.items()):
        if hook is _leave:
            del module._forward_hooks[key]
            module._forward_hooks_always_called.pop(key, None)


def _enter(parent: str, module: nn.Module, args: object) -> None:
    if not is_traced():
        _thread.scope = _Scope(module, parent, _thread.scope)


def _leave(module: nn.Module, args: object, output: object) -> None:
    if is_traced():
        return
    scope = _thread.scope
    while (
        scope is not None and scope.module() is not module
    ):  # forwards that ended in ways that hooks do not see
        scope = scope.outer
    if scope is not None:
        scope.clear()
        _thread.scope = scope.outer


def sharing_scope(input: Tensor, record: WeightRecord) -> _Scope | None:
    """Return the forward in which ``input`` is quantized once for all layers of a module, or None.

    Args:
        input: What is quantized.
        record: That of the weight that its faces are multiplied with.
    """
    scope = None if is_traced() else _thread.scope
    if scope is None or not _enabled or input.grad_fn is None or is_recorded():
        return None
    layer = record.layer
    return scope if isinstance(layer, LayerState) and layer.parent == scope.parent else None


def _until_death(input: Tensor, scope: _Scope) -> weakref.ref[Tensor]:
    """Return a reference whose end lets go of the faces, if they are still those of ``input``."""
    within = weakref.ref(scope)

    def forget(reference: weakref.ref[Tensor]) -> None:
        found = within()
        if found is not None and found.input is reference:
            found.clear()

    return weakref.ref(input, forget)
