"""Operands of the three products, by where they come from.

An operand gives its rowwise face to the product of the forward, says which tensors backward needs,
and gives its columnwise face back from them::

    operand.rowwise()  # forward
    operand.save()  # forward: plain tensors, a list that never depends on the phase
    operand.columnwise(saved, after)  # backward

``Operand`` is one whose faces exist after forward: cast now, cached, shared, or those of an input that was quantized
before. Its subclasses make the columnwise face in backward: ``input_operands``, ``weight_operands``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from hybridtensor.ops import Face, FaceKind, Faces
from hybridtensor.ops.amaxes import RecordedAmax
from hybridtensor.quantizers import tokens
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.subclasses import (
    FaceTensor,
    HybridTensor,
    IdentityTensor,
    MasterWeight,
    QuantizedTensor,
)
from hybridtensor.subclasses.faces import columnwise_face, rowwise_face

Weight = MasterWeight | HybridTensor
WEIGHTS = (MasterWeight, HybridTensor)
QUANTIZED = (HybridTensor, QuantizedTensor, IdentityTensor)  # inputs that have faces already


def is_weight(tensor: object) -> TypeGuard[Weight]:
    """Return whether products with a tensor are quantized: a ``HybridTensor`` without a recipe is an input."""
    return isinstance(tensor, MasterWeight) or (
        isinstance(tensor, HybridTensor) and tensor.config is not None
    )


def is_transposed(weight: Weight) -> bool:
    """Return whether a tensor is the transpose of a layer's weight, or of each expert's."""
    if isinstance(weight, HybridTensor):
        return weight.swapped
    return weight.plain.stride(-1) != 1


def uses_other_layout(weight: Weight) -> bool:
    """Return whether a product multiplies a weight, or each expert's, in another layout than it is stored in."""
    # A master weight's layout shows in its strides alone, and those of one row or column say nothing.
    is_known = isinstance(weight, HybridTensor) or 1 not in weight.shape[-2:]
    return is_known and is_transposed(weight) != weight.is_transposed


# Recipe, and shape as stored, of weights that graphs multiply in the other layout
_OTHER_LAYOUT_IN_GRAPHS: set[tuple[HybridConfig, tuple[int, ...]]] = set()


def note_other_layout(weight: HybridTensor) -> None:
    """Note that the graph that is traced multiplies a weight in the other layout than it is stored in: its forward
    reads the face that others read in backward."""
    *stack, rows, columns = weight.shape
    stored = (columns, rows) if weight.swapped else (rows, columns)
    _OTHER_LAYOUT_IN_GRAPHS.add((weight.recipe, (*stack, *stored)))


def graphs_read_both(config: HybridConfig, shape: Sequence[int]) -> bool:
    """Return whether forward reads both faces of a weight in some graph: layers that have one recipe and weights of one
    shape share graphs."""
    return bool(_OTHER_LAYOUT_IN_GRAPHS) and (config, tuple(shape)) in _OTHER_LAYOUT_IN_GRAPHS


class Needs(NamedTuple):
    """Which gradients backward will be asked for.

    ::

        needs = ht.linear.Needs(input=x.requires_grad, weight=True, bias=False)
    """

    input: bool
    weight: bool
    bias: bool


class Operand:
    """An operand whose faces exist.

    ::

        row, column = weight.config.input.faces(x, rowwise=True, columnwise=True, dtype=x.dtype)
        y = ht.linear.linear(x, weight, operand=ht.linear.Operand(row, column))

    Attributes:
        amax_record: The tensor that has the faces' amaxes, or None if they are in that of this forward.
        is_given: Whether it is a weight whose faces came with it: persistent, or gathered by FSDP2.
    """

    __slots__ = ("_column", "_kind", "_row", "amax_record")
    is_given = False

    def __init__(
        self,
        row: Face | None,
        column: Face | None,
        amax_record: RecordedAmax = None,
    ) -> None:
        self._row, self._column, self.amax_record = row, column, amax_record
        self._kind: FaceKind | None = None

    def rowwise(self) -> Face:
        if self._row is None:
            raise ValueError("output: the quantizer made no rowwise face")
        return self._row

    def save(self) -> list[Tensor]:
        """Return the tensors that backward needs, and release the faces."""
        column, self._row, self._column = self._column, None, None
        if column is None:
            return []
        self._kind = FaceKind(column.format, column.dequantized_rowwise)
        return column.tensors()

    def begin(self, saved: list[Tensor], grad: Tensor) -> None:
        """Start an all-gather that ``columnwise`` of an input waits for, once the gradient exists."""

    def release(self, *, used: bool) -> None:
        """Release cached faces in backward; ``used`` is False if the second part of a backward will need them."""

    def columnwise(self, saved: list[Tensor], after: Tensor | None = None) -> Face:
        """Return the columnwise face from the saved tensors; raise ValueError if there was none.

        ``after``: What a graph computes before it makes the face, or a compiler would move the cast into forward and
        save the face; None in eager code.
        """
        if self._kind is None:
            raise ValueError("backward: the operand was made without a columnwise face")
        return Face.of(saved, self._kind)


def gradient_faces(grad: HybridTensor, needs: Needs, dtype: torch.dtype) -> Faces:
    """Return the faces of a quantized gradient that the products of backward need, as matrices; raise ValueError if
    one is absent."""
    row = column = None
    if needs.input:
        face = grad.require_face("rowwise", name="grad_output", gemm="grad_input")
        row = rowwise_face(as_matrix(face), dtype, "grad_input")
    if needs.weight:
        face = grad.require_face("columnwise", name="grad_output", gemm="grad_weight")
        column = columnwise_face(as_matrix(face), dtype, "grad_weight")
    return row, column


def required_columnwise(face: Face | None) -> Face:
    """Return the columnwise face of a weight; raise ValueError if it is None."""
    if face is None:
        raise ValueError("grad_input: the quantizer made no columnwise face")
    return face


def as_matrix(face: FaceTensor | Tensor) -> FaceTensor:
    """View a face as that of a matrix ``[tokens, features]``."""
    if isinstance(face, QuantizedTensor):
        # not of the face's matrix, which may have more rows: zeros that complete a block
        size = face.shape[:-1].numel(), face.shape[-1]
        return face if face.dim() == 2 else face.view(size)
    values = face.dequantize() if isinstance(face, IdentityTensor) else face
    return IdentityTensor(tokens(values))
