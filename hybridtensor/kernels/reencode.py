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
def reencode_kernel(codes, scales, by_matrix, by_row, by_block, out, out_scales, misfits, N, K, BLOCKS, PITCH,
                    SIDE: tl.constexpr):  # fmt: skip
    """Write one block as E4M3, its scale, and whether its scales are too far apart for E4M3.

    Args:
        codes: Words of eight E2M1 elements, a stack of ``[N, K / 8]``, contiguous.
        scales: E8M0 per ``SIDE x 32``, with the strides ``by_matrix``, ``by_row`` and ``by_block``.
        out: Words of four E4M3 elements, a stack of ``[N, K / 4]``, contiguous.
        out_scales: fp32, a stack of ``[BLOCKS, PITCH]``.
        misfits: int32 like ``out_scales``: 1 where scales of elements that are not all zero differ by more than
            2^11, or one is too large, or any is NaN.
        BLOCKS: Rows of blocks.
        PITCH: Blocks of a row.
    """
    pid = tl.program_id(0)
    k = pid % PITCH * 128
    row = pid // PITCH % BLOCKS
    matrix = (pid // PITCH // BLOCKS).to(tl.int64)
    i = row * 128 + tl.arange(0, 128)
    at_row = (matrix * N + i)[:, None]
    j = k // 8 + tl.arange(0, 16)
    mask = (i < N)[:, None] & (j < K // 8)[None, :]
    word = tl.load(codes + at_row * (K // 8) + j[None, :], mask=mask, other=0)
    # Four words share a scale, which each of them loads: the cache has it.
    at = (i // SIDE)[:, None].to(tl.int64) * by_row + (j // 4)[None, :].to(tl.int64) * by_block
    scale = tl.load(scales + matrix * by_matrix + at, mask=mask, other=127).to(tl.int32)
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
def _block_values(codes, scales, start, i, k, N, K, by_row, by_block, SIDE: tl.constexpr):
    """Return the values of a block of MXFP4, bf16 ``[128, 128]``, exactly; zeros outside the matrix."""
    j = k // 2 + tl.arange(0, 64)
    mask = (i < N)[:, None] & (j < K // 2)[None, :]
    packed = tl.load(codes + (start + i).to(tl.int64)[:, None] * (K // 2) + j[None, :], mask=mask, other=0)
    # A byte holds two neighbours, the first one in its low half.
    value = e2m1_values(tl.reshape(tl.join(packed & 0xF, packed >> 4), [128, 128]))
    j = k // 32 + tl.arange(0, 4)
    mask = (i < N)[:, None] & (j < K // 32)[None, :]
    at = (i // SIDE)[:, None].to(tl.int64) * by_row + j[None, :].to(tl.int64) * by_block
    exponent = tl.load(scales + at, mask=mask, other=127).to(tl.int32)
    # The bits of NaN are those of an fp32 Inf.
    scale = tl.where(exponent == _NAN, float("nan"), e8m0_value(exponent))
    scale = tl.reshape(tl.broadcast_to(scale[:, :, None], [128, 4, 32]), [128, 128])
    return saturate(value * scale, BF16_MAX).to(tl.bfloat16)


@triton.jit
def overwrite_kernel(left, left_row, left_scales, scale_row, scale_block, codes, scales, by_matrix, by_row, by_block,
                     misfits, bias, out, plan, tiles, M, N, K, BLOCKS, PITCH,
                     E5M2: tl.constexpr, BIAS: tl.constexpr, GROUPED: tl.constexpr, SIDE: tl.constexpr,
                     STEPS: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    """Compute tiles of the product from the original elements, where any block of the right operand is a misfit.

    A program has 128 columns, and of ``tiles`` rows of tiles each that is a multiple of PARTS further.

    Args:
        left: FP8 bytes, rows ``left_row`` apart; their fp32 scales per 1x128 with two strides.
        codes: Bytes of two E2M1 elements and their scales, as for ``reencode_kernel``.
        bias: ``[N]``, or anything without BIAS.
        out: ``[M, N]``, contiguous.
        plan: Which rows each row of tiles has, if GROUPED; see ``grouped_quantize.plan_kernel``.
        STEPS: A power of two that is not below PITCH.
    """
    pid = tl.program_id(0)
    column = pid % BLOCKS
    j = column * 128 + tl.arange(0, 128)
    step = tl.arange(0, STEPS)
    for row in range(pid // BLOCKS, tiles, PARTS):
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
        flags = tl.load(misfits + (group * BLOCKS + column) * PITCH + step, mask=step < PITCH, other=0)
        if (top < last) & (tl.max(flags, 0) > 0):
            i = top + tl.arange(0, BM)
            at_row = (start + i).to(tl.int64)
            total = tl.zeros([BM, 128], tl.float32)
            for k in range(0, K, 128):
                along = k + tl.arange(0, 128)
                mask = (i < last)[:, None] & (along < K)[None, :]
                x = tl.load(left + at_row[:, None] * left_row + along[None, :], mask=mask, other=0)
                of_left = tl.load(left_scales + at_row * scale_row + k // 128 * scale_block, mask=i < last, other=0.0)
                y = _block_values(codes, scales + group * by_matrix, group * N, j, k, N, K, by_row, by_block, SIDE)
                x = fp8_values(x, E5M2, False).to(tl.bfloat16)
                total += tl.dot(x, tl.trans(y)) * of_left[:, None]
            if BIAS:
                total += tl.load(bias + j, mask=j < N, other=0.0).to(tl.float32)[None, :]
            mask = (i < last)[:, None] & (j < N)[None, :]
            tl.store(out + at_row[:, None] * N + j[None, :], total.to(out.dtype.element_ty), mask=mask)
