"""The kernels of ``ops.swiglu``: a gated activation, and its gradients.

Legend: a tile is ``[BM, BN]`` of a matrix ``[M, N]``. Roundings are those of the separate operations of torch.
"""

import triton
import triton.language as tl

from hybridtensor.kernels.prologue import gated, sigmoid_denominator
from hybridtensor.kernels.tiles import raise_to


@triton.jit
def _tile(N, M, BM: tl.constexpr, BN: tl.constexpr):
    pid = tl.program_id(0)
    tiles = tl.cdiv(N, BN)
    i = (pid // tiles * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    j = (pid % tiles * BN + tl.arange(0, BN))[None, :]
    return i, j, (i < M) & (j < N)


@triton.jit
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
        magnitude = tl.abs(y)
        largest = tl.max(tl.max(tl.where(magnitude == magnitude, magnitude, 0.0), 1), 0)
        raise_to(amax, largest, largest >= 0)


@triton.jit
def swiglu_backward_kernel(
    grad,
    grad_stride,
    gate,
    gate_stride,
    up,
    up_stride,
    grad_gate,
    grad_up,
    M,
    N,
    BM: tl.constexpr,
    BN: tl.constexpr,
    GPU: tl.constexpr,
):
    """Write one tile of the gradients of ``gate`` and ``up``, contiguous."""
    i, j, mask = _tile(N, M, BM, BN)
    dy = tl.load(grad + i * grad_stride + j, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate + i * gate_stride + j, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + i * up_stride + j, mask=mask, other=0.0).to(tl.float32)
    kind = grad_gate.dtype.element_ty
    denominator = sigmoid_denominator(g, GPU)
    # Recomputed: torch keeps the activated gate instead, two bytes per element in bf16.
    activated = tl.div_rn(g, denominator).to(kind).to(tl.float32)
    sigmoid = tl.div_rn(1.0, denominator)
    of_activated = (dy * u).to(kind).to(tl.float32)
    # The derivative of silu is sigmoid * slope.
    slope = 1.0 + g * (1.0 - sigmoid)
    tl.store(grad_gate + i * N + j, (of_activated * sigmoid * slope).to(kind), mask=mask)
    tl.store(grad_up + i * N + j, (dy * activated).to(kind), mask=mask)
