"""Quantizing the gradient of a layer's output where it is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybridtensor import ops
from hybridtensor.linear.operands import WEIGHTS
from hybridtensor.linear.products import Backward
from hybridtensor.ops import CastInputs, Faces
from hybridtensor.ops.cast.swiglu_gradients import cast_swiglu_gradients, reads_swiglu_once
from hybridtensor.ops.library import runs_directly
from hybridtensor.ops.swiglu import swiglu_backward
from hybridtensor.quantizers import CastPlan, cast_plan, tokens
from hybridtensor.state import Context
from hybridtensor.subclasses import HybridTensor
from hybridtensor.subclasses.faces import face_tensor
from hybridtensor.subclasses.observing import observers, values_of_products


class OutputGradient(NamedTuple):
    """How a call of a layer quantizes the gradient of its output."""

    plan: CastPlan
    context: Context

    @classmethod
    def of(cls, layer: nn.Module, y: Tensor) -> OutputGradient | None:
        """Return how a layer quantizes the gradient of ``y``; None if ``y`` is not as the layer returned it, somebody
        else reads its gradient, or quantizing where it is computed saves no pass."""
        weight = layer._parameters.get("weight")
        backward: object = getattr(y.grad_fn, "products", None)
        if not isinstance(weight, WEIGHTS) or not isinstance(backward, Backward):
            return None
        if weight.record.layer is None or backward.layer is not weight.record.layer:
            return None
        # The gradient's hooks, and the sum that is a bias's gradient, read values. ``_backward_hooks`` is private:
        # public methods add hooks, none lists them.
        if y._backward_hooks or y.retains_grad or backward.needs.bias:
            return None
        context, dtype = backward.context, y.dtype
        if context.groups is not None or observers or not y.numel():
            return None
        values = values_of_products(context, dtype, row=True, column=True)
        context = context.of_gradient(None, values, direct=True)
        of_input, of_weight, _ = backward.needs
        plan = cast_plan(backward.config.grad_output, of_input, of_weight, dtype, context, y.device)
        if plan is None or not plan.gains_by_fusing(y.device):
            return None
        if not (plan.scales_by_amax or reads_swiglu_once(plan.request)):
            return None
        return cls(plan, context)

    def inputs(self, grad: Tensor, amax: Tensor | None) -> CastInputs:
        """Return what the cast of the gradient needs, given the ``amax`` that it is scaled by, if any."""
        row, column = (cast and amax for cast in self.plan.request[:2])
        return self.plan.inputs(grad, self.context, (row, column))

    def cast(self, grad: Tensor, amax: Tensor | None) -> HybridTensor:
        """Quantize the gradient ``[..., N]``, scaled by its ``amax`` if it is scaled by one."""
        matrix = tokens(grad)
        inputs = self.inputs(matrix, amax)
        cast = ops.prepare(matrix, self.plan.request, inputs, direct=True)
        return _as_tensor(cast.run(matrix, inputs), grad.shape, grad.dtype)


def swiglu_gradients(
    grad: Tensor, gate: Tensor, up: Tensor, of: Sequence[OutputGradient | None]
) -> Sequence[Tensor]:
    """Return the gradients of ``gate`` and ``up``, or one of both together if ``of`` is one, quantized as it says.

    Args:
        grad: Gradient of ``silu(gate) * up``, ``[..., N]`` as both.
        gate, up: What the layers returned; see ``ops.swiglu``.
        of: How each gradient is quantized; None stays values.
    """
    # Anomaly mode looks for NaN in values.
    if observers or not runs_directly(grad) or torch.is_anomaly_enabled():
        of = [None] * len(of)
    packed, known = len(of) == 1, [one for one in of if one is not None]
    if grad.is_cuda and len(known) == len(of) and _is_one_cast(known):
        matrices = tokens(grad), tokens(gate), tokens(up)
        inputs = [one.inputs(matrices[0], None) for one in known]
        faces = cast_swiglu_gradients(*matrices, known[0].plan.request, inputs)
        if faces is not None:
            *rows, columns = grad.shape
            shape = torch.Size((*rows, 2 * columns if packed else columns))
            return [_as_tensor(made, shape, grad.dtype) for made in faces]
    measure = any(one.plan.scales_by_amax for one in known)
    found = swiglu_backward(grad, gate, up, packed, measure)
    amaxes = found[len(of) :] if measure else [None] * len(of)
    return [
        x if one is None else one.cast(x, amax if one.plan.scales_by_amax else None)
        for x, amax, one in zip(found[: len(of)], amaxes, of, strict=True)
    ]


def _is_one_cast(known: list[OutputGradient]) -> bool:
    """Return whether one kernel can compute and cast all gradients."""
    request = known[0].plan.request
    return reads_swiglu_once(request) and all(one.plan.request == request for one in known)


def _as_tensor(faces: Faces, shape: torch.Size, dtype: torch.dtype) -> HybridTensor:
    row, column = faces
    return HybridTensor(face_tensor(row, -1, shape, dtype), face_tensor(column, 0, shape, dtype))
