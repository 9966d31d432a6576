"""The one rule of dispatch: ``mm(a, b)`` multiplies ``a.rowwise`` by ``b.columnwise``."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtensor import ops
from hybridtensor.subclasses.faces import FaceTensor
from hybridtensor.subclasses.hybrid_tensor import HybridTensor
from hybridtensor.subclasses.identity_tensor import IdentityTensor
from hybridtensor.subclasses.intercepting import InterceptingTensor
from hybridtensor.subclasses.op_table import Args, Func, Kwargs, OpTable
from hybridtensor.subclasses.operators.common import below_autograd
from hybridtensor.subclasses.quantized_tensor import QuantizedTensor

aten = torch.ops.aten


def multiply(
    left: FaceTensor | Tensor,
    right: FaceTensor | Tensor,
    *,
    bias: Tensor | None = None,
    gemm: str = "mm",
    fast_accum: bool = False,
) -> Tensor:
    """Return ``left @ right + bias``, ``[M, K] @ [K, N]`` in the nominal dtype; raise ValueError for operands that
    do not match."""
    if left.dtype != right.dtype:
        raise ValueError(
            f"{gemm}: operands of one dtype are required, got {left.dtype} and {right.dtype}; cast one"
        )
    a, b = operand_face(left, "left", -1, gemm), operand_face(right, "right", 0, gemm)
    return ops.product(a, b, bias=bias, out_dtype=left.dtype, fast_accum=fast_accum)


def operand_face(face: FaceTensor | Tensor, side: str, axis: int, gemm: str) -> ops.Face:
    """Return an operand as a matrix ``[other, contraction]``; ``axis`` -1 is rowwise, 0 columnwise."""
    if isinstance(face, IdentityTensor):
        face = face.dequantize()
    if face.dim() != 2:
        raise ValueError(
            f"{gemm}: a matrix is required as {side} operand, got shape {tuple(face.shape)}"
        )
    if not isinstance(face, QuantizedTensor):
        return ops.high_precision(face if axis == -1 else face.t())
    if face.axis != axis:
        needed, given = ("rowwise", "columnwise") if axis == -1 else ("columnwise", "rowwise")
        raise ValueError(
            f"{gemm}: a {needed} face is required as {side} operand, got a {given} {face!r}; quantize the other face"
        )
    if face.matrix_shape != tuple(face.shape):
        raise ValueError(
            f"{gemm}: the {side} operand is a flattened view {tuple(face.shape)} of a {face.matrix_shape} matrix, "
            "whose contraction axis is gone; view it back"
        )
    return face.face


def take_face(tensor: Tensor, direction: str, *, name: str, gemm: str) -> FaceTensor | Tensor:
    """Return the face of a ``HybridTensor`` in ``direction``; any other tensor unchanged."""
    if isinstance(tensor, HybridTensor):
        return tensor.require_face(direction, name=name, gemm=gemm)
    return tensor


def require_reader(
    who: str, tensor: HybridTensor, weight: InterceptingTensor | None = None
) -> None:
    """Raise ValueError if a quantized input is read by another layer, or with another recipe, than it was quantized
    for."""
    readers = tensor.record.readers
    if readers is None:
        return
    # By record, which all aliases of a weight share: a recomputation or a detached copy reads as
    # the weight does.
    if weight is None or all(weight.record is not one for one in readers.weights):
        raise ValueError(
            f"{who}: {tensor!r} was quantized for other layers than the one that reads it; name it in into=, "
            "or leave into= or outputs_of= out, and each quantizes for itself"
        )
    if weight.recipe.input != readers.quantizer:
        raise ValueError(
            f"{who}: {tensor!r} was quantized before its layer got the recipe {weight.recipe}; compute it "
            "again"
        )


def mm(left: Tensor, right: Tensor, bias: Tensor | None = None, gemm: str = "mm") -> Tensor:
    """Multiply any mix of tensor classes; raise NotImplementedError for a layer's weight."""
    hybrids = [t for t in (left, right) if isinstance(t, HybridTensor)]
    for tensor in hybrids:
        require_reader(gemm, tensor)
    if any(tensor.config is not None for tensor in hybrids):
        raise below_autograd(gemm, hybrids)
    return multiply(
        take_face(left, "rowwise", name="the left operand", gemm=gemm),
        take_face(right, "columnwise", name="the right operand", gemm=gemm),
        bias=bias,
        gemm=gemm,
    )


def _mm(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    return mm(*args)


def _addmm(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    summand, left, right = args
    return _add(summand, left, right, "addmm", **kwargs)


def _add(
    summand: Tensor, left: Tensor, right: Tensor, gemm: str, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """Return ``beta * summand + alpha * (left @ right)``; raise ValueError for a summand of another dtype."""
    if isinstance(summand, (HybridTensor, QuantizedTensor, IdentityTensor)):
        raise NotImplementedError(f"{gemm}: the summand is not a plain tensor; dequantize it")
    if summand.dtype != left.dtype:
        raise ValueError(
            f"{gemm}: a summand of the operands' dtype {left.dtype} is required, got {summand.dtype}; cast it"
        )
    # The epilogue of a product adds a vector, once and unscaled; anything else is computed
    # afterwards.
    if summand.dim() < 2 and beta == 1 and alpha == 1:
        return mm(left, right, summand.expand(right.shape[1]).contiguous(), gemm)
    summand = summand.expand(left.shape[0], right.shape[1])
    product: Tensor = alpha * mm(left, right, gemm=gemm)
    # zero: a NaN of the summand does not count
    return product if beta == 0 else beta * summand + product


def _linear(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Handle ``aten.linear``, which inference mode does not decompose."""
    x, weight = args[:2]
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    left = x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x
    columns = weight.t()
    out = mm(left, columns, gemm="linear") if bias is None else _add(bias, left, columns, "linear")
    return out.view(*x.shape[:-1], weight.shape[0])


def register_matmul(table: OpTable) -> None:
    """Register the products of two matrices in a table of operators."""
    table.register(aten.mm.default)(_mm)
    table.register(aten.addmm.default)(_addmm)
    table.register(aten.linear.default)(_linear)
