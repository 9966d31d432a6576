"""Measuring the amaxes that a matrix is scaled by, with one kernel for both faces."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtensor.kernels.groups import Matrix
from hybridtensor.ops.cast.tiles import KernelFace, Tiling, converts_to_fp8, overlaps_kernels
from hybridtensor.ops.kernel_library import Launch
from hybridtensor.ops.prologue import Prologue, as_argument
from hybridtensor.ops.zeros import zero

# 8,192 elements of a program, in four warps: 2.5 us for 2048x2048, 36.5 for 8192x8192 on an H200, where four times as
# many in eight take 3.4 and 38.7.
_FLAT_BLOCK, _FLAT_STEPS, _FLAT_WARPS = 2048, 4, 4


class Measurement:
    """The kernel that measures the amaxes of matrices with one layout, for ``wanted`` faces."""

    def __init__(
        self,
        faces: tuple[KernelFace, KernelFace],
        wanted: tuple[bool, bool],
        matrix: Matrix,
        device: torch.device,
        tiling: Tiling,
    ) -> None:
        row, column = faces
        _, stride_m, stride_k, m, k = matrix
        self._sizes = m if row.per_row else 1, k if column.per_row else 1
        of_tensor = [face.takes_amax_of_tensor for face in faces]
        shared = all(wanted) and all(of_tensor)
        contiguous = stride_k == 1 and stride_m == k and not tiling.constants.prologue
        self._flat = contiguous and all(p for p, w in zip(of_tensor, wanted, strict=True) if w)
        self._one = self._flat or shared
        self._matrix, self._size = matrix, m * k
        self._streams = row.stream, column.stream
        followed = overlaps_kernels(device)
        if self._flat:
            programs = -(-m * k // (_FLAT_BLOCK * _FLAT_STEPS))
            self._launch = Launch(
                "measure",
                "measure_flat_kernel",
                programs,
                options={"num_warps": _FLAT_WARPS},
                BLOCK=_FLAT_BLOCK,
                STEPS=_FLAT_STEPS,
                ALONE=programs == 1,
                FOLLOWED=followed,
            )
            return
        self._launch = Launch(
            "measure",
            "measure_kernel",
            tiling.number,
            options=tiling.options,
            ROW=row.measurement(wanted[0]),
            COLUMN=column.measurement(wanted[1] and not shared),
            TILE=tiling.constants,
            HW=converts_to_fp8(device),
            FOLLOWED=followed,
        )

    def run(
        self, x: Tensor, prologue: Prologue | None = None, rounding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the fp32 amaxes of both faces; the same tensor twice if they are equal. ``rounding``, key and step,
        is needed where signs are drawn."""
        if self._one:
            amax = zero(x)
            self._start(x, amax, amax, prologue)
            return amax, amax
        amaxes = torch.zeros(sum(self._sizes), dtype=torch.float32, device=x.device)
        of_row, of_column = amaxes.split(self._sizes)
        self._start(x, of_row, of_column, prologue, rounding)
        return of_row, of_column

    def run_into(self, x: Tensor, out: Tensor) -> None:
        """Write the amaxes of the one measured face into ``out``, which holds zeros."""
        self._start(x, out, out)

    def _start(
        self,
        x: Tensor,
        of_row: Tensor,
        of_column: Tensor,
        prologue: Prologue | None = None,
        rounding: Tensor | None = None,
    ) -> None:
        launch = self._launch
        take = launch.take
        if self._flat:
            launch.start(take(x), take(of_row), self._size)
            return
        taken = take(x)
        matrix = as_argument(self._matrix._replace(x=taken), prologue, take)
        drawn = taken if rounding is None else take(rounding)
        launch.start(matrix, take(of_row), take(of_column), drawn, *self._streams)
