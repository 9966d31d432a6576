"""NVFP4: E2M1 elements, an E4M3 scale per block of 16, and an fp32 scale on top.

Shape letters: ``M`` other axis, ``K`` contraction axis, ``A x B`` scale blocks, ``T`` tensor scales (1 or M).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtensor.formats import E2M1_MAX, E4M3_MAX, Format
from hybridtensor.ops.references.blocks import block_amax, block_has_nan, spread
from hybridtensor.ops.references.float8 import FP32_MAX
from hybridtensor.ops.references.hadamard import rotate
from hybridtensor.ops.references.philox import uniform16

_E2M1_SIGN = 8
_EXPONENT, _EXPONENT_OF_1 = 0xFF << 23, 127 << 23
_LENGTH = 16  # of a block


def e2m1_encode(x: Tensor, uniform: Tensor | None = None) -> Tensor:
    """Return the E2M1 codes of fp32 values, one per byte: sign in bit 3, saturating.

    Args:
        x: Any shape, no NaN.
        uniform: Numbers from (0, 1), broadcastable against ``x``: round up with the probability
            that keeps the mean. ``None`` rounds to nearest, ties to even.
    """
    magnitude = x.abs().clamp_(max=E2M1_MAX)
    # Steps are half of the power of two below the magnitude: of 1, 2 or 4. Bits of fp32 tell it, which on a CPU takes
    # half as long as comparisons.
    power = (magnitude.view(torch.int32) & _EXPONENT).clamp_(min=_EXPONENT_OF_1)
    units = (magnitude / power.view(torch.float32)).mul_(2)
    units = units.round_() if uniform is None else (units + uniform).floor_()
    codes = units.to(torch.int32).add_((power - _EXPONENT_OF_1) >> 22)
    sign = (x.view(torch.int32) >> 28).bitwise_and_(_E2M1_SIGN)
    return codes.bitwise_or_(sign).to(torch.uint8)


def e2m1_decode(codes: Tensor) -> Tensor:
    """Return the fp32 values of E2M1 codes, one per byte."""
    magnitude = (codes & (_E2M1_SIGN - 1)).float()
    # The lines that the steps of 0.5, 1 and 2 lie on, each the highest where it holds.
    values = torch.maximum(torch.maximum(magnitude * 0.5, magnitude - 2), magnitude * 2 - 8)
    return values.copysign(7.5 - codes.float())  # integers would take the default dtype


def pack(codes: Tensor) -> Tensor:
    """Put two codes of the last dimension into a byte, the first into the low half."""
    return (codes[:, ::2] | (codes[:, 1::2] << 4)).contiguous()


def unpack(qdata: Tensor) -> Tensor:
    """Return the E2M1 codes of bytes that hold two each, the first in the low half."""
    return torch.stack((qdata & 0xF, qdata >> 4), dim=-1).flatten(-2)


class Draws(NamedTuple):
    """What stochastic rounding draws by.

    Attributes:
        rounding: Key and step, int64 ``[2]``; None rounds to nearest.
        stream: Tensors with one key and step draw different numbers in different streams.
        first_row: Index of the tensor's first row in the whole tensor.
        transposed: Whether the matrix is the transpose of the tensor whose rows are counted.
    """

    rounding: Tensor | None
    stream: int = 0
    first_row: int = 0
    transposed: bool = False

    def uniform(self, shape: torch.Size) -> Tensor | None:
        """Return one number per element of a matrix, by the tensor's own rows whichever way round it comes; or None."""
        if self.rounding is None:
            return None
        rows, columns = reversed(shape) if self.transposed else shape
        drawn = uniform16(
            rows, columns, rounding=self.rounding, stream=self.stream, first_row=self.first_row
        )
        return drawn.t() if self.transposed else drawn


NEAREST = Draws(None)


def quantize(
    x: Tensor, fmt: Format, draws: Draws = NEAREST, amax: Tensor | None = None, rule: str = ""
) -> tuple[Tensor, Tensor, Tensor]:
    """Return bytes ``[M, K/2]``, block scales ``[A, B]`` and tensor scales ``[T, 1]`` of ``x``.

    With ``s = fmt.tensor_scale_max / tensor amax`` the block scale is ``E4M3(block amax * s / 6)``, and the element
    ``E2M1(x * s / block scale)``, each step rounded to fp32, elements and scales to nearest even,
    saturating. The tensor scale is the amax, ``fmt.tensor_scale_max`` where that is 0 or Inf; ``amax``,
    ``[T, 1]``, is used where it is known. With the ``rule`` ``"mae"`` or ``"mse"`` the block scale is
    chosen among two: see ``four_over_six``. An amax below 8e-36, whose encode scale would be beyond fp32, gives
    smaller values, as NVIDIA's kernels do. E2M1 has no NaN: a NaN makes the scale of its block NaN.

    Source: TransformerEngine, common/cast/nvfp4/core_nvfp4.cuh and custom_recipes/reference_nvfp4.py; NVIDIA,
    "Pretraining Large Language Models with NVFP4", arXiv 2509.25149.
    """
    if fmt.tensor_block is None:
        raise ValueError(f"nvfp4: a two-level format is required, got {fmt}")
    values = rotate(x) if fmt.hadamard else x
    amax = block_amax(values, fmt.tensor_block) if amax is None else amax  # [T, 1]
    # Encodes with factor 1
    tensor_scale = torch.where((amax == 0) | amax.isinf(), fmt.tensor_scale_max, amax)
    encode = (torch.full_like(amax, fmt.tensor_scale_max) / tensor_scale).clamp(max=FP32_MAX)
    finite = values.float().nan_to_num(nan=0.0, posinf=float("inf"), neginf=float("-inf"))
    largest = block_amax(values, fmt.block)
    if rule:
        scale = four_over_six(
            finite, largest, encode, tensor_scale, fmt, rule, transposed=draws.transposed
        )
    else:
        # In the order of core_nvfp4.cuh, by the reciprocal: each step is rounded to fp32, and
        # another order gives other scales.
        sixth = (1.0 / torch.tensor(fmt.max, dtype=torch.float32, device="cpu")).item()
        scale = (largest * (encode * sixth)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)  # [A, B]
    scaled = finite * spread(_factor(scale, encode), fmt.block, x.shape)
    codes = e2m1_encode(scaled, draws.uniform(x.shape))
    scale = torch.where(block_has_nan(values, fmt.block), float("nan"), scale.float())
    return pack(codes), scale.to(torch.float8_e4m3fn), tensor_scale


def _factor(scale: Tensor, encode: Tensor) -> Tensor:
    """Return the encode scale of each block, by which values are multiplied before they are rounded."""
    return (scale.float() * encode.reciprocal()).reciprocal().clamp(max=FP32_MAX)


def four_over_six(
    values: Tensor,
    amax: Tensor,
    encode: Tensor,
    tensor_scale: Tensor,
    fmt: Format,
    metric: str,
    *,
    transposed: bool,
) -> Tensor:
    """Return E4M3 scales ``[A, B]``, under each of which the amax of its block becomes 6 or 4: whichever
    has the smaller error, of a tie 6.

    Args:
        values: fp32 ``[M, K]``, no NaN.
        amax: Of blocks, fp32 ``[A, B]``.
        encode: Encode scale of the tensor, or of each row, fp32 ``[T, 1]``.
        tensor_scale: The tensor scale, fp32 ``[T, 1]``.
        fmt: The format.
        metric: ``"mae"``, the sum of absolute errors, or ``"mse"``, of squared ones.
        transposed: Whether the matrix is the transpose of the tensor, whose rows errors are added up by:
            square blocks of both faces have one choice.

    Source: Cook et al., "Four Over Six", arXiv 2512.02010; TransformerEngine,
    pytorch/custom_recipes/reference_nvfp4.py, whose order of operations this is.
    """
    # Steps of E2M1 are 2 wide between 4 and 6 and at most 1 below, so that the larger scale, with which nothing lies
    # there, may be the better one.
    base = amax / torch.full_like(amax, fmt.max) * encode
    six, four = (
        wanted.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn) for wanted in (base, base * 1.5)
    )
    error_of_six, error_of_four = (
        _block_errors(values, scale, encode, tensor_scale, fmt, metric, transposed)
        for scale in (six, four)
    )
    return torch.where(error_of_four < error_of_six, four.float(), six.float()).to(
        torch.float8_e4m3fn
    )


def _block_errors(
    values: Tensor,
    scale: Tensor,
    encode: Tensor,
    tensor_scale: Tensor,
    fmt: Format,
    metric: str,
    transposed: bool,
) -> Tensor:
    """Return the errors of blocks under their scales, fp32 ``[A, B]``; see ``four_over_six``."""
    codes = e2m1_encode(values * spread(_factor(scale, encode), fmt.block, values.shape))
    dequantized = e2m1_decode(codes) * spread(scale.float(), fmt.block, values.shape)
    dequantized = dequantized * tensor_scale
    dequantized = dequantized / torch.full_like(dequantized, fmt.tensor_scale_max)
    differences = dequantized - values
    errors = differences.abs() if metric == "mae" else differences * differences
    if fmt.block[0] == 1:
        return _sum_in_order(errors)
    if transposed:
        return _sum_squares(errors.t()).t()
    return _sum_squares(errors)


def _sum_in_order(errors: Tensor) -> Tensor:
    """Return the sums of every 16 errors of a row, added one after the other, ``[M, K / 16]``."""
    total: Tensor
    total, *others = errors.unflatten(1, (-1, _LENGTH)).unbind(2)
    for other in others:
        total = total + other
    return total


def _sum_squares(errors: Tensor) -> Tensor:
    """Return the sums of blocks of 16x16: of each row in order, and of rows in a tree."""
    rows = _sum_in_order(
        F.pad(errors, (0, -errors.shape[1] % _LENGTH, 0, -errors.shape[0] % _LENGTH))
    )
    sums: Tensor = rows.unflatten(0, (-1, _LENGTH))  # [A, 16, B]
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]
