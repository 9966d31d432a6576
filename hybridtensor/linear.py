"""The linear layer: one autograd function with its three products. The only file that knows that there are three.

| product       | left operand             | right operand           |
|---------------|--------------------------|-------------------------|
| `output`      | `input.rowwise`          | `weight.rowwise.t()`    |
| `grad_input`  | `grad_output.rowwise`    | `weight.columnwise`     |
| `grad_weight` | `grad_output.columnwise.t()` | `input.columnwise`  |

``F.linear``, ``@``, ``torch.mm`` and ``torch.addmm`` come here when an operand is a weight of ours, whatever module or
function calls them. Saved for backward are plain tensors, a list whose length depends on the recipe and on who needs a
gradient, and on nothing else: one columnwise face per operand that backward will use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtensor import ops
from hybridtensor.ops import Held, Operand
from hybridtensor.ops.operand import put_together, take_apart
from hybridtensor.quantizers import tokens
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.siblings import Operands, quantize_once
from hybridtensor.state import Context, LayerState
from hybridtensor.subclasses import Face, HybridTensor, IdentityTensor, MasterWeight, QuantizedTensor
from hybridtensor.subclasses.matmul import operand_of, take_face

Weight = MasterWeight | HybridTensor
_AXES = {"rowwise": -1, "columnwise": 0}
_QUANTIZED = (HybridTensor, QuantizedTensor, IdentityTensor)  # inputs that bring their faces along
T = TypeVar("T", bound=Callable[..., Any])


class _Needs(NamedTuple):
    """Which gradients backward will be asked for."""

    input: bool
    weight: bool
    bias: bool


def linear(input: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Return ``input @ weight.T + bias`` with the products quantized as ``weight.config`` says.

    Args:
        input: ``[..., in_features]``, one to four dimensions, of the weight's dtype (under autocast: any floating
            dtype); or a ``HybridTensor`` that was quantized before, whose faces are then used as they are.
        weight: ``[out_features, in_features]``.
        bias: ``[out_features]`` or None.

    Returns:
        ``[..., out_features]``, in the weight's dtype (under autocast: in autocast's).

    Raises:
        TypeError: If the input is not a floating-point tensor.
        ValueError: If shapes, dtypes or devices do not go together, or a face that is needed is not there.
    """
    dtype = _compute_dtype(input, weight)
    _check(input, weight, bias, dtype)
    config: HybridConfig = weight.config
    source = (input,)  # not an argument of the autograd function, but what siblings of this layer read, too
    if not isinstance(input, _QUANTIZED):
        input = input.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    grad = torch.is_grad_enabled()
    needs = _Needs(
        input=grad and input.requires_grad,
        weight=grad and weight.requires_grad,
        bias=grad and bias is not None and bias.requires_grad,
    )
    if not any(needs):
        row, _ = _input_operands(input, source, weight, needs, dtype)
        return _output(row, weight, bias, dtype, input, needs)[0]
    _note_training_use(weight)
    return _Linear.apply(input, weight, bias, config, needs, dtype, source)  # type: ignore[no-any-return, no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Weight, bias: Tensor | None, config: HybridConfig, needs: _Needs,
        dtype: torch.dtype, source: tuple[Tensor],
    ) -> Tensor:  # fmt: skip
        row, column = _input_operands(input, source, weight, needs, dtype)
        out, weight_column = _output(row, weight, bias, dtype, input, needs)
        keep_input = needs.weight and config.save_original_input and not isinstance(input, _QUANTIZED)
        x_saved, ctx.x_kept = ([input], None) if keep_input else take_apart(column)
        w_saved, ctx.w_kept = take_apart(weight_column)
        ctx.save_for_backward(*x_saved, *w_saved)
        ctx.num_input_tensors = len(x_saved)
        ctx.config, ctx.needs, ctx.state, ctx.dtype = config, needs, weight.state, dtype
        ctx.gathered = weight if _is_gathered(weight) else None
        ctx.input_shape, ctx.input_contiguous = input.shape, input.is_contiguous()
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        needs, config, saved = ctx.needs, ctx.config, list(ctx.saved_tensors)
        x_saved, w_saved = saved[: ctx.num_input_tensors], saved[ctx.num_input_tensors :]
        grad, dtype = tokens(grad_output), grad_output.dtype
        row, column = config.grad_output.operands(
            grad, rowwise=needs.input, columnwise=needs.weight, dtype=dtype, context=Context("grad_output", ctx.state)
        )
        grad_input = grad_weight = grad_bias = None
        if needs.input:
            w = put_together(w_saved, ctx.w_kept) if ctx.gathered is None else _gathered_now(ctx)
            grad_input = ops.product(row, w, out_dtype=dtype).view(ctx.input_shape)
        if needs.weight:
            x = _kept_input(x_saved, ctx)
            grad_weight = ops.product(column, x, out_dtype=dtype)
        if needs.bias:
            flat = ctx.input_contiguous or grad_output.dim() == 1
            grad_bias = grad.sum(dim=0) if flat else grad_output.sum(dim=tuple(range(grad_output.dim() - 1)))
        return grad_input, grad_weight, grad_bias, None, None, None, None


def _kept_input(saved: list[Tensor], ctx: Any) -> Operand | Held:
    """Return the columnwise operand of the input, made now where the input itself was kept."""
    if ctx.x_kept is not None:
        return put_together(saved, ctx.x_kept)
    made = ctx.config.input.operands(
        saved[0], rowwise=False, columnwise=True, dtype=ctx.dtype, context=Context("input", ctx.state)
    )
    column: Operand | Held = made[1]
    return column


def _is_gathered(weight: Weight) -> bool:
    """Whether the weight's columnwise face comes with the gather for backward; compiled graphs hold its tensors."""
    return not torch.compiler.is_compiling() and weight.gathered is not None


def _gathered_now(ctx: Any) -> Operand | Held:
    """Return the columnwise operand of a weight that FSDP2 gathered again for backward."""
    made = ctx.gathered.operands(rowwise=False, columnwise=True, dtype=ctx.dtype)
    column: Operand | Held = made[1]
    return column


def _input_operands(
    input: Tensor, source: tuple[Tensor], weight: Weight, needs: _Needs, dtype: torch.dtype
) -> tuple[Operand, Operand | Held | None]:
    """Return the rowwise operand, and the columnwise one if backward will use it and does not make it itself.

    Args:
        source: What ``input`` is, or was cast from.
    """
    if isinstance(input, _QUANTIZED):
        row = _brought_along(input, "rowwise", "output")
        return row, _brought_along(input, "columnwise", "grad_weight") if needs.weight else None
    config: HybridConfig = weight.config
    columnwise = needs.weight and not config.save_original_input
    context = Context("input", weight.state, record=any(needs))

    def make() -> Operands:
        return config.input.operands(input.detach(), rowwise=True, columnwise=columnwise, dtype=dtype, context=context)

    how = (config.input, columnwise, dtype)
    rowwise, column = quantize_once(source[0], weight, how, make) if config.input.repeatable else make()
    if rowwise is None:
        raise ValueError(f"output: {config.input} made no rowwise face of the input")
    return rowwise, column


def _brought_along(input: Tensor, direction: str, gemm: str) -> Operand:
    """Return an operand of an input that was quantized before."""
    face = take_face(input, direction, name="input", gemm=gemm)
    return operand_of(_as_matrix(face), "left" if direction == "rowwise" else "right", _AXES[direction], gemm)


def _output(
    row: Operand, weight: Weight, bias: Tensor | None, dtype: torch.dtype, input: Tensor, needs: _Needs
) -> tuple[Tensor, Operand | Held | None]:
    """Return the first product, and the weight's columnwise operand if backward will use it."""
    columnwise = needs.input and not _is_gathered(weight)
    weight_row, weight_column = weight.operands(rowwise=True, columnwise=columnwise, dtype=dtype)
    if weight_row is None:
        raise ValueError(f"output: {weight!r} has no rowwise face")
    if row.scale is None and weight_row.scale is None:
        face = take_face(input, "rowwise", name="input", gemm="output")
        values = face.dequantize() if isinstance(face, _QUANTIZED) else face.detach()
        return _plain_linear(values.to(dtype), weight_row.data, bias, needs), weight_column
    out = ops.product(row, weight_row, bias=bias, out_dtype=dtype, fast_accum=True)
    return _with_shape(out, (*input.shape[:-1], weight.shape[0])), weight_column


def _plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None, needs: _Needs) -> Tensor:
    """Return bitwise what the plain module computes.

    For a weight that needs a gradient, ``F.linear`` flattens a strided batch into one product and adds the bias after.
    Here, below autograd, it would not see that the weight does.
    """
    if x.is_contiguous() or x.dim() == 2 or not needs.weight:
        return F.linear(x, weight, bias)
    out = _with_shape(torch.mm(tokens(x), weight.t()), (*x.shape[:-1], weight.shape[0]))
    return out if bias is None else out + bias


def _with_shape(out: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return ``out`` in another shape and, as from ``F.linear``, no view: FSDP2 hangs hooks on what layers return."""
    return out if out.shape == shape else torch.ops.aten._unsafe_view(out, shape)


def _as_matrix(face: Face | Tensor) -> Face | Tensor:
    if isinstance(face, IdentityTensor):
        return IdentityTensor(tokens(face.dequantize()))
    if isinstance(face, QuantizedTensor):
        return face if face.dim() == 2 else face.view(face.matrix_shape)
    return tokens(face)


def _note_training_use(weight: Weight) -> None:
    """Let the layer's state check that it was advanced with the weight."""
    layer = weight.layer
    if isinstance(layer, LayerState) and not layer.is_empty and isinstance(weight, MasterWeight):
        layer.note_training_use(weight.writes, weight.version)


def _compute_dtype(input: Tensor, weight: Weight) -> torch.dtype:
    """Return autocast's dtype where it is on, else the weight's."""
    device = weight.device.type
    if torch.is_autocast_enabled(device) and input.is_floating_point():
        return torch.get_autocast_dtype(device)
    return weight.dtype


def _check(input: Tensor, weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> None:
    """Raise for operands that do not go together."""
    if not isinstance(input, Tensor):
        raise TypeError(f"linear: a tensor is required as input, got {type(input).__name__}")
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"linear: bfloat16, float16 or float32 is required, got a weight in {dtype}; cast the model")
    if not input.is_floating_point():
        raise TypeError(f"linear: a floating-point input is required, got {input.dtype}; cast it")
    if weight.dim() != 2:
        raise ValueError(f"linear: a matrix is required as weight, got shape {tuple(weight.shape)}")
    if not 1 <= input.dim() <= 4 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear: an input of one to four dimensions, the last of {weight.shape[1]} features, is required, "
            f"got shape {tuple(input.shape)} for a weight {tuple(weight.shape)}"
        )
    if not torch.is_autocast_enabled(weight.device.type):
        for name, tensor in (("input", input), ("bias", bias)):
            if tensor is not None and tensor.dtype != dtype:
                raise ValueError(
                    f"linear: one dtype is required, got {name} in {tensor.dtype} for a weight in {dtype}; "
                    "cast one, or use torch.autocast"
                )
    if input.device != weight.device or (bias is not None and bias.device != weight.device):
        devices = sorted({str(t.device) for t in (input, weight, bias) if t is not None})
        raise ValueError(f"linear: operands on one device are required, got {', '.join(devices)}; move them")


# -- the ways in ----------------------------------------------------------------------------------------------------


def _is_weight(tensor: Any) -> bool:
    return isinstance(tensor, MasterWeight) or (isinstance(tensor, HybridTensor) and tensor.config is not None)


def _intercept(*functions: Any) -> Callable[[T], T]:
    """Return a decorator that handles torch functions on both kinds of weight."""

    def add(handler: T) -> T:
        MasterWeight.functions.register(*functions)(handler)
        HybridTensor.functions.register(*functions)(handler)
        return handler

    return add


def _default(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do what torch does, which then reaches the class's operator table."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


@_intercept(F.linear)
def _f_linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    operands = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    if not _is_weight(operands["weight"]):
        return _default(func, args, kwargs)  # type: ignore[no-any-return]
    with torch._C.DisableTorchFunctionSubclass():  # every attribute of a weight would come back here
        return linear(**operands)


class _Rows(torch.autograd.Function):
    """What an embedding reads of a weight; its gradient is the weight's."""

    @staticmethod
    def forward(ctx: Any, weight: HybridTensor) -> Tensor:
        return weight.rows().detach()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return grad_output


@HybridTensor.functions.register(F.embedding)
def _embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Look up rows of a weight that an embedding has in common with a layer."""
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    operands = dict(zip(names, args, strict=False)) | kwargs
    weight = operands["weight"]
    if not _is_weight(weight):
        return _default(func, args, kwargs)  # type: ignore[no-any-return]
    if operands.get("max_norm") is not None:
        raise NotImplementedError(
            f"embedding: max_norm writes to the weight, which holds quantized values, got {operands['max_norm']}; "
            "leave the layer with this weight out of quantize_"
        )
    with torch._C.DisableTorchFunctionSubclass():
        operands["weight"] = _Rows.apply(weight)  # type: ignore[no-untyped-call]
        return F.embedding(**operands)


@_intercept(torch.mm, torch.matmul, Tensor.mm, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__)
def _matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Treat ``x @ w`` as ``F.linear(x, w.t())``: the same faces by the rule of dispatch, and all three products."""
    operands = [*args, *kwargs.values()]
    left, right = reversed(operands) if func is Tensor.__rmatmul__ else operands
    if _is_weight(right):
        return linear(left, right.t())
    if _is_weight(left):
        if right.dim() != 2:
            raise NotImplementedError(
                f"matmul: a matrix is required right of a weight, got shape {tuple(right.shape)}; use F.linear"
            )
        return linear(right.t(), left).t()
    return _default(func, args, kwargs)  # type: ignore[no-any-return]


@_intercept(torch.addmm, Tensor.addmm)
def _addmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    bias, left, right = args
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    if not _is_weight(right) and not _is_weight(left):
        return _default(func, args, kwargs)  # type: ignore[no-any-return]
    if _is_weight(right) and bias.dim() == 1 and beta == 1 and alpha == 1:
        return linear(left, right.t(), bias)
    out: Tensor = beta * bias + alpha * torch.mm(left, right)
    return out
