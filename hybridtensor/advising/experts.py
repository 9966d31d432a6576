"""Observing the products with stacks of experts' weights while a model runs as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hybridtensor.advising.noise import Noise
from hybridtensor.ops import Face, Groups
from hybridtensor.ops.groups import each_group
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.recipes.spec import GEMMS
from hybridtensor.state import LayerState
from hybridtensor.subclasses import MasterWeight, is_converted
from hybridtensor.subclasses.observing import Observer, observers
from hybridtensor.subclasses.wrapper import WrapperTensor

_ROLES = {gemm.name: (gemm.left[0], gemm.right[0]) for gemm in GEMMS}


def is_measurable(weight: Tensor) -> bool:
    """Return whether products with a stack of weights can be observed."""
    return type(weight) is nn.Parameter or is_converted(weight)


@contextlib.contextmanager
def told_products(stacks: Sequence[Noise], order: Iterator[int]) -> Iterator[None]:
    """Measure the products with stacks of experts' weights while the model runs, whichever function multiplies them."""
    known: dict[int, Noise] = {}
    with contextlib.ExitStack() as stack:
        for one in stacks:
            layer = one.layer
            weight: Any = layer.weight
            if not is_converted(weight):
                stack.callback(setattr, layer.module, layer.parameter, weight)
                setattr(layer.module, layer.parameter, weight := _observable(one))
            known[id(weight.layer)] = one
        observer = _Told(known, order)
        observers.append(observer)
        stack.callback(observers.remove, observer)
        yield


def _observable(one: Noise) -> nn.Parameter:
    """Return an observable parameter with the elements of a plain stack."""
    plain, state = one.layer.weight, LayerState(one.layer.name)
    state.transposed = one.layer.transposed
    made = MasterWeight(plain.detach(), HybridConfig.parse("bf16"))
    made.layer = state
    return nn.Parameter(made, requires_grad=plain.requires_grad)


class _Told(Observer):
    """Observer of products with stacks, which are identified by their ``LayerState``."""

    def __init__(self, stacks: Mapping[int, Noise], order: Iterator[int]) -> None:
        self._stacks, self._order = stacks, order
        self._calls: dict[int, tuple[object, dict[str, Tensor]]] = {}
        self._now: object = None

    def observe_operand(self, layer: object, role: str, values: Tensor, call: object) -> None:
        if id(layer) in self._stacks:
            self._now = call
            known = values.dequantize() if isinstance(values, WrapperTensor) else values
            # the call is held, so that no other one gets its address
            self._calls.setdefault(id(call), (call, {}))[1][role] = known.detach()

    @torch.no_grad()
    def observe_product(
        self, layer: object, gemm: str, left: Face, right: Face, dtype: torch.dtype
    ) -> None:
        one, (_, operands) = self._stacks.get(id(layer)), self._calls.get(id(self._now), (None, {}))
        if one is None:
            return
        if gemm == "output":
            one.begin(self._order)
        for own in _by_expert({role: operands[role] for role in _ROLES[gemm]}, left.groups):
            one.add(gemm, own)
        if gemm == "grad_weight" or self._now is None:
            self._calls.pop(id(self._now), None)


def _by_expert(
    operands: Mapping[str, Tensor], groups: Groups | None
) -> Iterator[dict[str, Tensor]]:
    """Yield the operands of each expert that has tokens; all, if they are those of one."""
    if groups is None:
        yield {role: values.reshape(-1, values.shape[-1]) for role, values in operands.items()}
        return
    rows = next(values.shape[0] for role, values in operands.items() if role != "weight")
    for group in each_group(groups, rows):
        if group.start < group.stop:
            yield {
                role: values[group.number] if role == "weight" else values[group.start : group.stop]
                for role, values in operands.items()
            }
