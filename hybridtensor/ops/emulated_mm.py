"""Products of formats that the hardware does not multiply: exact element values, summed in fp32,
scaled and rounded once.

Shape letters: ``M`` rows of the left operand, ``N`` columns of the right one, ``K`` contraction.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtensor.ops.dequantize import multipliable_values, signs_of, without_signs
from hybridtensor.ops.epilogue import scale_and_round
from hybridtensor.ops.face import Face
from hybridtensor.ops.references.blocks import spread

_FP32_MAX = torch.finfo(torch.float32).max
_mm_into_fp32 = functools.partial(torch.mm, out_dtype=torch.float32)


def multiply_emulated(
    a: Face, b: Face, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool = False
) -> Tensor:
    """Return ``a @ b.T + bias``, rounded once to ``out_dtype``; ``fast_accum`` has no effect."""
    device_type = a.qdata.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):  # ``autocasts``, in place
        with torch.autocast(device_type, enabled=False):
            return multiply_emulated(a, b, bias, out_dtype)
    # Dequantized first, then multiplied: 1.60 ms for MXFP8 operands of 8192 x 8192 x 8192 on an H200. tl.dot_scaled,
    # which Triton 3.6 widens in registers there, took 5.5.
    # Power-of-two block scales, and E4M3 over E2M1 elements, are multiplied into the elements, exactly in bf16. FP32
    # block scales do not fit into bf16 and multiply partial sums; all coarser scales multiply the whole sum.
    dtype = torch.bfloat16
    if a.scale is None or b.scale is None:
        dtype = (a if a.scale is None else b).qdata.dtype
    if device_type != "cuda":
        dtype = torch.float32  # the only CPU product with an fp32 result
    left, right = multipliable_values((a, b), dtype)
    if left.shape[1] != right.shape[1]:
        left, right = _of_one_length(left, right)
    left_factor, right_factor = sum_factors((a, b))
    if a.format.drawn_signs and left_factor is not None:
        left_factor = nan_under_other_signs(left_factor, a, b)
    partial = a.format.scales_partial_sums or b.format.scales_partial_sums
    plain = left_factor is None and right_factor is None and bias is None and not partial
    if plain and out_dtype == dtype == torch.bfloat16:
        return torch.mm(left, right.t())
    mm = torch.mm if dtype == torch.float32 else _mm_into_fp32
    out = _sum_of_blocks(a, b, left, right, mm) if partial else mm(left, right.t())
    if right_factor is not None:
        right_factor = right_factor.t()
    return scale_and_round(out, left_factor, right_factor, bias, out_dtype)


def nan_under_other_signs(factor: Tensor, a: Face, b: Face) -> Tensor:
    """Return the factor of whole sums ``[..., 1, 1]``, NaN where the faces' signs differ: raising would synchronize
    with the device."""
    if a.tensor_scale is None or b.tensor_scale is None:
        return factor
    alike = signs_of(a.tensor_scale) == signs_of(b.tensor_scale)
    return torch.where(alike.all(-2, keepdim=True), factor, float("nan"))


def _of_one_length(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Pad the shorter operand with zeros to the length of the longer one."""
    longer = max(left.shape[1], right.shape[1])
    return F.pad(left, (0, longer - left.shape[1])), F.pad(right, (0, longer - right.shape[1]))


def sum_factors(faces: Sequence[Face]) -> list[Tensor | None]:
    """Return each face's factor of the whole sum of a row, fp32 ``[1 or other, 1]``, or None."""
    factors = []
    for face in faces:
        fmt, factor = face.format, face.tensor_scale
        if factor is not None:
            factor = without_signs(factor, fmt) * (1.0 / fmt.tensor_scale_max)
        elif fmt.block[1] is None:
            factor = face.scale
        factors.append(factor)
    return factors


def _sum_of_blocks(
    a: Face, b: Face, left: Tensor, right: Tensor, mm: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return the sum of the blocks' partial products, each times its fp32 scales."""
    total = torch.zeros(left.shape[0], right.shape[0], dtype=torch.float32, device=left.device)
    contraction = left.shape[1]
    ends = {contraction}
    for fmt in (a.format, b.format):
        if fmt.scales_partial_sums and fmt.block[1] is not None:
            ends.update(range(fmt.block[1], contraction, fmt.block[1]))
    for start, stop in itertools.pairwise([0, *sorted(ends)]):
        part = mm(left[:, start:stop], right[:, start:stop].t())
        factor = _outer(block_factor(a, start, stop), block_factor(b, start, stop))
        total += part if factor is None else part * factor
    return total


def block_factor(face: Face, start: int, stop: int) -> Tensor | None:
    """Return the factor of the partial sum over ``[start, stop)``, fp32 ``[other, 1]``, or None; ValueError if it
    cuts a block."""
    along = face.format.block[1]
    if face.scale is None or along is None or not face.format.scales_partial_sums:
        return None
    if start // along != (stop - 1) // along:
        raise ValueError(
            f"scaled_mm: a range inside a block of {along} is required, got [{start}, {stop})"
        )
    column = face.scale[:, start // along].unsqueeze(1)
    return spread(column, (face.format.block[0], None), (face.qdata.shape[0], 1))


def _outer(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Return the product of both factors, saturated: Inf times a sum of zero would be NaN."""
    # Multiplied with each other first, because one factor may be huge and the other tiny.
    if left is None or right is None:
        return left if right is None else right.t()
    return (left * right.t()).clamp(max=_FP32_MAX)
