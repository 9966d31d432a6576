"""The products of groups on a GPU: by torch where it has them, else by this package's kernels.

No group's extent is read by the host.

Shape letters: ``T`` tokens, ``E`` groups, ``P`` padded rows, ``M`` and ``N`` rows of the left and the right
operand, ``K`` the contraction.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtensor.formats import IDENTITY, Format
from hybridtensor.kernels.groups import SideConstants
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


def multiply_groups(
    left: Face, right: Face, groups: Groups, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """Return the product of every group without synchronizing with the device; see ``ops.grouped_mm``."""
    left, right = in_its_dtype(left), in_its_dtype(right)
    formats, device = (held_format(left), held_format(right)), left.qdata.device
    out = None
    if left.scale is None and right.scale is None and out_dtype == torch.bfloat16:
        out = _multiply_values(left, right, groups)
    elif not fast_accum and is_native(*formats, out_dtype, device):
        out = _multiply_natively(left, right, groups)
    return _multiply(left, right, groups, out_dtype, fast_accum) if out is None else out


def _multiply(
    left: Face, right: Face, groups: Groups, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """Return the product of every group by this package's kernels."""
    by_row, dtype = right.qdata.dim() == 3, None
    device = left.qdata.device
    if by_row and reencodes_weights(held_format(left), held_format(right), device):
        reencoded = Reencoded(right)
        out = _multiply(left, reencoded.face, groups, out_dtype, fast_accum)
        reencoded.overwrite_(out, left, groups=groups)
        return out
    if not multiplies_codes(held_format(left), held_format(right), device):
        plain = [face.qdata.dtype for face in (left, right) if face.scale is None]
        follows = [face.dequantized_rowwise for face in (left, right) if face.follows_rowwise]
        dtype = (*plain, *follows, torch.bfloat16)[0]
    a, b = (
        kernel_operand(face, groups, dtype, rowwise=by_row or face.dequantized_rowwise is not None)
        for face in (left, right)
    )
    if left.format.drawn_signs and a.factor is not None:
        a = a._replace(factor=nan_under_other_signs(a.factor, left, right))
    tile = PRECISE_TILE if dtype is None and not fast_accum else TILES[dtype]
    if a.scales is not None or b.scales is not None:
        tile = PARTIAL_TILES[dtype]
    run = _by_row if by_row else _over_tokens
    return run(a, b, groups, out_dtype, tile, fast_accum)


def is_native(left: Format, right: Format, out_dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether torch has the product: E4M3 by row or tensor, on Hopper, with bf16 results."""
    fits = all(fmt.element == torch.float8_e4m3fn for fmt in (left, right))
    fits = fits and has_fast_accum(left, right)
    return fits and out_dtype == torch.bfloat16 and is_hopper(device)


def _multiply_values(left: Face, right: Face, groups: Groups) -> Tensor | None:
    """Multiply high-precision operands with torch; None where that would synchronize, or misaligned rows are not
    supported."""
    a, b = (
        face.qdata.transpose(-2, -1) if face.dequantized_rowwise is not None else face.qdata
        for face in (left, right)
    )
    if not (a.dtype == b.dtype == torch.bfloat16) or not is_hopper(a.device):
        return None
    if b.shape[-2] * b.itemsize % ALIGNMENT or not (_is_readable(left) and _is_readable(right)):
        return None
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


def _multiply_natively(left: Face, right: Face, groups: Groups) -> Tensor | None:
    """Multiply with torch's grouped kernel; None where extents are not multiples of 16."""
    a, b, ends = left.qdata, right.qdata, ends_of(groups)
    by_row = b.dim() == 3
    if any(size % ALIGNMENT for size in (*a.shape[by_row:], *b.shape[-2:])):
        return None
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


def held_format(face: Face) -> Format:
    """Return the format that is multiplied: the identity for a dequantized face."""
    return face.format if face.dequantized_rowwise is None else IDENTITY


def multiplies_codes(left: Format, right: Format, device: torch.device) -> bool:
    """Return whether stored elements are multiplied: FP8 by tensor, row or blocks of 128, with hardware units."""
    fits = all(is_fp8(fmt) and fmt.block[1] in (None, PARTIAL) for fmt in (left, right))
    return fits and has_fp8_units(device)


def reencodes_weights(left: Format, right: Format, device: torch.device) -> bool:
    """Return whether a stack of MXFP4 weights is multiplied as FP8; see ``ops.reencoding``."""
    return reencodes(left, right) and has_fp8_units(device)


def _by_row(
    left: KernelOperand,
    right: KernelOperand,
    groups: Groups,
    out_dtype: torch.dtype,
    tile: ProductTile,
    fast: bool,
) -> Tensor:
    """Return each token's product with the weight of its group, ``[T, N]``."""
    rows, contraction = left.data.shape
    columns = right.data.shape[2 if right.turned else 1]
    out = torch.empty(rows, columns, dtype=out_dtype, device=left.data.device)
    plan = planning(groups.num_groups, groups.step, rows, tile.rows, out.device)
    number = plan.tiles * -(-columns // tile.columns)
    numbers = plan.tiles, columns, contraction
    key = _Key(
        "product_by_row_kernel", number, tile, fast, left.kind, right.kind, numbers, out.dtype, out.device
    )  # fmt: skip
    _run(key, left, right, out, plan(ends_of(groups)))
    return out


def _over_tokens(
    left: KernelOperand,
    right: KernelOperand,
    groups: Groups,
    out_dtype: torch.dtype,
    tile: ProductTile,
    fast: bool,
) -> Tensor:
    """Return the sums over each group's tokens, ``[E, M, N]``."""
    count, rows, columns = groups.num_groups, left.rows, right.rows
    out = torch.empty(count, rows, columns, dtype=out_dtype, device=left.data.device)
    side = left if left.turned else right
    # Of padded rows so many can be tokens: offsets beyond them stay in the operands
    tokens = side.data.shape[0] if side.turned else side.data.shape[1] - count * groups.step
    plan = planning(count, groups.step, tokens, _ALL, out.device)
    number = count * -(-rows // tile.rows) * -(-columns // tile.columns)
    key = _Key(
        "product_of_tokens_kernel", number, tile, fast, left.kind, right.kind,
        (rows, columns), out.dtype, out.device, (not left.turned, not right.turned),
    )  # fmt: skip
    _run(key, left, right, out, plan(ends_of(groups)))
    return out


class _Key(NamedTuple):
    """Cache key of a launch: everything but addresses."""

    kernel: str
    programs: int
    tile: ProductTile
    fast: bool
    left: tuple[object, ...]
    right: tuple[object, ...]
    numbers: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    padded: tuple[bool, ...] = ()


_LAUNCHES: Cache[_Key, Launch] = Cache()


def _run(key: _Key, left: KernelOperand, right: KernelOperand, out: Tensor, plan: Tensor) -> None:
    launch = _LAUNCHES.get(key)
    if launch is None:
        launch = _LAUNCHES[key] = _launch(key, left.constants, right.constants)
    take = launch.take
    with on_device(key.device):
        launch(left.taken(take), right.taken(take), out, plan, *key.numbers)


def _launch(key: _Key, left: SideConstants, right: SideConstants) -> Launch:
    tile, padded = key.tile, dict(zip(("LEFT_PADDED", "RIGHT_PADDED"), key.padded, strict=False))
    return Launch(
        "grouped_mm",
        key.kernel,
        key.programs,
        options={"num_warps": tile.warps, "num_stages": tile.stages},
        LEFT=left,
        RIGHT=right,
        FAST=key.fast,
        **padded,
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.along,
        WIDTH=tile.width,
    )


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
