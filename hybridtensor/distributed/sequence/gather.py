"""Gathers of activations that are quantized where their tokens are.

Shape letters: ``T`` tokens of all ranks, ``t`` of this one, ``K`` features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from hybridtensor import ops
from hybridtensor.distributed.fsdp.plan import ROW
from hybridtensor.distributed.sequence.layout import SequenceLayout, c10d
from hybridtensor.distributed.sequence.plan import SequencePlan
from hybridtensor.formats import FP8_E4M3_ROW, FP8_E4M3_TENSOR
from hybridtensor.ops import Cast, CastRequest, Face, columnwise_of
from hybridtensor.ops.autograd import Function
from hybridtensor.ops.transpose import transposed
from hybridtensor.quantizers import HybridQuantizer, Quantizer, tokens
from hybridtensor.state import Context
from hybridtensor.subclasses import HybridTensor
from hybridtensor.subclasses.faces import face_tensor
from hybridtensor.subclasses.sharded_face import ShardedFace


class SequenceGather(NamedTuple):
    """How an activation of one layer is quantized on its shard and gathered along ``dim``."""

    quantizer: Quantizer
    context: Context
    plan: SequencePlan
    layout: SequenceLayout
    dim: int
    columnwise: bool
    rank: int

    def whole_shape(self, shape: torch.Size) -> tuple[int, ...]:
        whole = list(shape)
        whole[self.dim] *= self.layout.num_ranks
        return tuple(whole)

    def quantized(self, x: Tensor) -> HybridTensor:
        """Return all tokens, quantized; the columnwise face is gathered when it is first requested."""
        matrix, dtype, layout = tokens(x).detach(), x.dtype, self.layout
        shape = self.whole_shape(x.shape)
        own_column = self.columnwise and self.plan.column == "bytes"
        row, column = self.quantizer.faces(
            matrix, rowwise=True, columnwise=own_column, dtype=dtype, context=self._context(matrix)
        )
        if row is None:
            raise ValueError(f"{self.context}: a quantizer made no rowwise face; it is required")
        # Products fused with gathers pay with 32768 tokens (q, k and v 1.32x), not with 8192 (0.95x): that is left to
        # torch's compiler.
        whole = layout.finish(row, ROW, layout.start(row, ROW), x.shape)
        rowwise = face_tensor(whole, -1, shape, dtype)
        if not self.columnwise:
            return HybridTensor(rowwise, None)
        if self.plan.column in ("transposed", "rowwise"):
            return HybridTensor(
                rowwise, face_tensor(self._column_of(whole, dtype), 0, shape, dtype)
            )
        if column is None:
            column = columnwise_of(ops.high_precision(matrix), dtype)
        source: Any = face_tensor(column, 0, x.shape, dtype)
        sharded: Any = ShardedFace(source, layout, self.plan.column == "quantized", shape)
        return HybridTensor(rowwise, sharded)

    def _column_of(self, row: Face, dtype: torch.dtype) -> Face:
        """Return the columnwise face requantized from the whole rowwise one."""
        if self.plan.column == "rowwise" and isinstance(self.quantizer, HybridQuantizer):
            return self.quantizer.derive_columnwise(row, dtype, self.context)
        return transposed(row)

    def _context(self, matrix: Tensor) -> Context:
        """Return the context with the amaxes of all ranks, and the first row of this rank."""
        plan, context = self.plan, self.context
        context = context._replace(first_row=self._first_row(matrix.shape[0]))
        if plan.reduce is None:
            return context
        of_column = plan.reduce == "column"
        cast = Cast(FP8_E4M3_ROW if of_column else FP8_E4M3_TENSOR)
        request = CastRequest(None, cast) if of_column else CastRequest(cast)
        mine = ops.prepare(matrix, request).measure(matrix)[1 if of_column else 0]
        amaxes = c10d.wait_tensor(c10d.all_reduce(mine, "max", self.layout.group))
        # The largest of all columns is the tensor's: one all-reduce for both faces.
        of_tensor = amaxes.max()[None] if of_column else amaxes
        row = of_tensor if plan.row_reduces else None
        column = None
        if self.columnwise and plan.column_reduces is not None:
            column = amaxes if plan.column_reduces == "column" else of_tensor
        if self.columnwise and plan.column == "transposed":
            column = None
        return context._replace(amaxes=(row, column))

    def _first_row(self, rows: int) -> int:
        """Return this rank's first row within the batch."""
        state = self.context.state
        # Rank by rank, as draws go by rows: no two ranks draw alike, though in the whole the sequences' parts
        # alternate.
        before = 0 if state is None else state.rank * self.layout.num_ranks
        return (before + self.rank) * rows


class _Ctx(FunctionCtx):
    """What forward saves for backward: how the activation, or its gradient, is gathered."""

    gathering: SequenceGather


class GatherInput(Function):
    """Autograd function that all-gathers tokens quantized; the gradient is reduce-scattered."""

    @staticmethod
    def forward(ctx: _Ctx, x: Tensor, gathering: SequenceGather) -> HybridTensor:
        ctx.gathering = gathering
        gathered, state = gathering.quantized(x), gathering.context.state
        gathered.is_of_all_ranks = True
        gathered.record.amaxes = None if state is None else state.amax
        return gathered

    @staticmethod
    def backward(ctx: _Ctx, grad_output: Tensor) -> tuple[Tensor, None]:
        if isinstance(grad_output, HybridTensor):  # traced, as the gradient of what a graph returns
            raise NotImplementedError(
                "hybridtensor.distributed: a compiled graph returns what was gathered, and outputs of a graph are "
                "plain tensors; compile a module around the one with the style PrepareModuleInput or ColwiseParallel"
            )
        return scattered(grad_output, ctx.gathering.dim, ctx.gathering.layout), None


class ScatterOutput(Function):
    """Autograd function that reduce-scatters an output; its gradient is quantized, then all-gathered."""

    @staticmethod
    def forward(ctx: _Ctx, y: Tensor, gathering: SequenceGather) -> Tensor:
        ctx.gathering = gathering
        return scattered(y, gathering.dim, gathering.layout)

    @staticmethod
    def backward(ctx: _Ctx, grad_output: Tensor) -> tuple[Tensor, None]:
        return ctx.gathering.quantized(grad_output.contiguous()), None


def scattered(x: Tensor, dim: int, layout: SequenceLayout) -> Tensor:
    """Return this rank's part of the sum of ``x`` over the ranks, split along ``dim``."""
    if dim and x.shape[0] == 1:  # one sequence lies as it is sent
        part = (1, x.shape[1] // layout.num_ranks, *x.shape[2:])
        return scattered(x.reshape(x.shape[1:]), 0, layout).view(part)
    if dim:  # what a rank gets has to lie together
        x = torch.cat(x.chunk(layout.num_ranks, dim))
    out = c10d.reduce_scatter_tensor(x.contiguous(), "sum", layout.num_ranks, layout.group)
    own: Tensor = c10d.wait_tensor(out)
    return own
