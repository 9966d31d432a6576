"""What a sampled step comes to: numbers by layer, operand and product."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from hybridtensor.recipes.config import HybridConfig
from hybridtensor.recipes.spec import GEMMS as PRODUCTS
from hybridtensor.watching.statistics import face_statistics, product_statistics
from hybridtensor.watching.sums import GEMMS, OPERANDS, Numbers, Watched

Experts = tuple[tuple[int, float], ...]
"""Experts that were measured, by number, and one number of each."""


class _Row(ABC):
    """Common fields of face and product rows."""

    layer: str
    statistics: dict[str, float]
    experts: Experts

    @property
    @abstractmethod
    def name(self) -> str:
        """Its operand or product."""

    @property
    @abstractmethod
    def told_formats(self) -> str:
        """Its formats, for people."""

    @property
    def worst(self) -> int | None:
        """The worst expert, or None for a layer without experts."""
        found = min(self.experts, key=lambda one: badness(one[1]), default=None)
        return None if found is None else found[0]

    @property
    def where(self) -> str:
        """The layer, with the worst expert: ``blocks.0.experts.w1[3]``."""
        return self.layer if self.worst is None else f"{self.layer}[{self.worst}]"


@dataclass(frozen=True)
class FaceRow(_Row):
    """Statistics of one face in one sampled step.

    Attributes:
        step: Number of optimizer steps before it.
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

    @property
    def name(self) -> str:
        return self.operand

    @property
    def told_formats(self) -> str:
        return self.format


@dataclass(frozen=True)
class ProductRow(_Row):
    """Statistics of one product in one sampled step.

    Attributes:
        step: Number of optimizer steps before it.
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

    @property
    def name(self) -> str:
        return self.product

    @property
    def told_formats(self) -> str:
        return " x ".join(self.formats)


Row: TypeAlias = FaceRow | ProductRow


class Sample(NamedTuple):
    """One sampled step.

    Attributes:
        step: Number of optimizer steps before it.
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
        return {
            f"{row.layer}/{row.name}/{k}": v
            for row in (*self.faces, *self.products)
            for k, v in row.statistics.items()
        }


class Measured(NamedTuple):
    """The measurements of one step on the host; ``sizes`` int64 ``[places, faces, 2]`` counts values and blocks."""

    layers: Sequence[Watched]
    order: Sequence[tuple[int, int]]
    unseen: Mapping[tuple[int, str], str]
    numbers: Numbers
    sizes: Tensor


class _Place(NamedTuple):
    """Measurements at one place: a layer, or one expert (-1 if none or unknown)."""

    expert: int
    counts: list[list[int]]
    norms: list[list[float]]
    maxima: list[list[float]]
    sizes: list[list[int]]
    products: list[list[float]]

    def statistics(self, face: int) -> dict[str, float]:
        values, blocks = self.sizes[face]
        numbers = self.counts[face], self.norms[face], self.maxima[face]
        return face_statistics(*numbers, (values, blocks))


def sample_of(step: int, measured: Measured) -> Sample:
    """Return the rows of one sampled step."""
    faces: list[FaceRow] = []
    products: list[ProductRow] = []
    for watched, places, together in _by_layer(measured):
        faces += _face_rows(step, watched, places, together)
        products += _product_rows(step, watched, places, together)
    names = [layer.name for layer in measured.layers]
    order = tuple((names[layer], ".".join(OPERANDS[face])) for layer, face in measured.order)
    seen = {(row.layer, row.product) for row in products}
    unseen: dict[str, str] = {}
    for (layer, gemm), why in measured.unseen.items():
        if (names[layer], gemm) not in seen:
            unseen.setdefault(names[layer], f"{gemm}: {why}")
    return Sample(step, tuple(faces), tuple(products), order, tuple(unseen.items()))


def _by_layer(measured: Measured) -> Iterator[tuple[Watched, list[_Place], _Place]]:
    """Yield each layer that ran with its places, and their sum."""
    numbers, sizes = measured.numbers, measured.sizes
    used = sizes.any(-1).any(-1) | numbers.products.any(-1).any(-1)
    # Experts that were not measured, but whose amax is infinite, are listed, too.
    used |= (numbers.maxima[:, :, 0] == math.inf).any(-1)
    places = used.nonzero().flatten()
    tensors = (*numbers[:3], sizes, numbers.products)
    found = zip(places.tolist(), *(tensor[places].tolist() for tensor in tensors), strict=True)
    layer_of = [layer for layer in measured.layers for _ in range(1 + layer.experts)]
    for number, group in itertools.groupby(found, key=lambda one: layer_of[one[0]].number):
        layer = measured.layers[number]
        own = [_Place(place - layer.place - 1, *rest) for place, *rest in group]
        # maxima are known of experts, too, that were not measured
        yield layer, own, _together(own, numbers.maxima[layer.places]) if layer.experts else own[0]


def _together(places: Sequence[_Place], maxima: Tensor) -> _Place:
    """Return the sums over places, and the largest maxima ``[places, faces, FACE_MAXIMA]``."""

    def summed(name: str) -> Any:
        every = (getattr(place, name) for place in places)
        return [
            [sum(numbers) for numbers in zip(*one, strict=True)] for one in zip(*every, strict=True)
        ]

    largest: list[list[float]] = maxima.amax(0).tolist()
    return _Place(
        -1, summed("counts"), summed("norms"), largest, summed("sizes"), summed("products")
    )


def _face_rows(
    step: int, layer: Watched, places: Sequence[_Place], together: _Place
) -> Iterator[FaceRow]:
    for face, (role, direction) in enumerate(OPERANDS):
        if not together.sizes[face][0]:
            continue
        experts = []
        for place in places:
            if place.expert >= 0 and (place.sizes[face][0] or place.maxima[face][0] == math.inf):
                known = place.statistics(face)
                experts.append((place.expert, math.nan if known["nonfinite"] else known["sqnr"]))
        name, fmt = f"{role}.{direction}", _format(layer.config, role, direction)
        yield FaceRow(step, layer.name, name, fmt, together.statistics(face), tuple(experts))


def _product_rows(
    step: int, layer: Watched, places: Sequence[_Place], together: _Place
) -> Iterator[ProductRow]:
    for number, gemm in enumerate(GEMMS):
        if any(together.products[number]):
            experts = tuple(
                (place.expert, product_statistics(place.products[number])["cosine"])
                for place in places
                if place.expert >= 0 and any(place.products[number])
            )
            statistics = product_statistics(together.products[number])
            yield ProductRow(step, layer.name, gemm, _formats(layer, gemm), statistics, experts)


def badness(number: float) -> float:
    """Return a sort key for SQNRs or cosines, worst first; NaN is worst."""
    return -math.inf if math.isnan(number) else number


def _formats(layer: Watched, gemm: str) -> tuple[str, str]:
    product = next(one for one in PRODUCTS if one.name == gemm)
    left, right = (_format(layer.config, *operand) for operand in (product.left, product.right))
    return left, right


def _format(config: HybridConfig, role: str, direction: str) -> str:
    """Format a face's format, with ", dequantized" if requantized from the rowwise data."""
    quantizer = getattr(config, role)
    fmt = getattr(quantizer, f"{direction}_format")
    if direction == "columnwise" and quantizer.derives_columnwise and fmt.is_identity:
        return f"{quantizer.rowwise_format}, dequantized"
    return str(fmt)
