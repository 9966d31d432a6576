"""The products of groups on a GPU: by torch where it has them, else by this package's kernels.

No group's extent is read by the host.

Shape letters: ``T`` tokens, ``E`` groups, ``P`` padded rows, ``M`` and ``N`` rows of the left and the right
operand, ``K`` the contraction.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtensor.formats import Format
from hybridtensor.ops.cache import Cache
from hybridtensor.ops.cast.planning import planning
from hybridtensor.ops.emulated_mm import nan_under_other_signs
from hybridtensor.ops.face import Face, Groups, in_its_dtype
from hybridtensor.ops.grouped_operands import PARTIAL, KernelOperand, kernel_operand, over_groups
from hybridtensor.ops.groups import ends_of
from hybridtensor.ops.kernel_library import ALIGNMENT, Launch, on_device
from hybridtensor.ops.native_mm import has_fast_accum, has_fp8_units, is_fp8, is_hopper
from hybridtensor.ops.reencoding import Reencoded, reencodes

_ALL = 1 << 30  # so high a tile is any group's


class ProductTile(NamedTuple):
    """A tile of a product, with Triton's launch options."""

    rows: int
    columns: int
    along: int
    width: int
    warps: int
    stages: int


# By dtype of the values, of elements as they are stored by None
_HALF, _HALF_PARTIAL = ProductTile(128, 256, 64, 8, 8, 3), ProductTile(128, 128, PARTIAL, 8, 8, 2)
TILES = {
    None: ProductTile(128, 256, 128, 8, 8, 3),
    torch.bfloat16: _HALF,
    torch.float16: _HALF,
    torch.float32: ProductTile(64, 64, 32, 8, 4, 2),
}
PARTIAL_TILES = {
    None: ProductTile(64, 128, PARTIAL, 8, 4, 4),
    torch.bfloat16: _HALF_PARTIAL,
    torch.float16: _HALF_PARTIAL,
    torch.float32: ProductTile(32, 64, PARTIAL, 8, 4, 1),
}
# Two sums of 128x256, one of which is promoted to fp32, do not fit into registers.
PRECISE_TILE = ProductTile(128, 128, 128, 8, 4, 3)


Multiply = Callable[[Face, Face, Groups], Tensor]
_MULTIPLY: Cache[tuple[object, ...], Multiply] = Cache()


def multiply_groups(
    left: Face, right: Face, groups: Groups, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """Return the product of every group without synchronizing with the device; see ``ops.grouped_mm``."""
    left, right = in_its_dtype(left), in_its_dtype(right)
    given = groups.num_groups, groups.step, out_dtype, fast_accum
    key = *given, left.qdata.device, *_lies(left), *_lies(right)
    multiply = _MULTIPLY.get(key)
    if multiply is None:
        multiply = _MULTIPLY[key] = _choose(left, right, out_dtype, fast_accum)
    return multiply(left, right, groups)


def _lies(face: Face) -> tuple[object, ...]:
    """Return everything of a face that a product depends on but addresses and values."""
    tensors = [(t.shape, t.stride(), t.dtype, t.data_ptr() % ALIGNMENT) for t in face.tensors()]
    return face.format, face.dequantized_rowwise, *tensors


def _choose(left: Face, right: Face, out_dtype: torch.dtype, fast_accum: bool) -> Multiply:
    """Choose the function that multiplies operands like these."""
    formats, device = (left.held_format, right.held_format), left.qdata.device
    if left.scale is None and right.scale is None and out_dtype == torch.bfloat16:
        if _has_values(left, right):
            return _multiply_values
    elif not fast_accum and is_native(*formats, out_dtype, device) and _has_codes(left, right):
        return _multiply_natively
    by_row, dtype = right.qdata.dim() == 3, None
    if by_row and reencodes_weights(*formats, device):
        return functools.partial(_multiply_reencoded, out_dtype, fast_accum)
    if not multiplies_codes(*formats, device):
        plain = [face.qdata.dtype for face in (left, right) if face.scale is None]
        follows = [face.dequantized_rowwise for face in (left, right) if face.follows_rowwise]
        dtype = (*plain, *follows, torch.bfloat16)[0]
    return _OwnProduct(dtype, out_dtype, fast_accum)


def _multiply_reencoded(
    out_dtype: torch.dtype, fast_accum: bool, left: Face, right: Face, groups: Groups
) -> Tensor:
    reencoded = Reencoded(right)
    out = multiply_groups(left, reencoded.face, groups, out_dtype, fast_accum)
    reencoded.overwrite_(out, left, groups=groups)
    return out


def is_native(left: Format, right: Format, out_dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether torch has the product: E4M3 by row or tensor, on Hopper, with bf16 results."""
    fits = all(fmt.element == torch.float8_e4m3fn for fmt in (left, right))
    fits = fits and has_fast_accum(left, right)
    return fits and out_dtype == torch.bfloat16 and is_hopper(device)


def _has_values(left: Face, right: Face) -> bool:
    """Return whether torch multiplies high-precision operands: else it would synchronize, or misaligned rows are not
    supported."""
    a, b = left.qdata, right.qdata
    if not (a.dtype == b.dtype == torch.bfloat16) or not is_hopper(a.device):
        return False
    columns = b.shape[-1 if right.dequantized_rowwise is not None else -2]
    return not columns * b.itemsize % ALIGNMENT and _is_readable(left) and _is_readable(right)


def _multiply_values(left: Face, right: Face, groups: Groups) -> Tensor:
    """Multiply high-precision operands with torch."""
    a, b = (
        face.qdata.transpose(-2, -1) if face.dequantized_rowwise is not None else face.qdata
        for face in (left, right)
    )
    out = torch._grouped_mm(a, b.transpose(-2, -1), offs=ends_of(groups))
    if b.dim() == 3:
        clear_rows_of_none(out, ends_of(groups))
    return out


def _is_readable(face: Face) -> bool:
    """Return whether torch can read the values: rows, or columns of a stack's matrices, 16 bytes aligned."""
    values = face.qdata
    by_row, by_column = values.stride(-1) == 1, values.stride(-2) == 1 and values.dim() == 3
    pitch = values.stride(-2) if by_row else values.stride(-1)
    apart = [pitch, *values.stride()[:-2]]
    whole = all(stride > 0 and stride * values.itemsize % ALIGNMENT == 0 for stride in apart)
    return (by_row or by_column) and whole and values.data_ptr() % ALIGNMENT == 0


def _has_codes(left: Face, right: Face) -> bool:
    """Return whether extents are multiples of 16, as torch's grouped kernel requires."""
    a, b = left.qdata.shape, right.qdata.shape
    return not any(size % ALIGNMENT for size in (*a[len(b) == 3 :], *b[-2:]))


def _multiply_natively(left: Face, right: Face, groups: Groups) -> Tensor:
    """Multiply with torch's grouped kernel."""
    a, b, ends = left.qdata, right.qdata, ends_of(groups)
    by_row = b.dim() == 3
    if by_row:
        scale_a, scale_b = _by_token(left, groups), _by_other(right)
    else:
        tokens = a.shape[1] - groups.num_groups * groups.step
        table = planning(groups.num_groups, groups.step, tokens, _ALL, a.device)(ends)
        ends = (table[:, 5] + table[:, 6])[: groups.num_groups]  # padded
        scale_a, scale_b = _by_other(left).view(-1), _by_other(right).view(-1)
    out = torch._scaled_grouped_mm(
        a, b.transpose(-2, -1), scale_a, scale_b, offs=ends, out_dtype=torch.bfloat16
    )
    if by_row:
        clear_rows_of_none(out, ends)
    return out


def _by_other(face: Face) -> Tensor:
    """Return scales per row of each matrix, or of a columnwise face per group, ``[E, other]``."""
    scale = _scale(face)
    return scale.expand(scale.shape[0], face.qdata.shape[-2], 1).squeeze(2).contiguous()


def _by_token(face: Face, groups: Groups) -> Tensor:
    scale = over_groups(_scale(face), face.format.block[0], face.qdata, groups)
    return scale.reshape(-1)


def _scale(face: Face) -> Tensor:
    if face.scale is None:
        raise ValueError("grouped_mm: two quantized operands are required for a native product")
    return face.scale


def multiplies_codes(left: Format, right: Format, device: torch.device) -> bool:
    """Return whether stored elements are multiplied: FP8 by tensor, row or blocks of 128, with hardware units."""
    fits = all(is_fp8(fmt) and fmt.block[1] in (None, PARTIAL) for fmt in (left, right))
    return fits and has_fp8_units(device)


def reencodes_weights(left: Format, right: Format, device: torch.device) -> bool:
    """Return whether a stack of MXFP4 weights is multiplied as FP8; see ``ops.reencoding``."""
    return reencodes(left, right) and has_fp8_units(device)


class _OwnProduct:
    """The product of operands that lie alike by this package's kernels.

    Args:
        dtype: In which operands are dequantized, or None to multiply elements as they are stored.
        out_dtype: Of the product.
        fast: Whether matrix units add up all that they multiply; else sums are promoted to fp32.
    """

    def __init__(self, dtype: torch.dtype | None, out_dtype: torch.dtype, fast: bool) -> None:
        self._dtype, self._out_dtype, self._fast = dtype, out_dtype, fast
        self._launch: _GroupedLaunch | None = None

    def __call__(self, left: Face, right: Face, groups: Groups) -> Tensor:
        dtype, by_row = self._dtype, right.qdata.dim() == 3
        a, b = (
            kernel_operand(
                face, groups, dtype, rowwise=by_row or face.dequantized_rowwise is not None
            )
            for face in (left, right)
        )
        if left.format.drawn_signs and a.factor is not None:
            a = a._replace(factor=nan_under_other_signs(a.factor, left, right))
        launch = self._launch
        if launch is None:  # what is computed of operands that lie alike lies alike, too
            tile = PRECISE_TILE if dtype is None and not self._fast else TILES[dtype]
            if a.scales is not None or b.scales is not None:
                tile = PARTIAL_TILES[dtype]
            launch = _GroupedLaunch(a, b, groups, self._out_dtype, tile, self._fast)
            self._launch = launch
        return launch(a, b, ends_of(groups))


class _GroupedLaunch:
    """The kernel of a grouped product, for operands that lie as the given ones."""

    def __init__(
        self,
        left: KernelOperand,
        right: KernelOperand,
        groups: Groups,
        out_dtype: torch.dtype,
        tile: ProductTile,
        fast: bool,
    ) -> None:
        count, step, device = groups.num_groups, groups.step, left.data.device
        rows, columns = left.rows, right.rows
        across = -(-columns // tile.columns)
        shape: tuple[int, ...] = rows, columns
        numbers: tuple[int, ...] = shape
        padded: dict[str, bool] = {}
        if right.data.dim() == 3:  # each token with the weight of its group
            plan = planning(count, step, rows, tile.rows, device)
            kernel, programs = "product_by_row_kernel", plan.tiles * across
            numbers = plan.tiles, columns, left.data.shape[1]
        else:  # the sum over each group's tokens
            side = left if left.turned else right
            # Of padded rows so many can be tokens: offsets beyond them stay in the operands
            tokens = side.data.shape[0] if side.turned else side.data.shape[1] - count * step
            plan = planning(count, step, tokens, _ALL, device)
            programs = count * -(-rows // tile.rows) * across
            kernel, shape = "product_of_tokens_kernel", (count, *shape)
            padded = {"LEFT_PADDED": not left.turned, "RIGHT_PADDED": not right.turned}
        self._plan, self._numbers, self._device = plan, numbers, device
        self._strides = left.numbers, right.numbers
        self._empty = functools.partial(torch.empty, shape, dtype=out_dtype, device=device)
        self._launch = Launch(
            "grouped_mm",
            kernel,
            programs,
            options={"num_warps": tile.warps, "num_stages": tile.stages},
            LEFT=left.constants,
            RIGHT=right.constants,
            FAST=fast,
            **padded,
            BM=tile.rows,
            BN=tile.columns,
            BK=tile.along,
            WIDTH=tile.width,
        )

    def __call__(self, left: KernelOperand, right: KernelOperand, ends: Tensor) -> Tensor:
        out, launch, (of_left, of_right) = self._empty(), self._launch, self._strides
        take = launch.take
        with on_device(self._device):
            plan = self._plan(ends)
            launch(
                left.taken(take, of_left), right.taken(take, of_right), out, plan, *self._numbers
            )
        return out


def clear_rows_of_none(out: Tensor, ends: Tensor) -> None:
    """Zero the rows of a contiguous ``out`` that belong to no group."""
    rows, columns = out.shape
    launch = _clearing(rows, columns, ends.shape[0], out.dtype, out.device)
    with on_device(out.device):
        launch(out, ends, ends.shape[0] - 1, rows, columns)


@functools.lru_cache(maxsize=1024)
def _clearing(
    rows: int, columns: int, count: int, dtype: torch.dtype, device: torch.device
) -> Launch:
    height, width = 32, 256
    return Launch(
        "grouped_mm",
        "clear_rows_kernel",
        -(-rows // height),
        options={"num_warps": 4},
        BM=height,
        BN=width,
    )
