"""Quantize a matrix to NVFP4: E2M1 elements, an E4M3 scale per block of 16, and an fp32 scale on top.

Shape letters: ``M`` other axis, ``K`` contraction axis, ``T`` tensor scales (1 or M).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtensor.formats import Format
from hybridtensor.ops.cast import Cast
from hybridtensor.ops.library import require_device, require_float
from hybridtensor.ops.quantize import quantize


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
    cast = Cast(format.name, stream=-1 if rounding is None else stream)
    matrix, row, column = (x.t(), None, cast) if transposed else (x, cast, None)
    qdata, scale, tensor_scale = quantize(matrix, row=row, column=column, rounding=rounding, first_row=first_row)
    return qdata, scale, tensor_scale
