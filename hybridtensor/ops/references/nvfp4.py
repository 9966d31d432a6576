"""NVFP4: E2M1 elements, an E4M3 scale per block of 16, and an fp32 scale on top.

Shape letters: ``M`` other axis, ``K`` contraction axis, ``A x B`` scale blocks, ``T`` tensor scales
(1 or M).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtensor.formats import E2M1_MAX, E4M3_MAX, Format
from hybridtensor.ops.references.blocks import block_amax, block_has_nan, spread
from hybridtensor.ops.references.float8 import FP32_MAX
from hybridtensor.ops.references.hadamard import rotate
from hybridtensor.ops.references.philox import uniform16

_E2M1_SIGN = 8


def e2m1_encode(x: Tensor, uniform: Tensor | None = None) -> Tensor:
    """Return the E2M1 codes of fp32 values, one per byte: sign in bit 3, saturating.

    Args:
        x: Any shape, no NaN.
        uniform: Numbers from (0, 1), broadcastable against ``x``: round up with the probability
            that keeps the mean. ``None`` rounds to nearest, ties to even.
    """
    magnitude = x.abs().clamp_(max=E2M1_MAX)
    units = torch.where(
        magnitude < 2, magnitude * 2, torch.where(magnitude < 4, magnitude, magnitude * 0.5)
    )
    codes = units.round() if uniform is None else (units + uniform).floor()
    codes += torch.where(magnitude < 2, 0, torch.where(magnitude < 4, 2, 4))
    return torch.where(x.signbit(), codes + _E2M1_SIGN, codes).to(torch.uint8)


def e2m1_decode(codes: Tensor) -> Tensor:
    """Return the fp32 values of E2M1 codes, one per byte."""
    magnitude = (codes & (_E2M1_SIGN - 1)).float()
    values = torch.where(
        magnitude < 4, magnitude * 0.5, torch.where(magnitude < 6, magnitude - 2, magnitude * 2 - 8)
    )
    return torch.where(codes < _E2M1_SIGN, values, -values)


def pack(codes: Tensor) -> Tensor:
    """Put two codes of the last dimension into a byte, the first into the low half."""
    return (codes[:, ::2] | (codes[:, 1::2] << 4)).contiguous()


def unpack(qdata: Tensor) -> Tensor:
    """Undo ``pack``."""
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
        """Return one number per element of a matrix, by the tensor's own rows whichever way round
        it comes; or None.
        """
        if self.rounding is None:
            return None
        rows, columns = reversed(shape) if self.transposed else shape
        drawn = uniform16(
            rows, columns, rounding=self.rounding, stream=self.stream, first_row=self.first_row
        )
        return drawn.t() if self.transposed else drawn


NEAREST = Draws(None)


def quantize(
    x: Tensor, fmt: Format, draws: Draws = NEAREST, amax: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return bytes ``[M, K/2]``, block scales ``[A, B]`` and tensor scales ``[T, 1]`` of ``x``.

    With ``s = 2688 / tensor amax`` the block scale is ``E4M3(block amax * s / 6)``, and the element
    ``E2M1(x * s / block scale)``, each step rounded to fp32, elements and scales to nearest even,
    saturating. The tensor scale is the amax, 2688 where that is 0 or Inf; ``amax``, ``[T, 1]``, is
    used where it is known. An amax below 8e-36, whose encode scale would be beyond fp32, gives
    smaller values, as NVIDIA's kernels do. E2M1 has no NaN: a NaN makes the scale of its block NaN.

    Source: TransformerEngine, common/cast/nvfp4/core_nvfp4.cuh and
    custom_recipes/reference_nvfp4.py; NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv
    2509.25149.
    """
    if fmt.tensor_block is None:
        raise ValueError(f"nvfp4: a two-level format is required, got {fmt}")
    values = rotate(x) if fmt.hadamard else x
    amax = block_amax(values, fmt.tensor_block) if amax is None else amax  # [T, 1]
    tensor_scale = torch.where(
        (amax == 0) | amax.isinf(), fmt.tensor_scale_max, amax
    )  # encodes with factor 1
    encode = (torch.full_like(amax, fmt.tensor_scale_max) / tensor_scale).clamp(max=FP32_MAX)
    sixth = (1.0 / torch.tensor(fmt.max, dtype=torch.float32, device="cpu")).item()
    scale = (block_amax(values, fmt.block) * (encode * sixth)).clamp(max=E4M3_MAX)
    scale = scale.to(torch.float8_e4m3fn)  # [A, B]
    factor = (scale.float() * encode.reciprocal()).reciprocal().clamp(max=FP32_MAX)
    scaled = values.float().nan_to_num(nan=0.0, posinf=float("inf"), neginf=float("-inf"))
    scaled = scaled * spread(factor, fmt.block, x.shape)
    codes = e2m1_encode(scaled, draws.uniform(x.shape))
    scale = torch.where(block_has_nan(values, fmt.block), float("nan"), scale.float())
    return pack(codes), scale.to(torch.float8_e4m3fn), tensor_scale
