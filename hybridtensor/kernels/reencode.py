"""The kernels of ``ops.reencoding``: E2M1 elements under a power of two per 32 as E4M3 under one per 128 x 128.

Legend: a block is 128 x 128 elements of a matrix ``[N, K]``; a tile of the product is ``[BM, 128]``.
"""

import triton
import triton.language as tl

from hybridtensor.kernels.numbers import BF16_MAX, e2m1_values, e8m0_value, fp8_values, saturate

# Scales of a block whose exponents differ by no more leave all elements normal E4M3 numbers: 6 times the largest scale
# becomes 384 of 448, 0.5 times the smallest one 2^-6.
_SPREAD = tl.constexpr(11)
_TOP = tl.constexpr(12)  # added to exponents of elements under the largest scale
_LARGEST = tl.constexpr(252)  # E8M0 of 2^125: 6 times a larger scale is beyond fp32
_NAN = tl.constexpr(255)  # of E8M0


@triton.jit
def _e4m3_of_four(x, added):
    """Return four E4M3 bytes of the low nibbles of four bytes: E2M1 elements times ``2^(added - 6)``, ``added`` > 0.

    6 is 0b0111: its exponent 3 and its bit of mantissa, shifted by 2, stand where E4M3 has them. Only 0.5, a subnormal
    number, has no exponent to which ``added`` could be added: it is 2^-1, as if its
    exponent were 0 and its bit not set.
    Bytes do not carry into each other: the largest is 28 + 8 * 12.
    """
    magnitude = x & 0x07070707
    above_zero = ((magnitude + 0x07070707) >> 3) & 0x01010101
    above_half = ((magnitude + 0x06060606) >> 3) & 0x01010101
    bits = (magnitude << 2) - ((above_zero - above_half) << 2) + above_zero * (added << 3)
    return bits | ((x & 0x08080808) << 4)


@triton.jit
def _alternate(even, odd):
    """Return bytes 0 and 1 of two words in turns: even 0, odd 0, even 1, odd 1."""
    even = (even | (even << 8)) & 0x00FF00FF
    odd = (odd | (odd << 8)) & 0x00FF00FF
    return even | (odd << 8)


@triton.jit
def reencode_kernel(weight, out, out_scales, misfits, blocks, SIDE: tl.constexpr):
    """Write one block as E4M3, its scale, and whether its scales are too far apart for E4M3.

    Args:
        weight: A stack of words of eight elements; see ``groups.Mxfp4``.
        out: Words of four E4M3 elements, a stack of ``[N, K / 4]``, contiguous.
        out_scales: fp32, a stack of ``[down, across]``.
        misfits: int32 like ``out_scales``: 1 where scales of elements that are not all zero differ by more than
            2^11, or one is too large, or any is NaN.
        blocks: Extents of a matrix; see ``groups.Blocks``.
    """
    pid = tl.program_id(0)
    N = blocks.N
    K = blocks.K
    k = pid % blocks.across * 128
    row = pid // blocks.across % blocks.down
    matrix = (pid // blocks.across // blocks.down).to(tl.int64)
    i = row * 128 + tl.arange(0, 128)
    at_row = (matrix * N + i)[:, None]
    j = k // 8 + tl.arange(0, 16)
    mask = (i < N)[:, None] & (j < K // 8)[None, :]
    word = tl.load(weight.qdata + at_row * (K // 8) + j[None, :], mask=mask, other=0)
    # Four words share a scale, which each of them loads: the cache has it.
    at = (i // SIDE)[:, None].to(tl.int64) * weight.by_row + (j // 4)[None, :].to(tl.int64) * weight.by_block
    scale = tl.load(weight.scales + matrix * weight.by_matrix + at, mask=mask, other=127).to(tl.int32)
    any_element = (word & 0x77777777) != 0
    largest = tl.max(tl.max(tl.where(any_element, scale, 0), 1), 0)
    smallest = tl.min(tl.min(tl.where(any_element, scale, _NAN), 1), 0)
    any_nan = tl.max(tl.max((scale == _NAN).to(tl.int32), 1), 0)
    misfit = (largest - smallest > _SPREAD) | (largest > _LARGEST) | (any_nan > 0)
    # 2^-126 is the smallest normal fp32 number.
    shift = tl.maximum(largest + 6 - _TOP, 1)  # as E8M0
    added = tl.maximum(scale + 6 - shift, 0)
    even = _e4m3_of_four(word & 0x0F0F0F0F, added)
    odd = _e4m3_of_four((word >> 4) & 0x0F0F0F0F, added)
    first = _alternate(even & 0xFFFF, odd & 0xFFFF)
    second = _alternate((even >> 16) & 0xFFFF, (odd >> 16) & 0xFFFF)
    four = tl.reshape(tl.join(first, second), [128, 32])
    j = k // 4 + tl.arange(0, 32)
    mask = (i < N)[:, None] & (j < K // 4)[None, :]
    tl.store(out + at_row * (K // 4) + j[None, :], four, mask=mask)
    tl.store(out_scales + pid, (shift << 23).to(tl.float32, bitcast=True))
    tl.store(misfits + pid, misfit.to(tl.int32))


@triton.jit
def _block_values(weight, scales, start, i, k, N, K, SIDE: tl.constexpr):
    """Return the values of a block of MXFP4, bf16 ``[128, 128]``, exactly; zeros outside the matrix, whose first row is
    ``start`` and whose scales begin at ``scales``."""
    j = k // 2 + tl.arange(0, 64)
    mask = (i < N)[:, None] & (j < K // 2)[None, :]
    packed = tl.load(weight.qdata + (start + i).to(tl.int64)[:, None] * (K // 2) + j[None, :], mask=mask, other=0)
    # A byte holds two neighbours, the first one in its low half.
    value = e2m1_values(tl.reshape(tl.join(packed & 0xF, packed >> 4), [128, 128]))
    j = k // 32 + tl.arange(0, 4)
    mask = (i < N)[:, None] & (j < K // 32)[None, :]
    at = (i // SIDE)[:, None].to(tl.int64) * weight.by_row + j[None, :].to(tl.int64) * weight.by_block
    exponent = tl.load(scales + at, mask=mask, other=127).to(tl.int32)
    # The bits of NaN are those of an fp32 Inf.
    scale = tl.where(exponent == _NAN, float("nan"), e8m0_value(exponent))
    scale = tl.reshape(tl.broadcast_to(scale[:, :, None], [128, 4, 32]), [128, 128])
    return saturate(value * scale, BF16_MAX).to(tl.bfloat16)


@triton.jit
def overwrite_kernel(left, weight, misfits, bias, out, plan, tiles, M, blocks,
                     E5M2: tl.constexpr, BIAS: tl.constexpr, GROUPED: tl.constexpr, SIDE: tl.constexpr,
                     STEPS: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    """Compute tiles of the product from the original elements, where any block of the right operand is a misfit.

    A program has 128 columns, and of ``tiles`` rows of tiles each that is a multiple of PARTS further.

    Args:
        left: See ``groups.BlockScaled``.
        weight: The original elements, a stack of bytes of two; see ``groups.Mxfp4``.
        misfits: What ``reencode_kernel`` wrote.
        bias: ``[N]``, or anything without BIAS.
        out: ``[M, N]``, contiguous.
        plan: Which rows each row of tiles has, if GROUPED; see ``grouped_quantize.plan_kernel``.
        blocks: Extents of a matrix; see ``groups.Blocks``.
        STEPS: A power of two that is not below ``blocks.across``.
    """
    pid = tl.program_id(0)
    N = blocks.N
    K = blocks.K
    column = pid % blocks.down
    j = column * 128 + tl.arange(0, 128)
    step = tl.arange(0, STEPS)
    for row in range(pid // blocks.down, tiles, PARTS):
        if GROUPED:
            entry = plan + row * 8
            group = tl.load(entry).to(tl.int64)
            top = tl.load(entry + 1) * BM
            start = tl.load(entry + 2)
            last = tl.load(entry + 3)
        else:
            group = 0
            top = row * BM
            start = 0
            last = M
        of_row = misfits + (group * blocks.down + column) * blocks.across
        flags = tl.load(of_row + step, mask=step < blocks.across, other=0)
        if (top < last) & (tl.max(flags, 0) > 0):
            i = top + tl.arange(0, BM)
            at_row = (start + i).to(tl.int64)
            total = tl.zeros([BM, 128], tl.float32)
            for k in range(0, K, 128):
                along = k + tl.arange(0, 128)
                mask = (i < last)[:, None] & (along < K)[None, :]
                x = tl.load(left.data + at_row[:, None] * left.stride_m + along[None, :], mask=mask, other=0)
                at = left.scales + at_row * left.scale_m + k // 128 * left.scale_block
                of_left = tl.load(at, mask=i < last, other=0.0)
                y = _block_values(weight, weight.scales + group * weight.by_matrix, group * N, j, k, N, K, SIDE)
                x = fp8_values(x, E5M2, False).to(tl.bfloat16)
                total += tl.dot(x, tl.trans(y)) * of_left[:, None]
            if BIAS:
                total += tl.load(bias + j, mask=j < N, other=0.0).to(tl.float32)[None, :]
            mask = (i < last)[:, None] & (j < N)[None, :]
            tl.store(out + at_row[:, None] * N + j[None, :], total.to(out.dtype.element_ty), mask=mask)
