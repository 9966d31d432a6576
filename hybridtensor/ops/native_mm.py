"""The products that hardware computes itself, through torch's scaled matrix products.

Shape letters: ``M`` rows of the left operand, ``N`` columns of the right one, ``K`` contraction.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from hybridtensor.formats import Format
from hybridtensor.ops.emulated_mm import sum_factors
from hybridtensor.ops.epilogue import scale_and_round
from hybridtensor.ops.face import Face
from hybridtensor.ops.reencoding import Reencoded, reencodes
from hybridtensor.ops.references.blocks import spread
from hybridtensor.ops.swizzle import swizzle_32_4_4

Version = tuple[int, int]
Multiply = Callable[[Face, Face, Tensor | None, torch.dtype, bool], Tensor]
"""Multiplies two faces, and adds a bias, to a dtype; the flag is ``fast_accum``. The result is contiguous."""


class NativeKind(NamedTuple):
    """A family of products that hardware computes, with its range of compute capabilities."""

    name: str
    word: str
    first: Version
    end: Version
    bf16_only: bool
    multiply: Multiply
    in_graphs: bool = False


_PER_TENSOR = (None, None)
_PER_ROW = (1, None)
_NEVER = (99, 0)
_OF_ROWS, _OF_SQUARES = [ScalingType.BlockWise1x128.value], [ScalingType.BlockWise128x128.value]


@functools.lru_cache(maxsize=1024)
def native_kind(left: Format, right: Format) -> NativeKind | None:
    """Return the hardware product of two formats, or None if none is known."""
    if (
        not (left.has_kernels and right.has_kernels)
        or left.drawn_signs
        or right.drawn_signs
        or left.element is None
        or right.element is None
        or torch.bfloat16 in (left.element, right.element)
        or left.element == right.element == torch.float8_e5m2
    ):
        return None
    blocks = left.block, right.block
    # torch's products with scales of blocks are of E4M3 alone.
    if reencodes(left, right):
        return _REENCODED if left.element == torch.float8_e4m3fn else None
    scales = {left.scale_dtype, right.scale_dtype}
    if scales == {torch.float8_e8m0fnu}:
        fp8 = left.elements_per_byte == right.elements_per_byte == 1
        return _MX if fp8 else None  # torch has no products of E2M1 under E8M0 on NVIDIA GPUs
    if left.tensor_block is not None and right.tensor_block is not None:
        return _NVFP4
    if scales != {torch.float32}:
        return None
    if blocks in ((_PER_TENSOR, _PER_TENSOR), (_PER_ROW, _PER_ROW)):
        return _TENSOR if left.block == _PER_TENSOR else _ROW
    return (
        _BLOCK
        if left.element == right.element == torch.float8_e4m3fn
        and blocks in (((1, 128), (1, 128)), ((1, 128), (128, 128)), ((128, 128), (1, 128)))
        else None
    )


def is_fp8(fmt: Format) -> bool:
    """Return whether elements are FP8 with fp32 scales."""
    return fmt.scale_dtype == torch.float32


def has_fast_accum(left: Format, right: Format) -> bool:
    """Return whether Hopper can accumulate whole products of these formats: FP8 without scales along the
    contraction."""
    return all(is_fp8(fmt) and fmt.block[1] is None for fmt in (left, right))


def has_fp8_units(device: torch.device) -> bool:
    """Return whether kernels can multiply FP8 elements: compute capability 8.9, or the interpreter."""
    return device.type != "cuda" or _capability(device) >= (8, 9)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def is_hopper(device: torch.device) -> bool:
    """Return whether torch has grouped FP8 products for the device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return _capability(device) == (9, 0)


def _multiply_whole(
    a: Face, b: Face, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """Multiply operands with a scale per tensor or row, zero-padded in K and N."""
    left, right = a.qdata, b.qdata
    (rows, contraction), columns, pad_n = left.shape, right.shape[0], 0
    # cuBLASLt: leading dimensions in multiples of 16 bytes
    if (
        contraction % 16
        or columns % 16
        or rows == 1
        or columns == 1
        or not left.is_contiguous()
        or not right.is_contiguous()
    ):
        pad_k, pad_n = -contraction % 16, -columns % 16
        left, right = pad(left, 0, pad_k), pad(right, pad_n, pad_k)
    scale_a, scale_b = a.scale, b.scale
    if scale_a is None or scale_a.storage_offset():
        scale_a = _scales(a)
    if scale_b is None or scale_b.storage_offset():
        scale_b = _scales(b)
    if b.format.block == _PER_ROW:
        scale_b = (F.pad(scale_b, (0, 0, 0, pad_n), value=1.0) if pad_n else scale_b).t()
    fused = bias if out_dtype == torch.bfloat16 and not pad_n else None
    # The bias is added before the one rounding only where the output is bf16.
    out = torch._scaled_mm(left, right.t(), scale_a, scale_b, fused, None, out_dtype, fast_accum)
    if pad_n:
        out = out[:, :columns].contiguous()
    return out if bias is None or fused is not None else out + bias.to(out_dtype)


def _multiply_blocks(
    a: Face, b: Face, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """Multiply operands with fp32 scales per 1x128 or 128x128, as Hopper does."""
    rows, columns = a.qdata.shape[0], b.qdata.shape[0]
    (left, scale_a, recipe_a), (right, scale_b, recipe_b) = _block128(a), _block128(b)
    # With the bias added after a product in fp32, layers in fp8_block were at 1.12x of BF16.
    inside = out_dtype == torch.bfloat16 and (bias is None or bias.dtype == out_dtype)
    fused = F.pad(bias, (0, right.shape[0] - columns)) if inside and bias is not None else None
    dtype = torch.bfloat16 if inside else torch.float32
    # ``F.scaled_mm`` calls it, too, after it has made these lists: as much host time as the product's own.
    out = torch._scaled_mm_v2(
        left, right.t(), [scale_a], recipe_a, [], [scale_b], recipe_b, [], fused, dtype
    )
    if out.shape != (rows, columns):
        out = out[:rows, :columns]
    if inside:
        return out.contiguous()
    return scale_and_round(out, None, None, bias, out_dtype)


def _multiply_reencoded(
    a: Face, b: Face, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """Multiply FP8 with scales per 1x128 and MXFP4, re-encoded where that is exact."""
    right = Reencoded(b)
    longer = right.face.qdata.shape[1] - a.qdata.shape[1]
    if longer > 0:  # MXFP4 fills its last block of 32 with zeros
        a = a._replace(qdata=pad(a.qdata, 0, longer))
    out = _multiply_blocks(a, right.face, bias, out_dtype, fast_accum)
    right.overwrite_(out, a, bias)
    return out


def _block128(face: Face) -> tuple[Tensor, Tensor, list[int]]:
    """Return elements and scales as cuBLASLt requires them, and its recipe; the last block of K may be partial."""
    scale = _scales(face)
    wide = face.format.block[0] == 128
    pad_k = -face.qdata.shape[1] % 16
    pad_rows = -face.qdata.shape[0] % (128 if wide else 16)
    data = pad(face.qdata, pad_rows, pad_k)
    if wide:
        return data, _in_fours(scale).t(), _OF_SQUARES
    if pad_rows:
        scale = F.pad(scale, (0, 0, 0, pad_rows), value=1.0)
    elif scale.stride() == (1, scale.shape[0]):  # as casts lay them out
        return data, scale, _OF_ROWS
    outer = scale.t().contiguous()  # one block counts as contiguous whatever its strides: say them
    return data, outer.as_strided(scale.shape, (1, scale.shape[0])), _OF_ROWS


def _in_fours(scale: Tensor) -> Tensor:
    """Pad scales of square blocks to a multiple of 4 rows, contiguous; padding is never read."""
    columns = scale.shape[1]
    if columns % 4 == 0:
        return scale.contiguous()
    wider = scale.new_empty(scale.shape[0], columns + -columns % 4)
    wider[:, :columns].copy_(scale)  # F.pad takes twice the host time
    return wider


def _multiply_mx(
    a: Face, b: Face, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """Multiply MXFP8 operands. Written against torch's documented layout; not run on hardware that has it."""
    (left, scale_a), (right, scale_b) = _swizzled(a, 32), _swizzled(b, 32)
    out = F.scaled_mm(
        left, right.t(), scale_a, ScalingType.BlockWise1x32, scale_b, ScalingType.BlockWise1x32,
        swizzle_a=SwizzleType.SWIZZLE_32_4_4, swizzle_b=SwizzleType.SWIZZLE_32_4_4, output_dtype=torch.float32,
    )  # fmt: skip
    return scale_and_round(out[: a.qdata.shape[0], : b.qdata.shape[0]], None, None, bias, out_dtype)


def _multiply_nvfp4(
    a: Face, b: Face, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """Multiply NVFP4 operands. Written against torch's documented layout; not run on hardware that has it.

    The tensor scales multiply the fp32 sum: they may differ by row.
    """
    (left, scale_a), (right, scale_b) = _swizzled(a, 16), _swizzled(b, 16)
    out = F.scaled_mm(
        left.view(torch.float4_e2m1fn_x2), right.view(torch.float4_e2m1fn_x2).t(),
        scale_a, ScalingType.BlockWise1x16, scale_b, ScalingType.BlockWise1x16,
        swizzle_a=SwizzleType.SWIZZLE_32_4_4, swizzle_b=SwizzleType.SWIZZLE_32_4_4, output_dtype=torch.float32,
    )  # fmt: skip
    left_factor, right_factor = sum_factors((a, b))
    if left_factor is None or right_factor is None:
        raise ValueError(f"scaled_mm: tensor scales are required, got {a.format} and {b.format}")
    return scale_and_round(
        out[: a.qdata.shape[0], : b.qdata.shape[0]], left_factor, right_factor.t(), bias, out_dtype
    )


def _swizzled(face: Face, block: int) -> tuple[Tensor, Tensor]:
    """Return elements padded to 32 rows and bytes of K, and swizzled scales per ``1 x block``."""
    scale = spread(_scales(face), (face.format.block[0], None), (face.qdata.shape[0], 1))
    return pad(face.qdata, -face.qdata.shape[0] % 32, -face.qdata.shape[1] % 32), swizzle_32_4_4(
        scale
    )


def _scales(face: Face) -> Tensor:
    if face.scale is None:
        raise ValueError("scaled_mm: two quantized operands are required for a native product")
    scale = face.scale
    offset = scale.storage_offset()
    if offset and offset * scale.itemsize % 16:  # of one expert: cuBLASLt reads whole vectors
        scale = torch.empty_strided(
            scale.shape, scale.stride(), dtype=scale.dtype, device=scale.device
        ).copy_(scale)
    return scale


def pad(codes: Tensor, rows: int, columns: int) -> Tensor:
    """Return contiguous codes with zero codes appended.

    A single row counts as contiguous whatever its stride, but cuBLASLt reads that stride as the leading dimension.
    """
    if not rows and not columns:
        if codes.shape[0] > 1 and codes.is_contiguous():
            return codes
        return codes.contiguous().as_strided(codes.shape, (codes.shape[1], 1))
    return F.pad(codes.view(torch.uint8), (0, columns, 0, rows)).view(codes.dtype)


_TENSOR = NativeKind(
    "torch._scaled_mm per tensor", "fp8", (8, 9), _NEVER, False, _multiply_whole, True
)
_ROW = NativeKind(
    "torch._scaled_mm per row", "fp8_rowwise", (9, 0), _NEVER, True, _multiply_whole, True
)
_BLOCK = NativeKind(
    "torch scaled_mm 1x128 / 128x128", "fp8_block", (9, 0), (9, 1), False, _multiply_blocks
)
_REENCODED = NativeKind(
    "torch scaled_mm 1x128 / 128x128, of MXFP4 re-encoded to E4M3",
    "fp8_block",
    (9, 0),
    (9, 1),
    False,
    _multiply_reencoded,
)
_MX = NativeKind(
    "torch scaled_mm 1x32 (not run on this hardware yet)",
    "mxfp8",
    (10, 0),
    (12, 0),
    False,
    _multiply_mx,
)
_NVFP4 = NativeKind(
    "torch scaled_mm 1x16 (not run on this hardware yet)",
    "nvfp4",
    (10, 0),
    (12, 0),
    False,
    _multiply_nvfp4,
)
