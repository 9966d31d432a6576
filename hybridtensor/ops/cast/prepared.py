"""A cast that is prepared for matrices with one layout, so that running it again is fast."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod

from torch import Tensor, nn

from hybridtensor.ops.cast.request import CastInputs, CastRequest
from hybridtensor.ops.face import Face, TensorLayout, numeric_layouts
from hybridtensor.ops.kernel_library import ALIGNMENT

Faces = tuple[Face | None, Face | None]
"""The rowwise face and the columnwise face; None where one was not asked for."""


class PreparedCast(ABC):
    """Casts matrices of one shape, stride and dtype as one request says.

    It may be kept, and keeps no tensor alive.

    Attributes:
        request: What it makes.
    """

    request: CastRequest

    @abstractmethod
    def run(self, x: Tensor, inputs: CastInputs) -> Faces:
        """Return the faces of ``x``."""

    @abstractmethod
    def run_into(self, x: Tensor, out: list[Tensor], inputs: CastInputs) -> None:
        """Write the faces of ``x`` into ``out``, the tensors of the rowwise face, then those of the columnwise one.

        ``can_hold(out, x, request)`` must be true.
        """

    @abstractmethod
    def measure(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the amaxes that the rowwise and the columnwise face of ``x`` are scaled by, fp32 ``[1]`` or per row.

        What is returned for a face that was not asked for means nothing.
        """

    @abstractmethod
    def measure_into(self, x: Tensor, out: Tensor) -> None:
        """Write the amaxes of the one face that is asked for into ``out``, which holds zeros.

        Args:
            x: The matrix.
            out: fp32, of the amaxes' shape, at an address that is a multiple of 16.
        """


def request_layouts(request: CastRequest, rows: int, columns: int) -> tuple[TensorLayout, ...]:
    """Return the layouts of the tensors of both faces of a ``[rows, columns]`` matrix, rowwise first."""
    layouts: tuple[TensorLayout, ...] = ()
    if request.row is not None:
        layouts = numeric_layouts(request.row.format, rows, columns)
    if request.column is not None:
        layouts = (*layouts, *numeric_layouts(request.column.format, columns, rows))
    return layouts


def can_hold(out: list[Tensor], x: Tensor, request: CastRequest) -> bool:
    """Return whether faces can be written into ``out``: plain tensors as kernels require, without aliasing."""
    layouts = request_layouts(request, x.shape[0], x.shape[1])
    if len(out) != len(layouts):
        return False
    if not all(type(t) in (Tensor, nn.Parameter) and t.device == x.device for t in (x, *out)):
        return False
    for tensor, layout in zip(out, layouts, strict=True):
        if not layout.is_of(tensor) or tensor.data_ptr() % ALIGNMENT:
            return False
    return not _overlap([x, *out])


def _overlap(tensors: list[Tensor]) -> bool:
    stretches = []
    for tensor in tensors:
        if tensor.numel():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            last = sum((extent - 1) * stride for extent, stride in steps)
            begin = tensor.data_ptr()
            stretches.append((begin, begin + tensor.itemsize * (last + 1)))
    return any(before[1] > after[0] for before, after in itertools.pairwise(sorted(stretches)))
