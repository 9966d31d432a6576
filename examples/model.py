"""A byte-level transformer: RMSNorm, rotary positions, causal attention, SwiGLU. Plain PyTorch, nothing quantized."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# B batch, T time, D model width, H heads, E head width

NUM_BYTES = 256


@dataclass(frozen=True)
class Size:
    """Shape of a model and of its training batches, and the learning rate that suits it."""

    dim: int
    layers: int
    heads: int
    context: int
    batch: int
    learning_rate: float = 1e-3

    @property
    def hidden(self) -> int:
        """Width of the SwiGLU, 8/3 of the model's, in multiples of 64."""
        return -(-8 * self.dim // 3 // 64) * 64


SIZES = {
    "tiny": Size(dim=64, layers=2, heads=2, context=64, batch=4),
    "small": Size(dim=128, layers=3, heads=2, context=128, batch=16),
    "medium": Size(dim=512, layers=8, heads=8, context=512, batch=32, learning_rate=5e-4),
    "large": Size(dim=1024, layers=12, heads=16, context=1024, batch=32, learning_rate=3e-4),
}


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.width = size.dim // size.heads
        self.qkv = nn.Linear(size.dim, 3 * size.dim, bias=False)
        self.out = nn.Linear(size.dim, size.dim, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Attend within ``x``, ``[B, T, D]``."""
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.width)).permute(3, 0, 2, 1, 4)  # each [B, H, T, E]
        mixed = F.scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj, self.up = (nn.Linear(size.dim, size.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(size.hidden, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[B, T, D]`` to the same."""
        return self.down(F.silu(self.gate_proj(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(size.dim), Attention(size)
        self.mlp_norm, self.mlp = nn.RMSNorm(size.dim), SwiGLU(size)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Map ``[B, T, D]`` to the same."""
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Next-byte model."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_BYTES, size.dim)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.dim)
        self.lm_head = nn.Linear(size.dim, NUM_BYTES, bias=False)
        cos, sin = rotary_tables(size.context, size.dim // size.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                depth = (2 * size.layers) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * depth)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss in nats per byte.

        Args:
            tokens: ``[B, T]``, int64.
            targets: ``[B, T]``, the bytes that follow.
        """
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, (self.cos, self.sin))
        logits = self.lm_head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rotary_tables(context: int, width: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, ``[T, E/2]``."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(context), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the halves of each head, ``[B, H, T, E]``, by its position."""
    cos, sin = (table.to(x.dtype) for table in rotation)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
