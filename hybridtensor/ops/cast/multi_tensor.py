"""Casting a list of matrices, each as if it were alone: two launches for all of them, in place of two for each.

Shape letters: ``M`` rows, ``K`` columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from hybridtensor.ops.cache import LaunchTables
from hybridtensor.ops.cast.definition import reference_cast
from hybridtensor.ops.cast.kernel import cast_on_gpu
from hybridtensor.ops.cast.lists import (
    Amaxes,
    Distances,
    List,
    ListCast,
    ListMeasurement,
    of_inputs,
)
from hybridtensor.ops.cast.operator import OperatorCast
from hybridtensor.ops.cast.prepared import Faces, PreparedCast
from hybridtensor.ops.cast.request import NO_INPUTS, CastInputs, CastRequest, to_measure
from hybridtensor.ops.library import is_captured

_WHOLE = 16  # entries: the kernels read and write whole vectors
_ALIGNMENT = 128  # bytes: whole vectors of every dtype begin at divisors


def measure_all(xs: Sequence[Tensor], request: CastRequest) -> list[Amaxes]:
    """Return the amaxes of each plain, non-empty matrix ``[M, K]`` on one device; see ``PreparedCast.measure``."""
    # Without delayed scales, which a measurement is not given.
    request = to_measure(request) or request
    how = split_and_launch(ListMeasurement, xs, request)
    found: dict[int, Amaxes] = {}
    if how.launch is not None:
        if not how.alone:
            return how.launch.run(xs)
        found.update(zip(how.together, how.launch.run([xs[i] for i in how.together]), strict=True))
    for i in how.alone:
        found[i] = cast_alone(xs[i], request, NO_INPUTS).measure(xs[i])
    return [found[i] for i in range(len(xs))]


def quantize_all(
    xs: Sequence[Tensor], request: CastRequest, inputs: Sequence[CastInputs]
) -> list[Faces]:
    """Return the faces of each matrix, with the bits of ``ops.quantize``; all inputs are of the same kinds."""
    how = split_and_launch(ListCast, xs, request, inputs)
    found: dict[int, Faces] = {}
    if how.launch is not None:
        if not how.alone:
            return how.launch.run(xs, inputs)
        given = [inputs[i] for i in how.together]
        made = how.launch.run([xs[i] for i in how.together], given)
        found.update(zip(how.together, made, strict=True))
    for i in how.alone:
        found[i] = cast_alone(xs[i], request, inputs[i]).run(xs[i], inputs[i])
    return [found[i] for i in range(len(xs))]


class PreparedList:
    """A cast of matrices into persistent tensors, prepared by address, with one launch where kernels can read them."""

    def __init__(
        self,
        xs: Sequence[Tensor],
        casts: Sequence[PreparedCast],
        outs: Sequence[list[Tensor]],
        inputs: Sequence[CastInputs],
    ) -> None:
        request = casts[0].request
        together, alone = _split(xs, request)
        # A mode or tracer that observes operators would not see one launch for all.
        if not request.suits_lists or any(isinstance(cast, OperatorCast) for cast in casts):
            together, alone = [], list(range(len(xs)))
        self._together, self._request = together, request
        self._alone = [(i, casts[i], outs[i], inputs[i]) for i in alone]
        self._outs, self._inputs = [outs[i] for i in together], [inputs[i] for i in together]
        self._measured = to_measure(request, inputs[0])
        self._measurement: ListMeasurement | None = None
        self._cast: ListCast | None = None

    def run(self, xs: Sequence[Tensor]) -> None:
        for i, cast, out, inputs in self._alone:
            cast.run_into(xs[i], out, inputs)
        if self._together:
            chosen = [xs[i] for i in self._together]
            measured = self._measured
            given = self._inputs if measured is None else self._with_amaxes(chosen, measured)
            if self._cast is None:
                distances = Distances.of(chosen, given)
                self._cast = ListCast(chosen, self._request, distances, self._outs)
            self._cast.run_into(chosen, given, self._outs)

    def _with_amaxes(self, xs: Sequence[Tensor], request: CastRequest) -> list[CastInputs]:
        """Measure the missing amaxes, and return the inputs with them."""
        if self._measurement is None:
            self._measurement = ListMeasurement(xs, request, Distances.of(xs, ()))
        found = zip(self._inputs, self._measurement.run(xs), strict=True)
        return [with_amaxes(given, request, amaxes) for given, amaxes in found]


def with_amaxes(given: CastInputs, measured: CastRequest, amaxes: Amaxes) -> CastInputs:
    """Return inputs with the amaxes of the faces that were measured."""
    return given._replace(
        row_amax=given.row_amax if measured.row is None else amaxes[0],
        column_amax=given.column_amax if measured.column is None else amaxes[1],
    )


L = TypeVar("L", bound=List)


class _Split(NamedTuple, Generic[L]):
    """Which matrices one launch casts (``together``), and which are cast one by one."""

    together: list[int]
    alone: list[int]
    launch: L | None

    @property
    def of_all(self) -> L | None:
        """The launch if it casts every matrix, else None."""
        return None if self.alone else self.launch


_LISTS: LaunchTables[_Split[Any]] = LaunchTables(most=1024)


def split_and_launch(
    kind: type[L],
    xs: Sequence[Tensor],
    request: CastRequest,
    inputs: Sequence[CastInputs] = (),
) -> _Split[L]:
    """Return the cached split and launch of matrices at these distances."""
    first = xs[0]
    begin = first.data_ptr()
    lie = [(x.data_ptr() - begin, x.shape, x.stride(), x.dtype) for x in xs]
    key = kind, request, first.device, begin % _ALIGNMENT, tuple(lie), of_inputs(inputs)
    found = _LISTS.get(key)
    if found is None:
        if is_captured():  # no table can be written now
            return _Split([], list(range(len(xs))), None)
        together, alone = _split(xs, request)
        launch = None
        if together:
            chosen = [xs[i] for i in together]
            distances = Distances.of(chosen, [inputs[i] for i in together] if inputs else ())
            launch = kind(chosen, request, distances)
        found = _LISTS.add(key, _Split(together, alone, launch))
    return found


def _split(xs: Sequence[Tensor], request: CastRequest) -> tuple[list[int], list[int]]:
    every = list(range(len(xs)))
    if len(xs) < 2 or not xs[0].is_cuda or not request.has_kernels or request.source is not None:
        return [], every
    if request.draws_signs:  # which each cast does for itself
        return [], every
    together = [i for i in every if is_whole(xs[i]) and xs[i].dtype == xs[0].dtype]
    if len(together) == len(every):
        return every, []
    return (together, [i for i in every if i not in together]) if len(together) > 1 else ([], every)


def is_whole(x: Tensor) -> bool:
    """Return whether the list kernels can read a matrix: extents, strides and its address are multiples of 16."""
    return lies_whole(x) and x.data_ptr() % (_WHOLE * x.itemsize) == 0


def lies_whole(x: Tensor) -> bool:
    """Return ``is_whole`` of a tensor that has no address yet."""
    m, k = x.shape
    lies_well = x.stride(1) == 1 and x.stride(0) % _WHOLE == 0
    return lies_well and m % _WHOLE == 0 == k % _WHOLE


def cast_alone(x: Tensor, request: CastRequest, inputs: CastInputs) -> PreparedCast:
    """Return the cast of one matrix of a list."""
    return cast_on_gpu(x, request, inputs) if x.is_cuda else reference_cast(request)
