"""Which rows of tokens each row of a kernel's tiles has."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hybridtensor.ops.face import Groups
from hybridtensor.ops.groups import padded_rows
from hybridtensor.ops.kernel_library import Launch, on_device

_ENTRY = 8  # numbers for each row of tiles
_PLANNED = 32  # rows of tiles that one program plans


def aligned(ends: Tensor | None) -> Tensor:
    """Return offsets that begin at a multiple of 16 bytes and lie one after the other, as kernels rely on.

    Raises:
        ValueError: If there are none.
    """
    if ends is None:
        raise ValueError("grouped_mm: offsets are required, got a stack of matrices")
    return ends if ends.is_contiguous() and ends.data_ptr() % 16 == 0 else ends.clone()


class Planning:
    """The kernel that works it out, where the device knows how groups end.

    Args:
        groups: How many groups there are, and their step.
        rows: How many tokens there are.
        height: Rows of a tile.

    Raises:
        ValueError: If the step is no multiple of 16, which kernels rely on.

    Attributes:
        pitch: Padded rows of all groups.
        tiles: Rows of tiles that there are at most.
    """

    def __init__(self, groups: Groups, rows: int, height: int) -> None:
        if groups.step % 16:
            raise ValueError(
                f"quantize_groups: a step that is a multiple of 16 is required, got {groups.step}"
            )
        self.pitch = padded_rows(rows, groups)
        self.tiles = self.pitch // height + groups.num_groups + 1
        self._numbers = rows, self.pitch, groups.num_groups, self.tiles
        self._launch = Launch(
            "grouped_quantize",
            "plan_kernel",
            -(-self.tiles // _PLANNED),
            options={"num_warps": 4},
            STEP=groups.step,
            BM=height,
            GROUPS=1 << groups.num_groups.bit_length(),  # one more at least: the rows of none
            BLOCK=_PLANNED,
        )

    def __call__(self, ends: Tensor) -> Tensor:
        """Return the plan of groups that end at ``ends``: int32 ``[tiles, 8]``; see ``plan_kernel``."""
        plan = ends.new_empty(self.tiles, _ENTRY)
        with on_device(ends.device):
            self._launch(aligned(ends), plan, *self._numbers)
        return plan


@functools.lru_cache(maxsize=1024)
def planning(num_groups: int, step: int, rows: int, height: int, device: torch.device) -> Planning:
    """Return the planning for tokens on a device: launches are kept for what is launched again."""
    return Planning(Groups(num_groups, None, step), rows, height)
