"""Operands that weights are, by where their columnwise face is until backward; see ``operands``.

| class | from |
|---|---|
| ``Operand`` | a persistent weight, whose faces are the parameter |
| ``MasterOperand`` | a weight in high precision, which keeps its faces, or makes them when they are needed |
| ``TracedMaster`` | the same in a graph, where each face is made where it is used |
| ``GatheredWeight`` | a weight whose columnwise face FSDP2 gathers again for backward |
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybridtensor.linear.operands import Needs, Operand, Weight, required_face
from hybridtensor.ops import Face
from hybridtensor.ops.library import is_traced
from hybridtensor.subclasses import HybridTensor, MasterWeight
from hybridtensor.subclasses.observing import for_products


class MasterOperand(Operand):
    """A weight in high precision: backward asks it for the columnwise face, which it kept, or makes.

    Args:
        weight: The weight.
        needs: Which gradients backward will be asked for.
        dtype: Dtype of the computation.
    """

    __slots__ = (
        "_config",
        "_context",
        "_dtype",
        "_mark",
        "_record",
        "_state",
        "_training",
        "_weight",
    )

    def __init__(self, weight: MasterWeight, needs: Needs, dtype: torch.dtype) -> None:
        self._training = any(needs)
        row, _ = weight.faces(
            rowwise=True,
            columnwise=False,
            dtype=dtype,
            trained=self._training,
            backward_follows=needs.input,
        )
        super().__init__(row, None)
        self._weight: MasterWeight | None = weight
        self._dtype, self._config, self._record = dtype, weight.config, weight.record
        self._context, self._mark = weight.context, weight.mark
        self._state = weight.state_version

    def save(self) -> list[Tensor]:
        """See ``Operand.save``: backward needs no tensor but the weight."""
        self._row = None
        self._record.kept.end_forward(self._config.keep_faces, trained=self._training)
        return []

    def columnwise(self, saved: list[Tensor]) -> Face:
        """See ``Operand.columnwise``.

        Raises:
            RuntimeError: If the weight or its scales changed since forward, or a backward has been here before.
        """
        weight = self._weight
        if weight is None:
            raise RuntimeError(
                "grad_input: a graph that is retained is required for a second backward, got one that is not; "
                "call backward(retain_graph=True) first"
            )
        self._check_unchanged(weight)
        if weight.config == self._config:
            column = weight.faces(rowwise=False, columnwise=True, dtype=self._dtype)[1]
        else:  # another recipe was set since forward
            column = weight.quantized(
                False, True, self._dtype, config=self._config, context=self._context
            )[1]
        return required_face(column, "columnwise", "grad_input")

    def _check_unchanged(self, weight: MasterWeight) -> None:
        """Raise RuntimeError unless the weight, and what scales it, are as forward used them."""
        of = "" if self._context.state is None else self._context.state.name
        name = f"that of {of}" if of else "one"
        replaced = not isinstance(weight, MasterWeight) or weight.record is not self._record
        if replaced or weight.mark != self._mark:
            raise RuntimeError(
                f"grad_input: a weight that is as forward used it is required, got {name} written or replaced since; "
                "do that after backward"
            )
        if weight.config == self._config and weight.state_version != self._state:
            raise RuntimeError(
                f"grad_input: a weight with the scales of forward is required, got {name} with others since; call "
                "step_ after backward, and write weights with a scale in common then"
            )

    def release(self) -> None:
        """See ``Operand.release``."""
        self._record.kept.end_backward(self._config.keep_faces)
        if not _is_retained():
            self._weight = None  # as autograd lets go of what it saved, though the loss lives on


class TracedMaster(Operand):
    """A weight in high precision in a graph: forward and backward make one face each of it.

    Args:
        weight: The weight.
        needs: Which gradients backward will be asked for.
        dtype: Dtype of the computation.
    """

    __slots__ = ("_after", "_amaxes", "_context", "_dtype", "_weight")

    def __init__(self, weight: MasterWeight, needs: Needs, dtype: torch.dtype) -> None:
        self._weight, self._dtype = weight, dtype
        self._after: Tensor | None = None
        self._amaxes = weight.amaxes(dtype) if needs.input else (None, None)
        self._context = for_products(weight.context, dtype, row=True, column=True)
        row, _ = weight.quantized(True, False, dtype, amaxes=self._amaxes, context=self._context)
        super().__init__(row, None)

    def begin(self, saved: list[Tensor], grad: Tensor) -> None:
        """See ``Operand.begin``: a compiler would make in forward, and save, what waits for nothing."""
        self._after = grad

    def columnwise(self, saved: list[Tensor]) -> Face:
        """See ``Operand.columnwise``."""
        _, column = self._weight.quantized(
            False,
            True,
            self._dtype,
            amaxes=self._amaxes,
            after=self._after,
            context=self._context,
        )
        return required_face(column, "columnwise", "grad_input")


class GatheredWeight(Operand):
    """A weight that FSDP2 gathers again for backward: its memory goes in between.

    Args:
        weight: The gathered weight, which stays the same object.
        row: The rowwise face.
        dtype: Dtype of the computation.
    """

    __slots__ = ("_dtype", "_weight")

    def __init__(self, weight: HybridTensor, row: Face | None, dtype: torch.dtype) -> None:
        super().__init__(row, None)
        self._weight, self._dtype = weight, dtype

    def columnwise(self, saved: list[Tensor]) -> Face:
        """See ``Operand.columnwise``."""
        column = self._weight.faces(rowwise=False, columnwise=True, dtype=self._dtype)[1]
        return required_face(column, "columnwise", "grad_input")


def weight_operand(weight: Weight, needs: Needs, dtype: torch.dtype) -> Operand:
    """Return the operand that a weight is: quantized now, kept from before, persistent or gathered."""
    if isinstance(weight, MasterWeight):
        if not is_traced():
            return MasterOperand(weight, needs, dtype)
        if weight.config.keep_faces != "always":
            return TracedMaster(weight, needs, dtype)
    gathered = isinstance(weight, HybridTensor) and weight.is_gathered
    row, column = weight.faces(rowwise=True, columnwise=needs.input and not gathered, dtype=dtype)
    if gathered and isinstance(weight, HybridTensor):
        return GatheredWeight(weight, row, dtype)
    return Operand(row, column)


# Whether the backward that runs now retains its graph: private, and what AOTAutograd asks, too.
_is_retained: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
