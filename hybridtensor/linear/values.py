"""Reads of a weight's values for products that are not quantized, with the weight's gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtensor.linear.exported import without_gradient
from hybridtensor.linear.operands import Weight
from hybridtensor.ops.autograd import Function


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
    return without_gradient(values, weight) if torch.compiler.is_exporting() else values


def values_of(weight: Weight) -> Tensor:
    """Return a weight's high-precision data, whose gradient is the weight's."""
    return read(_Values, weight)
