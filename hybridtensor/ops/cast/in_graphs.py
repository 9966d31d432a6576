"""The cast that the code of Inductor calls: ``quantize_into`` without the dispatcher, for one place in a graph."""

from __future__ import annotations

from torch import Tensor

from hybridtensor.ops.cast.definition import reference_cast
from hybridtensor.ops.cast.kernel import KernelCast, cast_on_gpu
from hybridtensor.ops.cast.request import CastInputs, parse_request

_ALIGNMENT = 16  # bytes: kernels are compiled for such addresses


class CastInGraph:
    """The cast at one place of a graph, prepared again when the shape or strides change."""

    __slots__ = ("cast", "shape", "strides")

    def __init__(self) -> None:
        self.cast: KernelCast | None = None
        self.shape: tuple[int, ...] = ()
        self.strides: tuple[int, ...] = ()

    def __call__(
        self,
        x: Tensor,
        out: list[Tensor],
        request: str,
        encode_scale: Tensor | None,
        noted_amax: Tensor | None,
        rounding: Tensor | None,
        first_row: int,
        row_amax: Tensor | None = None,
        column_amax: Tensor | None = None,
        after: Tensor | None = None,
        notes: int = 0,
    ) -> None:
        """Cast ``x`` into ``out`` as the operator ``quantize_into`` does."""
        address = x.data_ptr()
        if row_amax is not None:
            # One test for all: a low bit stays set if any address is no multiple.
            address |= row_amax.data_ptr()
        if column_amax is not None:
            address |= column_amax.data_ptr()
        if notes:
            *out, noted_amax = out
            noted_amax.zero_()
        inputs = CastInputs(encode_scale, noted_amax, rounding, first_row, row_amax, column_amax)
        cast, lies_alike = self.cast, x.shape == self.shape and x.stride() == self.strides
        if cast is not None and lies_alike and address % _ALIGNMENT == 0:
            # The graph's code has made its device the current one.
            cast.launch(x, (out[: cast.of_row], out[cast.of_row :]), inputs)
            return
        parsed = parse_request(request)
        on_gpu = x.is_cuda and x.numel()
        found = cast_on_gpu(x, parsed, inputs) if on_gpu else reference_cast(parsed)
        found.run_into(x, out, inputs)
        if isinstance(found, KernelCast) and not found.copies and address % _ALIGNMENT == 0:
            self.cast, self.shape, self.strides = found, x.shape, x.stride()
