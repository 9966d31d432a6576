"""The kernels of ``ops.swiglu``: a gated activation, and its gradients.

Legend: a tile is ``[BM, BN]`` of a matrix ``[M, N]``. Roundings are those of the separate operations of torch.
"""

import triton
import triton.language as tl

from hybridtensor.kernels.groups import Place
from hybridtensor.kernels.prologue import gated, sigmoid_denominator
from hybridtensor.kernels.quantize import cast_tile
from hybridtensor.kernels.storing import stored
from hybridtensor.kernels.tiles import load_tile, raise_to


@triton.jit
def _tile(N, M, BM: tl.constexpr, BN: tl.constexpr):
    pid = tl.program_id(0)
    tiles = tl.cdiv(N, BN)
    i = (pid // tiles * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    j = (pid % tiles * BN + tl.arange(0, BN))[None, :]
    return i, j, (i < M) & (j < N)


@triton.jit
def _gradients(dy, g, u, KIND: tl.constexpr, GPU: tl.constexpr):
    """Return the gradients of gate and up, fp32, rounded as the separate operations of torch in ``KIND``."""
    denominator = sigmoid_denominator(g, GPU)
    # Recomputed: torch keeps the activated gate instead, two bytes per element in bf16.
    activated = tl.div_rn(g, denominator).to(KIND).to(tl.float32)
    sigmoid = tl.div_rn(1.0, denominator)
    of_activated = (dy * u).to(KIND).to(tl.float32)
    # The derivative of silu is sigmoid * slope.
    slope = 1.0 + g * (1.0 - sigmoid)
    of_gate = (of_activated * sigmoid * slope).to(KIND).to(tl.float32)
    return of_gate, (dy * activated).to(KIND).to(tl.float32)


@triton.jit
def _raise_to_largest(amax, tile):
    magnitude = tl.abs(tile)
    largest = tl.max(tl.max(tl.where(magnitude == magnitude, magnitude, 0.0), 1), 0)
    raise_to(amax, largest, largest >= 0)


# Not specialized on M: batches of another length must not wait for a compiler.
@triton.jit(do_not_specialize=["M"])
def swiglu_kernel(gate, gate_stride, up, up_stride, out, amax, M, N, BM: tl.constexpr, BN: tl.constexpr,
                  GPU: tl.constexpr, MEASURE: tl.constexpr):  # fmt: skip
    """Write one tile of ``silu(gate) * up``, contiguous; with MEASURE raise its fp32 amax, which begins at zero."""
    i, j, mask = _tile(N, M, BM, BN)
    g = tl.load(gate + i * gate_stride + j, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + i * up_stride + j, mask=mask, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    y = gated(g, u, kind, GPU)
    tl.store(out + i * N + j, y.to(kind), mask=mask)
    if MEASURE:
        _raise_to_largest(amax, y)


@triton.jit(do_not_specialize=["M"])
def swiglu_backward_kernel(grad, grad_stride, gate, gate_stride, up, up_stride, of_gate, of_up, gate_amax, up_amax,
                           M, N, STRIDE, BM: tl.constexpr, BN: tl.constexpr, GPU: tl.constexpr,
                           MEASURE: tl.constexpr):  # fmt: skip
    """Write one tile of the gradients of ``gate`` and ``up``, whose rows are ``STRIDE`` apart; with MEASURE raise their
    fp32 amaxes, which begin at zero and may be one."""
    i, j, mask = _tile(N, M, BM, BN)
    dy = tl.load(grad + i * grad_stride + j, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate + i * gate_stride + j, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + i * up_stride + j, mask=mask, other=0.0).to(tl.float32)
    kind = of_gate.dtype.element_ty
    first, second = _gradients(dy, g, u, kind, GPU)
    tl.store(of_gate + i * STRIDE + j, first.to(kind), mask=mask)
    tl.store(of_up + i * STRIDE + j, second.to(kind), mask=mask)
    if MEASURE:
        _raise_to_largest(gate_amax, first)
        _raise_to_largest(up_amax, second)


@triton.jit(do_not_specialize=["row_slot", "column_slot"])
def swiglu_backward_cast_kernel(grad, gate, up, row, column, state, up_row, up_column, up_state, row_slot, column_slot,
                                ROW_FACE: tl.constexpr, COLUMN_FACE: tl.constexpr, TILE: tl.constexpr,
                                HW: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """Cast one tile of the gradients of ``gate`` and ``up``, matrices like ``grad``, which are never stored.

    Args:
        row, column, state: The faces of the gradient of ``gate``, and what its layer remembers; see
            ``quantize.cast_kernel``. The same for ``up``, whose columns, if ``PACKED``, are behind those of ``gate`` in
            the same faces.
    """
    KIND: tl.constexpr = grad.x.dtype.element_ty
    pid = tl.program_id(0)
    tiles = tl.cdiv(grad.K, TILE.BK)
    top = pid // tiles * TILE.BM
    left = pid % tiles * TILE.BK
    dy, g, u = load_tile(grad, top, left, TILE), load_tile(gate, top, left, TILE), load_tile(up, top, left, TILE)
    of_gate, of_up = _gradients(dy, g, u, KIND, TILE.gpu)
    width = grad.K * 2 if PACKED else grad.K
    behind = grad.K if PACKED else 0
    along = stored(grad.M, COLUMN_FACE.step)
    cast_tile(
        of_gate, grad, row, column, state, Place(top, left, grad.M, width, width),
        Place(left, top, width, along, along), 0, row_slot, -1, column_slot, -1, ROW_FACE, COLUMN_FACE, TILE, 0, HW,
    )  # fmt: skip
    cast_tile(
        of_up, grad, up_row, up_column, up_state, Place(top, left + behind, grad.M, width, width),
        Place(left + behind, top, width, along, along), 0, row_slot, -1, column_slot, -1, ROW_FACE, COLUMN_FACE, TILE,
        0, HW,
    )  # fmt: skip
