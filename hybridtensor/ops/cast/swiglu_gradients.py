"""Casting the gradients of a gated activation while they are computed, so that they are never stored.

Shape letters: ``M`` rows, ``N`` columns of the activation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtensor.kernels.groups import Matrix, Output, State
from hybridtensor.ops.cache import Cache
from hybridtensor.ops.cast.launches import FaceOutput, KernelTask
from hybridtensor.ops.cast.lengths import lengths_to_compile
from hybridtensor.ops.cast.prepared import Faces
from hybridtensor.ops.cast.request import CastInputs, CastRequest
from hybridtensor.ops.cast.tiles import KernelFace, Tile, Tiling
from hybridtensor.ops.face import Face
from hybridtensor.ops.kernel_library import Launch, on_device
from hybridtensor.ops.library import is_captured
from hybridtensor.ops.prologue import like_rows

# Both gradients of 8,192 x 14,336 with both faces on an H100: 0.43 ms, in turn 0.72; in tiles of 64 x 64 0.46.
_TILE = Tile(32, 64, 16, 8, 4, None)
_ALIGNMENT = 16  # bytes and elements: kernels are compiled for such addresses and strides


def scales_are_known(request: CastRequest) -> bool:
    """Return whether all scales are delayed ones, so that one kernel can compute and cast the gradients.

    With blocks of 1x128 it could, too, but is bound by arithmetic: 0.77 ms, in turn 0.74 (H100).
    """
    casts = [cast for cast in request[:2] if cast is not None]
    return request.source is None and all(cast.slot >= 0 and cast.stream < 0 for cast in casts)


def cast_swiglu_gradients(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    requests: list[CastRequest],
    inputs: list[CastInputs],
) -> list[Faces] | None:
    """Return the faces of the gradients of ``gate`` and ``up``; None if kernels cannot read these, or would differ.

    Args:
        grad: Gradient of ``silu(gate) * up``; all are ``[M, N]``, of one dtype, on a GPU.
        gate, up: See ``ops.swiglu``.
        requests: Of each gradient, such that ``scales_are_known``; one of both together is that of a matrix
            ``[M, 2 * N]``, gate first.
        inputs: Of each gradient.
    """
    matrices, packed = (grad, gate, up), len(inputs) == 1
    readable = all(
        x.stride(1) == 1 and x.stride(0) % _ALIGNMENT == 0 and x.data_ptr() % _ALIGNMENT == 0
        for x in matrices
    )
    # One kernel casts both, so that both are cast alike, and record amaxes or not.
    casts = {
        (request, None if (r := i.record) is None else r.dtype)
        for request, i in zip(requests, inputs, strict=True)
    }
    # A tile of one gradient must not reach into the other.
    halved = packed and grad.shape[1] % _TILE.columns
    if not readable or not grad.numel() or len(casts) > 1 or halved:
        return None
    ((request, record_dtype),) = casts
    kind = _Kind(
        request,
        grad.shape,
        tuple(x.stride(0) for x in matrices),
        grad.dtype,
        grad.device,
        packed,
        record_dtype,
    )
    with on_device(grad.device):
        launch = _LAUNCHES.get(kind)
        if launch is None:
            _compile_for_other_lengths(kind, matrices, inputs)
            _LAUNCHES[kind] = launch = _GradientsLaunch(kind)
        return launch.run(matrices, inputs)


def _compile_for_other_lengths(
    kind: _Kind, matrices: tuple[Tensor, ...], inputs: list[CastInputs]
) -> None:
    """Compile the kernel for other numbers of rows, once these vary; see ``kernel._compile_for_other_lengths``."""
    rows, columns = kind.shape
    if not matrices[0].is_cuda or min(kind.strides) < columns or is_captured():
        return
    for other in lengths_to_compile(("swiglu", *kind._replace(shape=kind.shape[1:])), rows):
        launch = _GradientsLaunch(kind._replace(shape=torch.Size((other, columns))))
        launch.run(tuple(like_rows(x, other) for x in matrices), inputs)


class _Kind(NamedTuple):
    """All that a launch depends on, except addresses."""

    request: CastRequest
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    packed: bool
    record_dtype: torch.dtype | None  # of where amaxes are recorded


class _GradientsLaunch:
    def __init__(self, kind: _Kind) -> None:
        (m, n), request, device = kind.shape, kind.request, kind.device
        width = 2 * n if kind.packed else n
        faces = KernelFace.of(request.row), KernelFace.of(request.column)
        # The tile's offsets reach as far as in the widest of the matrices and faces.
        reach = Matrix(None, max(width, *kind.strides), 1, m, n)
        tiling = Tiling.of(_TILE, reach, kind.dtype, draws=False)
        constants = tiling.constants._replace(gpu=device.type == "cuda")
        outputs = (
            FaceOutput.of(request.row, m, width, device),
            FaceOutput.of(request.column, width, m, device),
        )
        self._kind, self._outputs = kind, outputs
        task = KernelTask(
            Matrix(None, n, 1, m, width),
            kind.dtype,
            device,
            tiling,
            faces,
            outputs,
            source_dtype=None,
        )
        records, has_row = kind.record_dtype is not None, request.row is not None
        # Both faces of a matrix have its amax, which the rowwise one records for both slots.
        of_faces = task.constants(
            faces[1], (records and has_row, records and not has_row), store=has_row
        )
        self._launch = Launch(
            "swiglu",
            "swiglu_backward_cast_kernel",
            tiling.number,
            options=tiling.options,
            ROW_FACE=of_faces["ROW_FACE"],
            COLUMN_FACE=of_faces["COLUMN_FACE"],
            TILE=constants,
            HW=of_faces["HW"],
            PACKED=kind.packed,
        )

    def run(self, matrices: tuple[Tensor, ...], inputs: list[CastInputs]) -> list[Faces]:
        launch, (m, n), (row, column) = self._launch, self._kind.shape, self._outputs
        take = launch.take
        nothing = take(matrices[0])  # stands for what is absent
        made, targets = [], list[object]()
        for given in inputs:
            rows, columns = row.empty(), column.empty()
            made.append(
                (
                    None if row.kind is None else Face.of(rows, row.kind),
                    None if column.kind is None else Face.of(columns, column.kind),
                )
            )
            factors, amaxes = (
                nothing if t is None else take(t) for t in (given.encode_scale, given.record)
            )
            targets += [
                Output(*row.arguments(rows, nothing, nothing, take)),
                Output(*column.arguments(columns, nothing, nothing, take)),
                State(factors, amaxes, nothing),
            ]
        slots = [-1 if cast is None else cast.slot for cast in self._kind.request[:2]]
        lies = [Matrix(take(x), x.stride(0), 1, m, n) for x in matrices]
        launch.start(*lies, *targets[:3], *targets[-3:], *slots)
        return made


_LAUNCHES: Cache[_Kind, _GradientsLaunch] = Cache(most=1024)
