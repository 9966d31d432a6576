"""The layout in which Blackwell's matrix units read block scales.

Scales ``[M, S]`` are padded with zeros to tiles of 128 x 4; tiles follow each other row by row, 512 bytes each. Within
a tile, row ``r`` and column ``c`` are at byte ``(r % 32) * 16 + (r // 32) * 4 + c``.

Source: cuBLAS documentation, "1D block scaling factors layout"; ``torch.nn.functional.SwizzleType.SWIZZLE_32_4_4``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_TILE_ROWS, _TILE_COLUMNS, _GROUP = 128, 4, 32


def swizzle_32_4_4(scale: Tensor) -> Tensor:
    """Return block scales ``[M, S]``, one byte each, in that layout, flat."""
    pad = -scale.shape[0] % _TILE_ROWS, -scale.shape[1] % _TILE_COLUMNS
    padded = F.pad(scale.contiguous().view(torch.uint8), (0, pad[1], 0, pad[0]))
    tiles = padded.view(
        -1, _TILE_ROWS // _GROUP, _GROUP, padded.shape[1] // _TILE_COLUMNS, _TILE_COLUMNS
    )
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(scale.dtype)
