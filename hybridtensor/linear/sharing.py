"""Layers of one module that read one input, such as q, k and v, quantize it once and save its faces once.

In a graph that is traced every write makes another node. In eager execution, whether an input has changed between two
layers cannot always be known: ``input.data``, numpy and in-place collectives write where nothing counts. So faces are
shared only within one forward of the module that the layers belong to, between layers that each read the input for the
first time there, of inputs that autograd has recorded, and not with another version. What remains is a forward that
writes its own intermediate result behind autograd's back between two of its layers: turn sharing off for it.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Self

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from hybridtensor.arguments import require_flag
from hybridtensor.ops import Faces, Groups
from hybridtensor.ops.captures import stream_of
from hybridtensor.ops.library import dispatch_modes, is_traced
from hybridtensor.ops.order import node_of
from hybridtensor.state import Context, LayerState
from hybridtensor.subclasses.record import WeightRecord
from hybridtensor.subclasses.sharded_face import SharedFace

_PARENTS = "_hybridtensor_shares"  # names of a module by which its layers know it
_KEY: Any = "hybridtensor"  # of hooks, among the numbers of other hooks


class SharedCast:
    """The cast of one input, which sibling layers share.

    Attributes:
        faces: What the first of the layers quantized; None before.
        amax_record: Where the cast recorded amaxes; None if it recorded none, or in the record of the layer's forward.
        columnwise: The columnwise face, if backward quantizes it from the saved input.
    """

    faces: Faces | None = None
    amax_record: Tensor | None = None
    columnwise: SharedFace | None = None


class _Scope:
    """One forward of a module with several converted layers.

    Attributes:
        module: The module, weakly.
        parents: Its names, by which layers know that they belong to it.
        outer: The forward that it runs in, or None.
        input: The last input that was quantized, or the tensor that it is a view of, weakly.
        key: Everything else that its faces depend on.
        cast: Its cast.
        weights: Records of the weights that it is multiplied by.
    """

    __slots__ = ("__weakref__", "cast", "input", "key", "module", "outer", "parents", "weights")

    def __init__(self, module: nn.Module, parents: tuple[str, ...], outer: _Scope | None) -> None:
        self.module, self.parents, self.outer = weakref.ref(module), parents, outer
        self.input: weakref.ref[Tensor] | None = None
        self.key: tuple[object, ...] = ()
        self.cast = SharedCast()
        self.weights: list[WeightRecord] = []

    def cast_of(self, input: Tensor, weight: WeightRecord, how: tuple[object, ...]) -> SharedCast:
        """Return the cast of an input in this forward, or a new one; views of the same elements are the same input."""
        # DTensors give each layer another view of the same elements.
        stream = stream_of(input)  # another one does not wait for the cast
        memory = input.untyped_storage()._cdata  # ``input.data = other`` has no version of its own
        key = (*_place(input), memory, stream, *how)
        owner = _owner(input)
        known = self.input is not None and self.input() is owner and self.key == key
        # A layer that reads a second time gets a new cast, as its input may have been written in between unseen.
        if known and all(weight is not other for other in self.weights):
            self.weights.append(weight)
        else:
            self.key, self.weights, self.cast = key, [weight], SharedCast()
            self.input = _until_death(owner, self)
        return self.cast

    def clear(self) -> None:
        self.input, self.cast, self.weights = None, SharedCast(), []


def _place(input: Tensor) -> tuple[object, ...]:
    """Return a key of the elements of its owner that a tensor views, and its version."""
    lies = input.shape, input.stride(), input.storage_offset()
    return input._version, *lies, input.dtype, input.is_neg()


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
    """Let layers of ``module`` share quantized inputs; ``parent`` is their ``LayerState.parent``."""
    parents = module.__dict__.get(_PARENTS, ())
    module.__dict__[_PARENTS] = tuple(dict.fromkeys([*parents, parent]))
    # torch's private tables: Dynamo guards the key of a hook, which a handle would have of its own for each module, and
    # the arguments of one that is partial, so that every block would be compiled by itself.
    module._forward_pre_hooks[_KEY] = _enter
    module._forward_hooks[_KEY] = _leave
    # Also where forward raises.
    module._forward_hooks_always_called[_KEY] = True


def forget(module: nn.Module) -> None:
    """Undo ``share_between_layers_of``."""
    if module.__dict__.pop(_PARENTS, None) is not None:
        for table in (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._forward_hooks_always_called,
        ):
            table.pop(_KEY, None)


def _enter(module: nn.Module, args: object) -> None:
    if is_traced():
        return
    outer = interrupted = _thread.scope
    while interrupted is not None and interrupted.module() is not module:
        interrupted = interrupted.outer
    if interrupted is not None:  # its former forward: of an interrupt, hooks are not told
        outer = interrupted.outer
    _thread.scope = _Scope(module, module.__dict__[_PARENTS], outer)


def _leave(module: nn.Module, args: object, output: object) -> None:
    if is_traced():
        return
    scope = _thread.scope
    # Forwards that ended in ways that hooks do not see
    while scope is not None and scope.module() is not module:
        scope = scope.outer
    if scope is not None:
        scope.clear()
        _thread.scope = scope.outer


def shared_cast(
    input: Tensor,
    weight: WeightRecord,
    how: tuple[object, ...],
    context: Context,
) -> SharedCast:
    """Return the cast that a layer shares with others of the same input, or a new one; they share it if all that the
    faces depend on, ``how``, is equal."""
    if not context.direct and is_traced():
        return _of_graph(input, (*how, *_mark(context.groups)))
    scope, layer = _thread.scope, weight.layer
    # Outside of what autograd records, an input may be written where nothing counts.
    if scope is None or not _enabled or input.grad_fn is None:
        return SharedCast()
    if not context.direct and dispatch_modes():
        return SharedCast()
    if not isinstance(layer, LayerState) or layer.parent not in scope.parents:
        return SharedCast()
    # Here: offsets that inference mode made have no version.
    return scope.cast_of(input, weight, (*how, *_mark(context.groups)))


def _mark(groups: Groups | None) -> tuple[object, ...]:
    """Return a key that is unique among groups while something refers to it."""
    if groups is None or groups.ends is None:
        return ()
    return groups.num_groups, groups.step, id(groups.ends), groups.ends._version


def _of_graph(input: Tensor, how: tuple[object, ...]) -> SharedCast:
    """Return the cast of an input that layers share in the graph that is traced."""
    # A compiler takes equal casts for one only where it cuts a graph into forward and backward, and not those that wait
    # for different gradients.
    # Dynamo runs this on example tensors before a graph exists, and would keep them alive.
    owner = _owner(input)
    node = node_of(owner)
    if node is None:
        return SharedCast()
    place = str(_place(input))  # comparing extents that are not known would guard them
    key = (node, place, *how)  # versions do not count every write of a graph
    known: tuple[object, SharedCast] | None = _of_graphs.get(owner)
    if known is None or known[0] != key:
        known = _of_graphs[owner] = key, SharedCast()
    return known[1]


_of_graphs: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _until_death(input: Tensor, scope: _Scope) -> weakref.ref[Tensor]:
    """Return a weak reference that releases the faces with ``input``, if they are still its own."""
    within = weakref.ref(scope)

    def forget(reference: weakref.ref[Tensor]) -> None:
        found = within()
        if found is not None and found.input is reference:
            found.clear()

    return weakref.ref(input, forget)
