"""Which bytes of a stack of experts' weights are sent: whole experts, concatenated. Letters as in ``plan``."""

from __future__ import annotations

import functools
import math

from hybridtensor.distributed.fsdp.plan import (
    COLUMN,
    ROW,
    Piece,
    Plan,
    face_plan,
    of_rowwise_plan,
)
from hybridtensor.formats import Format
from hybridtensor.ops.groups import stack_layouts
from hybridtensor.quantizers.hybrid import by_direction
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.subclasses.intercepting import InterceptingTensor


def stack_pieces(
    fmt: Format, direction: str, count: int, matrix: tuple[int, int]
) -> tuple[Piece, ...]:
    """Return the tensors of a face of ``count`` experts as they lie in memory, a row for each."""
    layouts = stack_layouts(fmt, count, *(matrix if direction == ROW else matrix[::-1]))
    return tuple(
        Piece(i, (count, math.prod(layout.shape[1:])), layout.dtype, 0)
        for i, layout in enumerate(layouts)
    )


@functools.lru_cache(maxsize=1024)
def _make_stack_plan(
    config: HybridConfig,
    count: int,
    matrix: tuple[int, int],
    num_ranks: int,
    dim: int,
) -> Plan:
    """Return the plan of a stack of ``count`` experts ``(N, K)``, sharded along ``dim``."""
    whole, rows = "", -(-count // num_ranks)
    if dim != 0:
        whole, rows = f"Shard({dim}): parts of every expert", count
    elif count % num_ranks:
        whole = f"{count} experts on {num_ranks} ranks: FSDP2 takes one tensor of the padded shard's shape"
    row_quantizer, column_quantizer, of_rowwise = by_direction(config.weight)
    # one rank's plan: no expert shares a scale with another one
    row = face_plan(row_quantizer, ROW, matrix[0], 1)
    column = face_plan(column_quantizer, COLUMN, matrix[0], 1)
    if of_rowwise:
        column = of_rowwise_plan(row, column, row_quantizer)
    values = row.kind == column.kind == "values"
    elements = math.prod(matrix) // (1 if dim == 0 else num_ranks)
    return Plan(row, column, values, num_ranks, rows, elements, whole, of_rowwise, matrix=matrix)


def stack_plan(
    weight: InterceptingTensor,
    config: HybridConfig,
    size: tuple[int, ...],
    num_ranks: int,
    dim: int,
) -> Plan:
    """Return the plan of a stack of experts' weights of ``size`` as stored, sharded along ``dim``."""
    rows, columns = size[:0:-1] if weight.is_transposed else size[1:]
    return _make_stack_plan(config, size[0], (rows, columns), num_ranks, dim)
