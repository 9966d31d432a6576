"""Quantizing a rank's part of a weight with the scales of the whole, from the largest magnitudes on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybridtensor.distributed.agreement import around
from hybridtensor.distributed.plan import Plan, rows_together
from hybridtensor.quantizers import Quantizer
from hybridtensor.quantizers.base import writer
from hybridtensor.state import Context


def scaled_alike(
    values: Tensor, quantizer: Quantizer, plan: Plan, rank: int, amaxes: Tensor | None, state: Any, *,
    rowwise: bool, columnwise: bool, dtype: torch.dtype,
) -> tuple[tuple[Any, Any], int]:  # fmt: skip
    """Quantize a part of a weight as the whole would be.

    Args:
        values: This rank's rows, ``[n, K]``.
        quantizer: Of the weight.
        plan: How the weight is gathered.
        rank: In the shards' order.
        amaxes: Largest magnitudes on all ranks, fp32 of shape ``plan.amaxes``, or None.
        state: Of the layer's quantizers.
        rowwise: Make the rowwise face.
        columnwise: Make the columnwise face.
        dtype: Of the computation.

    Returns:
        The operands asked for, maybe of more rows than the part has, and the first of its rows.
    """
    context = Context("weight", state, first_row=rank * values.shape[0])
    rows, first = values, 0
    amaxes = None if plan.reduce is None else amaxes  # those of another recipe
    if amaxes is not None and (plan.reduce == "blocks" or plan.of_rowwise):
        rows, first = _with_amaxes(values, plan, rank, amaxes)
        context = context._replace(first_row=rank * values.shape[0] - first)
    elif amaxes is not None:
        context = context._replace(amaxes=_by_face(plan, amaxes))
    made: tuple[Any, Any] = quantizer.operands(
        rows, rowwise=rowwise, columnwise=columnwise, dtype=dtype, context=context
    )
    return made, first


def writer_alike(
    out: list[Tensor], values: Tensor, quantizer: Quantizer, plan: Plan, rank: int, amaxes: Tensor | None, state: Any,
    *, rowwise: bool, columnwise: bool, dtype: torch.dtype,
) -> Callable[[Tensor], None] | None:  # fmt: skip
    """Return what makes the faces that ``scaled_alike`` returns, in ``out``, again and again; see ``writer``.

    Returns:
        That, or None where it takes more than one cast of this rank's rows.
    """
    context = Context("weight", state, first_row=rank * values.shape[0])
    if amaxes is not None and plan.reduce is not None:
        faces = (plan.row, plan.column)
        if plan.of_rowwise or any(face.reduce not in (None, plan.reduce) for face in faces) or plan.reduce == "blocks":
            return None
        context = context._replace(amaxes=_by_face(plan, amaxes))
    casts = quantizer.casts(rowwise=rowwise, columnwise=columnwise, context=context)
    if casts is None or (state is None and quantizer.stochastic):
        return None
    return writer(out, values, casts, dtype, context)


def _by_face(plan: Plan, amaxes: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return what each face is scaled by, of the tensor ``[1]`` or of its rows ``[K]``; None for scales of its own."""
    flat = amaxes.view(-1)
    row, column = (
        None if face.reduce is None else flat if face.reduce == plan.reduce else flat.max()[None]
        for face in (plan.row, plan.column)
    )
    return row, column


def _with_amaxes(values: Tensor, plan: Plan, rank: int, amaxes: Tensor) -> tuple[Tensor, int]:
    """Return the rows of this rank together with the largest magnitudes, and where its rows begin.

    Whatever is quantized together with them gets the scales of the whole. They are in rows that are cut off afterwards:
    below, in scale groups of their own; or where a block is cut, in the rows of that block that other ranks hold.
    """
    rows, columns = values.shape
    amaxes = amaxes.to(values.dtype)  # exact: magnitudes of such values
    if plan.reduce != "blocks":
        extended = values.new_zeros(rows + rows_together(plan), columns)
        extended[:rows] = values
        extended[rows, : amaxes.shape[1]] = amaxes[0]
        return extended, 0
    before, after = around(plan, rank)
    extended = values.new_zeros(before + rows + after, columns)
    extended[before : before + rows] = values
    begin = rank * rows
    if before:
        extended[0, :: plan.block] = amaxes[begin // plan.block]
    if after:
        extended[-1, :: plan.block] = amaxes[(begin + rows - 1) // plan.block]
    return extended, before
