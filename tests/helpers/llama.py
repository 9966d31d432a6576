"""A Llama-style block: RMSNorm, rotary positions, grouped-query attention, SwiGLU; q, k and v read the same input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# B batch, T time, D model width, H query heads, G key and value heads, E head width


class Attention(nn.Module):
    """Causal attention of ``H`` query heads, each group of which shares one of ``G`` key and value heads."""

    def __init__(self, dim: int, heads: int, groups: int) -> None:
        super().__init__()
        self.width = dim // heads
        self.q = nn.Linear(dim, dim, bias=False)
        self.k, self.v = (nn.Linear(dim, groups * self.width, bias=False) for _ in range(2))
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(
            rotate(q, rotation), rotate(k, rotation), v, is_causal=True, enable_gqa=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate_proj(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual; ``[B, T, D]`` to the same."""

    def __init__(self, dim: int = 64, heads: int = 4, groups: int = 2, hidden: int = 128) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(dim), Attention(dim, heads, groups)
        self.mlp_norm, self.mlp = nn.RMSNorm(dim), SwiGLU(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        rotation = rotary_tables(x.shape[1], self.attention.width, x)
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.mlp(self.mlp_norm(x))


def rotary_tables(length: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, ``[T, E/2]``, in the dtype of ``like``."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, device=like.device) / width)
    angles = torch.arange(length, device=like.device)[:, None] * frequencies
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the halves of each head, ``[B, H, T, E]``, by its position."""
    cos, sin = rotation
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
