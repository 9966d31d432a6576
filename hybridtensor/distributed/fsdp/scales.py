"""Quantizing a local shard with the scales of the whole weight, from the amaxes of all ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtensor import ops
from hybridtensor.distributed.fsdp.agreement import around
from hybridtensor.distributed.fsdp.plan import Plan, rows_together
from hybridtensor.ops import CastInputs, Faces, Groups, PreparedCast
from hybridtensor.quantizers import Quantizer, cast_plan
from hybridtensor.state import Context, Section, StateTensors


class Part(NamedTuple):
    """A local shard with all that it is quantized by: amaxes of all ranks, quantizer state, and its position in the
    whole."""

    values: Tensor
    quantizer: Quantizer
    plan: Plan
    rank: int
    amaxes: Tensor | None
    state: StateTensors | None
    dtype: torch.dtype
    section: Section | None = None
    first: int = 0
    record: bool = True

    def faces(self, *, rowwise: bool, columnwise: bool) -> tuple[Faces, int]:
        """Return the faces with the scales of the whole, maybe with extra rows, and the first row of the shard in
        them."""
        values, plan, first = self.values, self.plan, 0
        context = self.context()
        amaxes = None if plan.reduce is None else self.amaxes  # those of another recipe
        derived = plan.derives_columnwise and columnwise
        if amaxes is not None and (plan.reduce == "blocks" or derived):
            values, first = _with_amaxes(values, plan, self.rank, amaxes)
            context = context._replace(first_row=(context.first_row or 0) - first)
        elif amaxes is not None:
            context = context._replace(amaxes=_by_face(plan, amaxes))
        faces = self.quantizer.faces(
            values, rowwise=rowwise, columnwise=columnwise, dtype=self.dtype, context=context
        )
        return faces, first

    def prepare_into(
        self, out: list[Tensor], *, rowwise: bool, columnwise: bool
    ) -> tuple[PreparedCast, CastInputs] | None:
        """Return the cast into ``out`` and its inputs, valid while amaxes and state stay in place; None if one cast
        is not enough."""
        context, plan = self.context(), self.plan
        if plan.matrix is not None:
            return None
        if self.amaxes is not None and plan.reduce is not None:
            other = any(face.reduce not in (None, plan.reduce) for face in (plan.row, plan.column))
            derived = plan.derives_columnwise and columnwise
            if derived or other or plan.reduce == "blocks":
                return None
            context = context._replace(amaxes=_by_face(plan, self.amaxes))
        # Key and step are drawn for each cast, which prepared inputs would repeat.
        if self.state is None and self.quantizer.stochastic:
            return None
        cast = cast_plan(
            self.quantizer, rowwise, columnwise, self.dtype, context, self.values.device
        )
        if cast is None or not ops.can_hold(out, self.values, cast.request):
            return None
        inputs = cast.inputs(self.values, context)
        return ops.prepare(self.values, cast.request, inputs), inputs

    def context(self) -> Context:
        """Return the quantizers' context, with the shard's position in the whole."""
        if self.plan.matrix is not None:
            count, rows = self.values.shape[0], self.plan.matrix[0]
            groups = Groups(count, first=self.first + self.rank * count)
            first_row = groups.first * rows
            return Context("weight", self.state, None, self.record, first_row, groups=groups)
        before = 0 if self.section is None else self.section.first_out
        first_row = before + self.rank * self.values.shape[0]
        return Context("weight", self.state, None, self.record, first_row, self.section)


def _by_face(plan: Plan, amaxes: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the amaxes of each face, of the tensor ``[1]`` or its rows ``[K]``; None where no other rank matters."""
    flat = amaxes.view(-1)
    row, column = (
        None if face.reduce is None else flat if face.reduce == plan.reduce else flat.max()[None]
        for face in (plan.row, plan.column)
    )
    return row, column


def _with_amaxes(values: Tensor, plan: Plan, rank: int, amaxes: Tensor) -> tuple[Tensor, int]:
    """Return the local rows together with the reduced amaxes as values, and the first local row."""
    # Whatever is quantized together with them gets the scales of the whole. They are in rows that are cut off
    # afterwards: below, in scale groups of their own; or where a block is cut, in the rows of that block that other
    # ranks hold.
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
