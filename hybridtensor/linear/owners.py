"""Whose state a weight goes by: that of the layer which has it, also where it came from another layer.

``torch.utils.swap_tensors`` exchanges weights with everything that they carry, and an assignment puts the weight of one
layer into another one. A weight that several layers have goes by the state of one of them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from hybridtensor.linear.operands import Weight
from hybridtensor.ops.library import outside_graphs
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.state import LayerState, StateTensors
from hybridtensor.subclasses.op_table import Args, Kwargs
from hybridtensor.subclasses.owners import is_of, owner_of


def go_by(state: LayerState, weight: Weight, config: HybridConfig, module: nn.Module) -> None:
    """Let a weight of ``module`` that has another state go by ``state``, unless it is shared with that one's module.

    Args:
        state: State of the module's weight.
        weight: The weight that is there.
        config: Recipe of the module; a weight of another one keeps its recipe and state.
        module: The module.
    """
    record, before = weight.record, weight.record.layer
    record.is_new = 0  # a layer has it: no adapter's
    if weight.config != config or isinstance(before, StateTensors):  # which a graph has
        return
    if is_shared(weight, module):
        return
    record.layer = state
    record.changes += 1  # faces may be of other scales


def is_shared(weight: Weight, module: nn.Module) -> bool:
    """Return whether a weight of ``module`` goes by the state of another module, which has it, too."""
    state = weight.record.layer
    if not isinstance(state, LayerState) or owner_of(state) is module:
        return False
    return is_of(state, weight.record)


# A graph cannot let it go by the layer's state, and its products would stay plain there, as an adapter's.
@outside_graphs(
    "a factory, such as new_zeros, made the weight of a converted layer of another weight"
)
def in_eager_code(forward: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
    """Call the forward of a layer outside of graphs."""
    return forward(*args, **kwargs)
