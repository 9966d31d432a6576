"""The kernel of ``ops.dequantize``: elements times scales.

Legend: a tile is ``[P, Q]`` of a face ``[OTHER, ALONG]``; ``SIDE x LENGTH`` is a scale block, 0 the whole axis.
"""

import triton
import triton.language as tl

from hybridtensor.kernels.hadamard import DRAWN, rotate_back, rotate_drawn_back
from hybridtensor.kernels.numbers import e2m1_values, e8m0_value, fp8_values, saturate, two_level_scale

# How scales are stored.
NONE = tl.constexpr(0)
FP32 = tl.constexpr(1)
E8M0 = tl.constexpr(2)
E4M3 = tl.constexpr(3)  # possibly under an fp32 tensor scale


@triton.jit
def _elements(qdata, start, i, ALONG, other_left, along_left, E5M2: tl.constexpr, BITS: tl.constexpr,
              EVEN: tl.constexpr, WIDE: tl.constexpr, P: tl.constexpr, Q: tl.constexpr):  # fmt: skip
    BYTES: tl.constexpr = Q * BITS // 8
    j = tl.arange(0, BYTES)[None, :]
    width = ALONG * BITS // 8
    offsets = (i.to(tl.int64) * width if WIDE else i * width) + j
    if EVEN:
        packed = tl.load(qdata + start * BITS // 8 + offsets)
    else:
        mask = (i < other_left) & (j < along_left * BITS // 8)
        packed = tl.load(qdata + start * BITS // 8 + offsets, mask=mask, other=0)
    if BITS == 4:
        # The axis that is joined counts fastest: the low half of a byte is the first of its two elements.
        return e2m1_values(tl.reshape(tl.join(packed & 0xF, packed >> 4), [P, Q]))
    else:
        return fp8_values(packed, E5M2, False)


@triton.jit
def dequantize_kernel(
    qdata, scales, stride_other, stride_along, tensor_scales, out, OTHER, ALONG,
    SCALE: tl.constexpr, SIDE: tl.constexpr, LENGTH: tl.constexpr, TENSOR_SCALE: tl.constexpr,
    TENSOR_SCALE_PER_ROW: tl.constexpr, UNIT: tl.constexpr,
    E5M2: tl.constexpr, BITS: tl.constexpr, ROTATED: tl.constexpr, LARGEST: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
):  # fmt: skip
    """Write the values of one tile.

    Args:
        qdata: Elements, contiguous; ``scales`` with strides by row and block; ``tensor_scales`` the fp32 tensor scales.
        out: ``[OTHER, ALONG]``, contiguous.
        SCALE: How scales are stored; NONE leaves them out.
        TENSOR_SCALE: Whether tensor scales are multiplied with, and with UNIT.
        ROTATED: How many values are rotated together; behind tensor scales lie the signs where they are drawn.
        LARGEST: Where the result saturates.
    """
    pid = tl.program_id(0)
    tiles = tl.cdiv(ALONG, Q)
    other = pid // tiles * P
    along = pid % tiles * Q
    start = other.to(tl.int64) * ALONG + along
    i = tl.arange(0, P)[:, None]
    j = tl.arange(0, Q)[None, :]
    inside = (i < OTHER - other) & (j < ALONG - along)
    v = _elements(qdata, start, i, ALONG, OTHER - other, ALONG - along, E5M2, BITS, EVEN, WIDE, P, Q)
    if SCALE != NONE:
        at = scales
        if SIDE > 0:
            at += (other + i).to(tl.int64) // SIDE * stride_other
        if LENGTH > 0:
            at += (along + j).to(tl.int64) // LENGTH * stride_along
        if SIDE > 0 and LENGTH > 0:
            scale = tl.load(at, mask=inside, other=0)
        elif SIDE > 0:
            scale = tl.load(at, mask=i < OTHER - other, other=0)
        else:
            scale = tl.load(at)
        if SCALE == E8M0:
            scale = e8m0_value(scale.to(tl.int32))
            # Code 255 of E8M0 is NaN, whose bits are those of an fp32 Inf.
            scale = tl.where(scale == float("inf"), float("nan"), scale)
        elif SCALE == E4M3:
            scale = fp8_values(scale, False, False)
        if TENSOR_SCALE:
            row = (other + i) if TENSOR_SCALE_PER_ROW else i * 0
            tensor_scale = tl.load(tensor_scales + row, mask=i < OTHER - other, other=0.0)
            combined, back = two_level_scale(scale, tensor_scale, UNIT)
            v = (v * combined) * back
        else:
            v = v * scale
    if ROTATED == DRAWN:
        value = tl.arange(0, DRAWN)
        count = OTHER if TENSOR_SCALE_PER_ROW else 1
        signs = tl.load(tensor_scales + count + value // 16).to(tl.int32) >> value % 16
        v = rotate_drawn_back(v, signs & 1, P, Q)
    elif ROTATED:
        v = rotate_back(v, P, Q)
    v = saturate(v, LARGEST)
    offsets = (i.to(tl.int64) * ALONG if WIDE else i * ALONG) + j
    if EVEN:
        tl.store(out + start + offsets, v.to(out.dtype.element_ty))
    else:
        tl.store(out + start + offsets, v.to(out.dtype.element_ty), mask=inside)
