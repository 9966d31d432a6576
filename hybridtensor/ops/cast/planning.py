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
    """Return contiguous offsets at a 16-byte boundary, as kernels require; raise ValueError for None."""
    if ends is None:
        raise ValueError("grouped_mm: offsets are required, got a stack of matrices")
    return ends if ends.is_contiguous() and ends.data_ptr() % 16 == 0 else ends.clone()


class Planning:
    """The kernel that maps rows of tiles to groups, whose ends only the device knows; the step is a multiple of 16."""

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
        """Return the plan for groups that end at ``ends``: int32 ``[tiles, 8]``; see ``plan_kernel``."""
        plan = ends.new_empty(self.tiles, _ENTRY)
        with on_device(ends.device):
            self._launch(aligned(ends), plan, *self._numbers)
        return plan


@functools.lru_cache(maxsize=1024)
def planning(num_groups: int, step: int, rows: int, height: int, device: torch.device) -> Planning:
    """Return the cached planning for tokens on a device."""
    return Planning(Groups(num_groups, None, step), rows, height)
