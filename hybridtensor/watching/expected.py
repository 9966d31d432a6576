"""Signal to quantization noise that a format is expected to have, and what counts as standing out."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from hybridtensor import ops
from hybridtensor.formats import REGISTRY
from hybridtensor.ops import Cast, CastInputs, CastRequest
from hybridtensor.quantizers import Quantizer
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.recipes.spec import GEMMS, Faces
from hybridtensor.watching.statistics import face_sizes, face_statistics, measure_face, part_of

ONE_BIT = 20 * math.log10(2)
"""dB that a mantissa bit is worth: without it the distance of elements, and so the noise, is twice as large."""
TWICE = 10 * math.log10(2)
"""dB between noise and noise of twice its power: half a mantissa bit."""

_DEQUANTIZED = ", dequantized"
_ROWS, _LENGTH = 1024, 64  # short rows, which scatter more than those of most layers


class Expected(NamedTuple):
    """SQNR of a tensor without outliers, and of the noisiest of 1,024 rows of 64 values, dB."""

    sqnr: float
    row_sqnr: float


@functools.cache
def expected(format_name: str, stochastic: bool = False, rule: str = "") -> Expected | None:
    """Measure the SQNR of a format on normal values on the host, or return None for an unknown format."""
    fmt = REGISTRY.get(format_name.removesuffix(_DEQUANTIZED))
    if fmt is None:
        return None
    if fmt.is_identity:
        return Expected(math.inf, math.inf)
    stochastic = stochastic or fmt.drawn_signs  # also where the recipe is not known here
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad():
        values = torch.randn(
            _ROWS, max(_LENGTH, fmt.step), generator=generator, dtype=torch.float32, device="cpu"
        ).bfloat16()
        rounding = torch.zeros(2, dtype=torch.int64, device="cpu") if stochastic else None
        request = CastRequest(Cast(fmt, stream=0 if stochastic else -1, rule=rule))
        face, _ = ops.quantize(values, request, CastInputs(rounding=rounding))
        if face is None:
            return None
        part = part_of(face, values, 0, len(values))
        numbers = measure_face(part, values.abs().amax())
    sums = numbers.norms.square()  # of squares, of which a part has roots
    found = face_statistics(
        numbers.counts.tolist(), sums.tolist(), numbers.maxima.tolist(), face_sizes(part)
    )
    return Expected(found["sqnr"], found["row_sqnr"])


def expected_of_face(recipe: str, operand: str, format_name: str) -> Expected | None:
    """Return the expected SQNR of a face, such as ``input.rowwise``, by the layer's recipe."""
    quantizer = _quantizers(recipe).get(operand)
    return expected(format_name, _is_stochastic(quantizer), _rule(quantizer))


def expected_of_product(recipe: str, product: str, formats: tuple[str, str]) -> float | None:
    """Return the expected SQNR of a product: independent relative errors of both operands add up."""
    gemm = next((one for one in GEMMS if one.name == product), None)
    if gemm is None:
        return None
    noise = 0.0
    for operand, fmt in zip((gemm.left, gemm.right), formats, strict=True):
        known = expected_of_face(recipe, ".".join(operand), fmt)
        if known is None:
            return None
        noise += 10 ** (-known.sqnr / 10)
    return -10 * math.log10(noise) if noise else math.inf


def _is_stochastic(quantizer: object) -> bool:
    """Return whether a face is rounded stochastically; False if its recipe is unknown."""
    return getattr(quantizer, "stochastic", False)


def _rule(quantizer: object) -> str:
    """Return the rule of a quantizer's block scales."""
    return quantizer.rule if isinstance(quantizer, Quantizer) else ""


@functools.lru_cache(maxsize=256)
def _quantizers(recipe: str) -> dict[str, object]:
    """Parse a recipe into the quantizer of each face; empty if it is no spec."""
    try:
        config = HybridConfig.parse(recipe)
    except ValueError:
        return {}
    faces = Faces.of_config(config).quantizers
    return {".".join(face): quantizer for face, quantizer in faces.items()}
