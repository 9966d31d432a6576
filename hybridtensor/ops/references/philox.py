"""Random bits from a counter: the same on every device, in any order, for any split of the tensor.

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a
64-bit key and a 128-bit counter into 128 random bits. Here the key belongs to a layer, and the
counter is (element index / 8, step, stream); each element takes 16 of the 128 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
ELEMENTS_PER_CALL = 8


def philox(
    key: Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four random 32-bit words per counter, as int64.

    Args:
        key: int64, broadcastable against the counters; all 64 bits count.
        counter: Four words of 32 bits, as int64, least significant first.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & _WORD, (key >> 32) & _WORD
    for _ in range(10):
        # int64 wraps around, and its bits are those of uint64
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((second >> 32) & _WORD) ^ c1 ^ k0, second & _WORD
        c2, c3 = ((first >> 32) & _WORD) ^ c3 ^ k1, first & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def uniform16(rows: int, columns: int, *, rounding: Tensor, stream: int, first_row: int) -> Tensor:
    """Return one number per element of a matrix, from (0, 1) in steps of 2^-16, as fp32 ``[rows, columns]``.

    The numbers of a row depend on its index in the whole tensor only: ``first_row`` is that of the
    first row here, so that shards of a tensor draw what the whole would.

    Args:
        rows: Rows of this shard.
        columns: Columns of the tensor.
        rounding: int64 ``[2]``: the layer's key and the step.
        stream: Which tensor of the layer this is for; streams share nothing.
        first_row: Index of the first row in the whole tensor.
    """
    first, last = first_row * columns, (first_row + rows) * columns
    start = first // ELEMENTS_PER_CALL
    calls = torch.arange(start, -(-last // ELEMENTS_PER_CALL), device=rounding.device)
    key, step = rounding.unbind()
    words = philox(key, (calls & _WORD, calls >> 32, step & _WORD, torch.full_like(step, stream)))
    halves = _halves(words)
    offset = first - start * ELEMENTS_PER_CALL
    bits = halves[offset : offset + rows * columns].view(rows, columns)
    return (bits.float() + 0.5) * 2.0**-16


def sign_halves(rounding: Tensor, stream: int) -> Tensor:
    """Return 128 random signs as eight numbers of 16 bits, int64 ``[8]``, lowest first; a bit that is set is minus.

    All streams of one seed of a layer have the same in a step: a rotation by them cancels in products.

    Args:
        rounding: int64 ``[2]``: the layer's key and the step.
        stream: Any stream of the seed; signs are those of the last of its eight, which rounds nothing.
    """
    key, step = rounding.unbind()
    zero = torch.zeros_like(step)
    words = philox(key, (zero, zero, step & _WORD, torch.full_like(step, stream | 7)))
    return _halves(words)


def _halves(words: tuple[Tensor, ...]) -> Tensor:
    """Split 32-bit words into halves of 16 bits, the lower half first, call by call."""
    found = torch.stack(words, dim=-1)
    return torch.stack((found & 0xFFFF, found >> 16), dim=-1).flatten()
