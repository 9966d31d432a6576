"""What a format did to one face, and to one product, as sums and maxima that add up over calls and ranks.

Names are those of TransformerEngine's debug statistics and of torchao where they have one; ``NAMES``
says which. Shape letters: ``M, K`` a face, ``other`` and ``contraction``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtensor import ops
from hybridtensor.formats import Format, get_format
from hybridtensor.ops import Face
from hybridtensor.ops.dequantize import element_values, without_signs
from hybridtensor.ops.references import eden
from hybridtensor.ops.references.blocks import spread
from hybridtensor.ops.references.hadamard import rotate

NAMES = {
    "sqnr": "signal to quantization noise, dB (torchao: compute_error)",
    "row_sqnr": "signal to quantization noise of the noisiest row that was measured (columnwise: column), dB",
    "underflows%": "values that became zero, percent (TransformerEngine)",
    "overflows%": "values beyond the largest element by more than half its step, percent (TransformerEngine)",
    "mse": "mean squared error (TransformerEngine)",
    "cur_amax": "largest magnitude of all values (TransformerEngine)",
    "dynamic_range": "log2 of the largest over the smallest magnitude that is not zero (TransformerEngine)",
    "scale_inv_min": "smallest scale: element times scale is the value (TransformerEngine)",
    "scale_inv_max": "largest scale (TransformerEngine)",
    "wasted_blocks%": "blocks of which a scale half as large would hold all values, but for those of zeros",
    "nonfinite": "1 if a value or a scale is NaN or Inf",
}
OPTIONAL = ("row_sqnr",)
"""Names that recordings made by earlier versions do not have."""
PRODUCT_NAMES = {
    "cosine": "of the product of quantized operands with that of the values",
    "sqnr": "signal to quantization noise of the product, dB",
}

FACE_COUNTS = ("values", "quantized", "beyond", "wasted")
"""Integers: values and elements that are not zero, values beyond the largest element, wasted blocks."""
FACE_NORMS = ("signal", "noise")
"""Sums of squares."""
FACE_MAXIMA = (
    "cur_amax",
    "scale_inv_max",
    "negated scale_inv_min",
    "negated smallest",
    "noise of a row over its signal",
)
PRODUCT_NORMS = ("signal", "quantized", "noise")
"""Sums of squares of the product of values, of that of what the operands hold, and of their difference."""

_MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}  # bits; others, E2M1, have one


class Part(NamedTuple):
    """A part of a face: whole blocks, the fp32 values ``[M, K]`` it was made from, and its dequantized values."""

    face: Face
    values: Tensor
    quantized: Tensor
    turned: bool


def part_of(face: Face, values: Tensor, first: int, count: int) -> Part:
    """Return ``count`` entries of a face along ``other`` from ``first``, a multiple of its blocks, with their values
    ``[count, K]``."""
    turned = face.dequantized_rowwise is not None
    cut = face.cut(0, first, count)
    values = values.float()
    if cut.scale is None:
        quantized = cut.qdata.float()
    else:
        quantized = _unrotated_values(cut)
        if cut.format.drawn_signs and cut.tensor_scale is not None:
            padded = F.pad(values, (0, -values.shape[1] % cut.format.step))
            values = eden.rotate(padded, cut.tensor_scale[1:, 0])
        elif cut.format.hadamard:
            # whole groups of 16, filled up with zeros as casts do
            padded = F.pad(values, (0, -values.shape[1] % 16))
            values = rotate(padded.to(torch.bfloat16)).float()
    quantized = quantized.t() if turned else quantized
    return Part(cut, values, quantized[:, : values.shape[1]], turned)


def _unrotated_values(face: Face) -> Tensor:
    """Dequantize a face to fp32 without rotating back."""
    fmt = face.format
    if fmt.drawn_signs:
        elements = element_values(face.qdata, fmt)
        return elements * spread(_scales(face), fmt.block, elements.shape)
    scale: Any = face.scale
    return ops.dequantize(
        face.qdata.contiguous(),
        scale,
        face.tensor_scale,
        format=_unrotated(fmt),
        dtype=torch.float32,
    )


def _unrotated(fmt: Format) -> Format:
    return get_format(fmt.name.replace("_hadamard", "")) if fmt.hadamard else fmt


class FaceNumbers(NamedTuple):
    """Measurements of a part of a face, or their sums: int64 counts, float64 norms and fp32 maxima."""

    counts: Tensor
    norms: Tensor
    maxima: Tensor


def measure_face(part: Part, amax: Tensor) -> FaceNumbers:
    """Measure a part of a face on its device; ``amax`` is that of the whole matrix, NaN if it has one."""
    x, quantized, fmt = part.values, part.quantized, part.face.format
    magnitudes = x.abs()
    scales = _scales(part.face)
    blocks = _blocked(magnitudes.t() if part.turned else magnitudes, fmt.block)
    limit = (scales[:, : blocks.shape[2]] * fmt.max)[:, None, :, None]
    largest = blocks.amax(dim=(1, 3), keepdim=True)
    counts = [
        x.count_nonzero(),
        quantized.count_nonzero(),
        (blocks > limit * (1 + _half_step(fmt) / fmt.max)).count_nonzero(),
        ((largest > 0) & (largest <= limit / 2)).count_nonzero(),
    ]
    signals, noises = (
        torch.linalg.vector_norm(m, dim=1, dtype=torch.float64) for m in (x, x - quantized)
    )
    norms = [_norm(signals), _norm(noises)]
    # a row of zeros is stored as zeros, without noise; NaN stays
    noisiest = torch.where(signals == 0, 0, noises / signals).amax().float()
    low, high = scales.aminmax()
    smallest = torch.where(magnitudes > 0, magnitudes, math.inf).amin()
    return FaceNumbers(
        torch.stack(counts),
        torch.stack(norms),
        torch.stack([amax.float(), high, -low, -smallest, noisiest]),
    )


def face_sizes(part: Part) -> tuple[int, int]:
    """Return the numbers of values and blocks in a part."""
    other, contraction = part.values.shape[::-1] if part.turned else part.values.shape
    across, along = part.face.format.scale_shape(other, contraction)
    return part.values.numel(), across * along


def measure_product(left: Part, right: Part) -> Tensor:
    """Measure ``left @ right.T`` with dequantized and original operands, float64."""
    exact = left.values.double() @ right.values.double().t()
    quantized = left.quantized.double() @ right.quantized.double().t()
    return torch.stack([_norm(exact), _norm(quantized), _norm(exact - quantized)])


def _blocked(matrix: Tensor, block: tuple[int | None, int | None]) -> Tensor:
    """View a matrix as ``[blocks, rows, blocks, columns]``, zero-padded."""
    rows, columns = (
        extent if b is None else b for extent, b in zip(matrix.shape, block, strict=True)
    )
    pad = -matrix.shape[1] % columns, -matrix.shape[0] % rows
    if any(pad):
        matrix = F.pad(matrix, (0, pad[0], 0, pad[1]))
    return matrix.reshape(-1, rows, matrix.shape[1] // columns, columns)


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm


def _scales(face: Face) -> Tensor:
    scale = face.scale
    if scale is None:
        return torch.ones(1, 1, device=face.qdata.device)
    if face.tensor_scale is None:
        return scale.float()
    tensor_scale = without_signs(face.tensor_scale, face.format)
    return scale.float() * (tensor_scale / face.format.tensor_scale_max)


def _half_step(fmt: Format) -> float:
    """Return half the distance of the largest element from the next smaller one."""
    # E4M3: 448 lies between 2^8 and 2^9, where elements are 2^(8 - 3) apart; half of that is 16.
    bits = _MANTISSA.get(fmt.element, 1) if fmt.element is not None else 23
    return float(2.0 ** (math.floor(math.log2(fmt.max)) - bits - 1))


def face_statistics(
    counts: list[int], norms: list[float], maxima: list[float], sizes: tuple[int, int]
) -> dict[str, float]:
    """Return a face's statistics, by ``NAMES``, from summed counts, norms, maxima and sizes."""
    known = dict(zip(FACE_COUNTS, counts, strict=True))
    signal, noise = norms
    amax, high, low, smallest = maxima[0], maxima[1], -maxima[2], -maxima[3]
    # ``added_up`` makes an infinite maximum of NaN, which a maximum over ranks would lose.
    row_noise = math.nan if math.isinf(maxima[4]) else maxima[4]
    values, blocks = (max(size, 1) for size in sizes)
    return {
        "sqnr": _decibel(signal, noise),
        "row_sqnr": _decibel(1.0, row_noise**2),
        "underflows%": 100 * (known["values"] - known["quantized"]) / values,
        "overflows%": 100 * known["beyond"] / values,
        "mse": noise / values,
        "cur_amax": amax,
        "dynamic_range": math.log2(amax / smallest)
        if 0 < smallest <= amax < math.inf
        else math.nan,
        "scale_inv_min": low,
        "scale_inv_max": high,
        "wasted_blocks%": 100 * known["wasted"] / blocks,
        "nonfinite": float(any(math.isinf(number) for number in (amax, high, low))),
    }


def product_statistics(norms: list[float]) -> dict[str, float]:
    """Return a product's statistics, by ``PRODUCT_NAMES``."""
    signal, quantized, noise = norms
    # From |a - b|^2 = |a|^2 + |b|^2 - 2 ab: sums of squares add up over calls and ranks.
    lengths = math.sqrt(signal) * math.sqrt(quantized)
    cosine = (signal + quantized - noise) / 2 / lengths if lengths else math.nan
    return {"cosine": cosine, "sqnr": _decibel(signal, noise)}


def _decibel(signal: float, noise: float) -> float:
    if math.isnan(signal) or math.isnan(noise):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf
