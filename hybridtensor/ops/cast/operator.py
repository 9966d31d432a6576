"""The registered operators of casts: their schema, their definition on every device, and what a GPU runs.

Compiled graphs, dispatch modes and the CPU see these operators; eager code on a GPU runs the kernels directly, and the
code of Inductor calls ``CastInGraph``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hybridtensor.ops.amaxes import ReturnedAmaxes
from hybridtensor.ops.cast.definition import ReferenceCast, reference_cast, tensors_of
from hybridtensor.ops.cast.kernel import KernelCast, cast_on_gpu
from hybridtensor.ops.cast.prepared import Faces
from hybridtensor.ops.cast.request import (
    NO_INPUTS,
    CastInputs,
    CastRequest,
    parse_request,
    to_measure,
)
from hybridtensor.ops.face import Face, FaceKind, face_layouts
from hybridtensor.ops.kernel_library import ALIGNMENT
from hybridtensor.ops.library import define, implement

_INPUTS = (
    "str request, Tensor? encode_scale, Tensor? amax_record, Tensor? rounding, SymInt first_row, "
    "Tensor? row_amax=None, Tensor? column_amax=None"
)
NUM_INPUTS = 6  # of a cast, followed by ``after`` and ``num_amaxes``
_IN_GRAPHS = "Tensor? after=None, int num_amaxes=0"


def _reference(x: Tensor, request: str, *inputs: object) -> list[Tensor]:
    taken, returned = taken_inputs(x, *inputs)
    return [*tensors_of(reference_cast(parse_request(request)).run(x, taken)), *returned]


def taken_inputs(x: Tensor, *inputs: Any) -> tuple[CastInputs, list[Tensor]]:
    """Convert the operator's arguments to a cast's inputs, and the amaxes to return, if any."""
    taken, of_graph = CastInputs(*inputs[:NUM_INPUTS]), inputs[NUM_INPUTS:]
    num_amaxes = of_graph[1] if len(of_graph) > 1 else 0  # torch drops what has its default
    returned = [x.new_zeros(num_amaxes, dtype=torch.float32)] if num_amaxes else []
    return taken._replace(amax_record=returned[0]) if returned else taken, returned


def _on_a_gpu(x: Tensor, request: str, *inputs: object) -> list[Tensor]:
    if x.numel() == 0:
        return _reference(x, request, *inputs)
    parsed, (taken, returned) = parse_request(request), taken_inputs(x, *inputs)
    return [*tensors_of(cast_on_gpu(x, parsed, taken).run(x, taken)), *returned]


def _fake(x: Tensor, request: str, *inputs: object) -> list[Tensor]:
    returned = taken_inputs(x, *inputs)[1]
    return [*faces_like(x, parse_request(request)), *returned]


def faces_like(x: Tensor, request: CastRequest) -> list[Tensor]:
    """Return empty tensors like those of the faces that are returned."""
    (rows, columns), (row, column, _source, _dtype) = x.shape, request
    layouts = () if row is None else face_layouts(row.format, rows, columns)
    if column is not None:
        layouts = (*layouts, *face_layouts(column.format, columns, rows))
    return [layout.empty(x.device) for layout in layouts]


# The schema is silent about the write to ``amax_record``, which autograd and graphs need not know of: a maximum
# that is recorded twice, or in any order, is the same, and nothing reads it before the step ends.
QUANTIZE = define(
    f"quantize(Tensor x, {_INPUTS}, {_IN_GRAPHS}) -> Tensor[]", reference=_reference, fake=_fake
)
implement("quantize", _on_a_gpu)


def _measure_reference(x: Tensor, request: str) -> list[Tensor]:
    return _distinct(reference_cast(parse_request(request)).measure(x), parse_request(request))


def _measure_on_a_gpu(x: Tensor, request: str) -> list[Tensor]:
    parsed = parse_request(request)
    return _distinct(cast_on_gpu(x, parsed, NO_INPUTS).measure(x), parsed)


def _distinct(amaxes: tuple[Tensor, Tensor], request: CastRequest) -> list[Tensor]:
    """Remove amaxes that are not returned; the rest are copies, since an operator's results may not alias."""
    found = [amaxes[face] for face in faces_measured(request)]
    # Some are one of many zeros that were filled at once: hooks that offload a saved tensor copy its whole storage, and
    # the others in it are still to be written. ``_is_view`` would not tell: below autograd, views are not marked.
    return [
        amax.clone() if index or amax.untyped_storage().nbytes() > amax.nbytes else amax
        for index, amax in enumerate(found)
    ]


def faces_measured(request: CastRequest) -> list[int]:
    """Return the indices of the faces whose amaxes ``measure`` returns: one where all that are measured have the same,
    that of the tensor, without rotation."""
    casts = request[:2]
    if any(cast is not None and (cast.amax_per == "row" or cast.format.hadamard) for cast in casts):
        return [0, 1]
    # The first one that is measured: kernels measure no other.
    measured = to_measure(request)
    return [0 if measured is None or measured.row is not None else 1]


def amaxes_of(x: Tensor, request: CastRequest) -> list[Tensor]:
    """Return empty tensors like the amaxes that the operator returns."""
    sizes = [
        extent if cast is not None and cast.amax_per == "row" else 1
        for extent, cast in zip(x.shape, request[:2], strict=True)
    ]
    return [x.new_empty(sizes[face], dtype=torch.float32) for face in faces_measured(request)]


MEASURE = define(
    "measure(Tensor x, str request) -> Tensor[]",
    reference=_measure_reference,
    fake=lambda x, request: amaxes_of(x, parse_request(request)),
)
implement("measure", _measure_on_a_gpu)


def _reference_into(x: Tensor, out: list[Tensor], request: str, *inputs: object) -> None:
    for target, made in zip(out, _reference(x, request, *inputs), strict=True):
        target.copy_(made)
    increment_version(out)  # where a mode watches, autograd does not see the copies


QUANTIZE_INTO = define(
    f"quantize_into(Tensor x, Tensor(a!)[] out, {_INPUTS}, {_IN_GRAPHS}) -> ()",
    reference=_reference_into,
    fake=lambda *_: None,
)
implement("quantize_into", lambda *args: CastInGraph()(*args))


class CastInGraph:
    """The cast at one place of Inductor's code, ``quantize_into`` without the dispatcher, prepared again when the shape
    or strides change."""

    __slots__ = ("cast", "shape", "strides")

    def __init__(self) -> None:
        self.cast: KernelCast | None = None
        self.shape: tuple[int, ...] = ()
        self.strides: tuple[int, ...] = ()

    def __call__(self, x: Tensor, out: list[Tensor], request: str, *given: Any) -> None:
        """Cast ``x`` into ``out`` as the operator ``quantize_into`` does, whose other arguments are ``given``."""
        inputs = CastInputs(*given[:NUM_INPUTS])
        num_amaxes = given[NUM_INPUTS + 1 :]  # left out where it is 0
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


class OperatorCast(ReferenceCast):
    """A cast by the registered operators, for dispatch modes and tracing."""

    def __init__(self, request: CastRequest) -> None:
        super().__init__(request)
        self._text = str(request)
        # A measurement is given no delayed scales.
        self._measured = str(to_measure(request) or request)
        self._kinds = [None if cast is None else FaceKind(cast.format) for cast in request[:2]]
        self._row_size = request.num_row_tensors

    def run(self, x: Tensor, inputs: CastInputs) -> Faces:
        if inputs.prologue is not None:
            x = inputs.prologue.matrix(x)
        returned = inputs.amax_record
        if isinstance(returned, ReturnedAmaxes):
            taken = inputs._replace(amax_record=None)[:NUM_INPUTS]
            made = QUANTIZE(x, self._text, *taken, inputs.after, returned.size)
            # The recorded amaxes are the operator's last result.
            returned.tensors.append(made.pop())
        else:
            made = QUANTIZE(x, self._text, *inputs[:NUM_INPUTS], inputs.after)
        row, column = self._kinds
        return (
            None if row is None else Face.of(made[: self._row_size], row),
            None if column is None else Face.of(made[self._row_size :], column),
        )

    def run_into(self, x: Tensor, out: list[Tensor], inputs: CastInputs) -> None:
        if inputs.prologue is not None:
            x = inputs.prologue.matrix(x)
        QUANTIZE_INTO(x, out, self._text, *inputs[:NUM_INPUTS])

    def measure(self, x: Tensor) -> tuple[Tensor, Tensor]:
        amaxes = MEASURE(x, self._measured)
        return amaxes[0], amaxes[-1]
