"""Scale groups: blocks of a matrix, their largest magnitudes, and spreading what was found per block.

A block is ``(across, along)``, its extent along the two axes of an ``[other, contraction]`` matrix;
``None`` is the whole axis. Blocks at the end of an axis may be partial.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Block = tuple[int | None, int | None]
_EVERYTHING = (None, None)


def block_amax(x: Tensor, block: Block) -> Tensor:
    """Return the largest magnitude of each block, fp32 ``[blocks across, blocks along]``; NaN elements do not count."""
    counting = x.abs().nan_to_num_(nan=0.0, posinf=float("inf"))
    if block == _EVERYTHING and counting.numel():
        return counting.amax().float().view(1, 1)
    return _reduce(counting, block).float()


def amaxes_of_rows(x: Tensor) -> Tensor:
    """Return the largest magnitude of each row, in the dtype of ``x``; NaN elements do not count."""
    # Few operations: a compiler takes milliseconds for each, in each layer that it traces. ``nan_to_num`` would compare
    # with infinity, too, in compiled kernels.
    return torch.where(x.isnan(), 0.0, x.abs()).amax(dim=1)


def block_has_nan(x: Tensor, block: Block) -> Tensor:
    """Return whether each block holds a NaN, bool ``[blocks across, blocks along]``."""
    return _reduce(x.isnan().to(torch.uint8), block).bool()


def _reduce(values: Tensor, block: Block) -> Tensor:
    """Return the maximum of each block of values that are not negative."""
    rows, columns = values.shape
    across, along = block
    if values.numel() == 0:
        counts = (
            1 if across is None else -(-rows // across),
            1 if along is None else -(-columns // along),
        )
        return values.new_zeros(counts)
    across, along = across or rows, along or columns
    below, beside = -rows % across, -columns % along
    if below or beside:
        values = F.pad(values, (0, beside, 0, below))
    if across == 1:
        largest: Tensor = values.unflatten(1, (-1, along)).amax(dim=2)
    else:
        largest = values.unflatten(1, (-1, along)).unflatten(0, (-1, across)).amax(dim=(1, 3))
    return largest


def spread(per_block: Tensor, block: Block, shape: torch.Size | tuple[int, int]) -> Tensor:
    """Repeat what was found per block so that it broadcasts against a matrix of ``shape``."""
    for dim, extent in enumerate(block):
        if extent is not None and extent > 1:
            per_block = per_block.repeat_interleave(extent, dim=dim).narrow(dim, 0, shape[dim])
    return per_block
