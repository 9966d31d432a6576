"""The operators that compiled graphs measure and cast the weights of a region with, in one launch each.

Only ``ops.inductor`` puts them into graphs, whose code calls ``measured`` and ``quantized``: what these return are
views of one buffer, which operators may not return.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybridtensor.ops.cast.definition import tensors_of
from hybridtensor.ops.cast.multi_tensor import measure_all, quantize_all
from hybridtensor.ops.cast.operator import amaxes_of, faces_like, share_amax
from hybridtensor.ops.cast.request import CastInputs, CastRequest, parse_request
from hybridtensor.ops.library import define

_ALIGNED = 4  # numbers of four bytes: kernels are compiled for records at multiples of 16 bytes


def measured(xs: list[Tensor], request: str) -> list[Tensor]:
    """Return the fp32 amaxes of both faces of each matrix, or the shared one."""
    parsed = parse_request(request)
    pairs = measure_all(xs, parsed)
    return [amax for pair in pairs for amax in pair[: _count(parsed)]]


def _count(request: CastRequest) -> int:
    return 1 if share_amax(request) else 2


MEASURE_ALL = define(
    "measure_all(Tensor[] xs, str request) -> Tensor[]",
    reference=lambda xs, request: _distinct(measured(xs, request)),
    fake=lambda xs, request: [amax for x in xs for amax in amaxes_of(x, parse_request(request))],
)


def _distinct(made: list[Tensor]) -> list[Tensor]:
    """Remove tensors that are in the list twice."""
    return [
        tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
        for tensor in made
    ]


def quantized(
    xs: list[Tensor],
    request: str,
    scales: list[Tensor],
    records: list[Tensor],
    row_amaxes: list[Tensor],
    column_amaxes: list[Tensor],
    after: Tensor | None = None,
    notes: int = 0,
) -> list[Tensor]:
    """Quantize each matrix as ``quantize`` does; input lists without entries are empty."""
    parsed = parse_request(request)
    measures = [cast is not None and cast.measures is not None for cast in parsed[:2]]
    if (measures[0] and not row_amaxes) or (measures[1] and not column_amaxes):
        pairs = measure_all(xs, parsed)
        row_amaxes = [pair[0] for pair in pairs] if measures[0] else []
        column_amaxes = [pair[1] for pair in pairs] if measures[1] else []
    noted = _zeros(len(xs), notes, xs[0].device) if notes else []
    nothing = [None] * len(xs)
    parts = zip(
        scales or nothing,
        noted or records or nothing,
        nothing,
        [0] * len(xs),
        _together(row_amaxes) or nothing,
        _together(column_amaxes) or nothing,
        strict=True,
    )
    given = [CastInputs(*of_matrix) for of_matrix in parts]
    made = quantize_all(xs, parsed, given)
    return _in_order([tensors_of(faces) for faces in made], noted)


def _zeros(count: int, size: int, device: torch.device) -> list[Tensor]:
    pitch = -(-size // _ALIGNED) * _ALIGNED
    records = torch.zeros(count, pitch, dtype=torch.float32, device=device)
    return list(records[:, :size].unbind())


def _together(amaxes: list[Tensor]) -> list[Tensor]:
    """Copy amaxes into one buffer, as if measured together: a launch's table contains their distances."""
    if len({amax.untyped_storage().data_ptr() for amax in amaxes}) <= 1:
        return amaxes
    return list(torch.cat(amaxes).split([len(amax) for amax in amaxes]))


def _in_order(made: Sequence[Sequence[Tensor]], noted: list[Tensor]) -> list[Tensor]:
    """Return each matrix's tensors followed by its record, as ``quantize`` does."""
    ends = [[record] for record in noted] or [[]] * len(made)
    return [
        tensor for of_matrix, end in zip(made, ends, strict=True) for tensor in (*of_matrix, *end)
    ]


def _faces_fake(
    xs: list[Tensor], request: str, *others: Any, after: object = None, notes: int = 0
) -> list[Tensor]:
    notes = others[5] if len(others) > 5 else notes
    parsed = parse_request(request)
    return [tensor for x in xs for tensor in faces_like(x, parsed, notes)]


QUANTIZE_ALL = define(
    "quantize_all(Tensor[] xs, str request, Tensor[] encode_scales, Tensor[] records, Tensor[] row_amaxes, "
    "Tensor[] column_amaxes, Tensor? after=None, int notes=0) -> Tensor[]",
    reference=lambda *inputs, **options: _distinct(quantized(*inputs, **options)),
    fake=_faces_fake,
)
