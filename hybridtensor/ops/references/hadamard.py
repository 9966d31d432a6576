"""The random Hadamard transform of 16: spreads outliers along the contraction axis, and cancels in a product."""

from __future__ import annotations

import torch
from torch import Tensor

SIZE = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The fixed random signs of TransformerEngine's NVFP4 recipe."""

_MINUS = sum(1 << i for i, sign in enumerate(SIGNS) if sign < 0)  # a bit for each
_BF16_MAX = torch.finfo(torch.bfloat16).max


def rotate(x: Tensor) -> Tensor:
    """Return ``x`` with every 16 values of its last dimension multiplied by ``diag(signs) @ H16 / 4``, in bfloat16.

    The sum runs in fp32 in the order of the fast transform, and is rounded once. Saturates: what
    was finite stays so. An Inf makes all 16 values of its group Inf, a NaN makes them NaN.

    Args:
        x: ``[M, K]``, ``K % 16 == 0``.

    Source: TransformerEngine, custom_recipes/reference_nvfp4.py and its Hadamard kernels.
    """
    signs = _signs(x.device)
    # Times 1/16 first: no sum overflows
    groups = x.float().unflatten(1, (-1, SIZE)) * (signs * 2.0**-4)
    rotated = hadamard_transform(groups) * 4.0
    infinite = groups.isinf().any(-1, keepdim=True) & ~groups.isnan().any(-1, keepdim=True)
    inf_minus_inf = rotated.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))
    rotated = torch.where(infinite, inf_minus_inf, rotated.clamp(-_BF16_MAX, _BF16_MAX))
    return rotated.flatten(1).to(torch.bfloat16)


def rotate_back(x: Tensor) -> Tensor:
    """Undo ``rotate`` in fp32, or float64: ``H16 / 4 @ diag(signs)``."""
    signs = _signs(x.device)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    groups = hadamard_transform(x.unflatten(1, (-1, SIZE)) * 2.0**-4)
    return (groups * (signs * 4.0)).flatten(1)


def _signs(device: torch.device) -> Tensor:
    """Return the signs in fp32, made where they are: a copy from the host could not go into a CUDA graph."""
    return (1 - 2 * ((_MINUS >> torch.arange(SIZE, device=device)) & 1)).float()


def hadamard_transform(groups: Tensor) -> Tensor:
    """Multiply the last dimension, a power of two, by the Hadamard matrix in natural order: sums and
    differences, of neighbours first.
    """
    stride = 1
    while stride < groups.shape[-1]:
        pairs = groups.unflatten(-1, (-1, 2, stride))
        low, high = pairs.unbind(-2)
        groups = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        stride *= 2
    return groups
