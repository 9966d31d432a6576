"""Snapshot of what a load changes besides the tensors it reads into, so that a failed load changes nothing."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

from hybridtensor.distributed.checkpoint.entries import Entries
from hybridtensor.dtensor import local
from hybridtensor.optim import MasterWeights
from hybridtensor.state.training import layer_states
from hybridtensor.subclasses import HybridTensor
from hybridtensor.subclasses.high_precision import HighPrecisionValues
from hybridtensor.subclasses.structure import flatten

Undo: TypeAlias = Callable[[], object]

_Memory: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]
"""Address, shape, strides and dtype of a tensor."""


class Snapshot:
    """The state of modules, optimizers and stateful objects before a load, except memory in ``places``."""

    def __init__(self, entries: Entries, places: Iterable[Tensor]) -> None:
        # What is read in place is put back by ``Staged``; here it would be copied a second time.
        kept = {_memory(place) for place in places}
        self._undo: list[tuple[str, Undo]] = []
        for entry, module in entries.modules.items():
            self._undo += [(entry, undo) for undo in of_module(module, kept)]
        for entry, optimizer in entries.optimizers.items():
            masters = [local(master) for master in optimizer.masters.values()]
            self._undo += [(entry, undo) for undo in _of_tensors(masters, kept)]
            for one in {id(o): o for o in (optimizer.optimizer, optimizer.inner)}.values():
                self._undo.append((entry, _of_optimizer(one)))
        self._stateful = [
            (entry, _of_stateful(entries.state[entry]))
            for entry, kind in entries.kinds.items()
            if kind == "stateful"
        ]

    def restore(self, begun: Collection[str], error: BaseException) -> None:
        """Restore everything after an error, by ``run_all``; ``begun`` as of ``Restoration``."""
        stateful = [(entry, undo) for entry, undo in self._stateful if entry in begun]
        with torch.no_grad():
            for entry, undo in reversed([*self._undo, *stateful]):
                run_all(f"checkpoint.load: {entry} could not be set back", [undo], error)


def _memory(tensor: Tensor) -> _Memory:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def of_module(module: nn.Module, kept: Collection[_Memory] = ()) -> Iterator[Undo]:
    """Yield functions that restore a module's parameters, buffers, amaxes and extra state, except ``kept`` memory."""
    parts = [local(t).detach() for t in (*module.parameters(), *module.buffers())]
    parts += [state.amax for state in layer_states(module) if state.amax is not None]
    yield from of_parts(parts, kept)
    for part_of in module.modules():
        if type(part_of).get_extra_state is not nn.Module.get_extra_state:
            yield functools.partial(
                part_of.set_extra_state, copy.deepcopy(part_of.get_extra_state())
            )


def of_parts(parts: Iterable[Tensor], kept: Collection[_Memory] = ()) -> Iterator[Undo]:
    """Yield functions that restore the bytes and high-precision values of tensors, plain or of this library."""
    tensors = []
    for part in parts:
        tensors += flatten(part)[0]
        if isinstance(part, HybridTensor):
            values = part.high_precision
            yield of_slots(values)
            tensors += [] if values.current is None else [local(values.current)]
    yield from _of_tensors(tensors, kept)


def _of_tensors(tensors: list[Tensor], kept: Collection[_Memory]) -> Iterator[Undo]:
    others = {_memory(t): t for t in tensors if not t.is_meta and _memory(t) not in kept}
    for tensor in others.values():
        yield functools.partial(tensor.copy_, tensor.to("cpu", copy=True))


def run_all(what: str, undo: Sequence[Undo], error: BaseException) -> None:
    """Undo what was done before an error, the last first; the error gets a note, ``what`` and why, for each that
    refuses."""
    for back in reversed(undo):
        try:
            back()
        except Exception as refused:  # the others can be restored all the same
            error.add_note(f"{what}: {refused}")


def of_slots(holder: HighPrecisionValues) -> Undo:
    """Return a function that restores the attributes of high-precision values."""
    names = [name for name in type(holder).__slots__ if name != "__weakref__"]
    former = {name: getattr(holder, name) for name in names}

    def undo() -> None:
        for name, value in former.items():
            setattr(holder, name, value)
        holder.register()

    return undo


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Undo:
    """Return a function that restores an optimizer's attributes, state and groups, which ``load_state_dict``
    replaces."""
    attributes = dict(vars(optimizer))
    groups = [(group, dict(group)) for group in optimizer.param_groups]
    own = not isinstance(optimizer, MasterWeights)  # whose state is that of the inner one
    state = {p: (of, dict(of)) for p, of in optimizer.state.items()} if own else {}

    def undo() -> None:
        # First: ``load_state_dict`` sets another dictionary as ``state`` (by ``Optimizer.__setstate__``). What is
        # cleared and filled below has to be the former one.
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        for group, former in groups:
            group.clear()
            group.update(former)
        if own:
            optimizer.state.clear()
            for p, (of, former) in state.items():
                of.clear()
                of.update(former)
                optimizer.state[p] = of

    return undo


def _of_stateful(value: Stateful) -> Undo:
    # Deep: a state dict mostly aliases the tensors and dictionaries that a load then overwrites.
    former = copy.deepcopy(value.state_dict())
    return lambda: value.load_state_dict(former)
