"""How far a product in low precision may be from the exact one; derived, not tuned."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtensor.arguments import (
    require_choice,
    require_int,
    require_number,
    require_tensor,
    wrong,
)

_UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def product_bound(
    left: Tensor,
    right: Tensor,
    out_dtype: torch.dtype,
    *,
    accumulate: float = 2.0**-24,
    summands: int = 0,
) -> Tensor:
    """Bound ``|computed - left @ right|``, elementwise, for operands whose values are exact in the hardware.

    ::

        mxfp8 = ht.MXFP8Quantizer()
        left, right = (testing.exact_values(mxfp8.quantize(t).rowwise) for t in (x, weight))
        bound = testing.product_bound(left, right.T, torch.bfloat16)

    With exact products and ``n`` additions of relative error ``u``, a sum is off by at most ``n u sum|terms|`` (Higham,
    Accuracy and Stability of Numerical Algorithms, section 4.2, any order of summation). The scales cost up to six more
    roundings in fp32, and the result one in ``out_dtype``, or the smallest subnormal.

    Args:
        left: Exact values ``[M, K]``, float64.
        right: Exact values ``[K, N]``, float64.
        out_dtype: Dtype of the result.
        accumulate: Relative error of one addition: 2^-24 in fp32; Hopper's tensor cores keep fewer bits in FP8.
        summands: Terms added beside the K products: 1 for a bias.
    """
    for operand in (left, right):
        require_tensor("product_bound", operand, rank=2)
        if operand.dtype != torch.float64 or operand.is_meta:
            raise wrong("product_bound", "a float64 matrix with values", operand)
    require_choice("product_bound", "out_dtype", str(out_dtype), map(str, _UNIT_ROUNDOFF))
    require_number("product_bound", accumulate=accumulate)
    require_int("product_bound", at_least=0, summands=summands)
    exact = left @ right
    magnitude = left.abs() @ right.abs()
    terms = left.shape[1] + summands + 6
    summation = terms * accumulate * magnitude
    rounding = _UNIT_ROUNDOFF[out_dtype] * (exact.abs() + summation)
    return summation + rounding + torch.finfo(out_dtype).smallest_normal
