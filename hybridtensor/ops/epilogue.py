"""What a product needs after its fp32 sum: factors, bias, and the one rounding, in one pass.

Shape letters: ``M`` rows, ``N`` columns of the product.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hybridtensor.ops.kernel_library import Launch, on_device

_FP32_MAX = torch.finfo(torch.float32).max
_TILE = (4, 1024)


def scale_and_round(
    total: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``total * (left * right) + bias``, computed in fp32 and rounded once; may use ``total`` for it.

    Args:
        total: fp32 ``[M, N]``.
        left: fp32 ``[M, 1]`` or ``[1, 1]``, or None. Its product with ``right`` saturates.
        right: fp32 ``[1, N]`` or ``[1, 1]``, or None.
        bias: ``[N]`` or None.
        dtype: Dtype of the result.
    """
    if left is None and right is None and bias is None:
        return total.to(dtype).contiguous()
    # A pass of its own, 0.117 ms beside a product of 8192 x 8192 x 8192 of 1.50. cuBLAS takes a factor of sums, but
    # torch passes only one that the host knows.
    if total.is_cuda and total.numel() and total.stride(1) == 1:
        return scale_and_round_cuda(total, left, right, bias, dtype)
    factor = left if right is None else right
    if left is not None and right is not None:
        # Multiplied with each other first, as one may be huge and the other tiny. Beyond fp32 their product would make
        # NaN of a sum that is zero.
        factor = (left * right).clamp(max=_FP32_MAX)
    if factor is not None:
        total.mul_(factor)
    if bias is not None:
        total.add_(bias)
    return total.to(dtype).contiguous()


def scale_and_round_cuda(
    total: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Implement ``scale_and_round`` on a GPU: one kernel scales, adds the bias and rounds."""
    rows, columns = total.shape
    out = torch.empty(rows, columns, dtype=dtype, device=total.device)
    factors = tuple(None if factor is None else factor.numel() > 1 for factor in (left, right))
    given = [total, *(total if t is None else t.contiguous() for t in (left, right, bias))]
    aligned = tuple(t.data_ptr() % 16 == 0 for t in given)
    with on_device(total.device):
        launch = _launch(
            total.shape,
            total.stride(0),
            factors,
            bias is not None and bias.dtype,
            dtype,
            aligned,
            total.device,
        )
        launch(total, total.stride(0), *given[1:], out, rows, columns)
    return out


@functools.lru_cache(maxsize=1024)
def _launch(
    shape: torch.Size, stride: int, factors: tuple[bool | None, ...], bias: torch.dtype | bool, dtype: torch.dtype,
    aligned: tuple[bool, ...], device: torch.device,
) -> Launch:  # fmt: skip
    """Return the cached launch for one kind of product; its key is all that Triton specializes on."""
    (rows, columns), (bm, bn), (left, right) = shape, _TILE, factors
    return Launch(
        "epilogue", "epilogue_kernel", -(-rows // bm) * -(-columns // bn),
        LEFT=left is not None, LEFT_PER_ROW=bool(left), RIGHT=right is not None, RIGHT_PER_COLUMN=bool(right),
        BIAS=bias is not False, BM=bm, BN=bn,
        options={"num_warps": 4, "enable_fp_fusion": False},
    )  # fmt: skip
