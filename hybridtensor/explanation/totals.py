"""Sums over the layers of a model: formats, time, and bytes until backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from hybridtensor.costs import CostTable, word_of
from hybridtensor.explanation.rows import LayerRow, Rows
from hybridtensor.formats import Format
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.selection import is_quantized, products_of

_PLAIN = "bf16"


class Share(NamedTuple):
    """The share of one format in all parameters, and in the matrix products of a training step."""

    parameters: float
    products: float


def shares(found: Rows) -> dict[str, Share]:
    """Return the share of each format, by the words of ``costs``; plain layers count as ``bf16``."""
    parameters: dict[str, float] = {}
    products: dict[str, float] = {}
    for layer in found.layers:
        if not layer.parameters:
            continue
        words = [word_of(formats) for formats in _products(layer)]
        parameters[words[0]] = parameters.get(words[0], 0.0) + layer.parameters
        for word in words:
            products[word] = products.get(word, 0.0) + layer.parameters
    _scale(parameters, found.coverage.parameters)
    _scale(products, found.coverage.products)
    words = sorted(
        dict.fromkeys([*products, *parameters]), key=lambda w: -round(products.get(w, 0.0), 6)
    )
    return {word: Share(parameters.get(word, 0.0), products.get(word, 0.0)) for word in words}


def _scale(sizes: dict[str, float], quantized: float) -> None:
    """Scale sizes to shares in place: low-precision formats add up to ``quantized``."""
    low = sum(size for word, size in sizes.items() if word != _PLAIN)
    for word in sizes:
        sizes[word] *= quantized / low if low else 0.0
    sizes[_PLAIN] = 1.0 - quantized


class Prediction(NamedTuple):
    """Predicted speed of a step's products over BF16, and the share left out (layers smaller than the table's)."""

    speed: float
    unknown: float


def predicted(found: Rows, table: CostTable) -> Prediction | None:
    """Return the predicted speed by a table; None if it covers no quantized product."""
    every, costs = 0, list[tuple[int, float]]()
    for layer in found.layers:
        low = [formats for formats in _products(layer) if is_quantized(formats)]
        every += layer.parameters * len(low)
        if min(layer.shape[-2:]) >= table.least_features:
            costs += [(layer.parameters, table.cost(formats)) for formats in low]
    known = sum(size for size, _ in costs)
    if not every:
        return Prediction(1.0, 0.0)
    if not known:
        return None
    quantized = found.coverage.products * (known / every)  # all of it, exactly, if all is known
    unknown = found.coverage.products - quantized
    plain = 1.0 - found.coverage.products
    time = plain + quantized * sum(size * cost for size, cost in costs) / known
    return Prediction((1.0 - unknown) / time, unknown)


def saved_bytes(layers: Iterable[LayerRow]) -> tuple[float, float]:
    """Return bytes of saved inputs per token, of converted and of plain layers; shared inputs count for each layer."""
    kept = plain = 0.0
    for layer in layers:
        kept += saved_by(layer)
        plain += 0 if layer.is_frozen else layer.in_features * layer.dtype.itemsize
    return kept, plain


def _products(layer: LayerRow) -> list[tuple[Format, Format]]:
    return [layer.config.formats(gemm) for gemm in products_of(is_frozen=layer.is_frozen)]


def saved_by(layer: LayerRow) -> float:
    """Return the bytes per token that a layer saves of its input for backward; a frozen one saves none."""
    if layer.is_frozen:
        return 0.0
    return saved_bytes_per_token(layer.config, layer.in_features, layer.dtype)


def saved_bytes_per_token(config: HybridConfig, in_features: int, dtype: torch.dtype) -> float:
    """Return the bytes per token that a layer saves of its input for backward, without sharing.

    Scales shared by all tokens (one per tensor, one per column) are left out: they do not grow with
    the tokens. So are the zeros that fill the last block of tokens.

    Args:
        config: The layer's recipe.
        in_features: Features of the input.
        dtype: High-precision dtype of the input.
    """
    quantizer = config.input
    if config.save_original_input:
        return in_features * dtype.itemsize
    if quantizer.derives_columnwise and quantizer.columnwise_format.is_identity:
        return quantizer.rowwise_format.bytes_per_row(in_features, dtype)
    column = quantizer.columnwise_format
    if column.element is None:
        return in_features * dtype.itemsize
    along = column.block[1]
    blocks = 0.0 if along is None else column.scale_shape(in_features, along)[0] / along
    scales = 0.0 if column.scale_dtype is None else blocks * column.scale_dtype.itemsize
    return in_features / column.elements_per_byte + scales
