"""The kernel of ``ops.epilogue``: scale a sum ``[M, N]``, add the bias, round. A tile is ``[BM, BN]``."""

import triton
import triton.language as tl

from hybridtensor.kernels.numbers import FP32_MAX


@triton.jit
def epilogue_kernel(
    total, stride, left, right, bias, out, M, N,
    LEFT: tl.constexpr, LEFT_PER_ROW: tl.constexpr, RIGHT: tl.constexpr, RIGHT_PER_COLUMN: tl.constexpr,
    BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write one tile.

    Args:
        total: fp32, with contiguous rows ``stride`` apart.
        left: Factors fp32 ``[M]``, or one; ``right`` ``[N]``, or one. Their product is formed first.
        bias: ``[N]``.
        out: ``[M, N]``, contiguous.
    """
    pid = tl.program_id(0)
    tiles = tl.cdiv(N, BN)
    i = pid // tiles * BM + tl.arange(0, BM)
    j = pid % tiles * BN + tl.arange(0, BN)
    mask = (i < M)[:, None] & (j < N)[None, :]
    rows = i.to(tl.int64)[:, None]
    v = tl.load(total + rows * stride + j[None, :], mask=mask, other=0.0)
    if LEFT or RIGHT:
        factor = tl.full([BM, BN], 1.0, tl.float32)
        if LEFT:
            factor = factor * tl.load(left + (i if LEFT_PER_ROW else i * 0), mask=i < M, other=0.0)[:, None]
        if RIGHT:
            factor = factor * tl.load(right + (j if RIGHT_PER_COLUMN else j * 0), mask=j < N, other=0.0)[None, :]
        if LEFT and RIGHT:
            # Two large scales may overflow, and Inf times a sum of zero would be NaN.
            factor = tl.where(factor > FP32_MAX, FP32_MAX, factor)
        v = v * factor
    if BIAS:
        v = v + tl.load(bias + j, mask=j < N, other=0.0).to(tl.float32)[None, :]
    tl.store(out + rows * N + j[None, :], v.to(out.dtype.element_ty), mask=mask)
