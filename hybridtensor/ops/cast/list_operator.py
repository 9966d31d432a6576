"""The operators that compiled graphs measure and cast the weights of a region with, in one launch each.

Only ``ops.inductor`` puts them into graphs. They write into buffers that it allocates, of which the results are views.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridtensor.ops.cast.lists import (
    AmaxBuffer,
    BufferView,
    FaceBuffers,
    ListCast,
    ListMeasurement,
)
from hybridtensor.ops.cast.multi_tensor import (
    cast_alone,
    measure_all,
    split_and_launch,
    with_amaxes,
)
from hybridtensor.ops.cast.operator import faces_measured
from hybridtensor.ops.cast.request import (
    NO_INPUTS,
    CastInputs,
    CastRequest,
    parse_request,
    to_measure,
)
from hybridtensor.ops.kernel_library import ALIGNMENT, aligned_fp32
from hybridtensor.ops.library import define, is_captured

_MOST_REGIONS = 1024


class Written(NamedTuple):
    """Where an operator of lists writes its results: buffers, and the place of each tensor in them.

    Attributes:
        sizes: Entries and dtype of each buffer.
        places: Of each matrix's tensors, in order: the index of a buffer, and the place in it.
    """

    sizes: list[tuple[int, torch.dtype]]
    places: list[list[tuple[int, BufferView]]]

    def empty(self, device: torch.device) -> list[Tensor]:
        """Allocate the buffers."""
        return [torch.empty(size, dtype=dtype, device=device) for size, dtype in self.sizes]

    def views(self, buffers: list[Tensor]) -> list[list[Tensor]]:
        """Return each matrix's tensors."""
        return [[buffers[i].as_strided(*place) for i, place in each] for each in self.places]


def amaxes_written(shapes: list[tuple[int, int]], request: CastRequest) -> Written:
    """Return where the amaxes that ``measure`` returns of matrices ``[M, K]`` are written."""
    amaxes, faces = AmaxBuffer(request, shapes), faces_measured(request)
    places = [[(0, of_faces[face]) for face in faces] for of_faces in amaxes.places]
    return Written([(amaxes.size, torch.float32)], places)


def faces_written(
    shapes: list[tuple[int, int]], request: CastRequest, num_amaxes: int = 0
) -> Written:
    """Return where both faces of matrices ``[M, K]`` are written, and the records of ``num_amaxes`` amaxes."""
    row = FaceBuffers(request.row, shapes)
    column = FaceBuffers(request.column, [(k, m) for m, k in shapes])
    sizes, of_faces = [*row.sizes, *column.sizes], zip(row.places, column.places, strict=True)
    places = [list(enumerate([*of_row, *of_column])) for of_row, of_column in of_faces]
    if num_amaxes:
        for of_matrix, record in zip(places, _records(len(shapes), num_amaxes), strict=True):
            of_matrix.append((len(sizes), record))
        sizes.append((len(shapes) * aligned_fp32(num_amaxes), torch.float32))
    return Written(sizes, places)


def _records(count: int, size: int) -> list[BufferView]:
    return [((size,), (1,), index * aligned_fp32(size)) for index in range(count)]


def shapes_of(xs: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the shapes of matrices ``[M, K]``."""
    return [(x.shape[0], x.shape[1]) for x in xs]


class MeasureAllInGraph:
    """The measurement of a region's weights at one place of a graph, by their addresses: equal blocks share graphs."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], ListMeasurement] = {}

    def __call__(self, xs: list[Tensor], out: Tensor, request: str) -> None:
        """Measure ``xs`` into ``out`` as the operator ``measure_all_into`` does."""
        out.zero_()
        addresses = tuple([x.data_ptr() for x in xs])
        # Under capture ``split_and_launch`` keeps the table for replays.
        launch = None if is_captured() else self._known.get(addresses)
        if launch is None:
            parsed = parse_request(request)
            launch = split_and_launch(ListMeasurement, xs, parsed).of_all
            if launch is None:
                _measure_alone(xs, out, parsed)
                return
            _keep(self._known, addresses, launch)
        launch.run_into(xs, out)


def _measure_alone(xs: list[Tensor], out: Tensor, request: CastRequest) -> None:
    into = amaxes_written(shapes_of(xs), request).views([out])
    for x, of_matrix in zip(xs, into, strict=True):
        amaxes = cast_alone(x, request, NO_INPUTS).measure(x)
        for target, face in zip(of_matrix, faces_measured(request), strict=True):
            target.copy_(amaxes[face])


class QuantizeAllInGraph:
    """The casts of a region's weights at one place of a graph, by their addresses: equal blocks share graphs."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], _Launches] = {}

    def __call__(
        self,
        xs: list[Tensor],
        out: list[Tensor],
        request: str,
        scales: list[Tensor],
        records: list[Tensor],
        row_amaxes: list[Tensor],
        column_amaxes: list[Tensor],
        after: Tensor | None = None,
        num_amaxes: int = 0,
    ) -> None:
        """Cast ``xs`` into ``out`` as the operator ``quantize_all_into`` does."""
        if num_amaxes:
            *out, returned = out
            returned.zero_()
            records = [returned]
        # Amaxes are elsewhere in each step; a launch's table contains how far apart they are.
        placed = (*xs, *scales) if num_amaxes else (*xs, *scales, *records)
        addresses = (
            *[tensor.data_ptr() for tensor in placed],
            *_distances(row_amaxes),
            *_distances(column_amaxes),
        )
        known = None if is_captured() else self._known.get(addresses)
        if known is None:
            if num_amaxes:
                records = [returned.as_strided(*place) for place in _records(len(xs), num_amaxes)]
            self._prepare(addresses, xs, out, request, scales, records, row_amaxes, column_amaxes)
            return
        scale, record, *amaxes = [
            each[0] if each else None for each in (scales, records, row_amaxes, column_amaxes)
        ]
        given = CastInputs(scale, record, None, 0, amaxes[0], amaxes[1])
        if known.measured is not None:
            missing, measurement = known.measured
            given = with_amaxes(given, missing, measurement.of_first(xs))
        known.cast.run_into_buffers(xs[0], given, out)

    def _prepare(
        self,
        addresses: tuple[int, ...],
        xs: list[Tensor],
        out: list[Tensor],
        request: str,
        *lists: list[Tensor],
    ) -> None:
        """Cast, and keep the launches for the next call with these addresses."""
        parsed, together = parse_request(request), [*lists[:2], *map(_together, lists[2:])]
        inputs = _inputs(len(xs), *together)
        missing = to_measure(parsed, inputs[0])
        if missing is not None:
            pairs = zip(inputs, measure_all(xs, missing), strict=True)
            inputs = [with_amaxes(given, missing, found) for given, found in pairs]
        cast = split_and_launch(ListCast, xs, parsed, inputs).of_all
        if cast is None:
            into = faces_written(shapes_of(xs), parsed).views(out)
            for x, of_matrix, given in zip(xs, into, inputs, strict=True):
                cast_alone(x, parsed, given).run_into(x, of_matrix, given)
            return
        cast.run_into_buffers(xs[0], inputs[0], out)
        if any(mine is not each for mine, each in zip(together, lists, strict=True)):
            return  # the launch is one for copies of the amaxes
        if missing is None:
            _keep(self._known, addresses, _Launches(None, cast))
            return
        measurement = split_and_launch(ListMeasurement, xs, missing).of_all
        if measurement is not None:
            _keep(self._known, addresses, _Launches((missing, measurement), cast))


class _Launches(NamedTuple):
    """What casts the weights of a region: after a measurement if amaxes are missing."""

    measured: tuple[CastRequest, ListMeasurement] | None
    cast: ListCast


def _inputs(
    count: int,
    scales: list[Tensor],
    records: list[Tensor],
    row_amaxes: list[Tensor],
    column_amaxes: list[Tensor],
) -> list[CastInputs]:
    """Return the inputs of each matrix; lists without entries are empty."""
    nothing = [None] * count
    given = [each or nothing for each in (scales, records, row_amaxes, column_amaxes)]
    return [
        CastInputs(scale, record, None, 0, row_amax, column_amax)
        for scale, record, row_amax, column_amax in zip(*given, strict=True)
    ]


def _distances(amaxes: list[Tensor]) -> list[int]:
    """Return how far amaxes are from the first one, and how that one is aligned."""
    if not amaxes:
        return []
    first, *others = [amax.data_ptr() for amax in amaxes]
    return [first % ALIGNMENT, *[address - first for address in others]]


def _together(amaxes: list[Tensor]) -> list[Tensor]:
    """Copy amaxes into one buffer, unless they are in one, of which the first is where kernels expect it."""
    in_one = len({amax.untyped_storage().data_ptr() for amax in amaxes}) <= 1
    if in_one and not (amaxes and amaxes[0].data_ptr() % ALIGNMENT):
        return amaxes
    return list(torch.cat(amaxes).split([len(amax) for amax in amaxes]))


def _keep(known: dict[Any, Any], addresses: tuple[int, ...], launch: object) -> None:
    if len(known) >= _MOST_REGIONS:
        known.clear()
    known[addresses] = launch


MEASURE_ALL = define(
    "measure_all_into(Tensor[] xs, Tensor(a!) out, str request) -> ()",
    reference=lambda *given: MeasureAllInGraph()(*given),
    fake=lambda *_: None,
)


QUANTIZE_ALL = define(
    "quantize_all_into(Tensor[] xs, Tensor(a!)[] out, str request, Tensor[] encode_scales, Tensor[] records, "
    "Tensor[] row_amaxes, Tensor[] column_amaxes, Tensor? after=None, int num_amaxes=0) -> ()",
    reference=lambda *given, **options: QuantizeAllInGraph()(*given, **options),
    fake=lambda *_, **__: None,
)


def measured(xs: list[Tensor], request: str) -> list[Tensor]:
    """Run ``MEASURE_ALL`` with buffers of its own; return the fp32 amaxes of each matrix, one after the other."""
    written = amaxes_written(shapes_of(xs), parse_request(request))
    buffers = written.empty(xs[0].device)
    MEASURE_ALL(xs, buffers[0], request)
    return [tensor for of_matrix in written.views(buffers) for tensor in of_matrix]


def quantized(xs: list[Tensor], request: str, *given: Any) -> list[Tensor]:
    """Run ``QUANTIZE_ALL``, whose other arguments are ``given``, with buffers of its own; return the tensors of each
    matrix, one after the other."""
    num_amaxes = given[5] if len(given) > 5 else 0
    written = faces_written(shapes_of(xs), parse_request(request), num_amaxes)
    buffers = written.empty(xs[0].device)
    QUANTIZE_ALL(xs, buffers, request, *given)
    return [tensor for of_matrix in written.views(buffers) for tensor in of_matrix]
