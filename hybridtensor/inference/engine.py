"""The products of an inference engine, from exported tensors alone: what they hold is decoded by torch and
compressed-tensors, inputs are quantized by the engine's rule, sums are in fp32 and rounded once.

Scales of a tensor or row multiply the sum; powers of two, and E4M3 over E2M1, go into the elements, which stay exact;
other scales of blocks multiply the sums of their blocks.

Shape letters: ``T`` tokens, ``N, K`` a weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtensor.inference.layouts import Packed
from hybridtensor.quantizers import (
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    OneFormatQuantizer,
)
from hybridtensor.quantizers.base import one_face

_SIDE = 128
_FP32_MAX = torch.finfo(torch.float32).max


class Decoded(NamedTuple):
    """An operand: its value is element times scales.

    Attributes:
        elements: fp32 ``[rows, K]``, with all scales that leave them exact.
        of_rows: fp32 ``[rows or 1, 1]``, what multiplies whole sums, or None.
        of_blocks: fp32 ``[rows, blocks]``, what multiplies the sums of blocks of 128, or None.
    """

    elements: Tensor
    of_rows: Tensor | None = None
    of_blocks: Tensor | None = None

    def rows(self, first: int, count: int) -> Decoded:
        """Slice ``count`` rows."""
        part = slice(first, first + count)
        of_rows, of_blocks = (
            one if one is None or len(one) == 1 else one[part]
            for one in (self.of_rows, self.of_blocks)
        )
        return Decoded(self.elements[part], of_rows, of_blocks)


def rule(name: str, pow2: bool) -> OneFormatQuantizer:
    """Return how an engine quantizes inputs.

    Args:
        name: ``"tensor"``, ``"token"``, ``"1x128"``, ``"1x32"`` or ``"1x16"``.
        pow2: Whether scales of 1x128 are powers of two.
    """
    made: dict[str, OneFormatQuantizer] = {
        "tensor": Float8Quantizer(),
        "token": Float8Quantizer("row"),
        "1x128": Float8Quantizer("block", pow2_scale=pow2),
        "1x32": MXFP8Quantizer(),
        "1x16": NVFP4Quantizer(),
    }
    return made[name]


def decoded_weight(packed: Packed) -> Decoded:
    """Return a matrix as an engine reads it.

    Args:
        packed: Its tensors, by what their names end in.
    """
    if "weight_packed" in packed and "weight_global_scale" not in packed:
        exponents = _exponents(packed["weight_scale"].view(torch.uint8))
        return Decoded(_e2m1(packed["weight_packed"]) * _spread(exponents, 32))
    if "weight_packed" in packed:
        values = _e2m1(packed["weight_packed"]) * _spread(packed["weight_scale"].float(), 16)
        return Decoded(values, packed["weight_global_scale"].reciprocal().view(1, 1))
    elements = packed["weight"].float()
    scale = packed.get("weight_scale_inv")
    if scale is None:
        scale = packed["weight_scale"]
        if scale.dtype == torch.uint8:
            return Decoded(elements * _spread(_exponents(scale), 32))
        if scale.numel() == 1 or tuple(scale.shape) == (elements.shape[0], 1):
            return Decoded(elements, scale.view(-1, 1))
    rows = scale.float().repeat_interleave(_SIDE, 0)[: elements.shape[0]]
    return _of_blocks(elements, rows)


def decoded_input(x: Tensor, quantizer: OneFormatQuantizer) -> Decoded:
    """Return tokens ``[T, K]`` as an engine quantizes them."""
    row = one_face(quantizer, x, "rowwise", x.dtype)
    if row.scale is None:
        raise ValueError(f"mismatch: a rule that quantizes inputs is required, got {quantizer}")
    if row.tensor_scale is not None:
        values = _e2m1(row.qdata) * _spread(row.scale.float(), 16)
        return Decoded(values, row.tensor_scale * (1.0 / row.format.tensor_scale_max))
    elements = row.qdata.float()
    if row.scale.dtype != torch.float32:
        return Decoded(elements * _spread(_exponents(row.scale.view(torch.uint8)), 32))
    if row.format.block[1] is None:
        return Decoded(elements, row.scale)
    return _of_blocks(elements, row.scale)


def static_input(x: Tensor, scale: Tensor) -> Decoded:
    """Return tokens ``[T, K]`` as an engine quantizes them with a scale that is stored: times its reciprocal."""
    most = torch.finfo(torch.float8_e4m3fn).max
    elements = (x.float() * scale.reciprocal()).clamp(-most, most).to(torch.float8_e4m3fn)
    return Decoded(elements.float(), scale.view(1, 1))


def _of_blocks(elements: Tensor, scale: Tensor) -> Decoded:
    """Return elements with scales ``[rows, blocks]`` of 128 each."""
    # frexp gives powers of two the mantissa 0.5. They stay exact in the elements.
    if bool((torch.frexp(scale)[0] == 0.5).all()):
        return Decoded(elements * _spread(scale, _SIDE)[:, : elements.shape[1]])
    return Decoded(elements, None, scale)


def _spread(scale: Tensor, extent: int) -> Tensor:
    return scale.repeat_interleave(extent, 1)


def _exponents(bits: Tensor) -> Tensor:
    """Return the powers of two that exponents stand for."""
    return bits.view(torch.float8_e8m0fnu).float()


def _e2m1(packed: Tensor) -> Tensor:
    """Return the elements of bytes that hold two each, ``[rows, K]``."""
    try:
        from compressed_tensors.compressors.nvfp4.helpers import (  # type: ignore[import-untyped]
            unpack_fp4_from_uint8,
        )
    except ImportError as error:
        raise ImportError(
            "mismatch: the package compressed-tensors is required for FP4; pip install hybridtensor[inference]"
        ) from error
    rows, width = packed.shape
    values: Tensor = unpack_fp4_from_uint8(packed, rows, 2 * width, torch.float32)
    return values


def product(x: Decoded, weight: Decoded, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``x @ weight.T + bias``, ``[T, N]`` in ``dtype``."""
    if x.of_blocks is None and weight.of_blocks is None:
        total = torch.mm(x.elements, weight.elements.t())
    else:
        total = _sum_of_blocks(x, weight)
    total = _scaled(total, x.of_rows, weight.of_rows)
    return (total if bias is None else total + bias.to(dtype)).to(dtype)


def _sum_of_blocks(x: Decoded, weight: Decoded) -> Tensor:
    """Return the sum of the products of blocks of 128, each times its scales."""
    total = torch.zeros(
        x.elements.shape[0], weight.elements.shape[0], dtype=torch.float32, device=x.elements.device
    )
    for i, begin in enumerate(range(0, x.elements.shape[1], _SIDE)):
        part = slice(begin, begin + _SIDE)
        of_block = torch.mm(x.elements[:, part], weight.elements[:, part].t())
        left, right = (
            None if one is None else one[:, i : i + 1] for one in (x.of_blocks, weight.of_blocks)
        )
        total += _scaled(of_block, left, right)
    return total


def _scaled(sums: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """Return sums ``[T, N]`` times scales ``[T or 1, 1]`` of rows and ``[N or 1, 1]`` of columns."""
    if left is None:
        return sums if right is None else sums * right.t()
    if right is None:
        return sums * left
    # Saturated, as the emulated product: Inf times a sum of zero would be NaN.
    return sums * (left * right.t()).clamp(max=_FP32_MAX)
