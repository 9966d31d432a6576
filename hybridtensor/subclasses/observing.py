"""Observers of how weights are used: ``hybridtensor.check``, and ``hybridtensor.watch`` in sampled steps."""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridtensor.ops import Face, Groups, select_backend
from hybridtensor.ops.reencoding import reencodes
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.recipes.spec import GEMMS
from hybridtensor.state import Context, LayerState, StateTensors


class Observer:
    """Base class of what is called at each use of a weight; by itself it records nothing."""

    def observe_operand(self, layer: object, role: str, values: Tensor, call: object) -> None:
        """Record an operand before quantization; ``layer`` is the layer's state, ``call`` identifies a forward and
        its backward."""

    def observe_product(
        self, layer: object, gemm: str, left: Face, right: Face, dtype: torch.dtype
    ) -> None:
        """Record a product; ``layer`` is the layer's state, ``gemm`` ``output``, ``grad_input`` or ``grad_weight``."""

    def observe_read(self, layer: object, reader: str) -> None:
        """Record that ``reader`` read a weight in high precision; ``layer`` is the layer's state."""


class Read(NamedTuple):
    """A read of a weight's values: the operator, and whether a graph was traced, and not run, with it."""

    reader: str
    in_graph: bool


observers: list[Observer] = []
"""The present observers; mostly none."""

unmultiplied: weakref.WeakKeyDictionary[LayerState, Read] = weakref.WeakKeyDictionary()
"""First read of a weight in a training step, by the state of a layer no product of which ran until then."""

NO_VALUES = ("_like.", "is_pinned", "is_same_size", "is_set_to")
"""Parts of the names of operators that look at shapes or memory only."""


def may_hold_values(dtype: torch.dtype, groups: Groups | None) -> bool:
    """Return whether faces that only products read may hold dequantized values: not if observed or grouped."""
    # Observers and grouped products need elements; in other dtypes a product with one high-precision operand would
    # round the dequantized values.
    return dtype == torch.bfloat16 and groups is None and not observers


def for_products_of_weight(
    context: Context, dtype: torch.dtype, config: HybridConfig, device: torch.device
) -> Context:
    """Return the context of a weight whose faces only products read: elements where its product re-encodes them for
    the device's matrix units, else values if these may be held."""
    if not may_hold_values(dtype, context.groups):
        return context.with_values((False, False))
    return context.with_values(_weight_values(config, device))


@functools.lru_cache(maxsize=1024)
def _weight_values(config: HybridConfig, device: torch.device) -> tuple[bool, bool]:
    """Return whether no product re-encodes the rowwise and the columnwise face of a weight."""
    output, grad_input, _ = (config.formats(gemm) for gemm in GEMMS)
    row, column = (
        reencodes(*pair) and select_backend(*pair, torch.bfloat16, device).name == "native"
        for pair in (output, grad_input)
    )
    return not row, not column


def traced_layer(layer: StateTensors | None) -> LayerState | None:
    """Return the state of the layer that a graph is being traced for; None if it is unknown."""
    found = None if layer is None or layer.traced is None else layer.traced.layer()
    return found if isinstance(found, LayerState) else None


def is_multiplied(state: LayerState, *, in_graph: bool) -> bool:
    """Return whether a layer's weight was multiplied, or may have been; ``in_graph`` if it was read in a graph that was
    traced for this layer, whose products are known."""
    return state.multiplied or (state.is_in_graphs and not in_graph)


def observe_operand(layer: object, role: str, values: Tensor, call: object) -> None:
    """Pass an operand to every observer."""
    for observer in observers:
        observer.observe_operand(layer, role, values, call)


def observe_product(layer: object, gemm: str, left: Face, right: Face, dtype: torch.dtype) -> None:
    """Pass a product to every observer."""
    for observer in observers:
        observer.observe_product(layer, gemm, left, right, dtype)


def observe_read(weight: Any, reader: object, *, in_training: bool = False) -> None:
    """Record which operator read a weight in high precision, and pass it to every observer; ``in_training`` if what is
    computed of it has a gradient."""
    layer = weight.record.layer
    for observer in observers:
        observer.observe_read(layer, str(reader))
    in_graph = not isinstance(layer, LayerState)
    state = traced_layer(layer) if in_graph else layer
    # Optimizers read without gradients, logs and averages a detached alias. The part in a DTensor is neither.
    if (
        state is not None
        and not is_multiplied(state, in_graph=in_graph)
        and torch.is_grad_enabled()
        and (
            in_training
            or weight.requires_grad
            or isinstance(weight, nn.Parameter)
            or isinstance(weight._base, nn.Parameter)  # a view of a frozen one
            or weight.record.section
        )
        and not any(name in str(reader) for name in NO_VALUES)
        # Embeddings share matrices with layers of nn.Linear; rows of a flattened stack are copies of its experts
        and not ("embedding" in str(reader) and state.transposed is None)
    ):
        unmultiplied.setdefault(state, Read(str(reader), in_graph))
