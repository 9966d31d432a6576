"""Casting a list of matrices, each as if it were alone: two launches for all of them, in place of two for each.

Shape letters: ``M`` rows, ``K`` columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

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
from hybridtensor.ops.cast.prepared import Faces, PreparedCast
from hybridtensor.ops.cast.request import NO_INPUTS, CastInputs, CastRequest
from hybridtensor.ops.library import is_captured

_WHOLE = 16  # entries: the kernels read and write whole vectors
_ALIGNMENT = 128  # bytes: whole vectors of every dtype begin at divisors
_MOST_LISTS = 1024


def measure_all(xs: Sequence[Tensor], request: CastRequest) -> list[Amaxes]:
    """Return the amaxes that the faces of each matrix are scaled by; see ``PreparedCast.measure``.

    Args:
        xs: ``[M, K]`` each, plain, not empty, on one device.
        request: Which faces, and how; a columnwise one is made of the matrix.
    """
    how = _split_and_launch(ListMeasurement, xs, request)
    found: dict[int, Amaxes] = {}
    if how.launch is not None:
        if not how.alone:
            return how.launch.run(xs)
        found.update(zip(how.together, how.launch.run([xs[i] for i in how.together]), strict=True))
    for i in how.alone:
        found[i] = _alone(xs[i], request, NO_INPUTS).measure(xs[i])
    return [found[i] for i in range(len(xs))]


def quantize_all(
    xs: Sequence[Tensor], request: CastRequest, inputs: Sequence[CastInputs]
) -> list[Faces]:
    """Return the faces of each matrix, with the bits of ``ops.quantize``.

    Args:
        xs: As for ``measure_all``.
        request: Which faces, and how; a columnwise one is made of the matrix.
        inputs: Of each matrix, all of the same kinds; with the amaxes that it is scaled by, if it is.
    """
    how = _split_and_launch(ListCast, xs, request, inputs)
    found: dict[int, Faces] = {}
    if how.launch is not None:
        if not how.alone:
            return how.launch.run(xs, inputs)
        given = [inputs[i] for i in how.together]
        made = how.launch.run([xs[i] for i in how.together], given)
        found.update(zip(how.together, made, strict=True))
    for i in how.alone:
        found[i] = _alone(xs[i], request, inputs[i]).run(xs[i], inputs[i])
    return [found[i] for i in range(len(xs))]


L = TypeVar("L", bound=List)


class _Split(NamedTuple, Generic[L]):
    """How a list of matrices is cast.

    Attributes:
        together: Which matrices one launch casts.
        alone: Which are cast one by one.
        launch: The launch, or None if there are none together.
    """

    together: list[int]
    alone: list[int]
    launch: L | None


_LISTS: dict[tuple[object, ...], _Split[Any]] = {}


def _split_and_launch(
    kind: type[L],
    xs: Sequence[Tensor],
    request: CastRequest,
    inputs: Sequence[CastInputs] = (),
) -> _Split[L]:
    """Look up how matrices that lie so are cast, with inputs at such distances from the first; worked out once."""
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
        if len(_LISTS) >= _MOST_LISTS:
            _LISTS.clear()
        found = _LISTS[key] = _Split(together, alone, launch)
    return found


def _split(xs: Sequence[Tensor], request: CastRequest) -> tuple[list[int], list[int]]:
    """Return which matrices are cast together, and which one by one."""
    every = list(range(len(xs)))
    if len(xs) < 2 or not xs[0].is_cuda or not request.has_kernels or request.source is not None:
        return [], every
    together = [i for i in every if is_whole(xs[i]) and xs[i].dtype == xs[0].dtype]
    if len(together) == len(every):
        return every, []
    return (together, [i for i in every if i not in together]) if len(together) > 1 else ([], every)


def is_whole(x: Tensor) -> bool:
    """Return whether the kernels read a matrix: extents, strides and addresses are multiples of 16."""
    m, k = x.shape
    lies_well = x.stride(1) == 1 and x.stride(0) % _WHOLE == 0
    return lies_well and m % _WHOLE == 0 == k % _WHOLE and x.data_ptr() % (_WHOLE * x.itemsize) == 0


def _alone(x: Tensor, request: CastRequest, inputs: CastInputs) -> PreparedCast:
    return cast_on_gpu(x, request, inputs) if x.is_cuda else reference_cast(request)
