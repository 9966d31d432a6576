"""The cast that the code of Inductor calls: ``quantize_into`` without the dispatcher, for one place in a graph."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hybridtensor.ops.cast.definition import reference_cast
from hybridtensor.ops.cast.kernel import KernelCast, cast_on_gpu
from hybridtensor.ops.cast.request import CastInputs, parse_request
from hybridtensor.ops.kernel_library import ALIGNMENT

_NUM_INPUTS = 6  # of a cast, followed by ``after`` and ``num_amaxes``


class CastInGraph:
    """The cast at one place of a graph, prepared again when the shape or strides change."""

    __slots__ = ("cast", "shape", "strides")

    def __init__(self) -> None:
        self.cast: KernelCast | None = None
        self.shape: tuple[int, ...] = ()
        self.strides: tuple[int, ...] = ()

    def __call__(self, x: Tensor, out: list[Tensor], request: str, *given: Any) -> None:
        """Cast ``x`` into ``out`` as the operator ``quantize_into`` does, whose other arguments are ``given``."""
        inputs = CastInputs(*given[:_NUM_INPUTS])
        num_amaxes = given[_NUM_INPUTS + 1 :]  # left out where it is 0
        if num_amaxes and num_amaxes[0]:
            # Amaxes are recorded in the last tensor.
            *out, record = out
            inputs = inputs._replace(amax_record=record.zero_())
        address = x.data_ptr()
        for amax in inputs[4:6]:
            if amax is not None:
                # One test for all: a low bit stays set if any address is no multiple.
                address |= amax.data_ptr()
        is_aligned = address % ALIGNMENT == 0
        cast, is_known = self.cast, x.shape == self.shape and x.stride() == self.strides
        if cast is not None and is_known and is_aligned:
            # The graph's code has made its device the current one.
            cast.launch(x, (out[: cast.of_row], out[cast.of_row :]), inputs)
            return
        parsed = parse_request(request)
        on_gpu = x.is_cuda and x.numel()
        found = cast_on_gpu(x, parsed, inputs) if on_gpu else reference_cast(parsed)
        found.run_into(x, out, inputs)
        if isinstance(found, KernelCast) and not found.copies and is_aligned:
            self.cast, self.shape, self.strides = found, x.shape, x.stride()
