"""Quantizing the gradient of a layer's output where it is computed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridtensor import ops
from hybridtensor.linear.operands import WEIGHTS
from hybridtensor.linear.products import Backward
from hybridtensor.linear.readers import quantized_tensor
from hybridtensor.linear.two_parts import requested_gradients, will_run
from hybridtensor.ops import CastInputs
from hybridtensor.ops.cast.swiglu_gradients import cast_swiglu_gradients, scales_are_known
from hybridtensor.ops.library import runs_directly
from hybridtensor.ops.swiglu import swiglu_backward
from hybridtensor.quantizers import CastPlan, cast_plan, tokens
from hybridtensor.state import Context
from hybridtensor.subclasses import HybridTensor
from hybridtensor.subclasses.observing import may_hold_values, observers
from hybridtensor.subclasses.record import ReadBy

Output = weakref.ref[Tensor] | None
"""What a layer returned, if the gradient may be quantized for it."""


def output_of(layer: nn.Module, y: Tensor) -> Output:
    """Return a reference to ``y``, or None if no call of ``layer`` returned it, or it needs the gradient's values."""
    backward: object = getattr(y.grad_fn, "products", None)
    if not isinstance(backward, Backward) or backward.layer is None or not y.numel():
        return None
    weight = layer._parameters.get("weight")
    if not isinstance(weight, WEIGHTS) or weight.record.layer is not backward.layer:
        return None
    # The gradient of a bias is a sum of values.
    needs_values = backward.needs.bias or backward.context.groups is not None
    return None if needs_values or _has_hooks(y) else weakref.ref(y)


def _has_hooks(y: Tensor) -> bool:
    """Return whether hooks of a tensor, or its ``grad``, get its gradient."""
    # ``_backward_hooks`` is private: public methods add hooks, none lists them.
    return bool(y._backward_hooks) or y.retains_grad


class OutputGradient(NamedTuple):
    """How the call of a layer quantizes the gradient of its output."""

    plan: CastPlan
    context: Context

    @classmethod
    def of(cls, node: Any, output: Output, grad: Tensor) -> OutputGradient | None:
        """Return how the call that ``node`` is of quantizes a gradient like ``grad``.

        None if it needs the values, is not reached by the backward that runs or not by all of it, or would gain
        nothing.
        """
        y = None if output is None else output()
        if output is None or (y is not None and _has_hooks(y)) or not will_run(node):
            return None
        products: Backward = node.products
        context, needs, dtype = products.context, products.needs, grad.dtype
        if requested_gradients(node, needs, context.state) != needs:
            return None  # the other part of a backward in two begins with this gradient, and needs another face
        values = may_hold_values(dtype, context.groups)
        context = context.of_gradient(None, values, direct=True)
        quantizer = products.config.grad_output
        plan = cast_plan(quantizer, needs.input, needs.weight, dtype, context, grad.device)
        if plan is None or not plan.gains_by_fusing(grad.device):
            return None
        known = plan.scales_by_amax or scales_are_known(plan.request)
        return cls(plan, context) if known else None

    def inputs(self, grad: Tensor, amax: Tensor | None) -> CastInputs:
        """Prepare the inputs of the cast of a gradient ``[M, N]``; ``amax`` is its with current scaling, else None."""
        return self.plan.inputs(grad, self.context, (amax, amax))

    def cast(self, grad: Tensor, amax: Tensor | None) -> HybridTensor:
        """Quantize the gradient ``[..., N]``; ``amax`` is its own with current scaling, else None."""
        matrix = tokens(grad)
        inputs = self.inputs(matrix, amax)
        cast = ops.prepare(matrix, self.plan.request, inputs, direct=True)
        return quantized_tensor(cast.run(matrix, inputs), grad.shape, grad.dtype, _NOBODY)


_NOBODY = ReadBy((), None)
"""Readers of a gradient besides the layer's backward, which need none."""


def swiglu_gradients(
    grad: Tensor, gate: Tensor, up: Tensor, nodes: Sequence[Any], outputs: Sequence[Output]
) -> Sequence[Tensor]:
    """Return the gradients of ``gate`` and ``up``, or one of both together if there is one output; quantized for the
    layers that returned these.

    Args:
        grad: Gradient of ``silu(gate) * up``, ``[..., N]`` as both.
        gate, up: See ``ops.swiglu``.
        nodes: What computed each output, in autograd's graph.
        outputs: See ``output_of``.
    """
    # Anomaly mode looks for NaN in values.
    if observers or not runs_directly(grad) or torch.is_anomaly_enabled():
        outputs = [None] * len(outputs)
    found = [OutputGradient.of(node, y, grad) for node, y in zip(nodes, outputs, strict=True)]
    known = [one for one in found if one is not None]
    packed = len(outputs) == 1
    if grad.is_cuda and len(known) == len(found) and scales_are_known(known[0].plan.request):
        matrices = tokens(grad), tokens(gate), tokens(up)
        inputs = [one.inputs(matrices[0], None) for one in known]
        faces = cast_swiglu_gradients(*matrices, [one.plan.request for one in known], inputs)
        if faces is not None:
            *rows, columns = grad.shape
            shape = torch.Size((*rows, 2 * columns if packed else columns))
            return [quantized_tensor(made, shape, grad.dtype, _NOBODY) for made in faces]
    measure = any(one.plan.scales_by_amax for one in known)
    computed = swiglu_backward(grad, gate, up, packed, measure)
    amaxes = computed[len(found) :] if measure else [None] * len(found)
    return [
        x if one is None else one.cast(x, amax if one.plan.scales_by_amax else None)
        for x, amax, one in zip(computed[: len(found)], amaxes, found, strict=True)
    ]
