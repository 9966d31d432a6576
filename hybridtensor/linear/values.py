"""From a weight to its values, and from values to a weight, with gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hybridtensor.linear.exported import without_gradient
from hybridtensor.linear.operands import Weight
from hybridtensor.ops.autograd import Function
from hybridtensor.ops.library import is_exporting
from hybridtensor.quantizers import IdentityQuantizer
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.state import LayerState
from hybridtensor.state.tensors import layer_of
from hybridtensor.subclasses import HybridTensor, MasterWeight
from hybridtensor.subclasses.observing import observe_read
from hybridtensor.subclasses.operators.hybrid_values import values_to_read


class _Values(Function):
    """Autograd function from a weight to its high-precision data; the gradient is the weight's."""

    @staticmethod
    def forward(ctx: object, weight: Weight) -> Tensor:
        return weight.dequantize().detach()

    @staticmethod
    def backward(ctx: object, grad_output: Tensor) -> Tensor:
        return grad_output


def read(function: type[Function], weight: Weight) -> Tensor:
    """Return a weight's values by an autograd function, whose result has no gradient in an exported program."""
    values: Tensor = function.apply(weight)
    return without_gradient(values, weight) if is_exporting() else values


def values_of(weight: Weight) -> Tensor:
    """Return a weight's high-precision data, whose gradient is the weight's."""
    return read(_Values, weight)


def as_read(weight: Weight, reader: str, in_training: bool = False) -> Tensor:
    """Return a weight's values for a function that computes with them, as operators that read a weight get them.

    Args:
        weight: The weight.
        reader: Name of the function.
        in_training: Whether what it computes has a gradient.

    Raises:
        NotImplementedError: For a persistent parameter; see ``values_to_read``.
    """
    if isinstance(weight, HybridTensor):
        return values_to_read(weight, reader, in_training)
    observe_read(weight, reader, in_training=in_training)
    return values_of(weight)


@contextlib.contextmanager
def as_weight(weight: Weight) -> Iterator[None]:
    """Quantize products of a weight, or of ``weight.data``, while a layer has it, as by ``functional_call``."""
    before, weight.is_data = weight.is_data, False
    try:
        yield
    finally:
        weight.is_data = before


def as_master_weight(values: Tensor, config: HybridConfig, state: LayerState) -> MasterWeight:
    """Return a plain tensor as a weight with a layer's recipe and state, with gradients.

    Raises:
        TypeError: If a weight is quantized that is a tensor of another library, such as torchao's quantized ones, or a
            DTensor.
    """
    if isinstance(values, DTensor) and not isinstance(config.weight, IdentityQuantizer):
        raise TypeError(
            f"linear: the weight of {layer_of(state)} is a DTensor of plain values, as redistribute makes one where it "
            "communicates; call quantize_ again, which converts it"
        )
    # torch's other subclasses are not quantized: what a functional collective returns.
    is_foreign = not type(values).__module__.startswith("torch.")
    is_quantized = is_foreign and is_traceable_wrapper_subclass(values)
    if is_quantized and not isinstance(config.weight, IdentityQuantizer):
        raise TypeError(
            f"linear: a plain tensor is required at the weight of {layer_of(state)}, got {type(values).__name__}, "
            "which would be quantized again; call plain_ before another library quantizes the layer, or leave it out "
            "of quantize_ (keep_bf16)"
        )
    made: MasterWeight = _AsMasterWeight.apply(values, config)
    made.record.layer = state
    return made


class _AsMasterWeight(Function):
    """Autograd function that gives a plain tensor a recipe, with gradients."""

    @staticmethod
    def forward(ctx: object, values: Tensor, config: HybridConfig) -> MasterWeight:
        return MasterWeight(values.detach(), config)

    @staticmethod
    def backward(ctx: object, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output, None
