"""The faces of a gathered weight: tensors that stay, with memory that comes and goes."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from hybridtensor.distributed.plan import COLUMN, ROW, Plan
from hybridtensor.distributed.torch_compat import (
    free_storage,
)
from hybridtensor.ops import Cast
from hybridtensor.ops.cast import empty_face
from hybridtensor.subclasses import Face, IdentityTensor, QuantizedTensor

_DIRECTIONS = (ROW, COLUMN)


class Faces:
    """The faces of a gathered weight: tensors that stay, with memory that comes and goes.

    Args:
        plan: How the weight is gathered.
        size: ``[N, K]``.
        dtype: Of the computation.
        device: Where it is gathered.
    """

    def __init__(self, plan: Plan, size: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.tensors: dict[str, list[Tensor]] = {}
        self._names = {direction: self._name(plan, direction) for direction in _DIRECTIONS}
        anchor = torch.empty(0, dtype=dtype, device=device)
        for direction, name in self._names.items():
            if name not in self.tensors:
                fmt = plan.face(direction).format
                matrix = size if direction == ROW else size[::-1]
                made = [anchor.new_empty(size)] if name == "values" else empty_face(anchor, Cast(fmt.name), *matrix)
                self.tensors[name] = made
        if plan.read:
            self.tensors.setdefault("values", [anchor.new_empty(size)])
        self._read = plan.read
        for tensors in self.tensors.values():
            for tensor in tensors:
                free_storage(tensor)
        self._needed = {asked: self._tensors_of(*asked) for asked in itertools.product((False, True), repeat=2)}
        self._spared = {
            asked: [t for t in self._needed[True, True] if not any(t is one for one in needed)]
            for asked, needed in self._needed.items()
        }
        self.row = self._face(plan, ROW, size, dtype)
        self.column = self.row if self._names[COLUMN] == "values" == self._names[ROW] else None
        if plan.column.kind == "held":
            self.column = IdentityTensor(self.row)
        elif self.column is None:
            self.column = self._face(plan, COLUMN, size, dtype)

    @staticmethod
    def _name(plan: Plan, direction: str) -> str:
        """Return under which name the tensors of a face are."""
        if direction == COLUMN and plan.column.kind == "held":
            return ROW
        return "values" if plan.face(direction).format.is_identity else direction

    def _face(self, plan: Plan, direction: str, size: tuple[int, int], dtype: torch.dtype) -> Face:
        tensors = self.tensors[self._names[direction]]
        if self._names[direction] == "values":
            return IdentityTensor(tensors[0])
        scales = (tensors[1], tensors[2] if len(tensors) == 3 else None)
        axis = -1 if direction == ROW else 0
        return QuantizedTensor(tensors[0], *scales, plan.face(direction).format, axis, dtype, size)

    def of(self, direction: str) -> list[Tensor]:
        """Return the tensors of one face."""
        return self.tensors[self._names[direction]]

    def needed(self, rowwise: bool, columnwise: bool) -> list[Tensor]:
        """Return the tensors of the faces asked for."""
        return self._needed[rowwise, columnwise]

    def _tensors_of(self, rowwise: bool, columnwise: bool) -> list[Tensor]:
        names = dict.fromkeys(
            self._names[d] for d, asked in zip(_DIRECTIONS, (rowwise, columnwise), strict=True) if asked
        )
        if self._read and rowwise:
            names["values"] = None
        return [tensor for name in names for tensor in self.tensors[name]]

    def spared(self, rowwise: bool, columnwise: bool) -> list[Tensor]:
        """Return the tensors of the faces that are not asked for."""
        return self._spared[rowwise, columnwise]

    @property
    def values(self) -> Tensor | None:
        """The values, if forward reads them; there with the rowwise face."""
        return self.tensors["values"][0] if self._read else None

    def is_there(self, direction: str) -> bool:
        """Whether a face has memory."""
        elements = self.of(direction)[0]
        return bool(elements.untyped_storage().size()) or not elements.numel()
