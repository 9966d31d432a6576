"""What a format did to one face, and to one product, as sums and maxima that add up over calls and ranks.

Names are those of TransformerEngine's debug statistics and of torchao where they have one; ``NAMES``
says which. Shape letters: ``M, K`` a face, ``other`` and ``contraction``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtensor import ops
from hybridtensor.formats import Format, get_format
from hybridtensor.ops import Face
from hybridtensor.ops.references.blocks import block_amax, spread
from hybridtensor.ops.references.hadamard import rotate

NAMES = {
    "sqnr": "signal to quantization noise, dB (torchao: compute_error)",
    "underflows%": "values that became zero, percent (TransformerEngine)",
    "overflows%": "values beyond the largest element by more than half its step, percent (TransformerEngine)",
    "mse": "mean squared error (TransformerEngine)",
    "cur_amax": "largest magnitude of all values (TransformerEngine)",
    "dynamic_range": "log2 of the largest over the smallest magnitude that is not zero (TransformerEngine)",
    "scale_inv_min": "smallest scale: element times scale is the value (TransformerEngine)",
    "scale_inv_max": "largest scale (TransformerEngine)",
    "wasted_blocks%": "blocks of which a scale half as large would hold all elements, or whose values all became zero",
    "nonfinite": "1 if a value or a scale is NaN or Inf",
}
PRODUCT_NAMES = {
    "cosine": "of the product of quantized operands with that of the values",
    "sqnr": "signal to quantization noise of the product, dB",
}

FACE_SUMS = ("count", "signal", "noise", "underflows", "overflows", "blocks", "wasted")
FACE_MAXIMA = (
    "cur_amax",
    "scale_inv_max",
    "negated scale_inv_min",
    "negated smallest",
    "nonfinite",
)
PRODUCT_SUMS = ("dot", "signal", "quantized", "noise")

_MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}  # bits; others, E2M1, have one


class Part(NamedTuple):
    """A part of a face, and the values that it stands for.

    Attributes:
        face: Whole blocks of it.
        values: fp32 ``[M, K]``; rotated, if the format does so.
        quantized: What the face gives back, fp32 ``[M, K]``, not rotated back.
        turned: Whether the face is stored ``[K, M]``: the columnwise one of a rowwise face.
    """

    face: Face
    values: Tensor
    quantized: Tensor
    turned: bool


def part_of(face: Face, values: Tensor, first: int, count: int) -> Part:
    """Return ``count`` entries of a face along ``other``, from ``first`` on.

    Args:
        face: Of a matrix, quantized or in high precision.
        values: The matrix as this face sees it, these entries only: ``[count, K]``.
        first: A multiple of the face's blocks.
        count: How many; the last block may be partial.
    """
    turned = face.dequantized_rowwise is not None
    cut = face.cut(1 if turned else 0, first, count)
    values = values.float()
    if cut.scale is None:
        quantized = cut.qdata.float()
    else:
        fmt = _unrotated(cut.format)
        quantized = ops.dequantize(
            cut.qdata.contiguous(), cut.scale, cut.tensor_scale, format=fmt, dtype=torch.float32
        )
        if cut.format.hadamard:
            values = rotate(values.to(torch.bfloat16)).float()
    quantized = quantized.t() if turned else quantized
    return Part(cut, values, quantized[:, : values.shape[1]], turned)


def _unrotated(fmt: Format) -> Format:
    return get_format(fmt.name.replace("_hadamard", "")) if fmt.hadamard else fmt


def measure_face(part: Part, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums and maxima of a part of a face, float64, in the order of ``FACE_SUMS`` and ``FACE_MAXIMA``.

    Args:
        part: What is measured.
        amax: Largest magnitude of the whole matrix, NaN if it has one.
    """
    x, quantized, fmt = part.values, part.quantized, part.face.format
    magnitudes = x.abs()
    scales = _scales(part.face)
    limit = scales * fmt.max
    stored = (magnitudes.t(), quantized.t()) if part.turned else (magnitudes, quantized)
    if stored[0].shape[1] % (fmt.block[1] or 1):  # a last block that is filled up with zeros
        limit = limit[:, : -(-stored[0].shape[1] // (fmt.block[1] or 1))]
    largest = block_amax(stored[1], fmt.block)
    wasted = (largest < limit / 2) & (block_amax(stored[0], fmt.block) > 0)
    beyond = stored[0] > spread(limit, fmt.block, stored[0].shape) * (1 + _half_step(fmt) / fmt.max)
    smallest = (
        torch.where(magnitudes > 0, magnitudes, math.inf).amin()
        if x.numel()
        else x.new_tensor(math.inf)
    )
    sums = [
        x.new_tensor(x.numel(), dtype=torch.float64),
        _square(x),
        _square(x - quantized),
        x.count_nonzero() - quantized.count_nonzero(),
        beyond.count_nonzero(),
        x.new_tensor(largest.numel(), dtype=torch.float64),
        wasted.count_nonzero(),
    ]
    low, high = scales.aminmax()
    nonfinite = ~(amax.isfinite() & low.isfinite() & high.isfinite())
    maxima = [amax, high, -low, -smallest, nonfinite]
    return torch.stack([s.double() for s in sums]), torch.stack([m.double() for m in maxima])


def measure_product(left: Part, right: Part) -> Tensor:
    """Return the sums of a product ``left @ right.T``, float64, in the order of ``PRODUCT_SUMS``: of what the
    operands hold, against what they stand for.
    """
    exact = left.values.double() @ right.values.double().t()
    quantized = left.quantized.double() @ right.quantized.double().t()
    dot = (exact * quantized).sum()
    return torch.stack(
        [dot, exact.square().sum(), quantized.square().sum(), (exact - quantized).square().sum()]
    )


def _square(x: Tensor) -> Tensor:
    """Return the sum of squares, float64."""
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm.square()


def _scales(face: Face) -> Tensor:
    """Return what elements are multiplied with, fp32, a block each."""
    scale = face.scale
    if scale is None:
        return torch.ones(1, 1, device=face.qdata.device)
    if face.tensor_scale is None:
        return scale.float()
    return scale.float() * (face.tensor_scale / face.format.tensor_scale_max)


def _half_step(fmt: Format) -> float:
    """Return half the distance of the largest element from the one below it."""
    bits = _MANTISSA.get(fmt.element, 1) if fmt.element is not None else 23
    return float(2.0 ** (math.floor(math.log2(fmt.max)) - bits - 1))


def face_statistics(sums: list[float], maxima: list[float]) -> dict[str, float]:
    """Return what sums and maxima of a face come to, by ``NAMES``."""
    found, most = (
        dict(zip(FACE_SUMS, sums, strict=True)),
        dict(zip(FACE_MAXIMA, maxima, strict=True)),
    )
    count, blocks = max(found["count"], 1.0), max(found["blocks"], 1.0)
    smallest, amax = -most["negated smallest"], most["cur_amax"]
    bounded = 0 < smallest < math.inf and 0 < amax < math.inf
    return {
        "sqnr": _decibel(found["signal"], found["noise"]),
        "underflows%": 100 * found["underflows"] / count,
        "overflows%": 100 * found["overflows"] / count,
        "mse": found["noise"] / count,
        "cur_amax": amax,
        "dynamic_range": math.log2(amax / smallest) if bounded else math.nan,
        "scale_inv_min": -most["negated scale_inv_min"],
        "scale_inv_max": most["scale_inv_max"],
        "wasted_blocks%": 100 * found["wasted"] / blocks,
        "nonfinite": most["nonfinite"],
    }


def product_statistics(sums: list[float]) -> dict[str, float]:
    """Return what the sums of a product come to, by ``PRODUCT_NAMES``."""
    found = dict(zip(PRODUCT_SUMS, sums, strict=True))
    norms = math.sqrt(found["signal"]) * math.sqrt(found["quantized"])
    cosine = found["dot"] / norms if norms else math.nan
    return {"cosine": cosine, "sqnr": _decibel(found["signal"], found["noise"])}


def _decibel(signal: float, noise: float) -> float:
    if math.isnan(signal) or math.isnan(noise):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf
