"""Operands of the three products, by where they come from.

An operand gives its rowwise face to the product of the forward, says which tensors backward needs,
and gives its columnwise face back from them::

    operand.rowwise()  # forward
    operand.save()  # forward: plain tensors, a list that never depends on the phase
    operand.columnwise(saved)  # backward

| class | from |
|---|---|
| ``Operand`` | faces that are there: cast now, cached, shared, brought along or handed in by another function |
| ``KeptInput`` | an input that is kept in high precision; its columnwise face is made in backward |
| ``ShardedInput`` | an input whose tokens are on several ranks; backward gathers the columnwise face |
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridtensor.linear.sharing import sharing_scope
from hybridtensor.ops import Face, FaceKind, Faces, after
from hybridtensor.ops.library import is_traced
from hybridtensor.quantizers import HybridQuantizer, tokens
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.state import Context
from hybridtensor.subclasses import (
    FaceTensor,
    HybridTensor,
    IdentityTensor,
    MasterWeight,
    QuantizedTensor,
)
from hybridtensor.subclasses.faces import columnwise_face, rowwise_face
from hybridtensor.subclasses.operators.matmul import take_face
from hybridtensor.subclasses.sharded_face import ShardedFace

Weight = MasterWeight | HybridTensor
WEIGHTS = (MasterWeight, HybridTensor)
QUANTIZED = (HybridTensor, QuantizedTensor, IdentityTensor)  # inputs that bring their faces along


class Needs(NamedTuple):
    """Which gradients backward will be asked for.

    Attributes:
        input: That of the input.
        weight: That of the weight.
        bias: That of the bias.
    """

    input: bool
    weight: bool
    bias: bool


class Operand:
    """An operand whose faces are there.

    Args:
        row: The rowwise face.
        column: The columnwise face, or None if backward will not use it.
    """

    __slots__ = ("_column", "_kind", "_row")

    def __init__(self, row: Face | None, column: Face | None) -> None:
        self._row, self._column = row, column
        self._kind: FaceKind | None = None

    def rowwise(self) -> Face:
        """Return the rowwise face.

        Raises:
            ValueError: If the quantizer made none.
        """
        if self._row is None:
            raise ValueError(
                "output: a rowwise face of each operand is required, got a quantizer that made none"
            )
        return self._row

    def save(self) -> list[Tensor]:
        """Return the tensors that backward needs, and let go of the faces."""
        column, self._row, self._column = self._column, None, None
        if column is None:
            return []
        self._kind = FaceKind(column.format, column.dequantized_rowwise)
        return column.tensors()

    def begin(self, saved: list[Tensor], grad: Tensor) -> None:
        """Begin what ``columnwise`` will wait for, if anything, once the gradient is there."""

    def release(self) -> None:
        """Let go of what is kept beside what was saved: backward has used it."""

    def columnwise(self, saved: list[Tensor]) -> Face:
        """Return the columnwise face from what was saved.

        Raises:
            ValueError: If there was none.
        """
        if self._kind is None:
            raise ValueError(
                "backward: a columnwise face is required, got an operand that was made without"
            )
        return Face.of(saved, self._kind)


class KeptInput(Operand):
    """An input that is kept as it is: backward quantizes it for the weight's gradient.

    Args:
        row: The rowwise face.
        x: The input, any number of dimensions.
        config: The recipe.
        dtype: Dtype of the computation.
        context: Which tensor this is.
    """

    __slots__ = ("_after", "_config", "_context", "_dtype", "_x")

    def __init__(
        self,
        row: Face | None,
        x: Tensor,
        config: HybridConfig,
        dtype: torch.dtype,
        context: Context,
    ) -> None:
        super().__init__(row, None)
        self._x: Tensor | None = x
        self._after: Tensor | None = None
        self._config, self._dtype, self._context = config, dtype, context

    def save(self) -> list[Tensor]:
        """See ``Operand.save``."""
        x, self._x, self._row = self._x, None, None
        return [] if x is None else [x]

    def begin(self, saved: list[Tensor], grad: Tensor) -> None:
        """See ``Operand.begin``: a compiler would make in forward, and save, what waits for nothing."""
        if is_traced() and not isinstance(grad, HybridTensor):
            self._after = grad

    def columnwise(self, saved: list[Tensor]) -> Face:
        """See ``Operand.columnwise``."""
        context = self._context._replace(record=True, after=self._after)
        column = self._config.input.faces(
            saved[0], rowwise=False, columnwise=True, dtype=self._dtype, context=context
        )[1]
        return required_face(column, "columnwise", "grad_weight")


class ShardedInput(Operand):
    """An input whose columnwise face is on several ranks until backward: this rank's is saved.

    Args:
        row: The rowwise face, of all tokens.
        face: The columnwise face.
        config: The recipe.
        dtype: Dtype of the computation.
        context: Which tensor this is.
    """

    __slots__ = ("_config", "_context", "_dtype", "_quantize", "_sequence", "_shape", "_sharing")

    def __init__(
        self,
        row: Face | None,
        face: ShardedFace,
        config: HybridConfig,
        dtype: torch.dtype,
        context: Context,
    ) -> None:
        super().__init__(row, columnwise_face(face.source, dtype, "grad_weight"))
        self._sequence, self._quantize, self._sharing = face.sequence, face.quantize, face.sharing
        self._shape = face.source.shape
        self._config, self._dtype, self._context = config, dtype, context

    def save(self) -> list[Tensor]:
        """See ``Operand.save``."""
        self._sharing.readers += 1
        return super().save()

    def begin(self, saved: list[Tensor], grad: Tensor) -> None:
        """See ``Operand.begin``: gather, unless another layer has."""
        if is_traced():
            saved = [after(tensor, grad) for tensor in saved]
        self._start(saved)

    def _start(self, saved: list[Tensor]) -> None:
        shared = self._sharing
        if shared.face is None and shared.parts is None:
            shared.parts = self._sequence.start(super().columnwise(saved), "columnwise")
            shared.waiting = shared.readers

    def columnwise(self, saved: list[Tensor]) -> Face:
        """See ``Operand.columnwise``."""
        self._start(saved)
        shared = self._sharing
        if shared.face is None:
            whole = self._sequence.finish(
                super().columnwise(saved), "columnwise", shared.parts or [], self._shape
            )
            shared.face, shared.parts = self._quantized(whole), None
        face = shared.face
        shared.waiting -= 1
        if shared.waiting <= 0:
            shared.face = None
        return face

    def _quantized(self, whole: Face) -> Face:
        """Return the gathered face, or that of gathered values, quantized now."""
        if not self._quantize:
            return whole
        column = self._config.input.faces(
            whole.qdata, rowwise=False, columnwise=True, dtype=self._dtype, context=self._context
        )[1]
        return required_face(column, "columnwise", "grad_weight")


def input_operand(
    input: Tensor,
    cast_from: Tensor,
    weight: Weight,
    config: HybridConfig,
    needs: Needs,
    context: Context,
) -> Operand:
    """Return the operand that an input is.

    Args:
        input: Plain, in the dtype of the computation; or a tensor that was quantized before, whose
            faces are used as they are.
        cast_from: What ``input`` is, or was cast from: what other layers read, too.
        weight: What it is multiplied with.
        config: The recipe.
        needs: Which gradients backward will be asked for.
        context: Which tensor of which layer this is.
    """
    if isinstance(input, QUANTIZED):
        return brought_along(input, needs, input.dtype, config, context)
    dtype = input.dtype
    columnwise = needs.weight and not config.save_original_input
    scope = sharing_scope(cast_from, weight.record) if config.input.repeatable else None
    faces = (
        None
        if scope is None
        else scope.known_faces(
            cast_from, weight.record, (config.input, columnwise, dtype, _mark(context))
        )
    )
    if faces is None:
        faces = config.input.faces(
            input.detach(), rowwise=True, columnwise=columnwise, dtype=dtype, context=context
        )
        if scope is not None:
            scope.remember(cast_from, faces)
    if needs.weight and config.save_original_input:
        return KeptInput(faces[0], input, config, dtype, context)
    return Operand(faces[0], faces[1])


def _mark(context: Context) -> tuple[object, ...]:
    """Return what tells groups apart while something holds them."""
    groups = context.groups
    if groups is None or groups.ends is None:
        return ()
    return groups.num_groups, groups.step, id(groups.ends), groups.ends._version


def brought_along(
    input: Tensor, needs: Needs, dtype: torch.dtype, config: HybridConfig, context: Context
) -> Operand:
    """Return the operand that a tensor is that was quantized before.

    Raises:
        ValueError: If a face that is needed is absent.
    """
    row = rowwise_face(
        _matrix(take_face(input, "rowwise", name="input", gemm="output")), dtype, "output"
    )
    if context.groups is not None:
        return _of_tokens(input, row._replace(groups=context.groups), needs, dtype, config, context)
    if not needs.weight:
        return Operand(row, None)
    column = take_face(input, "columnwise", name="input", gemm="grad_weight")
    if isinstance(column, ShardedFace):
        return ShardedInput(row, column, config, dtype, context)
    return Operand(row, columnwise_face(_matrix(column), dtype, "grad_weight"))


def _of_tokens(
    input: Tensor,
    row: Face,
    needs: Needs,
    dtype: torch.dtype,
    config: HybridConfig,
    context: Context,
) -> Operand:
    """Return the operand that tokens with groups are that were quantized by row before.

    Raises:
        ValueError: If the recipe does not make the columnwise face of the rowwise one.
    """
    quantizer = config.input
    if not needs.weight:
        return Operand(row, None)
    only_row = isinstance(input, HybridTensor) and input.columnwise is None
    if (
        not only_row
        or not isinstance(quantizer, HybridQuantizer)
        or quantizer.columnwise_source == "original"
    ):
        raise ValueError(
            "grad_weight: tokens of experts with a rowwise face, of which the recipe makes the columnwise "
            f"one, are required, got {input!r} for {config}; give the layer the tokens themselves"
        )
    return Operand(row, quantizer.of_rowwise(row, dtype, context))


def faces_of(tensor: HybridTensor, *, rowwise: bool, columnwise: bool, dtype: torch.dtype) -> Faces:
    """Return the faces asked for of a gradient that came quantized, as those of a matrix.

    Raises:
        ValueError: If one is absent.
    """
    row = column = None
    if rowwise:
        face = tensor.require_face("rowwise", name="grad_output", gemm="grad_input")
        row = rowwise_face(_matrix(face), dtype, "grad_input")
    if columnwise:
        face = tensor.require_face("columnwise", name="grad_output", gemm="grad_weight")
        column = columnwise_face(_matrix(face), dtype, "grad_weight")
    return row, column


def required_face(face: Face | None, direction: str, gemm: str) -> Face:
    """Return a face that a product needs.

    Raises:
        ValueError: If there is none.
    """
    if face is None:
        raise ValueError(f"{gemm}: a {direction} face is required, got a quantizer that made none")
    return face


def _matrix(face: FaceTensor | Tensor) -> FaceTensor:
    """Return a face of a tensor as that of a matrix ``[tokens, features]``."""
    if isinstance(face, QuantizedTensor):
        flat: Any = face if face.dim() == 2 else face.view(face.matrix_shape)
        return flat  # type: ignore[no-any-return]
    values = face.dequantize() if isinstance(face, IdentityTensor) else face
    return IdentityTensor(tokens(values))
