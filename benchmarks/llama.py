"""A Llama-3 model of any size, as training benchmarks use it. Shape letters: B batch, T tokens, D dim, H heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hybridtensor as ht


@dataclass(frozen=True)
class Size:
    """Extents of a model: by default the blocks of Llama-3 8B, with fewer of them and a smaller vocabulary.

    With all 128,256 tokens the head, which stays in BF16, would be a quarter of the time of six blocks.
    """

    layers: int = 6
    dim: int = 4096
    hidden: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocab: int = 32768
    packed: bool = False  # q, k and v of one layer, and gate and up


def layers(module: nn.Module) -> list[nn.Linear]:
    """Return the layers that read the input of attention or of an MLP, in the order of their outputs."""
    return [getattr(module, name) for name in module.names]


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head = size.dim // size.heads
        self.sizes = [heads * self.head for heads in (size.heads, size.kv_heads, size.kv_heads)]
        self.names = ["qkv"] if size.packed else ["q", "k", "v"]
        for name, features in zip(self.names, [sum(self.sizes)] if size.packed else self.sizes, strict=True):
            setattr(self, name, nn.Linear(size.dim, features, bias=False))
        self.out = nn.Linear(size.dim, size.dim, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """Attend causally; ``x`` is ``[B, T, D]``, ``turn`` the positions' angles as cos and sin."""
        outputs = [layer(x) for layer in layers(self)]
        outputs = outputs[0].split(self.sizes, dim=-1) if len(outputs) == 1 else outputs
        q, k, v = (y.unflatten(-1, (-1, self.head)).transpose(1, 2) for y in outputs)
        mixed = F.scaled_dot_product_attention(
            rotated(q, turn), rotated(k, turn), v, is_causal=True, enable_gqa=True
        ).transpose(1, 2)
        return self.out(mixed.flatten(-2))


class MLP(nn.Module):
    """A gated MLP, whose activation is that of this library if it is ``fused``, and passes on what is quantized."""

    fused = False

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.names = ["gate_up_proj"] if size.packed else ["gate_proj", "up_proj"]
        for name in self.names:
            setattr(self, name, nn.Linear(size.dim, 2 * size.hidden // len(self.names), bias=False))
        self.down_proj = nn.Linear(size.hidden, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, T, D]``."""
        outputs = [layer(x) for layer in layers(self)]
        if self.fused:
            return self.down_proj(ht.swiglu(*outputs, into=self.down_proj, outputs_of=layers(self)))
        gate, up = outputs[0].chunk(2, dim=-1) if len(outputs) == 1 else outputs
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm and beside a residual; if ``fused``, with this library's norms."""

    fused = False

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(size.dim, eps=1e-5), nn.RMSNorm(size.dim, eps=1e-5)
        self.attention, self.mlp = Attention(size), MLP(size)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """Return ``[B, T, D]``."""
        x = x + self.attention(self._normed(x, self.norm1, layers(self.attention)), turn)
        return x + self.mlp(self._normed(x, self.norm2, layers(self.mlp)))

    def fuse(self) -> None:
        """Use norms and an activation that pass on what the layers behind them would quantize."""
        self.fused = self.mlp.fused = True

    def _normed(self, x: Tensor, norm: nn.RMSNorm, readers: list[nn.Linear]) -> Tensor:
        return ht.rms_norm(x, norm.weight, norm.eps, into=readers) if self.fused else norm(x)


class Llama(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(size.vocab, size.dim)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.head = nn.Linear(size.dim, size.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean cross-entropy of predicting each next token of ``[B, T]``."""
        turn = angles(tokens.shape[1], self.size.dim // self.size.heads, tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, turn)
        logits = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def angles(tokens: int, head: int, device: torch.device) -> Tensor:
    """Return cos and sin of the rotary angles, ``[2, T, head / 2]``."""
    frequency = 500000.0 ** -(torch.arange(0, head, 2, device=device) / head)
    turn = torch.arange(tokens, device=device)[:, None] * frequency
    return torch.stack([turn.cos(), turn.sin()])


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """Turn pairs of ``[B, H, T, head]`` by their angles."""
    cos, sin = turn.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
