"""A model with layers that engines fuse, whose weights can have a common scale."""

import torch
from torch import nn

import hybridtensor as ht

ROWS = (64, 32, 96)
GROUPS = [("*.q", "*.k", "*.v")]


class Block(nn.Module):
    def __init__(self, rows=ROWS):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, n, bias=False) for n in rows)
        self.o = nn.Linear(64, 64)

    def forward(self, x):
        x = x + self.q(x).mean(-1, keepdim=True) + self.k(x).mean(-1, keepdim=True) + self.v(x).mean(-1, keepdim=True)
        return self.o(x)

    @property
    def siblings(self):
        return self.q, self.k, self.v


class Model(nn.Module):
    def __init__(self, rows=ROWS):
        super().__init__()
        self.blocks = nn.ModuleList(Block(rows) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def inputs(seed=0, device="cpu"):
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(seed), device="cpu").to(device)


def model_of(spec, seed=0, groups=GROUPS, rows=None, **options):
    torch.manual_seed(seed)
    model = Model(rows or ROWS)
    with torch.no_grad():
        for i, linear in enumerate(m for m in model.modules() if isinstance(m, nn.Linear)):
            linear.weight.mul_((0.2, 0.6, 1.8, 1)[i % 4])  # their own scales differ
    return ht.quantize_(model, spec, common_scale=groups, **options)
