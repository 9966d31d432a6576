"""Casting by the definition: on a CPU, of matrices without elements, and of formats that have no kernels."""

from __future__ import annotations

import functools

from torch import Tensor
from torch.autograd.graph import increment_version

from hybridtensor.ops.cast.prepared import Faces, PreparedCast
from hybridtensor.ops.cast.request import Cast, CastInputs, CastRequest, check_rules
from hybridtensor.ops.references.blocks import block_amax
from hybridtensor.ops.references.faces import define_faces


def tensors_of(faces: Faces) -> list[Tensor]:
    """Return the tensors of the rowwise face, then those of the columnwise one."""
    return [tensor for face in faces if face is not None for tensor in face.tensors()]


class ReferenceCast(PreparedCast):
    """Cast by the definition."""

    def __init__(self, request: CastRequest) -> None:
        check_rules(request)
        self.request = request

    def run(self, x: Tensor, inputs: CastInputs) -> Faces:
        return define_faces(x, self.request, inputs)

    def run_into(self, x: Tensor, out: list[Tensor], inputs: CastInputs) -> None:
        for target, made in zip(out, tensors_of(self.run(x, inputs)), strict=True):
            target.copy_(made)
        increment_version(out)  # below a tensor's dispatch autograd does not see the copies

    def measure(self, x: Tensor) -> tuple[Tensor, Tensor]:
        row, column = (_amax_block(cast) for cast in self.request[:2])
        return block_amax(x, row).view(-1), block_amax(x.t(), column).view(-1)

    def measure_into(self, x: Tensor, out: Tensor) -> None:
        of_row, of_column = self.measure(x)
        out.copy_(of_row if self.request.column is None else of_column)


def _amax_block(cast: Cast | None) -> tuple[int | None, None]:
    """Return the block of one amax: a row, or everything."""
    return (1 if cast is not None and cast.measures else None, None)


reference_cast = functools.lru_cache(maxsize=1024)(ReferenceCast)
