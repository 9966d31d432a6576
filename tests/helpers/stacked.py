"""A model of equal blocks and an output head, as ``advise`` is tested with."""

from torch import nn


class Stacked(nn.Module):
    """Blocks of a ``width`` one after the other, and a linear layer."""

    def __init__(self, block, count, width):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(count))
        self.lm_head = nn.Linear(width, width)

    def forward(self, x):
        """Return ``[..., width]``."""
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)
