"""Measuring the amaxes that a matrix is scaled by, with one kernel for both faces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridtensor.ops.cast.tiles import PER_ROW, FaceConstants, converts_to_fp8, overlaps_kernels
from hybridtensor.ops.kernel_library import Launch

_FLAT_BLOCK, _FLAT_STEPS = 8192, 4


class Measurement:
    """The kernel that measures the amaxes of matrices that lie alike.

    Args:
        faces: The rowwise and the columnwise face.
        wanted: Which of them are scaled by an amax that is to be measured.
        extents: Strides and shape of the matrix, ``(stride_m, stride_k, M, K)``.
        device: Where it is.
        tiling: Constants of the tiles, by name, how many there are, and the options of a launch.
    """

    def __init__(
        self,
        faces: tuple[FaceConstants, FaceConstants],
        wanted: tuple[bool, bool],
        extents: tuple[int, int, int, int],
        device: torch.device,
        tiling: tuple[dict[str, Any], int, dict[str, int | None]],
    ) -> None:
        row, column = faces
        stride_m, stride_k, m, k = extents
        of_rows = row.kind in PER_ROW, column.kind in PER_ROW
        self._sizes = m if of_rows[0] else 1, k if of_rows[1] else 1
        plain = [
            not per_row and not face.rotated for per_row, face in zip(of_rows, faces, strict=True)
        ]
        shared = all(wanted) and all(plain)
        contiguous = stride_k == 1 and stride_m == k
        self._flat = contiguous and all(p for p, w in zip(plain, wanted, strict=True) if w)
        self._one = self._flat or shared
        self._extents: tuple[int, ...] = extents
        followed, self._alone = overlaps_kernels(device), False
        if self._flat:
            programs = -(-m * k // (_FLAT_BLOCK * _FLAT_STEPS))
            self._extents, self._alone = (m * k,), programs == 1
            self._launch = Launch(
                "measure",
                "measure_flat_kernel",
                programs,
                options={"num_warps": 8},
                BLOCK=_FLAT_BLOCK,
                STEPS=_FLAT_STEPS,
                ALONE=self._alone,
                FOLLOWED=followed,
            )
            return
        shape, programs, options = tiling
        self._launch = Launch(
            "measure",
            "measure_kernel",
            programs,
            options=options,
            ROW=wanted[0],
            ROW_PER_ROW=of_rows[0],
            ROW_ROTATED=row.rotated,
            COLUMN=wanted[1] and not shared,
            COLUMN_PER_ROW=of_rows[1],
            COLUMN_ROTATED=column.rotated,
            HW=converts_to_fp8(device),
            **shape,
            FOLLOWED=followed,
        )

    def run(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the amaxes of the rowwise and of the columnwise face, fp32; one tensor for both
        where they are one.
        """
        new = torch.empty if self._alone else torch.zeros
        amaxes = new(1 if self._one else sum(self._sizes), dtype=torch.float32, device=x.device)
        of_row, of_column = (amaxes, amaxes) if self._one else amaxes.split(self._sizes)
        self._start(x, of_row, of_column)
        return of_row, of_column

    def run_into(self, x: Tensor, out: Tensor) -> None:
        """Write the amaxes of the one face that is measured into ``out``, which holds zeros."""
        self._start(x, out, out)

    def _start(self, x: Tensor, of_row: Tensor, of_column: Tensor) -> None:
        if self._flat:
            self._launch(x, of_row, *self._extents)
        else:
            self._launch(x, *self._extents, of_row, of_column)
