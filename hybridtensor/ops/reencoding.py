"""MXFP4 weights in FP8 matrix units: re-encoded to E4M3 under a power of two per 128x128, where that is exact.

E2M1 elements have one bit of mantissa, so that E4M3 holds the values of a 128x128 block exactly as long as its scales
are within 2^11 of each other (a scale of zeros does not count). Hopper multiplies such blocks with activations in FP8
1x128. Which blocks are not, only the device knows: tiles of the product that depend on one are computed a second time,
from the original elements, by a kernel that returns at once everywhere else. The host waits for nothing.

Source: vLLM and DeepSeek-V4, which re-encode when a checkpoint is loaded; here once per product, for weights change.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hybridtensor.formats import FP8_E4M3_128X128, Format
from hybridtensor.kernels.groups import Blocks, BlockScaled, Mxfp4
from hybridtensor.ops.cast.planning import aligned, planning
from hybridtensor.ops.face import Face, FaceKind, Groups
from hybridtensor.ops.kernel_library import ALIGNMENT, Launch, on_device

_BLOCK = 128
_ROWS = 64  # of the tiles that are overwritten: a tile of 128x128 sums in bf16 spills registers
_PARTS = (
    16  # programs that share the rows of tiles: most of them only find that nothing is to be done
)


def reencodes(left: Format, right: Format) -> bool:
    """Return whether a product re-encodes its right operand: FP8 with fp32 scales per 1x128, times MXFP4."""
    if not (left.has_kernels and right.has_kernels) or right.hadamard:
        return False
    is_block = left.block == (1, _BLOCK) and left.scale_dtype == torch.float32
    is_mxfp4 = right.elements_per_byte == 2 and right.scale_dtype == torch.float8_e8m0fnu
    return is_block and is_mxfp4 and right.block in ((1, 32), (32, 32))


class Reencoded:
    """An MXFP4 face, or a stack of them, as FP8 with a scale per 128x128.

    Args:
        face: Elements ``[N, K / 2]`` or ``[E, N, K / 2]`` and E8M0 scales per 1x32 or 32x32.

    Attributes:
        face: E4M3 elements ``[N, K]`` or ``[E, N, K]``, fp32 scales ``[N / 128, K / 128]`` or a stack of them.
    """

    def __init__(self, face: Face) -> None:
        codes, scale = face.qdata, face.scale
        if scale is None:
            raise ValueError(
                f"scaled_mm: block scales are required, got a face of {face.format} without"
            )
        if not codes.is_contiguous() or codes.data_ptr() % ALIGNMENT:
            codes = codes.clone(memory_format=torch.contiguous_format)
        if scale.data_ptr() % ALIGNMENT:
            scale = scale.clone()
        self._codes, self._scale, self._side = codes, scale.view(torch.uint8), face.format.block[0]
        *stack, rows, width = codes.shape
        columns = width * 2
        blocks, along = -(-rows // _BLOCK), -(-columns // _BLOCK)
        number = stack[0] if stack else 1
        self._blocks = Blocks(rows, columns, blocks, along)
        by_row, by_block = scale.stride()[-2:]
        self._strides = scale.stride(0) if stack else 0, by_row, by_block
        device = codes.device
        out = torch.empty(*stack, rows, columns, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.empty(*stack, blocks, along, dtype=torch.float32, device=device)
        self._misfits = torch.empty(number, blocks, along, dtype=torch.int32, device=device)
        launch = _reencoding(number, self._blocks, self._strides, self._side, device)
        take = launch.take
        weight = Mxfp4(take(codes.view(torch.int32)), take(self._scale), *self._strides)
        with on_device(device):
            launch(weight, out.view(torch.int32), scales, self._misfits, self._blocks)
        self.face = Face.of([out, scales], FaceKind(FP8_E4M3_128X128))

    def overwrite_(
        self, out: Tensor, left: Face, bias: Tensor | None = None, groups: Groups | None = None
    ) -> None:
        """Compute those tiles of a product again that depend on a block which E4M3 does not hold exactly.

        Args:
            out: The product with ``face``, ``[M, N]``, contiguous.
            left: The left operand, FP8 with fp32 scales per 1x128.
            bias: ``[N]``, as it was added to ``out``.
            groups: Which rows of ``out`` belong to which matrix of the stack.
        """
        scale = left.scale
        if scale is None:
            raise ValueError(
                f"scaled_mm: block scales are required, got a face of {left.format} without"
            )
        rows = out.shape[0]
        tiles, plan = -(-rows // _ROWS), self._misfits
        if groups is not None:
            planned = planning(groups.num_groups, groups.step, rows, _ROWS, out.device)
            tiles, plan = planned.tiles, planned(aligned(groups.ends))
        given = left.qdata.view(torch.uint8), scale, out if bias is None else bias, out
        lie = left.qdata.stride(0), scale.stride(0), scale.stride(1)
        kind = (
            left.qdata.dtype == torch.float8_e5m2, None if bias is None else bias.dtype, out.dtype,
            tuple(tensor.data_ptr() % ALIGNMENT == 0 for tensor in given),
        )  # fmt: skip
        launch = _overwriting(
            tiles,
            groups is not None,
            rows,
            self._blocks,
            lie,
            self._strides,
            self._side,
            kind,
            out.device,
        )
        elements, scales, added, product = given
        take = launch.take
        operand = BlockScaled(take(elements), lie[0], take(scales), *lie[1:])
        weight = Mxfp4(take(self._codes), take(self._scale), *self._strides)
        with on_device(out.device):
            launch(operand, weight, self._misfits, added, product, plan, tiles, rows, self._blocks)


@functools.lru_cache(maxsize=1024)
def _reencoding(
    number: int,
    blocks: Blocks,
    strides: tuple[int, ...],
    side: int | None,
    device: torch.device,
) -> Launch:
    """Return the cached launch for one kind of weight; its key is all that Triton specializes on."""
    return Launch(
        "reencode",
        "reencode_kernel",
        number * blocks.down * blocks.across,
        options={"num_warps": 4},
        SIDE=side or 1,
    )


@functools.lru_cache(maxsize=1024)
def _overwriting(
    tiles: int, grouped: bool, rows: int, blocks: Blocks, lie: tuple[int, ...], strides: tuple[int, ...],
    side: int | None, kind: tuple[object, ...], device: torch.device,
) -> Launch:  # fmt: skip
    """Return the cached launch for one kind of product; its key is all that Triton specializes on."""
    is_e5m2, bias, *_ = kind
    return Launch(
        "reencode", "overwrite_kernel", min(tiles, _PARTS) * blocks.down,
        options={"num_warps": 8, "num_stages": 1},
        E5M2=is_e5m2, BIAS=bias is not None, GROUPED=grouped, SIDE=side or 1,
        STEPS=1 << (blocks.across - 1).bit_length(), PARTS=min(tiles, _PARTS), BM=_ROWS,
    )  # fmt: skip
