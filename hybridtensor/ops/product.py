"""The product of two faces, of matrices or of groups of them."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtensor.ops.face import Face
from hybridtensor.ops.grouped_mm import grouped_product
from hybridtensor.ops.scaled_mm import matrix_product


def product(
    left: Face,
    right: Face,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype,
    fast_accum: bool = False,
) -> Tensor:
    """Return ``left @ right.T + bias``: see ``matrix_product``, and ``grouped_product`` for tokens with
    groups, which have no bias.
    """
    if left.groups is not None:
        return grouped_product(left, right, out_dtype, fast_accum)
    return matrix_product(left, right, bias=bias, out_dtype=out_dtype, fast_accum=fast_accum)
