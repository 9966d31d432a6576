"""Errors of calls that a linear layer could not quantize, or not as its recipe says."""

from __future__ import annotations

from torch import Tensor

from hybridtensor.linear.operands import Weight, uses_other_layout
from hybridtensor.ops.library import backward_that_runs, is_traced
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.state import LayerState, StateTensors, layer_of


def quantizes(config: HybridConfig) -> bool:
    """Return whether an operand of a recipe is not in high precision."""
    quantizers = config.input, config.weight, config.grad_output
    formats = [fmt for q in quantizers for fmt in (q.rowwise_format, q.columnwise_format)]
    return not all(fmt.is_identity for fmt in formats)


def require_no_gradient(weight: Weight) -> None:
    """Raise NotImplementedError for ``grad @ weight`` in the backward of another autograd function, which computes
    ``grad_weight`` unquantized."""
    if is_traced() or backward_that_runs() == -1:  # no backward runs
        return
    if uses_other_layout(weight):
        raise NotImplementedError(
            f"linear: the backward of an autograd function multiplies by the weight of {layer_of(weight.state)} "
            "itself, where its gradient would not be quantized; call F.linear, whose three products are"
        )


def require_one_derivative(
    needs_input_grad: tuple[bool, ...], grad_output: Tensor, state: StateTensors | None
) -> None:
    """Raise NotImplementedError under ``create_graph=True`` if gradients depend on tensors that require a gradient.

    ``needs_input_grad`` is autograd's, of bias, input, weight and call.
    """
    # Here, not in a second backward: torch's ``once_differentiable`` only looks at ``grad_output``, and its error node
    # is not reached by ``torch.autograd.grad`` of the other operands, which would return zeros.
    _, of_input, of_weight, _ = needs_input_grad
    if grad_output.requires_grad or (of_input and of_weight):
        raise NotImplementedError(
            f"linear: create_graph=True differentiates gradients of {layer_of(state)} again, "
            "whose quantized products have no second derivative; call plain_ on a copy of the model"
        )


def require_high_precision(config: HybridConfig, state: StateTensors | None) -> None:
    """Raise NotImplementedError unless a layer multiplies high precision, of which torch computes several gradients at
    once."""
    if quantizes(config):
        raise NotImplementedError(
            f"linear: is_grads_batched=True or vmap computes several gradients of {layer_of(state)} "
            "at once, for which quantized products have no rule; call torch.autograd.grad once for each"
        )


def refuse_other_layout(state: LayerState | StateTensors) -> None:
    """Raise ValueError for a weight that is multiplied in another layout than ``quantize_`` recorded."""
    stored, product = ("[in, out]", "x @ weight") if state.transposed else ("[out, in]", "F.linear")
    raise ValueError(
        f"linear: the weight of {layer_of(state)} is stored {stored}, which {product} multiplies, and "
        "was used in the other layout; have the module's is_transposed say how it is stored, or leave it "
        "out of quantize_ (keep_bf16)"
    )
