"""What a sampled step comes to: numbers by layer, operand and product."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from hybridtensor.quantizers import HybridQuantizer
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.recipes.spec import GEMMS as PRODUCTS
from hybridtensor.watching.statistics import face_statistics, product_statistics
from hybridtensor.watching.sums import GEMMS, OPERANDS, Numbers, Watched

Experts = tuple[tuple[int, float], ...]
"""Experts that were measured, by number, and one number of each."""


class _Row:
    """What the rows of faces and of products have in common."""

    layer: str
    experts: Experts

    @property
    def worst(self) -> int | None:
        """The expert that came out worst, or None for a layer without experts."""
        found = min(self.experts, key=lambda one: badness(one[1]), default=None)
        return None if found is None else found[0]

    @property
    def where(self) -> str:
        """The layer, of experts with the worst one: ``blocks.0.experts.w1[3]``."""
        return self.layer if self.worst is None else f"{self.layer}[{self.worst}]"


@dataclass(frozen=True)
class FaceRow(_Row):
    """What a format did to one face in one sampled step.

    Attributes:
        step: How many steps the optimizer had taken.
        layer: Fully qualified name; of experts, that of their stack.
        operand: ``input.rowwise``, ``weight.columnwise``, ...
        format: Its format.
        statistics: By the names of ``hybridtensor.watching.NAMES``; of all experts that were measured.
        experts: Which these were, and the ``sqnr`` of each; NaN of each that is not finite, measured or not.
    """

    step: int
    layer: str
    operand: str
    format: str
    statistics: dict[str, float]
    experts: Experts = ()


@dataclass(frozen=True)
class ProductRow(_Row):
    """What the formats of both operands did to one product in one sampled step.

    Attributes:
        step: How many steps the optimizer had taken.
        layer: Fully qualified name; of experts, that of their stack.
        product: ``output``, ``grad_input`` or ``grad_weight``.
        formats: Those of the left and of the right operand.
        statistics: By the names of ``hybridtensor.watching.PRODUCT_NAMES``; of all experts that were measured.
        experts: Which these were, and the ``cosine`` of each.
    """

    step: int
    layer: str
    product: str
    formats: tuple[str, str]
    statistics: dict[str, float]
    experts: Experts = ()


class Sample(NamedTuple):
    """One sampled step.

    Attributes:
        step: How many steps the optimizer had taken.
        faces: Its faces, by layer in the model's order.
        products: Its products, in the same order.
        order: Faces, by layer and operand, in the order in which they were first used on this rank.
        unseen: Layers of which a product ran on this rank and was measured on none, and why.
    """

    step: int
    faces: tuple[FaceRow, ...]
    products: tuple[ProductRow, ...]
    order: tuple[tuple[str, str], ...]
    unseen: tuple[tuple[str, str], ...]

    def scalars(self) -> dict[str, float]:
        """Return all numbers by one name each, ``layer/input.rowwise/sqnr``, as loggers take them."""
        of_faces = {
            f"{row.layer}/{row.operand}/{k}": v
            for row in self.faces
            for k, v in row.statistics.items()
        }
        of_products = {
            f"{row.layer}/{row.product}/{k}": v
            for row in self.products
            for k, v in row.statistics.items()
        }
        return of_faces | of_products


class Measured(NamedTuple):
    """What was measured in one step, on the host.

    Attributes:
        layers: Those that are watched, with the recipes of the step.
        order: Of the faces, as the sampler has them.
        unseen: Products that are not measured, and why, as the sampler has them.
        numbers: Of all places.
        sizes: Values and blocks, int64 ``[places, faces, 2]``.
    """

    layers: Sequence[Watched]
    order: Sequence[tuple[int, int]]
    unseen: Mapping[tuple[int, str], str]
    numbers: Numbers
    sizes: Tensor


def sample_of(step: int, measured: Measured) -> Sample:
    """Return what was measured in a step."""
    faces: list[FaceRow] = []
    products: list[ProductRow] = []
    for watched in measured.layers:
        faces += _face_rows(step, watched, measured)
        products += _product_rows(step, watched, measured.numbers.products[watched.places])
    names = [layer.name for layer in measured.layers]
    order = tuple((names[layer], ".".join(OPERANDS[place])) for layer, place in measured.order)
    seen = {(row.layer, row.product) for row in products}
    unseen: dict[str, str] = {}
    for (layer, gemm), why in measured.unseen.items():
        if (names[layer], gemm) not in seen:
            unseen.setdefault(names[layer], f"{gemm}: {why}")
    return Sample(step, tuple(faces), tuple(products), order, tuple(unseen.items()))


def _face_rows(step: int, layer: Watched, measured: Measured) -> list[FaceRow]:
    """Return the rows of a layer's faces that were measured."""
    own = [tensor[layer.places] for tensor in (*measured.numbers[:3], measured.sizes)]
    counts, norms, maxima, sizes = own
    of_all = [counts.sum(0), norms.sum(0), maxima.amax(0), sizes.sum(0)]
    rows = []
    for face, (role, direction) in enumerate(OPERANDS):
        if not int(of_all[3][face, 0]):
            continue
        found = (sizes[:, face, 0] > 0) | (maxima[:, face, 0] == math.inf)
        experts = tuple(
            (place - 1, _sqnr([tensor[place, face] for tensor in own]))
            for place in _places_of_experts(layer, found)
        )
        statistics = _statistics([tensor[face] for tensor in of_all])
        name, fmt = f"{role}.{direction}", _format(layer.config, role, direction)
        rows.append(FaceRow(step, layer.name, name, fmt, statistics, experts))
    return rows


def _statistics(numbers: Sequence[Tensor]) -> dict[str, float]:
    """Return what counts, norms, maxima and sizes of a face come to."""
    counts, norms, maxima, (values, blocks) = (tensor.tolist() for tensor in numbers)
    return face_statistics(counts, norms, maxima, (values, blocks))


def _sqnr(numbers: Sequence[Tensor]) -> float:
    found = _statistics(numbers)
    return math.nan if found["nonfinite"] else found["sqnr"]


def _product_rows(step: int, layer: Watched, norms: Tensor) -> list[ProductRow]:
    """Return the rows of a layer's products that were measured."""
    rows = []
    for number, gemm in enumerate(GEMMS):
        own = norms[:, number]
        if not own.count_nonzero():
            continue
        experts = tuple(
            (place - 1, product_statistics(own[place].tolist())["cosine"])
            for place in _places_of_experts(layer, own.count_nonzero(1) > 0)
        )
        statistics = product_statistics(own.sum(0).tolist())
        rows.append(ProductRow(step, layer.name, gemm, _formats(layer, gemm), statistics, experts))
    return rows


def _places_of_experts(layer: Watched, found: Tensor) -> list[int]:
    """Return those of a layer's places that experts have and something was found out of."""
    places: list[int] = found.nonzero().flatten().tolist() if layer.experts else []
    return [place for place in places if place]


def badness(number: float) -> float:
    """Return what sorts signal to noise, or cosines, the worst first: what is not a number is worst."""
    return -math.inf if math.isnan(number) else number


def _formats(layer: Watched, gemm: str) -> tuple[str, str]:
    """Return what stands for both operands of a product."""
    product = next(one for one in PRODUCTS if one.name == gemm)
    left, right = (_format(layer.config, *operand) for operand in (product.left, product.right))
    return left, right


def _format(config: HybridConfig, role: str, direction: str) -> str:
    """Return the format of a face, in words where it is what the rowwise one holds."""
    quantizer = getattr(config, role)
    fmt = getattr(quantizer, f"{direction}_format")
    of_rowwise = (
        isinstance(quantizer, HybridQuantizer)
        and quantizer.columnwise_source == "rowwise_dequantized"
    )
    if direction == "columnwise" and of_rowwise and fmt.is_identity:
        return f"{quantizer.rowwise_format}, dequantized"
    return str(fmt)
