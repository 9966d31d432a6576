"""Quantize a matrix to NVFP4: E2M1 elements, an E4M3 scale per block of 16, and an fp32 scale on top.

Shape letters: ``M`` other axis, ``K`` contraction axis, ``A x B`` scale blocks, ``T`` tensor scales (1 or M).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtensor.formats import E2M1_MAX, E4M3_MAX, Format, get_format
from hybridtensor.ops.blocks import block_amax, block_has_nan, spread
from hybridtensor.ops.float8_quantize import FP32_MAX
from hybridtensor.ops.hadamard import rotate
from hybridtensor.ops.library import define, require_device, require_float
from hybridtensor.ops.philox import uniform16

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_SIGN = 8


def e2m1_encode(x: Tensor, uniform: Tensor | None = None) -> Tensor:
    """Return the E2M1 codes of fp32 values, one per byte: sign in bit 3, saturating.

    Args:
        x: Any shape, no NaN.
        uniform: Numbers from (0, 1), broadcastable against ``x``: round up with the probability that keeps the mean.
            ``None`` rounds to nearest, ties to even.
    """
    magnitude = x.abs().clamp_(max=E2M1_MAX)
    units = torch.where(magnitude < 2, magnitude * 2, torch.where(magnitude < 4, magnitude, magnitude * 0.5))
    codes = units.round() if uniform is None else (units + uniform).floor()
    codes += torch.where(magnitude < 2, 0, torch.where(magnitude < 4, 2, 4))
    return torch.where(x.signbit(), codes + _E2M1_SIGN, codes).to(torch.uint8)


def e2m1_decode(codes: Tensor) -> Tensor:
    """Return the fp32 values of E2M1 codes, one per byte."""
    table = torch.tensor([*_E2M1_VALUES, *(-v for v in _E2M1_VALUES)], dtype=torch.float32, device=codes.device)
    return table[codes.int()]


def pack(codes: Tensor) -> Tensor:
    """Put two codes of the last dimension into a byte, the first into the low half."""
    return (codes[:, ::2] | (codes[:, 1::2] << 4)).contiguous()


def unpack(qdata: Tensor) -> Tensor:
    """Undo ``pack``."""
    return torch.stack((qdata & 0xF, qdata >> 4), dim=-1).flatten(-2)


def nvfp4_quantize_reference(
    x: Tensor, format: str, rounding: Tensor | None, stream: int, first_row: int, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Define ``nvfp4_quantize``."""
    fmt = get_format(format)
    if fmt.tensor_block is None:
        raise ValueError(f"nvfp4_quantize: a two-level format is required, got {fmt}")
    values = rotate(x) if fmt.hadamard else x
    amax = block_amax(values, fmt.tensor_block)  # [T, 1]
    tensor_scale = torch.where((amax == 0) | amax.isinf(), fmt.tensor_scale_max, amax)  # encodes with factor 1
    encode = (torch.full_like(amax, fmt.tensor_scale_max) / tensor_scale).clamp(max=FP32_MAX)
    sixth = (1.0 / torch.tensor(fmt.max)).item()
    scale = (block_amax(values, fmt.block) * (encode * sixth)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)  # [A, B]
    factor = (scale.float() * encode.reciprocal()).reciprocal().clamp(max=FP32_MAX)
    scaled = values.float().nan_to_num(nan=0.0, posinf=float("inf"), neginf=float("-inf"))
    scaled = scaled * spread(factor, fmt.block, x.shape)
    codes = e2m1_encode(scaled, _uniform(x, rounding, stream, first_row, transposed))
    scale = torch.where(block_has_nan(values, fmt.block), float("nan"), scale.float()).to(torch.float8_e4m3fn)
    return pack(codes), scale, tensor_scale


def _uniform(x: Tensor, rounding: Tensor | None, stream: int, first_row: int, transposed: bool) -> Tensor | None:
    """Return the draws for ``x``, indexed by the tensor's own rows whichever way round it comes."""
    if rounding is None:
        return None
    rows, columns = reversed(x.shape) if transposed else x.shape
    drawn = uniform16(rows, columns, rounding=rounding, stream=stream, first_row=first_row)
    return drawn.t() if transposed else drawn


def _fake(
    x: Tensor, format: str, rounding: Tensor | None, stream: int, first_row: int, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    fmt, (rows, columns) = get_format(format), x.shape
    qdata = x.new_empty((rows, columns // fmt.elements_per_byte), dtype=torch.uint8)
    scale = x.new_empty(fmt.scale_shape(rows, columns), dtype=fmt.scale_dtype)
    return qdata, scale, x.new_empty(fmt.tensor_scale_shape(rows, columns) or (), dtype=torch.float32)


_OP = define(
    "nvfp4_quantize(Tensor x, str format, Tensor? rounding, int stream, SymInt first_row, bool transposed) "
    "-> (Tensor, Tensor, Tensor)",
    reference=nvfp4_quantize_reference,
    fake=_fake,
)


def nvfp4_quantize(
    x: Tensor,
    format: Format,
    *,
    rounding: Tensor | None = None,
    stream: int = 0,
    first_row: int = 0,
    transposed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize ``x`` to NVFP4 along its last dimension, as ``format`` says. Quantize ``x.t()`` for the columnwise face.

    With ``s = 2688 / tensor amax`` the block scale is ``E4M3(block amax * s / 6)``, and the element
    ``E2M1(x * s / block scale)``, each step rounded to fp32, elements and scales to nearest even, saturating.

    Args:
        x: ``[M, K]``, bf16, fp16 or fp32; any strides; may be empty; ``K % 16 == 0`` (and ``M`` for 16x16 blocks).
        format: One of the ``NVFP4*`` records.
        rounding: ``None`` rounds elements to nearest; int64 ``[2]``, a key and a step, rounds them stochastically.
        stream: Tensors with one key and step draw different numbers in different streams.
        first_row: Index of the first row of this shard in the whole tensor, for the draws.
        transposed: ``x`` is the transpose of the tensor whose rows ``first_row`` counts.

    Returns:
        Bytes ``[M, K/2]`` with two codes each, the first in the low half; block scales ``float8_e4m3fn``,
        ``format.scale_shape(M, K)``;
        and the tensor scale fp32 ``[T, 1]``, the amax (2688 where it is 0 or Inf). The value is ``element * block
        scale * tensor scale / 2688``; an amax below 8e-36, whose factor would be beyond fp32, gives smaller values, as
        NVIDIA's kernels do. A zero keeps its sign. An Inf saturates. E2M1 has no NaN: a NaN makes the scale of its
        block NaN, and so every value of the block.

    Raises:
        TypeError: If ``x`` is not a floating-point tensor of the dtypes above.
        ValueError: If ``x`` is not a matrix of whole blocks, ``rounding`` is on another device, or ``format`` is not an
            NVFP4 format.

    Source: TransformerEngine, common/cast/nvfp4/core_nvfp4.cuh and custom_recipes/reference_nvfp4.py; NVIDIA,
    "Pretraining Large Language Models with NVFP4", arXiv 2509.25149.
    """
    require_float("nvfp4_quantize", x, rank=2)
    require_device("nvfp4_quantize", x, rounding=rounding)
    if format.element != torch.float4_e2m1fn_x2:
        raise ValueError(f"nvfp4_quantize: an NVFP4 format is required, got {format}")
    format.check_shape(x.shape[0], x.shape[1])
    qdata, scale, tensor_scale = _OP(x, format.name, rounding, stream, first_row, transposed)
    return qdata, scale, tensor_scale
