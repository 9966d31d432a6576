"""The linear layer as one autograd function.

It saves plain tensors for backward: one columnwise face per operand that backward uses, or the input if backward has
it anyway. Which tensors depends on the recipe, on the operands that need a gradient and on the operation that produced
the input, but is the same in a first forward and in a recomputation. Hooks on saved tensors (offload, recomputation)
see FP8 data, and always the same number of tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from hybridtensor.arguments import require_kind, require_tensor, wrong
from hybridtensor.linear.exported import as_exported, without_gradient
from hybridtensor.linear.input_operands import input_operand
from hybridtensor.linear.operands import (
    QUANTIZED,
    WEIGHTS,
    Needs,
    Operand,
    Weight,
    uses_other_layout,
)
from hybridtensor.linear.products import (
    Backward,
    committed_alone,
    graph_amaxes,
    output,
    plain_output,
    plain_part,
    with_shape,
)
from hybridtensor.linear.refusals import (
    quantizes,
    refuse_other_layout,
    require_high_precision,
    require_no_gradient,
    require_one_derivative,
)
from hybridtensor.linear.two_parts import requested_gradients
from hybridtensor.linear.weight_operands import weight_operand
from hybridtensor.ops import Groups
from hybridtensor.ops.amaxes import ReturnedAmaxes
from hybridtensor.ops.autograd import Ctx, Function
from hybridtensor.ops.library import (
    is_batched,
    is_exporting,
    is_traced,
    outside_graphs,
    runs_directly,
)
from hybridtensor.ops.order import in_backward, node_of, require_node
from hybridtensor.quantizers import tokens
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.state import Context, LayerState, layer_of
from hybridtensor.subclasses import HybridTensor
from hybridtensor.subclasses.observing import (
    may_hold_values,
    observe_operand,
    observe_product,
    observers,
    traced_layer,
)
from hybridtensor.subclasses.operators.matmul import require_reader

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NOTHING = contextlib.nullcontext()
_NO_GRADIENTS = Needs(False, False, False)


class _Call(NamedTuple):
    """The non-differentiable arguments of one call.

    Attributes:
        config: The recipe.
        needs: Which gradients backward will be asked for.
        dtype: Dtype of the computation: the weight's, or autocast's.
        context: The input's context, with what holds of the whole call: the layer's state, ``record``, ``direct``.
        of_weight: The weight's context.
        cast_from: The input before autocast cast it, by which sibling layers share its cast.
        operand: The input's faces, if another function made them.
    """

    config: HybridConfig
    needs: Needs
    dtype: torch.dtype
    context: Context
    of_weight: Context
    cast_from: Tensor
    operand: Operand | None


def linear(
    input: Tensor, weight: Weight, bias: Tensor | None = None, *, operand: Operand | None = None
) -> Tensor:
    """Return ``input @ weight.T + bias`` with the products quantized as ``weight.config`` says.

    ::

        y = ht.linear.linear(x, layer.weight, layer.bias)  # F.linear calls it

    Args:
        input: ``[..., in_features]``, of the weight's dtype (under autocast: any floating dtype); or a ``HybridTensor``
            that was quantized before, whose faces are then used as they are.
        weight: ``[out_features, in_features]``.
        bias: ``[out_features]`` or None.
        operand: The faces of the input, if another function already made them, such as a norm that quantizes its
            output: the rowwise face, and the columnwise face if the weight needs a gradient.

    Returns:
        ``[..., out_features]``, in the weight's dtype (under autocast: in autocast's).

    Raises:
        NotImplementedError: In a ``torch.func`` transform.
        TypeError: If the input is not a dense floating-point tensor, or another argument of the wrong kind.
        ValueError: If shapes, dtypes or devices do not match, or a required face is missing.
    """
    require_plain_autograd(input)
    if not isinstance(weight, WEIGHTS):
        raise wrong("linear", "a weight of quantize_", weight, "call F.linear for others")
    if operand is not None:
        require_kind("linear", "a linear.Operand", operand, Operand)
    device_type = weight.device.type
    autocast = device_type != "meta" and torch.is_autocast_enabled(device_type)
    dtype = weight.dtype
    if autocast and isinstance(input, Tensor) and input.is_floating_point():
        dtype = torch.get_autocast_dtype(device_type)
    _check(input, weight, bias, None if autocast else dtype)
    return quantized_linear(input, weight, bias, dtype, operand=operand)


def quantized_linear(
    input: Tensor,
    weight: Weight,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    operand: Operand | None = None,
    groups: Groups | None = None,
) -> Tensor:
    """Return the product of checked operands, quantized as ``weight.config`` says.

    Args:
        input, bias, operand: See ``linear``; with groups, the input is tokens ``[T, in_features]``.
        weight: See ``linear``; with groups, a stack ``[E, out_features, in_features]``.
        dtype: Dtype of the computation.
        groups: Which tokens belong to which weight of the stack.
    """
    config = weight.config or weight.recipe  # which raises
    if isinstance(input, HybridTensor):
        require_reader("linear", input, weight)
    if dtype not in _DTYPES or weight.dtype not in _DTYPES:  # autocast leaves float64 as it is
        raise TypeError(
            f"linear: bfloat16, float16 or float32 is required, got the weight of {layer_of(weight.record.layer)} in "
            f"{weight.dtype}; cast the model"
        )
    cast_from = input  # under autocast each layer gets a copy of its own below
    if input.dtype != dtype and not isinstance(input, QUANTIZED):
        input = input.to(dtype)  # the weight is not cast: one rounding, when it is quantized
    bias = None if bias is None else bias.to(dtype)
    direct = runs_directly(input)
    exported = not direct and is_exporting()
    grad = torch.is_grad_enabled() and not exported
    if not grad and weight.dim() == 2:
        require_no_gradient(weight)
    of_bias = bias is not None and bias.requires_grad
    needs = Needs(input.requires_grad, weight.requires_grad, of_bias) if grad else _NO_GRADIENTS
    of_weight = weight.context
    state = of_weight.state
    if grad and state is not None and state.step_record is not None:
        before = input.record.amaxes if isinstance(input, HybridTensor) else None
        of_graph = isinstance(before, ReturnedAmaxes)
        # Provisional amaxes of this forward: if a backward follows, only that commits them.
        state = state._replace(amax=before) if of_graph else state.provisional()
    context = Context(
        "input",
        state,
        record=grad,
        section=of_weight.section,
        groups=groups,
        values=(may_hold_values(dtype, groups), False),
        direct=direct,
    )
    call = _Call(config, needs, dtype, context, of_weight, cast_from, operand)
    if not (needs.input or needs.weight or needs.bias):
        out, x, w = _forward(input, as_exported(weight) if exported else weight, bias, call)
        w.save()  # frees faces that nothing uses again
        out = committed_alone(out, x, w, context) if grad else out
        return without_gradient(out, cast_from, weight, bias) if exported else out
    return _Linear.apply(bias, input, weight, call)  # type: ignore[no-any-return]


def require_plain_autograd(input: object = None) -> None:
    """Raise NotImplementedError in a ``torch.func`` transform, in ``torch.jit.trace``, or for an ``input`` that
    forward-mode differentiation follows."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "linear: quantized products have no rule for torch.func transforms (vmap, grad, jvp); call plain_ on a "
            "copy of the model, or loop"
        )
    followed = forward_ad._current_level >= 0 and isinstance(input, Tensor)
    if followed and forward_ad.unpack_dual(input).tangent is not None:
        raise NotImplementedError(
            "linear: quantized products have no rule for forward-mode differentiation (torch.autograd.forward_ad); "
            "call plain_ on a copy of the model"
        )
    if torch._C._is_tracing():
        raise NotImplementedError(
            "linear: torch.jit.trace cannot record quantized products; use torch.compile or torch.export, or call "
            "plain_ on a copy of the model"
        )


def _forward(
    input: Tensor, weight: Weight, bias: Tensor | None, call: _Call
) -> tuple[Tensor, Operand, Operand]:
    needs, dtype = call.needs, call.dtype
    x = call.operand
    if x is None:
        x = input_operand(input, call.cast_from, weight, call.config, needs, call.context)
    w = weight_operand(weight, needs, dtype, call.context, call.of_weight)
    left, right = x.rowwise(), w.rowwise()
    layer = weight.record.layer
    multiplied = layer if isinstance(layer, LayerState) else traced_layer(layer)
    if multiplied is not None:
        # Module.__setattr__ would look through parameters first
        multiplied.__dict__["multiplied"] = True
    if observers:
        key = x if any(needs) else None
        observe_operand(layer, "input", input, key)
        observe_operand(layer, "weight", weight, key)
        observe_product(layer, "output", left, right, dtype)
    if left.format.is_identity and right.format.is_identity and left.groups is None:
        # Under autocast the plain module multiplies a cast of the weight, which no_grad cuts off.
        trained = needs.weight if weight.dtype != dtype else weight.requires_grad
        return plain_output(input, right.qdata, bias, dtype, trained), x, w
    out = output(left, right, bias, dtype, call.context.direct)
    shape = (*input.shape[:-1], weight.shape[-2])
    return (out if out.shape == shape else with_shape(out, shape)), x, w


class _Ctx(Ctx):
    """What forward passes to backward."""

    products: Backward
    has_groups: bool
    num_amaxes: int
    traced: bool
    nodes: Sequence[fx.Node | None]
    input_shape: torch.Size
    input_contiguous: bool


class _Linear(Function):
    # The bias first, as in addmm: autograd accumulates gradients in this order, which data parallelism packs them by.
    @staticmethod
    def forward(
        ctx: _Ctx, bias: Tensor | None, input: Tensor, weight: Weight, call: _Call
    ) -> Tensor:
        out, x, w = _forward(input, weight, bias, call)
        layer = weight.record.layer
        ctx.products, saved = Backward.save(x, w, call.config, call.needs, call.context, layer)
        groups, traced = call.context.groups, not call.context.direct and is_traced()
        # Saved below, so that autograd detects writes of their ends
        ctx.has_groups = groups is not None
        amaxes = graph_amaxes(call.context.state) if traced else []
        ctx.num_amaxes = len(amaxes)
        # In this order: backward pops them from the end.
        ctx.save_for_backward(*saved, *([] if groups is None else [groups.ends]), *amaxes)
        ctx.traced = traced
        ctx.nodes = [node_of(tensor) for tensor in saved] if traced else ()
        ctx.input_shape, ctx.input_contiguous = input.shape, input.is_contiguous()
        return out

    @staticmethod
    def backward(ctx: _Ctx, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.traced and torch.compiler.is_dynamo_compiling():  # compiled autograd
            return _in_eager_code(ctx, grad_output)
        return _backward(ctx, grad_output)


def _backward(ctx: _Ctx, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    products, state = ctx.products, ctx.products.context.state
    if torch.is_grad_enabled():
        require_one_derivative(ctx.needs_input_grad, grad_output, state)
    saved = list(ctx.saved_tensors)
    for tensor, node in zip(saved, ctx.nodes, strict=False):
        require_node(tensor, node)
    amaxes = [saved.pop() for _ in range(ctx.num_amaxes)] if ctx.num_amaxes else []
    if ctx.has_groups:
        products = products.with_ends(saved.pop())
    is_quantized = isinstance(grad_output, HybridTensor)
    grad = grad_output if is_quantized else tokens(grad_output)
    direct = runs_directly(plain_part(grad) if is_quantized else grad)
    if not direct and is_batched(grad_output):
        require_high_precision(products.config, state)
    asked, traced = products.needs, not direct and is_traced()
    if not traced:
        asked = requested_gradients(ctx, asked, state)
    stays = in_backward() if traced else _NOTHING  # FSDP2 gathers faces after a graph's forward
    with torch._C.DisableTorchFunctionSubclass(), stays:  # attributes would pass through
        gradients = products.gradients(grad, saved, amaxes, asked, direct)
    grad_input, grad_weight, grad_bias = gradients
    if grad_input is not None:
        grad_input = grad_input.view(ctx.input_shape)
    if grad_bias is not None and not ctx.input_contiguous and grad_output.dim() > 2:
        # The sum of the plain layer, bit for bit
        grad_bias = grad_output.sum(dim=tuple(range(grad_output.dim() - 1)))
    return grad_bias, grad_input, grad_weight, None


_in_eager_code = outside_graphs("the forward of a layer ran in eager code")(_backward)


def _check(input: Tensor, weight: Weight, bias: Tensor | None, dtype: torch.dtype | None) -> None:
    """Raise if operands do not match; ``dtype`` is the required one, None under autocast."""
    if not isinstance(input, Tensor) or input.layout is not torch.strided or input.is_nested:
        require_tensor("linear: input", input)
    if not input.is_floating_point():
        raise TypeError(f"linear: a floating-point input is required, got {input.dtype}; cast it")
    shape, of_weight = input.shape, weight.shape
    if len(of_weight) != 2:
        raise ValueError(f"linear: a matrix is required as weight, got shape {tuple(of_weight)}")
    if not shape or shape[-1] != of_weight[1]:
        raise ValueError(
            f"linear: an input whose last dimension has {of_weight[1]} features is required, "
            f"got shape {tuple(shape)} for a weight {tuple(of_weight)}"
        )
    state = weight.record.layer
    if state is not None and state.transposed is not None and uses_other_layout(weight):
        refuse_other_layout(state)
    if bias is not None and (
        not isinstance(bias, Tensor) or bias.dim() != 1 or bias.shape != weight.shape[:1]
    ):
        require_tensor("linear: bias", bias)
        raise ValueError(
            f"linear: a bias of shape {tuple(weight.shape[:1])} is required, got {tuple(bias.shape)}; expand it, or "
            "add it to the output"
        )
    for name, operand in (("input", input), ("bias", bias)):
        if operand is None:
            continue
        if isinstance(operand, DTensor) and quantizes(weight.config or weight.recipe):
            raise TypeError(
                f"linear: the {name} is a DTensor, and the weight of {layer_of(state)} is none; call "
                f"parallelize_module for the layer, or pass {name}.to_local()"
            )
        if dtype is not None and operand.dtype != dtype:
            raise ValueError(
                f"linear: one dtype is required, got {name} in {operand.dtype} for a weight in {dtype}; cast one, or "
                "use torch.autocast"
            )
        if operand.device != weight.device:
            raise ValueError(
                f"linear: operands on one device are required, got {name} on {operand.device} and a weight on "
                f"{weight.device}; move them, or train by DistributedDataParallel in place of nn.DataParallel"
            )
