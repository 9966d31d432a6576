"""The kernels of ``ops.grouped_mm``: tokens that are sorted by expert, times a stack of weights or each other.

An operand is elements ``[other, contraction]``, or a stack of such, with what scales them: factors of whole sums, and
scales per ``SIDE x 128`` of partial ones. Elements of 8 bits are multiplied as they are, by hardware that can.

Legend: ``M`` and ``N`` are the rows of the left and the right operand, ``K`` the contraction; a tile of the product is
``[BM, BN]``.
"""

import triton
import triton.language as tl

from hybridtensor.kernels.numbers import FP32_MAX

# What elements are; anything else is values.
E4M3 = tl.constexpr(1)
E5M2 = tl.constexpr(2)


@triton.jit
def _elements(data, CODES: tl.constexpr):
    """Return a pointer to elements as what they are."""
    if CODES == E4M3:
        return data.to(tl.pointer_type(tl.float8e4nv))
    elif CODES == E5M2:
        return data.to(tl.pointer_type(tl.float8e5))
    else:
        return data


@triton.jit
def _load(data, i, stride_i, k, stride_k, mask_i, mask_k):
    """Return a tile ``[BM, BK]`` of elements; zeros where there are none."""
    offsets = i.to(tl.int64)[:, None] * stride_i + k.to(tl.int64)[None, :] * stride_k
    return tl.load(data + offsets, mask=mask_i[:, None] & mask_k[None, :], other=0.0)


@triton.jit
def _scales(side, scales, i, block, mask, SIDE: tl.constexpr):
    """Return the scales of one block of the contraction, ``[BM]``."""
    at = i // SIDE * side.stride_scale + block * side.stride_block
    return tl.load(scales + at, mask=mask, other=0.0)


@triton.jit
def _sum(left, right, a, b, scales_a, scales_b, i, j, mask_i, mask_j, first_a, first_b, length_a, length_b,
         LEFT: tl.constexpr, RIGHT: tl.constexpr, FAST: tl.constexpr,
         BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Return the sum over entries of the contraction, fp32: of each operand ``length_a`` from ``first_a`` on, of which
    the longer one's last are zeros.
    """
    a = _elements(a, LEFT.element)
    b = _elements(b, RIGHT.element)
    total = tl.zeros([BM, BN], tl.float32)
    for k in range(0, tl.minimum(length_a, length_b), BK):
        step = k + tl.arange(0, BK)
        x = _load(a, i, left.stride_other, first_a + step, left.stride_along, mask_i, step < length_a)
        y = _load(b, j, right.stride_other, first_b + step, right.stride_along, mask_j, step < length_b)
        if LEFT.side > 0 or RIGHT.side > 0:
            # Scales differ from step to step, so that each step is a product of its own (650 to 680 TFLOP/s at best).
            part = tl.dot(x, tl.trans(y), input_precision="ieee")
            if LEFT.side > 0:
                part *= _scales(left, scales_a, i, (first_a + k) // BK, mask_i, LEFT.side)[:, None]
            if RIGHT.side > 0:
                part *= _scales(right, scales_b, j, (first_b + k) // BK, mask_j, RIGHT.side)[None, :]
            total += part
        elif FAST:
            total = tl.dot(x, tl.trans(y), total, input_precision="ieee")
        else:
            # FP8 units of Hopper add with some 13 bits below the largest term: of 40000 terms of one sign 29 % were
            # lost. Sums of single steps are added in fp32 instead.
            total = tl.dot(x, tl.trans(y), total, input_precision="ieee", max_num_imprecise_acc=BK)
    return total


@triton.jit
def _finish(total, left, right, group, i, j, mask_i, mask_j, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Return the sum times the factors of both operands, which are multiplied first, as ``ops.epilogue`` does."""
    if LEFT.factor:
        at = left.factor + group * left.factor_by_group + i.to(tl.int64) * left.factor_by_row
        of_left = tl.load(at, mask=mask_i, other=0.0)[:, None]
    if RIGHT.factor:
        at = right.factor + group * right.factor_by_group + j.to(tl.int64) * right.factor_by_row
        of_right = tl.load(at, mask=mask_j, other=0.0)[None, :]
    if LEFT.factor and RIGHT.factor:
        factor = of_left * of_right
        total *= tl.where(factor > FP32_MAX, FP32_MAX, factor)
    elif LEFT.factor:
        total *= of_left
    elif RIGHT.factor:
        total *= of_right
    return total


@triton.jit
def _tile_of(pid, rows, columns, WIDTH: tl.constexpr):
    """Return the row and the column of tile ``pid``: ``WIDTH`` rows of tiles share what they read of the right."""
    band = pid // (WIDTH * columns)
    first = band * WIDTH
    height = tl.minimum(rows - first, WIDTH)
    inside = pid % (WIDTH * columns)
    return first + inside % height, inside // height


@triton.jit
def product_by_row_kernel(left, right, out, plan, tiles, N, K,
                          LEFT: tl.constexpr, RIGHT: tl.constexpr, FAST: tl.constexpr,
                          BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Write one tile of the products of each token with the weight of its group, ``[T, N]``; zeros for tokens of none.

    Args:
        left: Tokens; see ``groups.Side``.
        right: A stack of weights.
        plan: Which rows each row of ``tiles`` has; see ``grouped_quantize.plan_kernel``.
        LEFT: What the left operand has; see ``groups.SideConstants``.
        FAST: Let FP8 units add all by themselves, with some 13 bits below the largest; else what they add of each
            step is added in fp32.
        WIDTH: See ``_tile_of``.
    """
    row, column = _tile_of(tl.program_id(0), tiles, tl.cdiv(N, BN), WIDTH)
    entry = plan + row * 8
    group = tl.load(entry).to(tl.int64)
    top = tl.load(entry + 1) * BM
    start = tl.load(entry + 2)
    read = tl.load(entry + 3)
    stored = tl.load(entry + 4)
    if top < stored:
        i = top + tl.arange(0, BM)
        j = column * BN + tl.arange(0, BN)
        scales_a = left.scales
        if LEFT.side > 1:
            scales_a += tl.load(entry + 5).to(tl.int64) // LEFT.side * left.stride_scale
        elif LEFT.side == 1:
            scales_a += start.to(tl.int64) * left.stride_scale
        length = K
        # Rows of no group: no weight is read, and zeros are stored.
        if read == 0:
            length = 0
        total = _sum(
            left, right, left.data + start.to(tl.int64) * left.stride_other, right.data + group * right.stride_group,
            scales_a, right.scales + group * right.scales_by_group, i, j, i < read, j < N, 0, 0,
            length, length, LEFT, RIGHT, FAST, BM, BN, BK,
        )  # fmt: skip
        total = _finish(total, left, right, group, start + i, j, i < read, j < N, LEFT, RIGHT)
        total = tl.where((i < read)[:, None], total, 0.0)
        offsets = (start + i).to(tl.int64)[:, None] * N + j[None, :]
        tl.store(out + offsets, total.to(out.dtype.element_ty), mask=(i < stored)[:, None] & (j < N)[None, :])


@triton.jit
def product_of_tokens_kernel(left, right, out, plan, M, N,
                             LEFT: tl.constexpr, RIGHT: tl.constexpr, FAST: tl.constexpr,
                             LEFT_PADDED: tl.constexpr, RIGHT_PADDED: tl.constexpr,
                             BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Write one tile of the sums over each group's tokens, ``[E, M, N]``.

    Args:
        left: Columnwise tokens; ``right`` too.
        plan: A row of tiles for each group.
        FAST: As for ``product_by_row_kernel``.
        LEFT_PADDED: Whether the left operand has padded rows; the same for the right one.
    """
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    pid = tl.program_id(0)
    entry = plan + pid // tiles * 8
    length = tl.load(entry + 3)
    row, column = _tile_of(pid % tiles, tl.cdiv(M, BM), tl.cdiv(N, BN), WIDTH)
    group = tl.load(entry).to(tl.int64)
    start = tl.load(entry + 2)
    padded = tl.multiple_of(tl.load(entry + 5), 16)
    size = tl.multiple_of(tl.load(entry + 6), 16)
    i = row * BM + tl.arange(0, BM)
    j = column * BN + tl.arange(0, BN)
    first_a = start
    first_b = start
    length_a = length
    length_b = length
    if LEFT_PADDED:
        first_a = padded
        length_a = size
    if RIGHT_PADDED:
        first_b = padded
        length_b = size
    total = _sum(
        left, right, left.data, right.data, left.scales, right.scales, i, j, i < M, j < N, first_a, first_b,
        length_a, length_b, LEFT, RIGHT, FAST, BM, BN, BK,
    )  # fmt: skip
    total = _finish(total, left, right, group, i, j, i < M, j < N, LEFT, RIGHT)
    offsets = (group * M + i)[:, None] * N + j[None, :]
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=(i < M)[:, None] & (j < N)[None, :])


@triton.jit
def clear_rows_kernel(out, ends, last, rows, columns, BM: tl.constexpr, BN: tl.constexpr):
    """Write zeros into the rows of ``out`` ``[rows, columns]`` behind those of all groups."""
    end = tl.load(ends + last)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    if end < tl.program_id(0) * BM + BM:
        for column in range(0, columns, BN):
            j = column + tl.arange(0, BN)
            mask = ((i >= end) & (i < rows))[:, None] & (j < columns)[None, :]
            offsets = i.to(tl.int64)[:, None] * columns + j[None, :]
            tl.store(out + offsets, tl.zeros([BM, BN], out.dtype.element_ty), mask=mask)
