"""The torch functions that multiply by a weight, whatever module or function calls them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from hybridtensor.arguments import require_kind
from hybridtensor.linear.function import linear
from hybridtensor.linear.grouped import batched_linear, grouped_linear
from hybridtensor.linear.layer_forward import STACKS
from hybridtensor.linear.operands import Weight, is_weight
from hybridtensor.linear.tensor_parallel import require_own_tokens
from hybridtensor.linear.values import as_read, read, values_of
from hybridtensor.ops.autograd import Function
from hybridtensor.subclasses import HybridTensor, MasterWeight
from hybridtensor.subclasses.intercepting import InterceptingTensor
from hybridtensor.subclasses.observing import observe_read
from hybridtensor.subclasses.op_table import Args, Func, Kwargs, name_of_weights
from hybridtensor.subclasses.owners import settle

T = TypeVar("T", bound=Callable[..., object])


def intercept(*functions: Func) -> Callable[[T], T]:
    """Return a decorator that handles torch functions on both kinds of weight."""

    def add(handler: T) -> T:
        MasterWeight.functions.register(*functions)(handler)
        HybridTensor.functions.register(*functions)(handler)
        return handler

    return add


def intercept_products(*functions: Func) -> Callable[[T], T]:
    """Return a decorator as ``intercept`` does, of products; those with weights of no layer (adapters) stay plain."""

    def add(handler: T) -> T:
        @functools.wraps(handler)
        def handle(func: Func, args: Args, kwargs: Kwargs) -> object:
            if not torch.compiler.is_dynamo_compiling():  # flattening does it for graphs
                for value in (*args, *kwargs.values()):
                    if is_weight(value) and not value.record.is_new:
                        settle(value.record, value.config)
            if any(map(_is_of_no_layer, args)) or any(map(_is_of_no_layer, kwargs.values())):
                args, kwargs = tree_map(_values_of_no_layer, (args, kwargs))
                return func(*args, **kwargs)
            return handler(func, args, kwargs)

        intercept(*functions)(handle)
        return handler

    return add


def _is_of_no_layer(value: object) -> bool:
    """Return whether an operand is, or contains, a weight of no layer."""
    if isinstance(value, (list, tuple)):
        return any(map(_is_of_no_layer, value))
    return is_weight(value) and value.is_of_no_layer


def _values_of_no_layer(value: object) -> object:
    """Return the values of a weight of no layer, and anything else as it is.

    Raises:
        NotImplementedError: If it was made of a persistent weight, and stores quantized values only.
    """
    if not is_weight(value) or not value.is_of_no_layer:
        return value
    if isinstance(value, HybridTensor):
        raise NotImplementedError(
            f"linear: {value!r} was made of a persistent weight by new_zeros, new_empty or empty_like, and is not its "
            "layer's; it stores quantized values only: make parameters of adapters by torch.zeros or torch.empty"
        )
    return values_of(value)


def default(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Call torch's function, which reaches the class's operator table."""
    with torch._C.DisableTorchFunctionSubclass():
        result: Tensor = func(*args, **kwargs)
        return result


def _as_gradient_edges(outputs: Sequence[object], inputs: Sequence[object]) -> list[object] | None:
    """Replace weights among the inputs of a backward by their gradient edges; None unless all of them are leaves.

    Given a weight itself, torch disables ``__torch_function__`` of its class for the whole backward, in which
    activation checkpointing runs forwards again: these would not quantize.
    """
    ours = [t for t in inputs if isinstance(t, InterceptingTensor)]
    leaves = all(is_weight(t) and t.is_leaf and t.requires_grad for t in ours)
    if not leaves or any(isinstance(t, InterceptingTensor) for t in outputs):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return [get_gradient_edge(t) if is_weight(t) else t for t in inputs]


@intercept(torch.autograd.grad)
def _grad(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Return gradients of weights; see ``_as_gradient_edges``."""
    outputs, inputs = args
    edges = _as_gradient_edges(outputs, inputs)
    if edges is None:
        return default(func, args, kwargs)
    # torch makes zeros only of tensors.
    found = func(outputs, edges, **kwargs | {"materialize_grads": False})
    if not kwargs["materialize_grads"]:
        return found
    grads = kwargs["create_graph"]
    return tuple(
        torch.zeros(t.shape, dtype=t.dtype, device=t.device, requires_grad=grads)
        if grad is None
        else grad
        for grad, t in zip(found, inputs, strict=True)
    )


@intercept(torch.autograd.backward)
def _backward(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Accumulate gradients of weights; torch 2.13 comes here, 2.11 does not. See ``_as_gradient_edges``."""
    inputs = kwargs.get("inputs")
    edges = None if inputs is None else _as_gradient_edges(args[0], inputs)
    if edges is None:
        return default(func, args, kwargs)
    return func(*args, **kwargs | {"inputs": edges})


def _is_data(operand: object) -> bool:
    """Return whether an operand of a product is ``weight.data``, or was made of it: such products are of values."""
    return is_weight(operand) and operand.computes_as_values


def _of_values(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Multiply the values of weights, without quantizing: adapters are merged so. ``out`` is passed on."""
    operands = [*args, *kwargs.values()]
    in_training = any(isinstance(t, Tensor) and t.requires_grad for t in operands)

    def values(operand: object) -> object:
        return as_read(operand, func.__name__, in_training) if is_weight(operand) else operand

    named = {name: t if name == "out" else values(t) for name, t in kwargs.items()}
    return default(func, tuple(map(values, args)), named)


_RIGHT = {"mat2": "right", "other": "right"}  # as torch's functions call it


def _operands(names: tuple[str, ...], args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Return the operands by position or name, and the remaining arguments."""
    given = dict(zip(names, args, strict=False)) | kwargs
    others = {f"argument {i}": value for i, value in enumerate(args) if i >= len(names)}
    others |= {name: value for name, value in kwargs.items() if name not in names}
    return tuple(given.get(name) for name in names), others


def _require_only_operands(who: str, others: Kwargs) -> None:
    """Raise NotImplementedError for arguments besides the operands, such as ``out``."""
    for name, value in others.items():
        if value is not None:
            raise NotImplementedError(
                f"{who}: {name} is not possible with the weight of a layer; take what is returned"
            )


@intercept_products(F.linear)
def _f_linear(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    operands = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    input, weight, bias = operands["input"], operands["weight"], operands.get("bias")
    if is_weight(input):
        out = torch.matmul(input, weight.t())
        return out if bias is None else out + bias
    if getattr(weight, "config", None) is None:
        return default(func, args, kwargs)
    # Every attribute of a weight would pass through here again
    with torch._C.DisableTorchFunctionSubclass():
        if isinstance(input, HybridTensor):
            require_own_tokens(input)
        return linear(input, weight, bias)


class _Rows(Function):
    """Autograd function of an embedding lookup in a weight; the gradient is the weight's."""

    @staticmethod
    def forward(ctx: object, weight: HybridTensor) -> Tensor:
        observe_read(weight, "embedding")
        return weight.rows().detach()

    @staticmethod
    def backward(ctx: object, grad_output: Tensor) -> Tensor:
        return grad_output


@HybridTensor.functions.register(F.embedding)
def _embedding(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Look up rows of a weight that an embedding shares with a layer."""
    names = (
        "input",
        "weight",
        "padding_idx",
        "max_norm",
        "norm_type",
        "scale_grad_by_freq",
        "sparse",
    )
    operands = dict(zip(names, args, strict=False)) | kwargs
    weight = operands["weight"]
    if not is_weight(weight):
        return default(func, args, kwargs)
    if operands.get("max_norm") is not None:
        raise NotImplementedError(
            f"embedding: max_norm={operands['max_norm']} would write to a weight that a quantized layer "
            "holds, too; leave the layer with this weight out of quantize_"
        )
    with torch._C.DisableTorchFunctionSubclass():
        operands["weight"] = read(_Rows, weight)
        return F.embedding(**operands)


@intercept_products(
    torch.mm, torch.matmul, torch.linalg.matmul, Tensor.mm, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__,
)  # fmt: skip
def _matmul(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Treat ``x @ w`` as ``F.linear(x, w.t())``: the same faces by the rule of dispatch, and all three products.
    ``w @ x`` is ``(x.T @ w.T).T``. Two weights are no layer's product, and are multiplied as values.
    """
    named = {_RIGHT.get(name, name): value for name, value in kwargs.items()}
    (left, right), others = _operands(("input", "right"), args, named)
    if _is_data(left) or _is_data(right):
        return _of_values(func, args, kwargs)
    if func is Tensor.__rmatmul__:
        left, right = right, left
    if not is_weight(left) and not is_weight(right):
        return default(func, args, kwargs)
    _require_only_operands("matmul", others)
    if is_weight(left) and is_weight(right):
        for weight in (left, right):
            observe_read(weight, "a product of two weights")
        return torch.matmul(values_of(left), values_of(right))
    if is_weight(right):
        return _times(left, right if right.dim() == 1 else right.transpose(-2, -1))
    require_kind("matmul", "a tensor right of a weight", right, Tensor)
    if right.dim() == 1:
        return _times(right, left)
    found = _times(right.transpose(-2, -1), left)
    # Contiguous, as what ``torch.matmul`` returns: callers take views of it.
    return found if left.dim() == 1 else found.transpose(-2, -1).contiguous()


def _times(input: Tensor, weight: Weight) -> Tensor:
    # Every attribute of a weight would pass through its torch function
    with torch._C.DisableTorchFunctionSubclass():
        if weight.dim() == 1:  # a row of a layer's weight
            return linear(input, weight[None]).squeeze(-1)  # type: ignore[arg-type]
        return batched_linear(input, weight) if weight.dim() == 3 else linear(input, weight)


@intercept_products(torch.addmm, Tensor.addmm)
def _addmm(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    (bias, left, right), others = _operands(("input", "mat1", "mat2"), args, kwargs)
    if _is_data(left) or _is_data(right):
        return _of_values(func, args, kwargs)
    if not is_weight(right) and not is_weight(left):
        return _sum(func, args, kwargs)
    beta, alpha = others.pop("beta", 1), others.pop("alpha", 1)
    _require_only_operands("addmm", others)
    if is_weight(right) and bias.shape == right.shape[1:] and beta == 1 and alpha == 1:
        return linear(left, right.t(), bias)
    out: Tensor = alpha * torch.mm(left, right)
    # With beta=0 torch does not read the bias, which may be uninitialized.
    return out if beta == 0 else beta * bias + out


@intercept_products(torch._grouped_mm)
def _grouped_mm(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Multiply tokens sorted by expert: ``F.grouped_mm`` calls it."""
    (left, right, ends), others = _operands(("self", "mat2", "offs"), args, kwargs)
    left = others.pop("input", left)
    _require_only_operands("grouped_mm", others)
    return _of_stack(left, right, ends)


_GROUPED_OF_OTHERS = (("transformers", "grouped_mm_fallback"),)
"""Grouped products of other libraries, with the operands of torch's; by name, so that no library is imported."""


def intercept_others() -> None:
    """Handle the products of other libraries that are imported by now: once a model is converted, its library is."""
    for library, name in _GROUPED_OF_OTHERS:
        operator = getattr(getattr(torch.ops, library), name, None)
        if operator is not None and operator not in MasterWeight.functions.handlers:
            intercept_products(operator)(_grouped_mm)
    _multiply_in_groups()


def _multiply_in_groups() -> None:
    """Let converted experts of Transformers run ``grouped_mm`` for ``batched_mm``, which copies an expert per token."""
    library = sys.modules.get("transformers.integrations.moe")  # there once a model with experts is
    ways: Any = getattr(library, "ALL_EXPERTS_FUNCTIONS", {})
    batched, grouped = ways.get("batched_mm"), ways.get("grouped_mm")
    # On a GPU ``generate`` changes from one to the other for decoding, whatever the model is to run.
    if batched and grouped and getattr(batched, "func", None) is not _in_groups:
        ways.register("batched_mm", functools.partial(_in_groups, batched, grouped))


def _in_groups(
    batched: Callable[..., object],
    grouped: Callable[..., object],
    module: nn.Module,
    *args: object,
    **kwargs: object,
) -> object:
    """Run a module of experts in groups if it is converted, else in batches."""
    run = grouped if STACKS in module.__dict__ else batched
    return run(module, *args, **kwargs)


@intercept_products(torch.bmm, Tensor.bmm)
def _bmm(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    (left, right), others = _operands(("input", "mat2"), args, kwargs)
    if _is_data(left) or _is_data(right):
        return _of_values(func, args, kwargs)
    if not is_weight(left) and not is_weight(right):
        return default(func, args, kwargs)
    _require_only_operands("bmm", others)
    return _of_stack(left, right, None)


def _sum(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Add a product to a weight that is none of its factors, as values: adapters compute ``W + B @ A`` so."""
    operands = {"input": args[0], **kwargs} if args else dict(kwargs)
    if not is_weight(operands.get("input")) or any(map(is_weight, args[1:])):
        return default(func, args, kwargs)
    values = as_read(operands.pop("input"), func.__name__)
    return default(func, (values, *args[1:]), operands)


@intercept_products(
    torch.baddbmm, torch.addbmm, torch.addmv, Tensor.baddbmm, Tensor.addbmm, Tensor.addmv
)
def _other_sum(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Add a product without weights to one; raise for products of a weight."""
    is_factor = any(map(is_weight, tree_leaves((args[1:], kwargs | {"input": None, "out": None}))))
    return (_other_product if is_factor else _sum)(func, args, kwargs)


@intercept(
    torch.svd_lowrank, torch.pca_lowrank, torch.lobpcg, torch.linalg.matrix_power, torch.matrix_power, torch.cdist,
    Tensor.matrix_power,
)  # fmt: skip
def _analysis(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Compute a function of a weight's values that torch composes of products: none of these is a layer's product."""
    given = tree_map(lambda t: as_read(t, func.__name__) if is_weight(t) else t, (args, kwargs))
    return default(func, *given)


@intercept_products(
    torch.einsum, torch.tensordot, torch.inner, torch.chain_matmul, torch.linalg.multi_dot, F.bilinear, Tensor.inner,
)  # fmt: skip
def _other_product(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Raise for products that no handler quantizes."""
    if any(map(is_weight, tree_leaves((args, kwargs)))):
        raise NotImplementedError(
            f"{func.__name__}: this product with {name_of_weights((args, kwargs))} is not quantized; use F.linear, x @ "
            "weight.t(), weight @ x, or torch.bmm and F.grouped_mm for experts, or leave the layer out of "
            "quantize_ (keep_bf16)"
        )
    return default(func, args, kwargs)


def _of_stack(left: Tensor, right: Tensor, ends: Tensor | None) -> Tensor:
    """Multiply tokens by experts' weights, in groups or, without ends, in batches."""
    if is_weight(left) or not is_weight(right) or right.dim() != 3:
        raise NotImplementedError(
            f"grouped_mm: {left!r} times {right!r} does not multiply tokens by the weights of experts [E, in, "
            "out] on the right; see grouped products in the documentation"
        )
    weight = right.transpose(-2, -1)
    if ends is None:
        return _times(left, weight)
    with torch._C.DisableTorchFunctionSubclass():
        return grouped_linear(left, weight, ends)
