"""The product of two faces, of matrices or of groups of them."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtensor.ops.face import Face
from hybridtensor.ops.grouped_mm import grouped_product
from hybridtensor.ops.library import runs_directly
from hybridtensor.ops.scaled_mm import cached_multiply, matrix_product


def product(
    left: Face,
    right: Face,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype,
    fast_accum: bool = False,
    direct: bool = False,
) -> Tensor:
    """Return ``left @ right.T + bias``: ``matrix_product``, or ``grouped_product`` without bias."""
    if left.groups is not None:
        return grouped_product(left, right, out_dtype, fast_accum, direct)
    if direct or runs_directly(left.qdata):
        return cached_multiply(left, right, bias, out_dtype)(
            left, right, bias, out_dtype, fast_accum
        )
    return matrix_product(left, right, bias, out_dtype, fast_accum)
