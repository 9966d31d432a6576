"""Quantize the products of a tensor that is no weight of this library while it is at a layer's weight."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from hybridtensor.linear.function import linear
from hybridtensor.linear.values import as_master_weight
from hybridtensor.subclasses import MasterWeight
from hybridtensor.subclasses.op_table import Args, Func, Kwargs
from hybridtensor.subclasses.owners import LayerRecipe


class RecipeMode(TorchFunctionMode):
    """Torch function mode that applies a layer's recipe in ``F.linear`` to the tensor at its weight.

    Attributes:
        multiplied: Whether a product with that tensor was quantized.
    """

    def __init__(self, layer: nn.Module, weight: Tensor, recipe: LayerRecipe) -> None:
        super().__init__()
        self._layer, self._weight, self._recipe = layer, weight, recipe
        self._is_transposed = bool(recipe.state.transposed)
        self.multiplied = False

    def __torch_function__(
        self, func: Func, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if func is F.linear:
            operands = dict(zip(("input", "weight", "bias"), args, strict=False)) | (kwargs or {})
            if operands["weight"] is self._weight:
                operands["weight"] = self._quantized_weight()
                return linear(**operands)
            self._refuse_weight([operands["weight"]])
        elif func in _TRANSPOSED_PRODUCTS and self._is_transposed:
            bias, x, right, others = _TRANSPOSED_PRODUCTS[func](*args, **(kwargs or {}))
            if right is self._weight and not others:
                return linear(x, self._quantized_weight().t(), bias)
            self._refuse_weight([*args, *(kwargs or {}).values()])
        elif func in _PRODUCTS:
            self._refuse_weight([*args, *(kwargs or {}).values()])
        return func(*args, **(kwargs or {}))

    def _quantized_weight(self) -> MasterWeight:
        """Return the tensor at the weight with the layer's recipe."""
        # Strides say which layout a product multiplies: they must be those of a weight as it is stored.
        values = self._weight.contiguous() if self._is_transposed else self._weight
        self.multiplied = True
        return as_master_weight(values, *self._recipe)

    def _wanted(self) -> str:
        """Return the product that is quantized, for error messages."""
        return "x @ weight or torch.addmm" if self._is_transposed else "F.linear"

    def _refuse_weight(self, operands: list[object]) -> None:
        """Raise NotImplementedError if a product that is not quantized has the weight among its operands."""
        leaves = tree_leaves(operands)  # some functions take lists
        if any(isinstance(t, Tensor) and _overlap(t, self._weight) for t in leaves):
            raise NotImplementedError(
                f"linear: {type(self._layer).__name__}.forward multiplies its weight by another function than "
                f"{self._wanted()} while the weight is a plain tensor (functional_call, a parametrization), "
                f"which would not be quantized; use {self._wanted()}, or leave the layer out of quantize_ "
                "(keep_bf16)"
            )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors overlap in memory; parameters may lie in one storage without overlapping."""
    first, second = _byte_range(a), _byte_range(b)
    same = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return same and first.start < second.stop and second.start < first.stop


def _byte_range(tensor: Tensor) -> range:
    """Return the byte range of its storage that a tensor covers."""
    first, size = tensor.storage_offset(), tensor.element_size()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = first + sum((n - 1) * step for n, step in steps)
    return range(first * size, (last + 1) * size)


_PRODUCTS = (
    torch.matmul, torch.mm, torch.addmm, torch.bmm, torch.baddbmm, torch.addbmm, torch.einsum, torch.inner, torch.mv,
    torch.addmv, torch.tensordot, torch.chain_matmul, torch.linalg.multi_dot, torch.linalg.matmul, F.bilinear,
    Tensor.matmul, Tensor.mm, Tensor.addmm, Tensor.bmm, Tensor.baddbmm, Tensor.addbmm, Tensor.inner, Tensor.mv,
    Tensor.addmv, Tensor.__matmul__, Tensor.__rmatmul__,
)  # fmt: skip


_Operands = tuple[Tensor | None, Tensor, Tensor, dict[str, object]]
"""Bias, input, weight, and what is none of these."""


def _of_matmul(input: Tensor, other: Tensor, **others: object) -> _Operands:
    return None, input, other, others


def _of_mm(input: Tensor, mat2: Tensor, **others: object) -> _Operands:
    return None, input, mat2, others


def _of_addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **others: object) -> _Operands:
    return input, mat1, mat2, others


# Products with a weight [in, out] on the right, and how to read their arguments.
_TRANSPOSED_PRODUCTS: dict[Func, Callable[..., _Operands]] = {
    torch.matmul: _of_matmul, Tensor.matmul: _of_matmul, Tensor.__matmul__: _of_matmul,
    torch.mm: _of_mm, Tensor.mm: _of_mm, torch.addmm: _of_addmm, Tensor.addmm: _of_addmm,
}  # fmt: skip
