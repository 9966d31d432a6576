"""The faces of a gathered weight: tensors that stay, with memory that comes and goes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_versions

from hybridtensor.distributed.fsdp.plan import COLUMN, DIRECTIONS, ROW, Plan
from hybridtensor.distributed.fsdp.torch_compat import free_storage
from hybridtensor.distributed.fsdp.unpack import Copies
from hybridtensor.ops import Face, FaceKind, Faces, empty_face
from hybridtensor.ops.groups import stack_layouts
from hybridtensor.subclasses import FaceTensor, IdentityTensor, QuantizedTensor
from hybridtensor.subclasses.faces import turned


@contextlib.contextmanager
def uncounted_writes(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Write tensors of faces as a gather does: autograd saved them in forward, and would take the gather before
    backward for a write in place."""
    # torch's private contexts, which FSDP2 uses for its own gathers
    no_functions = torch._C.DisableTorchFunctionSubclass()
    with no_functions, torch.no_grad(), preserve_versions(tuple(tensors)):
        yield


class GatheredFaces:
    """The faces of a gathered weight: persistent tensor objects whose storage is resized for each gather."""

    def __init__(
        self,
        plan: Plan,
        size: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        transposed: bool = False,
    ) -> None:
        stored = (*size[:-2], *size[:-3:-1]) if transposed else size
        self.dtype, self._plan = dtype, plan
        self.tensors: dict[str, list[Tensor]] = {}
        self._names = {direction: self._name(plan, direction) for direction in DIRECTIONS}
        anchor = torch.empty(0, dtype=dtype, device=device)
        for direction, name in self._names.items():
            if name not in self.tensors:
                if name == "values":
                    self.tensors[name] = [anchor.new_empty(stored)]
                else:
                    self.tensors[name] = self._empty(plan, direction, size, device)
        if plan.read:
            self.tensors.setdefault("values", [anchor.new_empty(stored)])
        # now: of a tensor without memory torch makes no transpose
        self._turned = [values.transpose(-2, -1) for values in self.tensors.get("values", [])]
        for tensors in self.tensors.values():
            for tensor in tensors:
                free_storage(tensor)
        # FSDP2 gets one of these lists in each gather.
        self._needed = {
            asked: self._tensors_of(*asked) for asked in itertools.product((False, True), repeat=2)
        }
        self.row = self._face(plan, ROW, size, dtype)
        self.column: FaceTensor
        if plan.shares:
            self.column = IdentityTensor(self.row)
        elif self._names[COLUMN] == "values" == self._names[ROW]:
            self.column = self.row
        else:
            self.column = self._face(plan, COLUMN, size, dtype)
        self.transposed = transposed
        if transposed:
            self.row, self.column = self._as_stored(self.column), self._as_stored(self.row)

    @staticmethod
    def _as_stored(face: FaceTensor) -> FaceTensor:
        """Return a face transposed as the stack is stored."""
        of_values = isinstance(face, IdentityTensor) and not isinstance(
            face.source, QuantizedTensor
        )
        return face if of_values else turned(face)

    @staticmethod
    def _empty(
        plan: Plan, direction: str, size: tuple[int, ...], device: torch.device
    ) -> list[Tensor]:
        """Allocate the tensors of a quantized face, uninitialized."""
        fmt = plan.face(direction).format
        other, contraction = size[-2:] if direction == ROW else size[:-3:-1]
        if plan.matrix is None:
            return empty_face(fmt, other, contraction, device).tensors()
        return [layout.empty(device) for layout in stack_layouts(fmt, size[0], other, contraction)]

    @staticmethod
    def _name(plan: Plan, direction: str) -> str:
        """Return the payload name of a face's tensors."""
        if direction == COLUMN and plan.shares:
            return ROW
        return "values" if plan.face(direction).format.is_identity else direction

    def _face(
        self, plan: Plan, direction: str, size: tuple[int, ...], dtype: torch.dtype
    ) -> FaceTensor:
        if self._names[direction] == "values":
            face = IdentityTensor(self.of(direction)[0])
            face.turned = self._turned[0]
            return face
        return QuantizedTensor(self.plain(direction), -1 if direction == ROW else 0, dtype, size)

    def add_alike(
        self,
        copies: Copies,
        alike: dict[tuple[str, int], Tensor],
        names: tuple[str, ...],
        wanted: tuple[bool, bool],
    ) -> None:
        """Add copies of the tensors that are equal on all shards; both faces share one if they are transposes."""
        for (direction, index), tensor in alike.items():
            if direction in names:
                targets = [direction]
                if direction == ROW and self._plan.transposed:
                    targets = [d for d, asked in zip(DIRECTIONS, wanted, strict=True) if asked]
                for target in targets:
                    copies.add(self.tensors[target][index], tensor)

    def of(self, direction: str) -> list[Tensor]:
        return self.tensors[self._names[direction]]

    def plain(self, direction: str) -> Face:
        """Return a face as quantizers make it, of the tensors that stay."""
        return Face.of(self.of(direction), FaceKind(self._plan.face(direction).format))

    def needed(self, rowwise: bool, columnwise: bool) -> list[Tensor]:
        return self._needed[rowwise, columnwise]

    def _tensors_of(self, rowwise: bool, columnwise: bool) -> list[Tensor]:
        filled = self._plan.fills(rowwise, columnwise)
        names = dict.fromkeys(
            self._names[d] for d, there in zip(DIRECTIONS, filled, strict=True) if there
        )
        if self._plan.read and rowwise:
            names["values"] = None
        return [tensor for name in names for tensor in self.tensors[name]]

    @property
    def values(self) -> Tensor | None:
        """Return the high-precision weight, if forward reads it; allocated together with the rowwise face."""
        return self.tensors["values"][0] if self._plan.read else None

    def copy_from(self, made: Faces) -> None:
        """Copy faces that were quantized after the gather."""
        for direction, face in zip(DIRECTIONS, made, strict=True):
            if face is not None and not face.follows_rowwise:
                turned = self.transposed and self._names[direction] == "values"
                for target, new in zip(self.of(direction), face.tensors(), strict=True):
                    target.copy_(new.transpose(-2, -1) if turned else new)

    def stored(self, direction: str) -> FaceTensor:
        """Return a face of the weight as stored, which may have no storage now."""
        return self.row if direction == ROW else self.column

    def is_there(self, direction: str) -> bool:
        """Return whether a face of the weight as stored has storage."""
        if self.transposed:  # the plan's directions are those of its transpose
            direction = COLUMN if direction == ROW else ROW
        elements = self.of(direction)[0]
        return bool(elements.untyped_storage().size()) or not elements.numel()
